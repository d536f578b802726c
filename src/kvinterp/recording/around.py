"""Attaches a recorder to the user's own forwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import wrap
from kvinterp.models.calls import Call, Calls
from kvinterp.models.hooks import LAST
from kvinterp.models.inputs import leading_pads
from kvinterp.models.passes import Passes, WatchesPasses
from kvinterp.models.provenance import provenance
from kvinterp.recording.generation import Generation, Pass, Stitched, ended, pads_in
from kvinterp.recording.recorder import Recorder

CONTEXT = "kv.record"


@contextlib.contextmanager
def record(
    model: Any,
    sites: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool],
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    positions: words.Positions | str | int = "newest",
) -> Iterator[Recorder]:
    """Records the forwards that run inside the ``with`` block; each pass through the model's blocks is one step.

    Passes are counted where the model computes, not where it is called: ``model(...)``, ``model.forward(...)``, ``generate``
    (a step a forward, whatever it decodes with), ``run_with_hooks``, ``run_with_cache`` and a decoder inside the model all
    count. A forward that an error or an interruption cuts off is no step, and nothing of it is kept.

    The recorder sees the tensors that the model goes on with: its hooks run after all patches and after the user's own hooks
    that are on the same module when the forward begins, in whichever order they were opened.

    Cache sites are read from the cache that the user's forward used or made.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        sites: As for :class:`Recorder`.
        layers: As for :class:`Recorder`.
        heads: As for :class:`Recorder`.
        kv_heads: As for :class:`Recorder`.
        positions: As for :class:`Recorder`.

    Yields:
        The recorder; ``recorder["resid_post", 3]`` is a tensor, with several forwards stacked; ``.kept`` has each. With
        ``positions="all"``, ``.texts()`` has the texts that the forwards computed, each with its activations by position.

    Raises:
        InputError: No forward ran in the block, or one did not run a layer that is recorded.
        UnsupportedError: The model cannot give a site, or a part of it is compiled.

    Example:
        >>> with kvinterp.record(model, "resid_post,pattern") as recorder:  # doctest: +SKIP
        ...     model(tokens)
        >>> recorder["pattern", 0].shape  # doctest: +SKIP
    """
    recorder = Recording(wrap(model), sites, layers, heads, kv_heads, None, positions)
    with recorder.listening():
        yield recorder


@dataclasses.dataclass
class _Batch:
    """The passes that computed one batch of texts.

    Attributes:
        begins: The columns that a cache held before the first of them.
        prompt_length: The columns of the prompts, pads among them.
        mask: ``[batch, column]`` of the prompts, 0 at pads; None where nothing was masked.
        calls: The ``generate()`` calls that ran them.
        passes: The columns of each.
        numbers: The number of each among all that were recorded.
        ids: ``[batch, column]``, the token ids that were fed; None where none were seen.
    """

    begins: int
    prompt_length: int
    mask: Tensor | None
    calls: list[Call] = dataclasses.field(default_factory=list)
    passes: list[Pass] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    ids: Tensor | None = None

    @property
    def end(self) -> int:
        """The columns that were fed."""
        return self.passes[-1].stop


class Recording(Recorder, WatchesPasses):
    """A recorder whose steps are the passes of a user's forwards; made by :func:`record`."""

    logits = "discard"
    context = CONTEXT

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks the model while the context lasts; raises InputError where it heard nothing."""
        self._calls = Calls(self.adapter, self.logits)
        self._batches: list[_Batch] = []
        self._now = (0, 0)
        self._passes = passes = Passes(self.adapter, self, self.context, self.places)
        listeners = {place: [listener] for place, listener in self.listeners.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.adapter.attached(self.places, LAST))
            stack.enter_context(self.adapter.listening(listeners, LAST))
            stack.enter_context(passes.watching())
            stack.enter_context(self._calls.watching())
            yield
        if passes.silent:
            raise InputError(f"{self.context} heard nothing: {passes.silence()}")

    def texts(self, output: Tensor | None = None, mask: Tensor | None = None) -> list[Generation]:
        """Returns the texts that were computed, each with the activations of the run that computed it, without pads.

        Args:
            output: ``[batch, column]``, what ``generate`` returned, where it was not seen: the last token is never fed.
            mask: ``[batch, column]``, 0 at pads, where neither ``generate`` nor the forwards were given one of two dimensions.

        Raises:
            InputError: Only newest positions were recorded, no token ids were seen, or a cache held a part of a text before.
            UnsupportedError: Rows are padded elsewhere than in front.
        """
        if self.positions != "all":
            raise InputError(
                f"positions={self.positions!r} was recorded: open kv.record(..., positions='all') for whole texts."
            )
        about = provenance(self.adapter)
        return [text for batch in self._batches for text in self._texts_of(batch, output, mask, about)]

    def _texts_of(
        self, batch: _Batch, output: Tensor | None, mask: Tensor | None, about: dict[str, Any]
    ) -> Iterator[Generation]:
        if batch.begins:
            raise InputError(
                f"a cache held {batch.begins} positions before {self.context} was opened, of which nothing was seen: open it "
                "around the forward of the prompt too."
            )
        ids = batch.ids
        for known in (output, *(call.output for call in batch.calls)):
            if known is not None and known.shape[1] >= batch.end:
                ids = known
        if ids is None:
            raise InputError("no token ids were seen, since embeddings were fed: give texts(output), the ids of the texts.")
        masks = (mask, *(call.mask for call in batch.calls), batch.mask)
        seen = next((given for given in masks if given is not None), None)
        prompts = ids[:, : batch.prompt_length]
        pads = leading_pads(self.adapter, prompts) if seen is None else pads_in(seen[:, : batch.prompt_length])
        ends = set(self.adapter.end_tokens).union(*(call.ends for call in batch.calls))
        unread = self._passes.rows.unread
        path = "cached" if len(batch.passes) == 1 or any(here.start for here in batch.passes) else "recompute"
        for row, tokens in enumerate(ids.tolist()):
            begin, cut = pads[row], batch.prompt_length
            count = ended(tokens[cut:], tuple(ends))
            # A row that ended before the others was fed fillers, and its end token, which alone it would not have been.
            stop = min(cut + count - 1, batch.end) if count < len(tokens) - cut else batch.end
            generated = tuple(tokens[cut : cut + count])
            yield Generation(
                prompt=tuple(tokens[begin:cut]),
                tokens=generated,
                records=Stitched(self._pieces_of(batch), list(self.kept), batch.passes, row, (begin, stop)),
                positions=tuple(range(stop - begin)),
                path=path if unread is None else f"{path}, not read: {unread.where}",
                logits=self._logits_of(batch, row, len(generated)) if self.logits == "keep" else None,
                heads=self.heads,
                kv_heads=self.kv_heads,
                derived=self.derived,
                adapter=self.adapter,
                provenance=about,
            )

    def _pieces_of(self, batch: _Batch) -> Callable[[tuple[str, int]], list[Tensor]]:
        return lambda place: [self.kept[place][number] for number in batch.numbers]

    def _logits_of(self, batch: _Batch, row: int, count: int) -> Tensor:
        """The newest logits of the pass before each generated token."""
        logits = self._calls.newest_logits
        at = {here.stop: number for here, number in zip(batch.passes, batch.numbers, strict=True)}
        wanted = range(batch.prompt_length, batch.prompt_length + count)
        if len(logits) != len(self.recorded_steps) or not all(column in at for column in wanted):
            raise UnsupportedError(
                "the logits of some tokens were not seen: a forward decided several tokens, or ran the blocks alone."
            )
        return torch.stack([logits[at[column]][row] for column in wanted])

    def pass_begins(self, new: int, cached: int) -> None:
        """Begins a step."""
        self._now = cached, new
        self.begin_step(len(self.recorded_steps))
        self.begin_pass()

    def block_ends(self, layer: int, cache: Any) -> None:
        """Reads the cache sites that no hook shows."""
        for site in self._reads.get(layer, ()):
            tensor = self.adapter.read_cache(site, layer, cache)
            if tensor is None:
                raise InputError(
                    f"site {site!r} was asked for, but this forward used no cache that holds it: call the model with "
                    f"a cache ({self.adapter.cache_name}=..., or use_cache=True)."
                )
            self._show(site, layer, 0, tensor)

    def pass_ends(self, ran: Sequence[int]) -> None:
        """Ends the step, if it showed every recorded site."""
        missing = [place for place in self.kept if place not in self._pieces]
        if missing:
            self.pass_cut()
            raise InputError(self._error(*missing[0], ran))
        self.end_step()
        self._note_columns(*self._now)

    def _note_columns(self, cached: int, new: int) -> None:
        """Notes which columns of which batch the pass computed."""
        batch = self._batches[-1] if self._batches else None
        call, mask, stop = self._calls.call, self._calls.mask, cached + new
        ids = self._calls.fed(None if batch is None else batch.ids, cached, new)
        if batch is not None and not cached:
            # Without a cache a forward computes the text so far again, and a token more.
            known = batch.ids is not None and ids is not None and ids.shape[0] == batch.ids.shape[0]
            same = known and torch.equal(ids[:, : batch.end], batch.ids)  # type: ignore[index,arg-type]
            same = same if ids is not None else call is not None and call in batch.calls
            batch = batch if same and stop > batch.end else None
        if batch is None:
            length = call.prompt_length if call is not None else 0
            batch = _Batch(cached, length or stop, mask)
            self._batches.append(batch)
        if call is not None and call not in batch.calls:
            batch.calls.append(call)
        first = batch.end if batch.passes and not cached else cached
        batch.passes.append(Pass(cached, stop, first))
        batch.numbers.append(len(self.recorded_steps) - 1)
        batch.ids = ids

    def pass_cut(self) -> None:
        """Forgets the step."""
        if self._on:
            self.recorded_steps.pop()
        self._pieces = {}
        self._on = False

    def pass_undone(self) -> None:
        """Forgets the newest step."""
        self.recorded_steps.pop()
        batch = self._batches[-1]
        batch.passes.pop()
        batch.numbers.pop()
        if not batch.passes:
            self._batches.pop()
        for tensors in self.kept.values():
            tensors.pop()

    def _error(self, site: str, layer: int, ran: Sequence[int]) -> str:
        """Says why a forward did not show a site."""
        name = self.adapter.facts.name
        if layer in ran:
            return (
                f"a forward of {name} ran layer {layer} and did not show its {site!r}: that part of the model was replaced after "
                "kv.record was opened (its attention by AttentionInterface.register, say), or torch.compile compiled it before, "
                "so that it runs no hooks: replace it before, and run the model uncompiled."
            )
        return (
            f"{site!r} of layer {layer} was asked for, and a forward of {name} ran the layers {ran[0]} to {ran[-1]} only: leave "
            f"out what stops it there, or ask for those, layers=range({ran[0]}, {ran[-1] + 1})."
        )
