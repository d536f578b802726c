"""What a program runs on, where it is a model of any kind: as it is called, its caches, and its
lines of Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.lines import arguments
from kvinterp.auditing.programs.offered_calls import (
    attention_set,
    offered_choices,
    offers_packing,
)
from kvinterp.auditing.programs.program import KEEP, MASKS, Program, Rows
from kvinterp.auditing.programs.subject import (
    MAX_COLUMNS,
    NARROW,
    WORDS,
    Subject,
    apart,
    casts_lifted,
    row_draw,
)
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.cache_kinds import CacheKind
from kvinterp.models.transformers_api import (
    can_generate,
    greedy,
)
from kvinterp.models.transformers_cache import BaseQuantizedLayer, returned_cache

COMPILED = 6
"""The most blocks of a model of which a decode step is compiled unasked: torch takes half a second
for each.
"""
ASKED, SINGLY, PADS = 32, 8, 4
"""Where a cache is asked how much it loses: tokens of a text, whole groups of most quantisers;
those fed singly; and pads.
"""
GOING = 8
"""The most caches that are kept to go on from."""
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_decoder_position_embeddings",
)
EDGES = ("window", "chunk", "block", "rate")
"""Words in the names of a config's numbers at which a cache may go on otherwise."""


class ModelSubject(Subject):
    """A model of any kind.

    Args:
        adapter: The model; not touched but for what every forward does, and given back as it was.
        lifted: The types whose casts are lifted to float64, where the model is cast to it; empty:
            the model as it is.
        kind: The kind of cache that is asked about; None for the model's own.
        declared: Whether that cache is said to lose something.

    Attributes:
        sixteen_met: The types of 16 bits that an operation named and whose cast was lifted.
    """

    uncompiled: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """What the forward without a cache stands in where the model is compiled."""

    def __init__(
        self,
        adapter: Adapter,
        lifted: Sequence[torch.dtype] = NARROW,
        kind: CacheKind | None = None,
        declared: bool = False,
    ) -> None:
        super().__init__()
        self._known: dict[tuple[str, bool], dict[tuple[int, ...], Tensor]] = {}
        self.kind, self._declared = kind, declared
        self._on_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self.nulls: dict[str, float] = {}
        self._going: list[tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = []
        self.given = adapter
        self.adapter = (
            adapter if not lifted or adapter.dtype == torch.float64 else adapter.cast(torch.float64)
        )
        self.lifted = lifted
        self.sixteen_met = set[torch.dtype]()
        self.model: Any = self.adapter.model
        self.name, self.device = adapter.facts.name, adapter.device
        self.native, self.stateful = self.adapter.plain, getattr(self.model, "_is_stateful", False)
        self.takes = self._takes()
        # A HookedTransformer has a config of its own.
        config: Any = self.adapter.config or self.model.cfg
        self.special = special_tokens(self.adapter.source)
        named_in = (
            config,
            getattr(self.adapter.source, "config", None),
            getattr(self.model, "generation_config", None),
        )
        pads, ends, begins = (
            control_tokens(kind, named_in, adapter.facts.vocabulary)
            for kind in ("pad", "eos", "bos")
        )
        self.pad = next(iter(pads), 0)
        self.end = next(iter(ends), self.pad)
        self.controls = tuple(dict.fromkeys((self.pad, *ends, *begins))) if self.native else ()
        self.vocabulary = min(adapter.facts.vocabulary, WORDS)
        named = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        whole = {
            name: n for name, n in named.items() if isinstance(n, int) and not isinstance(n, bool)
        }
        self.context = min(
            [adapter.facts.context, *(whole[name] for name in LENGTHS if whole.get(name, 0) > 0)]
        )
        self.max_columns = min(MAX_COLUMNS, self.context)
        edges = [n for name, n in whole.items() if any(word in name for word in EDGES)] or [
            *whole.values()
        ]
        self.sizes = self._beside(edges), self._beside([*whole.values()])
        self.compiles = self.native and adapter.facts.layers <= COMPILED
        with self.running():
            self.caches = self._caches()
        self.eps = torch.finfo(self.adapter.dtype).eps
        self.measure()
        if kind is not None:
            self._measure_cache()
        self.generates = (
            can_generate(self.model) if self.native else hasattr(self.model, "generate")
        )

    def _takes(self) -> frozenset[str]:
        taken = self.adapter.takes if self.native else {"attention_mask"}
        return frozenset(taken) & {"attention_mask", "position_ids"}

    def _beside(self, sizes: list[int]) -> tuple[int, ...]:
        found = {
            n
            for size in sizes
            if 8 <= size <= self.max_columns
            for n in (size - 1, size, size + 1)
            if n <= self.max_columns
        }
        return tuple(sorted(found)) or (7,)

    def _measure_cache(self) -> None:
        """Measures what the cache loses, and where it is said to, how far it is from itself among
        more rows and behind pads.
        """
        first = max(min(ASKED, self.max_columns - SINGLY - PADS), 1)
        length, pieces = first + SINGLY, (first, *[1] * SINGLY)
        texts = [
            [self.token(draw) for _ in range(length)]
            for draw in (row_draw(0, row) for row in range(self.rows))
        ]
        declared = self._declared or any(
            isinstance(layer, BaseQuantizedLayer) for layer in self._layers
        )
        try:
            on_cache = [self.on_cache(text, pieces) for text in texts]
        except Exception:  # The first program says it.
            self.lossy = declared
            return
        self.loss = max(
            apart(made, self.alone(text)) for made, text in zip(on_cache, texts, strict=True)
        )
        self.lossy = declared and self.loss > self.limit
        if not self.lossy:
            return
        self.crops_within = length
        with contextlib.suppress(Exception):
            rows = self._fed(self.tensor(texts), pieces)[0] if self.rows > 1 else on_cache
            self.nulls["among more rows"] = max(
                apart(made, one) for made, one in zip(rows, on_cache, strict=True)
            )
        with contextlib.suppress(Exception):
            widths = pieces[0] + PADS, *pieces[1:]
            padded = [
                self._fed(self.tensor([[self.pad] * PADS + text]), widths, None, PADS)[0][0, PADS:]
                for text in texts
            ]
            self.nulls["behind pads"] = max(
                apart(made, one) for made, one in zip(padded, on_cache, strict=True)
            )

    @property
    def _layers(self) -> Sequence[Any]:
        return getattr(self.fresh(), "layers", ())

    def limit_of(self, rows: int, padded: bool) -> float:
        """For a cache that loses: the root of how far it is from itself so, where that is nearer
        its loss than the logits.
        """
        kinds = ["among more rows"] * (rows > 1) + ["behind pads"] * padded
        nulls = [null for kind in kinds if (null := self.nulls.get(kind, 0.0)) <= self.loss**0.5]
        return float(max([self.noise, *nulls]) ** 0.5)

    def holds(self, program: Program) -> bool:
        """Whether what is right is known: not of a 4D mask past a window, nor of what a lossy cache
        loses otherwise.

        Told of a mask alone a model turns keys by other positions, and a cache that loses loses
        other things.
        """
        alone = program.rows.told == "mask_alone" and any(program.rows.pads)
        # A layer without a window has None.
        windows = (
            [n for n in self.adapter.facts.windows if n is not None]
            if program.rows.told in MASKS
            else []
        )
        # A 4D mask has a column a token; over a window a cache holds fewer, and the forward without
        # one sees past it.
        return program.columns <= min(windows, default=program.columns) and not (
            self.lossy and (alone or program.rows.ways)
        )

    def fresh(self) -> Any:
        """A new cache of the kind that is asked about."""
        assert self.kind is not None
        made = self.adapter.own_cache(self.kind, 1, self.capacity, self.adapter.dtype)
        assert made is not None
        return made.model_cache

    def on_cache(self, text: Sequence[int], pieces: tuple[int, ...]) -> Tensor:
        """Logits of one row's own tokens, ``[position, vocabulary]``, fed to a new cache of the
        kind in pieces of so many.
        """
        key = tuple(text), pieces
        if key not in self._on_cache:
            begun = [
                one
                for one in self._going
                if key[0][: len(one[0])] == one[0] and pieces[: len(one[1])] == one[1]
            ]
            best = max(begun, key=lambda one: len(one[0]), default=((), (), None, None))
            before, fed, cache, known = best
            with self.running():
                logits, cache = self._fed(
                    self.tensor([key[0][len(before) :]]), pieces[len(fed) :], cache
                )
            self._on_cache[key] = (
                logits[0].clone() if known is None else torch.cat([known, logits[0]])
            )
            # A cache goes on from where it stands, and only from there.
            self._going = [
                *(one for one in self._going if one is not best),
                (*key, cache, self._on_cache[key]),
            ][-GOING:]
        return self._on_cache[key]

    def _fed(
        self, ids: Tensor, pieces: Sequence[int], cache: Any = None, pads: int = 0
    ) -> tuple[Tensor, Any]:
        """Logits of all columns of these rows, of which the first may be pads, fed to a cache in
        pieces; and the cache.
        """
        logits, mask = [], torch.ones_like(ids)
        mask[:, :pads] = 0
        with self.running():
            for end, width in zip(itertools.accumulate(pieces), pieces, strict=True):
                given = {} if not pads else {"attention_mask": mask[:, :end]}
                if pads and self.offset is not None:
                    given["position_ids"] = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[
                        :, -width:
                    ] + self.offset
                made, cache = self.feed(ids[:, end - width : end], cache, **given)
                logits.append(made)
        return torch.cat(logits, 1), cache

    def _caches(self) -> tuple[str, ...]:
        if self.kind is not None:
            self.fresh()
            return ("own",)
        text = self.tensor([[self.token(random.Random(0)) for _ in range(4)]])
        made = self.feed(text, None)[1]
        if made is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} returned no cache though use_cache was true: there is none to try."
            )
        if not self.native or type(made).__name__ != "DynamicCache":
            return ("own",)
        kinds = {type(layer).__name__ for layer in made.layers}
        bare = kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
        rolls = getattr(made, "is_croppable", False) and not self.stateful
        # transformers copies layers to and fro on a stream of CUDA.
        moves = bare and self.device.type == "cuda"
        static = ["static"] * self.adapter.takes_static
        return "own", *["bare"] * bare, *["recording"] * rolls, *static, *["offloaded"] * moves

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Whatever runs inside begins with the model as it was found, without its casts."""
        with (
            torch.no_grad(),
            self.adapter.own_state([]),
            casts_lifted(self.lifted, self.sixteen_met),
        ):
            yield

    def plain(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """The forward that users call with ``use_cache=False``."""
        # A decode that goes on beside it has its own state.
        with self.adapter.own_state([]), self.uncompiled():
            if self.way.fed == "types":
                model_kwargs = {"token_type_ids": ids % self.token_types, **model_kwargs}
                return self.model(input_ids=ids, use_cache=False, **model_kwargs).logits
            return self.adapter.forward(
                ids, None, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
            )

    def plain_as_called(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """The same called as the program calls it; columns whose logits it is not asked for are
        filled in.
        """
        if not self.way.ways and not any(given.dim() == 4 for given in model_kwargs.values()):
            return self.plain(ids, **model_kwargs)
        with self.adapter.own_state([]), self.uncompiled():
            given, asked = self._given(ids, model_kwargs), self._asked(ids.shape[1])
            kept = self.way.kept(ids.shape[1])
            if kept is None:
                return self.model(**given, **asked, use_cache=False).logits
            whole = self.model(**given, use_cache=False).logits.clone()
            some = self.model(**given, **asked, use_cache=False).logits
            whole[:, kept] = some if some.shape[1] == len(kept) else float("nan")
            return whole

    @contextlib.contextmanager
    def called_as(self, rows: Rows) -> Iterator[None]:
        """Inside, forwards are called as these rows say; what is right is known by attention and
        token types.
        """
        before = self.way, self._alone
        plain = rows.attention == "own" and rows.fed != "types"
        self.way = rows
        self._alone = (
            self._alone
            if plain
            else self._known.setdefault((rows.attention, rows.fed == "types"), {})
        )
        try:
            with attention_set(self.model, rows.attention):
                yield
        finally:
            self.way, self._alone = before

    @functools.cached_property
    def choices(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        """Asked of the forward without a cache (:func:`offered_choices`)."""
        return offered_choices(self)

    @functools.cached_property
    def packs(self) -> bool:  # type: ignore[override]
        """Asked of the forward without a cache (:func:`offers_packing`)."""
        return offers_packing(self)

    @property
    def token_types(self) -> int:
        """How many token types there are: a token's is told by its id, so that one that is fed to
        another's place is seen.
        """
        return max(int(getattr(self.adapter.config, "type_vocab_size", 2) or 2), 1)

    def _given(self, ids: Tensor, model_kwargs: Mapping[str, Tensor]) -> dict[str, Any]:
        """What a forward is given, as the program's rows have it called."""
        given: dict[str, Any] = {"input_ids": ids}
        if self.way.fed == "embeds":
            given = {"inputs_embeds": self.model.get_input_embeddings()(ids)}
        if self.way.fed == "types":
            given["token_type_ids"] = ids % self.token_types
        given |= model_kwargs
        mask = given.get("attention_mask")
        if self.way.told == "float_mask" and mask is not None and mask.dim() == 4:
            low = torch.finfo(self.adapter.dtype).min
            given["attention_mask"] = (
                torch.zeros(mask.shape, dtype=self.adapter.dtype)
                .to(mask.device)
                .masked_fill(~mask, low)
            )
        return given

    def _asked(self, width: int) -> dict[str, Any]:
        """What a forward of so many columns is asked for beside its logits."""
        kept: Any = KEEP if self.way.asks == "last" else self.way.kept(width)
        if kept is not None:
            return {"logits_to_keep": self.tensor(kept) if isinstance(kept, list) else kept}
        names = {"hidden": ("hidden_states",), "attentions": ("hidden_states", "attentions")}.get(
            self.way.asks, ()
        )
        return {f"output_{name}": True for name in names}

    def asks_generate(self) -> dict[str, Any]:
        """What ``generate()`` is asked for beside tokens and logits."""
        return {} if self.way.kept(1) is not None else self._asked(1)

    def _written(
        self, ids: Tensor | str, model_kwargs: Mapping[str, Tensor], width: int = 0, **more: object
    ) -> str:
        """What :meth:`_given` gives, and :meth:`_asked` for a width, as lines have it."""
        first = ids if isinstance(ids, str) else f"torch.tensor({ids.tolist()})"
        before = (
            {"token_type_ids": f"{first} % {self.token_types}"} if self.way.fed == "types" else {}
        )
        embeds = self.way.fed == "embeds" and width
        first = (
            f"inputs_embeds=model.get_input_embeddings()({first})"
            if embeds
            else f"input_ids={first}"
        )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            seen = f"torch.tensor({mask.int().tolist()})"
            low = f"(1 - {seen}.to(model.dtype)) * torch.finfo(model.dtype).min"
            before["attention_mask"] = low if self.way.told == "float_mask" else f"{seen}.bool()"
            model_kwargs = {
                name: given for name, given in model_kwargs.items() if name != "attention_mask"
            }
        asked = {
            name: f"torch.tensor({value.tolist()})" if isinstance(value, Tensor) else value
            for name, value in (self._asked(width) if width else {}).items()
        }
        return arguments(first, model_kwargs, **before, **asked, **more)

    def feed(self, ids: Tensor, cache: Any, **model_kwargs: Tensor) -> tuple[Tensor, Any]:
        """The forward that users call with the cache of the call before."""
        cache = self.fresh() if cache is None and self.kind is not None else cache
        if self.way.ways:
            given = self._given(ids, model_kwargs) | self._asked(ids.shape[1])
            given |= {} if cache is None else {self.adapter.cache_name: cache}
            out = self.model(**given, use_cache=True)
            return out.logits, returned_cache(out, self.adapter.takes)[1]
        return self.adapter.call_with_cache(
            ids, cache, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        )

    @property
    def cache_name(self) -> str:
        """The argument by which its forward takes its cache."""
        return self.adapter.cache_name

    def cache_line(self, kind: str, columns: int) -> str:
        """The line of Python that :meth:`cache` stands for."""
        return {
            "bare": "cache = DynamicCache()",
            "recording": "cache = DynamicCache(config=model.config)",
            "static": f"cache = StaticCache(config=model.config, max_cache_len={columns})",
        }[kind]

    def cache(self, kind: str, columns: int) -> Any:
        """A cache of one of :attr:`caches` but the model's own, as users make it; a static one of
        so many columns.
        """
        from transformers import DynamicCache, StaticCache

        config = self.adapter.config
        if kind == "static":
            return StaticCache(config=config, max_cache_len=columns)
        more: Any = {"offloading": True} if kind == "offloaded" else {}
        made: Any = DynamicCache(config=None if kind == "bare" else config, **more)
        if kind == "recording":
            made.activate_past_recording()
        return made

    def generate(
        self,
        prompt: Tensor,
        count: int,
        mask: Tensor | None,
        cache: Any = None,
        begins: Sequence[tuple[int, ...]] = (),
        **more: Any,
    ) -> Any:
        """Transformers' own ``generate()``: greedy, so many tokens, none of them an end; of rows
        whose texts begin so.
        """
        if cache is None and self.kind is not None and more.get("use_cache", True):
            cache = self.fresh()
        known = {} if mask is None else {"attention_mask": mask}
        known |= {} if cache is None else {self.cache_name: cache}
        known |= {
            name: more.pop(name) for name in ("assistant_model", "inputs_embeds") if name in more
        }
        if self.way.fed == "embeds":
            known.setdefault("inputs_embeds", self.model.get_input_embeddings()(prompt))
        ids = more.pop("beside", None if "inputs_embeds" in known else prompt)
        chosen = self._greedy(count, **self.asks_generate() | more)
        return self.model.generate(ids, generation_config=chosen, **known)

    def _greedy(self, count: int, **more: Any) -> Any:
        return greedy(
            count, output_logits=True, return_dict_in_generate=True,
            **{"min_new_tokens": count, "pad_token_id": self.pad, "use_cache": True, **more},
        )  # fmt: skip

    def feed_line(self, ids: Tensor, cached: str, **model_kwargs: Tensor) -> str:
        """As its users call it."""
        name, cache = self.cache_name, {} if cached == "no" else {self.cache_name: "cache"}
        if self.native:
            if cached == "no" and (made := self.made(self.capacity)):
                cache = {name: made}
            given = self._written(ids, model_kwargs, ids.shape[1], **cache, use_cache=True)
            return f"out = model({given}); logits, cache = out.logits, out.{name}"
        made, more = "cache = DynamicCache()", {name: "cache", "use_cache": True} if name else {}
        if self.adapter.kind == "hooked":
            # It keeps the mask of earlier columns itself.
            model_kwargs = (
                {"attention_mask": model_kwargs["attention_mask"][:, -ids.shape[1] :]}
                if model_kwargs
                else model_kwargs
            )
            made = f"cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, {len(ids)})"
            more = {"past_kv_cache": "cache"}
        line = f"logits = model({arguments(ids, model_kwargs, **more)})"
        return line if cached == "yes" else f"{made}; {line}"

    def generate_line(
        self,
        prompt: str,
        begins: Sequence[tuple[int, ...]],
        model_kwargs: Mapping[str, Tensor],
        **more: object,
    ) -> str:
        """The expression that :meth:`generate` stands for, of rows that begin so."""
        return f"model.generate({arguments(prompt, model_kwargs, **more)})"

    def plain_line(self, ids: Tensor | str, **model_kwargs: Tensor) -> str:
        """As its users call it."""
        if self.native:
            return f"model({self._written(ids, model_kwargs, use_cache=False)}).logits"
        return f"model({arguments(ids, model_kwargs)})"

    def control_line(self, ids: Tensor | str, **model_kwargs: Tensor) -> str:
        """As its users call it; that all logits are asked for is no matter of the cache."""
        asks = (
            dataclasses.replace(self.way, asks="logits")
            if self.way.kept(1) is not None
            else self.way
        )
        before, self.way = self.way, asks
        try:
            return (
                f"model({self._written(ids, model_kwargs, 1, use_cache=False)}).logits"
                if self.native
                else self.plain_line(ids, **model_kwargs)
            )
        finally:
            self.way = before


def special_tokens(model: Any) -> frozenset[int]:
    """The token ids that a transformers config names."""
    config: Any = getattr(model, "config", None)
    named = config.to_dict() if hasattr(config, "to_dict") else {}
    return frozenset(
        value
        for name, value in named.items()
        if name.endswith("_token_id") and isinstance(value, int)
    )


def control_tokens(kind: str, configs: Sequence[Any], vocabulary: int) -> list[int]:
    """The ids of a kind (``"pad"``, ``"eos"``, ``"bos"``) that configs name, as far as they have
    embeddings.
    """
    found = [getattr(config, f"{kind}_token_id", None) for config in configs]
    each = [token for one in found for token in (one if isinstance(one, list | tuple) else [one])]
    return [
        token for token in dict.fromkeys(each) if type(token) is int and 0 <= token < vocabulary
    ]
