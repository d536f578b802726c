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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.result import Result, signed
from kvinterp.comparison.vocabulary import PARTS
from kvinterp.errors import located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.inputs import check_instance, encode
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.decomposition import check_splittable, measured
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.lanes import two_paths
from kvinterp.patching.patch import Patch
from kvinterp.patching.planted import PLACES, Plant
from kvinterp.patching.splitting import KeysValues, Rows, Shown, Split, StreamRunner
from kvinterp.paths import ExecutionPath
from kvinterp.recording import PathHook

PLACES_OF = {"fresh": ("row", "unembedding"), "anew": ("prompt",), "kept": ("kv",)}
"""The places that a part can be made at; there are no decoded rows yet."""
COLUMNS = ["place", "layer", "l2", "share"]


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
        of = f" of {self.provenance['model']}" if self.provenance else ""
        return f"<Cause{of}: part {self.part}, place {self.place}{layer}, share {self.share:.0%}>"

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """The shares of all places, the split as a table of one row, and the rest."""
        found = {name: getattr(self, name) for name in ("part", "place", "layer", "share", "suffix")}
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
        found = {name: summary[name] for name in ("part", "place", "layer", "share", "suffix")}
        (split,) = tables["split"].to_dict("records")
        return cls(**found, table=tables["places"], split=split, provenance=tables["places"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a place and layer: its length and its share."""
        return self.table

    def __str__(self) -> str:
        """Two or three sentences: what makes it, and how long its null is."""
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
    check_splittable(adapter, suffix)
    if plant is not None:
        check_instance("plant", plant, Plant, "a Plant, such as kv.Plant('kv', layer=1), or None")
        plant.check(adapter)
    tokens = encode(adapter, prompt, 2 + suffix)
    paths = two_paths(cached, recompute, "this search", dtype)
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        found = _Search(adapter, paths, tokens, suffix, plant).cause()
    sides = dict(zip(("cached", "recompute"), map(str, paths), strict=True))
    found.provenance = provenance(adapter, paths=sides, plant=None if plant is None else str(plant))
    return found


class _Search:
    def __init__(
        self,
        adapter: Adapter,
        paths: tuple[ExecutionPath, ExecutionPath],
        prompt: Sequence[int],
        suffix: int,
        plant: Plant | None,
    ) -> None:
        self.split, self.suffix = Split(adapter, paths, prompt, 2, suffix, plant, stop="length"), suffix
        self.layers = range(adapter.facts.layers)

    def cause(self) -> Cause:
        (_, first), (_, shown) = self.split.steps()
        row = measured(shown, "step 1")
        self.token = first["cached"].logits.argmax()[None]
        table = pd.DataFrame(columns=COLUMNS)
        if row["most"] != "none":
            table = self._table(shown, {part: row[f"{part}_l2"] for part in PARTS})
        if row["most"] not in PLACES_OF:
            return Cause(row["most"], row["most"], -1, row["share"], table, row, self.suffix)
        sums = table[table["place"].isin(PLACES_OF[row["most"]])].groupby("place")["share"].sum()
        place = str(sums.idxmax())
        here = table[table["place"] == place].sort_values("share")
        layer, share = int(here["layer"].iloc[-1]), float(here["share"].iloc[-1])
        if 2 * share <= sums[place]:
            layer, share = -1, float(sums[place])
        return Cause(row["most"], place, layer, share, table, row, self.suffix)

    def _table(self, shown: dict[str, Shown], lengths: Mapping[str, float]) -> pd.DataFrame:
        """The lengths at every place; those of one part are scaled so that their shares add up to the part's."""
        rows = []
        for part, follow in (("fresh", self._fresh), ("anew", self._anew), ("kept", self._kept)):
            found = follow(shown) if lengths[part] else []
            whole = sum(length for *_, length in found)
            share = lengths[part] / sum(lengths.values())
            rows += [
                {"place": place, "layer": layer, "l2": length, "share": share * length / whole}
                for place, layer, length in found
            ]
        return pd.DataFrame(rows, columns=COLUMNS)

    def _fresh(self, shown: dict[str, Shown]) -> list[tuple[str, int, float]]:
        model = self.split.adapter.at(dtype_named(self.split.one_row.dtype))
        streams = shown["recompute"].stream
        end = len(self.split.prompt) + 1

        def behind(layer: int) -> Shown:
            def window(_: str, at: int) -> tuple[int, Tensor]:
                return end - 1, streams[at][None, None]

            back = PatchHook(model, [Patch("resid_post", (layer,), None, "newest", "first")], window, end - 1)
            return self._second(self.split.one_row, self._rows(self.split.now), back)

        lanes = [shown["one_row"], *map(behind, self.layers), shown["recompute"]]
        places = [*(("row", layer) for layer in self.layers), ("unembedding", -1)]
        return [(*place, apart) for place, apart in zip(places, _apart(lanes), strict=True)]

    def _anew(self, shown: dict[str, Shown]) -> list[tuple[str, int, float]]:
        def with_new(layer: int) -> Shown:
            new = self._rows([*self.split.now[: layer + 1], *self.split.at_step_0[layer + 1 :]])
            return self._second(self.split.one_row, new)

        lanes = [shown["as_written"], *map(with_new, self.layers[:-1]), shown["one_row"]]
        return [("prompt", layer, apart) for layer, apart in enumerate(_apart(lanes))]

    def _kept(self, shown: dict[str, Shown]) -> list[tuple[str, int, float]]:
        def as_written(layer: int) -> Shown:
            return self._second(self.split.cached, self._rows(self.split.at_step_0, range(layer + 1)))

        lanes = [shown["cached"], *map(as_written, self.layers), shown["as_written"]]
        # What is left with all rows of the prompt put back is how the newest row's own K and V are kept.
        return [("kv", layer, apart) for layer, apart in zip([*self.layers, -1], _apart(lanes), strict=True)]

    def _rows(self, held: KeysValues, layers: Sequence[int] | None = None) -> Rows:
        rows = Rows(layers)
        rows.held = held
        return rows

    def _second(self, path: ExecutionPath, rows: Rows, *hooks: PathHook) -> Shown:
        """Step 1 of a lane in which the prompt's rows are replaced."""
        lane = StreamRunner(self.split, path, [rows, *hooks])
        with lane:
            lane.advance()
            rows.stop = len(self.split.prompt)
            return lane.shown(lane.advance(self.token))


def _apart(lanes: Sequence[Shown]) -> list[float]:
    """How far each lane's logits are from the one's before, brought to the host at once."""
    logits = [lane.logits.double() for lane in lanes]
    return torch.stack([(one - other).norm() for one, other in itertools.pairwise(logits)]).tolist()
