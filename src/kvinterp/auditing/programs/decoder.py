"""A program on a path: the path's own prompt runs through it, and then the tokens that follow, one a step.

A program may put other tokens beside those of the path: pads, neighbours in the batch, drafts, what is taken back. Whoever looks
into the path sees its own row alone, and of it its own tokens in their order, so that two programs can be compared and patched
token by token. What a program does not feed of the prompt comes behind it in one forward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.auditing.programs.lines import Lines
from kvinterp.auditing.programs.names import Call, call_named  # noqa: F401  # paths read their calls by it
from kvinterp.auditing.programs.operations.compile import Compile
from kvinterp.auditing.programs.operations.crop import Crop, Draft
from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.operations.generate import Generate
from kvinterp.auditing.programs.operations.rows import Join, Moved
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.running import Columns
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.transformers_api import greedy
from kvinterp.paths.generating import Generating
from kvinterp.paths.kernels import Native
from kvinterp.paths.view import View

CALLS = get_args(Call)
"""What may stand as the ``call`` of a path."""
LONG, SOME = 2**20, 4
"""A prompt and steps for which a name writes the program that is asked what it can go together with."""
Loop = Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]


def staying(program: Program) -> list[int]:
    """How many columns of each operation nothing takes back: on a path those are its own text, the others another's.

    Raises:
        InputError: More is taken back than was fed.
    """
    left = [max(step.columns, 0) for step in program.steps]
    for at, step in enumerate(program.steps):
        back = max(-step.columns, 0)
        for before in reversed(range(at)):
            back_here = min(back, left[before]) if isinstance(program.steps[before], Feed) else 0
            left[before], back = left[before] - back_here, back - back_here
            if left[before]:
                break
        if back:
            raise InputError(f"program {program} takes back {back} columns more in {step} than it fed by then: crop fewer.")
    return left


def room(program: Program, length: int, steps: int) -> tuple[int, int, int]:
    """Rows, columns of the prompt, and those that may follow, for a prompt of ``length`` tokens and ``steps`` after it."""
    rows, columns, most = program.rows, 0, 0
    before = length + rows.pads[rows.own]
    for step in program.steps:
        for pads in (step.inner, step.behind) if isinstance(step, Feed) else ():
            before += (*pads, *[0] * len(rows.pads))[rows.own]
        most = max(most, columns) if isinstance(step, Crop) else most
        columns += step.columns
    after = steps + max((step.ahead for step in program.steps), default=0)
    return len(rows.pads), before, max(after, most - before)


def check(program: Program, adapter: Adapter, length: int, steps: int) -> None:
    """Raises UnsupportedError, before anything runs, where a model or a prompt cannot be run so."""
    rows, feeds = program.rows, [step for step in program.steps if isinstance(step, Feed)]
    padded = any(rows.pads) or any(any((*feed.inner, *feed.behind)) for feed in feeds)
    if (padded or rows.told != "needed") and not adapter.takes_mask:
        raise UnsupportedError(
            f"program {program} has rows to be masked, and {adapter.facts.architecture}, as kind {adapter.kind} runs it, cannot "
            "be told which: leave the call out, or load the model with kind='native'."
        )
    if rows.ways:
        raise UnsupportedError(
            f"program {program} calls the model with {rows.ways}, which kvinterp audit tries, and no path: leave that out of "
            f"rows({'+'.join(map(str, rows.pads))})."
        )
    if rows.tokens != "plain":
        raise InputError(f"program {program} says which tokens are fed, and a path feeds its prompt: leave tokens= out.")
    _, before, after = room(program, length, steps)
    if before > adapter.facts.context:
        raise InputError(
            f"program {program} puts {before} columns on the cache, and {adapter.facts.name} has {adapter.facts.context} "
            "positions: give fewer pads."
        )
    for step in program.steps:
        step.check(adapter, before + after)


def check_path(path: Any) -> None:
    """Refuses what a program cannot go together with.

    Args:
        path: An :class:`~kvinterp.paths.ExecutionPath` with a program.

    Raises:
        InputError: An option or the policy of the path does not fit its program.
    """
    call, cached = path.call, path.form == "cached"
    program = call.program(LONG, SOME, ("mask", "rows", "join") if cached else ("mask",))
    if not cached and (isinstance(call, Program) if program.steps else program.rows.cache != "own"):
        raise InputError(
            f"call={call} was given for recompute, which feeds its whole text at every step: give the rows alone, as in "
            "recompute[call=rows(0+4)], or use cached."
        )
    if not cached and not all(isinstance(step, Feed) for step in program.steps):
        raise InputError(f"call={call} was given for {path.form}, which it cannot drive: use cached.")
    staying(program)
    if program.rows.cache == "bare":
        raise InputError(f"call={call} asks for a cache that audits alone make: leave cache=bare out.")
    for name in ("refresh", "smooth"):
        if getattr(path, name) is not None:
            raise InputError(f"{name}={getattr(path, name)} was given with call={call}: leave one out.")
    if any(isinstance(step, Compile) for step in program.steps) and not isinstance(path.kernels, Native):
        raise InputError(f"kernels={path.kernels} was given with call={call}, which has its own: leave one out.")
    alone = len(program.rows.pads) == 1 and all(isinstance(step, Feed) for step in program.steps)
    if path.policy.evicts or path.policy.sites or (path.policy.acts and not alone):
        raise InputError(f"policy={path.policy} was given with call={call}, which moves rows under it: leave one out.")


@dataclasses.dataclass
class Lane(Columns):
    """One path in motion under a program.

    Attributes:
        adapter: The model, in the path's dtype.
        form: That of the path.
        prompt: ``[1, position]``.
        steps: Most tokens that are fed after it.
        chunk: Most tokens of the prompt in one forward, or None.
        write: Writes the program for a prompt of so many tokens and so many steps; with what else a cache might offer.
        begin: Makes the store of a pass of rows, columns, and columns after them; None where there is none.
        aside: The same for another request, which nobody hears.
        view: Which part of a forward is shown.
        witness: What happened, by name.
        store: That of the pass that runs.
    """

    adapter: Adapter
    form: str
    prompt: Tensor
    steps: int
    chunk: int | None
    write: Callable[..., Program]
    begin: Callable[[int, int, int], Any]
    aside: Callable[[Tensor, int], Any]
    view: View
    witness: dict[str, int]

    def run(self) -> Loop:
        """Yields the newest logits of the path's row, ``[1, vocab]``, and is sent the next token."""
        self.text, self.model, self.lines, self.held = self.prompt, self.adapter.model, Lines(), contextlib.ExitStack()
        with self.held:
            if self.form == "recompute":
                while True:
                    yield from self._pass(0)
                    yield from self._token()
            yield from self._pass(self.steps)
            while True:
                yield from self._rest(1)

    def _pass(self, steps: int) -> Loop:
        """The whole program over the text, and what it does not feed of that."""
        self._start(self.write(self.text.shape[1], steps), steps)
        for step, stays in zip(self.program.steps, staying(self.program), strict=True):
            if self._fed and not self._unfed:
                yield from self._token()
            self._stays = stays
            yield from step.do(self)
        if self._unfed:
            yield from self._rest(self._unfed)

    def _rest(self, width: int) -> Loop:
        """So many columns more, of which each stays."""
        self._stays = width
        yield from self.feed(width)

    def missing(self) -> str:
        """What did not happen although the program stands for it, in a few words; empty where it ran as said."""
        proofs = dict(step.proof for step in self.write(self.prompt.shape[1], self.steps).steps)
        return next((sentence for name, sentence in proofs.items() if name and not self.witness.get(name)), "")

    def left_out(self) -> dict[str, int]:
        """What is left out of the program because the cache does not offer it, by name."""
        if self.form == "recompute":
            return {}
        length, steps = self.prompt.shape[1], self.steps
        ours, every = self.write(length, steps).steps, self.write(length, steps, ("rows", "join")).steps
        kinds = {"no row was moved": Moved, "no row joined": Join}
        return {
            name: 1
            for name, kind in kinds.items()
            if any(isinstance(step, kind) for step in every) and not any(isinstance(step, kind) for step in ours)
        }

    def count(self, name: str, count: int = 1) -> None:
        """Counts what happened, as the proof that the program ran as it says."""
        self.witness[name] = self.witness.get(name, 0) + count

    # What operations ask for -----------------------------------------------------------------------------------------------

    def feed(self, width: int, cut: int = 0, inner: Sequence[int] = (), behind: Sequence[int] = ()) -> Loop:
        """Feeds columns: of the path's own row the next of its text, as many as nothing takes back.

        Raises:
            InputError: The prompt is over, and they are to be fed together.
        """
        mask = self._padded(width, inner, behind)
        own_columns = mask[self.view.row].bool() & (torch.arange(width) < self._stays)
        size, foreign = min(cut or width, self.chunk or width), 0
        for begin in range(0, width, size):
            part = slice(begin, min(begin + size, width))
            own_part = own_columns[part]
            need = int(own_part.sum())
            if need > self._unfed:
                if self._unfed or need > 1:
                    raise InputError(
                        f"program {self.program} feeds {need} tokens at once where {self._unfed} of the prompt's "
                        f"{self.prompt.shape[1]} are left, and those that follow it come one by one: give a longer prompt, or "
                        "feed(N,1)."
                    )
                yield from self._token()
            logits = self._forward(self._ids(mask[:, part], own_part, foreign), mask[:, part], own_part)
            self._fed += need
            foreign += int((mask[self.view.row, part].bool() & ~own_part).sum())
            if need:
                self._logits = logits[self.view.row : self.view.row + 1, int(own_part.nonzero()[-1])]

    def crop(self, count: int) -> None:
        """Takes back columns, and counts them."""
        self.count("positions taken back", count)
        self.store.crop(len(self.view.own) - count)
        self._cropped(len(self.view.own) - count)
        layers = range(self.adapter.facts.layers)
        self.witness["cached positions reused"] = min(self.store.length(layer) for layer in layers)

    def draft(self, count: int) -> Loop:
        """Feeds the next token with drafts, and keeps those that turn out right."""
        if len(self.mask) > 1:
            raise InputError(f"program {self.program} drafts for {len(self.mask)} rows: give one, as in rows(0).")
        yield from self._known()
        drafts = self._drafted(count)[:, : max(self.adapter.facts.context - self._fed - 1, 0)]
        ids = torch.cat([self.text[:, self._fed : self._fed + 1], drafts], 1)
        logits = self._forward(ids, torch.ones_like(ids), shown=1)
        self._fed += 1
        wrong = drafts.shape[1] - (yield from self._checked(logits, drafts))
        if wrong:
            self.crop(wrong)

    def select(self, rows: list[int], method: str, asked: Any) -> None:
        """Goes on as these rows of the cache, by a method of the library's that is asked for them."""
        if method not in self.store.moves:
            raise UnsupportedError(
                f"program {self.program} moves rows by {method}, which a {self.store.name} does not offer, so that no row was "
                "moved: leave the call out."
            )
        if self.view.row not in rows:
            raise InputError(f"program {self.program} lets go of row {self.view.row}, in which the path's prompt stands.")
        self.store.select(method, asked if isinstance(asked, int) else asked.to(self.prompt.device))
        self.count(f"rows moved by {method}", len(rows))
        self.goes_on_as(rows)
        self.view.row = rows.index(self.view.row)

    def join(self, ids: Tensor, cache: Any) -> None:
        """Puts the row of another store under its own.

        Raises:
            UnsupportedError: Its cache cannot be joined.
        """
        if "join" not in self.store.moves:
            raise UnsupportedError(
                f"program {self.program} lets a row join, and nothing appends rows to a {self.store.name}: leave the call out."
            )
        self.store.join(cache)
        super().join(ids, cache)

    def other(self, width: int) -> Tensor:
        """Tokens of another request, ``[1, column]``."""
        return self.prompt.repeat(1, width // self.prompt.shape[1] + 1)[:, :width].roll(1, 1)

    def serve(self, ids: Tensor, kept: str = "yes") -> Any:
        """Serves another request on a store of its own, which is given back."""
        store = self.aside(ids, 1)
        with self._unseen():
            self.adapter.forward(ids, store)
        return store

    def fork(self, width: int) -> None:
        """A copy of the cache is fed other tokens."""
        cache = getattr(self.store.library_cache, "model_cache", None)
        if cache is None or not self.adapter.plain:
            raise UnsupportedError(
                f"program {self.program} copies a cache of transformers', which this path has not: use forked(4)."
            )
        twin = copy.deepcopy(cache)
        # The copy is not led through the path's store.
        vars(twin).pop("update", None)
        ids = self.other(width).expand(len(self.mask), -1)
        mask = torch.cat([self.mask, torch.ones(ids.shape, dtype=torch.long)], 1)
        arguments = self._told(mask, width)
        with self._unseen():
            self.adapter.call_with_cache(ids, twin, arguments.get("attention_mask"), arguments.get("position_ids"))
        self.count("copies fed")

    def generate(self, step: Generate) -> Loop:
        """Runs each forward that transformers' ``generate()`` asks for on the path's cache; tells it the path's tokens.

        Raises:
            UnsupportedError: The model or ``generate()`` keeps its own cache, or it ended by itself.
        """
        count, drafts = step.count, step.ahead
        if step.how not in ("whole", "new", "lookup"):
            raise UnsupportedError(
                f"{step} is no use of a path's cache or tokens, since it makes its own: give beams(2), chunked(2) or static."
            )
        view = self.view
        cache: Any = getattr(self.store.library_cache, "model_cache", None)
        if cache is None:
            raise UnsupportedError(
                f"program {self.program} needs a cache of transformers', and this model keeps its own: leave it out."
            )
        if drafts and view.writes:
            raise UnsupportedError(
                f"program {self.program} shows the rows of a draft after their forward, where nothing can be put in their place: "
                f"use verified({drafts}), which then takes no draft."
            )
        if drafts and self._fed:
            raise InputError(
                f"program {self.program} looks up drafts on a filled cache: generate first, as in rows(0)+generate(9,5,lookup)."
            )
        part = self._padded(step.width)
        if int(part[view.row].sum()) > self._unfed:
            raise InputError(f"program {self.program} feeds more than the {self.prompt.shape[1]} tokens of the prompt.")
        ids, mask = self._ids(part, part[view.row].bool(), 0), torch.cat([self.mask, part], 1)
        prompt = ids if step.how == "new" else torch.cat([self.ids, ids], 1)
        # No token ends it: the path says when it is over.
        ends = {"eos_token_id": self.adapter.facts.vocabulary, "pad_token_id": 0}
        config = greedy(count, **ends, **({"prompt_lookup_num_tokens": drafts} if drafts else {}))
        keywords = {"attention_mask": mask.to(prompt.device), self.adapter.cache_name: cache}
        with Generating(self.adapter.model, prompt, config, **keywords) as generating:
            for arguments in generating.forwards():
                fed_on: Any = arguments.get(self.adapter.cache_name)
                if fed_on is not cache:
                    raise UnsupportedError(
                        f"generate() of {self.adapter.facts.architecture} goes on without the cache that it was given, behind "
                        f"{len(view.own)} positions: leave call={self.program} out; kvinterp audit tries that generate()."
                    )
                left, tokens = int(cache.get_seq_length()), arguments["input_ids"]
                if left < len(view.own):
                    self._cropped(left)
                fed = mask.shape[1] - left
                drafted = tokens[:, fed:]
                if self.chunk is not None and not generating.sent and fed > self.chunk:
                    raise UnsupportedError("generate() feeds its prompt as it likes: leave the chunk out of the path.")
                whole_mask = torch.cat([mask, torch.ones(drafted.shape, dtype=torch.long)], 1)
                view.feed(whole_mask[view.row, left:].bool(), fed if drafts else None)
                output = self.adapter.model(**arguments)
                self.store.settle()
                self.mask, self.ids = whole_mask, torch.cat([self.ids[:, :left], tokens], 1)
                self._fed += int(mask[view.row, left:].sum())
                self.count("forwards of generate()")
                self.count("cached positions read", left)
                if drafts:
                    self.count("drafts looked up", drafted.shape[1])
                before = self._fed
                newest = output.logits[view.row : view.row + 1, -1 - drafted.shape[1] :]
                yield from self._checked(newest, drafted)
                sent = self.text[0, before : self._fed + 1]
                mask = torch.cat([mask, torch.ones(len(mask), len(sent), dtype=torch.long)], 1)
                generating.answer(output, [self._beside(token[None])[:, 0] for token in sent])
        if len(generating.sent) < count:
            raise UnsupportedError(f"generate() of this model ended by itself: leave call={self.program} out.")
        self._cropped(int(cache.get_seq_length()))

    # ----------------------------------------------------------------------------------------------------------------------

    def _start(self, program: Program, steps: int) -> None:
        """Begins a pass over the text: an empty cache, no column, nothing masked."""
        rows, before, after = room(program, self.text.shape[1], steps)
        self.program, self.mask = program, torch.zeros(rows, 0, dtype=torch.long)
        self.ids = self.text[:, :0].expand(rows, 0)
        self.pads, self._fed, self._masked = list(program.rows.pads), 0, False
        self._logits = self.text
        self.view.crop(0)
        self.view.row = program.rows.own
        self.store = self.begin(rows, before, after)
        if any(isinstance(step, Crop | Draft) for step in program.steps) or program.rows.cache == "recording":
            self.store.will_crop()
        self.witness |= {"rows": rows} if rows > 1 else {}

    @property
    def _unfed(self) -> int:
        """Tokens of the text that are known and not fed."""
        return self.text.shape[1] - self._fed

    def _token(self) -> Loop:
        """Yields the newest logits; the token that is sent belongs to the text then."""
        token = yield self._logits
        self.text = torch.cat([self.text, token[:, None].to(self.text.device)], 1)

    def _known(self) -> Loop:
        """The same where the next token is not known."""
        if not self._unfed:
            yield from self._token()

    def _checked(self, logits: Tensor, drafts: Tensor) -> Generator[Tensor, Tensor, int]:
        """Yields the logits of the newest token, and those of each draft behind it that turns out right.

        The rows of such a draft stay in the cache, and what was seen in them is what its step is shown; but where a hook may
        write, which could come too late for them, no draft is taken.

        Args:
            logits: Of the newest token and of the drafts, ``[1, 1 + draft, vocab]``, of a forward that showed none of these.
            drafts: ``[1, draft]``.

        Returns:
            How many were right; the token behind them is known then.
        """
        first, right = self.view.new - logits.shape[1], 0
        while True:
            if right:
                self.view.show(first + right)
            self._logits = logits[:, right]
            yield from self._known()
            if right == drafts.shape[1] or self.view.writes or bool(drafts[0, right] != self.text[0, self._fed]):
                break
            right, self._fed = right + 1, self._fed + 1
        if drafts.shape[1]:
            self.count("drafts accepted", right)
            self.count("drafts rejected", drafts.shape[1] - right)
        return right

    def _drafted(self, count: int) -> Tensor:
        text = self.text[:, : self._fed + 1]
        newest = int(text[0, -1])
        before = (text[0, :-1] == newest).nonzero().flatten()
        copied = text[:, int(before[-1]) + 1 :][:, :count] if len(before) else text[:, :0]
        counted = torch.arange(1, count - copied.shape[1] + 1, device=text.device)[None]
        return torch.cat([copied, (newest + counted) % self.adapter.facts.vocabulary], 1)

    def _padded(self, width: int, inner: Sequence[int] = (), behind: Sequence[int] = ()) -> Tensor:
        """The mask of so many new columns."""
        mask = torch.ones(len(self.mask), width, dtype=torch.long)
        for row in range(len(mask)):
            pads, last = (self.pads[row] + sum(inner[row : row + 1])), sum(behind[row : row + 1])
            lead = min(pads, width)
            self.pads[row] = pads - lead
            mask[row, :lead] = 0
            mask[row, max(width - last, 0) :] = 0
        pads = int((mask == 0).sum())
        if pads:
            self._masked = True
            self.count("pads masked", pads)
        return mask

    def _ids(self, mask: Tensor, own: Tensor, foreign: int) -> Tensor:
        """New columns of all rows; of the path's own its text where it is ``mine``, other tokens where it is taken back.

        Another token than the first is a pad: one that is read in its place would be the same there.
        """
        prompt, vocabulary = self.prompt[0], self.adapter.facts.vocabulary
        line = ((prompt[:1] + 1) % vocabulary).repeat(mask.shape[1])
        own = own.to(line.device)
        need, taken_back = int(own.sum()), mask[self.view.row].bool().to(line.device) & ~own
        line[own] = self.text[0, self._fed : self._fed + need]
        line[taken_back] = (
            prompt[0] + foreign + torch.arange(1, int(taken_back.sum()) + 1, device=line.device)
        ) % vocabulary
        return self._beside(line)

    def _beside(self, tokens: Tensor) -> Tensor:
        """Other tokens in the other rows beside the path's own, ``[row, column]``."""
        moved = torch.arange(len(self.mask), device=tokens.device)[:, None] - self.view.row
        return (tokens + moved) % self.adapter.facts.vocabulary

    def _told(self, mask: Tensor, width: int) -> dict[str, Tensor]:
        takes = ("attention_mask", "position_ids") if self.adapter.takes_mask else ()
        arguments = self.program.rows.tells(mask, width, self._masked, takes, 0 if takes else None)
        return {name: tensor.to(self.prompt.device) for name, tensor in arguments.items()}

    def _forward(self, ids: Tensor, mask: Tensor, own: Tensor | None = None, shown: int | None = None) -> Tensor:
        """Logits of new columns on the store of the pass, ``[row, column, vocab]``; ``own``: which are the path's own."""
        own = torch.ones(ids.shape[1], dtype=torch.bool) if own is None else own
        self.put(ids, mask.cpu())
        arguments = self._told(self.mask, ids.shape[1])
        self.view.feed(own, shown)
        with contextlib.nullcontext() if bool(own.any()) else self._unseen():
            logits = self.adapter.forward(ids, self.store, arguments.get("attention_mask"), arguments.get("position_ids"))
        if self.store is not None:
            self.store.settle()
        if "position_ids" in arguments:
            self.witness["last position given"] = int(arguments["position_ids"][self.view.row, -1])
        return logits

    def _cropped(self, length: int) -> None:
        """Told that all columns from ``length`` on were taken back."""
        self.store.cropped(length)
        self.view.crop(length)
        self.cut(length)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """What runs inside is another request's."""
        self.view.silent = True
        try:
            yield
        finally:
            self.view.silent = False
