"""What wrote the difference: the paths' logits parted by what the embedding, each attention, each head and each MLP added.

Direct logit attribution (Elhage et al. 2021; TransformerLens's ``logit_attrs``) of the *difference* between two paths. With the
final norm's scale frozen at path a's the logits are linear in the residual stream, and the stream is a sum, so that at every step

    logits_a - logits_b = embed + sum of attn + sum of mlp + additions + scale + softcap + unembedding + residual

where **additions** is what rounding of the sums in the stream left, **scale** what path b's own scale would have made otherwise,
**softcap** what a cap on the logits bends, **unembedding** what the paths' final norm and head computed otherwise than in
float64, and **residual** what the reading itself rounds: transformers computes norms in float32 whatever the dtype, which is
about 1e-7 of the logits; TransformerLens does not. A layer's heads and ``head_rest`` (its output projection in the path's dtype)
add up to its attn in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.comparison.lens import OfTwoPaths, beside, told
from kvinterp.models import Adapter, wrap
from kvinterp.models.answers import answer_pair
from kvinterp.models.inputs import encode_all
from kvinterp.models.unembedding import Unembedding, head_outputs
from kvinterp.paths import ExecutionPath, path_named
from kvinterp.recording import Trace

WRITERS = ("embed", "attn", "mlp")
"""The parts that layers write."""
REST = ("additions", "scale", "softcap", "unembedding", "residual")
"""Those that they do not."""
Vector = tuple[str, int, int, Tensor]
"""A part of the stream: its name, layer and head."""


@dataclasses.dataclass(repr=False)
class LogitAttribution(OfTwoPaths):
    """The difference of the logits, part by part.

    Attributes:
        table: One row an example, step and part: part (embed, attn, mlp, head, head_rest, additions, scale, softcap,
            unembedding, residual, total), layer and head (-1 where there is none), logit_difference (what it adds to how much
            more path a has of the first token's logit less the second's than path b), l2 (its length over the vocabulary),
            token and other (the two tokens).
        provenance: Paths, model and machine, and why it is not parted by head where it is not.
    """

    VERB: ClassVar = "logit-attribution"
    TABLE: ClassVar = "attribution"

    def overview(self) -> pd.DataFrame:
        """One row a part: means over the steps after the prefill."""
        later = self.table[self.table["step"] > 0]
        grouped = later.groupby(["part", "layer", "head"], sort=False)[["logit_difference", "l2"]]
        return grouped.mean().reset_index()


def logit_attribution(
    model: Any,
    prompts: Any,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath = "recompute",
    *,
    max_new_tokens: int = 16,
    answers: Sequence[str | int] | None = None,
) -> LogitAttribution:
    """Parts the difference of two paths' logits by what wrote it, at every step at which both are fed the same.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        a: The path whose greedy tokens both are fed, and whose final norm's scale is held.
        b: The path it is compared with.
        max_new_tokens: Most steps.
        answers: Two answers, whose logits' difference is parted: texts of one token, or ids. Unless given the two largest of
            path a at each step, whose difference is the margin that a flip has to cross.

    Raises:
        InputError: Something given does not fit.
        NonFiniteError: NaN or Inf appeared.
        UnsupportedError: This model does not show what attention and MLPs add, or its logits are not linear behind a scale.

    Example:
        >>> found = kv.logit_attribution(model, prompts, b="cached+int4")  # doctest: +SKIP
        >>> found.table.query("part == 'head'").groupby(["layer", "head"])["l2"].mean().unstack()  # doctest: +SKIP
    """
    adapter, paths = wrap(model), (path_named(a), path_named(b))
    check_whole("max_new_tokens", max_new_tokens)
    pair = None if answers is None else answer_pair(adapter, answers)
    through, last = Unembedding(adapter), adapter.facts.layers - 1
    record = ["blocks.0.hook_resid_pre", f"blocks.{last}.hook_resid_post", "attn_out", "mlp_out"]
    shows_heads = all(adapter.supports("z", layer) for layer in range(last + 1))
    why = "" if shows_heads else f"a model of kind {adapter.kind} does not show z here"
    rows: list[dict[str, Any]] = []
    for example, ids in enumerate(encode_all(adapter, prompts, max_new_tokens)):
        traces = beside(adapter, ids, paths, max_new_tokens, [*record, *["z"] * shows_heads])
        for step in range(len(traces[0].tokens)):
            parts, whole = _parts(adapter, traces, step, not why)
            why = why or whole
            rows += [{"example": example, "step": step, **row} for row in _rows(through, traces, step, parts, pair)]
    return LogitAttribution(pd.DataFrame(rows), {**told(adapter, paths, max_new_tokens=max_new_tokens), "heads": why})


def _apart(traces: tuple[Trace, Trace], site: str, layer: int, step: int) -> Tensor:
    a, b = (trace.records[site, layer][step].double() for trace in traces)
    return a - b


def _parts(adapter: Adapter, traces: tuple[Trace, Trace], step: int, heads: bool) -> tuple[list[Vector], str]:
    """The parts of the difference of the last residual streams, and why there are none of heads where they were asked for."""
    layers = range(adapter.facts.layers)
    parts: list[Vector] = [("embed", -1, -1, _apart(traces, "resid_pre", 0, step))]
    for layer in layers:
        parts += [(name, layer, -1, _apart(traces, f"{name}_out", layer, step)) for name in ("attn", "mlp")]
    gap = _apart(traces, "resid_post", layers[-1], step)
    parts.append(("additions", -1, -1, gap - torch.stack([vector for *_, vector in parts]).sum(0)))
    if not heads:
        return parts, ""
    outputs = head_outputs(adapter, [_apart(traces, "z", layer, step) for layer in layers])
    if outputs is None:
        return parts, "attention's output passes a norm before it is added, and is no sum over its heads"
    for layer, of_heads in enumerate(outputs):
        attention = _apart(traces, "attn_out", layer, step)
        parts += [("head", layer, head, vector.to(attention)) for head, vector in enumerate(of_heads)]
        parts.append(("head_rest", layer, -1, attention - of_heads.sum(0).to(attention)))
    return parts, ""


def _rows(
    through: Unembedding, traces: tuple[Trace, Trace], step: int, parts: list[Vector], pair: tuple[int, int] | None
) -> list[dict[str, Any]]:
    """A row a part: what it adds to the difference of the logits."""
    last = max(layer for _, layer, *_ in parts)
    streams = torch.stack([trace.records["resid_post", last][step].double() for trace in traces])
    a, b = (trace.logits[step].double() for trace in traces if trace.logits is not None)
    first, second = a.topk(2).indices.tolist() if pair is None else pair
    frozen = through.frozen(streams[0])
    found = frozen.parts(torch.stack([vector for *_, vector in parts]))
    uncapped, capped = through.uncapped(streams), through.logits(streams)
    # What path b's own scale makes of its stream otherwise than path a's would.
    scale = frozen.parts(streams[1][None])[0] - (uncapped[1] - frozen.bias)
    whole, total = capped[0] - capped[1], (a - b).to(capped)
    more = {"scale": scale, "softcap": whole - (uncapped[0] - uncapped[1]), "unembedding": total - whole}
    of_layers = found[[at for at, (part, *_) in enumerate(parts) if "head" not in part]]
    more |= {"residual": total - of_layers.sum(0) - torch.stack(list(more.values())).sum(0), "total": total}
    labels = [*((part, layer, head) for part, layer, head, _ in parts), *((name, -1, -1) for name in more)]
    return [
        {
            "part": part, "layer": layer, "head": head, "logit_difference": float(logits[first] - logits[second]),
            "l2": float(logits.norm()), "token": first, "other": second,
        }
        for (part, layer, head), logits in zip(labels, [*found, *more.values()], strict=True)
    ]  # fmt: skip
