"""What is said of a logit lens along both paths, and of what wrote the difference of their logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.reading.numbers import against, counted, machine_of, number
from kvinterp.reading.results import only


def said_of_lens(overview: pd.DataFrame, provenance: Mapping[str, Any]) -> list[str]:
    """What a lens found; ``overview`` has a row a layer."""
    measured = f"Measured on {machine_of(provenance)}; both are read in float64, through the model's own final norm."
    if overview.empty:
        return ["No step was decoded after the prefill: there is nothing to compare.", measured]
    layers, final = overview.iloc[1:-1], overview.iloc[-1]
    of = f"{against(provenance)}, over {counted(int(final['steps']), 'decode step')}"
    first = layers[layers["max_kl"] > 0]
    if first.empty:
        return [f"{of}: read as logits the streams are equal behind every layer.", TO_SEE_A_DIFFERENCE, measured]
    most = layers.loc[layers["mean_kl"].idxmax()]
    lines = [
        f"{of}: read as logits the residual stream differs first behind layer {int(first['layer'].iloc[0])}, and most behind "
        f"layer {int(most['layer'])} (mean KL {number(most['mean_kl'])} nats); behind the last it is "
        f"{number(layers['mean_kl'].iloc[-1])} nats, and of the paths' own logits {number(final['mean_kl'])}."
    ]
    flips = layers[layers["top_differs"] > 0]
    if flips.empty:
        lines.append("The token read is the same on both paths behind every layer, at every step.")
    else:
        lines.append(
            f"The token read differs behind {counted(len(flips), 'layer')}, first behind layer {int(flips['layer'].iloc[0])}; "
            f"behind the last layer at {counted(int(layers['top_differs'].iloc[-1]), 'step')}."
        )
    return [*lines, measured]


def said_of_attribution(overview: pd.DataFrame, provenance: Mapping[str, Any]) -> list[str]:
    """What wrote the difference; ``overview`` has a row a part."""
    measured = f"Measured on {machine_of(provenance)}; the final norm's scale is that of {provenance['paths']['a']}."
    total, of = only(overview, part="total")["l2"], against(provenance)
    if total.empty:
        return [f"{of}: no step was decoded after the prefill, so there is nothing to part.", measured]
    if not float(total.iloc[0]) > 0:
        equal = f"{of}: the logits are equal at every decode step, so nothing wrote a difference."
        return [equal, TO_SEE_A_DIFFERENCE, measured]
    written = overview[overview["part"].isin(("embed", "attn", "mlp"))]
    most = written.loc[written["l2"].idxmax()]
    where = "the embedding" if most["part"] == "embed" else f"{_NAMES[most['part']]} of layer {int(most['layer'])}"
    lines = [
        f"{of}: of the logits' difference (L2 {number(float(total.iloc[0]))} on average) the longest part is written by {where}, "
        f"L2 {number(most['l2'])}; parts can undo each other, so their lengths need not add up."
    ]
    heads = only(overview, part="head")
    if provenance.get("heads"):
        lines.append(f"Not parted by head: {provenance['heads']}.")
    elif len(heads) and float(heads["l2"].max()) > 0:
        best = heads.loc[heads["l2"].idxmax()]
        lines.append(
            f"Of all heads layer {int(best['layer'])}, head {int(best['head'])} writes the longest part, L2 {number(best['l2'])}."
        )
    left = overview.set_index("part")["l2"]
    parts = ("additions", "scale", "softcap", "unembedding", "residual")
    rest = ", ".join(f"{name} {number(left[name])}" for name in parts if name in left)
    return [*lines, f"What no layer wrote, by L2: {rest}.", measured]


_NAMES = {"attn": "attention", "mlp": "the MLP"}
