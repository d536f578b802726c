"""HOW it runs: the two loops side by side, and :func:`run`, which sends one model along one path.

The loops are twins: same signature, same yields. Each yields the newest position's logits and is sent the next token; step
0 is the token that the prefill decides.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvinterp.data import TASKS, Prompt, check_text
from kvinterp.errors import InputError, NonFiniteError, located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.adapter import RESIDUAL_SITES, KVStore, Listener, ModuleState, Site
from kvinterp.models.threads import own_threads
from kvinterp.paths.cache import GrowingStore, PassThrough, ReadListener
from kvinterp.paths.path import ExecutionPath, path_named
from kvinterp.paths.sampling import Strategy, check_seed, strategy_named, uniforms
from kvinterp.paths.vocabulary import padding_of, shown_tokens, sound_rows
from kvinterp.policies import Place
from kvinterp.provenance import provenance
from kvinterp.recording import Recorder, Trace, Watch, chosen_heads, chosen_layers, chosen_steps, whole_number

__all__ = [
    "LOGITS",
    "RecorderWatcher",
    "Runner",
    "Watcher",
    "batched",
    "check_choice",
    "checked_continuation",
    "encode",
    "end_tokens",
    "first_nonfinite",
    "growing_store",
    "in_batches",
    "listed",
    "run",
]

log = logging.getLogger("kvinterp")
Loop = Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]
Begin = Callable[[], None]
Done = TypeVar("Done")

CHECKED_SITES = ("q", "k", "v", "z", "attn_out", "mlp_out", "resid_post")
CHECKED_NUMBERS = 2**17
"""What is compared, and how many numbers of it, before prompts are run in a batch (docs/laws.md, law 9).

Measured on a CPU in float16: models of width 128 show the difference in every step; of the tiny random models of width 24
to 32 the least sensitive shows it once in 20,000 numbers.
"""

_GENERATOR = re.compile(rf"({'|'.join(TASKS)}):\d+(:\d+)?")

LOGITS: Site = ("logits", -1)
"""The place under which a watcher hears, and may replace, the newest position's logits ``[batch, vocab]``."""


def cached_loop(
    adapter: Adapter, path: ExecutionPath, prompt: Tensor, room: int, watchers: Sequence[Watcher], begin: Begin
) -> Loop:
    """Prefills the prompt once, then feeds one token a step against a cache that grows in place."""
    begin()
    store = growing_store(adapter, path, prompt.shape[0], prompt.shape[1] + room, watchers)
    logits = _forward(adapter, prompt, store, path.chunk)
    while True:
        token = yield logits[:, -1]
        logits = adapter.forward(token[:, None], store)


def recompute_loop(
    adapter: Adapter, path: ExecutionPath, prompt: Tensor, room: int, watchers: Sequence[Watcher], begin: Begin
) -> Loop:
    """Feeds the whole prefix at every step; nothing is carried from one step to the next but the tokens."""
    tokens = prompt
    while True:
        begin()
        store = _uncached(adapter, path, tokens, watchers)
        logits = _forward(adapter, tokens, store, path.chunk)
        token = yield logits[:, -1]
        tokens = torch.cat([tokens, token[:, None]], 1)


@runtime_checkable
class Watcher(Protocol):
    """Whatever looks into a path while it runs: a recorder, a comparer, a patch."""

    @property
    def places(self) -> Sequence[Site]:
        """The hooks it needs."""

    @property
    def listeners(self) -> Mapping[Site, Listener]:
        """What those hooks call."""

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Sees what attention is about to read, and may replace it."""


class Runner:
    """One path in motion: hooks attached once for the whole decode, one call a step.

    Args:
        adapter: The model; it is brought to the path's dtype.
        path: How to run it.
        prompt: Token ids, ``[batch, position]``.
        room: Most tokens that will be fed after the prompt.
        watchers: Made for ``adapter.at(path.dtype)``; they hear every forward in order.
    """

    def __init__(
        self, adapter: Adapter, path: ExecutionPath, prompt: Tensor, room: int, watchers: Sequence[Watcher] = ()
    ) -> None:
        self.adapter = adapter.at(dtype_named(path.dtype))
        self.path, self.watchers = path, watchers
        self.step = -1
        self._state: ModuleState = {}
        loop = cached_loop if path.form == "cached" else recompute_loop
        self._loop = loop(self.adapter, path, prompt.to(self.adapter.device), room, watchers, self._begin)
        self._kernels = path.kernels.mode(self.adapter)
        self._listeners: dict[Site, list[Listener]] = {place: [hear] for place, hear in self._kernels.listeners.items()}
        for watcher in watchers:
            for place, listener in watcher.listeners.items():
                self._listeners.setdefault(place, []).append(listener)

    def __enter__(self) -> Runner:
        self._attached = self.adapter.attached([place for place in self._listeners if place != LOGITS])
        self._attached.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.close()
        self._attached.__exit__(*error)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first call takes no tokens."""
        self.step += 1
        for watcher in self.watchers:
            watcher.begin_step(self.step)
        with self.adapter.listening(self._listeners), self.adapter.own_state(self._state), self._kernels:
            logits = next(self._loop) if tokens is None else self._loop.send(tokens)
        for listener in self._listeners.get(LOGITS, ()):
            changed = listener(logits)
            logits = logits if changed is None else changed
        return logits

    def _begin(self) -> None:
        for watcher in self.watchers:
            watcher.begin_pass()


def run(
    model: Any,
    prompt: Any,
    path: str | ExecutionPath = "cached",
    *,
    max_new_tokens: int = 48,
    strategy: str | Strategy = "greedy",
    seed: int = 0,
    continuation: Sequence[int] | None = None,
    record: str | Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    positions: str = "newest",
    logits: str = "discard",
    stop: str = "end of sequence",
    batch_size: int = 1,
) -> Any:
    """Runs a model along one path and keeps what was asked.

    Args:
        model: A model of any kind, or an adapter.
        prompt: A text, a :class:`Prompt`, or token ids (a list, an array or a tensor); or a list of these, run in batches
            where that keeps the bits. A tensor or array of two dimensions is a list, a prompt a row.
        path: How to run it, such as ``"cached"``, ``"recompute"`` or ``Cached(...)``.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        strategy: ``"greedy"``, ``"top_k(50,0.8)"``, ``"top_p(0.95,0.8)"`` or a :class:`Strategy`.
        seed: Seeds the random number of each example and step.
        continuation: Token ids to feed instead of the path's own choices (one prompt only).
        record: Sites to keep, none unless said; see :class:`Recorder`, also for layers, heads, kv_heads, steps and positions.
        layers: Layers to keep.
        heads: Query heads to keep.
        kv_heads: KV heads to keep.
        steps: Steps to keep.
        positions: ``"newest"`` or ``"all"``.
        logits: ``"keep"`` keeps the full-vocabulary logits of every step; ``"discard"`` does not.
        stop: ``"end of sequence"`` (or at the length, whichever comes first) or ``"length"``.
        batch_size: Most prompts in a batch; prompts of equal length are batched if the bits were checked to be the same.

    Returns:
        A trace for one prompt, a list of traces for a list.

    Raises:
        InputError: Something given does not exist or does not fit.
        NonFiniteError: NaN or Inf logits (for a list the trace says so in ``failure`` and the rest goes on).
    """
    adapter, path, strategy = wrap(model), path_named(path), strategy_named(strategy)
    check_choice("logits", logits, ("keep", "discard"))
    check_choice("stop", stop, ("end of sequence", "length"))
    check_seed(seed)
    items, single = listed(prompt)
    prompts = [encode(adapter, item, max_new_tokens) for item in items]
    forced = checked_continuation(continuation, len(prompts), adapter)
    # Made into lists here: each batch asks for them again.
    layers = None if layers is None else chosen_layers(adapter, layers)
    heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
    kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
    steps = None if steps is None else chosen_steps(steps)
    record = () if record is None else record
    with located(f"model {adapter.facts.name}, path {path}"), own_threads(adapter):
        target = adapter.at(dtype_named(path.dtype))

        def one_batch(indices: Sequence[int]) -> list[Trace]:
            recorder = Recorder(target, record, layers, heads, kv_heads, steps, positions)
            return _run_batch(
                adapter,
                path,
                [prompts[i] for i in indices],
                indices,
                max_new_tokens,
                strategy,
                seed,
                forced,
                recorder,
                logits == "keep",
                stop == "end of sequence",
            )

        Recorder(target, record, layers, heads, kv_heads, steps, positions)
        traces = in_batches(adapter, (path,), prompts, max_new_tokens, batch_size, one_batch)
    if single:
        if traces[0].failure:
            raise NonFiniteError(traces[0].failure)
        return traces[0]
    return traces


def _run_batch(
    adapter: Adapter,
    path: ExecutionPath,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_new_tokens: int,
    strategy: Strategy,
    seed: int,
    continuation: Sequence[int] | None,
    recorder: Recorder,
    keep_logits: bool,
    stop_at_end: bool,
) -> list[Trace]:
    prompt = torch.tensor(list(map(list, prompts)), device=adapter.device)
    random = torch.stack([uniforms(seed, index, max_new_tokens) for index in indices]).to(prompt.device)
    ends = end_tokens(adapter, prompt.device) if stop_at_end else None
    forced = None if continuation is None else torch.tensor(list(continuation), device=prompt.device)
    length = max_new_tokens if forced is None else min(max_new_tokens, len(forced) + 1)
    kept, chosen, fed, finite = [], [], [], []
    finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    watchers = [RecorderWatcher(recorder)] if recorder.kept else []
    padding: Tensor | None = None
    with Runner(adapter, path, prompt, length, watchers) as runner:
        logits = runner.advance()
        for step in range(length):
            token = strategy.choose(logits, random[:, step])
            chosen.append(token)
            padding = padding_of([logits]) if padding is None else padding
            finite.append(sound_rows(logits, padding))
            if keep_logits:
                kept.append(logits.clone())
            feed = token if forced is None or step >= len(forced) else forced[step].expand(len(prompt))
            if ends is not None:
                finished = finished | torch.isin(feed, ends)
                if bool(finished.all()):
                    break
            if step + 1 < length:
                fed.append(feed)
                logits = runner.advance(feed)
    recorder.end_step()
    tokens = torch.stack(chosen, 1).tolist()
    given = torch.stack(fed, 1).tolist() if fed else [[] for _ in prompts]
    whole = torch.stack(finite, 1).tolist()
    about = provenance(adapter, path=str(path), strategy=str(strategy), seed=seed)
    all_logits = torch.stack(kept, 1) if kept else None
    stops = ends.tolist() if ends is not None else []
    traces = []
    for row in range(len(prompts)):
        followed = tokens[row] if forced is None else [*given[row], *tokens[row][len(given[row]) :]]
        count = next((i + 1 for i, t in enumerate(followed) if t in stops), len(tokens[row]))
        steps = [i for i, step in enumerate(recorder.recorded_steps) if step < count]
        failure = ""
        if not all(whole[row][:count]):
            failure = first_nonfinite(adapter, path, prompts[row], given[row][: count - 1])
        traces.append(
            Trace(
                path=str(path),
                prompt=tuple(prompts[row]),
                tokens=tuple(tokens[row][:count]),
                fed=tuple(given[row][: count - 1]),
                records={p: [kept_step[row] for kept_step in seen[: len(steps)]] for p, seen in recorder.kept.items()},
                steps=tuple(recorder.recorded_steps[: len(steps)]),
                logits=None if all_logits is None else all_logits[row, :count],
                ended="end of sequence" if followed[count - 1] in stops else "length",
                failure=failure,
                provenance=about,
                heads=recorder.heads,
                kv_heads=recorder.kv_heads,
            )
        )
    return traces


class RecorderWatcher:
    """A recorder as the runner sees it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.places = recorder.places
        self.listeners = recorder.watch.listeners
        self.begin_step, self.begin_pass, self.on_read = recorder.begin_step, recorder.begin_pass, recorder.on_read


# What goes in --------------------------------------------------------------------------------------------------------


def listed(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether they were a single one.

    Args:
        prompts: A text, a :class:`Prompt` or token ids; or a list of these; or a tensor or array of token ids, of one
            dimension for one prompt or of two for several.

    Raises:
        InputError: They are none of these.
    """
    if isinstance(prompts, str | Prompt):
        return [prompts], True
    if isinstance(prompts, Tensor | np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts of type {type(prompts).__name__} were given: expected a text, token ids, or a list of them."
        )
    items = list(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    single = not any(isinstance(item, str | Prompt | Iterable) for item in items)
    return ([items], True) if single else (items, False)


def encode(adapter: Adapter, prompt: Any, max_new_tokens: int) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary and the context.

    Args:
        adapter: The model.
        prompt: A text, a :class:`Prompt`, or token ids.
        max_new_tokens: Tokens that will be decided; the last of them is not fed, so it needs no position.

    Raises:
        InputError: There is nothing to run, or it does not fit.
    """
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens!r} was given: expected a whole number of at least 1.")
    if isinstance(prompt, str) and _GENERATOR.fullmatch(prompt):
        raise InputError(f"prompt {prompt!r} names a generator: give kv.load_prompts({prompt!r}), which makes the prompts.")
    text = prompt.text if isinstance(prompt, Prompt) else prompt
    if isinstance(text, str):
        check_text(text, f"prompt {text[:40]!r}")
    tokens = adapter.encode(text) if isinstance(text, str) else _token_ids(text, "prompt")
    shown = text[:40] if isinstance(text, str) else tokens[:8]
    if not tokens:
        raise InputError(f"prompt {shown!r} has no token: give at least one.")
    facts = adapter.facts
    wrong = next((t for t in tokens if not 0 <= t < facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"token id {wrong} in prompt {shown!r} does not exist: {facts.name} has 0 to {facts.vocabulary - 1}."
        )
    if len(tokens) + max_new_tokens - 1 > facts.context:
        raise InputError(
            f"prompt {shown!r} has {len(tokens)} tokens, and with max_new_tokens={max_new_tokens} that is more than the "
            f"context of {facts.name}, {facts.context} positions: shorten the prompt or decode fewer tokens."
        )
    return tokens


def _token_ids(given: Any, what: str) -> list[int]:
    items = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    tokens = [whole_number(item) for item in items] if isinstance(items, Iterable) else [None]
    if None in tokens:
        raise InputError(f"{what} {str(given)[:40]} was given: expected whole numbers, the ids of tokens.")
    return [token for token in tokens if token is not None]


def end_tokens(adapter: Adapter, device: torch.device) -> Tensor:
    """The token ids that end a sequence, as a tensor."""
    return torch.tensor(sorted(adapter.end_tokens), dtype=torch.long, device=device)


def check_choice(name: str, given: str, known: Sequence[str]) -> None:
    """Raises InputError where ``given`` is not one of the known words."""
    if given not in known:
        raise InputError(f"{name}={given!r} was given: expected {' or '.join(map(repr, known))}.")


def checked_continuation(continuation: Any, prompts: int, adapter: Adapter) -> list[int] | None:
    """The token ids to be fed, checked; None where none were given.

    Args:
        continuation: A list, an array or a tensor of token ids.
        prompts: How many prompts it came with.
        adapter: The model.

    Raises:
        InputError: There is more than one prompt, or something is no token of this model.
    """
    if continuation is None:
        return None
    if prompts != 1:
        raise InputError(f"continuation was given with {prompts} prompts: give one prompt at a time with it.")
    tokens = _token_ids(continuation, "continuation")
    wrong = next((t for t in tokens if not 0 <= t < adapter.facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"continuation holds token id {wrong}: {adapter.facts.name} has 0 to {adapter.facts.vocabulary - 1}."
        )
    return tokens


# What the loops stand on -----------------------------------------------------------------------------------------------


def _forward(adapter: Adapter, tokens: Tensor, store: KVStore | None, chunk: int | None) -> Tensor:
    if chunk is None or chunk >= tokens.shape[1]:
        return adapter.forward(tokens, store)
    for piece in tokens.split(chunk, 1):
        logits = adapter.forward(piece, store)
    return logits


def growing_store(
    adapter: Adapter, path: ExecutionPath, batch: int, capacity: int, watchers: Sequence[Watcher]
) -> GrowingStore:
    """A preallocated cache for this model and path, told to the watchers."""
    return GrowingStore(
        adapter.facts,
        path.policy,
        batch,
        capacity,
        path.kernels.compute_dtype(adapter.dtype),
        adapter.device,
        [watcher.on_read for watcher in watchers],
        dtype_named(path.cache_dtype),
        adapter.position_major_cache,
    )


def _uncached(
    adapter: Adapter, path: ExecutionPath, tokens: Tensor, watchers: Sequence[Watcher]
) -> PassThrough | GrowingStore | None:
    if path.chunk is not None and path.chunk < tokens.shape[1]:
        return growing_store(adapter, path, tokens.shape[0], tokens.shape[1], watchers)
    if not adapter.attention_only:
        return None
    listeners: list[ReadListener] = [watcher.on_read for watcher in watchers]
    return PassThrough(adapter.facts, path.policy, tokens.shape[0], adapter.dtype, adapter.device, listeners)


# Batches (docs/laws.md, law 9) --------------------------------------------------------------------------------------------


def in_batches(
    adapter: Adapter,
    paths: Sequence[ExecutionPath],
    prompts: Sequence[Sequence[int]],
    steps: int,
    batch_size: int,
    work: Callable[[Sequence[int]], list[Done]],
    done: Callable[[Sequence[int], list[Done]], None] | None = None,
) -> list[Done]:
    """Runs ``work`` over prompts, in batches of equal length where batching was checked to keep the bits.

    A batch that runs out of memory is halved, and said. Results come back in the order of the prompts.

    Args:
        adapter: The model.
        paths: Every path the work runs.
        prompts: Token ids.
        steps: Steps each will run.
        batch_size: Most prompts in a batch.
        work: Takes the indices of a batch and returns one result for each.
        done: Told of every batch as it finishes.
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r} was given: expected a whole number of at least 1.")
    results: dict[int, Done] = {}
    waiting = list(batched(prompts, batch_size))
    while waiting:
        batch = waiting.pop(0)
        try:
            if len(batch) > 1 and not all(_same_bits(adapter, path, [prompts[i] for i in batch], steps) for path in paths):
                waiting[:0] = [[index] for index in batch]
                continue
            made = work(batch)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            if len(batch) == 1:
                raise InputError(
                    f"out of memory with one prompt of {len(prompts[batch[0]])} tokens: shorten it, decode fewer tokens, "
                    "record less, or use a smaller dtype."
                ) from error
            half = len(batch) // 2
            log.warning("out of memory with a batch of %d: halved to %d", len(batch), half)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            waiting[:0] = [batch[:half], batch[half:]]
            continue
        results |= zip(batch, made, strict=True)
        if done is not None:
            done(batch, made)
    return [results[index] for index in range(len(prompts))]


def _out_of_memory(error: BaseException) -> bool:
    # On a CPU torch raises a plain RuntimeError.
    said = ("not enough memory", "DefaultCPUAllocator", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)


def batched(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Indices of prompts of equal length, at most ``size`` together: no padding, so no mask that would change the bits."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _same_bits(adapter: Adapter, path: ExecutionPath, prompts: Sequence[Sequence[int]], steps: int) -> bool:
    """Whether a batch of this shape gives each prompt the bits it gets alone, at its first and at its last lengths."""
    shape = (str(path), len(prompts), len(prompts[0]), steps)
    if shape not in adapter.checked_batches:
        tokens = torch.tensor(list(map(list, prompts)), device=adapter.device)
        alike, turn, numbers = True, 0, 0
        while alike and numbers < CHECKED_NUMBERS:
            first = (tokens + turn) % adapter.facts.vocabulary
            last = torch.cat([first, first[:, :1].expand(-1, max(steps - 2, 0))], 1)
            compared = [_numbers_alike(adapter, path, rows, count) for rows, count in ((first, max(steps, 2)), (last, 2))]
            alike, turn, numbers = all(compared), turn + 1, numbers + sum(compared)
        adapter.checked_batches[shape] = alike
    if not adapter.checked_batches[shape]:
        log.info(
            "path %s on %s in %s: a batch of %d does not give the bits of single prompts; running them one by one",
            path, adapter.device, adapter.dtype, len(prompts),
        )  # fmt: skip
    return adapter.checked_batches[shape]


def _numbers_alike(adapter: Adapter, path: ExecutionPath, tokens: Tensor, steps: int) -> int:
    """Decodes rows together and alone, side by side: how many numbers were the same after step 0, or 0 if one was not.

    Stops once enough were compared. The newest logits of a step or two would not do: in 16 bits another order of
    additions moves a number only if its sum was close to a rounding boundary, and a small model's step may show none.
    """
    target = adapter.at(dtype_named(path.dtype))
    layers = range(target.facts.layers)
    sites = [site for site in CHECKED_SITES if all(target.supports(site, layer) for layer in layers)]
    batches = (tokens, *tokens.split(1))
    recorders = [Recorder(target, sites) for _ in batches]
    numbers = 0
    steps = min(steps, adapter.facts.context - tokens.shape[1] + 1)
    with contextlib.ExitStack() as stack:
        runners = [
            stack.enter_context(Runner(adapter, path, rows, steps, [RecorderWatcher(recorder)]))
            for rows, recorder in zip(batches, recorders, strict=True)
        ]
        for step in range(steps):
            feeds = [None if step == 0 else rows[:, step % rows.shape[1]] for rows in batches]
            together, *alone = [_shown(*one) for one in zip(runners, recorders, feeds, strict=True)]
            if not all(torch.equal(one, torch.cat(rows)) for one, *rows in zip(together, *alone, strict=True)):
                return 0
            numbers += sum(tensor.numel() for tensor in together) if step else 0
            if numbers >= CHECKED_NUMBERS:
                break
    return numbers


def _shown(runner: Runner, recorder: Recorder, feed: Tensor | None) -> list[Tensor]:
    """The logits and every recorded site of the next step."""
    logits = runner.advance(feed).clone()
    recorder.end_step()
    return [logits, *(kept.pop() for kept in recorder.kept.values() if kept)]


# NaN and Inf -----------------------------------------------------------------------------------------------------------


class _FiniteWatcher:
    """Stops at the first residual stream that is not finite."""

    def __init__(self, adapter: Adapter) -> None:
        sites = [(s, layer) for layer in range(adapter.facts.layers) for s in RESIDUAL_SITES if adapter.supports(s, layer)]
        self.watch = Watch(adapter, sites, self._check)
        self.places, self.listeners = self.watch.places, self.watch.listeners
        self.step = 0

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin_pass(self) -> None:
        self.watch.begin_pass()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        for site, tensor in (("keys", keys), ("values", values)):
            self._check(f"cached {site}", place.layer, place.start, tensor)

    def _check(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(f"{_what(tensor)} first appeared in {site} of layer {layer} at step {self.step}")


def first_nonfinite(
    adapter: Adapter,
    path: ExecutionPath,
    prompt: Sequence[int],
    fed: Sequence[int],
    padding: Bool[Tensor, " vocab"] | None = None,
) -> str:
    """Where NaN or Inf first appears when these tokens are run along this path, as one sentence.

    Args:
        adapter: The model.
        path: How to run it.
        prompt: Token ids of the prompt.
        fed: Token ids fed after it.
        padding: Which ids stand for no token and have minus infinity; as the first step has it, unless given.
    """
    remedy = "use a dtype with a wider range, such as dtype='bfloat16' or 'float32'"
    watcher = _FiniteWatcher(adapter.at(dtype_named(path.dtype)))
    tokens = torch.tensor([list(prompt)], device=adapter.device)
    try:
        with Runner(adapter, path, tokens, len(fed) + 1, [watcher]) as runner:
            for step in range(len(fed) + 1):
                logits = runner.advance(None if step == 0 else tokens.new_tensor([fed[step - 1]]))
                padding = padding_of([logits]) if padding is None else padding
                if not bool(sound_rows(logits, padding).all()):
                    wrong = torch.where(padding, logits != -torch.inf, ~logits.isfinite()).any(0)
                    if not bool(wrong.all()):
                        remedy += ", or, where these ids stand for no token, give them -inf at every step on both paths"
                    what = f"{_what(logits[:, wrong])} first appeared in the logits at step {step}"
                    raise NonFiniteError(f"{what}, of {shown_tokens(wrong)},")
    except NonFiniteError as error:
        return f"path {path}: {error} in {str(runner.adapter.dtype).removeprefix('torch.')}: {remedy}."
    return f"path {path}: NaN or Inf appeared in the logits once and not again on a second run of the same tokens."


def _what(tensor: Tensor) -> str:
    return "NaN" if bool(tensor.isnan().any()) else "Inf"
