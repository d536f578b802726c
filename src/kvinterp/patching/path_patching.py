"""Path patching: what a sender brings to a receiver along the residual stream, and by no other way.

Two forwards a path. In the first the sender is patched, and what attention and MLPs between it and the receivers add to the
stream is held at what it was: so the stream that the receivers read differs by the sender's own part. In the second the
receivers are given what they were in the first, and all behind them is computed.

Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1 and appendix B; MLPs are held too, as in Goldowsky-Dill et al. 2023
(arXiv 2304.05969).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from kvinterp.common.checks import check_instance
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener, Site
from kvinterp.models.hook_names import WHOLE
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import LAYOUTS, MLP_SITES
from kvinterp.patching.given import Given
from kvinterp.patching.hook import PatchHook, Window, one_after_the_other
from kvinterp.patching.patch import PATCHED_CACHE, Patch


def receivers_of(adapter: Adapter, given: Any) -> tuple[Patch, ...]:
    """What a user names as the end of a path: a hook's or module's name (at all positions), a Patch without a donor, or several.

    Raises:
        InputError: It is something else, names no layer, or is in the cache.
    """
    several = given if isinstance(given, list | tuple) else (given,)
    made = [Patch(each, positions="all") if isinstance(each, str) else each for each in several]
    check_ends(made)
    for patch in made:
        for layer in chosen_layers(adapter, patch.layers):
            adapter.tap(patch.site, layer)
    return tuple(made)


def check_ends(receivers: Sequence[Any]) -> None:
    """Raises InputError where something cannot end a path: no patch, of no layer, with a donor, or in the cache."""
    for each in receivers:
        check_instance("receiver", each, Patch, "a hook's name such as 'blocks.5.attn.hook_q', a Patch, or a list of them")
        if each.layers is None or each.donor is not None or each.site in PATCHED_CACHE:
            raise InputError(
                f"receiver {each.site!r} cannot end a path: expected a place of one layer, such as "
                "blocks.5.attn.hook_q, without a donor, and k or v in place of the cache."
            )


def path_said(receivers: Sequence[Patch]) -> str:
    """The ends of a path in words."""
    said = []
    for each in receivers:
        layers, heads = (", ".join(map(str, numbers or ())) for numbers in (each.layers, each.heads))
        said.append(f"{each.site} of layer {layers}" + (f", head {heads}" if heads else ""))
    return " and ".join(said)


def reaches(site: str, layers: Iterable[int], receivers: Sequence[Patch]) -> bool:
    """Whether every receiver reads the residual stream behind the place where a sender writes to it."""
    ends = [_point(each.site, at, 0) for each in receivers for at in each.layers or ()]
    return all(_point(site, layer, 1) <= end for layer in layers for end in ends)


def reaching(senders: Sequence[Patch], receivers: Sequence[Patch], every: bool) -> list[Patch]:
    """The senders whose paths there are: of every layer there is those that do, of layers that were named all of them.

    Raises:
        InputError: A sender is not of one layer, or a receiver does not read behind it.
    """
    if not receivers:
        return list(senders)
    reached = [each for each in senders if every and reaches(each.site, each.layers or (), receivers)] or list(senders)
    for sender in reached:
        site, layers = sender.site, sender.layers or ()
        if site in PATCHED_CACHE:
            raise InputError(f"a path begins outside of the cache, and {site!r} was given: take k or v in its place.")
        if len(layers) != 1:
            raise InputError(
                f"a path begins at one layer, and {site!r} of {len(layers)} layers was given: sweep over 'single' or 'heads'."
            )
        if not reaches(site, layers, receivers):
            earlier = any(reaches(site, [layer], receivers) for layer in range(layers[0]))
            raise InputError(
                f"nothing goes along the stream from {site} of layer {layers[0]} to {path_said(receivers)}, which reads it "
                f"before: name a later receiver{' or an earlier layer' if earlier else ''}."
            )
    return reached


def held_between(sender: Patch, receivers: Sequence[Patch]) -> list[Site]:
    """What adds to the stream between a sender and the last receiver."""
    (layer,), ends = sender.layers or (0,), [_point(each.site, at, 0) for each in receivers for at in each.layers or ()]
    first, last = _point(sender.site, layer, 1), max(ends)
    return [
        (site, at)
        for at in range(layer, last // 2 + 1)
        for site in ("attn_out", "mlp_out")
        if first <= _point(site, at, 0) and _point(site, at, 1) <= last
    ]


def _point(site: str, layer: int, side: int) -> int:
    """Where a site reads (side 0) or writes (1) the stream: twice its layer at the block's input, one more before the MLP."""
    stream = {**dict.fromkeys(WHOLE, 0), "resid_pre": 0, "resid_mid": 1, "resid_post": 2}
    return 2 * layer + stream.get(site, side + (site in MLP_SITES))


class Sending(PatchHook):
    """The first forward: the sender's patch, all between held, and what the receivers are then.

    Args:
        adapter: The model.
        sender: What is patched.
        receivers: The ends of the path.
        held: What was there between them, or None where ``window`` gives it.
        window: As of a :class:`PatchHook`.
        prompt_length: As of a :class:`PatchHook`.
    """

    def __init__(
        self,
        adapter: Adapter,
        sender: Patch,
        receivers: Sequence[Patch],
        held: Given | None,
        window: Window | None = None,
        prompt_length: int | None = None,
    ) -> None:
        between = [
            Patch(site, (layer,), None, "all", sender.steps, held) for site, layer in held_between(sender, receivers)
        ]
        super().__init__(adapter, [sender, *between], window, prompt_length)
        self.given: dict[Site, Tensor] = {}
        for place in {(each.site, layer): None for each in receivers for layer in each.layers or ()}:
            before = self.listeners.get(place)
            # A stream is read behind what is put on it; what a part adds is read before it is held.
            both = (before, self._keeping(place)) if place[0].startswith("resid") else (self._keeping(place), before)
            self.listeners[place] = one_after_the_other(*both)
        received = [dataclasses.replace(each, steps=sender.steps) for each in receivers]
        self.receiving = PatchHook(adapter, received, self._window, prompt_length)
        """The second forward."""

    def _keeping(self, place: Site) -> Listener:
        def keep(tensor: Tensor) -> None:
            self.given[place] = tensor.clone()

        return keep

    def _window(self, site: str, layer: int) -> tuple[int, Tensor]:
        tensor = self.given[site, layer]
        rows = tensor.shape[LAYOUTS[site].rows]
        return (self.end or rows) - rows, tensor
