"""Runs one prompt along both paths and along runs between them, so that every difference has one
cause.

A cache changes how many rows are computed together: a decoded row is computed alone, a recomputed
row among its whole prefix. The recompute path is no fixed reference either: at every step it
computes the old rows again, among another number of rows. So the runs lead from one path to the
other and change one thing at a time, on the same tokens:

==============  =============================  ====================================================  ================
run             K and V of the prompt's rows   K and V of the decoded rows                           the newest row
==============  =============================  ====================================================  ================
``recompute``   of the recompute path, now     of the recompute path, now                            among the prefix
``one_row``     of the recompute path, now     of the recompute path, now                            alone
``old_prompt``  of that path at step 0         of the recompute path, now                            alone
``among``       of that path at step 0         each made at its own step, among the prefix it ended  alone
``as_written``  of that path at step 0         each made at its own step, alone                      alone
``cached``      as the cached path keeps them  as the cached path keeps them                         alone
==============  =============================  ====================================================  ================

The differences from run to run are the **parts** (``newest_row``, ``prompt``, ``decoded_again``,
``decoded_kv``, ``cache_format``): as vectors they add up to the whole. ``newest_row`` and
``decoded_kv`` are the contribution of a cache as such; ``prompt`` and ``decoded_again``, together
``prefix_kv``, are the recompute path's difference from itself, without a cache. Each part has a
**null** in which the recompute path computes the same rows among more rows.
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
from kvinterp.models.attaching import HookPoint
from kvinterp.models.cache_kinds import Dynamic
from kvinterp.patching.patch import stored_sites
from kvinterp.patching.planted import Plant, PlantHook
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.side_by_side import Donor
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.decode import lockstep
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.policies import CacheRows, Identity
from kvinterp.recording import PathHook

DIFFERENCES = {
    "total": ("cached", "recompute"),
    "newest_row": ("one_row", "recompute"),
    "prompt": ("old_prompt", "one_row"),
    "decoded_again": ("among", "old_prompt"),
    "prefix_kv": ("among", "one_row"),
    "decoded_kv": ("as_written", "among"),
    "cache_format": ("cached", "as_written"),
    "decoded": ("as_written", "old_prompt"),
    "state": ("cached", "one_row"),
    "null": ("longer", "recompute"),
    "null_newest_row": ("longer_newest", "recompute"),
    "null_prompt": ("longer_prompt", "one_row"),
    "null_decoded_again": ("longer_remade", "one_row"),
    "null_prefix_kv": ("longer_rows", "one_row"),
    "null_decoded_kv": ("longer_among", "among"),
}
"""The two runs of each difference. ``decoded`` is decoded_again and decoded_kv together, ``state``
all but newest_row. In each ``null_`` the recompute path computes the same rows among more rows;
``null`` is that for the whole path."""

K_V = ("K", "V")
"""What attention reads of a layer's cache."""
KeysValues = Sequence[Sequence[Tensor]]
"""K and V of every layer, each ``[1, kv_head, position, head_dim]`` from position 0 on."""


def leading_part(lengths: Mapping[str, float], total: float) -> tuple[str, float]:
    """Names the part that is longer than all others together, and its share of the lengths.

    Only such a part is the cause however the parts add up as vectors. ``"none"`` if there is no
    difference, ``"spread"`` (with the largest share) if no part is that long.

    Args:
        lengths: L2 length of every part.
        total: L2 length of the whole difference.
    """
    if total == 0:
        return "none", 0.0
    name = max(lengths, key=lengths.__getitem__)
    share = lengths[name] / sum(lengths.values())
    return (name if share > 0.5 else "spread"), share


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a run at one step.

    Attributes:
        logits: Logits of the newest row.
        stream: ``resid_post`` of the newest row, layer by layer.
    """

    logits: Float[Tensor, " vocab"]
    stream: Float[Tensor, "layer width"]


class Rows(PathHook):
    """Replaces the keys and values of earlier positions as attention reads them.

    Args:
        cache: The keys and values that replace them.
        stop: One past the last position to replace; 0 replaces nothing.
        tensors: Which of :data:`K_V` of which layers; all for None.
    """

    def __init__(
        self,
        cache: KeysValues = (),
        stop: int = 0,
        tensors: Collection[tuple[str, int]] | None = None,
    ) -> None:
        self.cache, self.stop, self.tensors = cache, stop, tensors

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        """Writes into the rows' own memory, because for other strides a kernel may add up in
        another order.

        It writes at every step, so a cache that stores rows in another form than attention reads
        need not keep them.

        Raises:
            UnsupportedError: The cache does not say which positions it still holds.
        """
        stop = min(self.stop, cache_rows.stop)
        every = dict(zip(K_V, (keys, values), strict=True))
        asked = [
            name
            for name in every
            if self.tensors is None or (name, cache_rows.layer) in self.tensors
        ]
        if stop <= cache_rows.start or not asked:
            return
        cache_rows.check_whole("keys and values")
        sources = dict(zip(K_V, self.cache[cache_rows.layer], strict=True))
        for name in asked:
            every[name][:, :, : stop - cache_rows.start].copy_(
                sources[name][:, :, cache_rows.start : stop]
            )


class _Observer(Donor):
    """Keeps the residual stream of one path and, if asked, the K and V that attention reads.

    Args:
        split: The split whose model and prompt it is.
        path: The path.
        keeps: Whether K and V are kept.
    """

    def __init__(self, split: Split, path: ExecutionPath, keeps: bool) -> None:
        model = split.adapter.at(dtype_named(path.dtype))
        self.residual, self.kv = split.residual, split.kv if keeps else []
        super().__init__(model, [*self.residual, *itertools.chain(*self.kv)], len(split.prompt))

    def outputs(self, logits: Float[Tensor, " vocab"], newest: int = -1) -> Outputs:
        """The outputs with these logits at a position."""
        return Outputs(
            logits.clone(),
            torch.stack([self.window(*hook_point)[1][0, newest] for hook_point in self.residual]),
        )

    def cache(self) -> KeysValues:
        """K and V that attention read."""
        return [(self.window(*keys)[1], self.window(*values)[1]) for keys, values in self.kv]


class StreamRunner(Runner):
    """Advances a path step by step and gives its logits and its residual stream.

    Args:
        split: The split whose model, prompt and plant it uses.
        path: The path; the plant's one-row difference goes into a cached one.
        hooks: Further hooks.
        keeps: Whether it keeps the K and V that attention reads, too.
    """

    def __init__(
        self, split: Split, path: ExecutionPath, hooks: Sequence[PathHook] = (), keeps: bool = False
    ) -> None:
        self.observer = _Observer(split, path, keeps)
        planted = (
            [PlantHook(split.plant)] if split.plant is not None and path.form == "cached" else []
        )
        prompt = torch.tensor([split.prompt], device=split.adapter.device)
        super().__init__(
            split.adapter, path, prompt, split.max_new_tokens, [*planted, *hooks, self.observer]
        )

    def outputs(self, token: Tensor | None) -> Outputs:
        """Feeds a token and returns the outputs of the step."""
        return self.observer.outputs(self.advance(token)[0])


class Split:
    """The runs of one prompt.

    Args:
        adapter: The model.
        paths: The cached and the recompute path.
        prompt: Token ids.
        max_new_tokens: Most steps.
        suffix: Tokens put after the prefix in the nulls.
        plant: A difference to plant in the cached path.
        stop: ``"end of sequence"`` or ``"length"``.

    Attributes:
        one_row: The cached path's one-row computation alone, without everything that belongs to
            ``cache_format``: its policy, its cache's dtype, its chunks, and a cache that does not
            return the exact rows.
        at_step_0: K and V of the prompt as the recompute path wrote them at step 0.
        now: K and V as the recompute path reads them at this step.
    """

    def __init__(
        self,
        adapter: Adapter,
        paths: tuple[ExecutionPath, ExecutionPath],
        prompt: Sequence[int],
        max_new_tokens: int,
        suffix: int,
        plant: Plant | None,
        stop: str = "end of sequence",
    ) -> None:
        self.adapter, self.prompt, self.max_new_tokens, self.plant = (
            adapter,
            list(prompt),
            max_new_tokens,
            plant,
        )
        self.ends = end_tokens(adapter, adapter.device) if stop == "end of sequence" else None
        cached, self.recompute = paths
        self.pure = PureRecompute(adapter, self.recompute)
        # An exact cache keeps the memory layout that the cached path's attention reads.
        exact = cached.cache if cached.cache.exact else Dynamic()
        self.one_row = dataclasses.replace(
            cached,
            policy=Identity(),
            cache_dtype=None,
            chunk=None,
            cache=exact,
            refresh=None,
            smooth=None,
        )
        self.cached = cached if plant is None else plant.written(cached, len(self.prompt))
        self.filler = torch.tensor(
            (self.prompt * (suffix // len(self.prompt) + 1))[:suffix], device=adapter.device
        )
        layers = range(adapter.facts.layers)
        self.residual: list[HookPoint] = [("resid_post", layer) for layer in layers]
        self.kv: list[list[HookPoint]] = [
            [(site, layer) for site in stored_sites(adapter, "kv")] for layer in layers
        ]
        self.at_step_0: KeysValues = ()
        self.now: KeysValues = ()

    def steps(self) -> Iterator[tuple[int, dict[str, Outputs]]]:
        """Yields each step with the outputs of every run of DIFFERENCES."""
        names = (
            "as_written",
            "one_row",
            "old_prompt",
            "among",
            "longer_prompt",
            "longer_remade",
            "longer_rows",
            "longer_among",
        )
        replaced, prompt = {name: Rows() for name in names}, len(self.prompt)
        with contextlib.ExitStack() as stack:

            def stream_runner(
                path: ExecutionPath, *hooks: PathHook, keeps: bool = False
            ) -> StreamRunner:
                runner = StreamRunner(self, path, hooks, keeps)
                stack.enter_context(runner)
                return runner

            cached, recompute = (
                stream_runner(self.cached),
                stream_runner(self.recompute, keeps=True),
            )
            one_row = {name: stream_runner(self.one_row, rows) for name, rows in replaced.items()}
            fed = [torch.tensor(self.prompt, device=self.adapter.device)]
            among = longer_among = self.now
            for step in lockstep([cached, recompute], self.max_new_tokens, ends=self.ends):
                token, end = step.fed[0], prompt + step.number
                fed += [] if token is None else [token.to(fed[0].device)]
                pairs = zip(("cached", "recompute"), (cached, recompute), step.logits, strict=True)
                outputs = {
                    name: runner.observer.outputs(logits[0]) for name, runner, logits in pairs
                }
                self.now = recompute.observer.cache()
                outputs["longer"], longer = self._forward(fed, self.now, 0, self.filler)
                if token is None:
                    self.at_step_0 = among = longer_among = self.now
                    for runner in one_row.values():
                        runner.advance()
                    outputs |= dict.fromkeys([*replaced, "longer_newest"], outputs["recompute"])
                else:
                    outputs["longer_newest"], _ = self._forward(fed, self.now, end - 1, self.filler)
                    _, longer_remade = self._forward(fed, self.now, prompt, self.filler)
                    caches = {
                        "as_written": self.at_step_0,
                        "one_row": self.now,
                        "old_prompt": _joined(self.at_step_0, prompt, self.now, end),
                        "among": among,
                        "longer_prompt": _joined(longer, prompt, self.now, end),
                        "longer_remade": longer_remade,
                        "longer_rows": longer,
                        "longer_among": longer_among,
                    }
                    for name, cache in caches.items():
                        replaced[name].cache, replaced[name].stop = cache, end - 1
                    replaced["as_written"].stop = prompt
                    outputs |= {name: runner.outputs(token) for name, runner in one_row.items()}
                    # The newest row's K and V, computed among the prefix that it ends, and in the
                    # null among more rows.
                    _, newest = self._forward(fed, among, end - 1, self.filler[:0])
                    _, longer_newest = self._forward(fed, longer_among, end - 1, self.filler)
                    among = _joined(among, end - 1, newest, end)
                    longer_among = _joined(longer_among, end - 1, longer_newest, end)
                yield step.number, outputs

    def _forward(
        self, fed: Sequence[Tensor], cache: KeysValues, stop: int, filler: Tensor
    ) -> tuple[Outputs, KeysValues]:
        """Runs the recompute path with the K and V of some rows replaced and more tokens after the
        prefix.

        Args:
            fed: The prompt and the tokens decoded so far, on the device.
            cache: The K and V that replace those of the first positions.
            stop: One past the last position that is replaced.
            filler: The tokens after the prefix, which a causal model must not see.

        Returns:
            The outputs at the newest position of the prefix, and K and V.
        """
        newest, observer = len(self.prompt) + len(fed) - 2, _Observer(self, self.recompute, True)
        tokens = torch.cat([*fed, filler])[None]
        with torch.no_grad():
            logits = self.pure.whole(tokens, Rows(cache, stop), observer)
        return observer.outputs(logits[0, newest], newest), observer.cache()


def _joined(early: KeysValues, at: int, late: KeysValues, end: int) -> KeysValues:
    """Joins the rows of one cache before a position with those of another from there to ``end``."""
    return [
        [
            torch.cat([first[:, :, :at], then[:, :, at:end]], 2)
            for first, then in zip(*layer, strict=True)
        ]
        for layer in zip(early, late, strict=True)
    ]
