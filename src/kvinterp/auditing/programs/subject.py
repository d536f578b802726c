"""What a program runs on: a model in float64 with its casts lifted, its forward without a cache,
and what it takes and offers.

The plain forward, ``use_cache=False`` over one row's own tokens alone, is right by definition. How
far it is from itself (before more text, among more rows) is the null, and the limit is its root: as
far from rounding as from the logits themselves, on a scale of logarithms. No constant is tuned.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvinterp.auditing.programs.lines import arguments
from kvinterp.auditing.programs.program import MASKS, TOLD, Program, Rows
from kvinterp.errors import UnsupportedError
from kvinterp.models.cache_kinds import CacheKind

MAX_COLUMNS = 256
"""The most columns of a program."""
WORDS, FIRST_WORD = 120, 6
"""Tokens are drawn from so many, and from this one on."""
TEXTS, LONG, SHORT = 3, 45, 12
"""Texts that the null is measured on, their length, and what it is where more text changes the
beginning of a long one.
"""
ALONE = 1e-3
"""How far off of itself alone a row of a batch is where the batch changes what is computed."""
NOT_ONE = 0.03
"""A limit beyond which the forward is no one function of the text."""
SIXTEEN = (torch.float16, torch.bfloat16)
NARROW = (torch.float32, *SIXTEEN)
_DTYPE = torch.dtype


class _Wider(TorchFunctionMode):
    """Runs each operation of torch in float64 where it would make or cast to one of these types.

    Args:
        narrow: The types.
        met: Gets those of 16 bits that an operation named.
    """

    def __init__(self, narrow: Sequence[torch.dtype], met: set[torch.dtype]) -> None:
        super().__init__()
        self.narrow, self.met = narrow, met
        self.casts: dict[Any, Any] = {torch.Tensor.float: torch.Tensor.double}
        if torch.float16 in narrow:
            self.casts |= {torch.Tensor.half: self._halved, torch.Tensor.bfloat16: self._halved}

    def wide(self, value: Any) -> Any:
        """What stands for a value that an operation is given."""
        if type(value) is not torch.dtype or value not in self.narrow:
            return value
        # Asked first, since torch.compile traces a look into a set and may not trace a change of it.
        if value is not torch.float32 and value not in self.met:
            self.met.add(value)
        return torch.float64

    def _halved(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What stands for ``half()`` and ``bfloat16()``."""
        if torch.float16 not in self.met:
            self.met.add(torch.float16)
        return tensor.double(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every operation comes here, and hardly any names a type. Loops, since torch.compile traces
        # them in half the time of a map.
        for value in args:
            if type(value) is _DTYPE:
                args = [self.wide(one) for one in args]
                break
        func = self.casts.get(func, func)
        if not kwargs:
            return func(*args)
        for value in kwargs.values():
            if type(value) is _DTYPE:
                kwargs = {name: self.wide(one) for name, one in kwargs.items()}
                break
        return func(*args, **kwargs)


@contextlib.contextmanager
def casts_lifted(
    narrow: Sequence[torch.dtype] = NARROW, met: set[torch.dtype] | None = None
) -> Iterator[None]:
    """What runs inside makes and casts to float64 where it would to one of these types; to what it
    would where there is none. ``met`` gets the types of 16 bits among them that were named.
    """
    if not narrow:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider(narrow, set() if met is None else met):
            yield
    finally:
        torch.set_default_dtype(before)


def apart(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest logit; infinite where only one is finite."""
    fine = want.isfinite()
    if not torch.equal(fine, got.isfinite()) or not bool(fine.any()):
        return float("inf")
    if not bool(fine.all()):
        got, want = got[fine], want[fine]
    mine, right = got.double(), want.double()
    return float((mine - right).abs().max() / (right.abs().max() or 1.0))


def row_draw(seed: int, row: int) -> random.Random:
    """What draws the tokens of a row: programs share their beginnings, and with them the plain
    forwards.
    """
    return random.Random(f"{seed} {row}")


class Subject(abc.ABC):
    """What programs run on.

    Attributes:
        name: What it is called.
        takes: Which of ``attention_mask`` and ``position_ids`` its forward takes.
        offset: What the position of the first token is, as far as positions are told; None where
            they are not.
        noise: How far the plain forward is from itself, of its largest logit.
        eps: The precision of the dtype that it computes in; 0 where that of its logits says it.
        rows: The most rows of a batch; one where a batch alone changes the plain forward.
        max_columns: The most columns of a program that is drawn.
        context: The most that the model has.
        vocabulary: Tokens are drawn from so many.
        known: How many tokens there are.
        pad: The model's own pad token.
        special: Tokens that stand for something else: images, the end of a text.
        controls: Of these the pad, ends and beginnings, which a text may hold as it holds any other
            token.
        end: The one that ends a text, or the pad.
        sizes: Widths on both sides of the sizes that its config names, those of windows and chunks
            first.
        caches: Kinds of cache that it offers.
        device: Where tokens are to be.
        native: Whether it is a transformers model itself.
        stateful: Whether transformers says that it keeps a state, which cannot be taken back.
        generates: Whether it has a ``generate()``.
        varies: Whether more text changes the logits of what came before.
        mixes: How far a batch changes the plain forward of a row, where it does.
        against: What its logits are held against.
        names, prelude: What its lines of Python find beside the model, and those that come first.
        begins: What the texts of rows begin with, one after the other.
        moves: ``"no"`` where it keeps something of each row on itself, so that rows of a cache
            cannot move.
        whole: ``"yes"``: what a text begins with is fed in one forward.
        no_generate: The ways of ``generate()`` that are not for it.
        newest: ``"yes"``: a feed may give the logits of its last column alone.
        requests: ``"any"``, or ``"one"`` where it holds its cache itself, for one request at a
            time.
        decodes: Whether tokens that are fed singly are right, so that what it refuses besides is no
            fault.
        notes: What a reader should know of how it was run.
        kind: The kind of cache that is asked about; None for the model's own.
        loss: How far plain decoding on that cache is from the plain forward, of its largest logit.
        lossy: Whether the cache loses, and is said to: what is right is then the same cache without
            the use.
        crops_within: From no more columns than these are some taken back.
        capacity: The most columns that a cache is made for.
    """

    name: str = ""
    takes: frozenset[str] = frozenset()
    offset: int | None = None
    special: frozenset[int] = frozenset()
    controls: tuple[int, ...] = ()
    rows, max_columns, context, vocabulary, known, noise, eps = (
        1,
        MAX_COLUMNS,
        MAX_COLUMNS,
        WORDS,
        WORDS,
        0.0,
        0.0,
    )
    pad, end = 0, 0
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((7,), (7,))
    caches: tuple[str, ...] = ("own",)
    device: Any = torch.device("cpu")
    native, stateful, generates, varies, mixes = False, False, False, False, 0.0
    begins: tuple[tuple[int, ...], ...] = ((),)
    against = "one forward without a cache over a row's own tokens"
    names: Mapping[str, Any] = types.MappingProxyType({})
    prelude: tuple[str, ...] = ()
    no_generate: frozenset[str] = frozenset()
    whole, moves = "no", "yes"
    newest, decodes, requests = "no", True, "any"
    compiles: bool = False
    """Whether its forward is compiled without being asked for."""
    packs: bool = False
    """Whether it promises to keep texts apart that are packed in one row."""
    way: Rows = Rows((0,))
    """The rows of the program that runs: how forwards are called."""
    choices: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})
    """By a field of :class:`Rows`, what this model offers in it beside the plain choice."""
    kind: CacheKind | None = None
    loss, lossy, capacity = 0.0, False, MAX_COLUMNS
    crops_within: float = float("inf")

    def __init__(self) -> None:
        self._alone: dict[tuple[int, ...], Tensor] = {}
        self.notes: list[str] = []
        self._among: dict[int, float] = {}

    @abc.abstractmethod
    def plain(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """Logits of every column without a cache, ``[row, column, vocabulary]``; ``model_kwargs``: mask and
        positions.
        """

    @abc.abstractmethod
    def feed(self, ids: Tensor, cache: Any, **model_kwargs: Tensor) -> tuple[Tensor, Any]:
        """Logits of new columns, and the cache behind them; None is a new one."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Whatever runs inside begins with the model as it was found."""
        with torch.no_grad():
            yield

    def offers(self, rows: Rows) -> bool:
        """Whether a program of such rows can be run."""
        if rows.cache not in self.caches or (rows.told in MASKS and rows.cache == "static"):
            return False
        # What is plain is offered without a forward that asks.
        chosen = {name: getattr(rows, name) for name in ("fed", "asks", "attention")}
        chosen = {name: value for name, value in chosen.items() if value != getattr(Rows, name)}
        chosen |= {"told": rows.told} if rows.told not in TOLD else {}
        return all(value in self.choices.get(name, ()) for name, value in chosen.items())

    @contextlib.contextmanager
    def called_as(self, rows: Rows) -> Iterator[None]:
        """Inside, forwards are called as these rows say."""
        yield

    def plain_as_called(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """What :meth:`plain` gives where the forward is called as the program's are, but for the
        cache.
        """
        return self.plain(ids, **model_kwargs)

    def control_line(self, ids: Tensor | str, **model_kwargs: Tensor) -> str:
        """The expression that :meth:`plain_as_called` stands for."""
        return self.plain_line(ids, **model_kwargs)

    def reads(self, begins: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """What forwards are told of rows whose texts begin so, where they read something
        besides.
        """
        return {}

    def feed_line(self, ids: Tensor, cached: str, **model_kwargs: Tensor) -> str:
        """The line of Python that :meth:`feed` stands for; ``cached``: ``"yes"`` where there is a
        cache already.
        """
        return f"logits, cache = step({arguments(ids)}, {'cache' if cached == 'yes' else None})"

    def plain_line(self, ids: Tensor | str, **model_kwargs: Tensor) -> str:
        """The expression that :meth:`plain` stands for."""
        return f"full({arguments(ids)})"

    @property
    def limit(self) -> float:
        """What is further off, of the largest logit, is wrong."""
        return float(self.noise**0.5)

    def made(self, capacity: int) -> str:
        """What makes a cache of the kind that is asked about, of so many columns, in Python; empty
        where none is.
        """
        return "" if self.kind is None else self.kind.written(capacity)[0]

    def limit_of(self, rows: int, padded: bool) -> float:
        """The limit for so many rows, of which some have pads."""
        return self.limit

    def holds(self, program: Program) -> bool:
        """Whether what is right is known of a program."""
        return True

    def alone(self, text: Sequence[int], longer: str = "no") -> Tensor:
        """Logits of one row's own tokens, ``[position, vocabulary]``: what is right.

        Args:
            text: The tokens.
            longer: ``"yes"``: those of a longer text that begins so will do, if one was run.
        """
        key = tuple(text)
        if key not in self._alone:
            begun = (
                known
                for other, known in self._alone.items()
                if longer == "yes" and other[: len(key)] == key
            )
            if (known := next(begun, None)) is not None:
                return known[: len(key)]
            self._alone[key] = self._plain(text)
        return self._alone[key]

    def among(self, texts: Sequence[Sequence[int]]) -> float:
        """How far the plain forward of a row is from itself in a batch of so many: the null of
        batches of more than a few.
        """
        if len(texts) <= TEXTS:
            return 0.0
        if (off := self._among.get(len(texts))) is None:
            length = min(map(len, texts))
            with self.running():
                together = self.plain(self.tensor([text[:length] for text in texts]))
            off = max(
                apart(many, self.alone(text, longer="yes")[:length])
                for many, text in zip(together, texts, strict=True)
            )
            self._among[len(texts)] = off
            self.noise = max(self.noise, off) if off < ALONE else self.noise
        return off

    def _plain(self, text: Sequence[int]) -> Tensor:
        with self.running():
            return self.plain(self.tensor([text]))[0].clone()

    def tensor(self, rows: Any) -> Tensor:
        """Whole numbers where the model is."""
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Tokens that are no pad, and stand for nothing but themselves."""
        low = min(FIRST_WORD, self.vocabulary - 2)
        plain = [t for t in range(low, self.vocabulary) if t != self.pad and t not in self.special]
        return plain or [*range(self.vocabulary)]

    def token(self, draw: random.Random) -> int:
        """One of :attr:`tokens`."""
        return draw.choice(self.tokens)

    def measure(self) -> None:
        """Measures the null, and asks what the model takes.

        Raises:
            UnsupportedError: It is no function of the text.
        """
        for length in (LONG, SHORT):
            texts = [
                [self.token(draw) for _ in range(min(length, self.max_columns))]
                for draw in (row_draw(0, row) for row in range(TEXTS))
            ]
            most = max(min(length - 5, self.max_columns - 2), 1)
            whole = [self.alone(text) for text in texts]
            shorter = [
                apart(made[:k], self.alone(text[:k]))
                for made, text in zip(whole, texts, strict=True)
                for k in (1, 7, most)
            ]
            # Logits of a model in 16 bits may come in float32.
            eps = max(self.eps, torch.finfo(whole[0].dtype).eps)
            self.noise = max([*shorter, eps])
            if self.noise <= max(NOT_ONE**2, 8 * eps):
                break
            # RoPE that turns otherwise once a text is long changes its beginning: a short one tells
            # it from noise.
            self.varies = True
        else:
            again = [
                apart(self._plain(text), made) for made, text in zip(whole, texts, strict=True)
            ]
            if max(again) > NOT_ONE**2:
                raise UnsupportedError(
                    f"the plain forward of {self.name} is off from itself by {max(again):.2g} of its largest logit when the same "
                    "text is given twice: it keeps something of the call before, or draws at random (dropout), so there is "
                    "nothing to hold a cache against; make each call begin anew."
                )
            raise UnsupportedError(
                f"the plain forward is off from itself by {self.noise:.2g} of its largest logit once more text follows: "
                f"{self.name} does not read its text from left to right, so there is nothing to hold a cache against."
            )
        self.rows = self._rows(texts, whole)
        if "position_ids" in self.takes:
            self.offset = self._offset(texts[0][:most], whole[0][:most])
        self.controls = self._as_others(texts[0][: min(SHORT, most)], self.controls)

    def _as_others(self, text: list[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Those of these tokens that the forward takes as it takes any other, and does not itself
        read pads or positions from.
        """
        mixed = list(text)
        for n in range(1, len(text), 2):
            mixed[n] = tokens[n // 2 % len(tokens)] if tokens else mixed[n]
        model_kwargs = (
            {"attention_mask": self.tensor([[1] * len(text)])}
            if "attention_mask" in self.takes
            else {}
        )
        if self.offset is not None:
            model_kwargs["position_ids"] = self.tensor(
                [range(self.offset, self.offset + len(text))]
            )
        if not tokens or not model_kwargs:
            return tokens
        try:
            with self.running():
                off = apart(self.plain(self.tensor([mixed]), **model_kwargs)[0], self.alone(mixed))
        except Exception:  # What it raises says that it takes one otherwise.
            off = float("inf")
        if off <= self.limit:
            return tokens
        return tuple(t for t in tokens if self._as_others(text, (t,))) if len(tokens) > 1 else ()

    def _rows(self, texts: list[list[int]], whole: list[Tensor]) -> int:
        try:
            with self.running():
                together = self.plain(self.tensor(texts))
        except Exception:  # One row only, then.
            return 1
        if together.shape[0] != len(texts):
            return 1
        off = max(apart(many, one) for many, one in zip(together, whole, strict=True))
        if off >= ALONE:
            self.mixes = off
            return 1
        self.noise = max(self.noise, off)
        return TEXTS

    def _offset(self, text: list[int], whole: Tensor) -> int | None:
        for offset in (0, self.pad + 1):
            try:
                with self.running():
                    numbered = self.plain(
                        self.tensor([text]),
                        position_ids=self.tensor([range(offset, offset + len(text))]),
                    )[0]
            except Exception:  # It means something else by positions, so they are not told.
                continue
            if apart(numbered, whole) <= self.limit:
                return offset
        return None
