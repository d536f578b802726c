"""HOW it runs: :func:`run`, which sends one model along one path."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_seed
from kvinterp.errors import NonFiniteError, located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.inputs import (
    checked_continuation,
    chosen_heads,
    chosen_layers,
    chosen_steps,
    encode,
    listed,
)
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.paths.batches import in_batches
from kvinterp.paths.decode import Collected, fed_to_all, length_of, lockstep
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.loops import Runner
from kvinterp.paths.path import ExecutionPath, path_named
from kvinterp.paths.sampling import Drawing, Strategy, strategy_named
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.recording import Recorder, Trace


def run(
    model: Any,
    prompt: Any,
    path: str | ExecutionPath = "cached",
    *,
    max_new_tokens: int = 48,
    strategy: words.Strategy | str | Strategy = "greedy",
    seed: int = 0,
    continuation: Sequence[int] | None = None,
    record: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool] | None = None,
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    positions: words.Positions | str = "newest",
    logits: words.Kept | str = "discard",
    stop: words.Stop | str = "end of sequence",
    batch_size: int = 1,
) -> Any:
    """Runs a model along one path and keeps what was asked.

    Args:
        model: A model of any kind, or an adapter.
        prompt: A text, a :class:`Prompt`, or token ids (a list, an array or a tensor); or a list of
            these, run in batches where that keeps the bits. A tensor or array of two dimensions is
            a list, a prompt a row.
        path: How to run it, such as ``"cached"``, ``"recompute"`` or ``Cached(...)``.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        strategy: ``"greedy"``, ``"top_k(50,0.8)"``, ``"top_p(0.95,0.8)"`` or a :class:`Strategy`.
        seed: Seeds the random number of each example and step.
        continuation: Token ids to feed instead of the path's own choices (one prompt only).
        record: Sites to keep (default: none); see :class:`Recorder`, also for layers, heads,
            kv_heads, steps and positions.
        layers: Layers to keep.
        heads: Query heads to keep.
        kv_heads: KV heads to keep.
        steps: Steps to keep.
        positions: ``"newest"`` or ``"all"``.
        logits: ``"keep"`` keeps the full-vocabulary logits of every step; ``"discard"`` does not.
        stop: ``"end of sequence"`` (or at the length, whichever comes first) or ``"length"``.
        batch_size: Most prompts in a batch; prompts of equal length are batched if the bits were
            checked to be the same.

    Returns:
        A trace for one prompt, a list of traces for a list.

    Raises:
        InputError: Something given does not exist or does not fit.
        NonFiniteError: NaN or Inf logits (for a list the trace says so in ``failure`` and the rest
            goes on).
    """
    adapter, path, strategy = wrap(model), path_named(path), strategy_named(strategy)
    check_choice("logits", logits, words.Kept)
    check_choice("stop", stop, words.Stop)
    check_seed(seed)
    items, single = listed(prompt, adapter.tokenizer)
    prompts = [encode(adapter, item, max_new_tokens) for item in items]
    forced = checked_continuation(continuation, len(prompts), adapter)
    # Made into lists here: each batch asks for them again.
    layers = None if layers is None else chosen_layers(adapter, layers)
    heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
    kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
    steps = None if steps is None else chosen_steps(steps)
    with located(f"model {adapter.facts.name}, path {path}"), own_threads(adapter):
        recorder = None
        if record is not None or positions != "newest":
            target = adapter.at(dtype_named(path.dtype))
            recorder = functools.partial(
                Recorder, target, record or (), layers, heads, kv_heads, steps, positions
            )
            # Raises what is wrong with these arguments, before anything runs.
            recorder()
        runs = _Run(adapter, path, max_new_tokens, strategy, seed, forced, recorder, logits, stop)
        traces = in_batches(
            adapter,
            (path,),
            prompts,
            max_new_tokens,
            batch_size,
            lambda batch: runs.batch(batch, [prompts[i] for i in batch]),
        )
    if single:
        if traces[0].failure:
            raise NonFiniteError(traces[0].failure)
        return traces[0]
    return traces


@dataclasses.dataclass(frozen=True)
class _Run:
    """How every batch is run."""

    adapter: Adapter
    path: ExecutionPath
    steps: int
    strategy: Strategy
    seed: int
    continuation: Sequence[int] | None
    recorder: Callable[[], Recorder] | None
    logits: str
    stop: str

    def batch(self, indices: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[Trace]:
        """A trace for each prompt of a batch."""
        prompt = torch.tensor(list(map(list, prompts)), device=self.adapter.device)
        length = (
            self.steps if self.continuation is None else min(self.steps, len(self.continuation) + 1)
        )
        fed = fed_to_all(self.continuation, 1, len(prompts), prompt.device)
        choose = Drawing(self.strategy, self.seed, indices, self.steps, prompt.device)
        ends = end_tokens(self.adapter, prompt.device) if self.stop == "end of sequence" else None
        recorder, collected = None if self.recorder is None else self.recorder(), Collected()
        logits_by_step: list[Tensor] = []
        with Runner(
            self.adapter,
            self.path,
            prompt,
            length,
            [recorder] if recorder and recorder.kept else [],
        ) as runner:
            for now in lockstep([runner], length, choose, given=fed, ends=ends):
                collected.add(now)
                if self.logits == "keep":
                    logits_by_step.append(now.logits[0].clone())
        if recorder is not None:
            recorder.end_step()
        about = provenance(
            self.adapter,
            path=str(self.path),
            strategy=str(self.strategy),
            seed=self.seed,
            cache=runner.cache,
        )
        logits = torch.stack(logits_by_step, 1) if logits_by_step else [None] * len(prompts)
        rows = zip(*(of_decoder[0] for of_decoder in collected.lists()), logits, strict=True)
        stops = [] if ends is None else ends.tolist()
        return [
            self._trace(recorder, sequence, prompts[sequence], of_sequence, stops, about)
            for sequence, of_sequence in enumerate(rows)
        ]

    def _trace(
        self,
        recorder: Recorder | None,
        sequence: int,
        prompt: Sequence[int],
        collected: tuple[Any, ...],
        stops: list[int],
        about: dict[str, Any],
    ) -> Trace:
        tokens, fed, sound, logits = collected
        # The token of the last step is fed to nobody: that it was chosen says whether it ends.
        followed = [*fed[:-1], tokens[-1]]
        count = length_of(followed, stops)
        fed = fed[: count - 1]
        recorded: dict[str, Any] = {"records": {}, "steps": ()}
        if recorder is not None:
            steps = tuple(step for step in recorder.recorded_steps if step < count)
            records = {
                hook_point: [rows[sequence] for rows in tensors[: len(steps)]]
                for hook_point, tensors in recorder.kept.items()
            }
            recorded = {
                "records": records,
                "steps": steps,
                "heads": recorder.heads,
                "kv_heads": recorder.kv_heads,
            }
            recorded["derived"] = recorder.derived
        made = Trace(
            path=str(self.path),
            prompt=tuple(prompt),
            tokens=tuple(tokens[:count]),
            fed=tuple(fed),
            logits=None if logits is None else logits[:count],
            ended="end of sequence" if followed[count - 1] in stops else "length",
            failure=""
            if all(sound[:count])
            else first_nonfinite(self.adapter, self.path, prompt, fed),
            provenance=about,
            **recorded,
        )
        vars(made)["model"] = weakref.ref(self.adapter)
        return made
