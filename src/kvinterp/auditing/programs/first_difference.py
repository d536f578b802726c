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
from collections.abc import Callable, Iterator
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
"""What a cache gives to be read: all columns so far."""
ATTENDED_TO = {"K attended to": "K", "V attended to": "V"}
"""The same as torch's attention is given it, and what it is called."""
OF_ALL_COLUMNS = (*READ, *ATTENDED_TO)
"""What stands for all columns so far; all else for those that are fed."""
KEEPS = {"update_conv_state": "convolution state", "update_recurrent_state": "recurrent state"}
"""What a module keeps that calls these methods of its cache; it is named where all that such a
module was given is right, and what it makes is not."""
ATTENDED, LOGITS, RAISED = "attention output", "logits", "error"
"""What attention makes of what it reads, what the head makes, and what a crash has for a tensor."""


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first tensor that parts.

    Attributes:
        layer: The block; behind the last the number of blocks.
        module: The module's path.
        tensor: ``Q``, ``K``, ``V``, one of :data:`KEEPS`, :data:`ATTENDED`, :data:`LOGITS`,
            :data:`RAISED`, else ``input of`` or ``output of`` the module.
        column: The first column of the program at which it parts.
        error: How far, of the tensor's largest number.
    """

    layer: int
    module: str
    tensor: str
    column: int
    error: float


Key = tuple[str, str, int]
"""A module's path (empty: the model), what the tensor is, and its turn."""
Heard = dict[Key, Tensor]
"""Tensors in the order of the forward: ``[row, column, ...]``."""


TOKENS = "", "tokens", 0
"""Where the token ids of a forward stand."""


@contextlib.contextmanager
def heard(model: nn.Module, seen: list[Heard], keys: str = "returned") -> Iterator[list[str]]:
    """Appends what every module is given and returns, the keys and values of the cache, and what
    attention asks; one a forward.

    Args:
        model: The model.
        seen: What is appended to.
        keys: ``"returned"`` by the cache, or ``"given"`` to it.

    Yields:
        The modules that run, the innermost last.
    """
    from transformers.cache_utils import Cache

    stack, own = list[str](), {name: getattr(Cache, name) for name in ("update", *KEEPS)}

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
            for at, (what, name) in enumerate(
                zip(("Q", *ATTENDED_TO), ("query", "key", "value"), strict=True)
            ):
                read(what, args[at] if at < len(args) else kwargs[name])
        return func(*args, **kwargs)

    def update(cache: Any, *given: Any, **more: Any) -> Any:
        # What is given is the tensor that a module made: it stands in the list as that module's.
        made = own["update"](cache, *given, **more)
        for what, tensor in zip(READ, made if keys == "returned" else given, strict=False):
            read(what, tensor)
        return made

    def keeping(name: str) -> Callable[..., Any]:
        def update_state(*given: Any, **more: Any) -> Any:
            if stack and seen:
                seen[-1][stack[-1], KEEPS[name], 0] = torch.zeros(1, 1)
            return own[name](*given, **more)

        return update_state

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
            )
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        hooks.enter_context(Functions(called))
        for name, method in {"update": update, **{name: keeping(name) for name in KEEPS}}.items():
            hooks.callback(setattr, Cache, name, own[name])
            setattr(Cache, name, method)
        yield stack


def placed(subject: ModelSubject, program: Program) -> FirstDifference | None:
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

    def aside(*given: Any, **named: Any) -> Tensor:
        # The reference is no forward of the program.
        before = len(seen)
        try:
            return plain(*given, **named)
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
        return FirstDifference(
            _layer(_blocks(subject), stack[-1]), stack[-1], RAISED, run.ids.shape[1], float("inf")
        )
    if run.wrong is not None and run.wrong is run.off:
        # It is the forward without a cache that is wrong.
        seen.clear()
        with subject.running(), heard(subject.adapter.source, seen):
            subject.plain(run.ids, **run.model_kwargs(run.mask, run.mask.shape[1]))
        return _first(subject, seen, run.mask, run.texts)
    if "stop" not in state:
        return None
    with subject.called_as(program.rows):
        return _first(subject, seen[state["start"] : state["stop"]], state["mask"], state["texts"])


def _first(
    subject: ModelSubject, mine: list[Heard], mask: Tensor, texts: list[list[int]]
) -> FirstDifference | None:
    whole, blocks = [_alone(subject, text) for text in texts], _blocks(subject)
    first = next((key for key in mine[0] if key[1] == "output of"), None) if mine else None
    widths = [_width(forward) for forward in mine]
    column = mask.shape[1] - sum(widths)
    for forward, width in zip(mine if column >= 0 else [], widths, strict=False):
        so_far, entered, ids = mask[:, : column + width].bool(), False, forward.get(TOKENS)
        for key, tensor in forward.items():
            layer, read = _layer(blocks, key[0]), key[1] in OF_ALL_COLUMNS
            if subject.way.told == "mask_alone" and ATTENDED_TO.get(key[1], key[1]) in ("Q", "K"):
                continue  # Counted from the first pad, they are turned by other angles.
            entered = entered or layer < len(blocks)
            for row, text in enumerate(texts[: len(tensor)] if key[0] else []):
                want = None if key[1] in KEEPS.values() else whole[row].get(key)
                # What is read has all columns so far, or the last in a window; all else has the
                # new ones.
                if want is None or (
                    not read and (tensor.shape[1], want.shape[1]) != (width, len(text))
                ):
                    continue
                kept, end = so_far[row][-tensor.shape[1] :], int(so_far[row].sum())
                got = tensor[row][: len(kept)][kept]
                theirs = want[0][max(end - len(got), 0) : end]
                if key[1] in ATTENDED_TO:
                    got, theirs = _repeated(got, theirs), _repeated(theirs, got)
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
                    head = key[:2] == (_head(subject), "output of")
                    what = LOGITS if head else _named(key, [*forward], [*whole[row]])
                    return FirstDifference(layer, key[0], what, at, max(errors))
        column += width
    return None


def _repeated(heads: Tensor, other: Tensor) -> Tensor:
    """Heads of keys or values, ``[column, head, ...]``, repeated to the number of another's."""
    return heads.repeat_interleave(max(other.shape[1] // heads.shape[1], 1), 1)


def _named(key: Key, forward: list[Key], whole: list[Key]) -> str:
    """What a tensor that parts is called: between what a module's own parts give and take there is
    its state alone, or what attention makes of the keys and values that it read.
    """
    path, what, _ = key
    if what in ATTENDED_TO:
        return ATTENDED_TO[what]
    if what == "input of":
        kept = {of for at, of, _ in whole if of in KEEPS.values() and path.startswith(f"{at}.")}
        if kept:
            return " or ".join(sorted(kept, reverse=True))
        before = forward[: forward.index(key)]
        if any(of in OF_ALL_COLUMNS and path.startswith(f"{at}.") for at, of, _ in before):
            return ATTENDED
    return f"{what} {path}" if what.endswith("of") else what


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
        # A cache may change what it is given at once; one that loses is right to.
        keys = "returned" if subject.lossy else "given"
        with subject.running(), heard(subject.adapter.source, seen, keys):
            subject.feed(ids, None) if cached else subject.plain(ids)
        of_cache = {*READ, *KEEPS.values()}
        found |= {key: tensor for key, tensor in seen[-1].items() if (key[1] in of_cache) == cached}
    return found


def _width(forward: Heard) -> int:
    """Columns that a forward was fed: those of its first tensor."""
    fed = (t for key, t in forward.items() if key[1] not in OF_ALL_COLUMNS and t.dim() >= 3)
    return next((int(tensor.shape[1]) for tensor in fed), 0)


def _blocks(subject: ModelSubject) -> list[str]:
    """The paths of the blocks, each with a dot at its end."""
    names = {module: path for path, module in subject.adapter.source.named_modules()}
    return [f"{names[block]}." for block in subject.adapter.blocks if block in names]


def _head(subject: ModelSubject) -> str | None:
    """The path of the head; None where the model does not say."""
    source = subject.adapter.source
    head = getattr(source, "get_output_embeddings", lambda: None)()
    return next((path for path, module in source.named_modules() if module is head), None)


def _layer(blocks: list[str], name: str) -> int:
    """The block that a module stands in; behind them all their number."""
    return next(
        (layer for layer, block in enumerate(blocks) if f"{name}.".startswith(block)), len(blocks)
    )
