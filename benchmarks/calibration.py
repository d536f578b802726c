"""How often intervals hold the truth, on numbers as they really come: measured tables, resampled.

``python benchmarks/calibration.py --measure`` compares two models of the zoo and, where it was fetched, a real one, over many
prompts, and keeps what it measured a prompt and step. ``python benchmarks/calibration.py`` takes the prompts of each as a whole
population, draws studies of 5, 12 and 40 prompts from it, and counts how often an interval holds the population's value.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from kept import keep
from rich.console import Console
from scipy import stats

from kvinterp import metrics
from kvinterp.metrics.statistics import mean_error
from kvinterp.models.provenance import machine

HERE = Path(__file__).parent
SIZES = (5, 12, 40)
MODELS = {
    "zoo:gqa2-mini": ("float16", "arithmetic:60", 24),
    "zoo:llama64-mini": ("bfloat16", "arithmetic:60", 24),
    "real:smollm2-135m": ("bfloat16", "natural:48", 24),
}
"""Each with its dtype, prompts and steps."""
RESAMPLES = 400
"""Of the intervals that resample on their own."""
BEGINS, ENDS = "<!-- calibration -->\n", "<!-- end of calibration -->"


def measure(model: str) -> dict[str, list[Any]]:
    """What is measured of a model, a row a prompt and step, as columns."""
    import torch

    from kvinterp.commands.compare import Compare
    from kvinterp.commands.patch import Patch

    torch.set_num_threads(1)
    dtype, prompts, steps = MODELS[model]
    told: dict[str, Any] = {"model": model, "dtype": dtype, "prompts": prompts, "device": "cpu", "max_new_tokens": steps}
    recovered = None
    with tempfile.TemporaryDirectory() as folder:
        found = Compare(**told, stop="length").run(Path(folder) / "compare", progress="none", figures="none")
        if model.startswith("zoo:"):  # Thirty layers of a real one take hours.
            patched = Patch(**told | {"max_new_tokens": 6}, sweep="cumulative", direction="into-cached", distance="l2")
            recovered = patched.run(Path(folder) / "patch", progress="none").tables["recovery"]
    rows = found.tables["steps"][
        ["example", "step", "kl", "max_abs_logit", "margin_a", "flipped", "top_probability_difference"]
    ]
    rows = rows.rename(columns={"top_probability_difference": "probability"})
    kv, layers = found.tables["kv_steps"], found.tables["layers"]
    for tensor, part in kv.groupby("tensor"):
        error = mean_error(part, ["example", "step"]).rename(f"error_{tensor}")
        rows = rows.merge(error.reset_index(), how="left")
    last = layers[(layers["site"] == "resid_post") & (layers["layer"] == layers["layer"].max())]
    rows = rows.merge(last[["example", "step", "relative_l2"]], how="left")
    if recovered is not None:
        deepest = recovered[recovered["layer"] == recovered["layer"].max()].set_index("example")["recovery"]
        rows["recovery"] = rows["example"].map(deepest.astype(float))
    return {name: [_short(value) for value in column] for name, column in rows.items()}


def _short(value: Any) -> Any:
    return None if pd.isna(value) else int(value) if float(value).is_integer() else float(f"{value:.4g}")


# Resampling ------------------------------------------------------------------------------------------------------------

Study = Callable[[pd.DataFrame], Any]


def intervals() -> dict[str, tuple[str, Study]]:
    """What there is an interval of: the column it needs, and what gives its estimate and ends of a population or a sample."""

    def median(column: str) -> Study:
        return lambda rows: _of(metrics.typical(rows[column], rows["prompt"]), "median")

    def correlation(rows: pd.DataFrame) -> Any:
        by = rows.groupby("prompt").mean()
        return _of(metrics.correlation(by["kl"], by["margin_a"], method="spearman", resamples=RESAMPLES), "effect")

    def within(rows: pd.DataFrame) -> Any:
        own = [part["kl"].corr(part["margin_a"], method="spearman") for _, part in rows.groupby("prompt")]
        return _of(metrics.typical(own), "median")

    def thirds(rows: pd.DataFrame) -> Any:
        return _of(metrics.terciles(rows["margin_a"], rows["max_abs_logit"], rows["prompt"], resamples=RESAMPLES), "effect")

    def flips(rows: pd.DataFrame) -> Any:
        return _of(metrics.rate_of(rows["flipped"], rows["prompt"]), "effect")

    return {
        "median KL of a prompt": ("kl", median("kl")),
        "median largest logit difference": ("max_abs_logit", median("max_abs_logit")),
        "median relative error of K": ("error_K", median("error_K")),
        "median relative L2 of the last residual stream": ("relative_l2", median("relative_l2")),
        "median recovery": ("recovery", median("recovery")),
        "median rank correlation of KL and margin over a prompt's steps": ("kl", within),
        "rank correlation of KL and margin over prompts (resampled)": ("kl", correlation),
        "ratio of the outer thirds by margin (resampled)": ("max_abs_logit", thirds),
        "flips a step (Korn and Graubard)": ("flipped", flips),
        "share of prompts that flip (Clopper and Pearson)": (
            "flipped",
            lambda rows: _of(metrics.share_of(rows.groupby("prompt")["flipped"].max()), "effect"),
        ),
        "mean probability moved": (
            "probability",
            lambda rows: _of(metrics.mean_of(rows["probability"], rows["prompt"]), "effect"),
        ),
        "for comparison: mean KL, as means are held": (
            "kl",
            lambda rows: _of(metrics.mean_of(rows["kl"], rows["prompt"]), "effect"),
        ),
        "for comparison: geometric mean of KL, as means are held": (
            "kl",
            lambda rows: _of(metrics.mean_of(np.log(rows.groupby("prompt")["kl"].mean())), "effect"),
        ),
        "for comparison: mean KL, percentile bootstrap": (
            "kl",
            lambda rows: _boot(rows.groupby("prompt")["kl"].mean().to_numpy()),
        ),
    }


def _of(found: Any, name: str) -> tuple[float, float, float]:
    return getattr(found, name), found.low, found.high


def _boot(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.mean()), *stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile"
    ).confidence_interval


def studies(population: pd.DataFrame, size: int, repeats: int) -> Iterator[pd.DataFrame]:
    """Studies of so many prompts, drawn with all their steps from a population; every prompt drawn counts as one."""
    groups = [part for _, part in population.groupby("prompt")]
    draw = np.random.default_rng(size)
    for _ in range(repeats):
        chosen = draw.integers(len(groups), size=size)
        yield pd.concat([groups[number].assign(prompt=place) for place, number in enumerate(chosen)], ignore_index=True)


def calibrated(model: str, rows: pd.DataFrame, repeats: int, only: str = "") -> Iterator[dict[str, Any]]:
    """A row an interval and size of study."""
    for name, (column, study) in intervals().items():
        if only not in name or column not in rows or rows[column].isna().all():
            continue
        known = rows.dropna(subset=[column])
        truth = study(known)[0]
        for size in SIZES:
            ends = np.array([study(sample)[1:] for sample in studies(known, size, repeats)], float)
            given = np.isfinite(ends).all(1)
            held = (ends[given, 0] <= truth) & (truth <= ends[given, 1])
            numbers = {
                "truth": truth,
                "n": size,
                "intervals": int(given.sum()),
                "held": float(held.mean()) if given.any() else None,
            }
            yield {"model": model, "name": name, **numbers}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table in Markdown: shares of intervals that hold, a model after another."""
    sizes = " | ".join(f"n = {size}" for size in SIZES)
    yield from ("", f"| interval | {sizes} |", "|---" * (1 + len(SIZES)) + "|")
    for name, part in pd.DataFrame(rows).groupby("name", sort=False):
        cells = [", ".join("–" if pd.isna(held) else f"{held:.1%}" for held in of["held"]) for _, of in part.groupby("n")]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def write(rows: list[dict[str, Any]], page: Path) -> None:
    """Puts the tables in their place on a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGINS)
    _, after = rest.split(ENDS)
    page.write_text(before + BEGINS + "\n".join(lines(rows)) + ENDS + after, encoding="utf-8")


def main() -> None:
    """Measures, or resamples what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", default="", help="intervals with this in their name; the others are not written")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--tables", type=Path, default=HERE / "results" / "measured.json")
    parser.add_argument("--from", dest="kept", type=Path, help="write the page again from what was kept")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if given.measure:
        given.tables.write_text(json.dumps({model: measure(model) for model in MODELS}) + "\n")
        return
    if given.kept:
        write(json.loads(given.kept.read_text())["rows"], HERE.parent / "docs" / "statistics.md")
        return
    tables = {model: pd.DataFrame(columns) for model, columns in json.loads(given.tables.read_text()).items()}
    rows = []
    for model, table in tables.items():
        rows += calibrated(model, table.rename(columns={"example": "prompt"}).astype(float), given.repeats, given.only)
    Console(width=200).print("\n".join(lines(rows)))
    if given.only:
        return
    write(rows, HERE.parent / "docs" / "statistics.md")
    keep(given.out, "calibration", {"provenance": {**machine(), "repeats": given.repeats}, "rows": rows})


if __name__ == "__main__":
    main()
