"""Runs a model along two paths side by side and says how far apart they are, at which step, layer,
head and position.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_seed
from kvinterp.common.progress import counting
from kvinterp.comparison.comparison import Comparison, Origin
from kvinterp.comparison.recordable import COMPARED, recordable
from kvinterp.comparison.rows import choices_by_row, comparison_of_example, token_probability
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError, NonFiniteError, UnsupportedError, located, shown
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.attaching import HookPoint
from kvinterp.models.cache_kinds import MadeBy, Named
from kvinterp.models.hook_names import Names, hook_points_of, names_of, sites_of
from kvinterp.models.inputs import checked_continuation, chosen_layers, encode, listed
from kvinterp.models.positions import counted
from kvinterp.models.provenance import provenance
from kvinterp.models.sites import CACHE_POSITIONS, CACHE_SITES, LAYOUTS
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, Runner, Strategy, path_named, strategy_named
from kvinterp.paths.batches import in_batches
from kvinterp.paths.decode import Collected, fed_to_all, length_of, lockstep
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.prompt import PromptDifference, prompt_difference, rows_null
from kvinterp.paths.sampling import Drawing
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.policies import CacheRows, Identity
from kvinterp.policies.size import cache_bytes
from kvinterp.recording import SiteHook

log = logging.getLogger("kvinterp")


def compare(
    model: Any,
    prompts: Any = None,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath = "recompute",
    *,
    protocol: words.Protocol | str = "matched",
    strategy: words.Strategy | str | Strategy = "greedy",
    max_new_tokens: int = 48,
    seed: int = 0,
    continuation: Sequence[int] | None = None,
    record: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool] | None = None,
    layers: Iterable[int] | int | None = None,
    stop: words.Stop | str = "end of sequence",
    batch_size: int = 1,
    cache_errors: words.CacheErrors | str = "aggregated",
    progress: words.Progress | str = "bar",
) -> Comparison:
    """Runs two paths side by side on the same prompts and compares them at every step.

    The command ``kvinterp compare`` has the same options: their names and defaults, and as its help
    the first paragraph of each, are read from here.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list: texts, :class:`Prompt`, or token ids.
        a: Path A. In the matched protocol it chooses the tokens for both paths.
        b: Path B.
        protocol: ``matched``: both paths get the same tokens. ``free``: each gets its own.
        strategy: How tokens are chosen: ``greedy``, ``top_k(50,0.8)``, ``top_p(0.95,0.8)``.

            Both paths draw from the same random number at each step.
        max_new_tokens: The most tokens to decode per prompt.

            Step 0 is the token that the prefill decides.
        seed: Seed for the strategy's random numbers.
        continuation: Token ids to feed both paths (matched, one prompt) instead of path A's choices.
        record: Sites to compare, with commas (``kvinterp list sites``); '' for none. Default:
            resid_post,pattern,kv, as far as the model has them.

            All but ``attn_scores`` can be, in a list too; so can hooks by TransformerLens's names
            (``blocks.1.attn.hook_pattern``), which are of one layer. The log says what the model
            lacks and why. Under SDPA, which shows no pattern, it is derived beside the kernel from
            queries and keys; the tables say so.
        layers: Layers to compare, such as 0,2,-1. Default: all.
        stop: When a text ends: at the 'end of sequence' token, or only at the 'length' asked for.
        batch_size: The most prompts in one batch. Batching is used only where it gives the same
            bits.

            Prompts of other lengths run in batches of their own and are never padded.
        cache_errors: Errors of K and V: 'aggregated' by step and by position, or 'whole' (a table
            quadratic in the steps).
        progress: ``"bar"`` (on a terminal or in a notebook) or ``"none"``.

    Raises:
        InputError: An argument names something that does not exist, or does not fit the others.
        UnsupportedError: This kind of model cannot give a site.
        NonFiniteError: NaN or Inf appeared with every prompt. Where only some prompts have it,
            ``failures`` lists them.
    """
    comparison = compare_examples(**dict(locals()))
    if comparison.examples.empty:
        first, count = comparison.failures.iloc[0], len(comparison.failures)
        which = (
            f"none of the {count} prompts can be compared; the first," if count > 1 else "prompt"
        )
        raise NonFiniteError(f"{which} {shown(first['id'])}: {first['message']}")
    return comparison


def compare_examples(
    model: Any,
    prompts: Any,
    *paths: str | ExecutionPath,
    examples: Sequence[int] | None = None,
    **settings: Any,
) -> Comparison:
    """Compares two paths as :func:`compare` does, but returns the comparison even if every prompt
    had NaN or Inf.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        paths: The leading path and the one it is compared with.
        examples: As for :func:`compare_each`.
        settings: As for :func:`compare_each`.
    """
    by_example: dict[int, Comparison] = {}
    compare_each(by_example.__setitem__, model, prompts, *paths, examples=examples, **settings)
    return Comparison.joined(by_example[number] for number in examples or sorted(by_example))


def compare_each(
    keep: Callable[[int, Comparison], object],
    model: Any,
    prompts: Any,
    *paths: str | ExecutionPath,
    examples: Sequence[int] | None = None,
    decoders: tuple[Callable[..., Any], Callable[..., Any]] = (Runner, Runner),
    **settings: Any,
) -> None:
    """Compares two paths and passes each prompt's comparison to ``keep`` once its batch is done, so
    that memory stays small.

    Args:
        keep: Called with the number of each prompt and its comparison.
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        paths: The leading path and the one it is compared with.
        examples: The number of each prompt in the tables and for the random numbers, where these
            prompts are some of a longer list (a resumed or sharded run; default: 0, 1, 2, ...).
        decoders: The class that advances each path, called as :class:`kvinterp.paths.Runner` is.
            Under another class no site can be compared.
        settings: As for :func:`compare`; but no site is compared and no progress is shown unless
            they say so.
    """
    if prompts is None:
        raise InputError(
            "no prompts were given: expected a text, a Prompt, token ids or a list of them; give some."
        )
    how = _read_arguments(model, prompts, *paths, **{"record": "", "progress": "none", **settings})
    adapter, items, both, layers = how.model, how.prompts, (how.a, how.b), how.layers
    numbers = list(range(len(items)) if examples is None else examples)
    tokens = [encode(adapter, item, how.max_new_tokens) for item in items]
    named_prompts = [item if isinstance(item, Prompt) else Prompt(str(number), item if isinstance(item, str) else "")
                     for number, item in zip(numbers, items, strict=True)]  # fmt: skip
    with (
        located(f"model {adapter.facts.name}, {both[0]} against {both[1]}"),
        own_threads(adapter),
    ):
        compressed = _compressed(adapter, both, tokens[0], how.max_new_tokens) if tokens else {}
        sites, hook_points = hook_points_of(
            adapter, _sites_to_compare(adapter, how.record, layers, compressed), layers
        )
        layers = (
            sorted({layer for _, layer in hook_points})
            if hook_points
            else chosen_layers(adapter, layers)
        )
        if sites and decoders != (Runner, Runner):
            raise InputError(
                f"decoders of their own were given, which show no site, with record={how.record!r}: pass record=''."
            )
        pair = _Pair(adapter, both, how, hook_points, layers, decoders, compressed)
        with counting(len(tokens), "comparing", "prompt", how.progress) as bar:

            def work(batch: Sequence[int]) -> list[None]:
                comparisons = pair.compare_batch(
                    [numbers[i] for i in batch],
                    [tokens[i] for i in batch],
                    [named_prompts[i].id for i in batch],
                )
                for i, comparison in zip(batch, comparisons, strict=True):
                    ids = {numbers[i]: tokens[i]}
                    comparison.origin = Origin(
                        weakref.ref(adapter.model), adapter.facts.name, adapter.tokenizer, ids
                    )
                    # Token ids have no text of their own, so their prompt is unknown.
                    comparison.prompts = (
                        [named_prompts[i]] if isinstance(items[i], Prompt | str) else []
                    )
                    keep(numbers[i], comparison)
                bar.update(len(batch))
                return [None] * len(batch)

            in_batches(adapter, both, tokens, how.max_new_tokens, how.batch_size, work)


def _read_arguments(*arguments: Any, **settings: Any) -> Any:
    """The arguments of :func:`compare` by their names, defaults among them: checked, and read from
    the forms that a user gives. ``model`` is an adapter, ``prompts`` a list, ``a`` and ``b`` are
    paths.
    """
    bound = inspect.signature(compare).bind(*arguments, **settings)
    bound.apply_defaults()
    how = SimpleNamespace(**bound.arguments)
    how.model, how.a, how.b = wrap(how.model), path_named(how.a), path_named(how.b)
    check_choice("protocol", how.protocol, words.Protocol)
    check_choice("stop", how.stop, words.Stop)
    check_choice("progress", how.progress, words.Progress)
    check_choice("cache_errors", how.cache_errors, words.CacheErrors)
    check_seed(how.seed)
    how.prompts, _ = listed(how.prompts, how.model.tokenizer)
    if how.continuation is not None and (len(how.prompts) != 1 or how.protocol != "matched"):
        raise InputError(
            "continuation feeds one prompt in the matched protocol: give one prompt, or leave it out."
        )
    how.continuation = checked_continuation(how.continuation, len(how.prompts), how.model)
    how.strategy = strategy_named(how.strategy)
    # A list, because it is read more than once.
    how.layers = None if how.layers is None else chosen_layers(how.model, how.layers)
    return how


CONTEXT = 4096
"""The positions for which it is said what a cache takes: a context that models are used with,
whatever the prompts here.
"""
NULLS = 4
"""The first so many prompts have a null: how far the same tokens on the same model are from
themselves among more rows and before more text. It takes two forwards a prompt.
"""


@dataclasses.dataclass
class _Pair:
    """Two paths of one model, and the settings they are compared under.

    Attributes:
        adapter: The model.
        paths: The paths, of which the first leads in the matched protocol.
        how: The settings, by the names of :func:`compare`.
        hook_points: The sites and layers that are compared.
        layers: The layers of the tables.
        decoders: The class that advances each path.
        compressed: See :func:`_compressed`.
        prompt_differs: What of the difference is in the prompt's forward already; None until a batch
            whose step 0 differs.
    """

    adapter: Adapter
    paths: tuple[ExecutionPath, ExecutionPath]
    how: Any
    hook_points: Sequence[HookPoint]
    layers: Sequence[int]
    decoders: tuple[Callable[..., Any], Callable[..., Any]]
    compressed: dict[str, str] = dataclasses.field(default_factory=dict)
    prompt_differs: PromptDifference | None = None

    def __post_init__(self) -> None:
        self.targets = [self.adapter.at(dtype_named(path.dtype)) for path in self.paths]
        for target in self.targets:
            # Raises what a model cannot give, before anything runs.
            _NewestRows(target, self.hook_points)
        sides = dict(zip("ab", self.paths, strict=True))
        self.provenance = provenance(
            self.adapter,
            paths={side: str(path) for side, path in sides.items()},
            protocol=self.how.protocol,
            strategy=str(self.how.strategy),
            seed=self.how.seed,
            derived=[
                site
                for site in dict.fromkeys(site for site, _ in self.hook_points)
                if any(t.derives(site) for t in self.targets)
            ],
            lets_go=[side for side, path in sides.items() if path.policy.evicts],
            **self._cache_sizes(),
        )
        # Whether the two paths differ in nothing but the cache.
        plain = all(
            dataclasses.replace(path, form="cached", dtype=None) == ExecutionPath()
            for path in self.paths
        )
        same_dtype = self.targets[0].dtype == self.targets[1].dtype
        self.asks_prompt = self.asks_null = (
            plain and same_dtype and self.paths[0].form != self.paths[1].form
        )

    def _cache_sizes(self) -> dict[str, Any]:
        """The bytes of K and V of :data:`CONTEXT` positions on each side, where one of them has a
        format of its own.

        A side without a cache stands for the model's own cache in its dtype.
        """
        if all(
            isinstance(path.policy, Identity) and path.cache_dtype is None for path in self.paths
        ):
            return {}
        sizes: dict[str, Any] = {"context": CONTEXT}
        for side, path, target in zip("ab", self.paths, self.targets, strict=True):
            dtype = dtype_named(path.cache_dtype) or target.dtype
            policy = path.policy if path.form == "cached" else Identity()
            sizes[side] = cache_bytes(policy, target.facts, 8 * dtype.itemsize, CONTEXT)
        return {"cache_bytes": sizes}

    def compare_batch(
        self, examples: Sequence[int], prompts: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[Comparison]:
        """Runs both paths on one batch and returns a comparison for each prompt."""
        how, facts = self.how, self.adapter.facts
        prompt = torch.tensor(list(map(list, prompts)), device=self.adapter.device)
        choose = Drawing(how.strategy, how.seed, examples, how.max_new_tokens, prompt.device)
        ends = end_tokens(self.adapter, prompt.device) if how.stop == "end of sequence" else None
        length, forced = how.max_new_tokens, how.continuation
        if forced is not None:
            length = min(length, len(forced) + 1)
        forced = fed_to_all(forced, 2, len(prompts), prompt.device)
        newest = [_NewestRows(target, self.hook_points) for target in self.targets]
        heads = range(facts.query_heads), range(facts.kv_heads)
        differences = Differences(self.layers, *heads, how.cache_errors, how.protocol == "matched")
        collected, probabilities, unequal = Collected(), list[Tensor](), list[int]()
        flipped = torch.zeros(len(prompts), dtype=torch.bool, device=prompt.device)
        runners = [
            decoder(self.adapter, path, prompt, length, [hook])
            for decoder, path, hook in zip(self.decoders, self.paths, newest, strict=True)
        ]
        with runners[0], runners[1]:
            for step in lockstep(
                runners,
                length,
                choose,
                follows=[0, 0 if how.protocol == "matched" else 1],
                given=forced,
                ends=ends,
            ):
                collected.add(step)
                probabilities += map(token_probability, step.logits, step.chosen)
                if step.number == 0 and self.asks_prompt:
                    unequal = (
                        (step.logits[0] != step.logits[1]).any(-1).nonzero().flatten().tolist()
                    )
                logits_a, logits_b = map(collected.tokens_only, step.logits)
                differs = step.chosen[0] != step.chosen[1]
                differences.add(
                    step.number,
                    examples,
                    prompt.shape[1] + step.number,
                    (logits_a, logits_b),
                    (newest[0].tensors, newest[1].tensors),
                    flipped.to(torch.int8).masked_fill(step.over, -1),
                    differs & ~flipped,
                )
                flipped = flipped | differs
        if unequal:
            # Measured once: rounding does to every prompt what it does to one.
            sequence, self.asks_prompt = unequal[0], False
            self.prompt_differs = prompt_difference(
                self.targets[0], prompt[sequence : sequence + 1]
            )
        columns, frames = (
            choices_by_row(probabilities, choose.distances),
            differences.frames(examples),
        )
        about = self._provenance_of(runners)
        tokens, fed, sound = collected.lists()
        stops = [] if ends is None else ends.tolist()
        steps = frames["steps"]
        differing = (
            set(steps.loc[steps["max_abs_logit"] > 0, "example"]) if self.asks_null else set()
        )

        def comparison_of(sequence: int) -> Comparison:
            count, failure = min(length_of(fed[side][sequence], stops) for side in (0, 1)), ""
            for side, path in enumerate(self.paths):
                if not failure and not all(sound[side][sequence][:count]):
                    failure = first_nonfinite(
                        self.adapter,
                        path,
                        prompts[sequence],
                        fed[side][sequence][: count - 1],
                        collected.padding,
                    )
            a, b = (np.asarray(tokens[side][sequence][:count]) for side in (0, 1))
            texts = (
                ("", "")
                if failure
                else (self.adapter.decode(a.tolist()), self.adapter.decode(b.tolist()))
            )
            own = dict(about)
            if examples[sequence] in differing and examples[sequence] < NULLS and not failure:
                text = prompt.new_tensor([[*prompts[sequence], *fed[0][sequence][: count - 1]]])
                if null := rows_null(self.targets[0], text, prompt.shape[1] - 1):
                    own["null"] = {**null, "prompts": 1}
            return comparison_of_example(
                examples[sequence], names[sequence], prompts[sequence], frames, (a, b), texts, own, columns[sequence],
                self.adapter.pieces, failure,
            )  # fmt: skip

        return [*map(comparison_of, range(len(prompts)))]

    def _provenance_of(self, runners: Sequence[Any]) -> dict[str, Any]:
        """The provenance of one batch: the pair's, with its caches."""
        sides = dict(zip("ab", zip(self.paths, runners, strict=True), strict=True))
        about = {
            **self.provenance,
            "caches": {side: runner.cache for side, (_, runner) in sides.items()},
        }
        if self.compressed:
            about["compressed"] = self.compressed
        if self.prompt_differs is not None:
            about["prompt_differs"] = dataclasses.asdict(self.prompt_differs) | {
                "said": self.prompt_differs.said
            }
        return about


class _NewestRows(SiteHook):
    """Keeps the tensors of the newest position, and whole caches, until the next step begins."""

    def __init__(self, adapter: Adapter, hook_points: Sequence[HookPoint]) -> None:
        super().__init__(adapter, hook_points, "newest", evicted="spread")
        self.architecture, self.tensors = adapter.facts.architecture, dict[HookPoint, Tensor]()

    def begin_step(self, step: int) -> None:
        """Forgets the tensors of the step before."""
        self.tensors.clear()

    def rows_left(self, cache_rows: CacheRows, positions: Tensor) -> None:
        """Keeps the positions of the rows."""
        self.tensors[CACHE_POSITIONS, cache_rows.layer] = positions.to(self._device)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Keeps the newest row, or all rows of a cache site.

        Raises:
            UnsupportedError: A residual site holds several streams.
        """
        layout = LAYOUTS[site]
        if layout.group == "residual" and tensor.dim() != layout.dimensions:
            # Gemma 3n, DeepSeek-V4 and others carry several streams, which are mixed at every
            # block.
            raise UnsupportedError(
                f"{site} of {self.architecture} is several residual streams side by side, of shape "
                f"{tuple(tensor.shape)}, and cannot be compared as one: leave it out, as in record='kv'."
            )
        if layout.group != "cache":
            tensor = tensor.select(layout.row_axis, -1).clone()
        elif (CACHE_POSITIONS, layer) in self.tensors:
            # The rows that are left move to the front of a preallocated cache before they are
            # compared.
            tensor = tensor.clone()
        self.tensors[site, layer] = tensor


def _compressed(
    adapter: Adapter, paths: Sequence[ExecutionPath], prompt: Sequence[int], steps: int
) -> dict[str, str]:
    """A sentence for each side whose cache is its user's own and drops rows: whether the model counts
    positions from the rows that are left.
    """
    sentences = dict[str, str]()
    for side, path in zip("ab", paths, strict=True):
        if path.form != "cached" or not isinstance(path.cache, MadeBy | Named) or not adapter.plain:
            continue
        target = adapter.at(dtype_named(path.dtype))
        length = min(len(prompt) + steps, target.facts.context)
        tokens = torch.tensor(
            [[*itertools.islice(itertools.cycle(prompt), length)]], device=target.device
        )
        make: Any = functools.partial(path.cache.make, target.config, length)
        if (found := counted(target, make, tokens)) is not None:
            sentences[side] = found.said
    return sentences


def _sites_to_compare(
    adapter: Adapter,
    record: Names | None,
    layers: Iterable[int] | int | None,
    compressed: Mapping[str, str],
) -> tuple[str, ...]:
    if record is None:
        names, left_out = recordable(adapter, None, chosen_layers(adapter, layers))
        if compressed:
            # It does not say which rows are left, so that they cannot be lined up.
            log.info("kv and pattern are not compared: a cache drops rows and does not say which")
            names = tuple(name for name in names if name not in (*CACHE_SITES, "pattern"))
        for site, reason in left_out.items():
            log.info("%s is not compared: %s", site, reason)
        return names
    names = tuple(names_of(adapter, record))
    sites = sites_of(names)
    wrong = [site for site in sites if site not in COMPARED]
    if wrong:
        raise InputError(
            f"site {wrong[0]!r} cannot be compared: expected one of {', '.join(COMPARED)} or kv; use run() to record it."
        )
    return names
