"""The kinds of cache that a cached path can keep its keys and values in, by their text forms.

==========================  =========================================================================================
``dynamic``                 the cache that the model makes by itself; the default
``static``, ``static(N)``   transformers' StaticCache, with room for what is run, or for N positions
``quantized(4)``            transformers' QuantizedCache; ``quantized(4,hqq)`` and ``quantized(8,fp8)`` name the backend
``offloaded``               the model's own DynamicCache with its layers in the host's memory; on a GPU only
``preallocated``            kvinterp's own store, which grows in place, where a check shows that it gives the same bits
                            as ``dynamic``; else ``dynamic`` runs, and the result says so
``package.module:Name``     a class or function that makes a transformers cache
==========================  =========================================================================================
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kvinterp.common import spec
from kvinterp.common.checks import check_known, check_whole
from kvinterp.errors import InputError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """A kind of cache. The text form is the name of the class, with its values in brackets."""

    exact: ClassVar[bool] = True
    """Whether it is known to return the very keys and values that were put in."""

    def make(self, config: Any, capacity: int) -> Any:
        """Makes a new, empty transformers cache.

        Args:
            config: The decoder's config.
            capacity: The largest number of positions that will be put in.
        """
        raise NotImplementedError

    def check(self, device: torch.device) -> None:
        """Raises UnsupportedError where it cannot be used on a device."""

    def written(self, capacity: int) -> tuple[str, str]:
        """What makes it in a line of Python beside a ``model``, and the line that imports what that
        needs.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """The text form for the command line and tables."""
        return spec.text_of(self)


@dataclasses.dataclass(frozen=True)
class Dynamic(CacheKind):
    """The cache that the model makes by itself: a DynamicCache for nearly every transformers
    model.
    """

    def make(self, config: Any, capacity: int) -> Any:
        """Makes a DynamicCache with the layers that the config says."""
        from transformers import DynamicCache

        return DynamicCache(config=config)

    def written(self, capacity: int) -> tuple[str, str]:
        """A DynamicCache of the model's config."""
        return "DynamicCache(config=model.config)", "from transformers import DynamicCache"


@dataclasses.dataclass(frozen=True)
class Preallocated(Dynamic):
    """kvinterp's own store, where a check on this machine shows that it gives the bits of the
    model's own cache.
    """


@dataclasses.dataclass(frozen=True)
class Offloaded(CacheKind):
    """transformers' DynamicCache with ``offloading``: a layer's keys and values are on the GPU only
    while it runs.
    """

    def check(self, device: torch.device) -> None:
        """Raises UnsupportedError for every device but a GPU."""
        if device.type != "cuda":
            raise UnsupportedError(
                f"cache=offloaded moves keys and values between a GPU and the host, and the model is on {device.type}: leave it "
                "out, or load the model on cuda."
            )

    def make(self, config: Any, capacity: int) -> Any:
        """Makes a DynamicCache that offloads every layer."""
        from transformers import DynamicCache

        return DynamicCache(config=config, offloading=True)

    def written(self, capacity: int) -> tuple[str, str]:
        """The same with the model's config."""
        return (
            "DynamicCache(config=model.config, offloading=True)",
            "from transformers import DynamicCache",
        )


@dataclasses.dataclass(frozen=True)
class Static(CacheKind):
    """transformers' StaticCache, whose unfilled room is masked.

    Attributes:
        room: Its ``max_cache_len`` in positions; None for as many as the run needs.
    """

    room: int | None = None

    def __post_init__(self) -> None:
        if self.room is not None:
            check_whole("static's room", self.room)

    def make(self, config: Any, capacity: int) -> Any:
        """Makes a StaticCache.

        Raises:
            InputError: The run needs more positions than it has room for.
        """
        from transformers import StaticCache

        if self.room is not None and capacity > self.room:
            raise InputError(
                f"cache={self} has too little room for {capacity} positions: give static({capacity}) or static."
            )
        return StaticCache(config=config, max_cache_len=self.room or capacity)

    def written(self, capacity: int) -> tuple[str, str]:
        """With as much room."""
        made = f"StaticCache(config=model.config, max_cache_len={self.room or capacity})"
        return made, "from transformers import StaticCache"


BACKENDS = {
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "hqq": ("hqq", "hqq"),
    "fp8": ("torch", "torch"),
}
"""For each backend of transformers' QuantizedCache: the module that it needs, and the package that
has the module.
"""


@dataclasses.dataclass(frozen=True)
class Quantized(CacheKind):
    """transformers' QuantizedCache.

    Attributes:
        bits: Bits of an element; the backend ``fp8`` has 8.
        backend: ``quanto``, ``hqq`` or ``fp8``; None for whichever of the first two is installed.
    """

    exact: ClassVar[bool] = False
    bits: int = 4
    backend: str | None = None

    def __post_init__(self) -> None:
        check_whole("quantized's bits", self.bits)
        if self.backend is not None:
            check_known("backend of a quantized cache", self.backend, BACKENDS)
        if self.backend == "fp8" and self.bits != 8:
            raise InputError(f"cache={self} was given, and fp8 has 8 bits: give quantized(8,fp8).")

    def make(self, config: Any, capacity: int) -> Any:
        """Makes a QuantizedCache with the backend.

        Raises:
            UnsupportedError: The backend's package is not installed, or cannot do this.
        """
        from transformers import QuantizedCache

        backend = self._backend
        module, package = BACKENDS[backend]
        if not installed(module):
            alternative = "" if self.backend else ", or hqq"
            raise UnsupportedError(
                f"cache={self} needs the package {package}{alternative}: pip install {package}."
            )
        try:
            return QuantizedCache(
                backend, config, **({} if backend == "fp8" else {"nbits": self.bits})
            )
        except (ImportError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedError(
                f"cache={self} cannot be made for {config.model_type}: {_sentence(error)}"
            ) from error

    @property
    def _backend(self) -> str:
        return self.backend or next(
            (name for name in ("quanto", "hqq") if installed(BACKENDS[name][0])), "quanto"
        )

    def written(self, capacity: int) -> tuple[str, str]:
        """With its backend and bits."""
        bits = "" if self._backend == "fp8" else f", nbits={self.bits}"
        return (
            f"QuantizedCache({self._backend!r}, model.config{bits})",
            "from transformers import QuantizedCache",
        )


@dataclasses.dataclass(frozen=True)
class MadeBy(CacheKind):
    """A cache that a class or a function makes anew for every run.

    Attributes:
        factory: Called with ``config`` and ``max_cache_len`` as far as it has parameters of these
            names; a function with one parameter of another name receives the config.
    """

    exact: ClassVar[bool] = False
    factory: Callable[..., Any]

    def make(self, config: Any, capacity: int) -> Any:
        """Calls the factory.

        Raises:
            InputError: It cannot be called with these arguments, or returns no empty transformers
                cache.
        """
        from transformers import Cache

        given = {"config": config, "max_cache_len": capacity}
        try:
            cache = self.factory(**{name: given[what] for name, what in self._arguments().items()})
        except (ImportError, TypeError, ValueError) as error:
            raise InputError(
                f"cache={self} could not be made ({_sentence(error)}) Give a class or a function that takes nothing, or "
                "config and max_cache_len, and makes a transformers Cache."
            ) from error
        if not isinstance(cache, Cache):
            raise InputError(
                f"cache={self} made a {type(cache).__name__}: expected a transformers Cache."
            )
        if int(cache.get_seq_length()) or "update" in vars(cache):
            raise InputError(
                f"cache={self} made a cache that is in use already: make a new, empty one in every call."
            )
        return cache

    def _arguments(self) -> dict[str, str]:
        """What the factory is called with: by its parameters' names, ``config`` or
        ``max_cache_len``.
        """
        parameters = inspect.signature(self.factory).parameters
        arguments = {name: name for name in ("config", "max_cache_len") if name in parameters}
        required = [
            p
            for p in parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        ]
        return {required[0].name: "config"} if not arguments and len(required) == 1 else arguments

    @property
    def name(self) -> str:
        """What Python calls the factory; ``make_cache`` for one without a name."""
        name = str(getattr(self.factory, "__qualname__", ""))
        return name if name.isidentifier() else "make_cache"

    def written(self, capacity: int) -> tuple[str, str]:
        """A call of the factory; it is imported where it has a name in a module."""
        values = {"config": "model.config", "max_cache_len": f"{capacity}"}
        made = f"{self.name}({', '.join(f'{name}={values[what]}' for name, what in self._arguments().items())})"
        module = getattr(self.factory, "__module__", "__main__")
        own = module == "__main__" or self.name != getattr(self.factory, "__qualname__", "")
        return made, f"# {self.name} is yours" if own else f"from {module} import {self.name}"

    def __str__(self) -> str:
        """The module and name to import it from."""
        return f"{self.factory.__module__}:{getattr(self.factory, '__qualname__', type(self.factory).__qualname__)}"


@dataclasses.dataclass(frozen=True)
class Named(CacheKind):
    """The name of a class or a function that was read from a file: it is shown and never imported,
    since anybody writes files.

    Attributes:
        name: The text in the file, such as ``package.module:Name``.
    """

    exact: ClassVar[bool] = False
    name: str

    def make(self, config: Any, capacity: int) -> Any:
        """Makes no cache.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"cache={self.name} was read from a file, whose code is not run: if you trust that class, give the path yourself, as "
            f"in kv.run(model, prompt, 'cached[cache={self.name}]')."
        )

    def __str__(self) -> str:
        """The text in the file."""
        return self.name


CACHE_KINDS: dict[str, type[CacheKind]] = spec.by_name(
    Dynamic, Preallocated, Offloaded, Static, Quantized
)


def cache_named(name: Any) -> CacheKind:
    """The kind of cache that a text such as ``static(64)``, a class or a function that makes a
    cache stands for.

    Raises:
        InputError: There is no such kind, or it is itself a cache.
    """
    if isinstance(name, CacheKind):
        return name
    if callable(name):
        return MadeBy(name)
    if not isinstance(name, str):
        raise InputError(
            f"cache={type(name).__name__}(...) was given, and a cache holds the keys and values of one run: give its class, or "
            "a function that makes a new one for every run."
            if hasattr(name, "get_seq_length")
            else f"cache={name!r} was given: expected one of {', '.join(CACHE_KINDS)}, or a class or function that makes one."
        )
    if ":" in name:
        return MadeBy(_import_factory(name))
    return spec.read(
        "cache",
        name,
        CACHE_KINDS,
        "A class or function is given as package.module:Name, a dtype as float32; a model's own sliding windows are in dynamic "
        "and static, and a window over another model is the policy sinks(0,N).",
    )


def cache_read(text: str) -> CacheKind:
    """The kind of cache that a file names, as :func:`cache_named` reads it, but the name of a class
    stays a text.

    Raises:
        InputError: There is no such kind.
    """
    return Named(text) if ":" in text else cache_named(text)


def check_plain(kind: CacheKind, who: str) -> None:
    """Raises UnsupportedError for a kind other than the model's own; ``who`` names the model and
    says why it has no other.
    """
    if not isinstance(kind, Dynamic):
        raise UnsupportedError(
            f"cache={kind} cannot be used by {who}: load the model with kind='native'."
        )


def _import_factory(text: str) -> Callable[..., Any]:
    module, _, name = text.partition(":")
    # As Python itself would find it: the command is a script that lies elsewhere.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module.strip())
        for part in name.strip().split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"cache {text!r} cannot be imported ({error}): expected package.module:Name of a class or function that is "
            "installed, or lies in the current folder."
        ) from error
    if not callable(factory):
        raise InputError(
            f"cache {text!r} is a {type(factory).__name__}: expected a class or function that makes a cache."
        )
    return factory


def installed(module: str) -> bool:
    """Whether a module seems to be there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _sentence(error: Exception) -> str:
    return str(error).strip().rstrip(".") + "."
