"""Finding what makes the difference at the first decode step, where nothing has accumulated yet.

The cache then holds the prompt's keys and values, written by the same prefill on both paths, and only the newest row is
computed alone. The recompute path has meanwhile made the prompt's rows anew, among one row more. So the difference is that
of :func:`kvinterp.decompose` at step 1, whose parts are here followed into the layers, again lane by lane so that each step
from lane to lane has one cause:

- **fresh**: the residual stream of the recompute path put back behind layer 0, 1, ...: from one to the next the **one-row
  computation** of a layer is what goes, and behind the last there is the **unembedding**;
- **anew**: the prompt's K and V as the recompute path has them now, layer after layer, in place of those it wrote at step 0;
- **kept**: those of step 0 in place of what the cached path keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.numbers import models_of
from kvinterp.common.result import Result, signed
from kvinterp.common.vocabulary import PARTS
from kvinterp.errors import located
from kvinterp.models import dtype_named, wrap
from kvinterp.models.inputs import encode
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.decomposition import check_splittable, measured
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import Patch
from kvinterp.patching.planted import PLACES, Plant
from kvinterp.patching.side_by_side import two_paths
from kvinterp.patching.splitting import KeysValues, Rows, Shown, Split, StreamRunner
from kvinterp.paths import ExecutionPath

PLACES_OF = {"fresh": ("row", "unembedding"), "anew": ("prompt",), "kept": ("kv",)}
"""The places that a part can be made at; there are no decoded rows yet."""
COLUMNS = ["place", "layer", "l2", "share"]
_SAID = ("part", "place", "layer", "share", "suffix")


@dataclasses.dataclass(repr=False)
class Cause(Result):
    """What makes the difference at the first decode step.

    Attributes:
        part: The part of PARTS that is longer than all others together, ``"spread"`` where there is none, ``"none"`` where
            the logits are bitwise equal; as in :func:`kvinterp.decompose`.
        place: Where it is made: one of PLACES, or ``"none"`` or ``"spread"`` as the part.
        layer: The layer that makes more than half of it at that place, or -1.
        share: Share of the L2 lengths of all parts that lies there.
        table: One row a place and layer: its L2 length and its share; the shares of all places add up to 1.
        split: KL and L2 of every part and null at this step, as a row of :attr:`Decomposition.steps`.
        suffix: Tokens behind the prefix in the nulls.
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
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is, in one line; the shares are in ``table``."""
        layer = f", layer {self.layer}" * (self.layer >= 0)
        of = f" of {models_of([self.provenance])}" if self.provenance else ""
        return f"<Cause{of}: part {self.part}, place {self.place}{layer}, share {self.share:.0%}>"

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """The shares of all places, the split as a table of one row, and the rest."""
        found = {name: getattr(self, name) for name in _SAID}
        tables = {"places": self.table, "split": pd.DataFrame([self.split])}
        return signed(tables, self.provenance), {
            **found,
            "reading": str(self).splitlines(),
            "paths": self.provenance["paths"],
            "provenance": self.provenance,
        }

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Cause:
        """The cause as it was written."""
        found = {name: summary[name] for name in _SAID}
        (split,) = tables["split"].to_dict("records")
        return cls(**found, table=tables["places"], split=split, provenance=tables["places"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a place and layer: its length and its share."""
        return self.table

    def __str__(self) -> str:
        """Of which model, and two or three sentences: what makes the difference, and how long its null is."""
        return ": ".join(filter(None, (models_of([self.provenance]), self._said())))

    def _said(self) -> str:
        if self.part == "none":
            return (
                "At the first decode step the paths' logits are bitwise equal. compare(...).where() says from which step on they "
                "differ; with another prompt or dtype they may differ here."
            )
        lengths = {part: self.split[f"{part}_l2"] for part in PARTS}
        if self.part == "spread":
            shares = ", ".join(
                f"{length / sum(lengths.values()):.0%} {PARTS[part]}" for part, length in lengths.items() if length
            )
            return f"At the first decode step no part makes more than half of the difference: {shares}."
        where = PLACES[self.place] if self.layer < 0 else PLACES[self.place].replace("a layer", f"layer {self.layer}")
        if self.layer < 0 and "a layer" in where:
            where = where.replace(" at a layer", "").replace(" of a layer", "") + ", in no single layer"
        said = f"At the first decode step {self.share:.0%} of the difference is made by {where}."
        return " ".join([said, *self._null(lengths[self.part])])

    def _null(self, length: float) -> list[str]:
        if self.part == "kept":
            return []
        null = self.split[f"null_{self.part}_l2"]
        said = f"Null, the same rows among {self.suffix} more and no cache at all: L2 {null:.2g}, here {length:.2g}."
        if self.part == "anew":
            return ["No cache makes it: the cache holds those rows as the recompute path wrote them at step 0.", said]
        return [said] + ["A difference of that size needs no cache."] * (null >= length)


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
    """Names what makes the difference between cached and recompute at the first decode step.

    Args:
        model: A model of any kind, or an adapter.
        prompt: One prompt.
        plant: A difference to plant in the cached path first, to check that it is found.
        cached: The cached path.
        recompute: The recompute path.
        dtype: Compute dtype of both paths instead of their own; float64 leaves nothing but what is planted.
        suffix: Tokens put behind the prefix for the nulls.

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
        found = _cause(Split(adapter, paths, tokens, 2, suffix, plant, stop="length"), suffix)
    sides = dict(zip(("cached", "recompute"), map(str, paths), strict=True))
    found.provenance = provenance(adapter, paths=sides, plant=None if plant is None else str(plant))
    return found


def _cause(split: Split, suffix: int) -> Cause:
    (_, first), (_, shown) = split.steps()
    row = measured(shown, "step 1")
    most, table = row["most"], pd.DataFrame(columns=COLUMNS)
    if most != "none":
        table = _table(split, first["cached"].logits.argmax()[None], shown, {part: row[f"{part}_l2"] for part in PARTS})
    if most not in PLACES_OF:
        return Cause(most, most, -1, row["share"], table, row, suffix)
    sums = table[table["place"].isin(PLACES_OF[most])].groupby("place")["share"].sum()
    place = str(sums.idxmax())
    here = table[table["place"] == place].sort_values("share")
    layer, share = int(here["layer"].iloc[-1]), float(here["share"].iloc[-1])
    if 2 * share <= sums[place]:
        layer, share = -1, float(sums[place])
    return Cause(most, place, layer, share, table, row, suffix)


def _table(split: Split, token: Tensor, shown: Mapping[str, Shown], lengths: Mapping[str, float]) -> pd.DataFrame:
    """The lengths at every place; those of one part are scaled so that their shares add up to the part's."""
    layers, end, streams = range(split.adapter.facts.layers), len(split.prompt) + 1, shown["recompute"].stream
    one_row, now, old = split.one_row, split.now, split.at_step_0
    model = split.adapter.at(dtype_named(one_row.dtype))

    def second(path: ExecutionPath, held: KeysValues, reaching: Collection[int] | None = None, back: int = -1) -> Shown:
        """Step 1 of a lane in which the prompt's rows are replaced, and the stream behind a layer is put back."""
        patches = [] if back < 0 else [Patch("resid_post", (back,), None, "newest", "first")]
        stream = PatchHook(model, patches, lambda _, layer: (end - 1, streams[layer][None, None]), end - 1)
        rows = Rows(held, 0, reaching)
        lane = StreamRunner(split, path, [rows, stream])
        with lane:
            lane.advance()
            rows.stop = end - 1
            return lane.shows(token)

    rows_of, keys_values = [("row", layer) for layer in layers], [("kv", layer) for layer in layers]
    # Of each part the lane it begins at, those between layer by layer, the lane it ends at, and the place of each way between.
    # What is left with all rows of the prompt put back is how the newest row's own K and V are kept.
    ways: list[tuple[str, str, Callable[[int], Shown], str, list[tuple[str, int]]]] = [
        ("fresh", "one_row", lambda layer: second(one_row, now, back=layer), "recompute", [*rows_of, ("unembedding", -1)]),
        (
            "anew",
            "as_written",
            lambda layer: second(one_row, [*now[: layer + 1], *old[layer + 1 :]]),
            "one_row",
            [("prompt", layer) for layer in layers],
        ),
        (
            "kept",
            "cached",
            lambda layer: second(split.cached, old, range(layer + 1)),
            "as_written",
            [*keys_values, ("kv", -1)],
        ),
    ]
    rows = []
    for part, begin, between, end_at, places in ways:
        if lengths[part]:
            lanes = [shown[begin], *map(between, layers[: len(places) - 1]), shown[end_at]]
            logits, share = [lane.logits.double() for lane in lanes], lengths[part] / sum(lengths.values())
            # How far each lane is from the one before, brought to the host at once.
            apart = torch.stack([(one - other).norm() for one, other in itertools.pairwise(logits)]).tolist()
            rows += [
                {"place": place, "layer": layer, "l2": length, "share": share * length / sum(apart)}
                for (place, layer), length in zip(places, apart, strict=True)
            ]
    return pd.DataFrame(rows, columns=COLUMNS)
