"""What the telephone game found, a sentence each, with how many chains it is of, its interval and the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from kvinterp import metrics
from kvinterp.reading.numbers import between, counted, ends_said, machines_of, number

_SHOWN = 8
"""Of so many arms a sentence each; the table holds all."""


def similarity_named(embedder: str) -> str:
    """What similarity is measured with."""
    known = {
        "counts": "cosine of word counts (a stand-in that knows no synonyms)",
        "model": "cosine of the model's own last residual stream, averaged over positions (a stand-in)",
    }
    return known.get(embedder, f"cosine of embeddings by {embedder}")


def said_of_chains(summary: Mapping[str, Any]) -> list[str]:
    """What the telephone game found; ``summary`` is that of :class:`kvinterp.experiments.chain.Chain`."""
    provenance, deltas = summary["provenance"], summary["deltas"]
    control, null = summary["control"], summary["null"]
    lines = [
        f"{counted(summary['hops'], 'hop')} on {machines_of(provenance.values())}; similarity to the first text is the "
        f"{similarity_named(summary['embedder'])}. Intervals are 95%, Student's over texts, each the mean of its chains, "
        f"where there are {metrics.FEWEST} or more."
    ]
    arms = [row for row in deltas if row["arm"] not in (control, null)]
    for row in [one for one in deltas if one["arm"] == control]:
        half = "none falls to a half"
        if row["halved"]:
            half = f"{row['halved']} of them fall to a half, at hop {number(row['half_life'])} (median)"
        lines.append(
            f"{_where(row)} without a policy ends at similarity {number(row['similarity'])} with {number(row['facts'])} of the "
            f"facts ({counted(row['chains'], 'chain')}; {half})."
        )
    lines += [
        f"The null: other seeds alone change {row['model']}'s final similarity at temperature {row['temperature']:g} by "
        f"{number(row['delta'])} ({_ends(row)}), over {counted(row['chains'], 'chain')}."
        for row in deltas
        if row["arm"] == null
    ]
    lines += [_delta(row, _like(row, deltas, null)) for row in sorted(arms, key=lambda one: -abs(one["delta"]))[:_SHOWN]]
    if len(arms) > _SHOWN:
        lines.append(f"{len(arms) - _SHOWN} more arms are in the table.")
    return [*lines, *_signs(arms), *_cycles(summary["cycles"]), *_drawn(summary)]


def _like(row: Mapping[str, Any], deltas: Sequence[Mapping[str, Any]], arm: str) -> Mapping[str, Any] | None:
    same = ("model", "temperature")
    return next((one for one in deltas if one["arm"] == arm and all(one[key] == row[key] for key in same)), None)


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['model']} at temperature {row['temperature']:g}"


def _delta(row: Mapping[str, Any], null: Mapping[str, Any] | None) -> str:
    where = f"{row['arm']} on {_where(row)}"
    if row["same_text"] == row["chains"]:
        return f"{where}: every last text is, to the letter, the one without a policy ({counted(row['chains'], 'chain')})."
    said = (
        f"{where}: the final similarity differs by {number(row['delta'])} ({_ends(row)}) from that without a policy, over "
        f"{counted(row['chains'], 'chain')}; {row['better']} better, {row['worse']} worse, {row['same_text']} with the very same "
        "last text."
    )
    if not row["temperature"]:
        return f"{said} No number is drawn here, so whatever differs is the policy's."
    return said if null is None else f"{said} Other seeds alone: {number(null['delta'])}."


def _ends(row: Mapping[str, Any]) -> str:
    return ends_said(row["delta_low"], row["delta_high"], "{}") or "no interval from so few"


def _signs(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sign test over variants, which treats them as independent."""
    signs = [row["delta"] > 0 for row in arms if row["delta"]]
    if len(signs) < 2:
        return []
    p = float(stats.binomtest(sum(signs), len(signs)).pvalue)
    return [
        f"Of {len(signs)} variants (model, policy, temperature) that differ from no policy, {sum(signs)} end nearer to their "
        f"first text: a sign test gives p = {number(p)} as if they were independent. They are not: they share texts, seeds, "
        "models and the chains without a policy, so it is no evidence by itself; the intervals over texts and the null are."
    ]


def _cycles(cycles: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for cold, at in ((True, "At temperature 0,"), (False, "Above temperature 0,")):
        of = [row for row in cycles if (row["temperature"] == 0) == cold]
        again = [row for row in of if row["period"] is not None]
        if not of:
            continue
        comes = "comes" if len(again) == 1 else "come"
        said = f"{at} {len(again)} of {counted(len(of), 'chain')} {comes} back to a text held before"
        if again:
            fixed = sum(row["period"] == 1 for row in again)
            said += f", {fixed} of them to a fixed point, first held at hop {between([row['enters'] for row in again])}"
        lines.append(f"{said}, to the letter{'; there they stay' if cold and again else ''}.")
    return lines


def _drawn(summary: Mapping[str, Any]) -> list[str]:
    of = [row for row in summary["attractors"] if row["arm"] == summary["control"] and row["of"] == "words"]
    return [
        f"{_where(row)} {_draws(row)} with strength {number(row['strength'])} "
        f"({number(row['strength_low'])} to {number(row['strength_high'])}; 1 is one hop, above it a hop goes to the other side, "
        f"at 2 as far as before), by a line through {row['pairs']} successive hops, whose interval takes them as independent."
        for row in of
        if row["strength"] is not None and row["position"] is not None and 0 < row["strength"] < 2
    ]


def _draws(row: Mapping[str, Any]) -> str:
    """What a slope says: above a strength of 1 it is negative, and lengths swing."""
    to = f"{number(row['position'])} words"
    return f"draws texts to {to}" if row["strength"] <= 1 else f"swings texts from one side of {to} to the other"
