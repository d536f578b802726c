"""An execution path: how a model is run, as data. Never a model, never a tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from kvinterp.common import spec
from kvinterp.common.checks import (
    check_choice,
    check_instance,
    check_known,
    check_number,
    check_text,
    check_whole,
)
from kvinterp.common.words import dtype_word
from kvinterp.errors import InputError, shown, unexpected
from kvinterp.models import dtype_named
from kvinterp.models.adapter import DTYPES
from kvinterp.models.cache_kinds import (
    CacheKind,
    Dynamic,
    Preallocated,
    Quantized,
    cache_named,
    cache_read,
)
from kvinterp.paths.kernels import Kernels, Native, kernels_named
from kvinterp.policies import Identity, Policy, policy_named

FORMS = ("cached", "recompute")
OPTIONS = ("chunk", "refresh", "smooth", "prefill", "cache", "cache_dtype", "kernels")
PREFILLS = ("exact", "stored")
WRITTEN = "chunk=N, refresh=N, smooth=WEIGHT, prefill=stored, cache=KIND, cache_dtype=DTYPE or kernels=MODE"
PROGRAMS = " How tokens reach the model, as by generate() or in a batch, is a program: kvinterp audit --calls, kv.audit(calls=)."
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "chunk": functools.partial(check_whole, "chunk", hint=", in tokens, or None"),
    "refresh": functools.partial(check_whole, "refresh", hint=", in decode steps, or None"),
    "smooth": functools.partial(check_number, "smooth", hint=" from 0 to 1, or None"),
}
"""The options that are numbers: what checks each, and returns it."""


@dataclasses.dataclass(frozen=True)
class ExecutionPath:
    """How the next-token logits are computed. :func:`Cached` and :func:`Recompute` build one.

    Attributes:
        form: ``"cached"`` (prefill, then one token a step against the cache) or ``"recompute"``
            (the whole prefix at every step, no memory between steps).
        policy: What is done to keys and values on their way in and out of the cache.
        dtype: Compute dtype, such as ``"float64"``, or None for the model's own.
        cache_dtype: Dtype the cache keeps, or None for the compute dtype.
        chunk: Most tokens in one prefill forward, or None for all at once.
        kernels: Which arithmetic it computes with; default: the machine's own.
        cache: Which cache keeps the keys and values; default: the model's own.
        prefill: ``"exact"``: attention in the prefill reads keys and values as they were computed,
            as with transformers' quantised caches; ``"stored"``: it reads what the cache keeps, as
            in llama.cpp.
        refresh: After how many decode steps the cache is made anew by a prefill of the whole
            prefix, or None for never.
        smooth: The weight of the cache, from 0 to 1, in what attention reads beside what a
            recompute path reads at the same step, or None for the cache alone.
    """

    form: str = "cached"
    policy: Policy = dataclasses.field(default_factory=Identity)
    dtype: str | None = None
    cache_dtype: str | None = None
    chunk: int | None = None
    kernels: Kernels = dataclasses.field(default_factory=Native)
    cache: CacheKind = dataclasses.field(default_factory=Dynamic)
    prefill: str = "exact"
    refresh: int | None = None
    smooth: float | int | None = None

    def __post_init__(self) -> None:
        check_known("form of path", self.form, FORMS)
        check_instance(
            "kernels",
            self.kernels,
            Kernels,
            "a kernel mode, such as SplitK(4), or use Cached(kernels='native')",
        )
        check_instance(
            "cache", self.cache, CacheKind, "a kind of cache, or use Cached(cache='static')"
        )
        check_choice("prefill", self.prefill, PREFILLS)
        if self.form == "recompute":
            self._check_keeps_nothing()
        if self.prefill == "stored" and isinstance(self.cache, Quantized):
            raise InputError(
                f"prefill=stored was given with cache={self.cache}, which hands the prefill what was computed: leave one out."
            )
        if not isinstance(self.policy, Policy):
            raise InputError(
                f"policy={shown(self.policy)} was given: expected a Policy, such as kvinterp.policy_named('identity')."
            )
        dtype_named(self.dtype)
        dtype_named(self.cache_dtype)
        for name, check in NUMBERS.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check(getattr(self, name)))
        if self.smooth is not None:
            self._check_smooth()

    def _check_smooth(self) -> None:
        """Refuses what is no weight, and a cache that would be checked without what it is mixed
        with.
        """
        if not 0 <= self.smooth <= 1:  # type: ignore[operator]
            raise unexpected("smooth", self.smooth, "a weight of the cache from 0 to 1, or None")
        if isinstance(self.cache, Preallocated):
            raise InputError(
                f"smooth={self.smooth:g} was given with cache={self.cache}, which is checked alone: leave one out."
            )

    def _check_keeps_nothing(self) -> None:
        """Refuses what only a path with a cache can do."""
        defaults = {
            "cache_dtype": (self.cache_dtype, None),
            "cache": (self.cache, Dynamic()),
            "refresh": (self.refresh, None),
        }
        others = {"prefill": (self.prefill, "exact"), "smooth": (self.smooth, None)}
        for name, (value, default) in {**defaults, **others}.items():
            if value != default:
                shown_value = repr(value) if name == "cache_dtype" else value
                raise InputError(
                    f"{name}={shown_value} was given for recompute, which keeps no cache: use cached."
                )
        if isinstance(self.policy, Policy) and (self.policy.evicts or self.policy.sites):
            raise InputError(
                f"policy={self.policy} chooses which rows stay by what it sees, and recompute keeps no rows: use cached."
            )

    def __str__(self) -> str:
        """The text form, such as ``cached``, ``recompute@float64`` or ``cached[chunk=16]+q8_0``."""
        kernels = None if isinstance(self.kernels, Native) else self.kernels
        kind = None if self.cache == Dynamic() else self.cache
        cache = (
            {"cache": self.cache_dtype}
            if kind is None
            else {"cache": kind, "cache_dtype": self.cache_dtype}
        )
        prefill = None if self.prefill == "exact" else self.prefill
        ways = {
            "chunk": self.chunk,
            "refresh": self.refresh,
            "smooth": self.smooth,
            "prefill": prefill,
        }
        options = {**ways, **cache, "kernels": kernels}
        text = ",".join(f"{name}={value}" for name, value in options.items() if value is not None)
        policy = "" if isinstance(self.policy, Identity) else f"+{self.policy}"
        return (
            self.form
            + (f"[{text}]" if text else "")
            + policy
            + (f"@{self.dtype}" if self.dtype else "")
        )


def Cached(  # noqa: N802  # reads as the noun it makes
    policy: Policy | str | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    chunk: int | None = None,
    kernels: Kernels | str = "native",
    cache: Any = "dynamic",
    prefill: str = "exact",
    refresh: int | None = None,
    smooth: float | int | None = None,
    **unknown: Any,
) -> ExecutionPath:
    """Decoding from a KV cache: prefill once, then one token a step.

    Args:
        policy: What is done to keys and values (default: nothing).
        dtype: Compute dtype (default: the model's own).
        cache_dtype: What the cache keeps (default: the compute dtype).
        chunk: Most tokens in one prefill forward.
        kernels: A kernel mode, such as ``"batch_invariant"`` or ``SplitK(4, "float16")``.
        cache: ``"dynamic"`` (the model's own), ``"static"``, ``"static(256)"``, ``"quantized(4)"``,
            ``"offloaded"``, ``"preallocated"``; or a class of transformers caches, or a function
            that makes a new one of those of ``config`` and ``max_cache_len`` that it takes.
        prefill: ``"exact"``: the prefill reads what it computes; ``"stored"``: what the cache keeps
            of it.
        refresh: After how many decode steps the cache is made anew by a prefill of the whole
            prefix; default: never.
        smooth: From 0 to 1: attention reads ``smooth`` times the cache and ``1 - smooth`` times
            what a recompute path, run beside it, reads at the same step; default: the cache alone.
        **unknown: Nothing else is an option.

    Raises:
        InputError: An option is unknown, or a value is none.
    """
    _check_known("Cached", unknown)
    ways = prefill, refresh, smooth
    options = _name(cache_dtype), chunk, kernels_named(kernels), cache_named(cache), *ways
    return ExecutionPath("cached", _policy(policy), _name(dtype), *options)


def Recompute(  # noqa: N802  # reads as the noun it makes
    policy: Policy | str | None = None,
    dtype: str | None = None,
    chunk: int | None = None,
    kernels: Kernels | str = "native",
    **unknown: Any,
) -> ExecutionPath:
    """Recomputing the whole prefix at every step, as if there were no cache.

    Args:
        policy: What is done to the keys and values of every position before attention reads them.
        dtype: Compute dtype (default: the model's own).
        chunk: Most tokens in one forward; the prefix is then computed chunk after chunk, anew at
            every step.
        kernels: A kernel mode, as for :func:`Cached`.
        **unknown: Nothing else is an option.

    Raises:
        InputError: An option is unknown, or a value is none.
    """
    _check_known("Recompute", unknown)
    options = None, chunk, kernels_named(kernels)
    return ExecutionPath("recompute", _policy(policy), _name(dtype), *options)


def path_read(text: object) -> ExecutionPath:
    """Reads the text form of a path that stands in a file: a class that it names is not imported,
    and can not be run.

    Raises:
        InputError: The text does not have that form.
    """
    return path_named(text, cache_read)


def path_named(text: object, cache: Callable[[str], CacheKind] = cache_named) -> ExecutionPath:
    """Reads the text form of a path that a user gives: ``form[options]+policy@dtype``, of which
    only the form is needed.

    Args:
        text: The text, or a path, which is returned as it is.
        cache: Reads the kind of cache.

    Raises:
        InputError: The text does not have that form.
    """
    if isinstance(text, ExecutionPath):
        return text
    text = check_text("path", text, "'cached', or Cached(...) or Recompute(...)")
    if text in FORMS:
        return ExecutionPath(text)
    form, options, policy, dtype = spec.path_parts(text)
    values: dict[str, str] = {}
    parts = spec.split(options or "", ",")
    for part in parts:
        name, value = (side.strip() for side in (*part.split("=", 1), "")[:2])
        # The cache's dtype, the older of the two, may stand where its kind does.
        name = "cache_dtype" if name == "cache" and dtype_word(value) in DTYPES else name
        if name not in OPTIONS and (behind := _behind(name, value)):
            rest = ",".join(other for other in parts if other != part)
            named = {"policy": policy, "dtype": dtype, behind: value or name}
            right = "".join(
                [
                    form,
                    f"[{rest}]" * bool(rest),
                    f"+{named['policy']}" * bool(named["policy"]),
                    f"@{named['dtype']}" * bool(named["dtype"]),
                ]
            )
            raise InputError(
                f"path option {part!r} in {text!r} is unknown: a {behind} stands behind the brackets, as in {right!r}."
            )
        if name not in OPTIONS or not value or name in values:
            raise InputError(
                f"path option {part!r} in {text!r} is {'given twice' if name in values else 'unknown'}: expected {WRITTEN}."
                + PROGRAMS * (name == "call")
            )
        values[name] = value
    if form == "recompute" and ("cache" in values or "cache_dtype" in values):
        raise InputError(
            f"path {text!r} gives a cache to a path that keeps none: use cached[cache=...]."
        )
    numbers = {
        name: check(spec.value_of(values[name]))
        for name, check in NUMBERS.items()
        if name in values
    }
    return ExecutionPath(
        form,
        _policy(policy),
        dtype,
        _name(values.get("cache_dtype")),
        kernels=kernels_named(values.get("kernels", "native")),
        cache=cache(values.get("cache", "dynamic")),
        prefill=values.get("prefill", "exact"),
        **numbers,
    )


def _check_known(maker: str, unknown: Mapping[str, Any]) -> None:
    for name in unknown:
        expected = (
            "policy, dtype, chunk or kernels"
            if maker == "Recompute"
            else f"policy, dtype, {WRITTEN}"
        )
        raise InputError(
            f"{maker}() has no option {name!r}: expected {expected}.{PROGRAMS * (name == 'call')}"
        )


def _behind(name: str, value: str) -> str:
    """What an option gives that stands behind the brackets of a path: a policy, a dtype, or
    nothing.
    """
    if name == "dtype" or (not value and dtype_word(name) in DTYPES):
        return "dtype"
    try:
        policy_named(value if name == "policy" else name)
    except InputError:
        return ""
    return "policy"


def _policy(policy: Policy | str | None) -> Policy:
    return (
        Identity()
        if policy is None
        else policy_named(policy)
        if isinstance(policy, str)
        else policy
    )


def _name(dtype: object) -> str | None:
    return None if dtype is None else dtype_word(dtype)
