"""What a program runs on, where it is anybody's own code: a forward and a step, of any
framework.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.crashes import REFUSES, whose
from kvinterp.auditing.programs.subject import FIRST_WORD, WORDS, Subject, apart, row_draw
from kvinterp.errors import InputError, shown


class FunctionSubject(Subject):
    """Anybody's own code: a forward and a step, of any framework that gives something torch can
    read.

    Args:
        full: Token ids ``[row, position]`` to logits ``[row, position, vocabulary]``, without a
            cache.
        step: Token ids of new positions and a cache (None for a new one) to their logits, or those
            of the last alone (``[row, 1, vocabulary]`` or ``[row, vocabulary]``), and the cache
            behind them.
        name: What it is called.
        around: What every run stands in.
        device: Where token ids are to be.
        special: Token ids that are not fed.
        controls: Those of them that a text may hold, such as its end; unless given the first few
            ids, where most vocabularies have them.
        yours: What the two are, in a line.
        requests: ``"any"``: caches may live beside one another. ``"one"``: the code holds its cache
            itself and serves one request at a time, which ``step(ids, None)`` begins anew; the step
            may then return its logits alone.
    """

    newest, against = "yes", "full() of a row's own tokens"

    def __init__(
        self,
        full: Callable[[Any], Any],
        step: Callable[[Any, Any], tuple[Any, Any]],
        name: str = "",
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        device: Any = None,
        special: frozenset[int] = frozenset(),
        controls: Sequence[int] | None = None,
        yours: str = "full(ids) and step(ids, cache) are yours",
        requests: str = "any",
    ) -> None:
        super().__init__()
        self.special, self.yours = special, yours
        self.full, self.step, self.around = full, step, around
        self.name = name or f"{_named(full)} and {_named(step)}"
        self.device = torch.device("cpu") if device is None else device
        self.requests = requests
        # What one request was fed, where the code holds its cache itself; and whether something
        # else has run since.
        self._fed: list[Tensor] = []
        self._interrupted = False
        # How what the step gives becomes logits and a cache, in Python.
        self._pair, self._flat = "", ""
        with self.running():
            self.known = int(self.plain(self.tensor([[0, 1]])).shape[-1])
        self.vocabulary = min(self.known, WORDS)
        self.pad = -1
        first = [
            token for token in range(min(FIRST_WORD, self.vocabulary - 2)) if token not in special
        ]
        self.controls = tuple(first if controls is None else controls)
        self.measure()
        self.rows = self.rows if self._takes_rows() else 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within what every run stands in."""
        with torch.no_grad(), self.around():
            yield

    def plain(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """What ``full`` gives.

        Raises:
            InputError: It is no logits of every position.
        """
        self._interrupted = True
        logits = _read(self.full(ids))
        if logits.dim() != 3 or logits.shape[1] != ids.shape[1]:
            raise InputError(
                f"full returned {shown(logits)} for token ids of shape {tuple(ids.shape)}: expected logits of every position, "
                "[row, position, vocabulary]."
            )
        return logits

    def feed(self, ids: Tensor, cache: Any, **model_kwargs: Tensor) -> tuple[Tensor, Any]:
        """What ``step`` gives; one that holds its cache itself is fed its request again where
        another forward came between.
        """
        if self.requests == "any":
            return self._step(ids, cache)
        self._fed = [*(self._fed if cache is not None else ()), ids]
        again = self._fed[:-1] if self._interrupted else []
        for n, before in enumerate(again):
            cache = self._step(before, cache if n else None)[1]
        self._interrupted = False
        return self._step(ids, cache)

    def _step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        given = self.step(ids, cache)
        if not isinstance(given, tuple | list) or len(given) != 2:
            if self.requests == "any":
                raise InputError(
                    f"step returned {shown(given)}: expected a pair, the logits of the new positions and the cache behind them; "
                    "of code that holds its cache itself, say requests='one'."
                )
            given, self._pair = (given, True), ", True"
        if given[1] is None and self.requests == "any":
            raise InputError(
                "step returned no cache (None), which the next call would take for a new one: return what holds it, or of code "
                "that holds its cache itself say requests='one'."
            )
        if given[1] is None:
            given, self._pair = (given[0], True), "[0], True"
        return self._shaped(_read(given[0]), ids), given[1]

    def _shaped(self, logits: Tensor, ids: Tensor) -> Tensor:
        """``[row, column, vocabulary]``, of the last column alone where the step gives no more."""
        rows, columns = ids.shape
        if logits.dim() < 3 and logits.numel() == rows * logits.shape[-1]:
            self._flat = (
                self._flat if columns == 1 else "; logits = logits.reshape(-1, 1, logits.shape[-1])"
            )
            logits = logits.reshape(rows, 1, -1)
        elif logits.dim() == 2 and rows == 1:
            self._flat, logits = "; logits = logits[None]", logits[None]
        said = "step returns the newest logits alone: of each feed these are judged"
        if logits.shape[1:2] == (1,) and columns > 1 and said not in self.notes:
            self.notes.append(said)
        return logits

    def _takes_rows(self) -> bool:
        """Whether a step takes several rows, or says that it takes one."""
        ids = self.tensor([self.tokens[:2]] * self.rows)
        try:
            with self.running():
                self.feed(ids, None)
        except Exception as error:
            return whose(error, None)[0] != REFUSES
        return True

    @functools.cached_property
    def decodes(self) -> bool:  # type: ignore[override]
        """Whether a text that is fed singly behind a prompt, or from its first token on, is
        right.
        """
        text = [self.token(draw) for draw in [row_draw(0, 0)] for _ in range(12)]
        return any(self._decodes(text, first) for first in (9, 1))

    def _decodes(self, text: Sequence[int], first: int) -> bool:
        want, cache = self.alone(text), None
        try:
            with self.running():
                for begin, end in itertools.pairwise([0, *range(first, len(text) + 1)]):
                    logits, cache = self.feed(self.tensor([text[begin:end]]), cache)
                    if not apart(logits[0, -1], want[end - 1]) <= self.limit:
                        return False
        except Exception:
            return False
        return True

    def feed_line(self, ids: Tensor, cached: str, **model_kwargs: Tensor) -> str:
        """As its users call it."""
        return f"{super().feed_line(ids, cached)}{self._pair}{self._flat}"


def _read(logits: Any) -> Tensor:
    return logits.detach().clone() if isinstance(logits, Tensor) else torch.as_tensor(logits)


def _named(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
