"""Put two saved results of one command side by side: how each was made, what each found, and which tokens flip in only one.

A and B are folders that kvinterp wrote. Findings are matched by name and by what they describe. Prompts that are in both
results are compared pairwise: for each quantity you get the median of B minus A over prompts, with its interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.common.numbers import counted, ends_said, listed
from kvinterp.common.result import Result, flat
from kvinterp.errors import InputError
from kvinterp.study.cells import Cell
from kvinterp.study.experiments.base import Charts, Experiment, Parts, Rows, Tables
from kvinterp.study.experiments.options import argument
from kvinterp.study.findings import Chart, Panel, finding, findings_of
from kvinterp.study.findings.rows import bare, median_of, place, value
from kvinterp.study.results import records

EQUAL, OUTSIDE, WITHIN, OPEN = "equal", "outside each other's interval", "within an interval", "no interval to tell by"
ONLY = ("only in A", "only in B")
MEASURES = {
    "kl": ("KL", "nats"),
    "max_abs_logit": ("largest logit difference of a step", "logits"),
    "total": ("L2 of the logits' difference", "logits"),
    "recovery": ("recovery", "%"),
    "largest": ("largest logit difference of a step", "logits"),
}
"""What tables hold of each prompt: the column, what it is called, and its unit of measure."""
LABELS = ("path", "pair", "unembedding", "site", "sweep", "direction", "step_set", "distance", "layer", "head", "block")
"""Columns that say of what a row of such a table is."""
_NAMED, _LINES = 6, 12
"""So many prompts or choices are named in a line, and so many findings of one measure drawn."""


@dataclasses.dataclass(frozen=True)
class CompareRuns(Experiment):
    """What changed between two results?"""

    TABLES: ClassVar = ("differences", "beside", "by_prompt", "flips")

    first: Path = argument(Path(), "A: a folder that kvinterp wrote.", metavar="A")
    second: Path = argument(Path(), "B: a folder of the same command.", metavar="B")

    def chosen(self) -> dict[str, Any]:
        """The two folders."""
        return {"first": str(self.first), "second": str(self.second)}

    def asked(self) -> dict[str, Any]:
        """With the digests of what they hold: a result that was made anew is another."""
        return {**super().asked(), "held": [_digests(folder) for folder in (self.first, self.second)]}

    def check(self) -> None:
        """The two folders too."""
        super().check()
        self._both()

    def cells(self) -> list[Cell]:
        """None: reading two folders takes no time."""
        return []

    def reduce(self, made: Parts) -> Result:
        """Both results side by side."""
        a, b = self._both()
        pairs = _pairs(a, b)
        tables = {
            "differences": differences_of(_made(a), _made(b)),
            "beside": beside_of(_findings(a), _findings(b)),
            **({} if pairs is None else {"by_prompt": by_prompt_of(a.tables, b.tables, *pairs)}),
            **({} if pairs is None else {"flips": flips_of(a.tables, b.tables, *pairs)}),
        }
        tables = {name: table for name, table in tables.items() if len(table)}
        of_both = None if pairs is None else len(set(pairs[0].values()) & set(pairs[1].values()))
        summary = {
            "command": a.VERB,
            "prompts_of_both": of_both,
            "differences": records(tables.get("differences", pd.DataFrame())),
            "provenance": {**_models("A", a), **_models("B", b)},
        }
        return Result(tables, summary)

    def _both(self) -> tuple[Any, Any]:
        a, b = _read(self.first), _read(self.second)
        if a.VERB != b.VERB:
            raise InputError(
                f"folder {str(self.first)!r} holds a result of {a.VERB} and {str(self.second)!r} one of {b.VERB}: expected two "
                "results of one command; give another folder."
            )
        return a, b

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How the findings lie to each other, and what differs in how the two were made."""
        beside, flips, differ = (result.tables.get(name) for name in ("beside", "flips", "differences"))
        said = f"The two results of {result.summary['command']} have no finding in common"
        if beside is not None and not beside["reading"].isin(ONLY).all():
            counts = beside["reading"].value_counts()
            forms = {**_FORMS, **dict.fromkeys(ONLY, "")}
            parts = [f"{counts[name]} {form or name}" for name, form in forms.items() if name in counts]
            said = f"{counted(len(beside), 'finding')} of A and B: {listed(parts)}"
        if flips is not None:
            by = flips["change"].value_counts()
            pairs = counted(len(flips), "pair")
            said += f"; flips of {pairs} of one prompt: {by.get('gained', 0)} in B only, {by.get('lost', 0)} in A only"
        elif result.summary["prompts_of_both"] == 0:
            said += "; no prompt is in both"
        names = [] if differ is None else [f"{row.what} ({row.a}; {row.b})" for row in differ.head(2).itertuples()]
        more = 0 if differ is None else len(differ) - len(names)
        rest = [counted(more, "more thing")] if more else []
        made = f"They differ in {listed([*names, *rest])}" if names else "They were chosen and made alike"
        return [f"{said}.", f"{made}."]

    def rows(self, tables: Tables) -> Rows:
        """Prompt by prompt: the median change of what was measured, and the flips that one result has alone."""
        rows = []
        if (table := tables.get("by_prompt")) is not None:
            labels = [name for name in table.columns if name in ("quantity", "measure", *LABELS)]
            for key, own in table.groupby(labels, sort=False, dropna=False):
                of = dict(zip(labels, key, strict=True))
                what, measure = of.pop("quantity"), of.pop("measure")
                change = own["b"] - own["a"]
                note = f"larger in B for {(change > 0).sum()}, in A for {(change < 0).sum()}"
                rows.append(
                    median_of(f"median change of a prompt's {what}, B less A", change, measure=measure, note=note, **of)
                )
        if (flips := tables.get("flips")) is not None:
            labels = [name for name in flips.columns if name in LABELS]
            for key, own in flips.groupby(labels, sort=False) if labels else [((), flips)]:
                for change, which in (("gained", "B"), ("lost", "A")):
                    hit = own["change"] == change
                    rate, ids = metrics.share_of(hit.to_numpy()), list(own.loc[hit, "id"])
                    note = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
                    of = dict(zip(labels, key, strict=True))
                    what = f"prompts that flip in {which} only"
                    rows.append(finding(what, rate.effect, (rate.low, rate.high), len(own), measure="%", note=note, **of))
        return rows

    def charts(self, result: Result) -> Charts:
        """The findings of both with their intervals, those that changed most plainly first; and prompt against prompt."""
        found: Charts = {}
        if (beside := result.tables.get("beside")) is not None:
            order = list(_FORMS)
            both = beside[beside["reading"].isin(order)].dropna(subset=["estimate_a", "estimate_b"])
            both = both.sort_values("reading", key=lambda each: each.map(order.index), kind="stable")
            panels = []
            for measure, own in both.groupby("measure", sort=False):
                top = own.head(_LINES).assign(line=lambda t: (t["of"] + ": ").where(t["of"] != "", "") + t["finding"])
                sides = [top.rename(columns={f"{n}_{s}": n for n in _NUMBERS}).assign(run=s.upper()) for s in "ab"]
                long = pd.concat([side[["line", "run", *_NUMBERS]] for side in sides])
                label = f"in {measure or 'its own unit'}, with 95% intervals" + f", {_LINES} of {len(own)}" * (
                    len(own) > _LINES
                )
                scale = "zero" if (long["estimate"] >= 0).all() else "linear"
                panels.append(Panel(long, "estimate", "line", "dots", color="run", label=label, scale=scale))
            if panels:
                found["compare_runs"] = Chart("What A and B found", panels)
        if (table := result.tables.get("by_prompt")) is not None:
            # Of places only the first: a cloud for each would say less than their medians.
            one = table.drop_duplicates(["quantity", "id"])
            panel = Panel(one, "a", "b", "points", facet="quantity", label="B", xlabel="A", xscale="linear", scale="linear")
            found["compare_runs_by_prompt"] = Chart("Each prompt in A and in B", [panel])
        return found

    def lead(self, result: Result) -> list[Any]:
        """What differs in how they were made, and the findings beside each other."""
        from kvinterp.study.report.page import Column, Table, opened

        parts: list[Any] = []
        if (differ := result.tables.get("differences")) is not None:
            head = [Column("what differs"), Column("in A", "text"), Column("in B", "text")]
            parts.append(Table(head, differ.to_numpy(str).tolist(), name="differences"))
        if (beside := result.tables.get("beside")) is not None:
            head = [Column("finding", "text"), Column("of", "text"), Column("A"), Column("B"), Column("reading", "text")]
            rows = [
                [row["finding"], row["of"], *(_side(row, side) for side in "ab"), row["reading"]]
                for row in beside.sort_values("reading", key=lambda each: each == EQUAL, kind="stable").to_dict("records")
            ]
            parts += opened(Table(head, rows, name="beside", look="cards"), _LINES, "findings")
        return parts


_NUMBERS = ("estimate", "low", "high", "n")
_FORMS = {
    OUTSIDE: OUTSIDE,
    WITHIN: "within an interval of the other",
    OPEN: "different without an interval to tell by",
    EQUAL: EQUAL,
}
"""How two findings lie to each other, what is told first first."""


def _side(row: Mapping[str, Any], side: str) -> str:
    """An estimate with its interval and n."""
    if row["reading"] == ONLY["ba".index(side)]:
        return "–"
    ends = ends_said(row[f"low_{side}"], row[f"high_{side}"], " ({})", lambda end: bare(dict(row), end))
    return f"{value(dict(row), row[f'estimate_{side}'])}{ends}, n = {row[f'n_{side}']:g}"


# Reading ---------------------------------------------------------------------------------------------------------------


def _digests(folder: Path) -> Any:
    """The digests of what a folder holds; what holds no result is said when it is read."""
    from kvinterp.common.files import SUMMARY, is_file, read_sealed, told
    from kvinterp.study.results import read_summary

    with told(folder):
        if is_file(folder / SUMMARY):
            return read_summary(folder).get("sha256")
        return read_sealed(folder / "verdict.json").get("sha256") if is_file(folder / "verdict.json") else None


def _read(folder: Path) -> Any:
    """A result with its findings among its tables."""
    from kvinterp.study.experiments.keeping import keeper_of, load

    found = load(folder)
    if not isinstance(found, Result):
        raise InputError(
            f"folder {str(folder)!r} holds a trace, which has no findings: give the folder of a command's result."
        )
    return found if found.VERB == "audit" else keeper_of(found).judged(found)


def _about(result: Result) -> dict[str, Any]:
    about = result.written()[1].get("provenance")
    return flat(about) if isinstance(about, Mapping) else {}


def _models(side: str, result: Result) -> dict[str, Any]:
    """What each model of a result was run with, by a name of its own."""
    about = _about(result)
    if all(isinstance(each, Mapping) for each in about.values()):
        return {f"{side}, {name}": each for name, each in about.items()}
    return {side: about}


def _made(result: Result) -> dict[str, Any]:
    """What was chosen, and what made it."""
    choices = {name: given for name, given in result.choices.items() if name != "verb"}
    summary = result.written()[1]
    ended = {"interrupted": "yes"} if summary.get("interrupted") else {}
    said = {"verdict": summary["verdict"]} if "verdict" in summary else {}
    return {**said, **ended, **choices, "prompts in it": result.settings.get("prompts"), **_about(result)}


def _findings(result: Result) -> pd.DataFrame:
    if result.VERB == "audit":
        return findings_of(_of_audit(result.tables))
    return result.tables.get("findings", findings_of([]))


def _of_audit(tables: Tables) -> Iterator[dict[str, Any]]:
    """How far apart the logits are in each precision, and the error of every check that was made."""
    for row in tables["rungs"].to_dict("records"):
        for name in ("max_abs_logit", "max_kl", "bitwise_equal_steps"):
            yield finding(name.replace("_", " "), row[name], n=row["steps"], unit="steps", rung=row["rung"])
    for row in tables["checks"].to_dict("records"):
        yield finding("passes", float(row["status"] == "passed"), n=1, unit="checks", check=row["name"])


def _pairs(a: Any, b: Any) -> tuple[dict[int, str], dict[int, str]] | None:
    """Of each result its prompts by their number, each as a line that holds all of it; None where they are not known."""
    from kvinterp.study.results import prompt_lines

    held = []
    for result in (a, b):
        kept = getattr(result, "prompts", ())
        digest, names = result.settings.get("prompts"), {number: prompt_lines([each]) for number, each in enumerate(kept)}
        if not names and isinstance(digest, Mapping):
            names = {number: f"{digest['blake2']} {number}" for number in range(digest["count"])}
        held.append(names)
    return (held[0], held[1]) if all(held) else None


# Side by side ----------------------------------------------------------------------------------------------------------


def differences_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> pd.DataFrame:
    """What was chosen, or made two results, and is not the same: columns what, a and b, all texts."""
    from kvinterp.study.report.experiment import flattened, said

    one, other = (flattened({name: said(value) if isinstance(value, list | tuple) else value for name, value in each.items()})
                  for each in (a, b))  # fmt: skip
    rows = [(name, one.get(name, "–"), other.get(name, "–")) for name in dict.fromkeys([*one, *other])]
    return pd.DataFrame([row for row in rows if row[1] != row[2]], columns=["what", "a", "b"])


def beside_of(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """The findings of both, joined by name, measure and what they are of.

    Args:
        a: Findings, as :func:`kvinterp.study.findings.findings_of` makes them.
        b: Those of the other result.

    Returns:
        finding, of, measure; estimate, low, high and n of both; and reading: one of equal, outside each other's interval (each
        estimate lies outside the other's), within an interval, no interval to tell by, only in A, only in B.
    """
    single = all("model" in each and each["model"].nunique() == 1 for each in (a, b))
    keys, sides = ["finding", "of", "measure", "nth"], []
    for side, each in zip("ab", (a, b), strict=True):
        # Of one model each, which the choices name: its findings are those of the other's.
        rows = (each.drop(columns="model") if single else each).to_dict("records")
        table = each[["finding", "measure", *_NUMBERS]].assign(of=[place(row) for row in rows])
        table["nth"] = table.groupby(keys[:3]).cumcount()
        sides.append(table.rename(columns={name: f"{name}_{side}" for name in _NUMBERS}).assign(**{f"in_{side}": 1.0}))
    both = pd.concat([sides[0].merge(sides[1], "left", keys), sides[1].merge(sides[0][keys], "left", keys, indicator=True)])
    both = both[both.pop("_merge") != "both"]
    both["reading"] = [_reading(row) for row in both.to_dict("records")]
    numbers = [f"{name}_{side}" for side in "ab" for name in _NUMBERS]
    return both[["finding", "of", "measure", *numbers, "reading"]]


def _reading(row: Mapping[str, Any]) -> str:
    for side, only in zip("ba", ONLY, strict=True):
        if pd.isna(row[f"in_{side}"]):
            return only
    a, b = row["estimate_a"], row["estimate_b"]
    if a == b or (pd.isna(a) and pd.isna(b)):
        return EQUAL
    if np.isnan([a, b, *(row[f"{end}_{side}"] for end in ("low", "high") for side in "ab")]).any():
        return OPEN
    return WITHIN if row["low_b"] <= a <= row["high_b"] or row["low_a"] <= b <= row["high_a"] else OUTSIDE


def by_prompt_of(
    a: Mapping[str, Any], b: Mapping[str, Any], of_a: Mapping[int, str], of_b: Mapping[int, str]
) -> pd.DataFrame:
    """What was measured of each prompt that both have: quantity, measure, labels, id, a and b, the means over its rows.

    Args:
        a: The tables of one result; of them the first that holds something of :data:`MEASURES` for each example is read.
        b: Those of the other.
        of_a: The prompts of the one by their number.
        of_b: Those of the other.
    """
    for name, table in a.items():
        quantities = [column for column in MEASURES if column in table and column in b.get(name, ())]
        if quantities and "example" in table and "example" in b[name]:
            break
    else:
        return pd.DataFrame()
    # One that is the same on every row of both says nothing.
    varied = {label: pd.concat([each[name].get(label, pd.Series()) for each in (a, b)]).nunique() for label in LABELS}
    labels = [label for label in LABELS if label in table and label in b[name] and varied[label] > 1]
    parts = []
    for column in quantities:
        sides = [
            each[name].assign(prompt=each[name]["example"].map(of))
            .groupby(["prompt", *labels], dropna=False, sort=False)[column].mean().rename(side)
            for side, each, of in (("a", a, of_a), ("b", b, of_b))
        ]  # fmt: skip
        quantity, measure = MEASURES[column]
        parts.append(
            pd.concat(sides, axis=1, join="inner").reset_index().assign(quantity=f"mean {quantity}", measure=measure)
        )
    found = pd.concat(parts, ignore_index=True)
    return found.assign(id=found["prompt"].map(_id))[["quantity", "measure", *labels, "id", "a", "b"]]


def flips_of(a: Mapping[str, Any], b: Mapping[str, Any], of_a: Mapping[int, str], of_b: Mapping[int, str]) -> pd.DataFrame:
    """The first flip of each prompt that both have: labels, id, step_a, step_b, and change: gained, lost, moved, same, none.

    Args:
        a: The tables of one result, of which ``examples`` or ``steps`` says what flips.
        b: Those of the other.
        of_a: The prompts of the one by their number.
        of_b: Those of the other.
    """
    sides = [_first_flips(each, of) for each, of in ((a, of_a), (b, of_b))]
    if any(side is None for side in sides):
        return pd.DataFrame()
    keys = [name for name in sides[0] if name != "step"]
    both = sides[0].merge(sides[1], on=keys, suffixes=("_a", "_b"))
    one, other = both["step_a"].notna(), both["step_b"].notna()
    same = both["step_a"] == both["step_b"]
    both["change"] = np.select([one & other & same, one & other, other, one], ["same", "moved", "gained", "lost"], "none")
    labels = [name for name in keys if name != "prompt"]
    return both.assign(id=both["prompt"].map(_id))[[*labels, "id", "step_a", "step_b", "change"]]


def _first_flips(tables: Mapping[str, Any], of: Mapping[int, str]) -> Any:
    examples, steps = tables.get("examples"), tables.get("steps")
    if examples is not None and "flip_index" in examples:
        return pd.DataFrame({"prompt": examples["example"].map(of), "step": examples["flip_index"].astype(float)})
    if steps is None or not {"example", "step", "flip"} <= set(steps.columns):
        return None
    labels = [label for label in LABELS if label in steps]
    first = steps.assign(prompt=steps["example"].map(of), step=steps["step"].where(steps["flip"].astype(bool)))
    return first.groupby(["prompt", *labels], sort=False)["step"].min().reset_index()


def _id(prompt: str) -> str:
    """What a prompt is called: its id, where its line is known, else its number."""
    import json

    return str(json.loads(prompt)["id"]) if prompt.startswith("{") else f"prompt {prompt.split()[1]}"
