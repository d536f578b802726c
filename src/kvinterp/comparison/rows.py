"""The tables of one example: cut out of a batch's, with its tokens, what decided them, and what comes after its flip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.comparison.comparison import Comparison


def chance(logits: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each row's token under the softmax of its logits, float64; no temperature, no cut.

    Args:
        logits: ``[batch, vocab]``.
        tokens: ``[batch]``.
    """
    # Softmax and not a sum of exponentials of one's own: a row's bits do not depend on the batch it is in.
    return torch.softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]


class Choices:
    """Gathers, step by step, what decided the tokens of both paths; brought to the host once."""

    def __init__(self) -> None:
        self._chances: list[Tensor] = []

    def add(self, logits: Sequence[Tensor], chosen: Sequence[Tensor]) -> None:
        """Adds a step: of each path the logits and the tokens it chose."""
        self._chances.append(torch.stack([*map(chance, logits, chosen)]))

    def of_rows(self, distances: Sequence[Tensor]) -> list[dict[str, np.ndarray]]:
        """For each row of the batch the columns that go into its table of steps.

        Args:
            distances: How far each choice was from another one, path by path and step by step; infinite for never.
        """
        chances = torch.stack(self._chances, -1).cpu().numpy()
        far = torch.stack([torch.stack([*distances[path::2]], -1) for path in (0, 1)]).cpu().numpy()
        # No other token could be drawn: there is no distance.
        far = np.where(np.isinf(far), np.nan, far)
        return [
            {f"{name}_{side}": values[path, row] for name, values in (("probability", chances), ("boundary", far))
             for path, side in enumerate("ab")}
            for row in range(chances.shape[1])
        ]  # fmt: skip


def of_example(
    example: int,
    name: str,
    prompt: Sequence[int],
    frames: Mapping[str, pd.DataFrame],
    tokens: tuple[np.ndarray, np.ndarray],
    texts: tuple[str, str],
    about: dict[str, Any],
    decided: Mapping[str, np.ndarray] | None = None,
    pieces: Callable[[Sequence[int]], list[str]] = lambda ids: [*map(str, ids)],
    failure: str = "",
) -> Comparison:
    """The comparison of one example.

    Args:
        example: Its number.
        name: The prompt's id.
        prompt: The prompt's token ids.
        frames: The tables of its batch.
        tokens: The tokens each path chose, as many as count.
        texts: The same as text.
        about: What it was made with.
        decided: What decided the tokens: columns of :class:`Choices`; unknown for None.
        pieces: Gives the text of each token alone; token ids are their own text unless given.
        failure: Why it could not be compared: it has nothing but that then.
    """
    if failure:
        prompt, tokens = (), (np.zeros(0, np.int64),) * 2
    count, mine = len(tokens[0]), {}
    for table, frame in frames.items():
        # None of a step after its end; what is summed over steps was not given any.
        rows = (frame["example"].to_numpy() == example) & (not failure)
        if "step" in frame:
            rows &= frame["step"].to_numpy() < count
        mine[table] = frame[rows].reset_index(drop=True)
    steps = _steps(mine["steps"], *tokens, decided or {}, about)
    flips, after = steps.index[steps["flipped"]], steps["step"].to_numpy()[steps["after_flip"].to_numpy()]
    row = {
        "example": example,
        "id": name,
        "prompt_tokens": len(prompt),
        "steps": count,
        "flip_index": float(flips[0]) if len(flips) else np.nan,
        "token_divergence": float(steps["flipped"].mean()),
        "mean_kl": float(steps["kl"].mean()),
        "mean_kl_before_flip": float(steps.loc[~steps["after_flip"], "kl"].mean()),
        "mean_kl_after_flip": float(steps.loc[steps["after_flip"], "kl"].mean()),
        "max_kl": float(steps["kl"].max()),
        "max_abs_logit": float(steps["max_abs_logit"].max()),
        "smallest_margin": float(steps["margin_a"].min()),
        "text_a": texts[0],
        "text_b": texts[1],
    }
    for table, frame in mine.items():
        if "after_flip" not in frame and "step" in frame:
            mine[table] = frame.assign(after_flip=np.isin(frame["step"].to_numpy(), after))
    source = "derived" if "pattern" in about["derived"] else "recorded"
    mine |= {"steps": steps, "heads": mine["heads"].assign(pattern=source)}
    # Empty but typed: joined to others, its columns must not turn theirs into objects.
    examples = pd.DataFrame([row]).iloc[: int(not failure)]
    failures = pd.DataFrame([{"example": example, "id": name, "message": failure}]).iloc[: int(bool(failure))]
    told = {"tokens": _token_rows(example, prompt, tokens, pieces), "examples": examples, "failures": failures}
    return Comparison(**mine, **told, provenance=about)


def _steps(
    steps: pd.DataFrame, a: np.ndarray, b: np.ndarray, decided: Mapping[str, np.ndarray], about: Mapping[str, Any]
) -> pd.DataFrame:
    """The table of steps with both paths' tokens, and with what decided them, NaN where it is not known."""
    steps = steps.sort_values("step", ignore_index=True)
    flipped, unknown = a != b, np.full(len(a), np.nan)
    first = int(flipped.argmax()) if flipped.any() else len(a)
    more = {"flipped": flipped, "after_flip": np.arange(len(a)) > first}
    for name in ("probability_a", "probability_b", "boundary_a", "boundary_b"):
        more[name] = decided.get(name, unknown)[: len(a)]
    if about.get("strategy") == "greedy":
        # A greedy choice is as far from another one as its logits' margin.
        more |= {f"boundary_{side}": steps[f"margin_{side}"].to_numpy() for side in "ab"}
    front = {"example": steps["example"], "step": steps["step"], "token_a": a, "token_b": b}
    return pd.DataFrame(front).assign(**{name: steps[name] for name in steps if name not in front}, **more)


def _token_rows(
    example: int,
    prompt: Sequence[int],
    chosen: tuple[np.ndarray, np.ndarray],
    pieces: Callable[[Sequence[int]], list[str]],
) -> pd.DataFrame:
    """The table of tokens: the prompt's, and those that each path chose, at the position that each has if it is fed."""
    paths = {"prompt": np.asarray(prompt, np.int64), "a": chosen[0], "b": chosen[1]}
    every = np.concatenate([*paths.values()])
    ids = np.unique(every).astype(np.int64).tolist()
    texts = dict(zip(ids, pieces(ids) if ids else [], strict=True))
    starts = {"prompt": 0, "a": len(prompt), "b": len(prompt)}
    return pd.DataFrame(
        {
            "example": np.full(len(every), example, np.int64),
            "path": pd.Series(np.repeat([*paths], [*map(len, paths.values())]), dtype=str),
            "position": np.concatenate([np.arange(len(found)) + starts[path] for path, found in paths.items()]),
            "token": every,
            "text": pd.Series([texts[token] for token in every.tolist()], dtype=str),
        }
    )
