"""What decodes along two paths say, a sentence each, with how many it is of, its interval and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import between, counted, ends_said, listed, models_on, number, sentence
from kvinterp.reading.results import only

__all__ = ["condition", "p_said", "said_of_behaviour"]

ALPHA = 0.05


def said_of_behaviour(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[str]:
    """What :class:`kvinterp.experiments.behaviour.Behaviour` found, from its tables and the provenance of each model."""
    lines = [
        f"{models_on(provenance)}. Intervals are 95% and n counts examples: the decodes "
        "of one under several seeds are not independent. Other machines add in other orders; every number here is this one's."
    ]
    failed = len(tables["failures"])
    lines += [f"{counted(failed, 'decode')} gave NaN or Inf and stand apart, in failures."] * bool(failed)
    lines += _divergence(tables["divergence"])
    lines += _growth(tables["growth"])
    lines += _accuracy(tables["accuracy"], tables["strategy_pairs"])
    lines += _examples(tables["examples"])
    lines += _nulls(tables["nulls"])
    return [*lines, *_oracle(tables["oracle"])]


def condition(row: Mapping[str, Any]) -> str:
    """A model and strategy."""
    return f"{row['model']}, {row['strategy']}"


def _shares(low: float, high: float) -> str:
    return ends_said(low, high, ", interval {}", "{:.1%}".format)


def p_said(p: float) -> str:
    """A p-value, or that there is none."""
    return "no test" if pd.isna(p) else f"p = {number(p)}"


def _typical(row: Mapping[str, Any]) -> str:
    """The median beside the mean."""
    if pd.isna(row["typical_kl"]):
        return ""
    return f" (median {number(row['typical_kl'])}{ends_said(row['typical_kl_low'], row['typical_kl_high'], ', {}')})"


def _divergence(table: pd.DataFrame) -> Iterator[str]:
    free = only(table, protocol="free").set_index(["model", "strategy"])
    for row in only(table, protocol="matched").to_dict("records"):
        said = f"{condition(row)}: "
        of = f"{counted(row['decodes'], 'decode')} of {counted(row['n'], 'example')}"
        if row["diverged"]:
            ends = _shares(row["low"], row["high"]) or ", too few examples for an interval"
            said += f"{row['diverged']} of {of} flip a token ({row['rate']:.1%}{ends}), "
            said += f"{row['flip_rate']:.2%} of the steps at risk{_shares(row['flip_rate_low'], row['flip_rate_high'])}"
        else:
            said += f"no token flips in {of}, which leaves up to {row['high']:.1%} of decodes possible"
        paper = free.loc[row["model"], row["strategy"]]
        said += f". Mean KL {number(row['mean_kl'])} nats matched{_typical(row)}"
        said += f", {number(paper['mean_kl'])} free{_typical(paper)}"
        said += f"; fed the same, no logit differs by more than {number(row['max_abs_logit'])}, "
        said += f"which allows a KL of at most {number(row['kl_bound'])}"
        if above := int(paper["above_bound"]):
            said += f". The mean KL of {counted(above, 'free decode')} exceeds that bound: after a flip it is of two texts"
        yield said + "."


def _growth(table: pd.DataFrame) -> Iterator[str]:
    known = table.dropna(subset=["low", "high"])
    for protocol, group in known.groupby("protocol", sort=False):
        up, down = int((group["low"] > 0).sum()), int((group["high"] < 0).sum())
        yield (
            f"KL over the steps, {protocol}: the interval of the slope lies above 0 in {up} of "
            f"{counted(len(group), 'condition')}, below in {down}; slopes of {between(list(group['slope']))} nats a step."
        )


def _accuracy(paths: pd.DataFrame, strategies: pd.DataFrame) -> Iterator[str]:
    for row in paths.to_dict("records"):
        yield (
            f"Answers of {condition(row)}: {row['accuracy_a']:.1%} right cached, {row['accuracy_b']:.1%} recomputed, difference "
            f"{number(row['difference'])}{ends_said(row['low'], row['high'])}, right on one path alone {row['only_a']} and "
            f"{row['only_b']}; {row['test']}, {p_said(row['p'])}, n = {row['n']}{_detectable(row)}."
        )
    # The paper compares strategies on one path.
    both = {"of paths": paths, "of strategies on the cached path": only(strategies, path="a")}
    if not len(paths):
        return
    said = []
    for name, table in both.items():
        strong, found = int((table["power"] >= 0.8).sum()), int((table["p_bonferroni"] < ALPHA).sum())
        bh = int((table["p_bh"] < ALPHA).sum())
        said.append(
            f"{counted(len(table), 'comparison')} {name}, {strong} with a power of 80% at the difference seen, {found} below "
            f"{ALPHA} by Bonferroni and {bh} by Benjamini and Hochberg"
        )
    yield sentence("; ".join(said))


def _detectable(row: Mapping[str, Any]) -> str:
    least = row["detectable"]
    return "" if pd.isna(least) else f"; so many would show a difference of {number(least)} with 80%"


def _examples(table: pd.DataFrame) -> Iterator[str]:
    for model, group in table.groupby("model", sort=False):
        counts = group["diverges"].value_counts()
        said = listed([f"{counts.get(name, 0)} {name}" for name in ("always", "sometimes", "never")])
        decodes = listed([str(count) for count in sorted(set(group["decodes"]))])
        yield f"Of {model}'s {counted(len(group), 'example')}, each decoded {decodes} times, {said} flip a token."


def _nulls(table: pd.DataFrame) -> Iterator[str]:
    for null, group in table.groupby("null", sort=False):
        steps, differ, flips = (int(group[name].sum()) for name in ("steps", "differing_steps", "flips"))
        said = f"Null, {null}: logits differ at {differ} of {counted(steps, 'step')}"
        if differ:
            said += f", by {number(group['max_abs_logit'].max())} at most, and {counted(flips, 'chosen token')} with them"
        yield said + "."


def _oracle(table: pd.DataFrame) -> Iterator[str]:
    for model, group in table.groupby("model", sort=False):
        counts = group["nearer"].value_counts()
        yield (
            f"Beside float64, fed the same tokens, {model}'s cached path is nearer in {counts.get('a', 0)} of "
            f"{counted(len(group), 'example')}, the recompute path in {counts.get('b', 0)}, neither in {counts.get('equal', 0)}; "
            f"largest logit errors on average {number(group['error_a'].mean())} and {number(group['error_b'].mean())}."
        )
