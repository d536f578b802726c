"""The tables of one example: cut out of a batch's, with its tokens and with what comes after its flip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.comparison.comparison import Comparison

DECIDED = ("probability_a", "probability_b", "boundary_a", "boundary_b")
"""The columns of the steps that say what decided a token."""


def of_example(
    example: int,
    name: str,
    prompt: Sequence[int],
    frames: Mapping[str, pd.DataFrame],
    tokens: tuple[np.ndarray, np.ndarray],
    texts: tuple[str, str],
    about: dict[str, Any],
    decided: Mapping[str, np.ndarray] | None = None,
    pieces: Callable[[Sequence[int]], list[str]] | None = None,
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
        decided: What decided the tokens: columns of :class:`kvinterp.comparison.choices.Choices`; unknown for None.
        pieces: Gives the text of each token alone; token ids are their own text for None.
    """
    mine = _mine(frames, example, len(tokens[0]))
    mine["tokens"] = _token_rows(example, prompt, tokens, pieces or (lambda ids: [*map(str, ids)]))
    steps = _with_tokens(mine["steps"], *tokens)
    steps = steps.assign(**_decided(steps, decided or {}, about))
    row = _example_row(example, name, len(prompt), steps, {"text_a": texts[0], "text_b": texts[1]})
    return _made(mine, steps, pd.DataFrame([row]), _no_failures(), about)


def failed(example: int, name: str, message: str, frames: Mapping[str, pd.DataFrame], about: dict[str, Any]) -> Comparison:
    """The comparison of an example that could not be compared: nothing but the message."""
    empty = {table: frame.iloc[:0] for table, frame in frames.items()}
    none = np.zeros(0, np.int64), np.zeros(0, np.int64)
    empty["tokens"] = _token_rows(example, [], none, lambda _: [])
    steps = _with_tokens(empty["steps"], *none)
    steps = steps.assign(**_decided(steps, {}, about))
    # Empty but typed: joined to others, its columns must not turn theirs into objects.
    examples = pd.DataFrame([_example_row(0, "", 0, steps, {"text_a": "", "text_b": ""})]).iloc[:0]
    failure = pd.DataFrame([{"example": example, "id": name, "message": message}])
    return _made(empty, steps, examples, failure, about)


def _mine(frames: Mapping[str, pd.DataFrame], example: int, count: int) -> dict[str, pd.DataFrame]:
    """An example's rows of every table, none of a step after its end; what is summed over steps was not given any."""
    mine = {}
    for table, frame in frames.items():
        rows = frame["example"].to_numpy() == example
        if "step" in frame:
            rows &= frame["step"].to_numpy() < count
        mine[table] = frame[rows].reset_index(drop=True)
    return mine


def _made(
    mine: Mapping[str, pd.DataFrame],
    steps: pd.DataFrame,
    examples: pd.DataFrame,
    failures: pd.DataFrame,
    about: dict[str, Any],
) -> Comparison:
    after = steps["step"].to_numpy()[steps["after_flip"].to_numpy()]
    told = {
        name: frame if "after_flip" in frame or "step" not in frame else _with_flip(frame, after)
        for name, frame in mine.items()
    }
    heads = _with_source(told["heads"], about)
    return Comparison(**{**told, "steps": steps, "heads": heads}, examples=examples, failures=failures, provenance=about)


def _with_tokens(steps: pd.DataFrame, a: np.ndarray, b: np.ndarray) -> pd.DataFrame:
    steps = steps.sort_values("step", ignore_index=True)
    flipped = a != b
    first = int(flipped.argmax()) if flipped.any() else len(a)
    extra = {"token_a": a, "token_b": b, "flipped": flipped, "after_flip": np.arange(len(a)) > first}
    steps = steps.assign(**extra)
    front = ["example", "step", "token_a", "token_b"]
    return steps[front + [c for c in steps.columns if c not in front]]


def _decided(steps: pd.DataFrame, decided: Mapping[str, np.ndarray], about: dict[str, Any]) -> dict[str, np.ndarray]:
    """What decided the tokens, NaN where it is not known; a greedy choice is as far from another one as its logits' margin."""
    unknown = np.full(len(steps), np.nan)
    found = {name: decided.get(name, unknown)[: len(steps)] for name in DECIDED}
    if about.get("strategy") == "greedy":
        found |= {f"boundary_{side}": steps[f"margin_{side}"].to_numpy() for side in "ab"}
    return found


def _token_rows(
    example: int,
    prompt: Sequence[int],
    chosen: tuple[np.ndarray, np.ndarray],
    pieces: Callable[[Sequence[int]], list[str]],
) -> pd.DataFrame:
    """The table of tokens: the prompt's, and those that each path chose, at the position that each has if it is fed."""
    paths = {"prompt": np.asarray(prompt, np.int64), "a": chosen[0], "b": chosen[1]}
    ids = np.unique(np.concatenate([*paths.values()])).astype(np.int64).tolist()
    texts = dict(zip(ids, pieces(ids), strict=True))
    starts = {"prompt": 0, "a": len(prompt), "b": len(prompt)}
    return pd.DataFrame(
        {
            "example": np.full(sum(map(len, paths.values())), example, np.int64),
            "path": pd.Series(np.repeat([*paths], [*map(len, paths.values())]), dtype=str),
            "position": np.concatenate([np.arange(len(found)) + starts[path] for path, found in paths.items()]),
            "token": np.concatenate([*paths.values()]),
            "text": pd.Series([texts[token] for found in paths.values() for token in found.tolist()], dtype=str),
        }
    )


def _with_flip(frame: pd.DataFrame, after: np.ndarray) -> pd.DataFrame:
    """The table of one example with whether each row is of a step after its flip."""
    return frame.assign(after_flip=np.isin(frame["step"].to_numpy(), after))


def _with_source(heads: pd.DataFrame, about: dict[str, Any]) -> pd.DataFrame:
    """The table of patterns with where they are from: recorded, or derived beside a kernel that shows none."""
    return heads.assign(pattern="derived" if "pattern" in about["derived"] else "recorded")


def _example_row(example: int, name: str, prompt_tokens: int, steps: pd.DataFrame, texts: dict[str, str]) -> dict[str, Any]:
    flips = steps.index[steps["flipped"]]
    return {
        "example": example,
        "id": name,
        "prompt_tokens": prompt_tokens,
        "steps": len(steps),
        "flip_index": float(flips[0]) if len(flips) else np.nan,
        "token_divergence": float(steps["flipped"].mean()),
        "mean_kl": float(steps["kl"].mean()),
        "mean_kl_before_flip": float(steps.loc[~steps["after_flip"], "kl"].mean()),
        "mean_kl_after_flip": float(steps.loc[steps["after_flip"], "kl"].mean()),
        "max_kl": float(steps["kl"].max()),
        "max_abs_logit": float(steps["max_abs_logit"].max()),
        "smallest_margin": float(steps["margin_a"].min()),
        **texts,
    }


def _no_failures() -> pd.DataFrame:
    return pd.DataFrame({"example": np.zeros(0, np.int64), "id": pd.Series(dtype=str), "message": pd.Series(dtype=str)})
