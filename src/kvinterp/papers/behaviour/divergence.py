"""What decodes of two paths say together: how often they part, when, how far, and what it does to
the answers.

Prompts are the independent units: the decodes of one under several seeds, and the steps of one
decode, are not. So intervals come from resampling whole examples, and each ``n`` counts examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.metrics.inference import corrected, mcnemar, rate_of, share_of, sign_flips
from kvinterp.metrics.statistics import typical
from kvinterp.metrics.survival import survival_by_step

DECODE = ["model", "strategy", "seed", "example"]
"""What tells decodes apart."""


def behaviour_tables(decodes: pd.DataFrame, steps: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table that decodes and their steps give.

    Args:
        decodes: As :func:`kvinterp.papers.studies.behaviour.decodes_of` gives them, with the model
            of each.
        steps: The same.
    """
    steps = with_free_steps(decodes, steps)
    return {
        "decodes": decodes,
        "kl_by_step": kl_by_step_of(steps),
        "survival": survival_of(decodes),
        "divergence": divergence_of(decodes, steps),
        "accuracy": accuracy_of(decodes),
    }


def conditions(table: pd.DataFrame, *columns: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows that have some columns in common, and what these hold; in the order in which they
    come.
    """
    for names, group in table.groupby(list(columns), sort=False):
        yield dict(zip(columns, names, strict=True)), group


def with_ends(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """An estimate and its interval, by the names of their columns."""
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def with_free_steps(decodes: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of every decode in both protocols: where no token flips, the free one is the
    matched one to the bit.
    """
    stays = decodes.loc[(decodes["protocol"] == "matched") & ~decodes["diverged"], DECODE]
    same = steps[steps["protocol"] == "matched"].merge(stays, on=DECODE)
    both = pd.concat([steps, same.assign(protocol="free")], ignore_index=True)
    # Conditions in the order in which they were asked for, of both protocols.
    order = both.groupby(["model", "strategy"], sort=False).ngroup()
    return both.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)


# Divergence ---------------------------------------------------------------------------------------


def kl_by_step_of(steps: pd.DataFrame) -> pd.DataFrame:
    """The KL of every step, and how many decodes flip there for the first time.

    Args:
        steps: As :func:`with_free_steps` gives them.

    Returns:
        One row a model, strategy, protocol and step: mean_kl, median_kl over examples with its 95%
        interval (low, high), n_examples, rows, flips (first ones at this step), at_risk (decodes
        that had none before).
    """
    tables = []
    for labels, group in conditions(steps, "model", "strategy", "protocol"):
        by, before = group.groupby("step"), group[~group["after_flip"]].groupby("step")
        table = by.agg(
            mean_kl=("kl", "mean"), n_examples=("example", "nunique"), rows=("kl", "size")
        )
        over = pd.DataFrame(
            [typical(rows["kl"], rows["example"]) for _, rows in by], index=table.index
        )
        table = table.assign(median_kl=over["median"], low=over["low"], high=over["high"])
        counts = before.agg(flips=("flipped", "sum"), at_risk=("flipped", "size"))
        table = table.join(counts.reindex(table.index, fill_value=0)).reset_index()
        tables.append(table.assign(**labels)[[*labels, *table.columns]])
    return pd.concat(tables, ignore_index=True)


def survival_of(decodes: pd.DataFrame) -> pd.DataFrame:
    """How many decodes have not flipped by a step; one that ends without a flip is censored there.

    Returns:
        A row a model, strategy and step at which a decode ended or flipped, see
        :func:`kvinterp.metrics.survival.survival_by_step`.
    """
    # The step of the first flip, or the last step where there is none.
    ended = decodes.assign(time=decodes["flip_index"].fillna(decodes["steps"] - 1))
    tables = [
        survival_by_step(group["time"], group["diverged"]).assign(**labels)
        for labels, group in conditions(ended[ended["protocol"] == "matched"], "model", "strategy")
    ]
    return pd.concat(tables, ignore_index=True)


def divergence_of(decodes: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """How often and how far paths part.

    Args:
        decodes: A row a decode and protocol.
        steps: As :func:`with_free_steps` gives them.

    Returns:
        One row a model, strategy and protocol: decodes, n (examples), diverged, rate, low, high;
        at_risk (steps), flip_rate (a step), flip_rate_low, flip_rate_high; mean_kl (of the decodes'
        means), typical_kl (the median of the examples' means), typical_kl_low, typical_kl_high,
        kl_zeros (examples of exactly 0), mean_kl_before_flip, mean_kl_after_flip, mean_js;
        max_abs_logit (while both were fed the same) and kl_bound, half its square, which no mean of
        these steps exceeds; above_bound, the decodes whose mean exceeds their own.
    """
    keys = ["model", "strategy", "protocol"]
    risk = steps[~steps["after_flip"]].groupby([*keys, "seed", "example"]).size().rename("at_risk")
    rows = []
    for labels, group in conditions(decodes.join(risk, on=[*keys, "seed", "example"]), *keys):
        rate, low, high = _rate(group)
        kl, largest = typical(group["mean_kl"], group["example"]), group["max_abs_logit"].max()
        rows.append(
            labels
            | {
                "decodes": len(group),
                "n": group["example"].nunique(),
                "diverged": group["diverged"].sum(),
            }
            | {"rate": rate, "low": low, "high": high, "at_risk": int(group["at_risk"].sum())}
            | with_ends("flip_rate", *_rate(group, "at_risk"))
            | {
                "mean_kl": group["mean_kl"].mean(),
                **with_ends("typical_kl", kl.median, *kl.interval),
                "kl_zeros": kl.zeros,
            }
            | {
                name: group[name].mean()
                for name in ("mean_kl_before_flip", "mean_kl_after_flip", "mean_js")
            }
            | {"max_abs_logit": largest, "kl_bound": largest**2 / 2}
            | {"above_bound": (group["mean_kl"] > group["kl_bound"]).sum()}
        )
    return pd.DataFrame(rows)


def _rate(group: pd.DataFrame, trials_column: str = "") -> tuple[float, float, float]:
    """Flips a decode, or a step at risk, with the interval; with no flip at all what so many
    examples leave possible.
    """
    flips = group["diverged"].to_numpy(float)
    trials = group[trials_column].to_numpy(float) if trials_column else np.ones(len(group))
    rate, n = flips.sum() / trials.sum(), group["example"].nunique()
    if flips.sum() == 0:
        bound = share_of(np.zeros(n)).high
        # A chance of h a step leaves a decode of k steps without a flip with (1 - h) ** k.
        return rate, 0.0, 1 - (1 - bound) ** (1 / trials.mean())
    alone = not trials_column and n == len(group)
    ends = share_of(flips) if alone else rate_of(flips, group["example"], trials)
    return rate, ends.low, ends.high


# Answers ------------------------------------------------------------------------------------------


def accuracy_of(decodes: pd.DataFrame) -> pd.DataFrame:
    """How many answers of each path are right, each writing its own text, and the difference.

    McNemar's test where each example is decoded once, else sign flips by example.

    Returns:
        One row a model and strategy: decodes, n (examples), accuracy_a, accuracy_b, difference (a
        less b), low, high, only_a, only_b (decodes), test, p, p_bonferroni, p_bh (over the rows of
        this table). No row where no answer is known.
    """
    rows = []
    answered = decodes[
        (decodes["protocol"] == "free")
        & decodes["correct_a"].notna()
        & decodes["correct_b"].notna()
    ]
    for labels, group in conditions(answered, "model", "strategy"):
        a, b = (group[f"correct_{side}"].to_numpy(bool) for side in "ab")
        test = (
            mcnemar(a, b)
            if group["example"].is_unique
            else sign_flips(a - b.astype(float), group["example"])
        )
        # No spread is no proof that there is none: as often as this may a difference be that so
        #     many examples do not show.
        bound = share_of(np.zeros(test.n)).high
        low, high = (test.low, test.high) if (a != b).any() else (-bound, bound)
        counts = len(group), a.mean(), b.mean(), (a & ~b).sum(), (b & ~a).sum()
        rows.append((*labels.values(), *counts, test.n, test.effect, low, high, test.name, test.p))
    columns = ["model", "strategy", "decodes", "accuracy_a", "accuracy_b", "only_a", "only_b"]
    table = pd.DataFrame(rows, columns=[*columns, "n", "difference", "low", "high", "test", "p"])
    return table.assign(
        **{f"p_{name}": corrected(table["p"], name) for name in ("bonferroni", "bh")}
    )
