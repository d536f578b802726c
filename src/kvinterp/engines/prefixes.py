"""Other tokens in front of a reply than the file says: what an engine may have seen that the file does not hold.

A **prefix** makes of one path of a file other token ids and says by how many positions they are moved; its reply is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvinterp.engines.numbers import Tokens
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import EnginePath

Prefix = Callable[[Sequence[EnginePath], int], tuple[int, ...] | None]
"""Of the paths of a file and the number of one: the prompt that the engine may have seen; None where it is the same."""


def edits(adapter: Adapter) -> dict[str, Prefix]:
    """The changes of a prompt that are tried on every sequence alike, by name."""
    bos = getattr(adapter.tokenizer, "bos_token_id", None)
    newline = _newline(adapter)
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
    found["the prompt without what all prompts begin with"] = _unshared
    return found


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

    Templates add and drop newlines and special tokens, where a turn begins or ends: beside a newline or a special token, where
    the first words of the prompt come again, and at its end.
    """
    special = set(getattr(adapter.tokenizer, "all_special_ids", ()) or ())
    newline = _newline(adapter)
    inserted = [token for token in (newline, *sorted(special)[:3]) if token is not None]
    marks = special | ({newline} if newline is not None else set())
    first = next((token for token in prompt if token not in marks), None)
    border = [
        at
        for at in range(1, len(prompt) + 1)
        if prompt[at - 1] in marks or at == len(prompt) or prompt[at] in marks or prompt[at] == first
    ]
    rest = [at for at in range(1, len(prompt)) if at not in set(border)]
    found = [Edit(at, None) for at in border if at < len(prompt)] + [Edit(at, token) for at in border for token in inserted]
    found += [Edit(at, newline) for at in rest if newline is not None] + [Edit(at, None) for at in rest]
    return found[:most]


def nearest_edit(adapter: Adapter, path: EnginePath, tokens: Tokens, most: int) -> tuple[tuple[int, ...], str] | None:
    """Finds the prompt with a token more or less behind which some tokens of a reply are nearest to the engine's.

    Args:
        adapter: The model.
        path: The sequence.
        tokens: Tokens of its reply.
        most: The most edits that are tried.

    Returns:
        The prompt and what was done to it; None where none is nearer than the prompt itself by half.
    """
    model = adapter.at(torch.float32)
    edits = single_edits(adapter, path.prompt, most)
    gaps = [_gap(model, path, path.prompt, tokens), *(_gap(model, path, edit.of(path.prompt), tokens) for edit in edits)]
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
    return float(np.abs(rows.gather(1, ids[0].cpu()[at][:, None])[:, 0].double().numpy() - tokens.engine).mean())
