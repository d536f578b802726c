"""Cuts the tables of one example out of its batch's and adds its tokens, their probabilities and
what follows a flip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.comparison.comparison import Comparison


def token_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each row's token under the softmax of its logits, float64; no temperature,
    no cut.

    Args:
        logits: ``[batch, vocab]``.
        tokens: ``[batch]``.
    """
    # Softmax and not a sum of exponentials of one's own: a row's bits do not depend on the batch it
    # is in.
    return torch.softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]


def choices_by_row(chosen: list[Tensor], distances: list[Tensor]) -> list[dict[str, np.ndarray]]:
    """Returns, for each row of the batch, the columns about its choices that go into its table of
    steps.

    Args:
        chosen: Path by path and step by step, how probable the chosen tokens were.
        distances: Likewise how far each choice was from another one; infinite for never.
    """
    probabilities, boundaries = (
        torch.stack([torch.stack(values[path::2], -1) for path in (0, 1)]).cpu().numpy()
        for values in (chosen, distances)
    )
    # No other token could be drawn: there is no distance.
    boundaries = np.where(np.isinf(boundaries), np.nan, boundaries)
    return [
        {f"{name}_{side}": values[path, row] for name, values in (("probability", probabilities), ("boundary", boundaries))
         for path, side in enumerate("ab")}
        for row in range(probabilities.shape[1])
    ]  # fmt: skip


def comparison_of_example(
    example: int,
    name: str,
    prompt: Sequence[int],
    frames: Mapping[str, pd.DataFrame],
    tokens: tuple[np.ndarray, np.ndarray],
    texts: tuple[str, str],
    about: dict[str, Any],
    choices: Mapping[str, np.ndarray],
    pieces: Callable[[Sequence[int]], list[str]] = lambda ids: [*map(str, ids)],
    failure: str = "",
) -> Comparison:
    """Makes the comparison of one example.

    Args:
        example: Its number.
        name: The prompt's id.
        prompt: The prompt's token ids.
        frames: The tables of its batch.
        tokens: The tokens each path chose, as far as both are compared.
        texts: The texts of these tokens.
        about: The comparison's provenance.
        choices: The columns that :func:`choices_by_row` gives for this row, as far as they are
            known.
        pieces: Returns the text of each token alone; by default its number.
        failure: Why the example could not be compared. If it is not empty, the comparison holds
            nothing else.
    """
    if failure:
        prompt, tokens = (), (np.zeros(0, np.int64),) * 2
    count, tables = len(tokens[0]), {}
    for table, frame in frames.items():
        # Steps after the text's end are dropped; sums over steps never included them.
        rows = (frame["example"].to_numpy() == example) & (not failure)
        if "step" in frame:
            rows &= frame["step"].to_numpy() < count
        tables[table] = frame[rows].reset_index(drop=True)
    steps = _steps(tables["steps"], *tokens, choices, about)
    flips, after = (
        steps.index[steps["flipped"]],
        steps["step"].to_numpy()[steps["after_flip"].to_numpy()],
    )
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
    for table, frame in tables.items():
        if "after_flip" not in frame and "step" in frame:
            tables[table] = frame.assign(after_flip=np.isin(frame["step"].to_numpy(), after))
    source = "derived" if "pattern" in about["derived"] else "recorded"
    tables |= {"steps": steps, "heads": tables["heads"].assign(pattern=source)}
    # Empty but typed: when tables are joined, its columns must not turn the others' into objects.
    examples = pd.DataFrame([row]).iloc[: int(not failure)]
    failures = pd.DataFrame([{"example": example, "id": name, "message": failure}]).iloc[
        : int(bool(failure))
    ]
    tables |= {
        "tokens": _token_rows(example, prompt, tokens, pieces),
        "examples": examples,
        "failures": failures,
    }
    return Comparison(**tables, provenance=about)


def _steps(
    steps: pd.DataFrame,
    a: np.ndarray,
    b: np.ndarray,
    choices: Mapping[str, np.ndarray],
    about: Mapping[str, Any],
) -> pd.DataFrame:
    """Adds to the table of steps both paths' tokens, flips, and the columns of
    :func:`choices_by_row` (NaN if unknown).
    """
    steps = steps.sort_values("step", ignore_index=True)
    flipped, unknown = a != b, np.full(len(a), np.nan)
    first = int(flipped.argmax()) if flipped.any() else len(a)
    columns = {"flipped": flipped, "after_flip": np.arange(len(a)) > first}
    for name in ("probability_a", "probability_b", "boundary_a", "boundary_b"):
        columns[name] = choices.get(name, unknown)[: len(a)]
    if about.get("strategy") == "greedy":
        # A greedy choice is as far from another one as its logits' margin.
        columns |= {f"boundary_{side}": steps[f"margin_{side}"].to_numpy() for side in "ab"}
    front = {"example": steps["example"], "step": steps["step"], "token_a": a, "token_b": b}
    return pd.DataFrame(front).assign(
        **{name: steps[name] for name in steps if name not in front}, **columns
    )


def _token_rows(
    example: int,
    prompt: Sequence[int],
    tokens: tuple[np.ndarray, np.ndarray],
    pieces: Callable[[Sequence[int]], list[str]],
) -> pd.DataFrame:
    """The table of tokens: the prompt's and those each path chose, each at the position it has when
    it is fed.
    """
    paths = {"prompt": np.asarray(prompt, np.int64), "a": tokens[0], "b": tokens[1]}
    every = np.concatenate([*paths.values()])
    unique = np.unique(every).astype(np.int64).tolist()
    texts = dict(zip(unique, pieces(unique) if unique else [], strict=True))
    starts = {"prompt": 0, "a": len(prompt), "b": len(prompt)}
    return pd.DataFrame(
        {
            "example": np.full(len(every), example, np.int64),
            "path": pd.Series(np.repeat([*paths], [*map(len, paths.values())]), dtype=str),
            "position": np.concatenate(
                [np.arange(len(ids)) + starts[path] for path, ids in paths.items()]
            ),
            "token": every,
            "text": pd.Series([texts[token] for token in every.tolist()], dtype=str),
        }
    )
