"""Makes the page about another engine's log-probs: verdict, tokens shaded by their difference,
checks, causes ruled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.auditing.verdict import Verdict
from kvinterp.errors import in_one_line, visible
from kvinterp.findings import Chart, Panel
from kvinterp.report.page import Table, Text, fragment, render, table_of_rows
from kvinterp.report.panels import drawing

BOUNDS = (1, 3, 10, 30, 100)
"""The differences at which the next shade begins, in units of rounding; from the last on a
difference is off the scale.
"""
SHOWN = ("sequence", "tokens", "k1", "k3", "rollout_is_seq_mean", "rollout_is_max", "ratio_clipfrac", "tis_clipfrac",
         "token_mult_prob_error", "ppl_ratio")  # fmt: skip
"""The statistics of a sequence that the page has."""
ROWS, COLUMNS = 48, 256
"""The most rows and columns of the map."""
OPEN, TOKENS, LARGEST = 4, 2**16, 10
"""The number of sequences that are visible, the most tokens on the page, and the rows in the table
of the largest.
"""


def page(verdict: Verdict) -> str:
    """The self-contained page; all text of the file is escaped."""
    summary: Mapping[str, Any] = verdict.given
    steps = [
        {"step": check.name, "status": check.status, "what it showed": check.detail}
        for check in verdict.checks
    ]
    named, statistics = summary.get("named"), summary.get("statistics", {})
    tried = [
        {**row, "ruled out": "no, it is named" if row["cause"] == named else "yes"}
        for row in summary["tried"]
    ]
    sequences = [
        {name: row[name] for name in SHOWN} for row in statistics.get("by_sequence", [])[:200]
    ]
    cells = _map(verdict)
    return _rendered(
        verdict,
        sheet="audit",
        steps=table_of_rows(steps, text="what it showed"),
        rungs=table_of_rows(summary["rungs"]),
        tried=table_of_rows(sorted(tried, key=lambda row: row["left"])),
        statistics=statistics,
        trained=table_of_rows(_trained(statistics)),
        map=cells,
        pictures=[cells["picture"]] if cells else [],
        by_sequence=table_of_rows(sequences),
    )


def _trained(statistics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a statistic: its value, its interval and that of rounding alone."""
    intervals, null = statistics.get("intervals", {}), statistics.get("null", {})
    return [
        {"statistic": name, "value": value, "low": intervals.get(name, (None, None))[0],
         "high": intervals.get(name, (None, None))[1], "rounding alone": null.get(name)}
        for name, value in statistics.get("all", {}).items()
    ]  # fmt: skip


def engine_fragment(verdict: Verdict) -> str:
    """The verdict and the shaded tokens for a notebook, as a self-contained page in a frame."""
    note = Text("In short; .report() writes the whole page.", look="note")
    return fragment(note, Text(_rendered(verdict), look="frame"))


def _rendered(verdict: Verdict, **more: Any) -> str:
    """The verdict and its tokens, and with further content the whole page."""
    first, why, *_ = verdict.reading.splitlines()
    summary, table = verdict.given, verdict.tokens
    if table is not None and summary.get("side") == "the trainer":
        table = table.assign(engine=table["trainer"], difference=table["trainer_difference"])
    size = summary.get("our_mean_distance")
    unit = (size, f"our own mean rounding in {summary['beside']}") if size else None
    return render(
        f"Another engine against {verdict.provenance['model']}",
        template="engine",
        verdict=verdict,
        first=first,
        why=why.strip(),
        mark={0: "good", 3: "unsure"}.get(verdict.exit_code, "bad"),
        tokens=None if table is None else shaded(table, unit, summary["begins"]),
        **more,
    )


def _map(verdict: Verdict) -> Any:
    """The picture of the distances by sequence and position, faintest up to our own mean rounding,
    and its first sequence.
    """
    table, summary = verdict.tokens, verdict.given
    if table is None or "where" not in summary:
        return None
    side = "trainer_difference" if summary.get("side") == "the trainer" else "difference"
    number = pd.factorize(table["sequence"])[0]
    gap = table[side].abs()
    cells = pd.DataFrame(
        {"sequence": number + 1, "position": table["position"], "nats": gap}
    ).dropna()
    step = -(-int(cells["position"].max() + 1) // COLUMNS)
    cells["position"] -= cells["position"] % step
    worst = cells.groupby("sequence")["nats"].mean().nlargest(ROWS).index
    cells = (
        cells[cells["sequence"].isin(worst)]
        .groupby(["sequence", "position"], as_index=False)["nats"]
        .max()
    )
    cells.loc[cells["nats"] <= summary["our_mean_distance"], "nats"] = 0.0
    whole = pd.MultiIndex.from_product(
        [sorted(cells["sequence"].unique()), range(0, int(cells["position"].max()) + 1, step)]
    )
    cells = (
        cells.set_index(["sequence", "position"])
        .reindex(whole.set_names(["sequence", "position"]))
        .reset_index()
    )
    panel = Panel(
        cells,
        "position",
        "sequence",
        "map",
        "nats",
        label="largest distance (nats)" if step > 1 else "distance (nats)",
    )
    chart = Chart("Distance by sequence and position", [panel])
    shown = drawing(chart)
    return {"picture": shown, "first": int(cells["sequence"].min())}


def shaded(
    table: pd.DataFrame, unit: tuple[float, str] | None = None, begins: int | None = None
) -> dict[str, Any]:
    """What the page shows of the tokens, shaded by engine less ours; the sequences of the largest
    mean difference first.

    Args:
        table: For each token ``sequence``, ``position``, ``token``, ``engine``, ``ours``,
            ``difference``, and where known ``text`` and ``part``.
        unit: The unit of the differences in nats, and its name (default: their mean).
        begins: The position at which they begin to differ.
    """
    gap = table["difference"].abs()
    size, what = unit or (float(gap.mean()) or 1.0, "the mean difference")
    table = table.assign(units=table["difference"] / size, gap=gap)
    groups = table.groupby("sequence", observed=True)
    order = (
        groups["gap"]
        .agg(["mean", "max", "count"])
        .sort_values("mean", ascending=False, kind="stable")
    )
    # As line 1 and the map count them; the name is the file's.
    numbers = {name: number for number, name in enumerate(table["sequence"].unique(), 1)}
    sequences, budget = [], TOKENS
    for name, mean, largest, count in order.itertuples():
        if budget <= 0:
            break
        rows = groups.get_group(name)
        sequences.append({
            "name": in_one_line(name),
            "number": numbers[name],
            "mean": mean,
            "largest": largest,
            "given": count,
            "length": len(rows),
            "tokens": _looks(rows.head(budget), begins),
            "cut": budget if len(rows) > budget else 0,
        })  # fmt: skip
        budget -= len(rows)
    behind = (table["position"] >= (np.inf if begins is None else begins)) & table[
        "difference"
    ].notna()
    return {
        "what": what,
        "size": size,
        "off": int((table["units"].abs() >= BOUNDS[-1]).sum()),
        "begins": begins,
        "before": table["units"][~behind].abs().median(),
        "after": table["units"][behind].abs().median(),
        "behind": int(behind.sum()),
        "bounds": BOUNDS,
        "gaps": table["engine"].isna().any() or _gaps(table).any(),
        "prompted": "prompt" in set(table.get("part", [])),
        "sequences": sequences,
        "visible": OPEN,
        "hidden": len(order) - len(sequences),
        "largest": _largest(table),
    }


def _gaps(table: pd.DataFrame) -> np.ndarray:
    """The number of missing positions before each row, in the order of the table."""
    return np.maximum(
        table.groupby("sequence", observed=True)["position"].diff().fillna(1).to_numpy() - 1, 0
    )


def _looks(rows: pd.DataFrame, begins: int | None) -> list[tuple[str, str, str]]:
    """For each token its text, its look, and the hint that appears where the reader points at it.

    A look is ``a1`` to ``a5`` (above 0, from pale to off the scale), ``b1`` to ``b5`` (below),
    ``n`` (not given: hatched) or nothing, and with a blank between ``p`` (of the prompt) and ``s``
    (it begins here).
    """
    looks = []
    texts, parts = (
        rows.get("text", rows["token"].map("{} ".format)),
        rows.get("part", [""] * len(rows)),
    )
    columns = (rows[name] for name in ("position", "engine", "ours", "difference", "units"))
    for text, part, gap, at, engine, ours, difference, units in zip(
        texts, parts, _gaps(rows), *columns, strict=True
    ):
        if gap:
            looks.append((" … ", "n", f"{int(gap)} not given"))
        level = int(np.searchsorted(BOUNDS, abs(units), "right")) if units == units else 0
        look = "n" if engine != engine and at else f"{'ab'[units < 0]}{level}" if level else ""
        look = " ".join(filter(None, (look, "p" * (part == "prompt"), "s" * (at == begins))))
        note = "not given"
        if engine == engine:
            note = (
                f"engine {engine:.4g}, ours {ours:.4g}, less ours {difference:+.2g} ({units:+.3g})"
            )
        looks.append((visible(text).replace("\n", "↵\n"), look, f"{at}: {note}"))
    return looks


def _largest(table: pd.DataFrame) -> Table:
    top = table.loc[table["gap"].nlargest(LARGEST).index]
    names = ("sequence", "position", "text", "token", "engine", "ours", "difference", "units")
    rows = top.filter(names).to_dict("records")
    return table_of_rows(
        [
            {name: in_one_line(v) if isinstance(v, str) else v for name, v in row.items()}
            for row in rows
        ]
    )
