"""Runs a model along two paths side by side and says how far apart they are, at which step, layer, head and position."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp.comparison.comparison import Comparison, Origin
from kvinterp.comparison.recordable import recordable
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.models import Adapter, dtype_named, expand_sites, wrap
from kvinterp.models.adapter import CACHE_SITES, RESIDUAL_SITES, Site
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, Runner, Strategy, path_named, strategy_named
from kvinterp.paths.runner import (
    check_choice,
    checked_continuation,
    encode,
    end_tokens,
    first_nonfinite,
    in_batches,
    listed,
)
from kvinterp.paths.sampling import check_seed, uniforms
from kvinterp.paths.vocabulary import padding_of, sound_rows
from kvinterp.policies import Place
from kvinterp.provenance import provenance
from kvinterp.recording import Trace, Watch, chosen_layers, whole_number

log = logging.getLogger("kvinterp")

__all__ = ["PROTOCOLS", "compare", "compare_traces"]

PROTOCOLS = {
    "matched": "both paths are fed the same tokens at every step: the difference is numerical only",
    "free": "each path is fed its own tokens: after the first flip the two contexts differ",
}
COMPARED = (*RESIDUAL_SITES, "pattern", *CACHE_SITES)


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
    progress: str = "bar",
    done: Callable[[Comparison], None] | None = None,
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
        layers: Layers to compare; all unless said.
        stop: ``"end of sequence"`` or ``"length"``.
        batch_size: Most prompts in a batch; used only where the bits were checked to stay the same.
        examples: The number of each prompt in the tables and for the random numbers, where these prompts are some of a
            longer list (a resumed or sharded run); 0, 1, 2, ... unless said.
        progress: ``"bar"`` (on a terminal or in a notebook) or ``"none"``.
        done: Told of every finished batch.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: This kind of model cannot give a site.
    """
    adapter, path_a, path_b, strategy = wrap(model), path_named(a), path_named(b), strategy_named(strategy)
    check_choice("protocol", protocol, tuple(PROTOCOLS))
    check_choice("stop", stop, ("end of sequence", "length"))
    check_choice("progress", progress, ("bar", "none"))
    check_seed(seed)
    items, _ = listed(prompts)
    if continuation is not None and (len(items) != 1 or protocol != "matched"):
        raise InputError("continuation feeds one prompt in the matched protocol: give one prompt, or leave it out.")
    forced = checked_continuation(continuation, len(items), adapter)
    # Made into a list here: it is asked for more than once.
    layers = None if layers is None else chosen_layers(adapter, layers)
    numbers = list(range(len(items))) if examples is None else [-1 if n is None else n for n in map(whole_number, examples)]
    if min(numbers, default=0) < 0:
        raise InputError(f"examples={examples!r} was given: expected whole numbers of at least 0, one a prompt.")
    if len(numbers) != len(items) or len(set(numbers)) != len(numbers):
        raise InputError(f"{len(items)} prompts came with the example numbers {numbers}: give each prompt one of its own.")
    tokens = [encode(adapter, item, max_new_tokens) for item in items]
    names = [item.id if isinstance(item, Prompt) else str(number) for number, item in zip(numbers, items, strict=True)]
    with located(f"model {adapter.facts.name}, {path_a} against {path_b}"), own_threads(adapter):
        pair = _Pair(
            adapter, (path_a, path_b), protocol, strategy, seed, max_new_tokens, _compared(adapter, record, layers)
        )
        pair.prepare(layers, forced, stop)
        with tqdm(total=len(tokens), desc="comparing", unit="prompt", disable=None if progress == "bar" else True) as bar:

            def finished(indices: Sequence[int], made: Sequence[Comparison]) -> None:
                bar.update(len(indices))
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
    made.origin = Origin(
        weakref.ref(adapter.model), adapter.facts.name, adapter.tokenizer, dict(zip(numbers, tokens, strict=True))
    )
    return made


class _Glimpse:
    """Holds what one path shows at the newest position, until the next step."""

    def __init__(self, adapter: Adapter, wanted: Sequence[Site]) -> None:
        self.watch, self.architecture = Watch(adapter, wanted, self._see, "newest"), adapter.facts.architecture
        self.places, self.listeners = self.watch.places, self.watch.listeners
        self.begin_pass, self.seen = self.watch.begin_pass, dict[Site, Tensor]()

    def begin_step(self, step: int) -> None:
        self.seen.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        self.watch.on_read(place, keys, values)

    def _see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        whole = site in CACHE_SITES
        if site in RESIDUAL_SITES and tensor.dim() != 3:
            # Gemma 3n, DeepSeek-V4 and others carry several streams, which are mixed at every block.
            raise UnsupportedError(
                f"{site} of {self.architecture} is several residual streams side by side, of shape "
                f"{tuple(tensor.shape)}, and cannot be compared as one: leave it out, as in record='kv'."
            )
        self.seen[site, layer] = tensor if whole else tensor[:, :, -1] if site == "pattern" else tensor[:, -1]


@dataclasses.dataclass
class _Pair:
    """Two paths of one model and how they are fed."""

    adapter: Adapter
    paths: tuple[ExecutionPath, ExecutionPath]
    protocol: str
    strategy: Strategy
    seed: int
    steps: int
    sites: tuple[str, ...]

    def prepare(self, layers: Iterable[int] | None, continuation: Sequence[int] | None, stop: str) -> None:
        self.layers = chosen_layers(self.adapter, layers)
        self.continuation, self.stop = continuation, stop
        self.wanted = [(site, layer) for site in self.sites for layer in self.layers]
        self.targets = [self.adapter.at(dtype_named(path.dtype)) for path in self.paths]
        for target in self.targets:
            _Glimpse(target, self.wanted)
        self.about = provenance(
            self.adapter,
            paths={"a": str(self.paths[0]), "b": str(self.paths[1])},
            protocol=self.protocol,
            strategy=str(self.strategy),
            seed=self.seed,
            derived=[site for site in self.sites if any(target.derives(site) for target in self.targets)],
        )

    def batch(self, indices: Sequence[int], prompts: Sequence[Sequence[int]], names: Sequence[str]) -> list[Comparison]:
        """Runs one batch and returns a comparison for each prompt."""
        facts, size = self.adapter.facts, len(prompts)
        prompt = torch.tensor(list(map(list, prompts)), device=self.adapter.device)
        random = torch.stack([uniforms(self.seed, i, self.steps) for i in indices]).to(prompt.device)
        ends = end_tokens(self.adapter, prompt.device) if self.stop == "end of sequence" else None
        forced = None if self.continuation is None else torch.tensor(list(self.continuation), device=prompt.device)
        length = self.steps if forced is None else min(self.steps, len(forced) + 1)
        glimpses = [_Glimpse(target, self.wanted) for target in self.targets]
        differences = Differences(self.layers, range(facts.query_heads), range(facts.kv_heads))
        chosen: list[Tensor] = []
        fed: list[Tensor] = []
        finite: list[Tensor] = []
        over = torch.zeros(size, dtype=torch.bool, device=prompt.device)
        self.padding: Tensor | None = None
        runners = [Runner(self.adapter, p, prompt, length, [g]) for p, g in zip(self.paths, glimpses, strict=True)]
        about = {**self.about, "caches": {side: runner.cache for side, runner in zip("ab", runners, strict=True)}}
        with runners[0], runners[1]:
            feeds: list[Tensor | None] = [None, None]
            for step in range(length):
                logits = [runner.advance(feed).to(prompt.device) for runner, feed in zip(runners, feeds, strict=True)]
                picks = [self.strategy.choose(row, random[:, step]) for row in logits]
                if self.padding is None:
                    self.padding = padding_of(logits)
                    tokens = (~self.padding).nonzero().flatten() if bool(self.padding.any()) else slice(None)
                a, b = (row[:, tokens] for row in logits)
                differences.add(step, indices, prompt.shape[1] + step, (a, b), (glimpses[0].seen, glimpses[1].seen))
                chosen.append(torch.stack(picks))
                finite.append(torch.stack([sound_rows(row, self.padding) for row in logits]))
                lead = picks[0] if forced is None or step >= len(forced) else forced[step].expand(size)
                feeds = [lead, lead] if self.protocol == "matched" else list(picks)
                fed.append(torch.stack([feed for feed in feeds if feed is not None]))
                if ends is not None:
                    over = over | torch.isin(fed[-1], ends).any(0)
                    if bool(over.all()):
                        break
        stacked = (
            torch.stack(chosen, -1).tolist(),
            torch.stack(fed, -1).tolist(),
            torch.stack(finite, -1).cpu().numpy(),
        )
        frames = [t.frame() for t in (differences.steps, differences.layers, differences.patterns, differences.kv)]
        stops = [] if ends is None else ends.tolist()
        return [
            self._one(row, indices[row], prompts[row], names[row], *stacked, frames, stops, about) for row in range(size)
        ]

    def _one(
        self,
        row: int,
        example: int,
        prompt: Sequence[int],
        name: str,
        chosen: list[list[list[int]]],
        fed: list[list[list[int]]],
        finite: np.ndarray,
        frames: list[pd.DataFrame],
        stops: Sequence[int],
        about: dict[str, Any],
    ) -> Comparison:
        both = list(zip(fed[0][row], fed[1][row], strict=True))
        count = next((i + 1 for i, pair in enumerate(both) if set(pair) & set(stops)), len(both))
        for side, path in enumerate(self.paths):
            if not finite[side, row, :count].all():
                message = first_nonfinite(self.adapter, path, prompt, fed[side][row][: count - 1], self.padding)
                return _failed(example, name, message, frames, about)
        steps, layers, heads, kv = (
            f[(f["example"] == example) & (f["step"] < count)].reset_index(drop=True) for f in frames
        )
        a, b = (np.asarray(chosen[side][row][:count]) for side in (0, 1))
        steps = _with_tokens(steps, a, b)
        layers, heads, kv = (_with_flip(frame, steps) for frame in (layers, heads, kv))
        heads = _with_source(heads, about)
        texts = {f"text_{side}": self.adapter.decode(tokens.tolist()) for side, tokens in (("a", a), ("b", b))}
        examples = pd.DataFrame([_example_row(example, name, len(prompt), steps, texts)])
        return Comparison(steps, examples, layers, heads, kv, _no_failures(), about)


def compare_traces(a: Trace, b: Trace) -> Comparison:
    """Compares two traces that were recorded with ``logits="keep"``, for instance on two machines.

    Residual sites and patterns are compared at the newest position, of those recorded with ``positions="all"`` too; cache
    sites where they were recorded with ``positions="all"``.

    Args:
        a: The leading trace.
        b: The other.

    Raises:
        InputError: They are not of the same prompt, hold no logits, or were recorded with different heads.
    """
    if a.prompt != b.prompt:
        raise InputError(
            f"the traces have different prompts ({len(a.prompt)} and {len(b.prompt)} tokens): give the same one."
        )
    if a.logits is None or b.logits is None:
        raise InputError("a trace holds no logits: run it with logits='keep'.")
    count = min(len(a.tokens), len(b.tokens))
    layers = sorted({layer for _, layer in a.records} & {layer for _, layer in b.records})
    heads = _head_labels(a.heads, b.heads, "query heads", (a, b), ("pattern",))
    kv_heads = _head_labels(a.kv_heads, b.kv_heads, "KV heads", (a, b), CACHE_SITES)
    differences = Differences(layers, heads, kv_heads)
    padding = padding_of((a.logits[:count], b.logits[:count]))
    for step in range(count):
        seen = (_shown(a, step), _shown(b, step))
        logits = (a.logits[step : step + 1, ~padding], b.logits[step : step + 1, ~padding])
        differences.add(step, [0], len(a.prompt) + step, logits, seen)
    steps = _with_tokens(differences.steps.frame(), np.asarray(a.tokens[:count]), np.asarray(b.tokens[:count]))
    examples = pd.DataFrame([_example_row(0, "0", len(a.prompt), steps, {"text_a": "", "text_b": ""})])
    matched = a.fed[: count - 1] == b.fed[: count - 1]
    about = {
        **a.provenance,
        "paths": {"a": a.path, "b": b.path},
        "protocol": "matched" if matched else "free",
        "strategy": a.provenance.get("strategy", "unknown"),
        "provenance_b": b.provenance,
        "derived": sorted({*a.derived, *b.derived} & {"pattern"}),
    }
    found = (differences.layers, differences.patterns, differences.kv)
    layer_table, head_table, kv_table = (_with_flip(table.frame(), steps) for table in found)
    return Comparison(steps, examples, layer_table, _with_source(head_table, about), kv_table, _no_failures(), about)


def _shown(trace: Trace, step: int) -> dict[Site, Tensor]:
    if step not in trace.steps:
        return {}
    index = trace.steps.index(step)
    seen = {}
    for (site, layer), kept in trace.records.items():
        tensor = kept[index][None]
        if (site in RESIDUAL_SITES and tensor.dim() == 3) or (site == "pattern" and tensor.dim() == 4):
            tensor = tensor[..., -1, :]
        newest = {1: site in RESIDUAL_SITES, 2: site == "pattern", 3: site in CACHE_SITES}
        if newest.get(tensor.dim() - 1, False):
            seen[site, layer] = tensor
    return seen


def _head_labels(
    one: Sequence[int] | None, other: Sequence[int] | None, what: str, traces: Sequence[Trace], sites: Sequence[str]
) -> Sequence[int]:
    """The heads that the traces' records of some sites hold, which must be the same ones."""
    counts = [next((kept[0].shape[0] for (s, _), kept in t.records.items() if s in sites and kept), None) for t in traces]
    if None in counts:
        return ()
    first, second = (range(count or 0) if held is None else held for held, count in zip((one, other), counts, strict=True))
    if list(first) != list(second):
        raise InputError(
            f"the traces hold different {what} ({_shown_heads(first)} and {_shown_heads(second)}): record the same ones."
        )
    return first


def _shown_heads(heads: Sequence[int]) -> str:
    return f"0 to {heads[-1]}" if isinstance(heads, range) and heads else ", ".join(map(str, heads))


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


def _with_tokens(steps: pd.DataFrame, a: np.ndarray, b: np.ndarray) -> pd.DataFrame:
    steps = steps.sort_values("step", ignore_index=True)
    flipped = a != b
    first = int(flipped.argmax()) if flipped.any() else len(a)
    extra = {"token_a": a, "token_b": b, "flipped": flipped, "after_flip": np.arange(len(a)) > first}
    steps = steps.assign(**extra)
    front = ["example", "step", "token_a", "token_b"]
    return steps[front + [c for c in steps.columns if c not in front]]


def _with_flip(frame: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The table of one example with whether each row is of a step after its flip."""
    return frame.assign(after_flip=frame["step"].isin(steps.loc[steps["after_flip"], "step"]))


def _with_source(heads: pd.DataFrame, about: dict[str, Any]) -> pd.DataFrame:
    """The table of patterns with where they are from: recorded, or derived beside a kernel that shows none."""
    return heads.assign(pattern="derived" if "pattern" in about["derived"] else "recorded")


def _example_row(example: int, name: str, prompt_tokens: int, steps: pd.DataFrame, texts: dict[str, str]) -> dict[str, Any]:
    flips = steps.index[steps["flipped"]]
    return {
        "example": example,
        "id": name,
        "prompt_tokens": prompt_tokens,
        "steps": len(steps),
        "flip_index": float(flips[0]) if len(flips) else np.nan,
        "token_divergence": float(steps["flipped"].mean()),
        "mean_kl": float(steps["kl"].mean()),
        "mean_kl_before_flip": float(steps.loc[~steps["after_flip"], "kl"].mean()),
        "mean_kl_after_flip": float(steps.loc[steps["after_flip"], "kl"].mean()),
        "max_kl": float(steps["kl"].max()),
        "max_abs_logit": float(steps["max_abs_logit"].max()),
        "smallest_margin": float(steps["margin_a"].min()),
        **texts,
    }


def _no_failures() -> pd.DataFrame:
    return pd.DataFrame({"example": np.zeros(0, np.int64), "id": np.zeros(0, object), "message": np.zeros(0, object)})


def _failed(example: int, name: str, message: str, frames: list[pd.DataFrame], about: dict[str, Any]) -> Comparison:
    empty = [frame.iloc[:0] for frame in frames]
    steps = _with_tokens(empty[0], np.zeros(0, np.int64), np.zeros(0, np.int64))
    # Empty but typed: joined to others, its columns must not turn theirs into objects.
    examples = pd.DataFrame([_example_row(0, "", 0, steps, {"text_a": "", "text_b": ""})]).iloc[:0]
    failure = pd.DataFrame([{"example": example, "id": name, "message": message}])
    layers, heads, kv = (_with_flip(frame, steps) for frame in empty[1:])
    return Comparison(steps, examples, layers, _with_source(heads, about), kv, failure, about)
