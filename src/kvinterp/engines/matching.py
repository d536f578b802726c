"""Which of our tensors each of theirs is: every array that was recorded elsewhere, beside every
site and layer of ours.

Names mislead: an engine's "layer 3" may be what enters layer 3, its MLP's output alone, or a row
late. Here an array is what it is nearest to at most of its rows. The runner-up stands beside it,
since a residual stream changes little from layer to layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from torch import Tensor

from kvinterp.common.numbers import listed, number
from kvinterp.errors import InputError, shown
from kvinterp.models.hook_names import hook_point_of
from kvinterp.recording import Trace

LEVEL = 1e-3
"""How often chance may make an array nearest to a site at as many rows."""
SHIFTS = (0, 1, -1)
"""So many rows further on an array is tried too."""


@dataclasses.dataclass(frozen=True, repr=False)
class SiteMatches:
    """Which of our tensors theirs are.

    Attributes:
        table: One row an array of theirs: ``theirs``, ``ours`` (the nearest site and layer; ""
            where none has its width), ``rows``, ``nearest`` (at how many of them it is the
            nearest), ``error`` (length of the difference over ours), ``units`` (the error in units
            of the coarser dtype's precision), ``shift`` (in rows), ``scale`` (theirs over ours),
            ``second`` and ``second_error`` (the runner-up), ``margin`` (its error over the
            nearest's), ``named`` (whether the
            nearest is what its name says: "yes", "no", or "" where its name says none) and ``sure``
            ("yes" where chance does not make it nearest at so many rows).
    """

    table: pd.DataFrame

    def __repr__(self) -> str:
        """What it found, a line each."""
        return self.reading

    @property
    def reading(self) -> str:
        """One sentence for all arrays where they are off alike, else one for each."""
        return "\n".join(sentences(self.table))


def match_sites(ours: Any, theirs: Any) -> SiteMatches:
    """Finds which of our tensors each of theirs is.

    Args:
        ours: A trace that recorded sites
            (``kv.run(..., record="resid_pre,resid_post,attn_out,mlp_out")``), or arrays by name or
            by site and layer.
        theirs: The same of another engine, such as ``kv.Trace.from_arrays(..., hidden=...)`` or
            ``{("resid_post", 3): [row, width]}``.

    Returns:
        The nearest of ours for each, with its error, runner-up and margin.

    Raises:
        InputError: One side has no arrays, or one is not of real numbers.
    """
    sides = [_arrays(side, name) for side, name in ((ours, "ours"), (theirs, "theirs"))]
    groups = _distinct(sides[0])
    return SiteMatches(
        pd.DataFrame([_matched(name, array, groups) for name, array in sides[1].items()])
    )


def _arrays(given: Any, what: str) -> dict[str, Tensor]:
    """``[row, width]`` by name, of a trace's records or of a mapping."""
    records = given.records if isinstance(given, Trace) else given
    if not isinstance(records, Mapping) or not records:
        raise InputError(
            f"{what} is {shown(given)}: expected a trace that recorded sites, or arrays by name."
        )
    arrays = {}
    for hook_point, values in records.items():
        hook_point = hook_point_of(hook_point) if isinstance(hook_point, str) else hook_point
        name = (
            f"{hook_point[0]} {hook_point[1]}" if isinstance(hook_point, tuple) else str(hook_point)
        )
        try:
            array = (
                torch.stack(list(values)) if isinstance(values, list) else torch.as_tensor(values)
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{what}: {name} is no array of rows of one width: give [row, width]."
            ) from error
        if not array.is_floating_point() or not array.numel():
            raise InputError(f"{what}: {name} holds no floating-point numbers: give [row, width].")
        arrays[name] = array.detach().cpu().reshape(-1, array.shape[-1] if array.dim() > 1 else 1)
    return arrays


def _distinct(arrays: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Our arrays, those that are bitwise the same together: what leaves a layer is what enters the
    next.
    """
    groups: list[tuple[list[str], Tensor]] = []
    for name, array in arrays.items():
        same = next(
            (
                names
                for names, other in groups
                if other.shape == array.shape and torch.equal(other, array)
            ),
            None,
        )
        if same is None:
            groups.append(([name], array))
        else:
            same.append(name)
    return groups


def _matched(
    name: str, array: Tensor, groups: Sequence[tuple[list[str], Tensor]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "theirs": name, "ours": "", "rows": len(array), "nearest": 0, "error": np.nan, "units": np.nan, "shift": 0,
        "scale": np.nan, "second": "", "second_error": np.nan, "margin": np.nan, "named": "", "sure": "no",
    }  # fmt: skip
    found = []
    for names, own in groups:
        for shift in SHIFTS if len(array) == len(own) and len(array) > 3 else (0,):
            count = min(len(array), len(own)) - abs(shift)
            if (
                own.shape[1] != array.shape[1]
                or (len(own) != len(array) and not shift)
                or count < 1
            ):
                continue
            theirs, mine = array[max(-shift, 0) :][:count], own[max(shift, 0) :][:count]
            gaps = torch.linalg.vector_norm(theirs.double() - mine.double(), dim=-1)
            size = torch.linalg.vector_norm(mine.double())
            found.append(
                (
                    float(torch.linalg.vector_norm(gaps) / size) if size else np.inf,
                    names,
                    shift,
                    theirs,
                    mine,
                    gaps,
                )
            )
    if not found:
        return row
    found.sort(key=lambda one: one[0])
    error, names, shift, theirs, mine, gaps = found[0]
    others = [one for one in found[1:] if one[1] is not names]
    alias = _preferred(names, name)
    near = _nearest_rows(gaps, shift, [one for one in others if one[2] == shift])
    unit = max(
        torch.finfo(side.dtype).eps for side in (theirs, mine) if side.dtype.is_floating_point
    )
    named = "yes" if name in names else "no" if any(name in group for group, _ in groups) else ""
    # Among so many sites chance makes one nearest at this share of rows.
    chance = scipy.stats.binom.sf(near - 1, len(gaps), 1 / max(len(others) + 1, 2))
    row |= {
        "ours": alias,
        "nearest": near,
        "error": error,
        "shift": shift,
        "named": "no" if shift else named,
        "units": error / unit,
        "scale": float((theirs.double() * mine.double()).sum() / mine.double().square().sum()),
        "sure": "yes" if chance < LEVEL and error < 1 else "no",
    }
    if others:
        second = others[0]
        row |= {"second": _preferred(second[1], name), "second_error": second[0]}
        row["margin"] = second[0] / error if error else np.inf
    return row


def _nearest_rows(gaps: Tensor, shift: int, others: Sequence[tuple[Any, ...]]) -> int:
    """At how many rows no other site is as near."""
    if not others:
        return len(gaps)
    return int((gaps < torch.stack([one[5] for one in others]).amin(0)).sum())


def _preferred(names: Sequence[str], name: str) -> str:
    """The name of one tensor that reads best beside theirs: its own, or one of its site."""
    site = name.rpartition(" ")[0]
    return next(
        (n for n in names if n == name),
        next((n for n in names if n.rpartition(" ")[0] == site), names[0]),
    )


# What is said -------------------------------------------------------------------------------------


def sentences(table: pd.DataFrame) -> list[str]:
    """Says what each array is; what all have in common in one sentence, in front."""
    rows = table.to_dict("records")
    if rows and all(row["named"] == "yes" for row in rows):
        worst = max(rows, key=lambda row: row["error"])
        return [
            f"each of {len(rows)} arrays is nearest to ours of its name; the furthest is {worst['theirs']}, by "
            f"{number(worst['error'])} of its length ({number(worst['units'])} units of the dtype's precision)."
        ]
    return [*_alike(rows), *map(_sentence, rows)]


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence where all are off alike: so many layers, so many rows, or another site."""
    if len(rows) < 2 or any(row["sure"] == "no" for row in rows):
        return []
    pairs = [(_split(row["theirs"]), _split(row["ours"])) for row in rows]
    if any(side is None for pair in pairs for side in pair):
        return []
    off = {mine[1] - given[1] for given, mine in pairs if given and mine and given[0] == mine[0]}
    every = "both" if len(rows) == 2 else f"all {len(rows)}"
    shifts = {row["shift"] for row in rows}
    if len(shifts) == 1 and (shift := shifts.pop()):
        return [f"{every} arrays are a row {'late' if shift < 0 else 'early'}."]
    if (
        len(off) == 1
        and (by := off.pop())
        and all(given and mine and given[0] == mine[0] for given, mine in pairs)
    ):
        layers = "one layer" if abs(by) == 1 else f"{abs(by)} layers"
        return [f"{every} arrays are {layers} {'early' if by < 0 else 'late'}."]
    sites = {mine[0] for _, mine in pairs if mine}
    if len(sites) == 1 and all(given and mine and given[1] == mine[1] for given, mine in pairs):
        site = sites.pop()
        return [f"{every} arrays are {site} of their layer{ALONE.get(site, '')}."]
    return []


ALONE = {
    "mlp_out": ": the MLP's output alone, without the residual stream that it is added to",
    "attn_out": ": attention's output alone, without the residual stream that it is added to",
}


def _split(name: str) -> tuple[str, int] | None:
    site, _, layer = name.rpartition(" ")
    return (site, int(layer)) if site and layer.isdecimal() else None


def _said(name: str) -> str:
    parts = _split(name)
    return name if parts is None else f"{parts[0]} of layer {parts[1]}"


def _sentence(row: Mapping[str, Any]) -> str:
    theirs = _said(row["theirs"])
    if not row["ours"]:
        return f"theirs, {theirs}, has the width and rows of none of ours."
    error = f"{number(row['error'])} of its length, {number(row['units'])} units of the dtype's precision"
    second = (
        f"; next is {_said(row['second'])}, {number(row['second_error'])}" if row["second"] else ""
    )
    if row["sure"] == "no":
        return f"theirs, {theirs}, is surely none of ours: nearest is {_said(row['ours'])}, {error}{second}."
    late = {0: "", 1: ", a row early", -1: ", a row late"}[row["shift"]]
    ours = "what its name says" if row["named"] == "yes" else f"our {_said(row['ours'])}{late}"
    return f"theirs, {theirs}, is {ours} ({error}; nearest at {row['nearest']} of {row['rows']} rows{second})."


def misnamed(ours: Trace, theirs: Trace) -> list[str]:
    """Says what the arrays of two traces are where one is nearer to another of ours than to that of
    its name.
    """
    records = [
        {
            hook_point: rows
            for hook_point, rows in trace.records.items()
            if rows and rows[0].dim() == 1
        }
        for trace in (ours, theirs)
    ]
    if not all(records):
        return []
    matches = match_sites(*records)
    wrong = (matches.table["named"] != "yes") & (matches.table["sure"] == "yes")
    return listed_lines(matches.table) if wrong.any() else []


def listed_lines(table: pd.DataFrame) -> list[str]:
    """The sentences about the arrays, the common one alone where there is one and more than a few
    are listed.
    """
    lines = sentences(table)
    return (
        lines
        if len(lines) <= 6
        else [*lines[:5], f"and {listed([str(n) for n in table['theirs'][5:9]])} ..."]
    )
