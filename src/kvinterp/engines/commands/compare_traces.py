"""Compare two dumps of tensors, each a file or a folder of ``kv.Trace.save``: which tensor parts
first, and by how much.

A file is ``.safetensors`` or ``.npz``; its tensors have any names: sites (``resid_post.3``),
TransformerLens's hooks (``blocks.3.hook_resid_post``), transformers' modules. Those that both sides
name are compared row by row (the last axis is a row), in the order of layers, in units of the dtype
that they are stored in. Each is also looked for among all tensors of the other side, which says so
where a name misleads. Nothing is run: the two sides may come from two engines, versions or
machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    Chart,
    Charts,
    Experiment,
    InputError,
    Panel,
    Result,
    Rows,
    argument,
    counted,
    finding_from,
    number,
)
from kvinterp.engines.matching import listed_lines, match_sites
from kvinterp.metrics import vector_errors

COLUMNS = (
    "tensor",
    "dtype",
    "rows",
    "share_differing",
    "first_row",
    "max_abs",
    "max_ulp",
    "relative_l2",
)
MOST = 10_000
"""At most so many pairs of tensors are tried for a match."""


class CompareTraces(Experiment):
    """Where do two recorded runs part?"""

    first: Path = argument(
        Path(), "A .safetensors or .npz file, or a folder that kv.Trace.save wrote."
    )
    second: Path = argument(Path(), "The other; lengths are its.")

    def cells(self) -> list[Cell]:
        """One cell: nothing is run."""
        return [Cell("tensors", compared, {"a": str(self.first), "b": str(self.second)})]

    def reduce(self, results: CellResults) -> Result:
        """The table of tensors, and what only one side names."""
        tables, about = results["tensors"]
        return Result(tables, about)

    def headline(self, result: Result) -> list[str]:
        """The first tensor that differs, and the one that differs most."""
        table, alone = result.tables["tensors"], result.summary["alone"]
        sides = f"{self.first} against {self.second}"
        lines = [
            f"{sides}: all {counted(len(table), 'tensor')} that both name are equal to the bit."
        ] * bool(len(table))
        apart = table[table["share_differing"] > 0]
        if len(apart):
            first, most = apart.iloc[0], apart.loc[apart["relative_l2"].idxmax()]
            lines = [
                f"{sides}: {len(apart)} of {counted(len(table), 'tensor')} differ, first {first['tensor']} from row "
                f"{first['first_row']} on, by {number(first['max_ulp'])} units in the last place of {first['dtype']} at most "
                f"({number(first['relative_l2'])} of its length); most {most['tensor']}, {number(most['relative_l2'])}."
            ]
        lines += result.summary["matches"]
        for side, names in alone.items():
            listed = ", ".join([*names[:5], *["..."] * (len(names) > 5)])
            lines += [f"Only {side} names {counted(len(names), 'tensor')}: {listed}"] * bool(names)
        return lines

    def rows(self, result: Result) -> Rows:
        """The tensors that differ, in order."""
        differing = result.tables["tensors"].query("share_differing > 0")
        return [
            finding_from(row, "difference relative to the length of the second", "relative_l2", ["tensor"], n=row["rows"],
                    unit="rows",
                    note=f"{number(row['max_ulp'])} ULP of {row['dtype']} at most, from row {row['first_row']} on")
            for row in differing.to_dict("records")
        ]  # fmt: skip

    def charts(self, result: Result) -> Charts:
        """The difference by tensor, in order."""
        table = result.tables["tensors"].iloc[::-1]
        panel = Panel(
            table,
            "relative_l2",
            "tensor",
            "dots",
            label="length of the difference over the length of the second",
        )
        return {
            "compare_traces": Chart(
                "How far apart two recorded runs are, tensor by tensor", [panel]
            )
        }


def tensors_of(text: str) -> dict[str, torch.Tensor]:
    """Reads the tensors of a file or of a trace's folder, by name.

    Raises:
        InputError: It is not there, or cannot be read; an ``.npz`` with pickled objects is never
            unpickled.
    """
    path = Path(text)
    try:
        if path.is_dir():
            return load_file(path / "trace.safetensors")
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.as_tensor(np.atleast_1d(arrays[name])) for name in arrays.files}
        if path.suffix == ".safetensors":
            return load_file(path)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        why = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{text!r} cannot be read ({type(error).__name__}: {why}): give a .safetensors or .npz file."
        ) from error
    raise InputError(
        f"{text!r} is neither a .safetensors nor a .npz file, nor a folder of kv.Trace.save: give one of these."
    )


def _order(name: str) -> tuple[Any, ...]:
    """Layers in the order of their numbers; what has none stands last."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def compared(a: str, b: str) -> CellResult:
    """The table of the tensors that both sides name.

    Returns:
        One row a tensor: tensor, dtype (the coarser one), rows, share_differing (of its numbers),
        first_row (that differs; -1 for none), max_abs, max_ulp (units in the last place),
        relative_l2 (length of the difference over the length of b's).

    Raises:
        InputError: A file cannot be read, no name is on both sides, a shape differs, or a tensor
            holds no real numbers.
    """
    sides = tensors_of(a), tensors_of(b)
    common = sorted(sides[0].keys() & sides[1].keys(), key=_order)
    matches = _matches(*sides)
    if not common and not matches:
        raise InputError(
            f"{a!r} and {b!r} have no tensor of the same name: {sorted(sides[0])[:4]} and {sorted(sides[1])[:4]}."
        )
    rows = []
    for name in common:
        one, other = (side[name] for side in sides)
        if one.shape != other.shape or one.is_complex() or not one.numel():
            raise InputError(
                f"tensor {name!r} has the shapes {tuple(one.shape)} and {tuple(other.shape)}: expected real ones alike."
            )
        if not (one.is_floating_point() and other.is_floating_point()):
            one, other = one.double(), other.double()
        one, other = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (one, other))
        errors = vector_errors(one, other)
        difference = one.double() - other.double()
        length = float(torch.linalg.vector_norm(other.double()))
        differing = one != other
        apart = differing.any(-1).nonzero()
        rows.append(
            {
                "tensor": name,
                "dtype": str(
                    min((one.dtype, other.dtype), key=lambda dtype: dtype.itemsize)
                ).removeprefix("torch."),
                "rows": len(one),
                "share_differing": float(differing.double().mean()),
                "first_row": int(apart[0]) if len(apart) else -1,
                "max_abs": float(difference.abs().max()),
                "max_ulp": float(errors["ulp_max"].max()),
                "relative_l2": float(torch.linalg.vector_norm(difference)) / length
                if length
                else float(bool(len(apart))),
            }
        )
    alone = {
        name: sorted(mine.keys() - set(common), key=_order)
        for name, mine in zip((a, b), sides, strict=True)
    }
    table = pd.DataFrame(rows, columns=COLUMNS)
    return {"tensors": table}, {"alone": alone, "matches": matches, "provenance": {}}


def _matches(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Says which tensors of the first side those of the second are, where one is another than its
    name says.
    """
    rows = [{name: each for name, each in side.items() if each.is_floating_point() and each.dim() > 1 and each.numel()}
            for side in (ours, theirs)]  # fmt: skip
    if not all(rows) or len(rows[0]) * len(rows[1]) > MOST:
        return []
    found = match_sites(*rows).table
    wrong = (found["named"] != "yes") & (found["sure"] == "yes")
    return listed_lines(found[wrong]) if wrong.any() else []
