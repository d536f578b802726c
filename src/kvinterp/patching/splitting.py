"""One prompt along both paths and the lanes that stand between them, so that every difference has one cause.

What a cache changes is the company in which a row is computed: alone when it is decoded, among the whole prefix when the
prefix is recomputed. The recompute path is no fixed truth either: at every step it makes the old rows anew among another
number of rows. So the lanes go from one path to the other and change one thing at a time, on the same tokens:

==============  =============================  ====================================================  ================
lane            K and V of the prompt's rows   K and V of the decoded rows                           the newest row
==============  =============================  ====================================================  ================
``recompute``   of the recompute path, now     of the recompute path, now                            among the prefix
``one_row``     of the recompute path, now     of the recompute path, now                            alone
``old_prompt``  of that path at step 0         of the recompute path, now                            alone
``among``       of that path at step 0         each made at its own step, among the prefix it ended  alone
``as_written``  of that path at step 0         each made at its own step, alone                      alone
``cached``      as the cached path keeps them  as the cached path keeps them                         alone
==============  =============================  ====================================================  ================

The differences from lane to lane are the **parts** (``fresh``, ``prompt``, ``remade``, ``alone``, ``kept``): as vectors they
add up to the whole. ``fresh`` and ``alone`` are what a cache as such contributes; ``prompt`` and ``remade``, together
``anew``, are the recompute path's difference from itself, without a cache. Each part has a **null** in which the same rows are
computed by the recompute path among more rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.models import Adapter, dtype_named
from kvinterp.models.attaching import Site
from kvinterp.models.caches import Dynamic
from kvinterp.patching.patch import stored_sites
from kvinterp.patching.planted import Plant, PlantHook
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.side_by_side import Donor
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.decode import lockstep
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.policies import Identity, Place
from kvinterp.recording import PathHook

DIFFERENCES = {
    "total": ("cached", "recompute"),
    "fresh": ("one_row", "recompute"),
    "prompt": ("old_prompt", "one_row"),
    "remade": ("among", "old_prompt"),
    "anew": ("among", "one_row"),
    "alone": ("as_written", "among"),
    "kept": ("cached", "as_written"),
    "decoded": ("as_written", "old_prompt"),
    "state": ("cached", "one_row"),
    "null": ("longer", "recompute"),
    "null_fresh": ("longer_newest", "recompute"),
    "null_prompt": ("longer_prompt", "one_row"),
    "null_remade": ("longer_remade", "one_row"),
    "null_anew": ("longer_rows", "one_row"),
    "null_alone": ("longer_among", "among"),
}
"""Which two lanes each difference is between. ``decoded`` is remade and alone together, ``state`` all but fresh; each
``null_`` is the same rows computed by the recompute path among more rows, ``null`` the whole path."""

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""K and V of every layer, each ``[1, kv_head, position, head_dim]`` from position 0 on."""


def leading_part(lengths: Mapping[str, float], total: float) -> tuple[str, float]:
    """The part that is longer than all others together, and its share of the lengths.

    Only then can no way of adding the parts up make another one the cause. ``"none"`` where there is no difference,
    ``"spread"`` (with the largest share) where no part is that long.

    Args:
        lengths: L2 length of every part.
        total: L2 length of the whole difference.
    """
    if total == 0:
        return "none", 0.0
    name = max(lengths, key=lambda part: lengths[part])
    share = lengths[name] / sum(lengths.values())
    return (name if share > 0.5 else "spread"), share


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a lane shows at a step.

    Attributes:
        logits: Of the newest row.
        stream: ``resid_post`` of the newest row, layer by layer.
    """

    logits: Float[Tensor, " vocab"]
    stream: Float[Tensor, "layer width"]


class Rows(PathHook):
    """Puts given keys and values in place of those of earlier positions, as attention reads them.

    Args:
        held: What to put there.
        stop: One past the last position to replace; 0 replaces nothing.
        layers: Where; everywhere for None.
    """

    def __init__(self, held: KeysValues = (), stop: int = 0, layers: Collection[int] | None = None) -> None:
        self.held, self.stop, self.layers = held, stop, layers

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Replaces the rows, in the memory where they are: a kernel may add up in another order for other strides.

        They are set anew at every step, so a cache that keeps them in another form than attention reads need not keep them.

        Raises:
            UnsupportedError: The cache does not say which positions it still holds.
        """
        stop = min(self.stop, place.stop)
        if stop <= place.start or (self.layers is not None and place.layer not in self.layers):
            return
        place.check_whole("keys and values")
        for tensor, given in zip((keys, values), self.held[place.layer], strict=True):
            tensor[:, :, : stop - place.start].copy_(given[:, :, place.start : stop])


class _Watched(Donor):
    """What a split sees of one path: the stream, and where it is asked for the K and V that are read.

    Args:
        split: Whose model and prompt.
        path: The path.
        keeps: Whether K and V are.
    """

    def __init__(self, split: Split, path: ExecutionPath, keeps: bool) -> None:
        model = split.adapter.at(dtype_named(path.dtype))
        self.residual, self.kv = split.residual, split.kv if keeps else []
        super().__init__(model, [*self.residual, *itertools.chain(*self.kv)], len(split.prompt))

    def shown(self, logits: Float[Tensor, " vocab"], newest: int | None = None) -> Shown:
        """What the path shows with these logits at a position, the last for None."""
        at = -1 if newest is None else newest
        return Shown(logits.clone(), torch.stack([self.window(*place)[1][0, at] for place in self.residual]))

    def held(self) -> KeysValues:
        """K and V that were read."""
        return [(self.window(*keys)[1], self.window(*values)[1]) for keys, values in self.kv]


class StreamRunner(Runner):
    """A path advanced step by step that shows its logits and its residual stream.

    Args:
        split: Whose model, prompt and plant.
        path: How to run it; the one-row difference is planted in a cached one.
        hooks: More that look in.
        keeps: Whether it shows the K and V that are read, too.
    """

    def __init__(self, split: Split, path: ExecutionPath, hooks: Sequence[PathHook] = (), keeps: bool = False) -> None:
        self.watched = _Watched(split, path, keeps)
        planted = [PlantHook(split.plant)] if split.plant is not None and path.form == "cached" else []
        prompt = torch.tensor([split.prompt], device=split.adapter.device)
        super().__init__(split.adapter, path, prompt, split.room, [*planted, *hooks, self.watched])

    def shows(self, token: Tensor | None) -> Shown:
        """What it shows at the next step, which is fed this token."""
        return self.watched.shown(self.advance(token)[0])


class Split:
    """The lanes of one prompt.

    Args:
        adapter: The model.
        paths: The cached and the recompute path.
        prompt: Token ids.
        room: Most steps.
        suffix: Tokens put behind the prefix for the nulls.
        plant: A difference to plant in the cached path.
        stop: ``"end of sequence"`` or ``"length"``.

    Attributes:
        one_row: The cached path's one-row computation alone: without its policy, its cache's dtype, its chunks and a cache
            that does not give back the very rows, which all belong to ``kept``.
        at_step_0: K and V of the prompt as the recompute path wrote them at step 0.
        now: K and V as the recompute path reads them at this step.
    """

    def __init__(
        self,
        adapter: Adapter,
        paths: tuple[ExecutionPath, ExecutionPath],
        prompt: Sequence[int],
        room: int,
        suffix: int,
        plant: Plant | None,
        stop: str = "end of sequence",
    ) -> None:
        self.adapter, self.prompt, self.room, self.plant = adapter, list(prompt), room, plant
        self.ends = end_tokens(adapter, adapter.device) if stop == "end of sequence" else None
        cached, self.recompute = paths
        self.pure = PureRecompute(adapter, self.recompute)
        # A cache that keeps the very rows keeps them laid out in memory as the cached path's attention reads them.
        keeps = cached.cache if cached.cache.exact else Dynamic()
        self.one_row = dataclasses.replace(
            cached, policy=Identity(), cache_dtype=None, chunk=None, cache=keeps, refresh=None, smooth=None
        )
        self.cached = cached if plant is None else plant.written(cached, len(self.prompt))
        self.filler = (self.prompt * (suffix // len(self.prompt) + 1))[:suffix]
        layers = range(adapter.facts.layers)
        self.residual: list[Site] = [("resid_post", layer) for layer in layers]
        self.kv: list[list[Site]] = [[(site, layer) for site in stored_sites(adapter, "kv")] for layer in layers]
        self.at_step_0: KeysValues = ()
        self.now: KeysValues = ()

    def steps(self) -> Iterator[tuple[int, dict[str, Shown]]]:
        """At every step what each lane of DIFFERENCES shows."""
        nulls = ("longer_prompt", "longer_remade", "longer_rows", "longer_among")
        replaced = {name: Rows() for name in ("as_written", "one_row", "old_prompt", "among", *nulls)}
        prompt = len(self.prompt)
        with contextlib.ExitStack() as stack:

            def lane(path: ExecutionPath, *hooks: PathHook, keeps: bool = False) -> StreamRunner:
                made = StreamRunner(self, path, hooks, keeps)
                stack.enter_context(made)
                return made

            cached, recompute = lane(self.cached), lane(self.recompute, keeps=True)
            one_row = {name: lane(self.one_row, rows) for name, rows in replaced.items()}
            fed: list[int] = []
            among: KeysValues = ()
            longer_among: KeysValues = ()
            for now in lockstep([cached, recompute], self.room, ends=self.ends):
                token, end = now.fed[0], prompt + now.number
                fed += [] if token is None else [int(token)]
                pairs = zip(("cached", "recompute"), (cached, recompute), now.logits, strict=True)
                shown = {name: each.watched.shown(logits[0]) for name, each, logits in pairs}
                self.now = recompute.watched.held()
                shown["longer"], longer = self._forward(fed, self.now, 0, self.filler)
                if token is None:
                    self.at_step_0 = among = longer_among = self.now
                    for each in one_row.values():
                        each.advance()
                    same = [*replaced, "longer_newest"]
                    shown |= dict.fromkeys(same, shown["recompute"])
                else:
                    shown["longer_newest"], _ = self._forward(fed, self.now, end - 1, self.filler)
                    _, prompt_held = self._forward(fed, self.now, prompt, self.filler)
                    given = {
                        "as_written": self.at_step_0,
                        "one_row": self.now,
                        "old_prompt": _joined(self.at_step_0, prompt, self.now, end),
                        "among": among,
                        "longer_prompt": _joined(longer, prompt, self.now, end),
                        "longer_remade": prompt_held,
                        "longer_rows": longer,
                        "longer_among": longer_among,
                    }
                    for name, held in given.items():
                        replaced[name].held, replaced[name].stop = held, end - 1
                    replaced["as_written"].stop = prompt
                    shown |= {name: each.shows(token) for name, each in one_row.items()}
                    # The newest row's K and V, made among the prefix that it ends; in the null among more rows than that.
                    _, made = self._forward(fed, among, end - 1, ())
                    _, longer_made = self._forward(fed, longer_among, end - 1, self.filler)
                    among = _joined(among, end - 1, made, end)
                    longer_among = _joined(longer_among, end - 1, longer_made, end)
                yield now.number, shown

    def _forward(self, fed: Sequence[int], held: KeysValues, stop: int, filler: Sequence[int]) -> tuple[Shown, KeysValues]:
        """The recompute path with some rows held, and more tokens behind the prefix, which a causal model must not see.

        Args:
            fed: Tokens decoded so far.
            held: K and V to hold.
            stop: Of the positions before this one.
            filler: The tokens behind.

        Returns:
            What it shows at the newest position of the prefix, and K and V.
        """
        newest, watched = len(self.prompt) + len(fed) - 1, _Watched(self, self.recompute, True)
        tokens = torch.tensor([[*self.prompt, *fed, *filler]], device=self.adapter.device)
        with torch.no_grad():
            logits = self.pure.whole(tokens, Rows(held, stop), watched)
        return watched.shown(logits[0, newest], newest), watched.held()


def _joined(early: KeysValues, at: int, late: KeysValues, end: int) -> KeysValues:
    """The rows before a position of one, and behind them those up to ``end`` of another."""
    return [
        (torch.cat([k[:, :, :at], keys[:, :, at:end]], 2), torch.cat([v[:, :, :at], values[:, :, at:end]], 2))
        for (k, v), (keys, values) in zip(early, late, strict=True)
    ]
