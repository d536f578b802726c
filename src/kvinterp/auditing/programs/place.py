"""Where a program is wrong: every module heard in its last forwards and in the plain forward, and
the first that parts.

The keys and values that a cache gives to be read are heard too, beside those of one forward of the
whole text, and the queries that torch's attention is given. Only columns that hold tokens are
compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import apart
from kvinterp.models.derived import SDPA
from kvinterp.models.hooks import Functions, first_of

READ = ("K", "V")
"""What is read at all columns so far."""
KEEPS, STATE, RAISED = "keeps a state", "recurrent state or its update", "error"
"""What stands for a module that keeps a recurrent state; what is wrong where all that such a module
was given is right, and what it makes is not; what a crash has for a tensor."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The first tensor that parts.

    Attributes:
        layer: The block; behind the last the number of blocks.
        module: The module's path.
        tensor: ``Q``, ``K``, ``V``, ``input of`` or ``output of`` the module; :data:`STATE`, or
            :data:`RAISED`.
        column: The first column of the program at which it parts.
        error: How far, of the tensor's largest number.
    """

    layer: int
    module: str
    tensor: str
    column: int
    error: float


Heard = dict[tuple[str, str, int], Tensor]
"""By a module's path (empty: the model), what the tensor is and its turn, in the order of the
forward: ``[row, column, ...]``.
"""


TOKENS = "", "tokens", 0
"""Where the token ids of a forward stand."""


@contextlib.contextmanager
def heard(model: nn.Module, seen: list[Heard]) -> Iterator[list[str]]:
    """Appends what every module is given and returns, what the cache returns, and what attention
    asks; one a forward.

    Yields the modules that run, the innermost last.
    """
    from transformers.cache_utils import Cache

    stack, own, own_state = list[str](), Cache.update, Cache.update_recurrent_state

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(name)
        given = next(
            (tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)), None
        )
        if module is model:
            seen.append({} if given is None or given.is_floating_point() else {TOKENS: given})
        add(name, "input of", given)

    def after(name: str, module: nn.Module, args: Any, out: Any) -> None:
        if stack:
            stack.pop()
        add(name, "output of", first_of(getattr(out, "logits", out)))

    def add(name: str, what: str, tensor: Any) -> None:
        if seen and isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() >= 2:
            turn = next(n for n in itertools.count() if (name, what, n) not in seen[-1])
            seen[-1][name, what, turn] = tensor.detach().clone()

    def read(what: str, tensor: Any) -> None:
        if stack and isinstance(tensor, Tensor) and tensor.dim() == 4:
            add(stack[-1], what, tensor.transpose(1, 2))

    def called(func: Any, args: Any, kwargs: Any) -> Any:
        if func is SDPA:
            read("Q", args[0] if args else kwargs["query"])
        return func(*args, **kwargs)

    def update(cache: Any, *given: Any, **more: Any) -> Any:
        # What is given is the tensor that a module made: it stands in the list as that module's.
        made = own(cache, *given, **more)
        for what, tensor in zip(READ, made, strict=False):
            read(what, tensor)
        return made

    def update_state(cache: Any, *given: Any, **more: Any) -> Any:
        if stack and seen:
            seen[-1][stack[-1], KEEPS, 0] = torch.zeros(1, 1)
        return own_state(cache, *given, **more)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
            )
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        hooks.enter_context(Functions(called))
        hooks.callback(setattr, Cache, "update", own)
        Cache.update = update  # type: ignore[method-assign, assignment]
        hooks.callback(setattr, Cache, "update_recurrent_state", own_state)
        Cache.update_recurrent_state = update_state  # type: ignore[method-assign, assignment]
        yield stack


def placed(subject: ModelSubject, program: Program) -> Place | None:
    """Runs a wrong program beside the plain forward of each row's own tokens; None where no module
    parts before the logits.
    """
    run, seen = Run(subject, program), list[Heard]()
    state: dict[str, Any] = {"start": 0}
    judge, plain = run.judge, subject.plain

    def judged(logits: Tensor, ids: Tensor, mask: Tensor, *given: Any, **more: Any) -> None:
        texts = [list(text) for text in run.texts]
        state.update(mask=torch.cat([run.mask, mask], 1), texts=texts, stop=len(seen))
        judge(logits, ids, mask, *given, **more)
        state["start"] = len(seen)

    def aside(*given: Any, **told: Any) -> Tensor:
        # The reference is no forward of the program.
        before = len(seen)
        try:
            return plain(*given, **told)
        finally:
            del seen[before:]

    # What the model offers is asked of it before anything is heard.
    subject.offers(program.rows)
    # Their own methods run within.
    vars(run)["judge"], vars(subject)["plain"] = judged, aside
    try:
        with heard(subject.adapter.source, seen) as stack:
            stop = run.run()[0]
    finally:
        del vars(subject)["plain"]
    if stop != WRONG:
        return None
    if run.raised and stack:
        return Place(
            _layer(_blocks(subject), stack[-1]), stack[-1], RAISED, run.ids.shape[1], float("inf")
        )
    if run.wrong is not None and run.wrong is run.off:
        # It is the forward without a cache that is wrong.
        seen.clear()
        with subject.running(), heard(subject.adapter.source, seen):
            subject.plain(run.ids, **run.told(run.mask, run.mask.shape[1]))
        return _first(subject, seen, run.mask, run.texts)
    if "stop" not in state:
        return None
    with subject.called_as(program.rows):
        return _first(subject, seen[state["start"] : state["stop"]], state["mask"], state["texts"])


def _first(
    subject: ModelSubject, mine: list[Heard], mask: Tensor, texts: list[list[int]]
) -> Place | None:
    whole, blocks = [_alone(subject, text) for text in texts], _blocks(subject)
    first = next((key for key in mine[0] if key[1] == "output of"), None) if mine else None
    widths = [_width(forward) for forward in mine]
    column = mask.shape[1] - sum(widths)
    for forward, width in zip(mine if column >= 0 else [], widths, strict=False):
        so_far, entered, ids = mask[:, : column + width].bool(), False, forward.get(TOKENS)
        for key, tensor in forward.items():
            layer, read = _layer(blocks, key[0]), key[1] in READ
            entered = entered or layer < len(blocks)
            for row, text in enumerate(texts[: len(tensor)] if key[0] else []):
                want = None if key[1] == KEEPS else whole[row].get(key)
                # What is read has all columns so far, or the last in a window; all else has the
                # new ones.
                if want is None or (
                    not read and (tensor.shape[1], want.shape[1]) != (width, len(text))
                ):
                    continue
                kept, end = so_far[row][-tensor.shape[1] :], int(so_far[row].sum())
                got = tensor[row][: len(kept)][kept]
                theirs = want[0][max(end - len(got), 0) : end]
                if theirs.shape != got.shape or not len(got):
                    continue
                errors = [apart(a, b) for a, b in zip(got, theirs, strict=True)]
                wrong = [n for n, error in enumerate(errors) if not error <= subject.limit]
                fed = subject.way.fed != "embeds"
                if (
                    wrong
                    and fed
                    and key == first
                    and (ids is None or ids[row][kept].tolist() != text[end - len(got) : end])
                ):
                    return None  # Other tokens stand in these columns.
                # Positions and masks are seen in what the first block makes of them.
                if wrong and entered:
                    at = column + width - len(kept) + int(kept.nonzero()[wrong[0]])
                    what = f"{key[1]} {key[0]}" if key[1].endswith("of") else key[1]
                    # Between what such a module's own parts give and take there is the state alone.
                    if any(
                        of == KEEPS and key[0].startswith(f"{path}.") for path, of, _ in whole[row]
                    ):
                        what = STATE if key[1] == "input of" else what
                    return Place(layer, key[0], what, at, max(errors))
        column += width
    return None


def _alone(subject: ModelSubject, text: list[int]) -> Heard:
    """What one forward of a row's own tokens computes; with a new cache where K and V are asked
    for.
    """
    found: Heard = {}
    if not text:
        return found
    ids = subject.tensor([text])
    for cached in (True, False):
        seen: list[Heard] = []
        with subject.running(), heard(subject.adapter.source, seen):
            subject.feed(ids, None) if cached else subject.plain(ids)
        found |= {
            key: tensor for key, tensor in seen[-1].items() if (key[1] in (*READ, KEEPS)) == cached
        }
    return found


def _width(forward: Heard) -> int:
    """Columns that a forward was fed: those of its first tensor."""
    return next(
        (int(t.shape[1]) for key, t in forward.items() if key[1] not in READ and t.dim() >= 3), 0
    )


def _blocks(subject: ModelSubject) -> list[str]:
    """The paths of the blocks, each with a dot at its end."""
    names = {module: path for path, module in subject.adapter.source.named_modules()}
    return [f"{names[block]}." for block in subject.adapter.blocks if block in names]


def _layer(blocks: list[str], name: str) -> int:
    """The block that a module stands in; behind them all their number."""
    return next(
        (layer for layer, block in enumerate(blocks) if f"{name}.".startswith(block)), len(blocks)
    )
