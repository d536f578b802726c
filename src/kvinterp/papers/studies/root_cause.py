"""Run the FP16 paper's root-cause experiments and one on grouped-query attention: a table and a
figure each.

``accumulation`` (experiment 1 there) is the error of one dot product against its length.
``propagation`` (2) rounds one block's output once, everything else in float64, and follows the
error. ``kv-write`` (3) compares K and V of a row computed alone with those of the same row computed
with its prefix. ``ladder`` (5) compares the paths in several precisions and orders of additions,
one change at a time. ``gqa`` plants the same error in one KV head and measures how far it spreads
through the query heads that share it.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.commands.kit import (
    Cell,
    CellResults,
    Chart,
    Charts,
    Finding,
    InputError,
    OfModels,
    Panel,
    Result,
    Rows,
    Tables,
    between,
    counted,
    finding,
    joined,
    listed,
    load_prompts,
    median_of,
    only,
    option,
    used_by,
)
from kvinterp.data import TASKS
from kvinterp.findings import label_of
from kvinterp.models.inputs import encode, encode_all
from kvinterp.papers import root_causes
from kvinterp.papers.behaviour.divergence import conditions
from kvinterp.papers.root_causes import GROWTH

WIDTHS = (64, 128, 256)
"""The widths of a head over which sums are measured, beside those of the models."""
PARTS = ("accumulation", "propagation", "kv-write", "ladder", "gqa")


class RootCause(OfModels):
    """Are FP16 sums taken in another order the cause of the divergence?"""

    part: tuple[str, ...] = option(
        PARTS,
        f"What to run: {', '.join(PARTS)}; may be given several times.",
        show_default="all of them",
        among=PARTS,
    )
    few_prompts: int = option(
        4,
        "For propagation, kv-write and gqa: how many of the prompts to run.",
        min=1,
        only=used_by("part", "propagation", "kv-write", "gqa"),
    )
    ladder_prompts: int = option(
        6, "For ladder: how many of the prompts to run.", min=1, only=used_by("part", "ladder")
    )
    ladder_steps: int = option(
        16,
        "For ladder: the most tokens to decode per prompt.",
        min=1,
        only=used_by("part", "ladder"),
    )
    seeds: int = option(
        1,
        "How many sets of prompts to generate, each with its own seed.",
        min=1,
        only=used_by("part", *PARTS[1:]),
    )

    def check(self) -> None:
        """The sets of prompts too."""
        super().check()
        for seed in range(self.seeds):
            load_prompts(prompts_of_seed(self.prompts, seed))

    # What is run ----------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """A cell a part, set of prompts and model; gqa has one of all models that differ in nothing
        but shared heads.
        """
        models = self.numbered_models()
        widths = sorted({adapter.facts.head_dim for *_, adapter in models} | set(WIDTHS))
        alike = [
            name
            for _, name, adapter in models
            if adapter.facts.width == models[0][2].facts.width and not any(adapter.facts.windows)
        ]
        for _, _, adapter in models if "ladder" in self.part else ():
            encode_all(adapter, self.prompt_list[: self.ladder_prompts], self.ladder_steps)
        cells = [Cell("accumulation-0", self.added_up, {"widths": widths})]
        for seed in range(self.seeds):
            for part in PARTS[1:]:
                groups = (
                    [[name] for name in self.models] if part != "gqa" else [alike] * bool(alike)
                )
                for number, names in enumerate(groups):
                    settings = {"part": part, "models": names, "seed": seed}
                    cells.append(Cell(f"{part}-{number}-{seed}", self.measured, settings))
        return [cell for cell in cells if cell.key.startswith(self.part)]

    def added_up(self, widths: Sequence[int]) -> pd.DataFrame:
        """The sums, which are of drawn numbers: they have seeds of their own, and no prompts."""
        return self._of_seed(root_causes.accumulation_error(head_dims=widths), 0)

    def measured(self, part: str, models: Sequence[str], seed: int) -> pd.DataFrame:
        """The table of one part, on one of the sets of prompts."""
        adapters, prompts = (
            list(map(self.adapter, models)),
            load_prompts(prompts_of_seed(self.prompts, seed)),
        )
        first, few = (
            adapters[0],
            [encode(adapters[0], prompt, 1) for prompt in prompts[: self.few_prompts]],
        )
        if part == "gqa":
            return self._of_seed(root_causes.gqa_spread(adapters, few), seed)
        if part == "ladder":
            table = root_causes.precision_ladder(
                first, prompts[: self.ladder_prompts], max_new_tokens=self.ladder_steps
            )
        else:
            measure = (
                root_causes.propagation if part == "propagation" else root_causes.kv_write_error
            )
            table = measure(first, few)
        return self._of_seed(table.assign(model=first.facts.name), seed)

    def _of_seed(self, table: pd.DataFrame, seed: int) -> pd.DataFrame:
        """A table with the seed, and with numbers of prompts that no other seed's have, where there
        are several sets.
        """
        if self.seeds == 1:
            return table
        numbers = table[table.columns.intersection(["prompt", "example"])] + seed * len(
            self.prompt_list
        )
        return table.assign(**numbers, data_seed=seed)

    def tables(self, results: CellResults) -> Tables:
        """A table a part."""
        tables = {name: joined(results, name.replace("_", "-")) for name in SHOWN}
        return {name: made["table"] for name, made in tables.items() if made}

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """What the ladder found first: it takes the cause away; then what each other found."""
        tables = sorted(_measured(result.tables).items(), key=lambda item: item[0] != "ladder")
        return [line for name, table in tables for line in SHOWN[name][0](table)]

    def rows(self, result: Result) -> Rows:
        """The findings of all parts; of several sets of prompts, how far they lie apart."""
        rows, estimates = _rows(result.tables), collections.defaultdict[Any, list[float]](list)
        by_seed = {name: table for name, table in result.tables.items() if "data_seed" in table}
        for seed in sorted({seed for table in by_seed.values() for seed in table["data_seed"]}):
            for row in _rows(
                {name: only(table, data_seed=seed) for name, table in by_seed.items()}
            ):
                estimates[row["finding"], label_of(row)].append(row["estimate"])
        for row in rows:
            if len(of_seeds := estimates[row["finding"], label_of(row)]) > 1:
                apart = f"each of {len(of_seeds)} sets of prompts: {between(of_seeds)}"
                row["note"] = "; ".join(filter(None, (apart, row["note"])))
        return rows

    def charts(self, result: Result) -> Charts:
        """A chart a part."""
        return {
            f"root_cause_{name}": SHOWN[name][2](table)
            for name, table in _measured(result.tables).items()
        }


def _measured(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables of the parts that were run."""
    return {name: tables[name] for name in SHOWN if len(tables.get(name, ()))}


def _rows(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    return [row for name, table in _measured(tables).items() for row in SHOWN[name][1](table)]


def prompts_of_seed(prompts: str, seed: int) -> str:
    """The text form of generated prompts, drawn with a seed so much further on.

    Raises:
        InputError: They are not generated, so that there is one set of them.
    """
    if not seed:
        return prompts
    match = re.fullmatch(r"(\w+):(\d+)(?::(\d+))?", prompts.strip())
    if match is None or match[1] not in TASKS:
        raise InputError(
            f"seeds was given with prompts {prompts!r}, of which there is one set: give generated ones such as arithmetic:20."
        )
    name, count, first = match.groups()
    return f"{name}:{count}:{int(first or 0) + seed}"


# What each part found -----------------------------------------------------------------------------

ERRORS = {"mean_relative": "the terms' magnitudes", "relative_to_result": "the result"}
"""What the error of a sum is relative to."""
STREAM = {"l2": "absolute L2", "relative_l2": "relative L2"}
SPREAD = {
    "attn_out": "median relative L2 of the layer's attention output",
    "final": "median relative L2 of the last stream",
}


def sums_headline(table: pd.DataFrame) -> list[str]:
    """How the error of the longest sums is beside that of the shortest."""
    ratios = [row["estimate"] for row in sums_rows(table) if row["finding"].endswith("the result")]
    low, high = table["length"].agg(["min", "max"])
    return [
        f"From {low} to {high} positions the error of a sum of values, relative to its result, changes {between(ratios)}-fold "
        "(medians over seeds)."
    ]


def growth_headline(table: pd.DataFrame) -> list[str]:
    """What becomes of layer 0's rounding."""
    rows = growth_rows(table)
    if not rows:
        return ["A model of one layer has nothing behind it: no growth was measured."]
    grown = [
        f"{between([row['estimate'] for row in rows if row['finding'] == _what(name)])} times in {name}"
        for name in STREAM.values()
    ]
    return [
        f"The error of layer 0's output, rounded once, is at the last layer {listed(grown)} what it was."
    ]


def written_headline(table: pd.DataFrame) -> list[str]:
    """Under which kernels K and V differ where they are written."""
    largest = table.groupby("kernels", sort=False)["relative_error"].max()
    differ = [str(name) for name in largest.index[largest > 0]]
    end = (
        f"differ where they are written under {listed(differ)}"
        if differ
        else "are equal under all kernels tried"
    )
    return [f"K and V of a new token, computed alone and with its prefix, {end}."]


def heads_headline(table: pd.DataFrame) -> list[str]:
    """How many query heads one KV head's error reaches."""
    by = table.groupby("query_heads_per_kv_head")["heads_touched"].median()
    reached = listed([f"{heads:g} where {count:g} share it" for count, heads in by.items()])
    return [f"An error in one KV head reaches so many query heads: {reached}."]


def medians(
    table: pd.DataFrame, what: str, column: str, unit: str, *by: str, **options: Any
) -> list[Finding]:
    """The median over units of a column, for each of the values of some others."""
    groups = conditions(table, *by)
    return [
        median_of(what, group[column], group[unit], **labels, **options) for labels, group in groups
    ]


def sums_rows(table: pd.DataFrame) -> list[Finding]:
    """How the error of the value product changes from the shortest length to the longest."""
    values = only(table, product="values")
    low, high = values["length"].agg(["min", "max"])
    rows = []
    for column, to in ERRORS.items():
        what = f"error of a sum of {high} terms over that of {low}, relative to {to}"
        for name, group in values.groupby("accumulate", sort=False):
            by = group.pivot(index="seed", columns="length", values=column)
            rows.append(
                median_of(what, by[high] / by[low], unit="seeds", measure="times", sum_in=name)
            )
    return rows


def sums_chart(table: pd.DataFrame) -> Chart:
    """Error against length, of scores and of values."""
    table = table[table["head_dim"].isna() | (table["head_dim"] == table["head_dim"].min())]
    means = (
        table.groupby(["product", "accumulate", "length"], sort=False)[list(ERRORS)]
        .mean()
        .reset_index()
    )
    names = {name: f"sums kept in {name}" for name in dict.fromkeys(means["accumulate"])}
    panel = functools.partial(
        Panel, means, "length", color="accumulate", names=names, facet="product", xscale="doubling",
        xlabel="sequence length (positions)",
    )  # fmt: skip
    rows = [panel(column, label=f"error relative to\n{to}") for column, to in ERRORS.items()]
    return Chart("Error of one sum against its length", rows)


def growth_rows(table: pd.DataFrame) -> list[Finding]:
    """Growth from layer 0 to the last."""
    last = table["layer"].max()
    grown = only(table, layer=last, source=0) if last else table.iloc[:0]
    return [
        row
        for column, growth in GROWTH.items()
        for row in medians(grown, _what(STREAM[column]), growth, "prompt", "model", measure="times")
    ]


def growth_chart(table: pd.DataFrame) -> Chart:
    """Absolute and relative L2 of the residual stream behind one rounded block."""
    middle = (
        table.groupby(["model", "source", "layer"], sort=False)[list(STREAM)].median().reset_index()
    )
    names = {source: f"rounded in layer {source}" for source in sorted(middle["source"].unique())}
    panel = functools.partial(Panel, middle, "layer", color="source", names=names, facet="model")
    rows = [
        panel(column, label=f"{name} of resid_post\n(median over prompts)")
        for column, name in STREAM.items()
    ]
    return Chart("One rounded block, everything else in float64", rows)


def written_rows(table: pd.DataFrame) -> list[Finding]:
    """The error of each kernel mode."""
    what = "median relative error of K and V, written alone against written with the prefix"
    return medians(table, what, "relative_error", "prompt", "kernels")


def written_chart(table: pd.DataFrame) -> Chart:
    """The error by layer, a line a kernel mode."""
    mean = table.groupby(["tensor", "kernels", "layer"], sort=False)["relative_error"].mean()
    title, label = (
        "K and V of a new token, computed alone and with its prefix",
        "mean relative error",
    )
    panel = Panel(
        mean.reset_index(), "layer", "relative_error", color="kernels", facet="tensor", label=label
    )
    return Chart(title, [panel])


def whose_order(table: pd.DataFrame) -> list[str]:
    """Whether one fixed order of additions leaves a difference where the machine's kernels make
    one.
    """
    compared, failed = table[~table["failed"].astype(bool)], int(table["failed"].sum())
    fixed, native = (
        only(compared, kernels=kernels).groupby("dtype", sort=False)["max_abs_logit"].max()
        for kernels in ("batch_invariant", "native")
    )
    differ = native[native > 0]
    gone = [dtype for dtype, left in fixed.items() if left == 0 and dtype in differ]
    if differ.empty:
        line = "With the machine's kernels the paths gave the same logits in every dtype: no cause can be taken away."
    elif gone:
        # Both add in float32 or wider and round once.
        line = (
            f"One fixed order of additions leaves no difference in {listed(gone)}, where the machine's kernels make one: "
            "the order is the cause here. No kernel tried adds in float16 throughout, so this says nothing of sums kept in "
            "float16."
        )
    else:
        left = (
            "leaves a difference too"
            if (fixed > 0).any()
            else "was tried in no dtype in which they differ"
        )
        line = f"The machine's kernels make a difference in {listed(list(differ.index))}; one fixed order of additions {left}."
    return [line, *([f"{counted(failed, 'run')} could not be compared."] if failed else [])]


def rungs_rows(table: pd.DataFrame) -> list[Finding]:
    """The logit difference on every rung."""
    compared = table[~table["failed"].astype(bool)]
    return medians(
        compared, "median RMS logit difference", "rms_logit", "id", "model", "dtype", "kernels"
    )


def rungs_chart(table: pd.DataFrame) -> Chart:
    """Logit error and KL on every rung."""
    table = table.assign(rung=table["dtype"] + ", " + table["kernels"])
    labels = {
        "rms_logit": "RMS logit difference, a mark a prompt",
        "mean_kl": "mean KL (nats), a mark a prompt",
    }
    rows = [
        Panel(table.dropna(subset=[column]), column, "rung", "dots", color="model", label=label)
        for column, label in labels.items()
    ]
    return Chart("Precision, and the order in which kernels add", rows)


def heads_rows(table: pd.DataFrame) -> list[Finding]:
    """How far the error spreads at each ratio."""
    return [
        finding(
            what, group[column].median(), n=group["prompt"].nunique(), query_heads_per_kv_head=count
        )
        for column, what in {
            "heads_touched": "median query heads that one KV head's error reaches",
            **SPREAD,
        }.items()
        for count, group in table.groupby("query_heads_per_kv_head")
    ]


def heads_chart(table: pd.DataFrame) -> Chart:
    """Query heads reached, and the drift of attention's output and of the last stream."""
    keys = ["tensor", "query_heads_per_kv_head"]
    by = table.groupby(keys)[["share_touched", *SPREAD]].median().reset_index()
    names = {tensor: f"error planted in {tensor}" for tensor in ("K", "V")}
    panel = functools.partial(
        Panel,
        x=keys[1],
        color="tensor",
        names=names,
        xscale="doubling",
        xlabel="query heads a KV head",
    )
    label = "share of the layer's\nquery heads reached"
    drifts = by.melt(keys, list(SPREAD), "quantity", "drift")
    rows = [
        panel(by, y="share_touched", scale="share", label=label),
        panel(drifts, y="drift", facet="quantity", titles=SPREAD, label="median"),
    ]
    return Chart("One KV head's error, against how many query heads share the head", rows)


def _what(name: str) -> str:
    return f"growth of {name} from layer 0, rounded once, to the last layer"


SHOWN: dict[str, tuple[Callable[..., Any], ...]] = {
    "accumulation": (sums_headline, sums_rows, sums_chart),
    "propagation": (growth_headline, growth_rows, growth_chart),
    "kv_write": (written_headline, written_rows, written_chart),
    "ladder": (whose_order, rungs_rows, rungs_chart),
    "gqa": (heads_headline, heads_rows, heads_chart),
}
"""What makes the headline, the findings and the chart of each table."""
