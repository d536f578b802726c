"""Measure what is normal: how far apart the logits of correct models are, by architecture, dtype, length and call plan.

Each model decodes random tokens with its cache, and the same tokens are recomputed. The model's row in norms.csv holds
the median and the largest relative logit difference over the steps. The table that comes with the package was made this
way. KVINTERP_NORMS can name a table of your own; an audit places its model among the rows of both. That place is no
verdict: whether a difference is rounding or a bug is for the audit to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from kvinterp.common.result import Result
from kvinterp.errors import InputError
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import Experiment, Parts, Rows, Tables
from kvinterp.study.experiments.options import argument, option, shared
from kvinterp.study.findings import median_of

if TYPE_CHECKING:
    from kvinterp.models import Adapter

TINY = "tiny:"
PROMPTS = 2
GROUP = ["architecture", "dtype", "length", "plan"]


@dataclasses.dataclass(frozen=True)
class Norms(Experiment):
    """How far apart are the two paths of models like this one, as a rule?"""

    TABLES: ClassVar = ("norms", "quantiles")
    FILES: ClassVar = ("norms.csv",)
    UNIT: ClassVar = "models"

    models: tuple[str, ...] = argument(
        ("zoo:gqa2-mini",),
        "zoo:NAME, checkpoint folders or hub ids; in a checkout also tiny:NAME, small random models of the benchmark.",
    )
    dtypes: str = option("bfloat16,float16,float32", "Dtypes to measure, with commas.")
    lengths: tuple[int, ...] = option((16, 64), "Prompt lengths, with commas.", example="16,64")
    calls: str = option("", "Call plans to measure besides plain decoding, such as padded(left,5).")
    steps: int = option(8, "How many tokens to decode after each prompt.", min=2)
    add: Path | None = option(None, "An earlier norms.csv, whose rows are kept beside the new ones.")
    seed: int = option(0, "Seed that draws the tokens.")
    device: str | None = shared("device")

    def check(self) -> None:
        """Dtypes, lengths, plans and the file to add too."""
        from kvinterp.auditing.audit import checked_lengths
        from kvinterp.auditing.called import plans_of
        from kvinterp.auditing.norms import read_norms
        from kvinterp.models import dtype_named
        from kvinterp.models.load import device_named

        super().check()
        device_named(self.device)
        if not self.models:
            raise InputError("the list of models is empty: give at least one.")
        for dtype in self._dtypes():
            dtype_named(dtype)
        checked_lengths(self.lengths, self.steps)
        plans_of(self.calls)
        if self.add is not None:
            read_norms(self.add)

    def _dtypes(self) -> list[str]:
        return [name.strip() for name in self.dtypes.split(",")]

    def named(self, name: str | None = None) -> dict[str, Any]:
        """A model in the first of the dtypes."""
        return {"loader": f"{__name__}:subject", "name": str(name), "dtype": self._dtypes()[0], "device": self.device}

    def check_reached(self) -> None:
        """Nothing: what is on a hub is asked for where it is loaded."""

    def cells(self) -> list[Cell]:
        """A cell a model."""
        from kvinterp.auditing.called import check_plans, plans_of

        plans = plans_of(self.calls)
        for adapter in self.adapters():
            check_plans(adapter, plans)
        given = {"dtypes": self._dtypes(), "lengths": list(self.lengths), "plans": ["", *plans], "steps": self.steps}
        return [
            Cell(f"norms-{n}", f"{__name__}:measured", {"model": self.named(name), **given, "seed": self.seed}, name)
            for n, name in enumerate(dict.fromkeys(self.models))
        ]

    def reduce(self, made: Parts) -> Result:
        """The rows, those that were added, and their quantiles."""
        from kvinterp.auditing.norms import read_norms
        from kvinterp.models.provenance import machine

        rows = [joined(made)["table"], *([] if self.add is None else [read_norms(self.add)])]
        table = pd.concat(rows, ignore_index=True)
        tables = {"norms": table, "quantiles": quantiles_of(table)}
        summary = {"models": int(table["model"].nunique()), "provenance": machine()}
        return Result(tables, summary, {"norms.csv": table.to_csv(index=False, float_format="%.3g")})

    def headline(self, result: Result) -> list[str]:
        """How many models and ways of running, and how far they spread."""
        table = result.tables["norms"]
        low, high = table["median"].min(), table["median"].max()
        return [
            f"{table['model'].nunique()} models in {len(result.tables['quantiles'])} ways of running: the median relative logit "
            f"difference of a model's steps is {low:.1e} to {high:.1e}."
        ]

    def rows(self, tables: Tables) -> Rows:
        """The median over models of each way of running."""
        what = "relative logit difference of a model, median over its steps"
        return [
            median_of(
                what, group["median"], unit="models", **{name: str(value) for name, value in zip(GROUP, key, strict=True)}
            )
            for key, group in tables["norms"].groupby(GROUP)
        ]


def quantiles_of(table: pd.DataFrame) -> pd.DataFrame:
    """Quantiles over models of the median relative logit difference.

    Returns:
        One row an architecture, dtype, length and plan: n (models), then q10, q50 and q90, each with the exact 95% interval of
        order statistics (``q50_low``, ``q50_high``; NaN where so few models have none).
    """
    from scipy import stats

    rows = []
    for key, group in table.groupby(GROUP):
        values = group["median"].to_numpy(float)
        row: dict[str, Any] = {**dict(zip(GROUP, key, strict=True)), "n": len(values)}
        for q in (0.1, 0.5, 0.9):
            ends = stats.quantile_test(values, p=q).confidence_interval(0.95)
            row |= {
                f"q{q * 100:.0f}": np.quantile(values, q),
                f"q{q * 100:.0f}_low": ends.low,
                f"q{q * 100:.0f}_high": ends.high,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def measured(
    model: Mapping[str, Any], dtypes: list[str], lengths: list[int], plans: list[str], steps: int, seed: int
) -> pd.DataFrame:
    """The rows of one model: one a dtype, length and plan."""
    import torch

    from kvinterp.auditing.blocks import evaluating, prompts_for
    from kvinterp.auditing.called import decoded
    from kvinterp.auditing.values import difference
    from kvinterp.models import dtype_named
    from kvinterp.models.provenance import machine
    from kvinterp.models.threads import own_threads
    from kvinterp.paths import Cached, Recompute
    from kvinterp.paths.calls import call_named

    adapter, rows = loaded(model), []
    here = machine(adapter.device)
    about = {
        "device": f"{adapter.device.type} {here['device']} {here['cpu_capability']}",
        "versions": f"kvinterp {here['kvinterp']} torch {here['torch']} transformers {here['transformers']}",
    }
    for name in dtypes:
        dtype: Any = dtype_named(name)
        twin = adapter if dtype == adapter.dtype else adapter.cast(dtype)
        with evaluating(twin), own_threads(twin), torch.no_grad():
            for length in lengths:
                found: dict[str, list[float]] = {plan: [] for plan in plans}
                for prompt in prompts_for(twin, PROMPTS, length + steps, seed):
                    tokens = torch.tensor([list(prompt)], device=twin.device)
                    theirs = decoded(twin, Recompute(), tokens, length)[0]
                    for plan in plans:
                        mine = decoded(twin, Cached(call=call_named(plan) if plan else None), tokens, length)[0]
                        # The prompt's own row is no decode step.
                        found[plan] += [difference(mine[0, at], theirs[0, at]) for at in range(1, steps + 1)]
                for plan, sizes in found.items():
                    of = {**of_model(twin), "dtype": name, "plan": plan or "cached", "length": length, "steps": len(sizes)}
                    of |= {"median": float(np.median(sizes)), "largest": max(sizes)}
                    rows.append({"model": str(model["name"]), **of, **about})
    from kvinterp.auditing.norms import COLUMNS

    return pd.DataFrame(rows)[list(COLUMNS)]


def of_model(adapter: Adapter) -> dict[str, Any]:
    """What of a model decides which others are like it."""
    facts = adapter.facts
    return {"architecture": facts.architecture, "layers": facts.layers, "width": facts.width}


def subject(name: str, dtype: str, device: str | None) -> Adapter:
    """A model by its name; ``tiny:NAME`` is a clean one of the bank of :mod:`kvinterp.study.experiments.bench_bugs`.

    Raises:
        InputError: There is none of that name.
    """
    from kvinterp.models import dtype_named, load_model, wrap
    from kvinterp.models.load import device_named

    if not name.startswith(TINY):
        return load_model(name, kind="native", dtype=dtype, device=device)
    from kvinterp.common.checks import check_known
    from kvinterp.study.experiments.bench_bugs import clean_models

    found = clean_models()
    check_known("small random model", name.removeprefix(TINY), found)
    model = found[name.removeprefix(TINY)].build()
    return wrap(model.to(device=device_named(device), dtype=dtype_named(dtype)), name=name)
