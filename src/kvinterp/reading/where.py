"""What a comparison says in a few sentences: each is chosen by the tables, and false of none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.metrics.statistics import mean_error
from kvinterp.reading.numbers import against, counted, every, machine_of, most, share, typical_said

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison

_STREAMS = {"resid_pre", "resid_mid", "resid_post"}


def where(comparison: Comparison) -> list[str]:
    """Whether the paths differ, when, and in which layer, head and cache position most, a sentence each.

    In the free protocol the numbers are those of the steps at which both paths hold the same text; what comes after a flip
    is told apart.
    """
    steps, provenance = comparison.steps, comparison.provenance
    setting = ", ".join(provenance[name] for name in ("kind", "dtype", "protocol"))
    head = f"{against(provenance)} on {provenance['model']} ({setting})"
    left = len(comparison.failures)
    out = [f"{counted(left, 'prompt')} {'is' if left == 1 else 'are'} left out; see failures."] if left else []
    if steps.empty:
        return [f"{head}: no prompt could be compared.", *out]
    same = comparison.same_text(steps)
    count = steps["example"].nunique()
    differing, machine = same[same["max_abs_logit"] > 0], machine_of(provenance)
    if differing.empty and len(same) == len(steps) and not same["flipped"].any():
        equal = f"bitwise equal at {every(len(steps), 'step')} of {counted(count, 'prompt')}, on {machine}."
        return [f"{head}: {equal}", *(let_go(comparison) or [TO_SEE_A_DIFFERENCE]), *out]
    after = steps.drop(same.index)
    flips = int(steps.groupby("example")["flipped"].any().sum())
    split = not after.empty
    if differing.empty:
        first = f"the logits are bitwise equal at {every(len(same), 'step')}" + " up to the flip" * split
    else:
        first = f"logits differ at {len(differing)} of {len(same)} steps" + " up to the flip" * split
        first += f", the earliest step {int(differing['step'].min())}"
    of_prompts = same.groupby("example")["kl"].mean()
    kl = f"{same['kl'].mean():.2e} nats"
    if split:
        kl += f" up to the flip and {after['kl'].mean():.2e} nats after it, where the two texts differ"
    lines = [
        f"{head}: {first}; mean KL {kl}; largest logit difference {same['max_abs_logit'].max():.3g}"
        f"{' up to the flip' * split}; {flips} of {counted(count, 'prompt')} flip{'s' * (count == 1)} a token.",
        *out,
        f"Mean KL of a prompt{' up to its flip' * split}: {of_prompts.mean():.2e} nats; "
        f"{typical_said(of_prompts, written='{:.2e}'.format)}.",
    ]
    measured = f"Measured on {machine}; other kernels add in other orders, so other numbers are to be expected there."
    return [*lines, *_places(comparison), *let_go(comparison), measured]


def let_go(comparison: Comparison) -> list[str]:
    """How many rows of the cache each path had let go of by the last step, of those whose policy lets go of rows."""
    rows, lines = comparison.kv_steps, []
    last = rows[rows["step"] == rows.groupby("example")["step"].transform("max")]
    last = last[last["tensor"] == last["tensor"].min()]
    context = last["example"].map(comparison.examples.set_index("example")["prompt_tokens"]) + last["step"]
    for side in comparison.provenance.get("lets_go", ()) if len(last) else ():
        gone, of = int(last[f"let_go_{side}"].sum()), int(context.sum())
        over = f"counted over the layers and KV heads of {counted(last['example'].nunique(), 'prompt')}"
        said = (
            f"had let go of {share(gone, of)} of its rows by the last step ({gone} of {of}, {over}); K and V are compared on the "
            "rows that both paths hold."
            if gone
            else f"let go of no row by the last step: it had room for all {of}, {over}."
        )
        lines.append(f"{comparison.provenance['paths'][side]} {said}")
    return lines


def _places(comparison: Comparison) -> list[str]:
    """In which layer, head and cache position the paths differ most."""
    lines = []
    derived = " (derived beside the kernel)" * ("pattern" in comparison.derived)
    streams = set(comparison.layers["site"]) <= _STREAMS
    for frame, value, subject, unit, keys in (
        (comparison.layers, "relative_l2", "residual stream" if streams else "recorded tensors", "relative L2 {:.2e}",
         ("site", "layer")),
        (comparison.heads, "kl", f"attention pattern{derived}", "KL {:.2e} nats", ("layer", "head")),
        (comparison.kv_positions, "relative_error", "cache", "relative error {:.2e}", ("tensor", "layer", "kv_head")),
    ):  # fmt: skip
        # Step 0 is the prefill's on both paths; what is summed over steps leaves it out.
        frame = comparison.same_text(frame)
        frame = frame[frame["step"] > 0] if "step" in frame else frame
        verb = "differ" if subject.endswith("s") else "differs"
        if frame.empty:
            continue
        if not frame[value].max() > 0:
            lines.append(f"From step 1 on the {subject} {verb} nowhere that was compared.")
            continue
        largest, place = most(_means(frame, value, keys), keys)
        over = " over its vectors" * ("vectors" in frame)
        lines.append(f"From step 1 on the {subject} {verb} most ({unit.format(largest)}) on average{over} at {place}.")
    return lines


def _means(frame: pd.DataFrame, value: str, keys: tuple[str, ...]) -> pd.Series:
    return mean_error(frame, keys, value) if "vectors" in frame else frame.groupby(list(keys))[value].mean()
