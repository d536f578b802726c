"""Measure how much noise in K and V flips a token, given how sure the model was, and which steps
cannot flip.

Noise of several sizes is added to the cache while both paths get the tokens that the clean path
chooses. A step flips if the two paths' greedy tokens differ. Flips are counted by the size of the
noise and by the margin (the clean path's largest logit minus its second largest); at the threshold
of a margin, half of its steps flip. Also measured: whether the margin and the noise of the logits
alone predict the chance of a flip, a certificate (a margin above twice the largest change of a
logit cannot flip), and how far the model's own rounding, cached against recompute, lies below the
threshold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.commands.kit import (
    Cell,
    CellResults,
    Chart,
    Charts,
    InputError,
    OfModel,
    Panel,
    Result,
    Rows,
    Tables,
    compare_examples,
    counted,
    finding,
    finding_from,
    joined,
    metrics,
    only,
    option,
    shared,
)
from kvinterp.common.numbers import short
from kvinterp.metrics.statistics import quiet

NOISE = {
    "normal": "normal(0,{size:g},seed={seed})",
    "uniform": "uniform(-{size:g},{size:g},seed={seed})",
}
"""The policies of noise by name, each of one size: a standard deviation, or half a width."""
EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
"""Bounds of the predicted chances that are counted together."""
RESAMPLES = 300


class Susceptibility(OfModel):
    """How much noise in K and V flips a token?"""

    SUMMED = ("thresholds", "certificates")
    NOTED = ("noise", "max_new_tokens")

    prompts: str = shared("prompts", "arithmetic:8")
    noise: str = option(
        "normal",
        "Multiplicative noise: normal (sizes are standard deviations) or uniform (sizes are half widths).",
        among=tuple(NOISE),
    )
    sizes: str = option("0.03,0.1,0.3,0.5,1,2,4", "Sizes of the noise, with commas.")
    bins: int = option(
        4, "How many classes of margin to form, with equally many steps in each.", min=1
    )
    seeds: int = option(3, "How many times to draw the noise.", min=2)
    max_new_tokens: int = shared("max_new_tokens", 24, min=2)

    def cells(self) -> list[Cell]:
        """A cell a size and seed of the noise, and one of the model's own rounding."""
        cells = [Cell("rounding", self.measured, {"b": "recompute"})]
        for size, seed in itertools.product(_sizes(self.sizes), range(self.seeds)):
            policy = NOISE[self.noise].format(size=size, seed=seed)
            settings = {"b": f"cached+{policy}", "size": size, "seed": seed}
            cells.append(Cell(f"size-{size:g}-{seed}".replace(".", "_"), self.measured, settings))
        return cells

    def measured(self, b: str, size: float = 0.0, seed: int = 0) -> pd.DataFrame:
        """Every decode step of the cached path beside another one, fed the same tokens."""
        options = self.choices("max_new_tokens")
        steps = compare_examples(self.adapter(), self.prompt_list, "cached", b, **options).steps
        # Step 0 is the prefill's: it reads keys and values as they were computed.
        decoded = steps[steps["step"] > 0].rename(columns={"margin_a": "margin"})
        decoded = decoded[
            ["example", "step", "margin", "rms_logit", "max_abs_logit", "kl", "top1_agree"]
        ]
        return decoded.assign(flip=~decoded.pop("top1_agree").astype(bool), size=size, seed=seed)

    def tables(self, results: CellResults) -> Tables:
        """Rates, thresholds, predictions and certificates of all steps."""
        steps = predicted(binned(joined(results)["table"], self.bins))
        noisy = steps[steps["size"] > 0]
        return {
            "steps": steps,
            "rates": flip_rates_of(noisy),
            "thresholds": thresholds_of(noisy),
            "calibration": calibration_of(noisy),
            "certificates": certificates_of(steps),
        }

    def summary(self, tables: Tables) -> dict[str, Any]:
        """How well flips are foretold, and the model's own rounding."""
        steps = tables["steps"]
        rounding = only(steps, size=0)
        about, differ = _about(rounding), rounding["max_abs_logit"] > 0
        return super().summary(tables) | {
            **self.choices("noise", "seeds"),
            "prompts": int(steps["example"].nunique()),
            "positions": len(steps[["example", "step"]].drop_duplicates()),
            "brier": brier_of(steps[steps["size"] > 0]),
            "rounding": {name: about[name] for name in ("steps", "flips")}
            | {"differ": int(differ.sum()), "rms_logit": rounding["rms_logit"].mean()},
        }

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How much noise flips half of the tokens, and how far below it the model's own rounding
        is.
        """
        summary, whole = result.summary, result.tables["thresholds"].iloc[0]
        size = "standard deviation" if summary["noise"] == "normal" else "half width"
        at = f"Half of the tokens flip at multiplicative noise of a {size} of {short(whole['threshold'], 2)} in K and V"
        if whole["why"]:
            at = f"Where half of the tokens flip is {whole['why']} tried, of multiplicative noise"
        lines = [
            f"{at} ({summary['positions']} steps, {counted(summary['seeds'], 'draw')} of the noise each)."
        ]
        own = summary["rounding"]["rms_logit"]
        if own and not whole["why"]:
            times = whole["rms_logit"] / own
            lines.append(
                f"The model's own rounding, cached against recompute, moves the logits {times:.3g} times less."
            )
        wrong = int(result.tables["certificates"]["flips_certified"].sum())
        if wrong:
            lines.append(
                f"{counted(wrong, 'step')} certified not to flip did, which cannot be: report it."
            )
        return lines

    def rows(self, result: Result) -> Rows:
        """Thresholds by class of margin, certified steps, how well flips are foretold, and the
        model's own rounding.
        """
        for row in result.tables["thresholds"].to_dict("records"):
            label = (
                "all"
                if row["bin"] == -1
                else f"margin {short(row['margin_low'])} to {short(row['margin_high'])}"
            )
            yield finding_from(row, "noise in K and V at which half of the steps flip", "threshold", n=row["prompts"],
                               note=f"{row['why']} tried" if row["why"] else "", steps=label)  # fmt: skip
        certain, summary = result.tables["certificates"].sum(), result.summary
        own = summary["rounding"]
        # Read again, what was NaN is null.
        brier = {
            name: np.nan if number is None else number for name, number in summary["brier"].items()
        }
        scale = (
            "no step flips, or all do"
            if np.isnan(brier["skill"])
            else "1 would be perfect, 0 is no better than the rate"
        )
        of_steps = functools.partial(finding, n=own["steps"], unit="steps")
        yield finding("steps certified not to flip", certain["certified"] / certain["steps"], n=certain["steps"], unit="steps",
                      measure="%", note="their margin exceeds twice the largest change of a logit")  # fmt: skip
        yield finding_from(brier, "skill of the chance foretold from margin and logit noise", "skill", n=summary["prompts"],
                           note=scale)  # fmt: skip
        yield of_steps(
            "flips by the model's own rounding", own["flips"] / max(own["steps"], 1), measure="%"
        )
        yield of_steps("RMS of the logits' change by the model's own rounding", own["rms_logit"])

    def charts(self, result: Result) -> Charts:
        """Flip rate against the size of the noise, and the observed rate against the chance
        foretold.
        """
        rates = result.tables["rates"]
        names = {number: f"margin {short(line['margin_low'].min())} to {short(line['margin_high'].max())} logits"
                 for number, line in rates.groupby("bin")} | {-1: "all steps"}  # fmt: skip
        label = "share of steps that flip\n(95% interval)"
        return {"susceptibility": Chart("How much noise in K and V flips a token, and whether that was to be expected", [
            Panel(rates, "size", "rate", color="bin", names=names, xscale="log", scale="share", level=0.5, label=label,
                  xlabel="size of the noise in K and V"),
            Panel(result.tables["calibration"], "predicted", "observed", "points", xscale="share", scale="share", level="equal",
                  xlabel="chance foretold from margin and logit noise; dashed: as foretold", label=label),
        ])}  # fmt: skip


def _sizes(text: str) -> list[float]:
    """The sizes of the noise, the smallest first.

    Raises:
        InputError: One is no number of that range, or there are fewer than three different ones.
    """
    try:
        sizes = sorted({float(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 3 or not all(0 < size <= 1000 for size in sizes):
        raise InputError(
            f"sizes {text!r} were given: expected three or more different numbers above 0, none above 1000, as in 0.01,0.1,1."
        )
    return sizes


# What the steps say -------------------------------------------------------------------------------


def binned(steps: pd.DataFrame, bins: int) -> pd.DataFrame:
    """The steps with the class of their margin: ``bin``, from the least sure, and its bounds.

    Args:
        steps: Columns example, step, margin, size, seed, ...
        bins: How many classes, of as many positions each; fewer where margins are equal.
    """
    positions = steps.groupby(["example", "step"])["margin"].first()
    edges = np.unique(np.quantile(positions, np.linspace(0, 1, bins + 1)))
    edges = edges if len(edges) > 1 else edges.repeat(2)
    number = np.digitize(steps["margin"], edges[1:-1])
    return steps.assign(bin=number, margin_low=edges[number], margin_high=edges[number + 1])


def predicted(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps with the chance of a flip that follows from margin and logit noise: ``predicted``.

    Were the errors of the two highest logits independent and normal with the logits' root mean
    square error s, the margin would be overturned with probability Phi(-margin / (s sqrt 2)). s is
    that of the other draws of the noise at this step, so that nothing is predicted from itself; NaN
    with one draw alone.
    """
    squares = steps["rms_logit"] ** 2
    group = squares.groupby([steps[name] for name in ("example", "step", "size")])
    others = (group.transform("sum") - squares).clip(lower=0) / (
        group.transform("count") - 1
    ).replace(0, np.nan)
    # Without noise the margin stays, and one of 0 is as good as overturned half of the time.
    tops = (-steps["margin"] / np.sqrt(2 * others)).mask((others == 0) & (steps["margin"] == 0), 0)
    return steps.assign(predicted=stats.norm.cdf(tops))


def flip_rates_of(steps: pd.DataFrame) -> pd.DataFrame:
    """How often a token flips, by size of the noise and class of margin.

    Returns:
        One row a size and class, and of all classes (bin -1): steps, prompts, flips, rate, its 95%
        interval (low, high; see :func:`kvinterp.metrics.rate_of`), rms_logit (the logits' mean root
        mean square error), margin_low, margin_high.
    """
    rows = []
    for number, part in _classes(steps):
        for size, group in part.groupby("size"):
            rates = {
                **_about(group),
                **_rate(group, "rate"),
                "rms_logit": group["rms_logit"].mean(),
            }
            rows.append({"bin": number, "size": size, **rates})
    return pd.DataFrame(rows)


def thresholds_of(steps: pd.DataFrame) -> pd.DataFrame:
    """The size of the noise at which half of the steps flip, by class of margin, from a logistic
    regression on its logarithm.

    Returns:
        One row a class, and of all (bin -1): threshold with its 95% interval (low, high) from
        resampling whole prompts; NaN where it is not between the sizes that were tried, and then
        ``why`` says on which side. rms_logit is the logits' mean error there.
    """
    rows = []
    for number, part in _classes(steps):
        columns = [part[name].to_numpy(float) for name in ("size", "flip")]
        by_size, threshold = part.groupby("size"), _half(*columns)
        sizes = by_size["rms_logit"].mean().clip(lower=1e-30)
        numbers = dict.fromkeys(("threshold", "low", "high", "rms_logit"), np.nan)
        why = (
            "below the smallest size"
            if by_size["flip"].mean().iloc[0] >= 0.5
            else "above the largest size"
        )
        if sizes.index[0] <= threshold <= sizes.index[-1]:
            ends = metrics.clustered_interval(
                _half, part["example"].to_numpy(), *columns, resamples=RESAMPLES
            )
            level = np.exp(np.interp(np.log(threshold), np.log(sizes.index), np.log(sizes)))
            numbers, why = {"threshold": threshold, **ends._asdict(), "rms_logit": level}, ""
        rows.append({"bin": number, **_about(part), **numbers, "why": why})
    return pd.DataFrame(rows)


def _about(steps: pd.DataFrame) -> dict[str, Any]:
    """The bounds of the margin of some steps, how many there are, of how many prompts, and how many
    flip.
    """
    bounds = {"margin_low": steps["margin_low"].min(), "margin_high": steps["margin_high"].max()}
    return bounds | {
        "steps": len(steps),
        "prompts": steps["example"].nunique(),
        "flips": int(steps["flip"].sum()),
    }


def _rate(steps: pd.DataFrame, name: str) -> dict[str, float]:
    return metrics.rate_of(steps["flip"].astype(float), steps["example"]).named(name)


def _half(size: Any, flip: Any) -> float:
    """Where a logistic regression of flips on the logarithm of the size crosses a half; NaN where
    it does not rise.
    """
    import statsmodels.api as sm

    counts = (
        pd.DataFrame({"size": size, "flip": flip}).groupby("size")["flip"].agg(["sum", "count"])
    )
    flips, stays = counts["sum"], counts["count"] - counts["sum"]
    if not (flips.any() and stays.any()):
        return np.nan
    # Half a flip and half a stay are added to each size: separated sizes have a finite threshold.
    design = sm.add_constant(np.log(counts.index.to_numpy()), has_constant="add")
    # It warns of sizes that are separated whole, which the halves have made finite.
    with quiet():
        model = sm.GLM(
            np.column_stack([flips + 0.5, stays + 0.5]), design, family=sm.families.Binomial()
        )
        offset, slope = model.fit().params
    return np.exp(-offset / slope) if slope > 0 else np.nan


def calibration_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Predicted chances of a flip beside how often it came.

    Returns:
        One row a class of predictions that has steps: at_least, below, steps, prompts, predicted
        (mean), observed, and its 95% interval (low, high; see :func:`kvinterp.metrics.rate_of`).
    """
    known = steps.dropna(subset=["predicted"])
    rows = [
        {"at_least": EDGES[number], "below": EDGES[number + 1], "predicted": group["predicted"].mean()}
        | _about(group) | _rate(group, "observed")
        for number, group in known.groupby(np.digitize(known["predicted"], EDGES[1:-1]))
    ]  # fmt: skip
    names = ["at_least", "below", "steps", "prompts", "predicted", "observed", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def brier_of(steps: pd.DataFrame) -> dict[str, float]:
    """The mean squared error of the predicted chances, beside that of predicting the overall rate
    for every step.

    Returns:
        brier, of_the_rate, skill (1 less their ratio: above 0 where margin and noise tell more than
        the rate) and its 95% interval (low, high) from resampling whole prompts.
    """
    known = steps.dropna(subset=["predicted"])
    chance, flip = known["predicted"].to_numpy(float), known["flip"].to_numpy(float)
    ends = metrics.clustered_interval(
        _skill, known["example"].to_numpy(), chance, flip, resamples=RESAMPLES
    )
    brier, rate = np.mean((chance - flip) ** 2), np.var(flip)
    return {"brier": brier, "of_the_rate": rate, "skill": _skill(chance, flip), **ends._asdict()}


def _skill(chance: Any, flip: Any) -> float:
    rate = np.var(flip)
    return 1 - np.mean((chance - flip) ** 2) / rate if rate > 0 else np.nan


def certificates_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Counts the steps that certainly cannot flip, and those of them that did.

    No logit changed by more than ``max_abs_logit``, so that two can come closer by twice that at
    most: a larger margin stays.

    Returns:
        One row a size of the noise, 0 for the model's own rounding: steps, certified, flips,
        flips_certified.
    """
    certain = steps["margin"] > 2 * steps["max_abs_logit"]
    marked = steps.assign(certified=certain, flips_certified=steps["flip"] & certain).groupby(
        "size"
    )
    return marked.agg(
        steps=("flip", "size"),
        certified=("certified", "sum"),
        flips=("flip", "sum"),
        flips_certified=("flips_certified", "sum"),
    ).reset_index()


def _classes(steps: pd.DataFrame) -> Sequence[tuple[int, pd.DataFrame]]:
    return [(-1, steps), *steps.groupby("bin")]
