"""Which cache a cached path keeps its keys and values in, as data; and what every cache looks like from outside.

==========================  =========================================================================================
``dynamic``                 the cache that the model makes by itself; what is run unless another is asked for
``static``, ``static(N)``   transformers' StaticCache, with room for what is run, or for N positions
``quantized(4)``            transformers' QuantizedCache; ``quantized(4,hqq)`` and ``quantized(8,fp8)`` name the backend
``offloaded``               the model's own DynamicCache, whose layers wait in the host's memory; on a GPU alone
``preallocated``            kvinterp's own store, which grows in place, where it was seen to give the same bits as
                            ``dynamic``; else ``dynamic`` is run, and the result says so
``package.module:Name``     a class or function that makes a transformers cache
==========================  =========================================================================================
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common import spec
from kvinterp.errors import InputError, UnsupportedError, unknown

KeysValues = tuple[Float[Tensor, "batch kv_head position head_dim"], Float[Tensor, "batch kv_head position head_dim"]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the cache a policy, a recorder or a patch is looking.

    Attributes:
        layer: The block.
        start: Absolute position of the first key.
        stop: One past the absolute position of the last key.
        rotated: Whether these keys are after RoPE.
        known: Whether the positions are known; a user's cache may have let go of some and does not say of which.
        rows: The absolute position of each row, where a policy may have let go of some: they need no longer be all from start
            to stop, and each sequence and KV head may have kept others. None where none can be missing.
        heads: The KV heads that the tensors hold; empty for all.
        prompt: Positions of the pass's prompt, whose forwards come before all others; 0 where that is not known.
        remade: Whether what is held was read by another policy of the path first, which may make of a row another at each read.
    """

    layer: int
    start: int
    stop: int
    rotated: bool
    known: bool = True
    rows: Int[Tensor, "batch kv_head row"] | None = dataclasses.field(default=None, compare=False)
    heads: tuple[int, ...] = ()
    prompt: int = dataclasses.field(default=0, compare=False)
    remade: bool = dataclasses.field(default=False, compare=False)

    @property
    def positions(self) -> Int[Tensor, "*batch_and_kv_head row"]:
        """The absolute position of each row: of all heads alike, or a line for each sequence and KV head."""
        return torch.arange(self.start, self.stop) if self.rows is None else self.rows

    def check_known(self, site: str) -> None:
        """Raises UnsupportedError for what is recorded or moved where the cache holds fewer positions than were put in."""
        if not self.known:
            raise UnsupportedError(
                f"site {site!r} cannot be had at layer {self.layer}: the cache holds {self.stop - self.start} of {self.stop} "
                "positions and does not say which; leave the cache sites out."
            )

    def check_whole(self, site: str) -> None:
        """Raises UnsupportedError for what takes positions side by side where rows are missing, or not known."""
        self.check_known(site)
        if self.rows is not None and self.rows.shape[-1] < self.stop:
            raise UnsupportedError(
                f"site {site!r} cannot be lined up by position at layer {self.layer}: the policy let go of rows, and "
                f"{self.rows.shape[-1]} of {self.stop} are left; record it with run(), or leave the cache sites out."
            )


@runtime_checkable
class KVStore(Protocol):
    """Where keys and values live between forwards; ``paths.store`` holds the implementations."""

    model_cache: Any
    """What the model was given for this store, kept for the store's whole life, or None before its first forward."""

    own: OwnCache | None
    """The library's own cache that keeps the tensors, or None where the store keeps them or nothing does."""

    keeps: bool
    """Whether anything is kept: where nothing is, the model is run without a cache, and its keys and values are heard there."""

    def length(self, layer: int) -> int:
        """Positions a layer holds before the next update."""

    def held(self, layer: int) -> KeysValues:
        """The keys and values a layer holds, without copying."""

    def update(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_head new head_dim"],
        values: Float[Tensor, "batch kv_head new head_dim"],
        window: int | None = None,
    ) -> KeysValues:
        """Appends, and returns what attention is to read: all positions, or the last ``window - 1`` plus the new."""


class OwnCache:
    """What keeps the keys and values of one run, a library's own cache for one; the base keeps nothing."""

    name: str = ""
    """The name of its class."""

    model_cache: Any = None
    """What the model is given, or None where it is given the store in the shape of a cache, which it then calls."""

    def connect(self, update: Callable[..., KeysValues]) -> None:
        """Sends every update the model makes to ``update(layer, keys, values, None, *more)``, which calls :meth:`append`."""

    def append(
        self, layer: int, keys: Tensor, values: Tensor, window: int | None = None, *more: Any, **named: Any
    ) -> KeysValues:
        """What the library itself does: appends, and returns what attention reads, any unfilled room included."""
        return keys, values

    def held(self, layer: int) -> KeysValues | None:
        """The tensors in which a layer keeps its keys and values, or None where it keeps them in another form."""
        return None

    def memory_of(self, layer: int, handed: KeysValues) -> KeysValues | None:
        """Where a layer keeps what it has just handed to attention, row for row; None where it does so in another form."""
        held = self.held(layer)
        same = held is not None and all(
            one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            for one, other in zip(handed, held, strict=True)
        )
        return handed if same else None

    def let_go(self, kind: str) -> None:
        """Told before anything is put in that rows will be let go of.

        Args:
            kind: What lets go of them, for the error.

        Raises:
            UnsupportedError: It cannot do that.
        """

    can_select: bool = False
    """Whether sequences can be put in another order, left out, and joined by others."""

    def will_crop(self) -> None:
        """Told before anything is put in that positions will be taken back."""

    def crop(self, length: int) -> None:
        """Takes back all positions from ``length`` on.

        Raises:
            UnsupportedError: It cannot.
        """
        name = self.name or "cache of this kind"
        raise UnsupportedError(f"a {name} cannot take positions back: leave the call out of the path.")

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences, in this order; only where :attr:`can_select`."""

    def join(self, other: OwnCache) -> None:
        """Puts the sequences of another cache of as many positions behind its own; only where :attr:`can_select`."""

    def take(self, layer: int, rows: Int[Tensor, "batch kv_head kept"]) -> None:
        """Lets go of all rows of a layer but these, counted among those that it holds."""


def taken(tensor: Tensor, rows: Int[Tensor, "batch kv_head kept"]) -> Tensor:
    """Some rows of keys or values ``[batch, kv_head, row, head_dim]``, others for each sequence and KV head."""
    return torch.gather(tensor, 2, rows[..., None].expand(*rows.shape, tensor.shape[3]))


class _Led:
    """A method of a user's cache, and who may replace what it hands to attention, in order."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.readers: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read = self.method(*args, **kwargs)
        for reader in self.readers:
            new = reader(read, *args, **kwargs)
            read = read if new is None else new
        return read


def lead(cache: Any, name: str, reader: Callable[..., Any]) -> Callable[[], None]:
    """Leads what a method of a cache returns through a reader, before those that it is led through already.

    Args:
        cache: The cache, of anyone's.
        name: The method.
        reader: Called with what the method returned and with what it was given; what it returns takes that place.

    Returns:
        How to undo it, in whatever order with the others.
    """
    before, led = cache.__dict__.get(name), cache.__dict__.get(name)
    if not isinstance(led, _Led):
        led = cache.__dict__[name] = _Led(getattr(cache, name))
    led.readers.insert(0, reader)

    def undo() -> None:
        led.readers.remove(reader)
        if led.readers or cache.__dict__.get(name) is not led:
            return
        if before is None:
            del cache.__dict__[name]
        else:
            cache.__dict__[name] = before

    return undo


# Kinds -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """A kind of cache. The text form is the name of the class, with its values in brackets."""

    exact: ClassVar[bool] = True
    """Whether it is known to give back the very keys and values that were put in."""

    def make(self, config: Any, capacity: int) -> Any:
        """A new, empty transformers cache.

        Args:
            config: The decoder's config.
            capacity: Most positions that will be put in.
        """
        raise NotImplementedError

    def check(self, device: torch.device) -> None:
        """Raises UnsupportedError where it cannot be used on a device."""

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return spec.text_of(self)


@dataclasses.dataclass(frozen=True)
class Dynamic(CacheKind):
    """The model's own cache, as it makes one by itself: a DynamicCache for nearly every transformers model."""

    def make(self, config: Any, capacity: int) -> Any:
        """A DynamicCache, whose layers are those of the config."""
        from transformers import DynamicCache

        return DynamicCache(config=config)


@dataclasses.dataclass(frozen=True)
class Preallocated(Dynamic):
    """kvinterp's own store, where it was seen on this machine to give the bits of the model's own cache."""


@dataclasses.dataclass(frozen=True)
class Offloaded(CacheKind):
    """transformers' DynamicCache with ``offloading``: a layer's keys and values are on the GPU only while it runs."""

    def check(self, device: torch.device) -> None:
        """Refuses every device but a GPU."""
        if device.type != "cuda":
            raise UnsupportedError(
                f"cache=offloaded moves keys and values between a GPU and the host, and the model is on {device.type}: leave it "
                "out, or load the model on cuda."
            )

    def make(self, config: Any, capacity: int) -> Any:
        """A DynamicCache that offloads every layer."""
        from transformers import DynamicCache

        return DynamicCache(config=config, offloading=True)


@dataclasses.dataclass(frozen=True)
class Static(CacheKind):
    """transformers' StaticCache, whose unfilled room is masked.

    Attributes:
        room: Its ``max_cache_len`` in positions; as many as are run for None.
    """

    room: int | None = None

    def __post_init__(self) -> None:
        if self.room is not None and (not isinstance(self.room, int) or isinstance(self.room, bool) or self.room < 1):
            raise InputError(f"cache=static({self.room!r}) was given: expected a whole number of positions of at least 1.")

    def make(self, config: Any, capacity: int) -> Any:
        """A StaticCache with the room asked for.

        Raises:
            InputError: More positions are run than it has room for.
        """
        from transformers import StaticCache

        if self.room is not None and capacity > self.room:
            raise InputError(
                f"cache={self} has too little room for {capacity} positions: give static({capacity}) or static."
            )
        return StaticCache(config=config, max_cache_len=self.room or capacity)


BACKENDS = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq"), "fp8": ("torch", "torch")}
"""For each backend of transformers' QuantizedCache the module it needs, and the package that has it."""


@dataclasses.dataclass(frozen=True)
class Quantized(CacheKind):
    """transformers' QuantizedCache.

    Attributes:
        bits: Bits of an element; the backend ``fp8`` has 8.
        backend: ``quanto``, ``hqq`` or ``fp8``; of the first two the one that is installed for None.
    """

    exact: ClassVar[bool] = False
    bits: int = 4
    backend: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or self.bits < 1:
            raise InputError(f"cache=quantized({self.bits!r}) was given: expected a number of bits, as in quantized(4).")
        if self.backend is not None and self.backend not in BACKENDS:
            raise unknown("backend of a quantized cache", self.backend, BACKENDS)
        if self.backend == "fp8" and self.bits != 8:
            raise InputError(f"cache={self} was given, and fp8 has 8 bits: give quantized(8,fp8).")

    def make(self, config: Any, capacity: int) -> Any:
        """A QuantizedCache of the backend.

        Raises:
            UnsupportedError: The backend's package is not installed, or cannot do this.
        """
        from transformers import QuantizedCache

        backend = self.backend or next((name for name in ("quanto", "hqq") if installed(BACKENDS[name][0])), "quanto")
        module, package = BACKENDS[backend]
        if not installed(module):
            other = "" if self.backend else ", or hqq"
            raise UnsupportedError(f"cache={self} needs the package {package}{other}: pip install {package}.")
        try:
            return QuantizedCache(backend, config, **({} if backend == "fp8" else {"nbits": self.bits}))
        except (ImportError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedError(f"cache={self} cannot be made for {config.model_type}: {_sentence(error)}") from error


@dataclasses.dataclass(frozen=True)
class MadeBy(CacheKind):
    """A cache that a class or a function makes, anew for every run.

    Attributes:
        factory: Called with those of ``config`` and ``max_cache_len`` that it names; a function of one argument of another
            name is given the config.
    """

    exact: ClassVar[bool] = False
    factory: Callable[..., Any]

    def make(self, config: Any, capacity: int) -> Any:
        """What the factory makes.

        Raises:
            InputError: It cannot be called so, or makes no empty transformers cache.
        """
        from transformers import Cache

        try:
            cache = self.factory(**self._arguments({"config": config, "max_cache_len": capacity}))
        except (ImportError, TypeError, ValueError) as error:
            raise InputError(
                f"cache={self} could not be made ({_sentence(error)}) Give a class or a function that takes nothing, or "
                "config and max_cache_len, and makes a transformers Cache."
            ) from error
        if not isinstance(cache, Cache):
            raise InputError(f"cache={self} made a {type(cache).__name__}: expected a transformers Cache.")
        if int(cache.get_seq_length()) or "update" in vars(cache):
            raise InputError(f"cache={self} made a cache that is in use already: make a new, empty one in every call.")
        return cache

    def _arguments(self, offered: dict[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.factory).parameters
        given = {name: value for name, value in offered.items() if name in parameters}
        single = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if not given and len(single) == 1:
            given = {single[0].name: offered["config"]}
        return given

    def __str__(self) -> str:
        """Where it can be imported from."""
        return f"{self.factory.__module__}:{getattr(self.factory, '__qualname__', type(self.factory).__qualname__)}"


@dataclasses.dataclass(frozen=True)
class Named(CacheKind):
    """A class or a function that a file names: it is shown and never imported, for a file may come from anybody.

    Attributes:
        name: What the file says, as in ``package.module:Name``.
    """

    exact: ClassVar[bool] = False
    name: str

    def make(self, config: Any, capacity: int) -> Any:
        """Nothing.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"cache={self.name} was read from a file, whose code is not run: if you trust that class, give the path yourself, as "
            f"in kv.run(model, prompt, 'cached[cache={self.name}]')."
        )

    def __str__(self) -> str:
        """What the file says."""
        return self.name


CACHE_KINDS: dict[str, type[CacheKind]] = spec.named(Dynamic, Preallocated, Offloaded, Static, Quantized)


def cache_named(given: Any) -> CacheKind:
    """The kind of cache meant by a text such as ``static(64)``, by a class or by a function that makes one.

    Raises:
        InputError: There is no such kind, or a cache itself was given.
    """
    if isinstance(given, CacheKind):
        return given
    if callable(given):
        return MadeBy(given)
    if not isinstance(given, str):
        raise InputError(
            f"cache={type(given).__name__}(...) was given, and a cache holds the keys and values of one run: give its class, or "
            "a function that makes a new one for every run."
            if hasattr(given, "get_seq_length")
            else f"cache={given!r} was given: expected one of {', '.join(CACHE_KINDS)}, or a class or function that makes one."
        )
    if ":" in given:
        return MadeBy(_imported(given))
    return spec.read(
        "cache",
        given,
        CACHE_KINDS,
        "A class or function is given as package.module:Name, a dtype as float32; a model's own sliding windows are in dynamic "
        "and static, and a window over another model is the policy sinks(0,N).",
    )


def cache_read(text: str) -> CacheKind:
    """The kind of cache that a file names: as :func:`cache_named` says it, but a class is kept as its text alone.

    Raises:
        InputError: There is no such kind.
    """
    return Named(text) if ":" in text else cache_named(text)


def check_plain(kind: CacheKind, who: str) -> None:
    """Raises UnsupportedError for a cache of another kind than the model's own; ``who`` cannot use it, and why."""
    if not isinstance(kind, Dynamic):
        raise UnsupportedError(f"cache={kind} cannot be used by {who}: load the model with kind='native'.")


def _imported(text: str) -> Callable[..., Any]:
    module, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module.strip())
        for part in name.strip().split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"cache {text!r} cannot be imported ({error}): expected package.module:Name of a class or function."
        ) from error
    if not callable(found):
        raise InputError(f"cache {text!r} is a {type(found).__name__}: expected a class or function that makes a cache.")
    return found


def installed(module: str) -> bool:
    """Whether a module can be imported, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _sentence(error: Exception) -> str:
    return str(error).strip().rstrip(".") + "."
