"""Runs a model along two paths side by side and says how far apart they are, at which step, layer, head and position."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_callable, check_choice, check_listed, check_seed, whole_numbers
from kvinterp.common.progress import counting
from kvinterp.comparison.comparison import Comparison, Origin
from kvinterp.comparison.recordable import COMPARED, recordable
from kvinterp.comparison.rows import Choices, of_example
from kvinterp.comparison.several import Comparisons
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError, NonFiniteError, UnsupportedError, located, shown
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.attaching import Site
from kvinterp.models.hook_names import Names, names_of, places_of, sites_of
from kvinterp.models.inputs import checked_continuation, chosen_layers, encode, listed
from kvinterp.models.provenance import provenance
from kvinterp.models.sites import LAYOUTS, ROUTING_SITES, ROWS
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, Runner, Strategy, path_named, strategy_named
from kvinterp.paths.batches import in_batches
from kvinterp.paths.calls.base import witnessed
from kvinterp.paths.decode import Collected, fed_to_all, length_of, lockstep
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.prompt import PromptDifference, prompt_difference
from kvinterp.paths.sampling import drawing
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.policies import Place
from kvinterp.recording import SiteHook

log = logging.getLogger("kvinterp")


@overload
def compare(
    model: Any,
    prompts: Any = None,
    a: str | ExecutionPath = ...,
    b: str | ExecutionPath = ...,
    *,
    protocol: words.Protocol | str = ...,
    strategy: words.Strategy | str | Strategy = ...,
    max_new_tokens: int = ...,
    seed: int = ...,
    continuation: Sequence[int] | None = ...,
    record: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool] | None = ...,
    layers: Iterable[int] | int | None = ...,
    stop: words.Stop | str = ...,
    batch_size: int = ...,
    examples: Sequence[int] | None = ...,
    cache_errors: words.CacheErrors | str = ...,
    progress: words.Progress | str = ...,
    done: Callable[[Comparison], bool | None] | None = ...,
    lanes: tuple[Callable[..., Any], Callable[..., Any]] = ...,
) -> Comparison: ...


@overload
def compare(
    model: Any,
    prompts: Any = None,
    a: str | ExecutionPath = ...,
    *,
    b: Sequence[str | ExecutionPath],
    **given: Any,
) -> Comparisons: ...


# Of a list the other options are those of one path, whose names the second signature does not repeat.
def compare(  # type: ignore[misc]
    model: Any,
    prompts: Any = None,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath | Sequence[str | ExecutionPath] = "recompute",
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
    examples: Sequence[int] | None = None,
    cache_errors: words.CacheErrors | str = "aggregated",
    progress: words.Progress | str = "bar",
    done: Callable[[Comparison], bool | None] | None = None,
    lanes: tuple[Callable[..., Any], Callable[..., Any]] = (Runner, Runner),
) -> Any:
    """Runs two paths side by side on the same prompts and compares them at every step.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list: texts, :class:`Prompt`, or token ids.
        a: The leading path: in the matched protocol both are fed the tokens it chooses.
        b: The path it is compared with; of a list each, which gives :class:`Comparisons`: in the matched protocol all of them
            run beside one run of ``a``, and each pair gets the numbers that it gets alone.
        protocol: ``"matched"`` or ``"free"``; see PROTOCOLS.
        strategy: How tokens are chosen; both paths draw from the same random number at each step.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        seed: Seeds the random numbers.
        continuation: Token ids to feed both paths (matched, one prompt) instead of the leading path's choices.
        record: Sites to compare, out of the residual sites, pattern, the cache sites (``kv``) and ``routing``, or hooks by
            TransformerLens's names (``blocks.1.attn.hook_pattern``), which are of one layer; ``""`` for none; for None
            resid_post, pattern, kv and, in a mixture of experts, routing, without those that this model cannot give (the log
            says which and why). Under SDPA, which shows no pattern, it is derived beside the kernel from queries and keys; the
            tables say so.
        layers: Layers to compare (default: all).
        stop: ``"end of sequence"`` or ``"length"``.
        batch_size: Most prompts in a batch; used only where the bits were checked to stay the same.
        examples: The number of each prompt in the tables and for the random numbers, where these prompts are some of a
            longer list (a resumed or sharded run; default: 0, 1, 2, ...).
        cache_errors: ``"aggregated"`` gives the errors of K and V by step and by position separately; ``"whole"`` every
            position at every step besides, which is quadratic in the steps.
        progress: ``"bar"`` (on a terminal or in a notebook) or ``"none"``.
        done: Told of every finished batch of a pair; it learns of failures, too, so that with it none is raised here. Where it
            returns ``True`` it has kept the rows itself, and what is returned here has none of them.
        lanes: What advances each path, made as a :class:`kvinterp.paths.Runner` is; another one has no sites to compare.

    Returns:
        A :class:`Comparison`; of a list of paths :class:`Comparisons`.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: This kind of model cannot give a site.
        NonFiniteError: NaN or Inf appeared with every prompt; where it did with some, they stand in ``failures``.
    """
    if prompts is None:
        raise InputError("no prompts were given: expected a text, a Prompt, token ids or a list of them; give some.")
    adapter, path_a, strategy = wrap(model), path_named(a), strategy_named(strategy)
    given_b: Sequence[Any] = b if isinstance(b, list | tuple) else (b,)
    check_listed("b", given_b)
    others = tuple(map(path_named, given_b))
    if not others:
        raise InputError("b=[] was given: expected a path, or a list of at least one.")
    if (twice := next((path for path in others if others.count(path) > 1), None)) is not None:
        raise InputError(f"b names {str(twice)!r} twice: give each path once.")
    check_choice("protocol", protocol, words.Protocol)
    check_choice("stop", stop, words.Stop)
    check_choice("progress", progress, words.Progress)
    check_choice("cache_errors", cache_errors, words.CacheErrors)
    check_seed(seed)
    check_callable("done", done)
    items, _ = listed(prompts, adapter.tokenizer)
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
    with located(f"model {adapter.facts.name}, {path_a} against {', '.join(map(str, others))}"), own_threads(adapter):
        sites, wanted = places_of(adapter, _compared(adapter, record, layers), layers)
        layers = sorted({layer for _, layer in wanted}) if wanted else chosen_layers(adapter, layers)
        if sites and lanes != (Runner, Runner):
            raise InputError(f"lanes of their own were given, which show no site, with record={record!r}: pass record=''.")
        # In the free protocol a text is over as soon as one of its two paths ends it: each pair runs by itself.
        together = [(path_a, *others)] if protocol == "matched" else [(path_a, other) for other in others]
        runs = [
            _Paths(
                adapter, paths, protocol, strategy, seed, max_new_tokens, forced, stop, wanted, layers, cache_errors, lanes
            )
            for paths in together
        ]
        parts: list[Comparison] = []
        bare: dict[str, Any] = {}
        with counting(len(tokens) * len(runs), "comparing", "prompt", progress) as counted:

            def finished(indices: Sequence[int], made: Sequence[list[Comparison]]) -> None:
                counted(len(indices))
                for number in range(len(made[0])) if done is not None else ():
                    # Kept elsewhere, or many prompts would be held here twice.
                    if done(Comparison.joined([each[number] for each in made])) is True:  # type: ignore[misc]
                        # All have the same empty tables: of hundreds each with its own the memory would be seen.
                        bare.update({} if bare else made[0][number].without_rows())
                        for each in made:
                            each[number] = dataclasses.replace(each[number], **bare)

            for run in runs:

                def work(batch: Sequence[int], run: _Paths = run) -> list[list[Comparison]]:
                    return run.batch([numbers[i] for i in batch], [tokens[i] for i in batch], [names[i] for i in batch])

                made = in_batches(adapter, run.paths, tokens, max_new_tokens, batch_size, work, finished)
                parts += [Comparison.joined(pair) for pair in zip(*made, strict=True)]
        if done is None and all(part.examples.empty for part in parts):
            failures = parts[0].failures
            which = f"none of the {len(failures)} prompts can be compared; the first," if len(failures) > 1 else "prompt"
            raise NonFiniteError(f"{which} {shown(failures['id'].iloc[0])}: {failures['message'].iloc[0]}")
    ids = dict(zip(numbers, tokens, strict=True))
    origin = Origin(weakref.ref(adapter.model), adapter.facts.name, adapter.tokenizer, ids)
    # As the tables name them; token ids have no text of their own.
    texts = all(isinstance(item, Prompt | str) for item in items)
    known = [Prompt(name, item) if isinstance(item, str) else item for item, name in zip(items, names, strict=True)]
    for part in parts:
        part.prompts, part.origin = known if texts else [], origin
    return parts[0] if given_b == (b,) else Comparisons(parts)


def failures_kept(part: Comparison) -> None:
    """The ``done`` of those who go on where no prompt could be compared, and read ``failures`` themselves."""


@dataclasses.dataclass
class _Paths:
    """Paths of one model, the first beside each other one, and how they are fed."""

    adapter: Adapter
    paths: tuple[ExecutionPath, ...]
    protocol: str
    strategy: Strategy
    seed: int
    steps: int
    continuation: Sequence[int] | None
    stop: str
    wanted: Sequence[Site]
    layers: Sequence[int]
    cache_errors: str
    lanes: tuple[Callable[..., Any], Callable[..., Any]]

    def __post_init__(self) -> None:
        self.targets = [self.adapter.at(dtype_named(path.dtype)) for path in self.paths]
        for target in self.targets:
            _Newest(target, self.wanted)
        self.prompts: dict[int, PromptDifference | None] = {}
        self.abouts = [self._about(other) for other in range(1, len(self.paths))]

    def _about(self, other: int) -> dict[str, Any]:
        paths, targets = (self.paths[0], self.paths[other]), (self.targets[0], self.targets[other])
        sites = dict.fromkeys(site for site, _ in self.wanted)
        return provenance(
            self.adapter,
            paths=dict(zip("ab", map(str, paths), strict=True)),
            protocol=self.protocol,
            strategy=str(self.strategy),
            seed=self.seed,
            derived=[site for site in sites if any(target.derives(site) for target in targets)],
            lets_go=[side for side, path in zip("ab", paths, strict=True) if path.policy.evicts],
        )

    @property
    def length(self) -> int:
        """Most steps: those that are asked for, or as many as there are tokens to feed."""
        return self.steps if self.continuation is None else min(self.steps, len(self.continuation) + 1)

    def batch(
        self, indices: Sequence[int], prompts: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[list[Comparison]]:
        """Runs one batch and returns for each prompt a comparison of the first path with each other."""
        facts = self.adapter.facts
        prompt = torch.tensor(list(map(list, prompts)), device=self.adapter.device)
        choose = drawing(self.strategy, self.seed, indices, self.steps, prompt.device)
        ends = end_tokens(self.adapter, prompt.device) if self.stop == "end of sequence" else None
        others = range(1, len(self.paths))
        given = fed_to_all(self.continuation, len(self.paths), len(prompts), prompt.device)
        newest = [_Newest(target, self.wanted) for target in self.targets]
        heads, same_text = (range(facts.query_heads), range(facts.kv_heads)), self.protocol == "matched"
        differences = [Differences(self.layers, *heads, self.cache_errors, same_text=same_text) for _ in others]
        collected, choices = Collected(), Choices()
        flipped = [torch.zeros(len(prompts), dtype=torch.bool, device=prompt.device) for _ in others]
        made = zip((self.lanes[0], *[self.lanes[1]] * len(others)), self.paths, newest, strict=True)
        runners = [lane(self.adapter, path, prompt, self.length, [hook]) for lane, path, hook in made]
        follows = [0] * len(runners) if self.protocol == "matched" else range(len(runners))
        with contextlib.ExitStack() as held:
            for runner in runners:
                held.enter_context(runner)
            for now in lockstep(runners, self.length, choose, follows=follows, given=given, ends=ends):
                collected.add(now)
                choices.add(now.logits, now.chosen)
                if now.number == 0:
                    unequal = self._unequal(now.logits)
                logits = [*map(collected.tokens_only, now.logits)]
                for at, other in enumerate(others):
                    unlike = now.chosen[0] != now.chosen[other]
                    differences[at].add(
                        now.number,
                        indices,
                        prompt.shape[1] + now.number,
                        (logits[0], logits[other]),
                        (newest[0].seen, newest[other].seen),
                        flipped[at].to(torch.int8).masked_fill(now.over, -1),
                        unlike & ~flipped[at],
                    )
                    flipped[at] = flipped[at] | unlike
        for other, row in unequal.items():
            self.prompts[other] = prompt_difference(self.targets[0], prompt[row : row + 1])
        decided = [choices.of_rows(choose.distances, other) for other in others]
        frames = [each.frames(indices) for each in differences]
        abouts = [self._told(other, runners) for other in others]
        # Numbered by lane first; each prompt asks for the rows of both lanes of a pair.
        chosen, fed, sound = collected.lists()
        stops = [] if ends is None else ends.tolist()

        def compared(row: int, at: int) -> Comparison:
            sides = (0, others[at])
            count, failure = min(length_of(fed[side][row], stops) for side in sides), ""
            for side in sides:
                if not failure and not all(sound[side][row][:count]):
                    tokens = fed[side][row][: count - 1]
                    failure = first_nonfinite(self.adapter, self.paths[side], prompts[row], tokens, collected.padding)
            a, b = (np.asarray(chosen[side][row][:count]) for side in sides)
            texts = ("", "") if failure else (self.adapter.decode(a.tolist()), self.adapter.decode(b.tolist()))
            return of_example(
                indices[row], names[row], prompts[row], frames[at], (a, b), texts, abouts[at], decided[at][row],
                self.adapter.pieces, failure,
            )  # fmt: skip

        return [[compared(row, at) for at in range(len(others))] for row in range(len(prompts))]

    def _unequal(self, logits: Sequence[Tensor]) -> dict[int, int]:
        """For each other path a row whose prompt has other logits than on the first, where nothing but the cache is another.

        Asked until one was seen, since what rounding makes of one prompt it makes of all.
        """
        found = {}
        for other in range(1, len(self.paths)):
            pair = self.paths[0], self.paths[other]
            plain = all(dataclasses.replace(path, form="cached", dtype=None) == ExecutionPath() for path in pair)
            same = plain and pair[0].form != pair[1].form and self.targets[0].dtype == self.targets[other].dtype
            if other in self.prompts or not same:
                continue
            rows = (logits[0] != logits[other]).any(-1).nonzero()
            if len(rows):
                found[other] = int(rows[0])
        return found

    def _told(self, other: int, runners: Sequence[Any]) -> dict[str, Any]:
        """What a pair of paths was compared with, and what their call plans saw themselves do."""
        sides = {"a": (self.paths[0], runners[0]), "b": (self.paths[other], runners[other])}
        about = {**self.abouts[other - 1], "caches": {side: runner.cache for side, (_, runner) in sides.items()}}
        asked = self.prompts.get(other)
        if asked is not None:
            about["prompt_differs"] = dataclasses.asdict(asked) | {"said": asked.said}
        seen = {
            side: {name: [n, n] for name, n in witnessed(path, runner.witness).items()}
            for side, (path, runner) in sides.items()
            if path.call is not None
        }
        return {**about, "witness": seen} if seen else about


class _Newest(SiteHook):
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
            self.seen[ROWS, place.layer] = place.rows.to(self._device)
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
        if layout.group != "cache":
            tensor = tensor.select(layout.rows, -1).clone()
        elif (ROWS, layer) in self.seen:
            # What is left is moved to the front of a preallocated cache before anyone compares.
            tensor = tensor.clone()
        self.seen[site, layer] = tensor


def _compared(adapter: Adapter, record: Names | None, layers: Iterable[int] | int | None) -> tuple[str, ...]:
    if record is None:
        found, left_out = recordable(adapter, None, chosen_layers(adapter, layers))
        for site, reason in left_out.items():
            log.info("%s is not compared: %s", site, reason)
        return found
    names = names_of(adapter, record)
    sites = sites_of(names)
    wrong = [site for site in sites if site not in COMPARED]
    if wrong:
        raise InputError(
            f"site {wrong[0]!r} cannot be compared: expected one of {', '.join(COMPARED)} or kv; use run() to record it."
        )
    half = set(ROUTING_SITES).intersection(sites)
    if len(half) == 1:
        raise InputError(
            f"site {half.pop()!r} alone cannot be compared: a choice is read beside the logits that it is made from; record "
            "routing, which is both."
        )
    return tuple(names)
