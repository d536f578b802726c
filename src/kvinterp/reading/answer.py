"""The box at the top of the report: this run's answer in a few sentences, each chosen by the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.reading.numbers import between, counted, listed, machines_of, number, share, typical_said
from kvinterp.reading.precision import ladder_said
from kvinterp.reading.results import drift_medians, kind_of, leading, model_of, site_of, with_protocol

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.results import Result

__all__ = ["answer_of", "question_of"]


def question_of(results: Sequence[Result]) -> str:
    """What was asked."""
    pairs = {(r.comparison.provenance["paths"]["a"], r.comparison.provenance["paths"]["b"]) for r in results}
    if len(pairs) > 1:
        return f"Do these {len(pairs)} pairs of paths compute the same thing?"
    a, b = next(iter(pairs))
    if (a, b) == ("cached", "recompute"):
        return "Does decoding from the KV cache compute the same thing as recomputing the whole prefix at every step?"
    return f"Does the path {a} compute the same thing as the path {b}?"


def answer_of(main: Sequence[Result], rungs: Mapping[str, Sequence[Comparison]]) -> list[str]:
    """What came out, of how many prompts and on which machine.

    Args:
        main: The results in the dtype in question.
        rungs: The same in other dtypes.
    """
    matched = with_protocol(main, "matched")
    measured = matched or list(main)
    # After a flip of the free protocol the two paths hold different texts, which says nothing of the arithmetic.
    tables = [r.comparison.same_text(r.comparison.steps) for r in measured]
    steps = pd.concat(tables)
    differing = steps[steps["max_abs_logit"] > 0]
    dtype = main[0].comparison.provenance["dtype"]
    own = any("@" in path for r in main for path in r.comparison.provenance["paths"].values())
    where = f"with the weights loaded in {dtype}" if own else f"in {dtype}"
    fed = "fed the same tokens" if matched else "each fed its own tokens, up to any flip"
    if differing.empty:
        said = [
            f"In this run, yes, bit for bit: {where} the two paths, {fed}, gave the same logits at all {len(steps)} steps."
        ]
    else:
        said = [
            f"Not bit for bit: {where} the two paths, {fed}, gave different logits at {len(differing)} of {len(steps)} "
            f"steps ({share(len(differing), len(steps))}), the earliest at step {int(differing['step'].min())}.",
            _size_sentence(measured, tables, float(steps["max_abs_logit"].max())),
            *_where_sentence(measured),
        ]
    return [*said, *_flip_sentence(main), *ladder_said(rungs), *_measured_sentence(main, rungs)]


def _size_sentence(measured: Sequence[Result], tables: Sequence[pd.DataFrame], largest: float) -> str:
    means = [float(table["kl"].mean()) for table in tables if len(table)]
    text = f"The largest difference of any logit was {number(largest)}. The next-token distributions were {between(means)} "
    text += "nats of KL apart on average"
    if len(means) == 1:
        # Prompts of unlike lengths: the interval is that of another mean.
        of_prompts = tables[0].groupby("example")["kl"].mean()
        other = number(float(of_prompts.mean()))
        text += "" if other == number(means[0]) else f" over all steps; the mean of a prompt's own mean is {other}"
        return f"{text} ({typical_said(of_prompts)})."
    varying = [name for name, of in (("model", model_of), ("kind", kind_of)) if len({of(r) for r in measured}) > 1]
    return text + (f", depending on {listed(varying)}." if varying and " to " in between(means) else ".")


def _where_sentence(measured: Sequence[Result]) -> list[str]:
    """Where inside, of those results that recorded the same site."""
    lead = [r for r in leading(measured) if not r.comparison.layers.empty]
    sites = list(dict.fromkeys(site_of(r.comparison) for r in lead))
    said = []
    for site in sites:
        medians = [drift_medians(r.comparison) for r in lead if site_of(r.comparison) == site]
        medians = [median for median in medians if not median.empty]
        moved = [median for median in medians if (median > 0).any()]
        if not moved:
            continue
        first = between([float(median[median > 0].index[0]) for median in moved])
        ends = between([float(median.iloc[-1]) for median in medians])
        still = f" ({len(medians) - len(moved)} of {len(medians)} have none)" if len(moved) < len(medians) else ""
        said.append(
            f"Inside, the median difference of {site}, over prompts and steps, is first above 0 at layer {first}{still} and "
            f"{ends} of its length at the last layer recorded."
        )
    return said


def _flip_sentence(main: Sequence[Result]) -> list[str]:
    examples = pd.concat([r.comparison.examples for r in main])
    # Of both paths, which decide on the same text.
    margins = pd.concat([r.comparison.same_text(r.comparison.steps)[["margin_a", "margin_b"]] for r in main]).min(
        axis=1, skipna=False
    )
    margins = margins[np.isfinite(margins)]
    close = ""
    # A token drawn by lot is not decided by the margin.
    if len(margins) and all(r.comparison.provenance["strategy"] == "greedy" for r in main):
        close = f" The closest decision of either path was won by {number(margins.min())} logits."
    flipped = examples[examples["flip_index"].notna()]
    if flipped.empty:
        return [f"No token changed: in all {len(examples)} decodes both paths chose the same tokens.{close}"]
    return [
        f"In {len(flipped)} of {len(examples)} decodes the paths chose a different token somewhere, the earliest at step "
        f"{int(flipped['flip_index'].min())}.{close}"
    ]


def _measured_sentence(main: Sequence[Result], rungs: Mapping[str, Sequence[Comparison]]) -> list[str]:
    provenances = [r.comparison.provenance for r in main] + [c.provenance for group in rungs.values() for c in group]
    ids = {row for r in main for row in r.comparison.examples["id"]}
    left = sum(len(r.comparison.failures) for r in main)
    out = f" {counted(left, 'prompt')} {'was' if left == 1 else 'were'} left out, see below." if left else ""
    # What a policy, a narrower cache, another dtype or a kernel mode does is no matter of the processor.
    acts = any(
        made in path
        for provenance in provenances
        for path in provenance["paths"].values()
        for made in ("+", "quantized(", "@", "kernels=")
    )
    there = (
        "the numbers can be others"
        if acts
        else "the paths can be equal where they differ here, and differ where they are equal"
    )
    return [
        f"All this is of {counted(len(ids), 'prompt')} on {machines_of(provenances)}.{out} Other processors' kernels add in "
        f"other orders: there {there}.",
        *([TO_SEE_A_DIFFERENCE] if all((r.comparison.steps["max_abs_logit"] == 0).all() for r in main) else []),
    ]
