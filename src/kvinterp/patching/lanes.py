"""What gives tensors to patches and what takes them, as lanes of :func:`kvinterp.paths.decode.lockstep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Site
from kvinterp.models.sites import LAYOUTS
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import ExecutionPath, path_named
from kvinterp.paths.decode import Lane
from kvinterp.recording import PathHook, SiteHook


def two_paths(
    cached: str | ExecutionPath, recompute: str | ExecutionPath, what: str, dtype: str | None = None, calls: bool = False
) -> tuple[ExecutionPath, ExecutionPath]:
    """Both paths by name, checked, and in another dtype where one is given; ``calls`` where the cached one may have a call plan.

    Raises:
        InputError: The first is no cached path, or the second no recompute path in one piece; or one has a call plan.
    """
    paths = path_named(cached), path_named(recompute)
    if paths[0].form != "cached" or paths[1].form != "recompute" or paths[1].chunk is not None:
        raise InputError(
            f"{what} needs a cached and an unchunked recompute path, and {paths[0]} and {paths[1]} were given."
        )
    called = next((path for path in paths[calls:] if path.call is not None), None)
    if called is not None:
        raise InputError(
            f"{what} follows the rows of one prompt by their number, and path {called} was given: leave call out."
        )
    if dtype is None:
        return paths
    return dataclasses.replace(paths[0], dtype=dtype), dataclasses.replace(paths[1], dtype=dtype)


class Donor(SiteHook):
    """Holds what its path shows at this step, whole, for patches to take from.

    Args:
        adapter: The model the donor path runs.
        wanted: Sites and layers to hold.
        prompt_length: Tokens in the prompt that is patched, by which the newest row is counted.
        gather: Sites of which the rows of all steps are kept, so that a cached path can give earlier positions too.
    """

    def __init__(self, adapter: Adapter, wanted: Iterable[Site], prompt_length: int, gather: Collection[str] = ()) -> None:
        super().__init__(adapter, dict.fromkeys(wanted))
        self.prompt_length, self.gather = prompt_length, frozenset(gather)
        self.end = prompt_length
        self._now: dict[Site, Tensor] = {}
        self._gathered: dict[Site, list[Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.end = self.prompt_length + step
        self._now.clear()

    def begin_pass(self) -> None:
        """A forward from position 0 follows: rows gathered before are computed anew."""
        super().begin_pass()
        self._gathered.clear()

    def window(self, site: str, layer: int) -> tuple[int, Tensor]:
        """The tensor of a site at this step and the absolute position of its first row."""
        gathered = self._gathered.get((site, layer))
        tensor = self._now[site, layer] if gathered is None else torch.cat(gathered, 1)
        return self.end - tensor.shape[LAYOUTS[site].rows], tensor

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Holds the tensor; a copy of the cache's, into whose memory a patch may write."""
        self._now[site, layer] = tensor.clone() if LAYOUTS[site].group == "cache" else tensor
        if site in self.gather:
            self._gathered.setdefault((site, layer), []).append(tensor)


class PureLane:
    """A recompute path with patches: a pure function of its tokens, so steps without a patch are looked up.

    Args:
        pure: The path.
        prompt: Token ids.
        hook: The patches, or None for the path as it is.
        captured: The steps at which every block's output is kept for the lanes on the same tokens.
        heard: What hears the forwards of those steps.
    """

    def __init__(
        self,
        pure: PureRecompute,
        prompt: Sequence[int],
        hook: PatchHook | None,
        captured: Collection[int] = (),
        heard: PathHook | None = None,
    ) -> None:
        self.pure, self.tokens, self.hook, self.captured = pure, list(prompt), hook, frozenset(captured)
        self.heard = heard
        self.step = -1

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step."""
        self.step += 1
        if tokens is not None:
            self.tokens.append(self.pure.number(tokens))
        if self.hook is not None and self.hook.active(self.step):
            return self.pure.patched(self.tokens, self.step, self.hook)[None]
        if self.step not in self.captured:
            return self.pure.logits(self.tokens)[None]
        if self.heard is not None:
            self.heard.begin_step(self.step)
            self.heard.begin_pass()
        return self.pure.capture(self.tokens, self.heard)[None]


class Until:
    """A lane that runs as far as it is needed, and then shows what it showed last.

    Args:
        lane: The lane.
        last: The last step at which it is needed.
    """

    def __init__(self, lane: Lane, last: int) -> None:
        self.lane, self.left = lane, last + 1
        self._shown: Tensor | None = None

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step, or of the last that was needed."""
        if self._shown is None or self.left > 0:
            self._shown = self.lane.advance(tokens)
            self.left -= 1
        return self._shown
