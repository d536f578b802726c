"""An execution path: how a model is run, as data. Never a model, never a tensor."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kvinterp.errors import InputError, shown
from kvinterp.inputs import check_instance, check_known, check_whole
from kvinterp.models import dtype_named
from kvinterp.models.adapter import DTYPES
from kvinterp.models.caches import CacheKind, Dynamic, cache_named
from kvinterp.paths.kernels import Kernels, Native, kernels_named
from kvinterp.policies import Identity, Policy, policy_named

__all__ = ["Cached", "ExecutionPath", "Recompute", "path_named"]

FORMS = ("cached", "recompute")
OPTIONS = ("chunk", "cache", "cache_dtype", "kernels")


@dataclasses.dataclass(frozen=True)
class ExecutionPath:
    """How the next-token logits are computed. :func:`Cached` and :func:`Recompute` build one.

    Attributes:
        form: ``"cached"`` (prefill, then one token a step against the cache) or ``"recompute"`` (the whole prefix at
            every step, no memory between steps).
        policy: What is done to keys and values on their way in and out of the cache.
        dtype: Compute dtype, such as ``"float64"``, or None for the model's own.
        cache_dtype: Dtype the cache keeps, or None for the compute dtype.
        chunk: Most tokens in one prefill forward, or None for all at once.
        kernels: Which arithmetic it computes with; the machine's own unless said.
        cache: Which cache keeps the keys and values; the model's own unless said.
    """

    form: str = "cached"
    policy: Policy = dataclasses.field(default_factory=Identity)
    dtype: str | None = None
    cache_dtype: str | None = None
    chunk: int | None = None
    kernels: Kernels = dataclasses.field(default_factory=Native)
    cache: CacheKind = dataclasses.field(default_factory=Dynamic)

    def __post_init__(self) -> None:
        check_known("form of path", self.form, FORMS)
        check_instance(
            "kernels", self.kernels, Kernels, "a kernel mode, such as SplitK(4), or use Cached(kernels='native')"
        )
        check_instance("cache", self.cache, CacheKind, "a kind of cache, or use Cached(cache='static')")
        if self.cache_dtype is not None and self.form == "recompute":
            raise InputError(
                f"cache_dtype={self.cache_dtype!r} was given for recompute, which keeps no cache: use Cached(...)."
            )
        if self.form == "recompute" and self.cache != Dynamic():
            raise InputError(f"cache={self.cache} was given for recompute, which keeps no cache: use Cached(...).")
        if not isinstance(self.policy, Policy):
            raise InputError(
                f"policy={shown(self.policy)} was given: expected a Policy, such as kvinterp.policy_named('identity')."
            )
        dtype_named(self.dtype)
        dtype_named(self.cache_dtype)
        if self.chunk is not None:
            object.__setattr__(self, "chunk", check_whole("chunk", self.chunk, hint=" of tokens, or None"))

    def __str__(self) -> str:
        """The text form, such as ``cached``, ``recompute@float64`` or ``cached[chunk=16]+q8_0``."""
        kernels = None if isinstance(self.kernels, Native) else self.kernels
        kind = None if self.cache == Dynamic() else self.cache
        cache = {"cache": self.cache_dtype} if kind is None else {"cache": kind, "cache_dtype": self.cache_dtype}
        options = {"chunk": self.chunk, **cache, "kernels": kernels}
        shown = ",".join(f"{name}={value}" for name, value in options.items() if value is not None)
        policy = "" if isinstance(self.policy, Identity) else f"+{self.policy}"
        return self.form + (f"[{shown}]" if shown else "") + policy + (f"@{self.dtype}" if self.dtype else "")


def Cached(  # noqa: N802  # reads as the noun it makes
    policy: Policy | str | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    chunk: int | None = None,
    kernels: Kernels | str = "native",
    cache: Any = "dynamic",
) -> ExecutionPath:
    """Decoding from a KV cache: prefill once, then one token a step.

    Args:
        policy: What is done to keys and values; nothing unless said.
        dtype: Compute dtype; the model's own unless said.
        cache_dtype: What the cache keeps; the compute dtype unless said.
        chunk: Most tokens in one prefill forward.
        kernels: A kernel mode, such as ``"batch_invariant"`` or ``SplitK(4, "float16")``.
        cache: ``"dynamic"`` (the model's own), ``"static"``, ``"static(256)"``, ``"quantized(4)"``, ``"preallocated"``; or a
            class of transformers caches, or a function that makes a new one of those of ``config`` and ``max_cache_len``
            that it takes.
    """
    kept = _name(cache_dtype), chunk, kernels_named(kernels), cache_named(cache)
    return ExecutionPath("cached", _policy(policy), _name(dtype), *kept)


def Recompute(  # noqa: N802  # reads as the noun it makes
    policy: Policy | str | None = None,
    dtype: str | None = None,
    chunk: int | None = None,
    kernels: Kernels | str = "native",
) -> ExecutionPath:
    """Recomputing the whole prefix at every step, as if there were no cache.

    Args:
        policy: What is done to the keys and values of every position before attention reads them.
        dtype: Compute dtype; the model's own unless said.
        chunk: Most tokens in one forward; the prefix is then computed chunk after chunk, anew at every step.
        kernels: A kernel mode, as for :func:`Cached`.
    """
    return ExecutionPath("recompute", _policy(policy), _name(dtype), None, chunk, kernels_named(kernels))


def path_named(text: object) -> ExecutionPath:
    """Reads the text form of a path: ``form[options]+policy@dtype``, of which only the form is needed.

    Raises:
        InputError: The text does not have that form.
    """
    if isinstance(text, ExecutionPath):
        return text
    if not isinstance(text, str):
        raise InputError(
            f"path={shown(text)} was given: expected a text such as 'cached', or Cached(...) or Recompute(...)."
        )
    match = re.fullmatch(r"(cached|recompute)(?:\[([^\]]*)\])?(?:\+(.+?))?(?:@(\w+))?", text.strip())
    if match is None:
        raise InputError(
            f"path {text!r} cannot be read: expected cached or recompute, then if wanted "
            "[chunk=N,cache=KIND,cache_dtype=DTYPE,kernels=MODE], +POLICY and @DTYPE, as in cached, recompute@float64 or "
            "cached[chunk=16]."
        )
    form, options, policy, dtype = match.groups()
    chosen: dict[str, str] = {}
    # A comma inside brackets belongs to a mode's own values, as in kernels=split_k(4,float16).
    for part in filter(None, re.split(r",(?![^(]*\))", options or "")):
        name, value = (side.strip() for side in (*part.split("=", 1), "")[:2])
        # The cache's dtype, the older of the two, may stand where its kind does.
        name = "cache_dtype" if name == "cache" and value in DTYPES else name
        if name not in OPTIONS or not value or name in chosen:
            raise InputError(
                f"path option {part!r} in {text!r} is {'given twice' if name in chosen else 'unknown'}: expected chunk=N, "
                "cache=KIND, cache_dtype=DTYPE or kernels=MODE."
            )
        chosen[name] = value
    if form == "recompute" and ("cache" in chosen or "cache_dtype" in chosen):
        raise InputError(f"path {text!r} gives a cache to a path that keeps none: use cached[cache=...].")
    chunk = chosen.get("chunk")
    if chunk is not None and not (chunk.isascii() and chunk.isdecimal() and len(chunk) < 20):
        raise InputError(f"chunk={chunk!r} in path {text!r}: expected a whole number of tokens of at least 1.")
    size, kernels = None if chunk is None else int(chunk), kernels_named(chosen.get("kernels", "native"))
    cache = cache_named(chosen.get("cache", "dynamic"))
    return ExecutionPath(form, _policy(policy), dtype, chosen.get("cache_dtype"), size, kernels, cache)


def _policy(policy: Policy | str | None) -> Policy:
    return Identity() if policy is None else policy_named(policy) if isinstance(policy, str) else policy


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
