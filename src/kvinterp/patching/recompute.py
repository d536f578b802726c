"""The recompute path as a pure function of its tokens: each prefix is computed once, and patched
runs resume in the middle.

Both shortcuts give the bits of the full computation, and a test checks this: computing a prefix
twice gives the same result, and the blocks before the first patched one return what they return
without the patch. Runs that resume at the same block can share a batch where a check showed that
this keeps the bits (docs/laws.md, law 9).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.hooks import first_of, put_first
from kvinterp.patching.by_row import PatchesByRow, batches
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import ExecutionPath
from kvinterp.paths.forwards import HookedForwards
from kvinterp.paths.model_cache import path_store, uncached
from kvinterp.paths.store import Store
from kvinterp.recording import PathHook


class PureRecompute:
    """One recompute path: remembers the logits of prefixes and runs patched forwards from the first
    patched block on.

    Args:
        adapter: The model.
        path: A recompute path without chunks.

    Raises:
        InputError: The path has another form.

    Attributes:
        blocks_run: How many blocks ran so far, the measure of work.
        forwards: How many forwards began so far, resumed ones included.
        fed: The tokens that runs are fed next, as numbers: whoever advances them reads all from
            the device at once.
    """

    def __init__(self, adapter: Adapter, path: ExecutionPath) -> None:
        if path.form != "recompute" or path.chunk is not None:
            raise InputError(f"path {path} was given: expected a recompute path without chunks.")
        self.adapter, self.path = adapter.at(dtype_named(path.dtype)), path
        self.blocks_run = self.forwards = 0
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self._captured: tuple[int, ...] | None = None
        self._outputs: list[Any] = []
        self._kernels = path.kernels.mode(self.adapter)
        self._plain_store: Store | None = None
        self._batches: dict[PatchHook, PatchesByRow] = {}
        self._batch_logits: dict[tuple[PatchHook, tuple[int, ...]], Tensor] = {}
        self.fed: Mapping[Tensor, int] = {}

    def batch(
        self, hooks: Sequence[PatchHook], prompt: Sequence[int], steps: int, batch_size: int
    ) -> None:
        """Lets runs that resume at the same block share a batch where a check showed that each
        keeps the bits it has alone.

        Args:
            hooks: The patches of each run.
            prompt: Token ids of all of them.
            steps: How many steps each runs.
            batch_size: Most runs in a batch.
        """
        if self._kernels.listeners:
            return
        groups: dict[Any, list[PatchHook]] = {}
        for hook in hooks:
            first = hook.first_layer
            groups.setdefault((first, hook.only_output(first) is None), []).append(hook)
        for hooks_together in groups.values():
            for batch in batches(
                self.adapter, self.path, hooks_together, prompt, steps, batch_size
            ):
                if len(batch) > 1:
                    self._batches |= dict.fromkeys(batch, PatchesByRow(batch))

    def logits(self, tokens: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after a prefix, computed once."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._forward(key, [], None)[0]
        return self._logits[key]

    def capture(
        self, tokens: Sequence[int], observer: PathHook | None = None
    ) -> Float[Tensor, " vocab"]:
        """Returns the logits after a prefix and keeps every block's output for patched runs on the
        same prefix.

        Args:
            tokens: The prefix.
            observer: A hook of the forward.
        """
        key = tuple(tokens)
        if self._captured != key:
            outputs: list[Any] = []
            with contextlib.ExitStack() as stack:
                for block in self.adapter.blocks:
                    handle = block.register_forward_hook(
                        lambda _, __, output: outputs.append(_in_rows(output, 1))
                    )
                    stack.enter_context(handle)
                self._logits[key] = self._forward(key, [], observer)[0]
            self._captured, self._outputs = key, outputs
        return self._logits[key]

    def patched(self, tokens: Sequence[int], step: int, hook: PatchHook) -> Float[Tensor, " vocab"]:
        """Logits after a prefix with patches, resumed at the first patched block if the prefix was
        captured.
        """
        key = tuple(tokens)
        batch = self._batches.get(hook)
        if batch is not None and key != self._captured:
            # This run has another text than the others now. A batch of the rest was not checked.
            for other in batch.hooks:
                del self._batches[other]
            batch = None
        if batch is None:
            return self._patched(key, step, hook)[0]
        if (hook, key) not in self._batch_logits:
            rows = self._patched(key, step, batch, len(batch.hooks))
            self._batch_logits |= {
                (each, key): row for each, row in zip(batch.hooks, rows, strict=True)
            }
        return self._batch_logits.pop((hook, key))

    def _patched(
        self, key: tuple[int, ...], step: int, hook: PatchHook | PatchesByRow, rows: int = 1
    ) -> Tensor:
        hook.at(step, len(key))
        outputs: list[Any] = []
        # A kernel mode with listeners has to see every layer.
        if key == self._captured and not self._kernels.listeners:
            first = hook.first_layer
            change = hook.only_output(first) if first < len(self._outputs) else None
            # The blocks that need not run; the last of them is patched if only its output is, which
            # is all that the next reads.
            outputs = self._outputs[: first if change is None else first + 1]
            if outputs:
                last = _in_rows(outputs[-1], rows)
                new = None if change is None else change(first_of(last))
                outputs[-1] = last if new is None else put_first(last, new)
        return self._forward(key, outputs, hook, rows)

    def whole(
        self, rows: Int[Tensor, "batch position"], *hooks: PathHook
    ) -> Float[Tensor, "batch position vocab"]:
        """Logits of every position of several prompts in one forward, with gradients where they are
        on.

        Args:
            rows: Token ids, a prompt a row.
            hooks: Hooks of the forward in this order, which is step 0.
        """
        for hook in hooks:
            hook.begin_step(0)
            hook.begin_pass()
        return self._logits_of(rows, [], hooks)

    @torch.no_grad()
    def _forward(
        self, tokens: tuple[int, ...], outputs: Sequence[Any], hook: PathHook | None, rows: int = 1
    ) -> Tensor:
        row = _written(tokens, rows, self.adapter.device)
        # A copy: a view would keep the logits of every position alive.
        return self._logits_of(row, outputs, [] if hook is None else [hook])[:, -1].clone()

    def _logits_of(self, row: Tensor, outputs: Sequence[Any], hooks: Sequence[PathHook]) -> Tensor:
        """Logits of every position; the first blocks do not run but return the given outputs."""
        adapter = self.adapter
        self.blocks_run += adapter.facts.layers - len(outputs)
        self.forwards += 1
        forwards = HookedForwards(adapter, self._kernels, [hook.listeners for hook in hooks])
        alone = not hooks and row.shape[0] == 1
        store = uncached(
            adapter, self.path, row, path_store, hooks, self._plain_store if alone else None
        )
        self._plain_store = store if alone else self._plain_store
        with forwards.attached(), adapter.resumed(len(outputs), outputs):
            return forwards.call(adapter.forward, row, store)


@functools.lru_cache(maxsize=1)
def _written(tokens: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Tokens on a device; runs on the same tokens share them, because each write makes the host
    wait.
    """
    return torch.tensor([tokens] * rows, device=device)


def _in_rows(output: Any, rows: int) -> Any:
    """A copy of a block's output for one row, repeated for several rows; the next block may write
    into it.
    """
    if isinstance(output, Tensor):
        return output.expand(rows, *output.shape[1:]).contiguous() if rows > 1 else output.clone()
    return (
        type(output)(_in_rows(part, rows) for part in output)
        if isinstance(output, tuple | list)
        else output
    )
