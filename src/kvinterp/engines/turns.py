"""Is each turn's prompt the tokens of the turns before it, exactly? What is not cannot be read from
a prefix cache.

A cache holds the ids that an engine was fed and those that it chose. The next turn's prompt is made
anew, from messages: a template leaves out what was thought, trims white space, writes other special
tokens, and text that was decoded and tokenised again is cut into other tokens. From the first token
that differs on nothing of the cache can be used, and a trainer that sees the new prompt scores the
reply after other tokens than the engine did.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvinterp.data.chat import chat_tokens
from kvinterp.data.tokenizing import ids_of
from kvinterp.errors import InputError, shown

AROUND = 4
"""So many tokens stand on both sides of the first that differs."""
THOUGHT = re.compile(r"<(think|thinking|reasoning|thought)>.*?</\1>", re.DOTALL)
CAUSES = {
    "": "the same tokens",
    "retokenised": "the same text, cut into other tokens",
    "retokenised across the border": "the same text, cut into other tokens where prompt and reply meet",
    "special tokens": "special tokens alone",
    "white space": "white space alone",
    "special tokens and white space": "special tokens and white space alone",
    "think part left out": "a think part that the new prompt leaves out",
    "think part put in": "a think part that the new prompt puts in",
    "other text": "other text",
}
"""What made a prompt differ from the tokens before it, and what it is called in a sentence."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn as an engine had it.

    Attributes:
        prompt: The ids that it was fed.
        reply: The ids that it chose; empty where they are not known.
    """

    prompt: tuple[int, ...]
    reply: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class TurnsCheck:
    """What was found at the beginning of each turn after the first.

    Attributes:
        table: One row a turn from the second on: ``turn`` (from 1), ``cached`` (ids of the turns
            before it), ``prompt`` (its own), ``exact`` ("yes" where its prompt begins with all that
            is cached), ``reusable`` (the ids that agree, from the first on), ``cause`` (a key of
            :data:`CAUSES`), ``cached_text`` and ``prompt_text`` (around the first that differs),
            ``cached_ids`` and ``prompt_ids`` (the same, as text), and with a model ``nats`` (the
            mean absolute difference of the log-probs of what follows, the reply where it is known),
            ``most_nats`` and ``scored`` (of how many tokens).
    """

    table: pd.DataFrame

    def __repr__(self) -> str:
        """What was found, a line a turn that differs."""
        return self.reading

    @property
    def exact(self) -> bool:
        """Whether every turn's prompt begins with the tokens of the turns before it."""
        return bool((self.table["exact"] == "yes").all())

    @property
    def reading(self) -> str:
        """How many turns are exact, and of each other one the first token that differs, and why."""
        return "\n".join(sentences(self.table))


def check_turns(tokenizer: Any, turns: Sequence[Any], model: Any = None) -> TurnsCheck:
    """Asks whether each turn's prompt is the tokens of the turns before it.

    Args:
        tokenizer: A tokenizer of transformers, or a model as :func:`kvinterp.load_model` gives it.
        turns: The messages of a conversation (``role``, ``content``, and where they are known the
            ``tokens`` of a reply), which the tokenizer's template turns into prompts; or a list of
            ids for each turn's prompt; or ``{"prompt": ids, "tokens": ids}`` for each.
        model: An adapter, to measure what the difference does to the log-probs of what follows.

    Returns:
        A row for each turn from the second on.

    Raises:
        InputError: There are fewer than two turns, or one is neither messages nor ids.
    """
    tokenizer = getattr(tokenizer, "tokenizer", None) or tokenizer
    made = _turns(tokenizer, turns)
    if len(made) < 2:
        raise InputError(
            f"{len(made)} turn was given: expected two at least, a reply and a prompt behind it; give more."
        )
    rows = []
    for number, (before, now) in enumerate(itertools.pairwise(made), 2):
        cached = before.prompt + before.reply
        rows.append({"turn": number, **_border(tokenizer, cached, len(before.prompt), now.prompt)})
        if model is not None:
            rows[-1] |= _cost(model, cached, now)
    return TurnsCheck(pd.DataFrame(rows))


def _turns(tokenizer: Any, turns: Sequence[Any]) -> list[Turn]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise InputError(
            f"turns is {shown(turns)}: expected messages, or the ids of each turn's prompt."
        )
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return [*_of_messages(tokenizer, turns)]
    made = []
    for number, turn in enumerate(turns, 1):
        given = turn if isinstance(turn, Mapping) else {"prompt": turn}
        prompt, reply = (
            _ids(given.get(name, []), f"turn {number}: its {name}") for name in ("prompt", "tokens")
        )
        made.append(Turn(prompt, reply))
    return made


def _ids(values: Any, what: str) -> tuple[int, ...]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or any(
        type(value) is not int or value < 0 for value in values
    ):
        raise InputError(
            f"{what} is {shown(values)}: expected token ids, whole numbers of at least 0."
        )
    return tuple(values)


def _of_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    """The prompts that a template makes in front of each reply, and behind the last message where
    that is none.
    """
    said = [
        {name: value for name, value in message.items() if name != "tokens"} for message in messages
    ]
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at:
            prompt = chat_tokens(tokenizer, said[:at], "this tokenizer")
            if "tokens" in message:
                yield Turn(tuple(prompt), _ids(message["tokens"], f"message {at + 1}: its tokens"))
            else:
                content = str(message["content"])
                reply = (
                    ids_of(tokenizer, content, "this tokenizer", add_special_tokens=False)
                    if content
                    else []
                )
                yield Turn(tuple(prompt), tuple(reply))
    if messages[-1]["role"] != "assistant":
        yield Turn(tuple(chat_tokens(tokenizer, said, "this tokenizer")))


def _border(
    tokenizer: Any, cached: Sequence[int], cut: int, prompt: Sequence[int]
) -> dict[str, Any]:
    """Compares what is cached with the next prompt."""
    count = min(len(cached), len(prompt))
    same = next((at for at in range(count) if cached[at] != prompt[at]), count)
    exact = same == len(cached)
    row = {
        "cached": len(cached),
        "prompt": len(prompt),
        "exact": "yes" if exact else "no",
        "reusable": same,
    }
    sides = {"cached": cached, "prompt": prompt}
    around = {
        name: [] if exact else list(ids[max(same - AROUND, 0) : same + AROUND])
        for name, ids in sides.items()
    }
    cause = "" if exact else _cause(tokenizer, cached, prompt, same, cut)
    texts = {f"{name}_text": tokenizer.decode(ids) for name, ids in around.items()}
    return {
        **row,
        "cause": cause,
        **texts,
        **{f"{name}_ids": " ".join(map(str, ids)) for name, ids in around.items()},
    }


def _cause(
    tokenizer: Any, cached: Sequence[int], prompt: Sequence[int], same: int, cut: int
) -> str:
    """Finds what, once it is left out on both sides, makes the cached text the beginning of the
    prompt's.
    """
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = [tokenizer.decode(list(ids)) for ids in (cached, prompt)]
    plain = [
        tokenizer.decode([token for token in ids if token not in special])
        for ids in (cached, prompt)
    ]

    def begins(sides: Sequence[str]) -> bool:
        return sides[1].startswith(sides[0])

    if begins(texts):
        return "retokenised across the border" if abs(same - cut) <= 1 else "retokenised"
    if begins(plain):
        return "special tokens"
    packed, bare = ([_without_space(text) for text in side] for side in (texts, plain))
    if begins(packed):
        return "white space"
    if begins(bare):
        return "special tokens and white space"
    thought = [_without_space(THOUGHT.sub("", text)) for text in plain]
    if begins(thought):
        return "think part left out" if len(thought[0]) < len(bare[0]) else "think part put in"
    return "other text"


def _without_space(text: str) -> str:
    return "".join(text.split())


def _cost(model: Any, cached: Sequence[int], now: Turn) -> dict[str, Any]:
    """Scores what follows, once behind what is cached and once behind the new prompt's
    beginning.
    """
    blocks = difflib.SequenceMatcher(
        None, list(cached), list(now.prompt), autojunk=False
    ).get_matching_blocks()
    last = blocks[-2] if len(blocks) > 1 else blocks[-1]
    rest = now.prompt[last.b + last.size :]
    # What the engine would have been fed had it kept its cache.
    kept = (*cached, *rest)
    follows = now.reply or rest
    if not follows or not (kept and now.prompt):
        return {"nats": np.nan, "most_nats": np.nan, "scored": 0}
    ends = [(*side, *now.reply) for side in (kept, now.prompt)]
    apart = np.abs(np.subtract(*(_log_probs(model, ids)[-len(follows) :] for ids in ends)))
    return {"nats": float(apart.mean()), "most_nats": float(apart.max()), "scored": len(follows)}


@torch.no_grad()
def _log_probs(model: Any, ids: Sequence[int]) -> np.ndarray:
    """``[token]``, the log-prob of every id but the first."""
    logits = model.forward(torch.tensor([list(ids)], device=model.device))[0, :-1]
    index = torch.tensor(list(ids[1:]), device=logits.device)[:, None]
    return logits.double().log_softmax(-1).gather(1, index)[:, 0].cpu().numpy()  # type: ignore[no-any-return]


def sentences(table: pd.DataFrame) -> list[str]:
    """How many turns are exact, and a sentence for each that is not."""
    rows = table.to_dict("records")
    off = [row for row in rows if row["exact"] == "no"]
    cached, reusable = int(table["cached"].sum()), int(table["reusable"].sum())
    lines = [
        f"{len(rows) - len(off)} of {len(rows)} turns begin with exactly the tokens of the turns before them; {reusable:,} of "
        f"{cached:,} cached tokens can be used again."
    ]
    for row in off:
        sides = [
            f"{side} {shown(row[f'{side}_text'])} ({row[f'{side}_ids']})"
            for side in ("cached", "prompt")
        ]
        name = (
            f"turn {row['turn']}"
            if "conversation" not in row
            else f"conversation {row['conversation']}, turn {row['turn']}"
        )
        line = (
            f"{name}: {CAUSES[row['cause']]}; the first token that differs is {row['reusable']} of {row['cached']:,} cached "
            f"ones: {', '.join(sides)}."
        )
        if row.get("scored"):
            line += (
                f" What follows is {row['nats']:.2g} nats off on average, {row['most_nats']:.2g} at most "
                f"(n = {row['scored']} tokens)."
            )
        lines.append(line)
    return lines
