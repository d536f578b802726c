"""What a policy costs in behaviour: scores as percent of control, with intervals and tests paired
by prompt.

Repeats of one prompt are not independent, so each prompt is one observation: the mean over its
repeats. Intervals resample prompts, tests turn the sign of a prompt's difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.papers.behaviour.divergence import with_ends

CONTROL, AGAIN = "control", "control again"
"""No policy, and no policy with other draws of the sampling: what differs between them is the floor
of every difference.
"""
_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Measure:
    """A score of behaviour.

    Attributes:
        meaning: What it is.
        tasks: The rows of the examples that it is of.
        column: What it is the mean of.
        unit: ``"share"``, or ``"nats"`` per token, told as their exponential.
    """

    meaning: str
    tasks: tuple[str, ...]
    column: str
    unit: str = "share"

    def in_unit(self, mean: Any) -> Any:
        """The score of a mean."""
        return np.exp(mean) if self.unit == "nats" else mean


METRICS: dict[str, Measure] = {
    "instructions": Measure("instructions followed", ("instructions",), "correct"),
    "next_token": Measure("tenth words guessed", ("strings",), "correct"),
    "perplexity": Measure("perplexity of reference answers", ("texts",), "nats", unit="nats"),
    "problems": Measure("problems solved", ("problems",), "correct"),
    "loops": Measure("texts that end in a repetition", ("instructions", "problems"), "loop"),
    "outside": Measure("words outside the task's", ("instructions", "problems"), "outside"),
}


def observed(examples: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One observation a prompt: its mean over repeats, a column for every policy and reading.

    Args:
        examples: policy, reading, repeat, task, prompt, and the columns of the metrics.
        metric: One of :data:`METRICS`.

    Returns:
        Rows by task and prompt.
    """
    measure = METRICS[metric]
    chosen = examples[examples["task"].isin(measure.tasks)].dropna(subset=[measure.column])
    scores = chosen.astype({measure.column: float}).groupby(
        ["task", "prompt", "policy", "reading"]
    )[measure.column]
    table = scores.mean().unstack(["policy", "reading"])
    order = dict.fromkeys(zip(chosen["policy"], chosen["reading"], strict=True))
    return table[list(order)]


def scored(examples: pd.DataFrame) -> pd.DataFrame:
    """Every policy's scores beside the control's.

    Args:
        examples: As for :func:`observed`; the control's reading is that of its one run, and counts
            for each.

    Returns:
        One row a policy, reading and metric: value, control, percent (of control; NaN where that is
        0) with percent_low and percent_high, difference with its ends (of perplexity in its own
        unit), prompts, repeats, p (of the difference, by turning signs) and q (Benjamini and
        Hochberg over the policies of a reading and metric).
    """
    rows = []
    repeats = examples.groupby(["policy", "reading"])["repeat"].nunique()
    for metric, measure in METRICS.items():
        table = observed(examples, metric)
        (control,) = [column for column in table.columns if column[0] == CONTROL]
        for column in (column for column in table.columns if column != control):
            mine, others = table[[column, control]].dropna().to_numpy().T
            if len(mine):
                policy, reading = column
                head = {
                    "policy": policy,
                    "reading": reading,
                    "metric": metric,
                    "repeats": repeats[column],
                }
                rows.append(head | _compared(mine, others, measure))
    table = pd.DataFrame(rows)
    real = table["policy"] != AGAIN
    tested = table[real & table["p"].notna()]
    table["q"] = tested.groupby(["reading", "metric"])["p"].transform(stats.false_discovery_control)
    return table


def contrasted(
    examples: pd.DataFrame, contrasts: Mapping[str, Mapping[tuple[str, str], float]]
) -> pd.DataFrame:
    """Weighted sums of policies' scores, prompt by prompt.

    Args:
        examples: As for :func:`observed`.
        contrasts: By name the weights of policies and readings.

    Returns:
        One row a contrast and metric: difference (of perplexity that of its logarithm) with low,
            high, p and prompts.
    """
    rows = []
    for metric in METRICS:
        table = observed(examples, metric)
        for name, weights in contrasts.items():
            if not set(weights) <= set(table.columns):
                continue
            differences = sum(weight * table[column] for column, weight in weights.items())
            differing = pd.Series(differences).dropna().to_numpy()
            if len(differing):
                ends, p = _interval(np.mean, differing), metrics.sign_flips(differing).p
                rows.append((name, metric, differing.mean(), *ends, p, len(differing)))
    return pd.DataFrame(
        rows, columns=["contrast", "metric", "difference", "low", "high", "p", "prompts"]
    )


def _compared(mine: np.ndarray, control: np.ndarray, measure: Measure) -> dict[str, Any]:
    def ratio(a: np.ndarray, b: np.ndarray) -> Any:
        return 100 * measure.in_unit(a.mean()) / measure.in_unit(b.mean())

    def difference(a: np.ndarray, b: np.ndarray) -> Any:
        return measure.in_unit(a.mean()) - measure.in_unit(b.mean())

    value, of_control = (measure.in_unit(scores.mean()) for scores in (mine, control))
    percent = (
        (ratio(mine, control), *_interval(ratio, mine, control)) if of_control else (np.nan,) * 3
    )
    return {
        "value": value,
        "control": of_control,
        **with_ends("percent", *percent),
        "difference": difference(mine, control),
        **_interval(difference, mine, control)._asdict(),
        "prompts": len(mine),
        "p": metrics.sign_flips(mine - control).p,
    }


def _interval(statistic: Callable[..., Any], *columns: np.ndarray) -> metrics.Interval:
    """Over prompts, which are resampled."""
    return metrics.clustered_interval(
        statistic, np.arange(len(columns[0])), *columns, resamples=_RESAMPLES
    )
