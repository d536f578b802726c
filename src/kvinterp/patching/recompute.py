"""The recompute path as what it is, a pure function of its tokens: prefixes computed once, patched runs resumed.

Both shortcuts give the bits of the long way round, and a test says so: a prefix computed twice is the same computation; and
the blocks before the first patched one would return just what they returned without the patch. Lanes that resume at the same
block can go in one batch, where that was checked to keep the bits (docs/laws.md, law 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.hooks import first_of, put_first
from kvinterp.patching.by_row import PatchesByRow, together
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import ExecutionPath
from kvinterp.paths.forwards import HookedForwards
from kvinterp.paths.model_cache import path_store, uncached
from kvinterp.paths.store import Store
from kvinterp.recording import PathHook


class PureRecompute:
    """One recompute path: prefix to logits, remembered; and patched, from the first patched block on.

    Args:
        adapter: The model.
        path: A recompute path without chunks.

    Raises:
        InputError: The path is another.

    Attributes:
        blocks_run: Blocks run so far, the measure of work.
        forwards: Forwards begun so far, resumed ones included.
    """

    def __init__(self, adapter: Adapter, path: ExecutionPath) -> None:
        if path.form != "recompute" or path.chunk is not None:
            raise InputError(f"path {path} was given: expected a recompute path without chunks.")
        self.adapter, self.path = adapter.at(dtype_named(path.dtype)), path
        self.blocks_run = 0
        self.forwards = 0
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self._captured: tuple[int, ...] | None = None
        self._outputs: list[Any] = []
        self._kernels = path.kernels.mode(self.adapter)
        self._unheard: Store | None = None
        self._beside: dict[PatchHook, PatchesByRow] = {}
        self._found: tuple[PatchesByRow | None, tuple[int, ...], dict[PatchHook, Tensor]] = None, (), {}
        self._read: tuple[Tensor, int] | None = None

    def together(self, hooks: Sequence[PatchHook], prompt: Sequence[int], steps: int, batch_size: int) -> None:
        """Lets lanes that resume at the same block go in one batch, where this was checked to give each the bits it has alone.

        Args:
            hooks: The patches of each lane.
            prompt: Token ids of all of them.
            steps: Steps each will run.
            batch_size: Most lanes in a batch.
        """
        if self._kernels.listeners:
            return
        like: dict[Any, list[PatchHook]] = {}
        for hook in hooks:
            first = hook.first_layer
            like.setdefault((first, hook.only_output(first) is None), []).append(hook)
        for lanes in like.values():
            for batch in together(self.adapter, self.path, lanes, prompt, steps, batch_size):
                if len(batch) > 1:
                    self._beside |= dict.fromkeys(batch, PatchesByRow(batch))

    def number(self, token: Int[Tensor, " batch=1"]) -> int:
        """A token that was fed; lanes that are fed the same one have it read from the device once."""
        if self._read is None or self._read[0] is not token:
            self._read = token, int(token)
        return self._read[1]

    def logits(self, tokens: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after a prefix, computed the first time it is asked for."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._forward(key, [], None)[0]
        return self._logits[key]

    def capture(self, tokens: Sequence[int], heard: PathHook | None = None) -> Float[Tensor, " vocab"]:
        """As :meth:`logits`, and keeps every block's output for the patched runs on the same prefix.

        Args:
            tokens: The prefix.
            heard: What else hears the forward.
        """
        key = tuple(tokens)
        if self._captured != key:
            outputs: list[Any] = []

            def keep(_: Any, __: Any, output: Any) -> None:
                outputs.append(_in_rows(output, 1))

            hooks = [block.register_forward_hook(keep) for block in self.adapter.blocks]
            try:
                self._logits[key] = self._forward(key, [], heard)[0]
            finally:
                for hook in hooks:
                    hook.remove()
            self._captured, self._outputs = key, outputs
        return self._logits[key]

    def patched(self, tokens: Sequence[int], step: int, hook: PatchHook) -> Float[Tensor, " vocab"]:
        """Logits after a prefix with patches applied, resumed at the first patched block where the prefix was captured."""
        key = tuple(tokens)
        batch = self._beside.get(hook)
        if batch is not None and key != self._captured:
            # It has left the text that the others are on: theirs is another batch, and that was not checked.
            for each in batch.hooks:
                del self._beside[each]
            batch = None
        if batch is None:
            return self._patched(key, step, hook)[0]
        if self._found[:2] != (batch, key):
            rows = self._patched(key, step, batch, len(batch.hooks))
            self._found = batch, key, dict(zip(batch.hooks, rows, strict=True))
        return self._found[2].pop(hook)

    def _patched(self, key: tuple[int, ...], step: int, hook: PatchHook | PatchesByRow, rows: int = 1) -> Tensor:
        hook.at(step, len(key))
        # A kernel mode that follows the layers has to see them all.
        kept = self._kept(hook, rows) if key == self._captured and not self._kernels.listeners else []
        return self._forward(key, kept, hook, rows)

    def _kept(self, hook: PatchHook | PatchesByRow, rows: int) -> list[Any]:
        """What the blocks that need not run return: as captured, the last of them patched where only its output is."""
        first = hook.first_layer
        change = hook.only_output(first) if first < len(self._outputs) else None
        kept = self._outputs[: first if change is None else first + 1]
        if kept:
            # The next block reads the last of them, and no other.
            last = _in_rows(kept[-1], rows)
            new = None if change is None else change(first_of(last))
            kept[-1] = last if new is None else put_first(last, new)
        return kept

    def whole(self, rows: Int[Tensor, "batch position"], *hooks: PathHook | None) -> Float[Tensor, "batch position vocab"]:
        """Logits of every position of several prompts in one forward, with gradients where they are on.

        Args:
            rows: Token ids, a prompt a row.
            hooks: What hears the forward in this order, as step 0.
        """
        heard = [hook for hook in hooks if hook is not None]
        for hook in heard:
            hook.begin_step(0)
            hook.begin_pass()
        return self._logits_of(rows, [], heard)

    @torch.no_grad()
    def _forward(self, tokens: tuple[int, ...], kept: Sequence[Any], hook: PathHook | None, rows: int = 1) -> Tensor:
        row = torch.tensor([tokens] * rows, device=self.adapter.device)
        # A copy: a view would keep the logits of every position alive.
        return self._logits_of(row, kept, [] if hook is None else [hook])[:, -1].clone()

    def _logits_of(self, row: Tensor, kept: Sequence[Any], hooks: Sequence[PathHook]) -> Tensor:
        adapter = self.adapter
        self.blocks_run += adapter.facts.layers - len(kept)
        self.forwards += 1
        forwards = HookedForwards(adapter, self._kernels, [each.listeners for each in hooks])
        alone = not hooks and row.shape[0] == 1
        store = uncached(adapter, self.path, row, path_store, hooks, self._unheard if alone else None)
        self._unheard = store if alone else self._unheard
        with forwards.attached(), adapter.resumed(len(kept), kept):
            return forwards.call(adapter.forward, row, store)


def _in_rows(output: Any, rows: int) -> Any:
    """A copy of what a block returned of one row, as it returns it of several alike; the next block may write into it."""
    if isinstance(output, Tensor):
        return output.expand(rows, *output.shape[1:]).contiguous() if rows > 1 else output.clone()
    return type(output)(_in_rows(each, rows) for each in output) if isinstance(output, tuple | list) else output
