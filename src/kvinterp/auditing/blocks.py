"""A model as its own users run it: its own forward, its own cache, and hooks on its blocks.

The audit asks whether a model's cache is right, so it must not put kvinterp's cache in the place of
the model's. That is why this module, unlike the loops in ``paths/``, lets each model make the cache
it makes by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.common.checks import check_seed
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.hooks import first_of, put_first, stream_hook
from kvinterp.models.transformers_cache import STATES
from kvinterp.paths.kernels import KernelMode, Kernels, Native
from kvinterp.paths.vocabulary import padding_of

Call = tuple[int, int]
"""A block of the model, and how often it had run before in the same forward (a few models run a
block twice).
"""


class BlockModel:
    """One model in one dtype and its blocks, with its own cache.

    Args:
        adapter: The model, already in the dtype.
        kernels: The kernel mode every forward runs under; default: the machine's own.
        only: The blocks in question, the number of blocks for the head: in the others a fixed order
            of additions rests. What stands outside all blocks has it always, since every block
            computes with it. Default: the whole model.

    Attributes:
        padding: The logits that stand for no token, minus infinity in every row: there that counts
            as 0. None where it is not known yet.
    """

    def __init__(
        self, adapter: Adapter, kernels: Kernels | None = None, only: Collection[int] | None = None
    ) -> None:
        self.adapter = adapter
        self.model: Any = adapter.model
        self.device = adapter.device
        self.mode: KernelMode = (kernels or Native()).mode(adapter)
        self.padding: Tensor | None = None
        self.blocks = list(adapter.blocks)
        # A bridge hangs transformers' modules under names of its own, which say nothing to a
        # reader.
        self.names = {
            m: name.replace("._original_component", "")
            for name, m in adapter.source.named_modules()
        }
        self.dtype = adapter.dtype
        parts = [*self.blocks, self.end("output")]
        self._rest = [
            part
            for n, part in enumerate(parts)
            if part is not None and only is not None and n not in only
        ]

    def end(self, which: str) -> nn.Module | None:
        """The module that embeds tokens (``"input"``) or makes logits (``"output"``), where the
        model tells it.
        """
        getter = getattr(self.adapter.source, f"get_{which}_embeddings", None)
        module = getter() if getter is not None else None
        return module if isinstance(module, nn.Module) else None

    @property
    def decoder(self) -> nn.Module | None:
        """The module that holds all blocks and the final norm, where the model tells it."""
        getter = getattr(self.adapter.source, "get_decoder", None)
        module = getter() if getter is not None else None
        return (
            module if isinstance(module, nn.Module) and module is not self.adapter.source else None
        )

    def end_name(self, which: str) -> str:
        """The path of that module, or an empty text."""
        module = self.end(which)
        return "" if module is None else self.name_of(module)

    @torch.no_grad()
    def recompute(self, tokens: Tensor) -> Tensor:
        """Logits of every token without a cache, ``[batch, position, vocabulary]``."""
        # Beside a decode, which goes on from what it left in the modules.
        with self.running(), self.adapter.own_state([]):
            return self.unpadded(self.adapter.forward(tokens))

    @torch.no_grad()
    def feed(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Logits of new tokens and the cache after them, as the model's own users run it.

        Args:
            tokens: ``[batch, new]``.
            cache: What the call before returned, a cache object of transformers', or None for the
                model's own.

        Raises:
            UnsupportedError: The model returns no cache that is known here.
        """
        with self.running():
            logits, cache = self.adapter.call_with_cache(tokens, cache, None, None)
        if cache is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} returned no cache though use_cache was true: there is no cached path to audit."
            )
        return self.unpadded(logits), cache

    def moved(self, tokens: Tensor, size: Callable[[int], float], seed: int = 0) -> Tensor:
        """A recomputation in which what a block returns is off, at random signs, by so much of each
        row's largest number.
        """
        generator = torch.Generator().manual_seed(seed)

        def change(layer: int, made: Tensor) -> Tensor:
            signs = (torch.randint(0, 2, made.shape, generator=generator) * 2 - 1).to(made.device)
            off = size(layer) * made.double().abs().amax(-1, keepdim=True) * signs
            return (made.double() + off).to(made.dtype)

        with moving(self.blocks, change):
            return self.recompute(tokens)

    def unpadded(self, logits: Tensor) -> Tensor:
        """The logits with 0 where those that stand for no token are minus infinity."""
        if self.padding is None or not bool(self.padding.any()):
            return logits
        return logits.masked_fill(self.padding & (logits == -torch.inf), 0.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The kernels that every forward runs under."""
        listeners = {hook_point: [one] for hook_point, one in self.mode.listeners.items()}
        with (
            self.adapter.attached(list(listeners)),
            self.mode,
            self.adapter.listening(listeners),
            contextlib.ExitStack() as hooks,
        ):
            hooks.callback(self._resting, False)
            for part in self._rest:
                hooks.enter_context(part.register_forward_pre_hook(lambda *_: self._resting(True)))
                hooks.enter_context(
                    part.register_forward_hook(lambda *_: self._resting(False), always_call=True)
                )
            yield

    def _resting(self, now: bool) -> None:
        self.mode.resting = now

    def states(self, cache: Any, layer: int) -> dict[str, Tensor]:
        """The recurrent and convolution states a layer's cache holds, copied; empty for an
        attention layer.
        """
        states, layers = {}, getattr(cache, "layers", None) or []
        for attribute, name in STATES.items() if layer < len(layers) else ():
            value = getattr(layers[layer], attribute, None)
            tensors = (
                [*value.values()]
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else [value]
            )
            for index, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
                states[f"{name} {index}" if index else name] = tensor.clone()
        return states

    def name_of(self, module: nn.Module) -> str:
        """The module's path in the model."""
        return self.names.get(module, type(module).__name__)


@contextlib.contextmanager
def referenced(model: BlockModel, tokens: Tensor) -> Iterator[BlockHooks]:
    """A model's blocks seen for as long as the context lasts, beside what one forward without a
    cache computed in them.
    """
    hooks = BlockHooks(model)
    with hooks.attached():
        hooks.refer_to(tokens)
        yield hooks


@contextlib.contextmanager
def moving(
    blocks: Sequence[nn.Module], change: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Puts what ``change`` gives for a layer and its output in the place of that output, for as
    long as the context lasts.
    """
    with contextlib.ExitStack() as hooks:
        for layer, block in enumerate(blocks):

            def after(_: nn.Module, __: Any, output: Any, layer: int = layer) -> Any:
                return put_first(output, change(layer, first_of(output)))

            hooks.enter_context(block.register_forward_hook(after))
        yield


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model fresh from its config drops out at random until it is told not to; it is left as it
    was.
    """
    model = model.model if isinstance(model, Adapter) else model
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@dataclasses.dataclass
class Reference:
    """What one forward without a cache computed, row by row.

    Attributes:
        tokens: ``[1, position]``.
        logits: ``[position, vocabulary]``.
        inputs: What each block was given, ``[1, position, width]``, by block and by how often it
            had run before.
        outputs: What each block returned.
        normed: What the last one returned, after the final norm; None where the model does not tell
            it.
    """

    tokens: Tensor
    logits: Tensor
    inputs: dict[Call, Tensor]
    outputs: dict[Call, Tensor]
    normed: Tensor | None = None


class BlockHooks:
    """Sees what every block is given and returns, and can put a reference's rows in the place of
    both.

    With forced rows each block computes from exactly what the reference computed from, at this
    position and at all earlier ones, so what differs in its output was born inside it; and what
    stands between two blocks is given exactly what the first returned in the reference, so what
    differs in the second's input was born between them.

    Attributes:
        reference: The tokens that are fed, and the rows that blocks are forced to.
        inputs: What each block was given in the last forward, before anything was put in its place,
            by call, ``[..., position, width]``: positions last but one, wherever the model has
            them.
        outputs: What each returned, likewise.
        normed: What the last one returned, after the final norm; None where the model does not tell
            it.
    """

    reference: Reference
    normed: Tensor | None = None

    def __init__(self, model: BlockModel) -> None:
        self.model = model
        self.inputs: dict[Call, Tensor] = {}
        self.outputs: dict[Call, Tensor] = {}
        self._axes: dict[Call, int] = {}
        self._count: int | None = None
        self._forced_from: int | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[BlockHooks]:
        """Hooks the blocks for as long as the context lasts."""
        with contextlib.ExitStack() as hooks:
            for layer, block in enumerate(self.model.blocks):
                before = stream_hook(functools.partial(self._met, "inputs", layer))
                hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(moving(self.model.blocks, functools.partial(self._met, "outputs")))
            if (decoder := self.model.decoder) is not None:
                hooks.enter_context(decoder.register_forward_hook(self._met_normed))
            yield self

    def _met_normed(self, _: nn.Module, __: Any, output: Any) -> None:
        tensor = getattr(output, "last_hidden_state", first_of(output))
        self.normed = tensor.clone() if isinstance(tensor, Tensor) else None

    def _met(self, side: str, layer: int, tensor: Tensor) -> Tensor | None:
        """Keeps what a block is given or returns; what goes in its place, or None."""
        rows_seen: dict[Call, Tensor] = getattr(self, side)
        call = (layer, sum(n == layer for n, _ in rows_seen))
        if self._count is not None:
            # Positions are last but one, but where a model carries several streams at once and
            # keeps them there.
            last = tensor.dim() - 2
            self._axes[call] = next(
                (axis for axis in (last, 1) if tensor.shape[axis] == self._count), last
            )
        # Copies, of what is seen and of what is put there: a block may compute in the memory that
        # it is given.
        rows_seen[call] = tensor.clone().movedim(self._axes.get(call, tensor.dim() - 2), -2)
        start = self._forced_from
        if start is None or (rows := getattr(self.reference, side).get(call)) is None:
            return None
        count = self.inputs[call].shape[-2]
        return (
            rows[..., start : start + count, :]
            .movedim(-2, self._axes.get(call, rows.dim() - 2))
            .clone()
        )

    def refer_to(self, tokens: Tensor) -> Reference:
        """Runs these tokens without a cache and keeps every row, as the reference from now on."""
        self.model.padding = None
        self._count = tokens.shape[1]
        try:
            logits = self._run(None, self.model.recompute, tokens)[0]
        finally:
            self._count = None
        self.model.padding = padding_of([logits])
        logits = self.model.unpadded(logits)
        self.reference = Reference(tokens, logits, self.inputs, self.outputs, self.normed)
        return self.reference

    def feed(
        self, start: int, stop: int, cache: Any = None, forced: str = "yes"
    ) -> tuple[Tensor, Any]:
        """Feeds tokens ``start`` to ``stop`` of the reference against a cache, every block given
        the reference's rows.

        Args:
            start: The first token.
            stop: Where they end.
            cache: What the call before returned, or None.
            forced: ``"no"`` lets the model run freely, as its users do.
        """
        tokens = self.reference.tokens[:, start:stop]
        return self._run(start if forced == "yes" else None, self.model.feed, tokens, cache)

    def recompute(self, stop: int, forced: str = "yes") -> Tensor:
        """Logits of the first ``stop`` tokens without a cache, every block given the reference's
        rows.
        """
        return self._run(
            0 if forced == "yes" else None, self.model.recompute, self.reference.tokens[:, :stop]
        )

    def _run(self, forced_from: int | None, forward: Callable[..., Any], *given: Any) -> Any:
        self.inputs, self.outputs, self.normed = {}, {}, None
        self._forced_from = forced_from
        try:
            return forward(*given)
        finally:
            self._forced_from = None


def prompts_for(adapter: Adapter, count: int, length: int, seed: int = 0) -> list[Sequence[int]]:
    """Random prompts: every token id equally likely, none of those that end a sequence."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    ends = adapter.end_tokens
    ids = range(min(adapter.facts.vocabulary, 50_000))
    allowed = torch.tensor([t for t in ids if t not in ends] or list(ids))
    return [
        allowed[torch.randint(len(allowed), (length,), generator=generator)].tolist()
        for _ in range(count)
    ]
