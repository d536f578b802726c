"""Comparisons made of chosen numbers, for the tests of what is done with one: no model runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.comparison import COLUMNS, TABLES, Comparison
from kvinterp.data import Prompt
from kvinterp.metrics.massive import SUFFIX

ABOUT: dict[str, Any] = {
    "kvinterp": "0.1.0",
    "torch": "2.0",
    "transformers": "5.0",
    "transformer_lens": "3.0",
    "python": "3.11",
    "device": "a processor",
    "threads": 1,
    "model": "zoo:mistral-mini",
    "architecture": "MistralForCausalLM",
    "kind": "native",
    "attention": "sdpa",
    "dtype": "float16",
    "weights": "0123456789abcdef",
    "kernel_flags": {"allow_tf32_cudnn": True},
    "paths": {"a": "cached", "b": "recompute"},
    "protocol": "matched",
    "strategy": "greedy",
    "seed": 0,
}

CHARTS = ("kl_by_step", "drift_by_layer", "attention_by_head", "kv_by_position")
"""The charts of a comparison in which everything was recorded."""

_POSITION = ("tensor", "layer", "example", "kv_head", "position")


def provenance(**changed: Any) -> dict[str, Any]:
    return {**ABOUT, **changed}


def comparison(
    examples: tuple[int, ...] = (0, 1),
    steps: int = 5,
    size: float = 1e-3,
    flip: int | None = None,
    layers: int = 3,
    heads: int = 2,
    prompt: int = 4,
    seed: int = 0,
    **changed: Any,
) -> Comparison:
    """Step 0 equal, from step 1 on a logit difference of about ``size`` and a KL of about its square; layer 0 equal.

    The numbers of an example depend on the example and the seed alone.
    """
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in ("steps", "examples", "layers", "heads", "kv")}
    for example in examples:
        rng = np.random.default_rng([seed, example])
        for name, frame in zip(tables, _example(example, rng, steps, size, flip, layers, heads, prompt), strict=True):
            tables[name].append(frame)
    joined = {name: pd.concat(frames, ignore_index=True) for name, frames in tables.items()}
    every = joined.pop("kv")
    joined |= {
        "kv_steps": by_step(every).assign(let_go_a=0.0, let_go_b=0.0),
        "kv_positions": by_position(every),
        "kv": every.iloc[:0],
        **_texts(joined["steps"], joined["examples"], heads),
    }
    return Comparison(**joined, failures=failures(), provenance=provenance(**changed))


def _texts(steps: pd.DataFrame, examples: pd.DataFrame, heads: int) -> dict[str, pd.DataFrame]:
    """The tokens of prompts and paths, and the attention rows of each example's last step."""
    tokens, rows = [], []
    for example in examples.to_dict("records"):
        mine, prompt = steps[steps["example"] == example["example"]], int(example["prompt_tokens"])
        paths = {"prompt": [*range(prompt)], "a": [*mine["token_a"]], "b": [*mine["token_b"]]}
        tokens += [
            {"example": example["example"], "path": path, "position": at, "token": token, "text": f" {token}"}
            for path, found in paths.items()
            for at, token in enumerate(found, 0 if path == "prompt" else prompt)
        ]
        last = mine.iloc[-1] if len(mine) else None
        rows += [
            {**{name: last[name] for name in ("example", "step", "after_flip")}, "layer": 1, "head": head, "position": at}
            | {"a": np.float32(0.5 / (at + 1)), "b": np.float32(0.5 / (at + 1) + 1e-4)}
            for head in range(heads)
            for at in range(0 if last is None else prompt + int(last["step"]))
        ]
    return {
        "tokens": pd.DataFrame(tokens, columns=["example", "path", "position", "token", "text"]),
        "attention_rows": pd.DataFrame(rows, columns=[*COLUMNS["attention_rows"]]),
    }


def failures(*examples: int) -> pd.DataFrame:
    rows = [{"example": n, "id": f"p{n}", "message": "path cached: NaN first appeared in layer 1"} for n in examples]
    return pd.DataFrame(rows, columns=["example", "id", "message"]).astype({"example": "int64", "id": str, "message": str})


def failed(example: int, **changed: Any) -> Comparison:
    whole = comparison((example,), **changed)
    empty = {name: getattr(whole, name).iloc[:0] for name in TABLES}
    return Comparison(**empty, failures=failures(example), provenance=whole.provenance)


def prompts(count: int, text: str = "Question: one and one?\nAnswer:") -> list[Prompt]:
    return [Prompt(id=f"p{number}", text=text) for number in range(count)]


def result(made: Comparison, folder: Path = Path("result"), **more: Any) -> Comparison:
    made.prompts, made.folder = more.get("prompts", prompts(2)), folder
    made.settings = {"left_out": more.get("left_out", {})}
    return made


def comparison_page(folder: Path, made: Comparison, **more: Any) -> Path:
    """The page of one comparison, as its command writes it."""
    from kvinterp.commands.compare import Compare
    from kvinterp.commands.running import draw

    return draw(Compare(), result(made, folder, **more), folder / "figures")[-1]


def experiment_page(folder: Path, text: str, rows: int, tables: dict[str, pd.DataFrame] | None = None) -> Path:
    """The page of an experiment with a text wherever one can stand, and a table of some rows."""
    from kvinterp.common.result import Result
    from kvinterp.report.experiment import page_of

    asked = SimpleNamespace(
        question=lambda: f"Measure {text}.\n\nAnd why.",
        sentences=lambda _: [f"{text} is 3.", "It holds for 2 prompts."],
        page_parts=lambda _: [],
    )
    many = pd.DataFrame({"step": range(rows), "kl": 0.5, "word": text, "same": True})
    about = {"model": f"zoo:{text}", "dtype": "float16", "kernel_flags": {"tf32": False}}
    found = Result(tables or {"many": many}, {"provenance": about})
    found.choices = {"prompts": text, "sizes": (1, 2), "device": None}
    page = folder / "report.html"
    page.write_text(page_of(asked, found, [], []))
    return page


def _example(
    example: int, rng: np.random.Generator, steps: int, size: float, flip: int | None, layers: int, heads: int, prompt: int
) -> tuple[pd.DataFrame, ...]:
    index = np.arange(steps)
    noise = size * rng.uniform(0.5, 1.0, steps) * (index > 0)
    token = rng.integers(3, 50, steps)
    other = np.where(index == flip, token + 1, token)
    after = index > flip if flip is not None else np.zeros(steps, bool)
    frame = pd.DataFrame(
        {
            "example": example,
            "step": index,
            "token_a": token,
            "token_b": other,
            "kl": noise**2,
            "js": noise**2 / 4,
            "max_abs_logit": noise,
            "rms_logit": noise / 2,
            "top1_agree": token == other,
            "margin_a": rng.uniform(0.5, 5, steps),
            "margin_b": rng.uniform(0.5, 5, steps),
            "top_probability_difference": noise / 10,
            "flipped": token != other,
            "after_flip": after,
        }
    )
    row = {
        "example": example,
        "id": f"p{example}",
        "prompt_tokens": prompt,
        "steps": steps,
        "flip_index": np.nan if flip is None else float(flip),
        "token_divergence": float(frame["flipped"].mean()),
        "mean_kl": float(frame["kl"].mean()),
        "text_a": f" answer {example}",
        "text_b": f" answer {example}" + (" other" if flip is not None else ""),
    }
    grid = pd.MultiIndex.from_product([index, ["resid_post"], range(layers)], names=["step", "site", "layer"]).to_frame(
        False
    )
    drift = noise[grid["step"]] * grid["layer"].to_numpy()
    residual = grid.assign(example=example, l2=drift, relative_l2=drift, cosine=1.0, cosine_distance=0.0)
    residual = residual.assign(
        **{f"{name}{SUFFIX}": residual[name] for name in ("l2", "relative_l2", "cosine", "cosine_distance")}
    )
    grid = pd.MultiIndex.from_product([index, range(layers), range(heads)], names=["step", "layer", "head"]).to_frame(False)
    pattern = grid.assign(example=example, kl=(noise[grid["step"]] * grid["layer"].to_numpy()) ** 2)
    names = ["step", "tensor", "layer", "kv_head", "position"]
    grid = pd.MultiIndex.from_product([index, ["K", "V"], range(layers), [0], range(prompt + steps)], names=names).to_frame(
        False
    )
    grid = grid[grid["position"] < prompt + grid["step"]]
    error = noise[grid["step"]] * grid["layer"].to_numpy() * (grid["position"] >= prompt).to_numpy()
    kv = grid.assign(example=example, relative_error=error, ulp_mean=error * 1e3, ulp_max=error * 1e4)
    inside = [table.assign(after_flip=after[table["step"]]) for table in (residual, pattern, kv)]
    return frame, pd.DataFrame([row]), *inside


def by_step(every: pd.DataFrame) -> pd.DataFrame:
    """The table ``kv_steps`` of a whole table ``kv``."""
    return _aggregated(every, ["step", *_POSITION[:-1], "after_flip"])


def by_position(every: pd.DataFrame) -> pd.DataFrame:
    """The table ``kv_positions`` of a whole table ``kv``."""
    return _aggregated(every[every["step"] > 0], [*_POSITION, "after_flip"])


def _aggregated(every: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    groups = every.assign(differs=every["relative_error"] != 0).groupby(keys, sort=False)
    made = groups.agg(
        vectors=("relative_error", "size"),
        differing=("differs", "sum"),
        relative_error=("relative_error", "mean"),
        relative_error_max=("relative_error", "max"),
        ulp_mean=("ulp_mean", "mean"),
        ulp_max=("ulp_max", "max"),
    ).reset_index()
    return made.astype({"vectors": float, "differing": float})
