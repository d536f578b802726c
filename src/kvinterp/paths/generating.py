"""A ``generate()`` of transformers' whose forwards are run by whoever drives it, one by one; the tokens it takes are given."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.models.hooks import wrapping_methods


class _StoppedError(BaseException):
    """Ends a ``generate()`` that is over for whoever runs its forwards; no error, which a model's own code might catch."""


class Generating:
    """A ``generate()`` in a thread of its own that only prepares forwards: they are run where the hooks are, in the caller's.

    Args:
        model: A transformers model.
        prompt: ``[row, position]``.
        chosen: The config of its ``generate()``.
        given: What else its ``generate()`` is given, by name: a mask, a cache.

    Attributes:
        sent: The tokens that it is made to take, as far as they are known; those that it chooses where there are none.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, config: Any, **arguments: Any) -> None:
        self._model: Any = model
        self._prompt, self._given = prompt, {"generation_config": config, **arguments}
        self.sent: list[Tensor] = []
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._generate, daemon=True)

    def __enter__(self) -> Generating:
        with contextlib.ExitStack() as stack:
            stack.enter_context(wrapping_methods([self._model], "forward", self._led))
            stack.callback(self._end)
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def forwards(self) -> Iterator[dict[str, Any]]:
        """What ``generate()`` gives each forward, by name, until it returns."""
        while (arguments := self._asked.get()) is not None:
            if isinstance(arguments, BaseException):
                raise arguments
            yield arguments

    def answer(self, output: Any, sent: Sequence[Tensor] = ()) -> None:
        """Hands back a forward's output, and the tokens that follow."""
        self.sent += sent
        self._answers.put(output)

    def _end(self) -> None:
        self._answers.put(None)
        self._thread.join()

    def _led(self, _: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leads the forwards of that thread, and of no other, to the caller."""
        if threading.current_thread() is not self._thread:
            return forward(*args, **kwargs)
        self._asked.put({**dict(zip(("input_ids",), args, strict=False)), **kwargs})
        output = self._answers.get()
        if output is None:
            raise _StoppedError
        return output

    def _generate(self) -> None:
        def forced(text: Tensor, scores: Tensor) -> Tensor:
            at = text.shape[1] - self._prompt.shape[1]
            if at >= len(self.sent):
                return scores
            return torch.full_like(scores, -torch.inf).scatter(1, self.sent[at][:, None].to(scores.device), 0.0)

        ended: Any = None
        try:
            self._model.generate(self._prompt, logits_processor=[forced], **self._given)
        except _StoppedError:
            pass
        # Whatever a model's own generate() meets first is raised where its forwards run.
        except BaseException as error:
            ended = error
        self._asked.put(ended)
