"""The interface that every kind of model has, so that nothing outside ``models/`` asks which kind
it is.

An adapter runs tokens through a model with or without a cache, names the sites that the model has,
hooks a site at a layer, and knows the model's facts. The loops in ``paths/`` pass it a
:class:`KVStore`, which keeps keys and values either in the model's own cache or in memory of
kvinterp's. In the second case the adapter shows the store to the model as a cache of the class that
the model expects.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvinterp.common.checks import check_instance, check_known
from kvinterp.common.words import dtype_word
from kvinterp.data.chat import prompt_ids
from kvinterp.data.example import Prompt
from kvinterp.data.tokenizing import ids_of
from kvinterp.errors import InputError, UnsupportedError, shown
from kvinterp.models.attaching import Attaching, check_uncompiled
from kvinterp.models.cache_kinds import CacheKind
from kvinterp.models.caches import KVStore, OwnCache
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
"""A function of layer, absolute position of the first key, keys and values; it returns new keys and
values, or None.
"""

KeysValuesRead = Callable[[int, Tensor, Tensor], "tuple[Tensor, Tensor]"]
"""A function of layer, keys and values that returns the keys and values that attention reads in
their place.
"""


class NotingStore:
    """A store that stays empty and notes a copy of the keys and values that each layer passes to
    it.

    Args:
        adapter: The model.

    Attributes:
        noted: Layer, keys and values of each update, on the device of the tokens.
    """

    keeps = False
    model_cache: Any = None
    library_cache: OwnCache | None = None

    def __init__(self, adapter: Adapter) -> None:
        facts = adapter.facts
        self._empty = torch.empty(
            1, facts.kv_heads, 0, facts.head_dim, dtype=adapter.dtype, device=adapter.device
        )
        self.noted: list[tuple[int, Tensor, Tensor]] = []

    def length(self, layer: int) -> int:
        """Returns 0: the store keeps no position."""
        return 0

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of no position."""
        return self._empty, self._empty

    def update(
        self, layer: int, keys: Tensor, values: Tensor, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Notes a copy of the new keys and values, and returns them for attention to read."""
        copies = [tensor.detach().to(self._empty.device, copy=True) for tensor in (keys, values)]
        self.noted.append((layer, copies[0], copies[1]))
        return keys, values


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Turns ``"float16"`` (or a torch dtype, or None) into a torch dtype.

    Raises:
        InputError: The name is not one of float16, bfloat16, float32, float64.
    """
    if dtype is None:
        return None
    name = dtype_word(dtype)
    check_known("dtype", name, DTYPES)
    return DTYPES[name]


_TOKENIZERS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The tokenizer with which each model was last loaded or wrapped, so that ``adapter.model`` alone
finds it again. The entry goes with the model, which is not changed."""


class Adapter(Attaching):
    """A model with its tokenizer and its facts, in the form that the rest of kvinterp works
    with.
    """

    kind: str
    stored: str = ""
    """For a GGUF file: the types in which it stores the weights. Empty where the weights are
    computed with as they are stored.
    """
    position_major_cache: bool = False
    """Whether this model's own cache keeps the heads of a position side by side in memory."""
    plain: bool = False
    """Whether the model runs as users of its library run it, so that it accepts their masks,
    positions and caches.
    """
    takes: frozenset[str] = frozenset()
    """The arguments that the model's own forward accepts by name, as far as they matter here (mask
    and positions).
    """
    cache_name: str = ""
    """The name of the argument by which the model's own forward takes its cache."""
    rows_asked: bool
    """Whether a path of this call of a verb has been asked whether it reads what it cached."""

    def __init__(self, model: nn.Module, facts: ModelInfo, tokenizer: Any = None) -> None:
        super().__init__()
        self.model = model
        self.facts = facts
        self.tokenizer = _TOKENIZERS.get(model) if tokenizer is None else tokenizer
        if self.tokenizer is not None:
            _TOKENIZERS[model] = self.tokenizer
        self._copies: dict[torch.dtype, Adapter] = {}
        self._hash = ""
        self._layer_of: dict[nn.Module, int] = {}
        self._snapshot: Snapshot | None = None
        self._inside = 0
        self.checked: dict[tuple[Any, ...], Any] = {}
        self.rows_asked = False

    # What each kind defines -----------------------------------------------------------------------

    @abc.abstractmethod
    def logits(
        self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Computes what :meth:`forward` returns, with the store shown to the model as its cache."""

    @abc.abstractmethod
    def call_with_cache(
        self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Runs the model's own forward with a cache, as its users do; returns the logits and the
        cache (None if it returns none).

        Args:
            tokens: ``[batch, new]``.
            cache: What the previous call returned, a cache object of the library, or None for a new
                one of the model's own.
            mask, positions: As for :meth:`forward`; those that are not among :attr:`takes` are
                ignored.
        """

    @abc.abstractmethod
    def own_cache(
        self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype
    ) -> OwnCache | None:
        """Makes a new, empty cache as this model's library does; returns None where the model's
        forward makes its own.

        Args:
            kind: Which cache.
            batch: Number of sequences.
            capacity: The largest number of positions that will be put in.
            dtype: The dtype of its keys and values.

        Raises:
            UnsupportedError: This model cannot run with it.
        """

    @abc.abstractmethod
    def cast(self, dtype: torch.dtype) -> Adapter:
        """Makes a copy of the model that computes in another dtype, from the same weights."""

    @abc.abstractmethod
    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Finds the cache among the arguments of a block, in a forward that the user runs; None
        where there is none.
        """

    @abc.abstractmethod
    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """Reads a cache site from the cache of a block that has just run; None where the cache does
        not hold the site.
        """

    @abc.abstractmethod
    def cached_length(self, cache: Any) -> int:
        """Counts the positions in the cache that a block receives; 0 without a cache."""

    @abc.abstractmethod
    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Lets ``on_read`` replace what a block's attention reads from the user's own cache;
        returns a function that undoes it.

        Raises:
            InputError: The block receives no cache.
        """

    def call_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Finds the cache among the arguments of the model's own call, as :meth:`block_cache` will
        see it at the first block.
        """
        return self.block_cache(args, kwargs)

    @abc.abstractmethod
    def generate(self, tokens: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Runs the ``generate()`` of the model's own library, greedily unless the options say
        otherwise.

        Args:
            tokens: The prompts, ``[batch, column]``, padded at the left.
            mask: 0 for pads.
            options: Options of that ``generate()``, ``max_new_tokens`` among them.

        Returns:
            Prompts and generated tokens, ``[batch, column]``.

        Raises:
            UnsupportedError: It has none, or it cannot be given this.
        """

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values, so that a store can also take part in a
        pass without a cache.
        """
        return True

    @property
    def loops(self) -> bool:
        """Whether its config says that blocks run several times in a forward."""
        return False

    @property
    def takes_static(self) -> bool:
        """Whether the library's ``generate()`` can run the model with a cache of a fixed size."""
        return False

    # What all kinds share -------------------------------------------------------------------------

    def forward(
        self,
        tokens: Int[Tensor, "batch new"],
        store: KVStore | None = None,
        mask: Int[Tensor, "batch position"] | None = None,
        positions: Int[Tensor, "batch new"] | None = None,
    ) -> Float[Tensor, "batch new vocabulary"]:
        """Computes the logits of every new token; with a store, attention also reads the keys and
        values in the store.

        Args:
            tokens: The new tokens.
            store: The keys and values of the tokens that were fed before.
            mask: For all positions so far, 0 where there is no token; only where the model takes a
                mask.
            positions: The position numbers of the new tokens, which do not count masked positions;
                given with a mask.
        """
        if store is not None and not store.keeps and self.hands_over_keys_values:
            with self.replacing_keys_values(store.update):
                return self.logits(tokens, None, mask, positions)
        return self.logits(tokens, store, mask, positions)

    def __repr__(self) -> str:
        """Names the model, its kind, its dtype and its device."""
        return f"<{self.facts.name}: {self.kind}, {str(self.dtype).removeprefix('torch.')}, {self.device}>"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device that the tokens must be on."""
        return next(self.model.parameters()).device

    def at(self, dtype: torch.dtype | None) -> Adapter:
        """Returns a copy of this model that computes in ``dtype``, or this model itself where that
        is its dtype.

        A copy has none of kvinterp's own hooks. Inside :meth:`one_call`, which run, compare and the
        others enter by :func:`kvinterp.models.threads.own_threads`, it is made once, outside of it
        every time.
        """
        if dtype is None or dtype == self.dtype:
            return self
        if dtype in self._copies:
            return self._copies[dtype]
        # Most runs need no copy, and so no check of one.
        from kvinterp.models.copies import check_apart, check_follows

        copy = self.cast(dtype)
        copy.stored = self.stored
        remove_own_hooks(copy.model)
        check_apart(self.model, copy.model, self.facts.name)
        check_follows(copy, dtype)
        if self._calls:
            self._copies[dtype] = copy
        return copy

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Marks one call of a verb: what is made once in it (copies in another dtype, the weights'
        hash) is dropped at its end.

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
                self._copies, self._layer_of, self._hash, self._evaluating = {}, {}, "", False
                self.rows_asked = False

    def lasting(self) -> Adapter:
        """Returns this adapter with its copies kept for good: for a model that nobody else holds
        and so nobody edits.
        """
        self._calls += 1
        return self

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Restores the attributes and buffers of the model's modules at the end of the context,
        however it ends.
        """
        if self._snapshot is not None:
            yield
            return
        with as_made(self.source):
            self._snapshot = snapshot = Snapshot(self.model, self.source)
            try:
                yield
            finally:
                self._snapshot = None
                snapshot.take_out("thorough")

    @contextlib.contextmanager
    def own_state(self, state: list[Leftover]) -> Iterator[None]:
        """Gives the forwards inside the context a state of their own, where modules keep state from
        one forward to the next.

        The state begins as it was found (:func:`as_made`) and is taken out at the end, so that runs
        which take turns on one model do not overwrite each other's state.

        Args:
            state: The state that an earlier context left, from which this one goes on; replaced at
                the end by this one's.
        """
        with self.left_as_found():
            snapshot: Any = self._snapshot
            # Only a context inside another one has that one's state to put back.
            outer = snapshot.take_out() if self._inside else Leftover()
            self._inside += 1
            if state:
                snapshot.put_in(state.pop())
            try:
                yield
            finally:
                self._inside -= 1
                state.append(snapshot.take_out())
                snapshot.put_in(outer)

    def replacing_keys_values(
        self, read: KeysValuesRead
    ) -> contextlib.AbstractContextManager[None]:
        """Replaces the keys and values that attention receives in forwards without a cache, while
        the context lasts.

        Args:
            read: Called with layer, keys and values; attention reads what it returns.
        """
        raise NotImplementedError

    @property
    def hands_over_keys_values(self) -> bool:
        """Whether K and V of a forward without a cache can be replaced: whether
        :meth:`replacing_keys_values` sees each layer once, in the shapes that a cache would
        receive; asked once.
        """
        key = self.facts.attention, "hands over keys and values"
        if key not in self.checked:
            # Until it is known, forward() shows a store to the model as a cache.
            self.checked[key] = False
            # Another number than that of the heads, so that the dimensions can be told apart.
            count = next(
                n for n in (5, 7, 11) if n not in (self.facts.query_heads, self.facts.kv_heads)
            )
            tokens = torch.arange(3, 3 + count, device=self.device)[None] % self.facts.vocabulary
            plain, cached = NotingStore(self), NotingStore(self)
            lacks = contextlib.suppress(NotImplementedError, AttributeError, RuntimeError)
            with lacks, self.own_state([]), torch.no_grad(), hooks_suspended(self.model):
                with self.replacing_keys_values(plain.update):
                    self.forward(tokens)
                self.forward(tokens, cached)
                shapes = [
                    [(layer, k.shape, v.shape) for layer, k, v in store.noted]
                    for store in (plain, cached)
                ]
                self.checked[key] = shapes[0] == shapes[1] and [s[0] for s in shapes[0]] == [
                    *range(self.facts.layers)
                ]
        return bool(self.checked[key])

    def supports(self, site: str, layer: int = 0) -> bool:
        """Whether this model, as it was loaded, has a site at a layer."""
        try:
            self.tap(site, layer)
        except UnsupportedError:
            return False
        return True

    def derives(self, site: str) -> bool:
        """Whether a site is computed beside a kernel that does not show it, so that it can be
        recorded but not patched.
        """
        return False

    def encode(self, text: str | Prompt) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts first, or of a
        prompt as every verb feeds it.

        Raises:
            InputError: It is neither, there is no tokenizer, or the text gives no token.
        """
        if isinstance(text, Prompt):
            return prompt_ids(self, text)
        check_instance("text", text, str, "a text, or a prompt as kv.load_prompts() gives it")
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
        return (
            " ".join(map(str, tokens))
            if self.tokenizer is None
            else self.tokenizer.decode(list(tokens))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model: a model of TransformerLens returns logits, one of transformers
        its own output object.
        """
        return self.model(*args, **kwargs)

    def to_tokens(
        self, text: str | Prompt | Sequence[str | Prompt]
    ) -> Int[Tensor, "batch position"]:
        """Token ids of a text as every function of kvinterp feeds it, with the special tokens that
        its tokenizer puts first.

        Args:
            text: The text, or several, which are padded on the left. TransformerLens's
                ``to_tokens`` may put other special tokens first; pass its result as token ids to
                feed them.

        Raises:
            InputError: There is no text, or texts have several lengths and the tokenizer has no
                token to pad them with.
        """
        rows = [self.encode(item) for item in ([text] if isinstance(text, str | Prompt) else text)]
        if not rows:
            raise InputError("no text was given: expected a text, or a list of at least one.")
        most, pad = max(map(len, rows)), getattr(self.tokenizer, "pad_token_id", None)
        if pad is None and any(len(row) < most for row in rows):
            raise InputError(
                f"the tokenizer of {self.facts.name} has no pad token, and the texts have several lengths: give them as a list "
                "of texts, or set tokenizer.pad_token."
            )
        return torch.tensor([[pad] * (most - len(row)) + row for row in rows], device=self.device)

    def to_str_tokens(self, text: str | Prompt | Sequence[int] | Tensor) -> list[str]:
        """Text of each token of a text, or of token ids.

        Args:
            text: A text, a prompt or token ids, ``[position]`` or ``[1, position]``.
        """
        return self.pieces(
            self.encode(text)
            if isinstance(text, str | Prompt)
            else torch.as_tensor(text).flatten().tolist()
        )

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token alone."""
        return [self.decode([token]) for token in tokens]

    @property
    def source(self) -> nn.Module:
        """The module that has the transformers configs."""
        return self.model

    @property
    def config(self) -> Any:
        """The transformers config of the decoder; None where there is none."""
        return None

    def new_cache(self) -> Any:
        """Makes the cache that transformers makes for this model; None where the model uses none of
        transformers' caches.
        """
        return None

    @property
    def end_tokens(self) -> frozenset[int]:
        """The token ids at which generation ends.

        Raises:
            InputError: A config or a tokenizer names something that is none.
        """
        tokens: set[int] = set()
        config = getattr(self.source, "generation_config", None) or getattr(
            self.source, "config", None
        )
        for holder in (config, self.tokenizer):
            ends = getattr(holder, "eos_token_id", None)
            for end in ends if isinstance(ends, list | tuple) else () if ends is None else (ends,):
                whole = type(end) is not bool and hasattr(type(end), "__index__")
                # A negative one, or one behind the vocabulary, is how some checkpoints say that
                # there is none.
                if not whole or not -(2**63) <= int(end) < 2**63:
                    raise InputError(
                        f"eos_token_id={shown(ends)} stands in the {type(holder).__name__} of {self.facts.name}: expected a "
                        "token id, a list of ids, or null; mend generation_config.json (or the tokenizer's files), or give "
                        "stop='length' (--stop length)."
                    )
                tokens.add(int(end))
        return frozenset(tokens)

    def fingerprint(self) -> str:
        """The hash of the weights, 16 hex digits."""
        digest = self._hash or weights_hash(self.model)
        self._hash = digest if self._calls else ""
        return digest

    def checked_once(self, check: Callable[[], Any], *subject: Any) -> Any:
        """Runs a check whose result depends on kernels and shapes, not on the weights, once for
        each attention and subject.

        Args:
            check: Returns the result.
            subject: What is checked and what else the result depends on, such as a path's text and
                the shape.
        """
        key = self.facts.attention, *subject
        if key not in self.checked:
            self.checked[key] = check()
        return self.checked[key]
