"""A logit lens along two paths: the layer from which their difference shows in token space.

The residual stream behind every layer is read through the model's own final norm and unembedding (nostalgebraist 2020), on both
paths, in float64, so that only the streams differ and not the reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.checks import check_whole
from kvinterp.common.numbers import against, models_of
from kvinterp.common.result import Contents, Result, signed
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.unembedding import Unembedding
from kvinterp.paths import ExecutionPath, path_named, run
from kvinterp.recording import Trace

COLUMNS = (
    *("example", "step", "layer", "kl", "max_abs_logit"),
    *("top_a", "top_b", "text_a", "text_b", "same_top", "kl_to_last"),
)


@dataclasses.dataclass(repr=False)
class LogitLens(Result):
    """The logits that both paths would give if the model ended behind a layer.

    Attributes:
        table: One row an example, step and layer (-1 is what enters the first block, the number of layers the path's own
            logits, in its own dtype): kl (a || b, nats), max_abs_logit, top_a and top_b (token ids), text_a and text_b,
            same_top, and kl_to_last, how far path a's reading at this layer is from that behind its last layer (nats).
        provenance: Paths, model and machine.
    """

    VERB: ClassVar = "logit-lens"

    table: pd.DataFrame
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """Names the model, the paths and the number of steps in one line."""
        steps = len(self.table[["example", "step"]].drop_duplicates())
        return f"<LogitLens of {models_of([self.provenance])}: {against(self.provenance)}, {steps} steps>"

    def written(self) -> Contents:
        """Returns the table with its provenance, and the summary."""
        summary = {"paths": self.provenance["paths"], "provenance": self.provenance}
        return signed({"lens": self.table}, self.provenance), summary

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> LogitLens:
        """Makes a lens of its table."""
        return cls(tables["lens"], tables["lens"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a layer: mean and largest KL over the steps after the prefill, and at how many the top token differs."""
        later = self.table.assign(differs=~self.table["same_top"]).query("step > 0").groupby("layer", as_index=False)
        return later.agg(steps=("kl", "size"), mean_kl=("kl", "mean"), max_kl=("kl", "max"), top_differs=("differs", "sum"))


def logit_lens(
    model: Any,
    prompts: Any,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath = "recompute",
    *,
    max_new_tokens: int = 16,
) -> LogitLens:
    """Reads the residual stream behind every layer as logits, along two paths fed the same tokens.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        a: The path whose greedy tokens both are fed.
        b: The path it is compared with.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.

    Raises:
        InputError: An argument does not fit the model or the others.
        NonFiniteError: NaN or Inf appeared.
        UnsupportedError: This model does not show its residual stream, or has several side by side.

    Example:
        >>> kv.logit_lens(model, prompts, b="cached+int4").overview()  # doctest: +SKIP
    """
    adapter, paths = wrap(model), (path_named(a), path_named(b))
    check_whole("max_new_tokens", max_new_tokens)
    through, tables = Unembedding(adapter), list[pd.DataFrame]()
    record = ["blocks.0.hook_resid_pre", "resid_post"]
    options: dict[str, Any] = {"record": record, "logits": "keep", "max_new_tokens": max_new_tokens}
    places = [("resid_pre", 0), *(("resid_post", layer) for layer in range(adapter.facts.layers))]
    for example, tokens in enumerate(encode_all(adapter, prompts, max_new_tokens)):
        lead = run(adapter, tokens, paths[0], **options)
        follower = run(adapter, tokens, paths[1], continuation=list(lead.tokens[:-1]), stop="length", **options)
        for step in range(len(lead.tokens)):
            logits = [_logits_by_layer(through, trace, places, step) for trace in (lead, follower)]
            tables.append(_table(adapter, *logits).assign(example=example, step=step))
    sides = dict(zip("ab", map(str, paths), strict=True))
    about = provenance(adapter, paths=sides, max_new_tokens=max_new_tokens)
    return LogitLens(pd.concat(tables, ignore_index=True)[[*COLUMNS]], about)


def _logits_by_layer(through: Unembedding, trace: Trace, places: Sequence[tuple[str, int]], step: int) -> Tensor:
    """``[layer, vocab]``: the stream before each layer read as logits, and the path's own logits last."""
    streams = torch.stack([trace.records[place][step].double() for place in places])
    assert trace.logits is not None, "they were asked for"
    logits = through.logits(streams)
    return torch.cat([logits, trace.logits[step][None].to(logits)])


def _table(adapter: Adapter, a: Tensor, b: Tensor) -> pd.DataFrame:
    """Compares two ``[layer, vocab]`` of logits: a row a layer."""
    numbers = {
        "kl": metrics.kl_divergence(a, b),
        "max_abs_logit": (a - b).abs().amax(-1),
        "top_a": a.argmax(-1).double(),
        "top_b": b.argmax(-1).double(),
        "kl_to_last": metrics.kl_divergence(a, a[-2:-1].expand_as(a)),
    }
    # Read at once, because each read waits for the device.
    table = pd.DataFrame(torch.stack([*numbers.values()], 1).cpu().numpy(), columns=[*numbers])
    table = table.astype({"top_a": int, "top_b": int}).assign(layer=range(-1, len(a) - 1))
    texts = {f"text_{side}": adapter.pieces(table[f"top_{side}"].tolist()) for side in "ab"}
    return table.assign(**texts, same_top=table["top_a"] == table["top_b"])
