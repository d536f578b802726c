"""Steering that means the same with and without a cache: a vector added at positions of the text,
not of a forward.

A hook that adds to the newest row of each forward steers another computation with a cache than
without one: from a cache each token keeps the keys and values that it had when it was steered, and
without one every forward computes the earlier tokens again, unsteered. Here a position is that of
its text, pads not counted, so that each is steered whenever it is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_choice, given_list, whole_number
from kvinterp.common.numbers import counted
from kvinterp.errors import InputError, unexpected
from kvinterp.models import Adapter, wrap
from kvinterp.models.calls import Call, Calls
from kvinterp.models.hook_names import one_site
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import VECTOR_SITES
from kvinterp.patching.around import applied
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import Patch
from kvinterp.recording.generation import text_end

log = logging.getLogger("kvinterp")
CONTEXT = "kv.steer"


@dataclasses.dataclass
class _Text:
    """The texts of one batch while they are written.

    Attributes:
        call: The ``generate()`` that writes them, or None.
        prompt: The columns of the prompts.
        pads: The pads in front of each row.
        begins: The columns that were in a cache before the first forward.
        steered: ``[row, column]``, whether the vector was added there when the column was last
            computed.
        ids: ``[row, column]``, the token ids that were fed; None where none were seen.
        ends: The tokens that end a text.
    """

    call: Call | None
    prompt: int
    pads: Tensor
    begins: int
    steered: Tensor
    ids: Tensor | None = None
    ends: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The columns that were computed."""
        return self.steered.shape[1]

    def positions(self) -> Tensor:
        """The position of each column in its own text, ``[row, column]``; negative at pads."""
        return torch.arange(self.end) - self.pads[:, None]

    def own(self) -> Tensor:
        """``[row, column]``: whether a column is of its row's text, neither a pad nor fed after the
        text had ended.
        """
        real = self.positions() >= 0
        known = [self.ids] if self.call is None else [self.call.output, self.ids]
        ids = next((ids for ids in known if ids is not None and ids.shape[1] >= self.end), None)
        if ids is None or self.call is None or len(ids) != len(real):
            return real
        stops = torch.tensor(
            [text_end(row, self.prompt, self.end, self.ends) for row in ids.tolist()]
        )
        return real & (torch.arange(self.end) < stops[:, None])


class Steering:
    """Where a vector was added, while a text was written; :func:`steer` makes it.

    Attributes:
        site: The site.
        layers: The layers.
    """

    def __init__(
        self, adapter: Adapter, site: str, layers: tuple[int, ...], vector: Tensor, positions: Any
    ) -> None:
        self.site, self.layers = site, layers
        self._vector, self._named = vector, positions
        self._calls, self._texts, self._ends = (
            Calls(adapter),
            list[_Text](),
            tuple(adapter.end_tokens),
        )
        self._step = -1
        self.hook: PatchHook | None = None

    @property
    def steered(self) -> int:
        """At how many positions the vector was added, over all texts."""
        return sum(int((text.steered & text.own()).sum()) for text in self._texts)

    @property
    def computed(self) -> int:
        """How many positions of texts were computed: pads, and what rows were fed that had ended,
        are not counted.
        """
        return sum(int(text.own()[:, text.begins :].sum()) for text in self._texts)

    def where(self) -> list[list[int]]:
        """The positions of each text at which the vector was added, in the order of the rows."""
        return [
            positions[mask].tolist()
            for text in self._texts
            for positions, mask in zip(text.positions(), text.steered & text.own(), strict=True)
        ]

    def __str__(self) -> str:
        """Says at how many positions of how many the vector was added."""
        prompt, generated = list[tuple[int, int]](), list[tuple[int, int]]()
        for text in self._texts:
            real = text.own()
            steered = text.steered & real
            real[:, : text.begins] = False
            for part, columns in (
                (prompt, slice(None, text.prompt)),
                (generated, slice(text.prompt, None)),
            ):
                part.append((int(steered[:, columns].sum()), int(real[:, columns].sum())))
        shares = (
            f"{sum(a for a, _ in part)} of {sum(b for _, b in part)}"
            for part in (prompt, generated)
        )
        count = sum(len(text.steered) for text in self._texts)
        layers = ", ".join(map(str, self.layers))
        last = "; the last token of a text is never fed" * any(
            text.call is not None for text in self._texts
        )
        return (
            f"{self.site} of layer {layers} was steered at {self.steered} of {counted(self.computed, 'position')} of "
            f"{counted(count, 'text')} ({'{} of the prompt, {} generated'.format(*shares)}{last})."
        )

    def __repr__(self) -> str:
        """Says it in brackets."""
        return f"<Steering: {self}>"

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Listens to the calls of the model, which tell a prompt from what is generated, while the
        context lasts.
        """
        return self._calls.watching()

    def add(self, activation: Tensor) -> Tensor:
        """Adds the vector to the rows that are named; what :class:`Patch` calls as a function of
        the activation.
        """
        assert self.hook is not None
        width = tuple(activation.shape[-self._vector.dim() :])
        if width != tuple(self._vector.shape) or self._vector.dim() > activation.dim() - 2:
            raise InputError(
                f"a vector of shape {tuple(self._vector.shape)} was given for {self.site}, whose rows have the shape "
                f"{tuple(activation.shape[2:])}: give that shape, or its last axis."
            )
        rows, end = activation.shape[1], self.hook.end
        text = self._text(activation.shape[0], end - rows, end)
        end = text.end
        wanted = self._wanted(text)[:, end - rows : end]
        text.steered[:, end - rows : end] = wanted
        where = wanted.to(activation.device).reshape(*wanted.shape, *[1] * (activation.dim() - 2))
        return torch.where(where, activation + self._vector.to(activation), activation)

    def _text(self, batch: int, start: int, end: int) -> _Text:
        """The texts that a forward goes on with, grown to its columns; new ones where it begins
        them.
        """
        assert self.hook is not None
        text, call = (self._texts[-1] if self._texts else None), self._calls.call
        if self.hook.step == self._step and text is not None:
            return text  # Another layer of the same forward.
        self._step = self.hook.step
        # Without a cache a forward computes the text so far again, and a token more.
        if text is not None and (text.call is not call or len(text.steered) != batch):
            text = None
        if text is not None and call is not None and not start and end < text.end:
            # A generate() goes on with a cache that took no row: its next columns all the same.
            start, end = text.end, text.end + end
        grows = text is not None and (end == text.end + 1 or (call is not None and end > text.end))
        if text is None or not (0 < start <= text.end if start else grows):
            prompt = (call.prompt_length if call is not None else 0) or start or end
            pads = self._pads(batch, prompt)
            ends = self._ends if call is None or call.ends is None else call.ends
            text = _Text(
                call, prompt, pads, start, torch.zeros(batch, start, dtype=torch.bool), ends=ends
            )
            self._texts.append(text)
        text.ids = self._calls.fed(text.ids, start, end - start)
        text.steered = torch.cat(
            [text.steered[:, :end], torch.zeros(batch, max(end - text.end, 0), dtype=torch.bool)], 1
        )
        return text

    def _pads(self, batch: int, prompt: int) -> Tensor:
        mask = self._calls.call.mask if self._calls.call is not None else None
        mask = self._calls.mask if mask is None else mask
        if mask is None:
            return torch.zeros(batch, dtype=torch.long)
        pads = (~mask[:, :prompt].bool()).sum(1).cpu()
        # Several texts of each prompt lie side by side.
        return (
            pads.repeat_interleave(batch // len(pads))
            if batch % len(pads) == 0
            else pads.new_zeros(batch)
        )

    def _wanted(self, text: _Text) -> Tensor:
        positions, columns = text.positions(), torch.arange(text.end)
        if isinstance(self._named, str):
            named = {
                "all": columns >= 0,
                "prompt": columns < text.prompt,
                "generated": columns >= text.prompt,
            }[self._named]
            return named & (positions >= 0)
        return torch.isin(positions, torch.tensor(self._named))

    def warn(self) -> None:
        """Warns of positions that are named and were not steered.

        Raises:
            InputError: None was.
        """
        if not self.steered:
            longest = max((int(text.positions().max()) + 1 for text in self._texts), default=0)
            raise InputError(
                f"{CONTEXT} added nothing: positions={self._named!r} were named, and the longest text in it has {longest} "
                f"positions (the last token of a generated text is never fed): name some of these, or open {CONTEXT} around the "
                "forwards that compute them."
            )
        for text in self._texts:
            if not text.begins:
                continue
            missed = torch.where(
                self._wanted(text)[:, : text.begins], text.positions()[:, : text.begins], -1
            )
            missed = missed[missed >= 0].unique().tolist()
            if missed:
                log.warning(
                    "%s: %s not steered: a cache held them before %s was opened; without a cache they would be, so that "
                    "use_cache changes the text. Open it around the forward of the prompt too",
                    CONTEXT, _listed(missed), CONTEXT,
                )  # fmt: skip
        if isinstance(self._named, str):
            return
        length = max(int(text.positions().max()) + 1 for text in self._texts)
        beyond = [position for position in self._named if position >= length]
        if beyond:
            log.warning(
                "%s: %s not steered: no text has so many positions; the longest has %d",
                CONTEXT,
                _listed(beyond),
                length,
            )


def _listed(positions: Sequence[int]) -> str:
    """Positions as a sentence's subject, with its verb."""
    if len(positions) == 1:
        return f"position {positions[0]} was"
    if list(positions) == list(range(positions[0], positions[-1] + 1)):
        return f"positions {positions[0]} to {positions[-1]} were"
    return f"positions {', '.join(map(str, positions[:8]))}{', ...' * (len(positions) > 8)} were"


@contextlib.contextmanager
def steer(
    model: Any,
    vector: Float[Tensor, "*head width"] | Any,
    layer: int | Sequence[int] | None = None,
    positions: words.TextPositions | str | int | Sequence[int] = "all",
    site: words.PatchSite | str = "resid_post",
) -> Iterator[Steering]:
    """Adds a vector at positions of the text in the forwards inside the ``with`` block, the same
    with and without a cache.

    Positions are those of each text: pads are not counted, and each position is steered whenever it
    is computed, by the prefill, in chunks, by a decode step, or again by a forward without a cache.
    So ``generate`` gives the same tokens either way, up to rounding.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        vector: What is added, of the width of the site, or ``[head, head_dim]`` for q, k, v and z.
        layer: A layer or several; it may be left out if ``site`` is a hook's name, which says it.
        positions: ``"all"``, ``"prompt"``, ``"generated"`` (tokens that were written and fed), or
            numbers from 0. The prompt is that of the ``generate()`` which runs; where none does, it
            is what the first forward was fed.
        site: The site, or a hook by TransformerLens's name; one with a vector at each position.

    Yields:
        A :class:`Steering`, whose text says at how many of how many positions the vector was added.

    Raises:
        InputError: The vector does not fit, something given does not exist, or nothing was steered
            until the end.

    The logger ``kvinterp`` warns of named positions that were not steered, because a cache held
    them before or because no text is so long.

    Example:
        >>> with kvinterp.steer(model, direction, layer=3, positions="generated") as steering:  # doctest: +SKIP
        ...     text = model.generate(tokens, max_new_tokens=20)
        >>> print(steering)  # doctest: +SKIP
    """
    adapter = wrap(model)
    site, layers = one_site(adapter, site, layer)
    if site not in VECTOR_SITES:
        raise InputError(
            f"site={site!r} has no vector at each position: expected one of {', '.join(VECTOR_SITES)}."
        )
    if layers is None:
        raise InputError("no layer was given: give layer=..., such as layer=3.")
    chosen = chosen_layers(adapter, layers)
    steering = Steering(adapter, site, chosen, _vector(vector), _positions(positions))
    patches = [Patch(site, (number,), positions="all", donor=steering.add) for number in chosen]
    with steering.watching(), applied(adapter, patches, CONTEXT) as (steering.hook, _):
        yield steering
    steering.warn()


def _vector(vector: Any) -> Tensor:
    tensor = torch.as_tensor(vector).detach()
    if (
        not tensor.is_floating_point()
        or tensor.dim() not in (1, 2)
        or not bool(tensor.isfinite().all())
    ):
        raise InputError(
            f"a vector of shape {tuple(tensor.shape)} and {tensor.dtype} was given: expected finite real numbers, [width] or "
            "[head, head_dim]."
        )
    return tensor


def _positions(positions: Any) -> Any:
    if isinstance(positions, str):
        check_choice("positions", positions, words.TextPositions)
        return positions
    expected = "'all', 'prompt', 'generated', or positions from 0, such as 5 or [5, 6]"
    items: list[Any] = (
        [positions]
        if whole_number(positions) is not None
        else given_list("positions", positions, expected)
    )
    numbers = [whole_number(item) for item in items]
    if not numbers or any(number is None or number < 0 for number in numbers):
        raise unexpected("positions", positions, expected)
    return sorted({number for number in numbers if number is not None})
