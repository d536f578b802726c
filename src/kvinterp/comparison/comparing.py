"""Runs a model along two paths side by side and says how far apart they are, at which step, layer, head and position."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.comparison.cache_errors import CACHE_ERRORS
from kvinterp.comparison.choices import Choices
from kvinterp.comparison.comparison import Comparison, Origin
from kvinterp.comparison.forecast import forecast, say
from kvinterp.comparison.recordable import COMPARED, recordable
from kvinterp.comparison.rows import failed, of_example
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.inputs import (
    check_callable,
    check_choice,
    check_seed,
    checked_continuation,
    chosen_layers,
    encode,
    listed,
    whole_numbers,
)
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.adapter import Site
from kvinterp.models.sites import LAYOUTS, ROWS, expand_sites
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, Runner, Strategy, path_named, strategy_named
from kvinterp.paths.batches import in_batches
from kvinterp.paths.decode import Collected, fed_to_all, length_of, lockstep
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.sampling import drawing
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.policies import Place
from kvinterp.progress import counting
from kvinterp.provenance import provenance
from kvinterp.reading.vocabulary import PROTOCOLS
from kvinterp.recording import SiteHook

log = logging.getLogger("kvinterp")

__all__ = ["compare"]


def compare(
    model: Any,
    prompts: Any,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath = "recompute",
    *,
    protocol: str = "matched",
    strategy: str | Strategy = "greedy",
    max_new_tokens: int = 48,
    seed: int = 0,
    continuation: Sequence[int] | None = None,
    record: str | Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    stop: str = "end of sequence",
    batch_size: int = 1,
    examples: Sequence[int] | None = None,
    cache_errors: str = "aggregated",
    progress: str = "bar",
    done: Callable[[Comparison], None] | None = None,
    lanes: tuple[Callable[..., Any], Callable[..., Any]] = (Runner, Runner),
) -> Comparison:
    """Runs two paths side by side on the same prompts and compares them at every step.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list: texts, :class:`Prompt`, or token ids.
        a: The leading path: in the matched protocol both are fed the tokens it chooses.
        b: The path it is compared with.
        protocol: ``"matched"`` or ``"free"``; see PROTOCOLS.
        strategy: How tokens are chosen; both paths draw from the same random number at each step.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        seed: Seeds the random numbers.
        continuation: Token ids to feed both paths (matched, one prompt) instead of the leading path's choices.
        record: Sites to compare, out of the residual sites, pattern and the cache sites (``kv``); ``""`` for none; for None
            resid_post, pattern and kv, without those that this model cannot give (the log says which and why). Under SDPA,
            which shows no pattern, it is derived beside the kernel from queries and keys; the tables say so.
        layers: Layers to compare (default: all).
        stop: ``"end of sequence"`` or ``"length"``.
        batch_size: Most prompts in a batch; used only where the bits were checked to stay the same.
        examples: The number of each prompt in the tables and for the random numbers, where these prompts are some of a
            longer list (a resumed or sharded run; default: 0, 1, 2, ...).
        cache_errors: ``"aggregated"`` gives the errors of K and V by step and by position separately; ``"whole"`` every
            position at every step besides, which is quadratic in the steps.
        progress: ``"bar"`` (on a terminal or in a notebook) or ``"none"``.
        done: Told of every finished batch.
        lanes: What advances each path, made as a :class:`kvinterp.paths.Runner` is; another one has no sites to compare.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: This kind of model cannot give a site.
    """
    adapter, path_a, path_b, strategy = wrap(model), path_named(a), path_named(b), strategy_named(strategy)
    check_choice("protocol", protocol, tuple(PROTOCOLS))
    check_choice("stop", stop, ("end of sequence", "length"))
    check_choice("progress", progress, ("bar", "none"))
    check_choice("cache_errors", cache_errors, tuple(CACHE_ERRORS))
    check_seed(seed)
    check_callable("done", done)
    items, _ = listed(prompts)
    if continuation is not None and (len(items) != 1 or protocol != "matched"):
        raise InputError("continuation feeds one prompt in the matched protocol: give one prompt, or leave it out.")
    forced = checked_continuation(continuation, len(items), adapter)
    # Made into a list here: it is asked for more than once.
    layers = None if layers is None else chosen_layers(adapter, layers)
    expected = "whole numbers of at least 0, one a prompt"
    numbers = list(range(len(items))) if examples is None else whole_numbers("examples", examples, expected)
    if len(numbers) != len(items) or len(set(numbers)) != len(numbers):
        raise InputError(f"{len(items)} prompts came with the example numbers {numbers}: give each prompt one of its own.")
    tokens = [encode(adapter, item, max_new_tokens) for item in items]
    names = [item.id if isinstance(item, Prompt) else str(number) for number, item in zip(numbers, items, strict=True)]
    with located(f"model {adapter.facts.name}, {path_a} against {path_b}"), own_threads(adapter):
        sites, layers = _compared(adapter, record, layers), chosen_layers(adapter, layers)
        if sites and lanes != (Runner, Runner):
            raise InputError(f"lanes of their own were given, which show no site, with record={record!r}: pass record=''.")
        pair = _Pair(
            adapter, (path_a, path_b), protocol, strategy, seed, max_new_tokens, forced, stop, sites, layers, cache_errors,
            lanes,
        )  # fmt: skip
        if lanes == (Runner, Runner):
            # With lanes of its own it is one of many, whose caller says what is done.
            say(forecast(adapter.facts, pair.sites, len(pair.layers), [len(t) for t in tokens], pair.length, cache_errors))
        with counting(len(tokens), "comparing", "prompt", progress) as counted:

            def finished(indices: Sequence[int], made: Sequence[Comparison]) -> None:
                counted(len(indices))
                if done is not None:
                    done(Comparison.joined(made))

            parts = in_batches(
                adapter,
                (path_a, path_b),
                tokens,
                max_new_tokens,
                batch_size,
                lambda batch: pair.batch(
                    [numbers[i] for i in batch], [tokens[i] for i in batch], [names[i] for i in batch]
                ),
                finished,
            )
    made = Comparison.joined(parts)
    made.prompts = _as_prompts(items, names)
    made.origin = Origin(
        weakref.ref(adapter.model), adapter.facts.name, adapter.tokenizer, dict(zip(numbers, tokens, strict=True))
    )
    return made


def _as_prompts(items: Sequence[Any], names: Sequence[str]) -> list[Prompt]:
    """What was asked, as the tables name it; empty where token ids were given, which have no text of their own."""
    if not all(isinstance(item, Prompt | str) for item in items):
        return []
    return [item if isinstance(item, Prompt) else Prompt(name, item) for item, name in zip(items, names, strict=True)]


class NewestActivations(SiteHook):
    """Holds what one path shows at the newest position, until the next step."""

    def __init__(self, adapter: Adapter, wanted: Sequence[Site]) -> None:
        super().__init__(adapter, wanted, "newest", rows="said")
        self.architecture, self.seen = adapter.facts.architecture, dict[Site, Tensor]()

    @property
    def reads(self) -> bool:
        """Whether it hears a site of the cache; of which rows that is, is told where some may be missing."""
        return bool(self._reads)

    def begin_step(self, step: int) -> None:
        """Lets go of the step before."""
        self.seen.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Hears what attention is about to read, and of which rows where a policy may have let go of some."""
        if place.rows is not None:
            self.seen[ROWS, place.layer] = place.rows
        super().on_read(place, keys, values)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Holds the newest row; of a cache site all rows.

        Raises:
            UnsupportedError: A residual site holds several streams.
        """
        layout = LAYOUTS[site]
        if layout.group == "residual" and tensor.dim() != layout.dimensions:
            # Gemma 3n, DeepSeek-V4 and others carry several streams, which are mixed at every block.
            raise UnsupportedError(
                f"{site} of {self.architecture} is several residual streams side by side, of shape "
                f"{tuple(tensor.shape)}, and cannot be compared as one: leave it out, as in record='kv'."
            )
        if (ROWS, layer) in self.seen and layout.group == "cache":
            # What is left is moved to the front of a preallocated cache before anyone compares.
            tensor = tensor.clone()
        self.seen[site, layer] = tensor if layout.group == "cache" else tensor.select(layout.rows, -1)


@dataclasses.dataclass
class _Pair:
    """Two paths of one model and how they are fed."""

    adapter: Adapter
    paths: tuple[ExecutionPath, ExecutionPath]
    protocol: str
    strategy: Strategy
    seed: int
    steps: int
    continuation: Sequence[int] | None
    stop: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    cache_errors: str
    lanes: tuple[Callable[..., Any], Callable[..., Any]]

    def __post_init__(self) -> None:
        self.wanted = [(site, layer) for site in self.sites for layer in self.layers]
        self.targets = [self.adapter.at(dtype_named(path.dtype)) for path in self.paths]
        for target in self.targets:
            NewestActivations(target, self.wanted)
        self.about = provenance(
            self.adapter,
            paths={"a": str(self.paths[0]), "b": str(self.paths[1])},
            protocol=self.protocol,
            strategy=str(self.strategy),
            seed=self.seed,
            derived=[site for site in self.sites if any(target.derives(site) for target in self.targets)],
            lets_go=[side for side, path in zip("ab", self.paths, strict=True) if path.policy.evicts],
        )

    @property
    def length(self) -> int:
        """Most steps: those that are asked for, or as many as there are tokens to feed."""
        return self.steps if self.continuation is None else min(self.steps, len(self.continuation) + 1)

    def batch(self, indices: Sequence[int], prompts: Sequence[Sequence[int]], names: Sequence[str]) -> list[Comparison]:
        """Runs one batch and returns a comparison for each prompt."""
        facts = self.adapter.facts
        prompt = torch.tensor(list(map(list, prompts)), device=self.adapter.device)
        choose = drawing(self.strategy, self.seed, indices, self.steps, prompt.device)
        ends = end_tokens(self.adapter, prompt.device) if self.stop == "end of sequence" else None
        given = fed_to_all(self.continuation, 2, len(prompts), prompt.device)
        newest = [NewestActivations(target, self.wanted) for target in self.targets]
        differences = Differences(
            self.layers, range(facts.query_heads), range(facts.kv_heads), self.cache_errors,
            same_text=self.protocol == "matched",
        )  # fmt: skip
        collected, choices = Collected(), Choices()
        flipped = torch.zeros(len(prompts), dtype=torch.bool, device=prompt.device)
        made = zip(self.lanes, self.paths, newest, strict=True)
        runners = [lane(self.adapter, path, prompt, self.length, [hook]) for lane, path, hook in made]
        about = {**self.about, "caches": {side: runner.cache for side, runner in zip("ab", runners, strict=True)}}
        follows = (0, 0) if self.protocol == "matched" else (0, 1)
        with runners[0], runners[1]:
            for now in lockstep(runners, self.length, choose, follows=follows, given=given, ends=ends):
                collected.add(now)
                choices.add(now.logits, now.chosen)
                other = now.chosen[0] != now.chosen[1]
                differences.add(
                    now.number,
                    indices,
                    prompt.shape[1] + now.number,
                    (collected.tokens_only(now.logits[0]), collected.tokens_only(now.logits[1])),
                    (newest[0].seen, newest[1].seen),
                    flipped.to(torch.int8).masked_fill(now.over, -1),
                    other & ~flipped,
                )
                flipped = flipped | other
        decided = choices.of_rows(choose.distances)
        frames = differences.frames(indices)
        stops = [] if ends is None else ends.tolist()
        # Numbered by lane first; each prompt asks for both lanes' rows.
        lists = [[*zip(*of_lanes, strict=True)] for of_lanes in collected.lists()]
        made_of = [[each[row] for each in lists] for row in range(len(indices))]
        return [
            self._one(*each, collected.padding, frames, stops, about)
            for each in zip(indices, names, prompts, made_of, decided, strict=True)
        ]

    def _one(
        self,
        example: int,
        name: str,
        prompt: Sequence[int],
        collected: Sequence[Any],
        decided: Mapping[str, np.ndarray],
        padding: Tensor | None,
        frames: dict[str, pd.DataFrame],
        stops: Sequence[int],
        about: dict[str, Any],
    ) -> Comparison:
        chosen, fed, sound = collected
        count = min(length_of(tokens, stops) for tokens in fed)
        for path, tokens, fine in zip(self.paths, fed, sound, strict=True):
            if not all(fine[:count]):
                message = first_nonfinite(self.adapter, path, prompt, tokens[: count - 1], padding)
                return failed(example, name, message, frames, about)
        a, b = (np.asarray(tokens[:count]) for tokens in chosen)
        texts = (self.adapter.decode(a.tolist()), self.adapter.decode(b.tolist()))
        return of_example(example, name, prompt, frames, (a, b), texts, about, decided, self.adapter.pieces)


def _compared(adapter: Adapter, record: str | Sequence[str] | None, layers: Iterable[int] | None) -> tuple[str, ...]:
    if record is None:
        found, left_out = recordable(adapter, None, chosen_layers(adapter, layers))
        for site, reason in left_out.items():
            log.info("%s is not compared: %s", site, reason)
        return found
    sites = expand_sites(record)
    wrong = [site for site in sites if site not in COMPARED]
    if wrong:
        raise InputError(
            f"site {wrong[0]!r} cannot be compared: expected one of {', '.join(COMPARED)} or kv; use run() to record it."
        )
    return sites
