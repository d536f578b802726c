"""``generate``: transformers' own loop decides what each forward is given; the tokens that it takes are the path's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.transformers_api import can_generate, greedy
from kvinterp.paths.calls.base import Call, Feeder, Loop


@dataclasses.dataclass(frozen=True)
class Generate(Call):
    """Tokens, positions and masks as transformers' ``generate()`` gives them to the forward, on the path's cache."""

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses a model that has no ``generate()`` of transformers'."""
        check_generates(adapter, self)

    def feed(self, feeder: Feeder) -> Loop:
        """Runs each forward that ``generate()`` asks for, and tells it which token was chosen."""
        with Generating(feeder, self) as generating:
            for given in generating.forwards():
                made = generating.run(given)
                generating.answer(made, [(yield made.logits[:, -1])])

    def missing(self, witness: dict[str, int]) -> str:
        """Forwards on the cache."""
        return "" if witness.get("cached positions read") else "generate() read no cached position"


class _StoppedError(Exception):
    """Ends a ``generate()`` whose path is over."""


class Generating:
    """A ``generate()`` in a thread of its own that only prepares forwards: they are run where the hooks are, in the caller's.

    Args:
        feeder: The path's.
        call: The plan, as errors name it.
        more: What ``generate()`` is configured with besides.

    Attributes:
        cache: The path's.
        sent: The path's tokens, as far as they are known.

    Raises:
        UnsupportedError: The model keeps its own cache.
    """

    def __init__(self, feeder: Feeder, call: Call, **more: Any) -> None:
        feeder.start(feeder.prompt, feeder.steps)
        self.cache: Any = getattr(feeder.store.own, "model_cache", None)
        if self.cache is None:
            raise UnsupportedError(
                f"call={call} needs a cache of transformers', and this model keeps its own: leave it out."
            )
        self._feeder, self._model, self._call, self._more = feeder, feeder.adapter.model, call, more
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
        """What ``generate()`` gives each forward, by name."""
        while True:
            asked = self._asked.get()
            if isinstance(asked, BaseException):
                raise asked
            new, chunk = asked["input_ids"].shape[1], self._feeder.chunk
            if chunk is not None and not self.sent and new > chunk:
                raise UnsupportedError(f"call={self._call} feeds its prompt as it likes: leave chunk={chunk} out.")
            yield asked

    def run(self, given: dict[str, Any], shown: int | None = None) -> Any:
        """A forward's output; so many of its first tokens are shown, all of them for None."""
        new = given["input_ids"].shape[1]
        made = self._feeder.shown(new, functools.partial(self._model, **given), shown)
        self._feeder.count("forwards of generate()")
        self._feeder.count("cached positions read", int(self.cache.get_seq_length()) - new)
        return made

    def answer(self, made: Any, sent: list[Tensor]) -> None:
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
            self._asked.put(given)
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
        prompt = self._feeder.prompt
        # No token ends it: the path says when it is over.
        ended = {"eos_token_id": self._feeder.adapter.facts.vocabulary, "pad_token_id": 0}
        chosen = greedy(self._feeder.steps + 2, **ended, **self._more)

        def forced(text: Tensor, scores: Tensor) -> Tensor:
            at = text.shape[1] - prompt.shape[1]
            if at >= len(self.sent):
                return scores
            return torch.full_like(scores, -torch.inf).scatter(1, self.sent[at][:, None].to(scores.device), 0.0)

        try:
            given = {"attention_mask": torch.ones_like(prompt), "past_key_values": self.cache}
            generate: Any = self._model.generate
            generate(prompt, generation_config=chosen, logits_processor=[forced], **given)
            self._asked.put(UnsupportedError(f"generate() of this model ended by itself: leave call={self._call} out."))
        except _StoppedError:
            pass
        # Whatever a model's own generate() meets first is raised where the path runs.
        except BaseException as error:
            self._asked.put(error)


def check_generates(adapter: Adapter, call: Call) -> None:
    """Raises UnsupportedError for a model that has no ``generate()`` of transformers'."""
    if not can_generate(adapter.model):
        raise UnsupportedError(
            f"call={call} needs transformers' generate(), and a {type(adapter.model).__name__} has none: load the model with "
            "kind='native'."
        )
