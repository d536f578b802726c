"""Finds the cause of the difference at the first decode step, where nothing has accumulated yet.

At that step the cache holds the prompt's keys and values, written by the same prefill on both
paths, and only the newest row is computed alone. The recompute path computes the prompt's rows
again, among one row more. So the difference is that of :func:`kvinterp.decompose` at step 1. Here
its parts are followed into the layers, again run by run, so that each pair of runs differs in
one cause:

- **newest_row**: the residual stream of the recompute path is put back after layer 0, 1, ...: two
  neighbouring runs differ in the **one-row computation** of one layer, and the last two in the
  **unembedding**;
- **prefix_kv**: the prompt's K and V that the recompute path has now, layer by layer, instead of
  those it wrote at step 0;
- **cache_format**: the K of step 0 instead of that which the cached path keeps, then its V, layer
  by layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.numbers import models_of
from kvinterp.common.result import Contents, Result, signed
from kvinterp.common.vocabulary import PARTS
from kvinterp.errors import located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.inputs import encode
from kvinterp.models.provenance import autocast, provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.decomposition import check_splittable, step_rows
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import Patch
from kvinterp.patching.planted import PLACES, Plant
from kvinterp.patching.side_by_side import two_paths
from kvinterp.patching.splitting import K_V, KeysValues, Outputs, Rows, Split, StreamRunner
from kvinterp.paths import ExecutionPath

PLACES_OF = {
    "newest_row": ("row", "unembedding"),
    "prefix_kv": ("prompt",),
    "cache_format": ("kv",),
}
"""The places that can cause a part; there are no decoded rows yet."""
COLUMNS = ["place", "layer", "tensor", "l2", "share"]
_SUMMARISED = ("part", "place", "layer", "tensor", "share", "suffix")


@dataclasses.dataclass(repr=False)
class Cause(Result):
    """The cause of the difference at the first decode step.

    Attributes:
        part: The part of PARTS that is longer than all others together; ``"spread"`` if there is
            none, ``"none"`` if the logits are bitwise equal, as in :func:`kvinterp.decompose`.
        place: The place of the cause: one of PLACES, or ``"none"`` or ``"spread"`` as the part.
        layer: The layer that causes more than half of it at that place, or -1.
        share: The share of the L2 lengths of all parts that this place and layer cause.
        table: One row a place, layer and tensor: its L2 length and its share; the shares of all
            places add up to 1.
        split: KL and L2 of every part and null at this step, as a row of
            :attr:`Decomposition.steps`.
        suffix: Tokens after the prefix in the nulls.
        tensor: Where K and V as the cached path keeps them are the place: ``"K"`` or ``"V"`` if
            that alone causes more than half of the share, else empty.
        provenance: Paths, plant, model and machine.
    """

    VERB: ClassVar = "localise"

    part: str
    place: str
    layer: int
    share: float
    table: pd.DataFrame
    split: Mapping[str, Any]
    suffix: int
    tensor: str = ""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """Names the cause in one line; the shares are in ``table``."""
        layer = f", layer {self.layer}" * (self.layer >= 0)
        model = f" of {models_of([self.provenance])}" if self.provenance else ""
        return (
            f"<Cause{model}: part {self.part}, place {self.place}{layer}, share {self.share:.0%}>"
        )

    def written(self) -> Contents:
        """Returns the shares of all places and the split as tables, and the summary."""
        tables = {"places": self.table, "split": pd.DataFrame([self.split])}
        return signed(tables, self.provenance), {
            **{name: getattr(self, name) for name in _SUMMARISED},
            "reading": str(self).splitlines(),
            "paths": self.provenance["paths"],
            "provenance": self.provenance,
        }

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Cause:
        """Makes a cause of its tables and summary."""
        fields = {name: summary[name] for name in _SUMMARISED}
        (split,) = tables["split"].to_dict("records")
        return cls(**fields, table=tables["places"], split=split, provenance=tables["places"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a place and layer: its length and its share."""
        return self.table

    def __str__(self) -> str:
        """Names the model and says in two or three sentences what causes the difference and how
        long its null is.
        """
        return ": ".join(filter(None, (models_of([self.provenance]), self._sentences())))

    def _sentences(self) -> str:
        if self.part == "none":
            return (
                "At the first decode step the paths' logits are bitwise equal. compare(...).where() says from which step on they "
                "differ; with another prompt or dtype they may differ here."
            )
        lengths = {part: self.split[f"{part}_l2"] for part in PARTS}
        if self.part == "spread":
            shares = ", ".join(
                f"{length / sum(lengths.values()):.0%} {PARTS[part]}"
                for part, length in lengths.items()
                if length
            )
            return f"At the first decode step no part makes more than half of the difference: {shares}."
        where = (
            PLACES[self.place]
            if self.layer < 0
            else PLACES[self.place].replace("a layer", f"layer {self.layer}")
        )
        if self.layer < 0 and "a layer" in where:
            where = (
                where.replace(" at a layer", "").replace(" of a layer", "") + ", in no single layer"
            )
        if self.tensor:
            of_tensor = self.table[
                (self.table["place"] == self.place) & (self.table["tensor"] == self.tensor)
            ]
            alone = of_tensor.loc[
                of_tensor["layer"].eq(self.layer) | (self.layer < 0), "share"
            ].sum()
            where += f", most of it ({alone:.0%}) by {self.tensor}"
        sentence = (
            f"At the first decode step {self.share:.0%} of the difference is made by {where}."
        )
        return " ".join([sentence, *self._null_sentences(lengths[self.part])])

    def _null_sentences(self, length: float) -> list[str]:
        if self.part == "cache_format":
            return []
        null = self.split[f"null_{self.part}_l2"]
        sentence = f"Null, the same rows among {self.suffix} more and no cache at all: L2 {null:.2g}, here {length:.2g}."
        if self.part == "prefix_kv":
            return [
                "No cache makes it: the cache holds those rows as the recompute path wrote them at step 0.",
                sentence,
            ]
        return [sentence] + ["A difference of that size needs no cache."] * (null >= length)


def localise(
    model: Any,
    prompt: Any,
    plant: Plant | None = None,
    *,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    dtype: str | None = None,
    suffix: int = 8,
) -> Cause:
    """Finds the cause of the difference between cached and recompute at the first decode step.

    Args:
        model: A model of any kind, or an adapter.
        prompt: One prompt.
        plant: A difference to plant in the cached path first, to check that it is found.
        cached: The cached path.
        recompute: The recompute path.
        dtype: Compute dtype of both paths instead of their own; in float64 only a planted
            difference is left.
        suffix: Tokens put after the prefix in the nulls.

    Returns:
        The part and the place, by the L2 distance of the logits.

    Raises:
        InputError: The plant's layer does not exist, or the prompt does not fit.
        NonFiniteError: NaN or Inf appeared in the logits.
        UnsupportedError: The model keeps more than keys and values (Mamba, Gated DeltaNet).
    """
    adapter = wrap(model)
    check_splittable(adapter, suffix, plant)
    tokens = encode(adapter, prompt, 2 + suffix)
    paths = two_paths(cached, recompute, "this search", dtype)
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        cause = _cause(Split(adapter, paths, tokens, 2, suffix, plant, stop="length"), suffix)
    sides = dict(zip(("cached", "recompute"), map(str, paths), strict=True))
    cause.provenance = provenance(adapter, paths=sides, plant=None if plant is None else str(plant))
    return cause


def planted_controls(adapter: Adapter, prompt: Sequence[int], example: int) -> list[dict[str, Any]]:
    """Plants a difference in each kind of place and reports where :func:`localise` finds it, once a
    model: controls of a sweep.

    The planted difference is far larger than float64's rounding, so the place found depends on the
    model and not on the prompt. Later sweeps reuse the result, with example -1 if it came from
    another prompt.
    """

    def localise_plants() -> tuple[list[int], list[Any]]:
        middle = adapter.facts.layers // 2
        plants = (Plant("kv", middle), Plant("row", middle), Plant("unembedding"))
        return list(prompt), [
            (plant, localise(adapter, list(prompt), plant, dtype="float64")) for plant in plants
        ]

    planted_in, causes = adapter.checked_once(localise_plants, "plants", autocast(adapter.device))
    checks = []
    for plant, cause in causes:
        right = cause.place == plant.place and (
            plant.place == "unembedding" or cause.layer == plant.layer
        )
        where = {
            "site": cause.place,
            "layer": cause.layer,
            "recovery": cause.share if right else float("nan"),
        }
        number = example if planted_in == list(prompt) else -1
        checks.append({"control": f"planted {plant.place}", **where, "example": number})
    return checks


def _cause(split: Split, suffix: int) -> Cause:
    (_, first), (_, outputs) = split.steps()
    row, _ = step_rows(outputs, "step 1")
    most, lengths = row["most"], {part: row[f"{part}_l2"] for part in PARTS}
    table = _table(split, first["cached"].logits.argmax()[None], outputs, lengths)
    if most not in PLACES_OF:
        return Cause(most, most, -1, row["share"], table, row, suffix)
    sums = table[table["place"].isin(PLACES_OF[most])].groupby("place")["share"].sum()
    place = str(sums.idxmax())
    by_layer = table[table["place"] == place].groupby("layer")["share"].sum()
    layer, share = int(by_layer.idxmax()), float(by_layer.max())
    if 2 * share <= sums[place]:
        layer, share = -1, float(sums[place])
    found = table[(table["place"] == place) & ((layer < 0) | (table["layer"] == layer))]
    by_tensor = found.groupby("tensor")["share"].sum()
    tensor = str(by_tensor.idxmax())
    return Cause(
        most,
        place,
        layer,
        share,
        table,
        row,
        suffix,
        tensor if 2 * by_tensor[tensor] > share else "",
    )


def _table(
    split: Split, token: Tensor, outputs: Mapping[str, Outputs], lengths: Mapping[str, float]
) -> pd.DataFrame:
    """The lengths at every place, scaled so that the shares of one part's places add up to the
    part's share.
    """
    layers, end, streams = (
        range(split.adapter.facts.layers),
        len(split.prompt) + 1,
        outputs["recompute"].stream,
    )
    one_row, now, old = split.one_row, split.now, split.at_step_0
    model = split.adapter.at(dtype_named(one_row.dtype))

    def step_1(
        path: ExecutionPath,
        cache: KeysValues,
        tensors: Collection[tuple[str, int]] | None = None,
        *patches: Patch,
    ) -> Outputs:
        """Step 1 of a run with the prompt's K and V replaced and the recompute path's stream put
        back by patches.
        """
        stream = PatchHook(
            model, patches, lambda _, layer: (end - 1, streams[layer][None, None]), end - 1
        )
        rows = Rows(cache, 0, tensors)
        runner = StreamRunner(split, path, [rows, stream])
        with runner:
            runner.advance()
            rows.stop = end - 1
            return runner.outputs(token)

    stored = [*itertools.product(layers, K_V)]
    # For each part its first run, its last one, and the run between in which all places up to one
    # are as in the last.
    chains: dict[str, tuple[str, str, Callable[[int], Outputs]]] = {
        "newest_row": (
            "one_row",
            "recompute",
            lambda layer: step_1(one_row, now, None, Patch("resid_post", (layer,), steps="first")),
        ),
        "prefix_kv": (
            "as_written",
            "one_row",
            lambda layer: step_1(one_row, [*now[: layer + 1], *old[layer + 1 :]]),
        ),
        "cache_format": (
            "cached",
            "as_written",
            lambda n: step_1(
                split.cached, old, {(tensor, layer) for layer, tensor in stored[: n + 1]}
            ),
        ),
    }
    rows = []
    for part, (first, last, between) in chains.items():
        if lengths[part]:
            # The places that each pair of neighbours differs in. The last pair of "cache_format"
            # has all rows of the prompt put back, so it differs in the K and V of the newest row.
            places = [
                (PLACES_OF[part][0], *of)
                for of in (stored if part == "cache_format" else [(layer, "") for layer in layers])
            ]
            places += [] if part == "prefix_kv" else [(PLACES_OF[part][-1], -1, "")]
            chain = [outputs[first], *map(between, range(len(places) - 1)), outputs[last]]
            logits, share = (
                [each.logits.double() for each in chain],
                lengths[part] / sum(lengths.values()),
            )
            distances = torch.stack(
                [(a - b).norm() for a, b in itertools.pairwise(logits)]
            ).tolist()
            rows += [
                dict(zip(COLUMNS, (*place, length, share * length / sum(distances)), strict=True))
                for place, length in zip(places, distances, strict=True)
            ]
    return pd.DataFrame(rows, columns=COLUMNS)
