"""A ``generate()`` of transformers' whose forwards are run by whoever drives it, one by one; the tokens it takes are given."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _StoppedError(BaseException):
    """Ends a ``generate()`` that is over for whoever runs its forwards; no error, which a model's own code might catch."""


class Generating:
    """A ``generate()`` in a thread of its own that only prepares forwards: they are run where the hooks are, in the caller's.

    Args:
        model: A transformers model.
        prompt: ``[row, position]``.
        chosen: The config of its ``generate()``.
        mask: Of the prompt, 0 where there is no token; ones by default.
        cache: What it is to use; its own by default.
        name: What the model's forward calls it.

    Attributes:
        cache: The cache that it was given.
        sent: The tokens that it is made to take, as far as they are known; those that it chooses where there are none.
        made: What it returned, once it has.
    """

    made: Any = None

    def __init__(
        self,
        model: nn.Module,
        prompt: Tensor,
        chosen: Any,
        mask: Tensor | None = None,
        cache: Any = None,
        name: str = "",
    ) -> None:
        self._model: Any = model
        self._prompt, self._chosen, self.cache, self._name = prompt, chosen, cache, name
        self._mask = torch.ones_like(prompt) if mask is None else mask
        self.sent: list[Tensor] = []
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._generate, daemon=True)

    def __enter__(self) -> Generating:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._led(self._model.forward))
            stack.callback(self._end)
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def forwards(self) -> Iterator[dict[str, Any]]:
        """What ``generate()`` gives each forward, by name, until it returns."""
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, BaseException):
                raise asked
            yield asked

    def answer(self, made: Any, sent: Sequence[Tensor] = ()) -> None:
        """Hands back a forward's output, and the tokens that follow."""
        self.sent += sent
        self._answers.put(made)

    def _end(self) -> None:
        self._answers.put(None)
        self._thread.join()

    @contextlib.contextmanager
    def _led(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Leads the forwards of that thread, and of no other, to the caller."""

        @functools.wraps(forward)
        def led(*args: Any, **given: Any) -> Any:
            if threading.current_thread() is not self._thread:
                return forward(*args, **given)
            self._asked.put({**dict(zip(("input_ids",), args, strict=False)), **given})
            made = self._answers.get()
            if made is None:
                raise _StoppedError
            return made

        before = vars(self._model).get("forward")
        vars(self._model)["forward"] = led
        try:
            yield
        finally:
            vars(self._model).pop("forward")
            if before is not None:
                vars(self._model)["forward"] = before

    def _generate(self) -> None:
        def forced(text: Tensor, scores: Tensor) -> Tensor:
            at = text.shape[1] - self._prompt.shape[1]
            if at >= len(self.sent):
                return scores
            return torch.full_like(scores, -torch.inf).scatter(1, self.sent[at][:, None].to(scores.device), 0.0)

        given = {} if self.cache is None else {self._name: self.cache}
        given |= {"attention_mask": self._mask, "generation_config": self._chosen, "logits_processor": [forced]}
        ended: Any = None
        try:
            self.made = self._model.generate(self._prompt, **given)
        except _StoppedError:
            pass
        # Whatever a model's own generate() meets first is raised where its forwards run.
        except BaseException as error:
            ended = error
        self._asked.put(ended)
