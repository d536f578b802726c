"""Texts and likelihoods along a path, with stop strings, and with the end of the prompt fed through
the cache where asked.

With ``prefill=exact`` the token that the prefill decides never meets what a policy did to the
cache. ``through`` feeds so many of the prompt's last tokens one by one, so that whatever is asked
of the model is answered by reading the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_seed, check_whole
from kvinterp.errors import NonFiniteError, located
from kvinterp.models import Adapter
from kvinterp.models.inputs import encode
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, Runner, Strategy, path_named, strategy_named
from kvinterp.paths.batches import in_batches
from kvinterp.paths.decode import Collected, Step, lockstep
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.sampling import Drawing

Answer = TypeVar("Answer")
Tokens: TypeAlias = Sequence[int]


class Written(NamedTuple):
    """A text that a model wrote.

    Attributes:
        tokens: Its token ids, without one that ends a sequence.
        text: Them as text, without special tokens, cut before the first stop string.
        ended: ``"end of sequence"``, ``"stop string"`` or ``"length"``.
    """

    tokens: tuple[int, ...]
    text: str
    ended: str


class Likelihood(NamedTuple):
    """How likely a continuation is.

    Attributes:
        log_probability: The sum over its tokens, in nats, from logits in float64.
        greedy: Whether each of its tokens has the largest logit.
    """

    log_probability: float
    greedy: bool


def prefilled(path: ExecutionPath, length: int, through: int) -> int:
    """How many of a prompt's tokens are prefilled; the rest is fed one by one.

    Args:
        path: The path. Where it keeps no cache, or the prefill reads what is stored, the prefill
            takes the whole prompt.
        length: The prompt's tokens.
        through: How many are to be fed through the cache; the first is always prefilled.
    """
    meets = path.form == "cached" and path.prefill == "exact"
    return max(1, length - through) if meets else length


def write(
    adapter: Adapter,
    path: str | ExecutionPath,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    *,
    strategy: str | Strategy = "greedy",
    seed: int = 0,
    examples: Sequence[int] | None = None,
    stops: Sequence[str] = (),
    through: int = 0,
    batch_size: int = 1,
    done: Callable[[int], object] = lambda count: None,
) -> list[Written]:
    """Lets a model write, until the end of a sequence, a stop string or the length.

    Args:
        adapter: The model.
        path: How it runs.
        prompts: Token ids.
        max_new_tokens: Most tokens of each.
        strategy: How tokens are chosen.
        seed: Seeds the random numbers, which belong to the example and the token whatever batch it
            is in.
        examples: The number of each prompt for them; 0, 1, ... unless given.
        stops: Texts at which it ends.
        through: How many of each prompt's last tokens are fed one by one, see :func:`prefilled`.
        batch_size: Most prompts in a batch; used where it was checked to keep the bits.
        done: Told how many are finished, as they are.

    Raises:
        InputError: Something does not fit the model.
        NonFiniteError: NaN or Inf logits.
    """
    path, strategy = path_named(path), strategy_named(strategy)
    (
        check_seed(seed),
        check_whole("max_new_tokens", max_new_tokens),
        check_whole("through", through, least=0),
    )
    numbers = range(len(prompts)) if examples is None else examples
    stops = [stop for stop in stops if stop]
    fed_of = []
    for prompt in prompts:
        encode(adapter, prompt, max_new_tokens)
        fed_of.append((len(prompt) - prefilled(path, len(prompt), through),))

    def ending(tokens: list[int], token: int) -> str:
        """Adds a token to a text, and says why the text is over where it is now."""
        if token in adapter.end_tokens:
            return "end of sequence"
        tokens.append(token)
        # With special tokens, which a stop string may be.
        if stops and any(stop in adapter.decode(tokens) for stop in stops):
            return "stop string"
        return "length" if len(tokens) == max_new_tokens else ""

    def work(indices: Sequence[int], fed: int) -> list[Written]:
        draw = Drawing(
            strategy, seed, [numbers[index] for index in indices], max_new_tokens, adapter.device
        )
        texts, over = [list[int]() for _ in indices], [""] * len(indices)
        with _decoded(
            adapter, path, [prompts[index] for index in indices], fed, max_new_tokens, draw, over
        ) as steps:
            for now in steps:
                for row, token in enumerate(now.chosen[0].tolist() if now.number >= fed else ()):
                    over[row] = over[row] or ending(texts[row], token)
        done(len(indices))
        return [
            Written(tuple(tokens), said(tokens), why)
            for tokens, why in zip(texts, over, strict=True)
        ]

    def said(tokens: list[int]) -> str:
        tokenizer = adapter.tokenizer
        text = (
            adapter.decode(tokens)
            if tokenizer is None
            else tokenizer.decode(tokens, skip_special_tokens=True)
        )
        cuts = [cut for stop in stops if (cut := text.find(stop)) >= 0]
        return text[: min(cuts, default=len(text))]

    return _in_shapes(adapter, path, prompts, fed_of, max_new_tokens, batch_size, work)


def _in_shapes(
    adapter: Adapter,
    path: ExecutionPath,
    rows: Sequence[Tokens],
    shapes: Sequence[tuple[int, ...]],
    steps: int,
    batch_size: int,
    work: Callable[..., list[Answer]],
) -> list[Answer]:
    """Runs ``work`` over batches of rows of one shape, and gives its answers in the order of the
    rows.

    Args:
        adapter: The model.
        path: How it runs.
        rows: Token ids.
        shapes: The shape of each row; its last number is how many of its last tokens are fed one by
            one.
        steps: Most tokens that are chosen after them.
        batch_size: Most rows in a batch.
        work: Takes the indices of a batch and the numbers of its shape, and returns an answer for
            each.
    """
    answers: dict[int, Answer] = {}

    def answer(shape: tuple[int, ...]) -> None:
        chosen = [index for index, own in enumerate(shapes) if own == shape]
        heads = [rows[index][: len(rows[index]) - shape[-1]] for index in chosen]
        made = in_batches(
            adapter,
            (path,),
            heads,
            shape[-1] + steps,
            batch_size,
            lambda batch: work([chosen[row] for row in batch], *shape),
        )
        answers.update(zip(chosen, made, strict=True))

    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        for shape in dict.fromkeys(shapes):
            answer(shape)
    return [answers[index] for index in range(len(rows))]


def likelihoods(
    adapter: Adapter,
    path: str | ExecutionPath,
    requests: Sequence[tuple[Tokens, Tokens]],
    *,
    through: int = 1,
    batch_size: int = 1,
    done: Callable[[int], object] = lambda count: None,
) -> list[Likelihood]:
    """How likely continuations are along a path: each token's from the step that decides it.

    Those that differ in their last token alone, as the letters of a multiple choice do, are
    answered by one run.

    Args:
        adapter: The model.
        path: How it runs.
        requests: Context and continuation, as token ids; neither empty.
        through: How many of each context's last tokens are fed one by one, see :func:`prefilled`.
        batch_size: Most in a batch; used where it was checked to keep the bits.
        done: Told how many are finished, as they are.

    Raises:
        InputError: Something does not fit the model.
        NonFiniteError: NaN or Inf logits.
    """
    path = path_named(path)
    check_whole("through", through, least=0)
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        alike.setdefault(((*context, *continuation[:-1]), len(context)), []).append(index)
    shapes = []
    for tokens, length in alike:
        head = prefilled(path, length, through)
        encode(adapter, tokens[:head], len(tokens) - head + 1)
        shapes.append((length - head, len(tokens) - head))
    rows = list(alike)

    def work(indices: Sequence[int], before: int, fed: int) -> list[list[Likelihood]]:
        asked = [[requests[index][1][-1] for index in alike[rows[row]]] for row in indices]
        scores = _scored(adapter, path, [rows[row][0] for row in indices], before, fed, asked)
        done(sum(map(len, asked)))
        return scores

    scored = _in_shapes(adapter, path, [tokens for tokens, _ in rows], shapes, 1, batch_size, work)
    by_request: dict[int, Likelihood] = {}
    for row, several in zip(rows, scored, strict=True):
        by_request |= zip(alike[row], several, strict=True)
    return [by_request[index] for index in range(len(requests))]


def _scored(
    adapter: Adapter,
    path: ExecutionPath,
    rows: Sequence[Tokens],
    before: int,
    fed: int,
    asked: Sequence[Tokens],
) -> list[list[Likelihood]]:
    """The likelihoods of one batch: what was fed after the context, and each of the last tokens
    that are asked about.
    """
    sums = torch.zeros(len(rows), dtype=torch.float64, device=adapter.device)
    greedy = torch.ones(len(rows), dtype=torch.bool, device=adapter.device)
    with _decoded(adapter, path, rows, fed, 1, None, [""] * len(rows)) as steps:
        for now in steps:
            if now.number < before:
                continue
            log_probabilities, chosen = torch.log_softmax(now.logits[0].double(), -1), now.chosen[0]
            if now.number < fed:
                sums += log_probabilities.gather(1, now.feeds[0][:, None])[:, 0]
                greedy &= chosen == now.feeds[0]
    totals, tops = (
        (sums[:, None] + log_probabilities).cpu(),
        torch.where(greedy, chosen, -1).tolist(),
    )
    return [
        [Likelihood(float(totals[row, token]), tops[row] == token) for token in tokens]
        for row, tokens in enumerate(asked)
    ]


@contextlib.contextmanager
def _decoded(
    adapter: Adapter,
    path: ExecutionPath,
    rows: Sequence[Tokens],
    fed: int,
    steps: int,
    draw: Callable[[Tensor, int], Tensor] | None,
    over: Sequence[str],
) -> Iterator[Iterator[Step]]:
    """Prefills rows of equal length but their last ``fed`` tokens, feeds those, and then what is
    chosen: every step.

    Args:
        adapter: The model.
        path: How it runs.
        rows: Token ids.
        fed: How many of each are fed one by one.
        steps: Most tokens that are chosen after them.
        draw: Chooses them, given logits and how many were chosen; greedily unless given.
        over: Why each row is over, as the caller notes it; the last ends all.

    Raises:
        NonFiniteError: NaN or Inf in logits that decided something.
    """
    tokens = torch.tensor([list(row) for row in rows], device=adapter.device)
    head = tokens.shape[1] - fed
    given = [[column] for column in tokens[:, head:].T]
    collected, counts = Collected(), [0] * len(rows)

    def choose(logits: Tensor, step: int) -> Tensor:
        return logits.argmax(-1) if draw is None or step < fed else draw(logits, step - fed)

    def each() -> Iterator[Step]:
        for now in lockstep([runner], fed + steps, choose, given=given):
            collected.add(now)
            counts[:] = [count + (not ended) for count, ended in zip(counts, over, strict=True)]
            yield now
            if all(over):
                return

    with Runner(adapter, path, tokens[:, :head], fed + steps) as runner:
        yield each()
    _, feeds, sound = (of_decoder[0] for of_decoder in collected.lists())
    for row, count in enumerate(counts):
        # What the batch goes on with decides nothing about a row that is over.
        if not all(sound[row][:count]):
            raise NonFiniteError(
                first_nonfinite(adapter, path, tokens[row, :head].tolist(), feeds[row][: count - 1])
            )
