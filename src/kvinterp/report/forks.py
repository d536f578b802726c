"""The part of a page that opens at the fork points: where the run that wrote a text parts from its
recomputation.
"""

from __future__ import annotations

import pandas as pd

from kvinterp.common.numbers import number
from kvinterp.comparison.which_run import WhichRun
from kvinterp.report.page import Column, Parts, Text, filled_columns

OPEN, MOST, AROUND = 8, 60, 8
"""The rows that are visible, the rows on the page, and the tokens that are shown at either side."""


def fork_parts(result: WhichRun) -> Parts:
    """A table of the positions at which the runs part further than any position of the null does,
    the furthest first.
    """
    points = result.fork_points()
    positions = len(result.texts)
    heading = Text("Where the runs part", look="h2", name="forks")
    if points.empty:
        return [
            heading,
            Text(
                f"At none of {positions} positions do the runs part further than the null does anywhere."
            ),
        ]
    by_example = dict(iter(result.texts.sort_values("position").groupby("example")))
    # On a phone a row is a card, which its first column names.
    head = [
        Column("the text there", "text"),
        Column("text", "number"),
        Column("position", "number"),
        Column("part"),
    ]
    head += [
        Column("furthest at"),
        Column("distance / norm", "number"),
        Column("null at most", "number"),
    ]
    head += [Column("from layer", "number")]
    rows = [
        [
            around(by_example[row["example"]], row["position"]),
            str(row["example"]),
            str(row["position"]),
            row["part"],
            f"{row['site']}, layer {row['layer']}",
            number(row["relative_l2"]),
            number(row["limit"]),
            str(row["first_layer"]),
        ]
        for row in points.head(MOST).to_dict("records")
    ]
    written = int((points["part"] == "generated").sum())
    said = (
        f"At {len(points)} of {positions} positions, {written} of them generated, some site and layer parts further than at any "
        "position of its null. Each is marked in its text, the furthest (in units of the null's largest) first"
    )
    said += f"; {MOST} are shown." if len(points) > MOST else "."
    if nothing := int((points["limit"] == 0).sum()):
        which = "all of them" if nothing == len(points) else f"{nothing} of them, which stand last,"
        said += (
            f" At {which} the null is exactly 0 wherever the runs part: with as many tokens more behind the text, one forward "
            f"gave the same bits there at each of {positions} positions. So there any difference counts, be it one of the last "
            "bit, and how far two recomputations of other lengths or numbers of rows part was not seen."
        )
    return [
        heading,
        Text(said),
        filled_columns(head, rows, name="fork-points", visible=OPEN, look="cards"),
    ]


def around(text: pd.DataFrame, position: int) -> str:
    """The tokens around a position, which stands in brackets."""
    near = text[(text["position"] - position).abs() <= AROUND]
    pieces = [
        f"\u27e6{piece}\u27e7" if at == position else piece
        for at, piece in zip(near["position"], near["text"], strict=True)
    ]
    before = "\u2026" * bool((text["position"] < position - AROUND).any())
    behind = "\u2026" * bool((text["position"] > position + AROUND).any())
    return f"{before}{''.join(pieces)}{behind}"
