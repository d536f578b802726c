"""Packs the data of a comparison for a page, and makes the parts of the page that show what changed, token by token.

The page's script draws on demand (``static/page.js``): the texts of both paths coloured by KL, the map of heads and the drift by
layer of a chosen token, and the attention of a chosen head on both paths.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, number
from kvinterp.comparison import Comparison
from kvinterp.comparison.attention_rows import within
from kvinterp.comparison.facts import site_of
from kvinterp.study.report.page import Column, Links, Packed, Parts, Table, Text, fragment, opened, render, without_empty

SCRIPTS, SHEETS = ("tables", "draw", "page"), ("draw",)
"""The scripts and style sheets of a page with these parts."""

MAP_NUMBERS, ROW_NUMBERS = 2**20, 2**17
"""The most numbers of maps and drift in a page (about 2 MB), and the most attention probabilities of a path (under 1 MB)."""
OPEN, FLIPS = 6, 100
"""The number of rows of a table that are visible, and the number of rows on the page."""

_STEP = ["example", "step"]
_NUMBERS = {
    f"{name}_{side}": f"{what}, {side}"
    for name, what in {"probability": "probability", "boundary": "distance"}.items()
    for side in "ab"
}
"""Columns of the steps, and their names in the table."""


def changes(comparisons: Mapping[str, Comparison]) -> Parts:
    """The parts of a page about what changed: flips, or else the steps of largest KL, and the texts to click on.

    Args:
        comparisons: The comparisons by their labels (one may have the label ``""``).
    """
    comparisons = {label: comparison for label, comparison in comparisons.items() if len(comparison.steps)}
    if not comparisons:
        return []
    # Comparisons with flips come first, also in the list from which the reader chooses.
    comparisons = dict(sorted(comparisons.items(), key=lambda item: flips_of(item[1]).empty))
    share = len(comparisons)
    blobs = {
        label: packed_comparison(comparison, MAP_NUMBERS // share, ROW_NUMBERS // share)
        for label, comparison in comparisons.items()
    }
    return [Text("Token by token", look="h2", name="changed"), *_table(comparisons), Packed("kv-changes", blobs)]


def _table(comparisons: Mapping[str, Comparison]) -> Parts:
    """The table of flips, each prompt's first flip before the others; where nothing flips, the prompts by their largest KL."""
    rows: list[tuple[bool, bool, float, list[Any]]] = []
    for place, (label, comparison) in enumerate(comparisons.items()):
        texts, examples = _texts(comparison), set()
        for row in _steps_to_show(comparison).to_dict("records"):
            example, step = int(row["example"]), int(row["step"])
            link = Links({f"{row['id']}, step {step}": f"at-{place}-{example}-{step}"})
            tokens = (repr(texts.get(int(row[f"token_{side}"]), str(row[f"token_{side}"]))) for side in "ab")
            numbers = (number(row.get(name, np.nan)) for name in (*_NUMBERS, "kl"))
            order = (not row["flipped"], example in examples, -row["kl"] * (not row["flipped"]))
            rows.append((*order, [link, *tokens, *numbers, label * (len(comparisons) > 1)]))
            examples.add(example)
    if not rows:
        return []
    head = [Column("prompt, step"), Column("path a chose", "code"), Column("path b chose", "code")]
    head += [Column(name, "number") for name in (*_NUMBERS.values(), "KL, nats")] + [Column("comparison")]
    listed: list[list[Any]] = [cells for *_, cells in sorted(rows, key=lambda row: row[:3])][:FLIPS]
    table = without_empty(without_empty(Table(head, listed, name="flips"), "–"))
    note = f"Distance: {'; or '.join(dict.fromkeys(boundary_of(comparison)[0] for comparison in comparisons.values()))}."
    return [*opened(table, OPEN, f"of {len(rows)}"), Text(note, look="note")]


def _steps_to_show(comparison: Comparison) -> pd.DataFrame:
    """The steps for the table: the flips, or else each prompt's step of largest KL where that is not 0."""
    flips = flips_of(comparison)
    if len(flips):
        return flips
    steps = comparison.same_text(comparison.steps)
    largest = steps.loc[steps.dropna(subset=["kl"]).groupby("example")["kl"].idxmax()]
    rows = largest.assign(id=largest["example"].map(comparison.examples.set_index("example")["id"]))
    return rows[rows["kl"] > 0]


def _texts(comparison: Comparison) -> dict[int, str]:
    """The text of each token id, where it is known."""
    tokens = comparison.tokens
    return dict(zip(tokens["token"].astype(int), tokens["text"].astype(str), strict=True))


def tokens_fragment(comparison: Comparison) -> str:
    """The texts of a comparison to click on, for a notebook: a self-contained page in a frame."""
    parts, heading = changes({"": comparison}), against(comparison.provenance)
    page = render("report", "what changed", parts, heading, scripts=SCRIPTS, sheets=SHEETS)
    return fragment(Text(page, look="frame"))


# Sentences -------------------------------------------------------------------------------------------------------------


def flips_of(comparison: Comparison) -> pd.DataFrame:
    """The steps at which the paths chose different tokens on the same text, with ``id``; by example and step."""
    steps = comparison.same_text(comparison.steps)
    flips = steps[steps["flipped"].astype(bool)]
    ids = comparison.examples.set_index("example")["id"]
    return flips.assign(id=flips["example"].map(ids)).sort_values(["example", "step"], ignore_index=True)


def boundary_of(comparison: Comparison) -> tuple[str, str]:
    """The meaning of the distance to the decision boundary under the strategy in use, and its unit."""
    strategy = str(comparison.provenance["strategy"])
    if strategy == "greedy":
        return "how many logits a path's token was ahead of its next best", "logits"
    if strategy.startswith(("top_k", "top_p")):
        text = "how far the number drawn lay from where another token begins, in the cumulative probability of"
        return f"{text} {strategy}", "cumulative probability"
    return "not known under this strategy", ""


def no_boundary(comparison: Comparison) -> str:
    """The reason why a step has no distance."""
    sampled = str(comparison.provenance["strategy"]).startswith(("top_k", "top_p"))
    return "no other token could be drawn" if sampled and "boundary_a" in comparison.steps else "not recorded"


def coverage_sentences(comparison: Comparison, maps: int, rows: int) -> list[str]:
    """Says for how many steps the page has maps and attention rows, and why not for more."""
    if comparison.heads.empty and comparison.layers.empty:
        return ["No activation was recorded."]
    sentences, steps = [], len(comparison.steps)
    if comparison.heads.empty:
        sentences.append("No attention pattern was recorded.")
    elif "pattern" in comparison.derived:
        sentences.append("Attention was derived from queries and keys, beside a kernel that shows none.")
    if maps < steps or (rows < steps and len(comparison.heads)):
        sentences.append(
            f"Of {steps} steps {maps} have their map here and {rows} their attention (dotted): flips and the largest KL first."
        )
    return sentences


def attention_hint(comparison: Comparison) -> str:
    """Says how to see the attention of every query instead of the newest alone."""
    call = (
        "kv.attention_comparison(both, prompts[{example}], model=model, example={example}, step={step}, layers=[{layer}])"
    )
    if comparison.provenance["protocol"] == "matched":
        return f"Every query's attention, for any step, where both is this comparison (kv.load(FOLDER)): {call}."
    return f"Every query's attention is compared on one text: kv.compare(..., protocol='matched'), then {call}."


# The data of one comparison --------------------------------------------------------------------------------------------


def packed_comparison(comparison: Comparison, maps: int = MAP_NUMBERS, rows: int = ROW_NUMBERS) -> bytes:
    """Packs everything that the page draws of one comparison as compressed JSON; the same comparison gives the same bytes.

    Numbers have three digits, as on the page.

    Args:
        comparison: The comparison.
        maps: The most numbers of maps and drift.
        rows: The most attention probabilities of a path.
    """
    steps = comparison.steps.sort_values(_STEP, ignore_index=True)
    prompts = comparison.tokens[comparison.tokens["path"] == "prompt"].sort_values(["example", "position"])
    # Each text occurs once, and is referred to by its number.
    token_columns = [steps["token_a"], steps["token_b"], prompts["token"]]
    places, tokens = pd.factorize(pd.concat(token_columns).astype(int))
    text_a, text_b, prompted = np.split(places, np.cumsum([len(steps), len(steps)]))
    texts, unknown = _texts(comparison), pd.Series(np.nan, steps.index)
    numbers = ("kl", "max_abs_logit", "probability_a", "probability_b", "boundary_a", "boundary_b", "margin_a", "margin_b")
    mapped, attention = _maps(comparison, steps, maps), _attention(comparison, steps, rows)
    data = {
        **{name: comparison.provenance[name] for name in ("paths", "protocol", "strategy")},
        "prompts": _prompts(comparison, steps, prompts.assign(place=prompted).groupby("example")["place"].agg(list)),
        "texts": [texts.get(token, str(token)) for token in tokens],
        "columns": {
            "text_a": text_a.tolist(),
            "text_b": text_b.tolist(),
            **{name: three_digits(steps.get(name, unknown)) for name in numbers},
            **{name: steps[name].astype(bool).tolist() for name in ("flipped", "after_flip")},
        },
        "unit": boundary_of(comparison)[1],
        "no_distance": no_boundary(comparison),
        "said": coverage_sentences(comparison, len(mapped["maps"]), len(attention)),
        "square": attention_hint(comparison),
        "patterns": len(comparison.heads) > 0,
        **mapped,
        "rows": attention,
    }
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def three_digits(values: Any) -> list[Any]:
    """Rounds numbers to three digits for JSON: None for NaN, and infinity as a text that JavaScript reads as a number."""
    array = np.asarray(values, float)
    digits = [
        None if v != v else float(f"{v:.3g}") if abs(v) < np.inf else f"{'-' * (v < 0)}Infinity"
        for v in array.ravel().tolist()
    ]
    return list(np.array(digits, dtype=object).reshape(array.shape).tolist())


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
    site, heads = site_of(comparison), comparison.heads
    drifted = comparison.layers[comparison.layers["site"] == site]
    label_columns = {"map_layers": heads["layer"], "map_heads": heads["head"], "drift_layers": drifted["layer"]}
    names = {name: sorted(labels.unique().tolist()) for name, labels in label_columns.items()}
    map_layers, map_heads, drift_layers = names.values()
    size = len(map_layers) * len(map_heads) + len(drift_layers)
    step_rows = _most_important(comparison, steps, most // size if size else 0)
    places = steps.loc[step_rows, _STEP]
    maps = _grid(heads, places, "kl", layer=map_layers, head=map_heads)
    drift = _grid(drifted, places, "relative_l2", layer=drift_layers)
    entries = zip(step_rows.tolist(), three_digits(maps), three_digits(drift), strict=True)
    return {**names, "site": site, "maps": {step: {"heads": of_heads, "drift": drift} for step, of_heads, drift in entries}}


def _most_important(comparison: Comparison, steps: pd.DataFrame, most: int) -> np.ndarray:
    """Selects steps: first flips, then those of largest KL on the same text, then the others; returns them in their order."""
    before = ~steps["after_flip"].astype(bool)
    order = pd.DataFrame({
        "first": steps["flipped"].astype(bool) & before,
        "same": before | (comparison.provenance["protocol"] != "free"),
        "kl": steps["kl"],
    })  # fmt: skip
    ranked = order.sort_values(list(order), ascending=False, kind="stable").index[:most]
    return np.sort(ranked.to_numpy())


def _grid(table: pd.DataFrame, step_places: pd.DataFrame, value: str, **labels: list[int]) -> np.ndarray:
    """A column of a table as an array ``[step, *labels]``, NaN where there is no row."""
    at = pd.MultiIndex.from_product(labels.values(), names=list(labels)).to_frame(index=False)
    index = pd.MultiIndex.from_frame(step_places.merge(at, how="cross"))
    values = table.set_index([*_STEP, *labels])[value].reindex(index)
    return values.to_numpy(float).reshape(len(step_places), *map(len, labels.values()))


def _attention(comparison: Comparison, steps: pd.DataFrame, most: int) -> dict[int, list[dict[str, Any]]]:
    """The attention rows by step, as many as there is room for, with the first of their keys."""
    rows, entries = comparison.attention_rows, dict[int, list[dict[str, Any]]]()
    if rows.empty:
        return entries
    rows = within(rows, steps, most).sort_values([*_STEP, "layer", "head", "position"], ignore_index=True)
    rows = rows.merge(steps[_STEP].assign(place=np.arange(len(steps))), on=_STEP)
    rows = rows.assign(difference=rows["a"].astype(float) - rows["b"].astype(float))
    for (place, layer, head), group in rows.groupby(["place", "layer", "head"]):
        # The rows of both paths are nearly equal, so that beside each other they compress well.
        values = {name: three_digits(group[name]) for name in ("a", "b", "difference")}
        row = {"layer": int(layer), "head": int(head), "first": int(group["position"].min()), **values}
        entries.setdefault(int(place), []).append(row)
    return entries
