"""Other tokens in front of a reply than the file says: what an engine may have seen that the file
does not hold.

A **prefix** makes of one path of a file other token ids and says by how many positions they are
moved; its reply is the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import torch

from kvinterp.data.tokenizing import ids_of
from kvinterp.engines.numbers import Tokens
from kvinterp.engines.turns import THOUGHT
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import EnginePath

Prefix = Callable[[Sequence[EnginePath], int], tuple[int, ...] | None]
"""From the paths of a file and the number of one: the prompt that the engine may have seen; None
where it is the same.
"""


def edits(adapter: Adapter) -> dict[str, Prefix]:
    """The changes of a prompt that are tried on every sequence alike, by name."""
    bos = getattr(adapter.tokenizer, "bos_token_id", None)
    newline = _newline(adapter)
    special = frozenset(getattr(adapter.tokenizer, "all_special_ids", ()) or ())
    found: dict[str, Prefix] = {
        "the prompt without its last token": lambda paths, n: paths[n].prompt[:-1] or None,
        "the text before it in the file in front, as where rows are packed without a mask": _neighbour,
    }
    if bos is not None:
        found["the prompt with BOS twice"] = lambda paths, n: (
            (bos, *paths[n].prompt) if paths[n].prompt[:1] == (bos,) else None
        )
    if newline is not None:
        found["the prompt with a newline at its end"] = lambda paths, n: (*paths[n].prompt, newline)
        found["the prompt without its newlines"] = lambda paths, n: _unless(
            paths[n].prompt, tuple(t for t in paths[n].prompt if t != newline)
        )
        found["the prompt with a newline behind each special token"] = lambda paths, n: _unless(
            paths[n].prompt, _ended(paths[n].prompt, special, newline)
        )
    found["the prompt without what all prompts begin with"] = _unshared
    if adapter.tokenizer is not None:
        found["the prompt without its think parts"] = lambda paths, n: _rewritten(
            adapter, paths[n].prompt, _unthought
        )
        found["the prompt's text encoded anew"] = lambda paths, n: _rewritten(
            adapter, paths[n].prompt, str
        )
        found[
            "the tokens of the turns before it in the file, not what its prompt makes of them"
        ] = lambda paths, n: _generated(adapter, paths, n)
    return found


def _ended(prompt: tuple[int, ...], special: AbstractSet[int], newline: int) -> tuple[int, ...]:
    """With a newline behind each special token but the first, where there is none."""
    made = list[int]()
    for at, token in enumerate(prompt):
        made.append(token)
        if at and token in special and prompt[at + 1 : at + 2] != (newline,):
            made.append(newline)
    return tuple(made)


def _unthought(text: str) -> str:
    """Without what was thought in earlier turns, as templates leave it out, and the white space
    behind it.
    """
    return re.sub(f"(?:{THOUGHT.pattern})\\s*", "", text, flags=THOUGHT.flags)


def _rewritten(
    adapter: Adapter, prompt: tuple[int, ...], change: Callable[[str], str]
) -> tuple[int, ...] | None:
    """The ids of a prompt's text, changed and encoded anew; None where they are the prompt's
    own.
    """
    text = adapter.decode(prompt)
    changed = change(text)
    if change is not str and changed == text:
        return None
    ids = (
        ids_of(adapter.tokenizer, changed, "a prompt", add_special_tokens=False) if changed else []
    )
    return _unless(prompt, tuple(ids))


def _generated(
    adapter: Adapter, paths: Sequence[EnginePath], number: int
) -> tuple[int, ...] | None:
    """The prompt with the tokens of an earlier turn, another path of the file, in the place of what
    it makes of their text.

    A template leaves out what was thought, and text that is encoded anew is cut into other tokens.
    """
    own = paths[number].prompt
    turns = [
        path
        for path in paths
        if path.tokens and len(path.prompt) < len(own) and own[: len(path.prompt)] == path.prompt
    ]
    if not turns:
        return None
    turn = max(turns, key=lambda path: len(path.prompt))
    rest = own[len(turn.prompt) :]
    if rest[: len(turn.tokens)] == turn.tokens:
        return None
    special = set(getattr(adapter.tokenizer, "all_special_ids", ()) or ())

    def text(ids: Sequence[int]) -> str:
        return adapter.decode([token for token in ids if token not in special]).strip()

    whole, most = text(turn.tokens), 2 * len(turn.tokens) + 8
    # What the reply became is the longest beginning of the rest that ends as the reply does,
    # without white space behind it.
    ends = {
        at: said
        for at in range(1, min(len(rest), most) + 1)
        if (said := text(rest[:at])) and whole.endswith(said)
    }
    if not ends:
        return None
    longest = max(map(len, ends.values()))
    cut = next(at for at, said in ends.items() if len(said) == longest)
    closing = turn.tokens[len(turn.tokens) - _count_last(turn.tokens, special) :]
    cut += len(closing) * (rest[cut : cut + len(closing)] == closing)
    earlier = _generated(adapter, paths, next(at for at, path in enumerate(paths) if path is turn))
    return (*(earlier or turn.prompt), *turn.tokens, *rest[cut:])


def _count_last(ids: Sequence[int], special: AbstractSet[int]) -> int:
    """How many of the last ids are special."""
    return next((at for at, token in enumerate(reversed(ids)) if token not in special), len(ids))


def _unless(own: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    return other if other and other != own else None


def _neighbour(paths: Sequence[EnginePath], number: int) -> tuple[int, ...] | None:
    return (*paths[number - 1].ids, *paths[number].prompt) if number else None


def _unshared(paths: Sequence[EnginePath], number: int) -> tuple[int, ...] | None:
    """Without a system prompt: what all prompts of the file begin with, but for the first token."""
    prompts = [path.prompt for path in paths]
    shared = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    own = prompts[number]
    return (*own[:1], *own[shared:]) if len(paths) > 1 and 1 < shared < len(own) else None


def _newline(adapter: Adapter) -> int | None:
    """The token of a newline alone; None where there is none."""
    if adapter.tokenizer is None:
        return None
    ids = adapter.encode("\n")
    return int(ids[-1]) if ids and adapter.pieces([ids[-1]])[0] == "\n" else None


@dataclasses.dataclass(frozen=True)
class Edit:
    """One token more or less in a prompt.

    Attributes:
        at: Its position.
        token: The token that is put there; None: the one that is there is left out.
    """

    at: int
    token: int | None

    def of(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt with it."""
        return (
            *prompt[: self.at],
            *(() if self.token is None else (self.token,)),
            *prompt[self.at + (self.token is None) :],
        )


def single_edits(adapter: Adapter, prompt: Sequence[int], most: int) -> list[Edit]:
    """The edits of one token that are tried of a prompt, at most so many; the likeliest first.

    Templates add and drop newlines and special tokens, where a turn begins or ends: beside a
    newline or a special token, where the first words of the prompt come again, and at its end.
    """
    special = set(getattr(adapter.tokenizer, "all_special_ids", ()) or ())
    newline = _newline(adapter)
    inserted = [token for token in (newline, *sorted(special)[:3]) if token is not None]
    marks = special | ({newline} if newline is not None else set())
    first = next((token for token in prompt if token not in marks), None)
    border = [
        at
        for at in range(1, len(prompt) + 1)
        if prompt[at - 1] in marks
        or at == len(prompt)
        or prompt[at] in marks
        or prompt[at] == first
    ]
    rest = [at for at in range(1, len(prompt)) if at not in set(border)]
    found = [Edit(at, None) for at in border if at < len(prompt)] + [
        Edit(at, token) for at in border for token in inserted
    ]
    found += [Edit(at, newline) for at in rest if newline is not None] + [
        Edit(at, None) for at in rest
    ]
    return found[:most]


def nearest_edit(
    adapter: Adapter, path: EnginePath, tokens: Tokens, most: int
) -> tuple[tuple[int, ...], str] | None:
    """Finds the prompt with a token more or less behind which some tokens of a reply are nearest to
    the engine's.

    Args:
        adapter: The model.
        path: The sequence.
        tokens: Tokens of its reply.
        most: The most edits that are tried.

    Returns:
        The prompt and what was done to it; None where none is nearer than the prompt itself by
        half.
    """
    model = adapter.at(torch.float32)
    edits = single_edits(adapter, path.prompt, most)
    gaps = [
        _gap(model, path, path.prompt, tokens),
        *(_gap(model, path, edit.of(path.prompt), tokens) for edit in edits),
    ]
    best = int(np.argmin(gaps))
    if best == 0 or gaps[best] > gaps[0] / 2:
        return None
    edit = edits[best - 1]
    around = "".join(adapter.pieces(path.prompt[max(0, edit.at - 4) : edit.at]))
    behind = "".join(adapter.pieces(path.prompt[edit.at + (edit.token is None) : edit.at + 4]))
    token = path.prompt[edit.at] if edit.token is None else edit.token
    text = adapter.pieces([token])[0]
    done = "without" if edit.token is None else "with"
    return edit.of(
        path.prompt
    ), f"{done} the token {token} {text!r} at position {edit.at}, between {around!r} and {behind!r}"


@torch.no_grad()
def _gap(model: Adapter, path: EnginePath, prompt: Sequence[int], tokens: Tokens) -> float:
    """The mean distance of some tokens of a reply behind a prompt."""
    ids = torch.tensor([[*prompt, *path.tokens]], device=model.device)
    if ids.shape[1] > model.facts.context:
        return float("inf")
    at = torch.from_numpy(tokens.position) + len(prompt) - len(path.prompt)
    rows = model.forward(ids)[0].cpu()[at - 1].log_softmax(-1)
    return float(
        np.abs(
            rows.gather(1, ids[0].cpu()[at][:, None])[:, 0].double().numpy() - tokens.engine
        ).mean()
    )
