"""Packs the data of a comparison for a page, and makes the parts of the page that show what
changed, token by token.

The page's script draws on demand (``static/page.js``): the texts of both paths coloured by KL, the
map of heads and the drift by layer of a chosen token, and the attention of a chosen head on both
paths.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, number
from kvinterp.comparison import Comparison
from kvinterp.comparison.attention_rows import within
from kvinterp.comparison.facts import site_of
from kvinterp.report.page import (
    Column,
    Links,
    Packed,
    Parts,
    Text,
    filled_columns,
    fragment,
    render,
)

MAP_NUMBERS, ROW_NUMBERS = 2**20, 2**17
"""The most numbers of maps in a page (about 2 MB), and the most attention probabilities of a path
(under 1 MB).
"""
OPEN, FLIPS = 6, 100
"""The number of rows of a table that are visible, and the number of rows on the page."""

_STEP = ["example", "step"]
_SHOWN = {
    "probability_a": "probability, a",
    "probability_b": "probability, b",
    "boundary_a": "distance, a",
    "boundary_b": "distance, b",
    "kl": "KL, nats",
}
"""Columns of the steps, and their names in the table."""


def changes(comparisons: Mapping[str, Comparison]) -> Parts:
    """The parts of a page about what changed: flips, or else the steps of largest KL, and the texts
    to click on.

    Args:
        comparisons: The comparisons by their labels (one may have the label ``""``).
    """
    shown = {
        label: _steps_to_show(comparison)
        for label, comparison in comparisons.items()
        if len(comparison.steps)
    }
    if not shown:
        return []
    # Comparisons with flips come first, also in the list from which the reader chooses.
    labels = sorted(shown, key=lambda label: not shown[label]["flipped"].any())
    share = len(labels)
    blobs = {
        label: packed_comparison(comparisons[label], MAP_NUMBERS // share, ROW_NUMBERS // share)
        for label in labels
    }
    steps = pd.concat(
        [shown[label].assign(label=label, number=number) for number, label in enumerate(labels)]
    )
    distances = dict.fromkeys(boundary_of(comparisons[label])[0] for label in labels)
    note = f"Distance: {'; or '.join(distances)}." if len(steps) else ""
    return [
        Text("Token by token", look="h2", name="changed"),
        *_table(steps),
        Text(note, look="note"),
        Packed("kv-changes", blobs),
    ]


def _table(steps: pd.DataFrame) -> Parts:
    """The table of flips, each prompt's first flip before the others; where nothing flips, the
    prompts by their largest KL.
    """
    steps = steps.assign(
        later=steps.duplicated(["number", "example"]),
        largest=steps["kl"].where(~steps["flipped"], np.inf),
    )
    steps = steps.sort_values(
        ["flipped", "later", "largest"], ascending=[False, True, False], kind="stable"
    )
    head = [Column("prompt, step"), Column("path a chose", "code"), Column("path b chose", "code")]
    head += [Column(name, "number") for name in _SHOWN.values()] + [Column("comparison")]
    rows = [
        [
            Links(
                {
                    f"{row['id']}, step {row['step']}": f"at-{row['number']}-{row['example']}-{row['step']}"
                }
            ),
            *(repr(row[f"text_{side}"]) for side in "ab"),
            *(number(row[column]) for column in _SHOWN),
            row["label"] if steps["number"].any() else "",
        ]
        for row in steps.head(FLIPS).to_dict("records")
    ]
    return [filled_columns(head, rows, name="flips", visible=OPEN)]


def _steps_to_show(comparison: Comparison) -> pd.DataFrame:
    """The steps for the table, with the texts of their tokens: the flips, or else each prompt's
    largest KL where it is not 0.
    """
    steps = comparison.same_text(comparison.steps).sort_values(_STEP)
    steps = steps.assign(
        flipped=steps["flipped"].astype(bool),
        id=steps["example"].map(comparison.examples.set_index("example")["id"]),
        **{f"text_{side}": _texts(comparison, steps[f"token_{side}"]) for side in "ab"},
    )
    flips = steps[steps["flipped"]]
    if flips.empty:
        flips = steps.loc[steps.dropna(subset=["kl"]).groupby("example")["kl"].idxmax()].query(
            "kl > 0"
        )
    return flips.reindex(columns=[*_STEP, "id", "flipped", "text_a", "text_b", *_SHOWN])


def _texts(comparison: Comparison, tokens: Iterable[int]) -> list[str]:
    """The text of each token, or its id where the text is not known."""
    known = dict(
        zip(
            comparison.tokens["token"].astype(int),
            comparison.tokens["text"].astype(str),
            strict=True,
        )
    )
    return [known.get(token, str(token)) for token in tokens]


def tokens_fragment(comparison: Comparison) -> str:
    """The texts of a comparison to click on, for a notebook: a self-contained page in a frame."""
    page = render("what changed", changes({"": comparison}), heading=against(comparison.provenance))
    return fragment(Text(page, look="frame"))


# Sentences ----------------------------------------------------------------------------------------


def boundary_of(comparison: Comparison) -> tuple[str, str, str]:
    """The meaning of the distance to the decision boundary under the strategy in use, its unit, and
    why a step has none.
    """
    strategy = str(comparison.provenance["strategy"])
    if strategy == "greedy":
        return "how many logits a path's token was ahead of its next best", "logits", "not recorded"
    if strategy.startswith(("top_k", "top_p")):
        text = "how far the number drawn lay from where another token begins, in the cumulative probability of"
        none = (
            "no other token could be drawn" if "boundary_a" in comparison.steps else "not recorded"
        )
        return f"{text} {strategy}", "cumulative probability", none
    return "not known under this strategy", "", "not recorded"


# The data of one comparison -----------------------------------------------------------------------


def packed_comparison(comparison: Comparison, maps: int, rows: int) -> bytes:
    """Packs everything that the page draws of one comparison as compressed JSON; the same
    comparison gives the same bytes.

    Numbers have three digits, as on the page.

    Args:
        comparison: The comparison.
        maps: The most numbers of maps.
        rows: The most attention probabilities of a path.
    """
    steps = comparison.steps.sort_values(_STEP, ignore_index=True)
    prompts = comparison.tokens[comparison.tokens["path"] == "prompt"].sort_values(
        ["example", "position"]
    )
    # Each text occurs once, and is referred to by its number.
    codes, tokens = pd.factorize(
        pd.concat([steps["token_a"], steps["token_b"], prompts["token"]]).astype(int)
    )
    text_a, text_b, text_of_prompt = np.split(codes, [len(steps), 2 * len(steps)])
    numbers = (
        "kl",
        "max_abs_logit",
        "probability_a",
        "probability_b",
        "boundary_a",
        "boundary_b",
        "margin_a",
        "margin_b",
    )
    # Where there is no room for all steps, those behind a flip in the free protocol come last.
    same = steps.index.isin(comparison.same_text(steps).index)
    ranked = steps.assign(kl=steps["kl"].where(same, -1.0))
    _, unit, no_distance = boundary_of(comparison)
    data = {
        **{name: comparison.provenance[name] for name in ("paths", "protocol", "strategy")},
        "prompts": _prompts(
            comparison,
            steps,
            prompts.assign(number=text_of_prompt).groupby("example")["number"].agg(list),
        ),
        "texts": _texts(comparison, tokens),
        "columns": {
            "text_a": text_a.tolist(),
            "text_b": text_b.tolist(),
            **{
                name: three_digits(column)
                for name, column in steps.reindex(columns=numbers).items()
            },
            **{name: steps[name].astype(bool).tolist() for name in ("flipped", "after_flip")},
        },
        "unit": unit,
        "no_distance": no_distance,
        "recorded": len(comparison.heads) + len(comparison.layers) > 0,
        "patterns": len(comparison.heads) > 0,
        "derived": "pattern" in comparison.derived,
        **_maps(comparison, ranked, maps),
        "rows": _attention(comparison, ranked, rows),
    }
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def three_digits(values: Any) -> Any:
    """Rounds numbers to three digits for JSON: None for NaN, and infinity as a text that JavaScript
    reads as a number.
    """
    if isinstance(values, pd.Series | np.ndarray):
        return three_digits(values.tolist())
    if isinstance(values, list):
        return [three_digits(value) for value in values]
    if math.isinf(values):
        return "Infinity" if values > 0 else "-Infinity"
    return None if math.isnan(values) else float(f"{values:.3g}")


def _prompts(comparison: Comparison, steps: pd.DataFrame, texts: pd.Series) -> list[dict[str, Any]]:
    """Each prompt, with the first of its rows, their number, and its texts."""
    sizes = steps.groupby("example").size()
    examples = comparison.examples.set_index("example").loc[sizes.index]
    columns = {
        "id": examples["id"].astype(str),
        "example": sizes.index,
        "start": sizes.cumsum() - sizes,
        "steps": sizes,
        "tokens": examples["prompt_tokens"],
        "texts": [texts.get(example, []) for example in sizes.index],
    }
    return pd.DataFrame(columns).to_dict("records")  # type: ignore[return-value]


def _maps(comparison: Comparison, steps: pd.DataFrame, most: int) -> dict[str, Any]:
    """The KL of each head and the drift of each layer, at as many steps as there is room for."""
    site = site_of(comparison)
    heads, drifted = comparison.heads, comparison.layers[comparison.layers["site"] == site]
    shown = within(drifted if heads.empty else heads, steps, most)[_STEP].drop_duplicates()
    at = steps.reset_index(names="row").merge(shown, on=_STEP)
    map_layers, map_heads, maps = _grid(heads, at, "kl", "layer", "head")
    drift_layers, drift = _grid(drifted, at, "relative_l2", "layer")
    entries = zip(at["row"].tolist(), three_digits(maps), three_digits(drift), strict=True)
    return {
        "site": site,
        "map_layers": map_layers,
        "map_heads": map_heads,
        "drift_layers": drift_layers,
        "maps": {row: {"heads": kl, "drift": sizes} for row, kl, sizes in entries},
    }


def _grid(table: pd.DataFrame, steps: pd.DataFrame, value: str, *labels: str) -> list[Any]:
    """The values of each label, and a column of a table as an array ``[step, *labels]``, NaN where
    there is no row.
    """
    columns = [sorted(table[label].unique().tolist()) for label in labels]
    index = pd.MultiIndex.from_product([range(len(steps)), *columns])
    at = (
        steps[_STEP]
        .assign(number=range(len(steps)))
        .merge(table, on=_STEP)
        .set_index(["number", *labels])
    )
    return [
        *columns,
        at[value].reindex(index).to_numpy(float).reshape(len(steps), *map(len, columns)),
    ]


def _attention(
    comparison: Comparison, steps: pd.DataFrame, most: int
) -> dict[int, list[dict[str, Any]]]:
    """The attention rows by step, as many as there is room for, with the first of their keys."""
    entries: dict[int, list[dict[str, Any]]] = {}
    if comparison.attention_rows.empty:
        return entries
    rows = within(comparison.attention_rows, steps, most).merge(
        steps[_STEP].reset_index(names="row"), on=_STEP
    )
    rows = rows.sort_values(["row", "layer", "head", "position"], kind="stable")
    a, b = (rows[side].to_numpy(float) for side in "ab")
    # The rows of both paths are nearly equal, so that beside each other they compress well.
    values = {
        name: three_digits(side) for name, side in (("a", a), ("b", b), ("difference", a - b))
    }
    # Cut at once and not group by group: there are as many as steps, layers and heads.
    keys = rows[["row", "layer", "head", "position"]].to_numpy(int)
    begins = np.flatnonzero((np.diff(keys[:, :3], axis=0, prepend=-1) != 0).any(axis=1))
    for begin, end in itertools.pairwise([*begins.tolist(), len(keys)]):
        row, layer, head, first = keys[begin].tolist()
        cut = {name: side[begin:end] for name, side in values.items()}
        entries.setdefault(row, []).append({"layer": layer, "head": head, "first": first, **cut})
    return entries
