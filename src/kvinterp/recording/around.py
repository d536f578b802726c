"""Attaches a recorder to the user's own forwards."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter, wrap
from kvinterp.models.attaching import HookPoint
from kvinterp.models.calls import Call, Calls
from kvinterp.models.hook_names import Names
from kvinterp.models.hooks import LAST
from kvinterp.models.inputs import leading_pads
from kvinterp.models.passes import Passes, WatchesPasses
from kvinterp.models.sites import CACHE_POSITIONS, CACHE_SITES, LAYOUTS
from kvinterp.recording.generation import Generation, Pass, Stitched, ended, pads_in, text_end
from kvinterp.recording.parts import PART, Packing, Parts
from kvinterp.recording.recorder import Recorder
from kvinterp.recording.windows import Window, window_of

CONTEXT = "kv.record"


@contextlib.contextmanager
def record(
    model: Any,
    sites: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool],
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    positions: words.Positions | str | int | Sequence[int] = "newest",
    into: str | os.PathLike[str] | None = None,
) -> Iterator[Recording]:
    """Records the forwards that run inside the ``with`` block; each pass through the model's blocks
    is one step.

    Passes are counted where the model computes, not where it is called: ``model(...)``,
    ``model.forward(...)``, ``generate`` (a step a forward, whatever it decodes with),
    ``run_with_hooks``, ``run_with_cache`` and a decoder inside the model all count. A forward that
    an error or an interruption cuts off is no step, and nothing of it is kept.

    The recorder sees the tensors that the model goes on with: its hooks run after all patches and
    after the user's own hooks that are on the same module when the forward begins, in whichever
    order they were opened.

    Cache sites are read from the cache that the user's forward used or made.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        sites: As for :class:`Recorder`.
        layers: As for :class:`Recorder`.
        heads: As for :class:`Recorder`.
        kv_heads: As for :class:`Recorder`.
        positions: ``"newest"`` (of each forward) or ``"all"``; or a part of each text, for
            ``.texts()``: ``"generated"``, ``"last(64)"``, ``"every(16)"``, ``"around(4, 13)"`` (at
            most 4 positions from a token with the id 13; several ids may follow), or a list of
            positions in the text.
        into: An empty folder in which what was recorded is kept in parts, for texts that do not fit
            into memory; ``.texts()`` reads from there. Default: in memory.

    Yields:
        The recorder; ``recorder["resid_post", 3]`` is a tensor, with several forwards stacked;
        ``.kept`` has each. With ``positions="all"``, ``.texts()`` has the texts that the forwards
        computed, each with its activations by position.

    Raises:
        InputError: No forward ran in the block, or one did not run a layer that is recorded.
        UnsupportedError: The model cannot give a site, or a part of it is compiled.

    Example:
        >>> with kvinterp.record(model, "resid_post,pattern") as recorder:  # doctest: +SKIP
        ...     model(tokens)
        >>> recorder["pattern", 0].shape  # doctest: +SKIP
    """
    recorder = Recording(wrap(model), sites, layers, heads, kv_heads, positions, into)
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
    pads: tuple[int, ...] = (0,)
    """The pads in front of each row, as they were known when the window was laid."""
    empty: dict[HookPoint, Tensor] = dataclasses.field(default_factory=dict)
    """What stands for each pass that has left the window: no rows."""

    @property
    def end(self) -> int:
        """The columns that were fed."""
        return self.passes[-1].stop


_ON_DISK = torch.empty(0)
"""Stands where a tensor was that lies on disk now."""


class _Pieces(Sequence[Tensor]):
    """What the passes of a batch showed of one hook point, in memory or on disk."""

    def __init__(
        self,
        kept: Sequence[Tensor],
        parts: Parts | None,
        hook_point: HookPoint,
        numbers: Sequence[int],
    ) -> None:
        self._kept, self._parts, self._hook_point, self._numbers = kept, parts, hook_point, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        number = self._numbers[at]
        if self._parts is not None and number in self._parts:
            return self._parts.read(self._hook_point, number)
        return self._kept[number]


class Recording(Recorder, WatchesPasses):
    """A recorder whose steps are the passes of a user's forwards; made by :func:`record`."""

    logits = "discard"
    context = CONTEXT

    def __init__(
        self,
        adapter: Adapter,
        sites: Names,
        layers: Iterable[int] | int | None = None,
        heads: Iterable[int] | None = None,
        kv_heads: Iterable[int] | None = None,
        positions: Any = "newest",
        into: str | os.PathLike[str] | None = None,
    ) -> None:
        self.window = window_of(positions)
        self._parts = None if into is None else Parts(into)
        self._packing = Packing()
        self._columns: tuple[int, ...] | None = None
        self._pads: tuple[int, ...] = (0,)
        self._held = self._gone = self._written = 0
        if self._parts is not None and self.window is None:
            raise InputError(
                "into= was given with the newest position of each forward, which fits into memory: leave it out."
            )
        super().__init__(
            adapter,
            sites,
            layers,
            heads,
            kv_heads,
            None,
            "newest" if self.window is None else "all",
        )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks the model while the context lasts; raises InputError where it heard nothing."""
        self._calls = Calls(self.adapter, self.logits)
        self._batches: list[_Batch] = []
        self._now = (0, 0)
        self._passes = passes = Passes(self.adapter, self, self.context, self.hook_points)
        listeners = {hook_point: [listener] for hook_point, listener in self.listeners.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.adapter.attached(self.hook_points, LAST))
            stack.enter_context(self.adapter.listening(listeners, LAST))
            stack.enter_context(passes.watching())
            stack.enter_context(self._calls.watching())
            yield
        if passes.silent:
            raise InputError(f"{self.context} heard nothing: {passes.silence()}")

    def texts(self, output: Any = None, mask: Tensor | None = None) -> list[Generation]:
        """Returns the texts that were computed, each with the activations of the run that computed
        it, without pads. What follows the first prompt counts as generated, the prompt of a second
        turn too.

        Args:
            output: ``[batch, column]``, what ``generate`` returned, or its object with
                ``sequences``, where it was not seen: the last token is never fed.
            mask: ``[batch, column]``, 0 at pads, where neither ``generate`` nor the forwards were
                given one of two dimensions.

        Raises:
            InputError: Only newest positions were recorded, no token ids were seen, or a cache held
                a part of a text before.
            UnsupportedError: Rows are padded elsewhere than in front, or are the beams of a search.
        """
        output = getattr(output, "sequences", output)
        if self.positions != "all":
            raise InputError(
                f"positions={self.positions!r} was recorded: open kv.record(..., positions='all') for whole texts."
            )
        return [text for batch in self._batches for text in self._texts_of(batch, output, mask)]

    def _texts_of(
        self, batch: _Batch, output: Tensor | None, mask: Tensor | None
    ) -> Iterator[Generation]:
        if batch.begins:
            raise InputError(
                f"a cache held {batch.begins} positions before {self.context} was opened, of which nothing was seen: open it "
                "around the forward of the prompt too."
            )
        beams = max((call.beams for call in batch.calls), default=1)
        if beams > 1:
            raise UnsupportedError(
                f"generate() searched with {beams} beams, whose rows change places at every step: what was recorded are rows "
                "and no texts. Generate with num_beams=1; several texts of a prompt can be sampled with num_return_sequences."
            )
        ids = batch.ids
        for known in (output, *(call.output for call in batch.calls)):
            if known is not None and known.shape[1] >= batch.end:
                ids = known
        if ids is None:
            raise InputError(
                "no token ids were seen, since embeddings were fed: give texts(output), the ids of the texts."
            )
        masks = (mask, *(call.mask for call in batch.calls), batch.mask)
        seen = next((given for given in masks if given is not None), None)
        prompts = ids[:, : batch.prompt_length]
        pads = (
            leading_pads(self.adapter, prompts)
            if seen is None
            else pads_in(seen[:, : batch.prompt_length])
        )
        # A prompt of which several texts are written has one mask and as many rows.
        pads = [row for row in pads for _ in range(max(len(ids) // len(pads), 1))]
        ends = self._ends(batch)
        unread = self._passes.rows.unread
        path = (
            "cached"
            if len(batch.passes) == 1 or any(here.start for here in batch.passes)
            else "recompute"
        )
        for row, tokens in enumerate(ids.tolist()):
            begin, cut = pads[row], batch.prompt_length
            generated = tuple(tokens[cut : cut + ended(tokens[cut:], ends)])
            stop = text_end(tokens, cut, batch.end, ends)
            text = tokens[: cut + len(generated)]
            chosen = self._chosen(batch, pads, begin, stop, text)
            columns = range(begin, stop) if chosen is None else chosen
            yield Generation(
                prompt=tuple(tokens[begin:cut]),
                tokens=generated,
                records=Stitched(
                    self._pieces_of(batch),
                    list(self.kept),
                    batch.passes,
                    row,
                    (begin, stop),
                    chosen,
                ),
                positions=tuple(column - begin for column in columns),
                path=path if unread is None else f"{path}, not read: {unread.where}",
                logits=self._logits_of(batch, row, len(generated))
                if self.logits == "keep"
                else None,
                heads=self.heads,
                kv_heads=self.kv_heads,
                derived=self.derived,
                adapter=self.adapter,
            )

    def _ends(self, batch: _Batch) -> tuple[int, ...]:
        """The tokens that end the texts of a batch."""
        own = self.adapter.end_tokens
        told = [own if call.ends is None else call.ends for call in batch.calls] or [own]
        return tuple(set().union(*told))

    def _chosen(
        self, batch: _Batch, pads: Sequence[int], begin: int, stop: int, tokens: Sequence[int]
    ) -> list[int] | None:
        """The columns of a row, with these tokens, that the window holds."""
        window = self.window
        if window is None or window.kind == "all":
            return None
        if window.kind in ("every", "given") and not {*pads} <= {*batch.pads}:
            raise UnsupportedError(
                f"positions were chosen by number, and the pads of the batch ({max(pads)} at most) were not known while it ran: "
                "give generate() an attention_mask, or record positions='all'."
            )
        kept = set(itertools.chain.from_iterable(here.columns or () for here in batch.passes))
        first = max(begin, stop - window.count) if window.kind == "last" else begin
        if window.kind == "around":
            own = tokens[begin:]
            near = [at for at in range(begin, stop) if window.near(at - begin, own)]
            if not kept.issuperset(near):
                raise UnsupportedError(
                    "a token was computed again after positions around it had been let go of (a draft that was rejected): "
                    "record positions='all'."
                )
            return near
        return [
            at
            for at in range(first, stop)
            if at in kept and window.holds(at - begin, batch.prompt_length - begin)
        ]

    def _pieces_of(self, batch: _Batch) -> Callable[[HookPoint], Sequence[Tensor]]:
        return lambda hook_point: _Pieces(
            self.kept[hook_point], self._parts, hook_point, batch.numbers
        )

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
        batch, call = self._batches[-1] if self._batches else None, self._calls.call
        if batch is not None and call in batch.calls and not cached and new < batch.end:
            # A generate() goes on with a cache that took no row: what it computes are still the
            # text's next columns.
            cached = batch.end
        self._now = cached, new
        self._write_parts()
        self._lay_window(cached, new)
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
        missing = [hook_point for hook_point in self.kept if hook_point not in self._pieces]
        if missing:
            self.pass_cut()
            raise InputError(self._error(*missing[0], ran))
        self.end_step()
        self._note_columns(*self._now)
        self._held += sum(tensors[-1].nbytes for tensors in self.kept.values())
        self._let_go()

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Keeps the rows of the columns that the window holds."""
        if self._columns is not None and site not in (*CACHE_SITES, CACHE_POSITIONS):
            rows, axis = [column - self._now[0] for column in self._columns], LAYOUTS[site].row_axis
            if len(rows) < tensor.shape[axis]:
                tensor = tensor.index_select(
                    axis, torch.tensor(rows, dtype=torch.long, device=tensor.device)
                )
        super().see(site, layer, start, tensor)

    def _packed(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.window is None else self._packing.packed(tensors)

    def __getitem__(self, hook_point: HookPoint | str) -> Tensor:
        """As a :class:`Recorder`'s, unless what was recorded lies in parts on disk."""
        if self._parts is not None:
            raise InputError(
                "what was recorded lies in parts on disk: take it from texts(), one tensor at a time."
            )
        return super().__getitem__(hook_point)

    def _lay_window(self, cached: int, new: int) -> None:
        """Finds the columns that are kept of the pass that begins."""
        if self.window is None or self.window.kind == "all":
            return
        batch, call = self._batches[-1] if self._batches else None, self._calls.call
        stop = cached + new
        if batch is not None and (cached or stop == batch.end + 1):
            length, self._pads = batch.prompt_length, batch.pads
        else:
            mask = self._calls.mask if call is None or call.mask is None else call.mask
            length = (0 if call is None else call.prompt_length) or stop
            self._pads = (0,) if mask is None else tuple(pads_in(mask[:, :length]))
        self._columns = self.window.columns(cached, stop, length, self._pads)

    def _let_go(self) -> None:
        """Lets go of what is no longer among the last positions, or stands around no token that
        was given.
        """
        window, batch = self.window, self._batches[-1]
        if window is None or not window.decided_later:
            return
        while self._gone < batch.numbers[-1]:
            at = self._gone - batch.numbers[0]
            if at >= 0 and batch.passes[at].stop > batch.end - window.count:
                return
            if at >= 0:
                columns: tuple[int, ...] = ()
                if window.kind == "around":
                    columns = _columns_near(window, batch.passes[at], batch.ids)
                elif batch.ids is not None:
                    columns = self._last_of_ended(window, batch, batch.passes[at])
                self._keep_alone(batch, at, columns)
            self._gone += 1

    def _last_of_ended(self, window: Window, batch: _Batch, here: Pass) -> tuple[int, ...]:
        """The columns of a pass that are the last of a row which ended before the others."""
        own = range(here.start, here.stop) if here.columns is None else here.columns
        first = max(here.start + 1, batch.prompt_length)
        near = cast(Tensor, batch.ids)[:, first : here.stop + window.count]
        ended = torch.isin(near, torch.tensor(self._ends(batch), device=near.device)).any(0)
        at = [first + column for column in ended.nonzero().flatten().tolist()]
        return tuple(
            column for column in own if any(column < end <= column + window.count for end in at)
        )

    def _keep_alone(self, batch: _Batch, at: int, columns: tuple[int, ...]) -> None:
        """Keeps some columns of a pass, and lets go of its others."""
        here = batch.passes[at]
        before = range(here.start, here.stop) if here.columns is None else here.columns
        rows = torch.tensor([before.index(column) for column in columns], dtype=torch.long)
        batch.passes[at] = dataclasses.replace(here, columns=columns)
        for hook_point, tensors in self.kept.items():
            shown, axis = tensors[self._gone], LAYOUTS[hook_point[0]].row_axis
            if columns and hook_point[0] not in (*CACHE_SITES, CACHE_POSITIONS):
                chosen = shown.index_select(axis, rows.to(shown.device))
                tensors[self._gone] = self._packed([chosen])[0]
                continue
            # One for all passes: a tensor for each would keep pieces of what is let go of.
            if hook_point not in batch.empty:
                batch.empty[hook_point] = shown.narrow(axis, 0, 0).clone()
            tensors[self._gone] = batch.empty[hook_point]

    def _write_parts(self) -> None:
        """Writes what is held to disk, if that is asked for and it is much."""
        if self._parts is None or self._held < PART:
            return
        # What is left of passes that were let go of is written too, unless it is nothing.
        left = next(iter(self.kept.values()))
        whole = self._gone
        numbers = [n for n in range(self._written, len(left)) if n >= whole or left[n].numel()]
        self._parts.write(self.kept, numbers)
        for tensors in self.kept.values():
            for number in numbers:
                tensors[number] = _ON_DISK
        self._held, self._gone = 0, len(self.recorded_steps)
        self._written = self._gone

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
        if not batch.passes:
            batch.pads = self._pads
        batch.passes.append(Pass(cached, stop, first, self._columns))
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


def _columns_near(window: Window, here: Pass, ids: Tensor | None) -> tuple[int, ...]:
    """The columns that a pass was first to compute and that stand around a given token in some
    row; all of them where no token ids were seen.
    """
    own, start = range(here.first, here.stop), max(here.first - window.count, 0)
    rows = [] if ids is None else ids[:, start : here.stop + window.count].tolist()
    return tuple(
        at for at in own if ids is None or any(window.near(at - start, row) for row in rows)
    )
