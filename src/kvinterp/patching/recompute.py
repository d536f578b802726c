"""The recompute path as what it is, a pure function of its tokens: prefixes computed once, patched runs resumed.

Both shortcuts give the bits of the long way round, and a test says so: a prefix computed twice is the same computation; and
the blocks before the first patched one would return just what they returned without the patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import ExecutionPath
from kvinterp.paths.forwards import HookedForwards
from kvinterp.paths.model_cache import path_store, uncached
from kvinterp.paths.store import Store
from kvinterp.recording import PathHook

__all__ = ["PureRecompute"]


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

    def logits(self, tokens: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Logits after a prefix, computed the first time it is asked for."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._forward(key, [], None)
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
            hooks = [b.register_forward_hook(lambda _, __, output: outputs.append(output)) for b in self.adapter.blocks]
            try:
                self._logits[key] = self._forward(key, [], heard)
            finally:
                for hook in hooks:
                    hook.remove()
            self._captured, self._outputs = key, outputs
        return self._logits[key]

    def patched(self, tokens: Sequence[int], step: int, hook: PatchHook) -> Float[Tensor, " vocab"]:
        """Logits after a prefix with patches applied, resumed at the first patched block where the prefix was captured."""
        key = tuple(tokens)
        hook.at(step, len(key))
        # A kernel mode that follows the layers has to see them all.
        kept = self._kept(hook) if key == self._captured and not self._kernels.listeners else []
        return self._forward(key, kept, hook)

    def _kept(self, hook: PatchHook) -> list[Any]:
        """What the blocks that need not run return: as captured, the last of them patched where only its output is."""
        first = hook.first_layer
        kept = self._outputs[:first]
        change = hook.only_output(first) if first < len(self._outputs) else None
        if change is not None:
            output = self._outputs[first]
            tensor = output[0] if isinstance(output, tuple) else output
            new = change(tensor)
            new = tensor if new is None else new
            kept.append((new, *output[1:]) if isinstance(output, tuple) else new)
        return kept

    @torch.no_grad()
    def _forward(self, tokens: tuple[int, ...], kept: Sequence[Any], hook: PathHook | None) -> Tensor:
        adapter = self.adapter
        self.blocks_run += adapter.facts.layers - len(kept)
        self.forwards += 1
        row = torch.tensor([tokens], device=adapter.device)
        hooks = [] if hook is None else [hook]
        forwards = HookedForwards(adapter, self._kernels, [each.listeners for each in hooks])
        before = self._unheard if hook is None else None
        store = uncached(adapter, self.path, row, path_store, hooks, before)
        self._unheard = store if hook is None else self._unheard
        with forwards.attached(), adapter.resumed(len(kept), kept):
            logits = forwards.call(adapter.forward, row, store)
        # A copy: a view would keep the logits of every position alive.
        return logits[0, -1].clone()
