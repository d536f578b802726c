"""What a comparison says in a few sentences: each is chosen by the tables, and false of none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvinterp.common.numbers import against, counted, every, machine_of, most, share
from kvinterp.metrics.recovery import ONLY_THE_PREFILL, TO_SEE_A_DIFFERENCE
from kvinterp.study.reading.numbers import typical_said
from kvinterp.study.reading.results import let_go_of, means_of, sites_of

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
        advice = TO_SEE_A_DIFFERENCE if steps["step"].any() else ONLY_THE_PREFILL
        return [f"{head}: {equal}", *(let_go(comparison) or [advice]), *out]
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
    lines = []
    for side, gone, of, prompts in let_go_of(comparison):
        over = f"counted over the layers and KV heads of {counted(prompts, 'prompt')}"
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
    streams = {*sites_of(comparison)} <= _STREAMS
    for table, value, subject, unit, keys in (
        ("layers", "relative_l2", "residual stream" if streams else "recorded tensors", "relative L2 {:.2e}",
         ("site", "layer")),
        ("heads", "kl", f"attention pattern{derived}", "KL {:.2e} nats", ("layer", "head")),
        ("kv_positions", "relative_error", "cache", "relative error {:.2e}", ("tensor", "layer", "kv_head")),
    ):  # fmt: skip
        means = means_of(comparison, table, keys, value)
        verb = "differ" if subject.endswith("s") else "differs"
        if means.empty:
            continue
        if not means.max() > 0:
            lines.append(f"From step 1 on the {subject} {verb} nowhere that was compared.")
            continue
        largest, place = most(means, keys)
        over = " over its vectors" * (table == "kv_positions")
        lines.append(f"From step 1 on the {subject} {verb} most ({unit.format(largest)}) on average{over} at {place}.")
    return lines
