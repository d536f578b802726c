"""One face for every kind of model, so that nothing outside ``models/`` asks which kind it has.

An adapter forwards tokens with or without a cache, names the sites it has, hooks a site at a layer, and tells its facts.
The loops in ``paths/`` hand it a :class:`KVStore`, over the model's own cache or over memory of kvinterp's; the adapter
gives the latter the shape of whatever cache its model expects.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvinterp.data.chat import prompt_ids
from kvinterp.data.example import Prompt
from kvinterp.data.tokenizing import ids_of
from kvinterp.errors import InputError, UnsupportedError, unexpected, unknown
from kvinterp.models.attaching import Attaching, check_uncompiled
from kvinterp.models.caches import CacheKind, KVStore, OwnCache
from kvinterp.models.facts import ModelInfo
from kvinterp.models.hashing import weights_hash
from kvinterp.models.hooks import hooks_suspended, remove_own_hooks
from kvinterp.models.state import Leftover, Snapshot, as_made

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

CacheRead = Callable[[int, int, Tensor, Tensor], "tuple[Tensor, Tensor] | None"]
"""Called with layer, absolute position of the first key, keys and values."""

KeysValuesRead = Callable[[int, Tensor, Tensor], "tuple[Tensor, Tensor]"]


class NotingStore:
    """A store that holds nothing, and notes a copy of what each layer hands it.

    Args:
        adapter: The model.

    Attributes:
        noted: Layer, keys and values of each update, on the device of the tokens.
    """

    keeps = False
    model_cache: Any = None
    own: OwnCache | None = None

    def __init__(self, adapter: Adapter) -> None:
        facts = adapter.facts
        self._empty = torch.empty(1, facts.kv_heads, 0, facts.head_dim, dtype=adapter.dtype, device=adapter.device)
        self.noted: list[tuple[int, Tensor, Tensor]] = []

    def length(self, layer: int) -> int:
        """Nothing is held."""
        return 0

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Nothing."""
        return self._empty, self._empty

    def update(self, layer: int, keys: Tensor, values: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Hands back what comes."""
        kept = [each.detach().to(self._empty.device, copy=True) for each in (keys, values)]
        self.noted.append((layer, kept[0], kept[1]))
        return keys, values


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Turns ``"float16"`` (or a torch dtype, or None) into a torch dtype.

    Raises:
        InputError: The name is not one of float16, bfloat16, float32, float64.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


class Adapter(Attaching):
    """A model, its tokenizer and its facts behind the one face the rest of kvinterp talks to."""

    kind: str
    stored: str = ""
    """How its weights were stored where that is another format than they are computed in: of a GGUF file its types."""
    position_major_cache: bool = False
    """Whether this model's own cache lays a position's heads side by side in memory."""
    plain: bool = False
    """Whether it is run as its library's own users run it: masks, positions and caches of theirs can be given."""
    takes: frozenset[str] = frozenset()
    """Which of a mask and positions its own forward may be given by name."""
    cache_name: str = ""
    """What its own forward calls the cache that it takes and returns."""

    def __init__(self, model: nn.Module, facts: ModelInfo, tokenizer: Any = None) -> None:
        super().__init__()
        self.model = model
        self.facts = facts
        self.tokenizer = tokenizer
        self._copies: dict[torch.dtype, Adapter] = {}
        self._hash = ""
        self._snapshot: Snapshot | None = None
        self._inside = 0
        self.checked: dict[tuple[Any, ...], Any] = {}

    # What a kind must say ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def logits(self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """What :meth:`forward` returns, of a store that keeps something or of a model whose attention is not heard."""

    @abc.abstractmethod
    def called(self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Any]:
        """A forward with a cache as the model's own users run it: its logits, and its cache or None where it gives none.

        Args:
            tokens: ``[batch, new]``.
            cache: What the call before returned, a cache object of the library's, or None for the model's own.
            mask, positions: As for :meth:`forward`; those that it :attr:`takes` are read.
        """

    @abc.abstractmethod
    def own_cache(self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype) -> OwnCache | None:
        """A new, empty cache as this model's library makes it, or None where the model makes one in its own forward.

        Args:
            kind: Which cache.
            batch: Number of sequences.
            capacity: Most positions that will be put in.
            dtype: What it holds.

        Raises:
            UnsupportedError: This model cannot run with it.
        """

    @abc.abstractmethod
    def cast(self, dtype: torch.dtype) -> Adapter:
        """A copy of the model computing in another dtype, from the same weights."""

    @abc.abstractmethod
    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The cache that a block is handed in a forward the user runs on their own, or None."""

    @abc.abstractmethod
    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """A cache site after a block ran, from the cache that it was handed; None where that does not hold it."""

    @abc.abstractmethod
    def cached_length(self, cache: Any) -> int:
        """Positions held by the cache that a block is handed; 0 without one."""

    @abc.abstractmethod
    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Lets ``on_read`` replace what a block's attention reads from the user's own cache; returns how to undo that.

        Raises:
            InputError: The block is handed no cache.
        """

    def call_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What :meth:`block_cache` will be at the first block, among the arguments of the model's own call."""
        return self.block_cache(args, kwargs)

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values, so that a store can also sit in a pass without a cache."""
        return True

    @property
    def takes_mask(self) -> bool:
        """Whether its forward can be told which positions hold no token."""
        return False

    @property
    def takes_static(self) -> bool:
        """Whether its library lets ``generate()`` give it a cache of a fixed size."""
        return False

    # What every kind shares ----------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Int[Tensor, "batch new"],
        store: KVStore | None = None,
        mask: Int[Tensor, "batch position"] | None = None,
        positions: Int[Tensor, "batch new"] | None = None,
    ) -> Float[Tensor, "batch new vocabulary"]:
        """Logits for every new token; with a store, attention also reads what the store holds.

        Args:
            tokens: What is fed.
            store: What was fed before.
            mask: Of all positions so far, 0 where there is no token; only where :attr:`takes_mask`.
            positions: Of the new tokens, those that are masked not counted; given with a mask.
        """
        if store is not None and not store.keeps and self.hears_attention:
            with self.attention_led(store.update):
                return self.logits(tokens, None, mask, positions)
        return self.logits(tokens, store, mask, positions)

    def __repr__(self) -> str:
        """Which model, of which kind, in which dtype and where."""
        return f"<{self.facts.name}: {self.kind}, {str(self.dtype).removeprefix('torch.')}, {self.device}>"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the weights are in."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device tokens must be on."""
        return next(self.model.parameters()).device

    def at(self, dtype: torch.dtype | None) -> Adapter:
        """This model computing in ``dtype``; itself where that is the dtype it has.

        A copy carries none of kvinterp's own hooks. Within :meth:`one_call` it is made once, outside of it anew.
        """
        if dtype is None or dtype == self.dtype:
            return self
        if dtype in self._copies:
            return self._copies[dtype]
        copy = self.cast(dtype)
        copy.stored = self.stored
        remove_own_hooks(copy.model)
        _check_apart(self.model, copy.model, self.facts.name)
        if self._calls:
            self._copies[dtype] = copy
        return copy

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Runs one call of a verb: copies in another dtype and the weights' hash are made once in it, and forgotten behind it.

        Raises:
            UnsupportedError: A part of the model is compiled.
        """
        if not self._calls:
            check_uncompiled(self.model, self.facts.name)
        self._calls += 1
        try:
            with self.left_as_found():
                yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._copies, self._hash, self._evaluating = {}, "", False

    def lasting(self) -> Adapter:
        """This adapter, all of whose life is one call: for a model that nobody else has, and so nobody edits."""
        self._calls += 1
        return self

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Gives back the attributes and buffers of the model's modules as they are found here, whatever ends the context."""
        if self._snapshot is not None:
            yield
            return
        with as_made(self.source):
            self._snapshot = found = Snapshot(self.model, self.source)
            try:
                yield
            finally:
                self._snapshot = None
                found.taken("thorough")

    @contextlib.contextmanager
    def own_state(self, state: list[Leftover]) -> Iterator[None]:
        """Gives what runs inside the context a state of its own, where modules keep state between forwards.

        It begins with what was found (:func:`as_made`), and what it leaves is taken out at its end, so that runs which take
        turns on one model do not overwrite each other's.

        Args:
            state: What the context before left, which this one goes on from; filled anew at its end.
        """
        with self.left_as_found():
            found: Any = self._snapshot
            # Outside of all others there is what was found.
            around = found.taken() if self._inside else Leftover()
            self._inside += 1
            if state:
                found.put(state.pop())
            try:
                yield
            finally:
                self._inside -= 1
                state.append(found.taken())
                found.put(around)

    def attention_led(self, read: KeysValuesRead) -> contextlib.AbstractContextManager[None]:
        """Leads the keys and values of every layer of forwards without a cache through ``read``, as attention is handed them.

        Args:
            read: Called with layer, keys and values; what it returns is what attention reads.
        """
        raise NotImplementedError

    @property
    def hears_attention(self) -> bool:
        """Whether each layer's keys and values can be heard in a forward without a cache; seen once on a few tokens."""
        key = self.facts.attention, "hears attention"
        if key not in self.checked:
            # The store below is then shown to the model as a cache.
            self.checked[key] = False
            lacks = contextlib.suppress(NotImplementedError, AttributeError, RuntimeError)
            with lacks, self.own_state([]), torch.no_grad(), hooks_suspended(self.model):
                self.checked[key] = self._heard_as_cached()
        return bool(self.checked[key])

    def _heard_as_cached(self) -> bool:
        """Whether each layer shows its keys and values once, in the shape in which it hands them to a cache."""
        # Another number than that of the heads, so that the dimensions can be told apart.
        count = next(n for n in (5, 7, 11) if n not in (self.facts.query_heads, self.facts.kv_heads))
        tokens = torch.arange(3, 3 + count, device=self.device)[None] % self.facts.vocabulary
        plain, cached = NotingStore(self), NotingStore(self)
        with self.attention_led(plain.update):
            self.forward(tokens)
        self.forward(tokens, cached)
        shapes = [[(layer, *(each.shape for each in pair)) for layer, *pair in store.noted] for store in (plain, cached)]
        return shapes[0] == shapes[1] and [layer for layer, *_ in plain.noted] == [*range(self.facts.layers)]

    def supports(self, site: str, layer: int = 0) -> bool:
        """Whether this model, as it was loaded, can give a site."""
        try:
            self.tap(site, layer)
        except UnsupportedError:
            return False
        return True

    def derives(self, site: str) -> bool:
        """Whether a site is worked out beside a kernel that does not show it: it can be recorded, and not be patched."""
        return False

    def encode(self, text: str | Prompt) -> list[int]:
        """Token ids of a text, with the special tokens the tokenizer puts in front, or of a prompt as every verb feeds it.

        Raises:
            InputError: It is neither, there is no tokenizer, or the text gives no token.
        """
        if isinstance(text, Prompt):
            return prompt_ids(self, text)
        if not isinstance(text, str):
            raise unexpected("text", text, "a text, or a prompt as kv.load_prompts() gives it")
        if self.tokenizer is None:
            raise InputError(
                f"model {self.facts.name} has no tokenizer: give token ids instead of text, or wrap it with one, "
                "kv.wrap(model, tokenizer=...)."
            )
        tokens = ids_of(self.tokenizer, text, self.facts.name)
        if not tokens:
            raise InputError(f"prompt {text[:40]!r} gives no token: give a prompt with text in it.")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; the ids themselves where there is no tokenizer."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(list(tokens))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped model gives: logits of TransformerLens's models, transformers' output of its own."""
        return self.model(*args, **kwargs)

    def to_tokens(self, text: str | Prompt | Sequence[str | Prompt]) -> Int[Tensor, "batch position"]:
        """Token ids of a text as every function here feeds it: with the beginning that its tokenizer itself puts there.

        Args:
            text: The text, or several, which are padded on the left. TransformerLens's ``to_tokens`` may prepend another
                beginning: what it gives can be given as ids.

        Raises:
            InputError: There is none, or texts have several lengths and the tokenizer no token to pad them with.
        """
        rows = [self.encode(each) for each in ([text] if isinstance(text, str | Prompt) else text)]
        if not rows:
            raise InputError("no text was given: expected a text, or a list of at least one.")
        most, pad = max(map(len, rows)), getattr(self.tokenizer, "pad_token_id", None)
        if pad is None and any(len(row) < most for row in rows):
            raise InputError(
                f"the tokenizer of {self.facts.name} has no pad token, and the texts have several lengths: give them as a list "
                "of texts, or set tokenizer.pad_token."
            )
        return torch.tensor([[pad] * (most - len(row)) + row for row in rows], device=self.device)

    def to_str_tokens(self, given: str | Prompt | Sequence[int] | Tensor) -> list[str]:
        """Text of each token of a text, or of token ids.

        Args:
            given: A text, a prompt or token ids, ``[position]`` or ``[1, position]``.
        """
        ids = self.encode(given) if isinstance(given, str | Prompt) else torch.as_tensor(given).flatten().tolist()
        return self.pieces(ids)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token alone."""
        return [self.decode([token]) for token in tokens]

    @property
    def source(self) -> nn.Module:
        """The module that carries the transformers configs."""
        return self.model

    @property
    def config(self) -> Any:
        """The transformers config of the decoder; None where there is none."""
        return None

    def new_cache(self) -> Any:
        """The cache that transformers makes for this model; None where none of its caches is the model's."""
        return None

    @property
    def end_tokens(self) -> frozenset[int]:
        """The token ids at which generation ends."""
        found: set[int] = set()
        config = getattr(self.source, "generation_config", None) or getattr(self.source, "config", None)
        for holder in (config, self.tokenizer):
            given = getattr(holder, "eos_token_id", None)
            found |= set(given) if isinstance(given, list | tuple) else {given} if isinstance(given, int) else set()
        return frozenset(found)

    def fingerprint(self) -> str:
        """The hash of the weights, 16 hex digits."""
        found = self._hash or weights_hash(self.model)
        self._hash = found if self._calls else ""
        return found

    def checked_once(self, check: Callable[[], Any], *of: Any) -> Any:
        """What a check found that depends on kernels and shapes and not on the weights: it is made once for an attention.

        Args:
            check: Makes it.
            of: What is checked, and what else that depends on, such as a path's text and the shape.
        """
        key = self.facts.attention, *of
        if key not in self.checked:
            self.checked[key] = check()
        return self.checked[key]


# Copies in another dtype -------------------------------------------------------------------------------------------------

_DEPTH = 4
"""Functions that call functions that call a module."""


def _check_apart(model: nn.Module, copy: nn.Module, name: str) -> None:
    """Raises UnsupportedError where a deep copy would run the original's modules.

    Copies share functions, and so what a function that took the place of a module's ``forward`` holds on to.
    """
    originals = {id(module) for module in model.modules()}
    for place, module in copy.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and any(id(held) in originals for held in _held(forward, _DEPTH)):
            raise UnsupportedError(
                f"{name}: the forward of {place or 'the model'} was replaced by a function that holds on to the model itself, "
                "so that a copy in another dtype would run this one's weights: change it by a hook (register_forward_hook), "
                "which is called with its own module, or compare in one dtype."
            )


def _held(function: Any, depth: int) -> Iterator[Any]:
    """What a function is bound to or closes over, and what functions among that hold."""
    if isinstance(function, functools.partial):
        reached = [function.func, *function.args, *function.keywords.values()]
    else:
        cells = getattr(function, "__closure__", None) or ()
        reached = [getattr(function, "__self__", None), *(getattr(function, "__defaults__", None) or ())]
        reached += [cell.cell_contents for cell in cells if _filled(cell)]
    for held in reached:
        yield held
        if depth and callable(held) and not isinstance(held, nn.Module):
            yield from _held(held, depth - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
