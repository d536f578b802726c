"""What changed, token by token: the data of one comparison as a page holds them, and the parts of a page that show them.

The page's script draws on demand (``static/page.js``): the texts of both paths coloured by KL, for a chosen token its map of
heads and its drift by layer, for a chosen head its attention on both paths.
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
from kvinterp.study.report.page import Column, Links, Packed, Parts, Table, Text, fragment, opened, render

SCRIPTS, SHEETS = ("tables", "draw", "page"), ("draw",)
"""What a page with these parts runs, and its styles."""

MAP_NUMBERS, ROW_NUMBERS = 2**20, 2**17
"""Most numbers of maps and drift in a page, and most attention probabilities a path: about two megabytes, and less than one."""
OPEN, FLIPS = 6, 100
"""So many rows of a table are seen at once, and so many are on the page."""

_OF = ["example", "step"]


def changes(found: Mapping[str, Comparison]) -> Parts:
    """The parts of a page about what changed: flips, or else the steps of largest KL, and the texts to click on.

    Args:
        found: The comparisons, by what the reader calls them (one may be called ``""``).
    """
    found = {label: one for label, one in found.items() if len(one.steps)}
    if not found:
        return []
    # Flips first, in the list that is chosen from too.
    found = dict(sorted(found.items(), key=lambda item: flips_of(item[1]).empty))
    share = len(found)
    blobs = {
        label: packed_comparison(comparison, MAP_NUMBERS // share, ROW_NUMBERS // share)
        for label, comparison in found.items()
    }
    return [Text("Token by token", look="h2", name="changed"), *_table(found), Packed("kv-changes", blobs)]


def _table(found: Mapping[str, Comparison]) -> Parts:
    """The flips, each prompt's first before the others; where nothing flips the prompts by their largest KL."""
    rows: list[tuple[bool, bool, float, list[Any]]] = []
    for place, (label, comparison) in enumerate(found.items()):
        texts, seen = _texts(comparison), set()
        for row in _told(comparison).to_dict("records"):
            link = Links({f"{row['id']}, step {int(row['step'])}": f"at-{place}-{int(row['example'])}-{int(row['step'])}"})
            tokens = (repr(texts.get(int(row[f"token_{side}"]), str(row[f"token_{side}"]))) for side in "ab")
            numbers = (number(row.get(f"{name}_{side}", np.nan)) for name in ("probability", "boundary") for side in "ab")
            cells: list[Any] = [link, *tokens, *numbers, number(row["kl"]), *[label] * (len(found) > 1)]
            rows.append((not row["flipped"], row["example"] in seen, -row["kl"] * (not row["flipped"]), cells))
            seen.add(row["example"])
    if not rows:
        return []
    head = [Column("prompt, step"), Column("path a chose", "code"), Column("path b chose", "code")]
    head += [Column(f"{what}, {side}", "number") for what in ("probability", "distance") for side in "ab"]
    head += [Column("KL, nats", "number"), *([Column("comparison")] if len(found) > 1 else [])]
    listed: list[list[Any]] = [cells for *_, cells in sorted(rows, key=lambda row: row[:3])][:FLIPS]
    note = f"Distance: {'; or '.join(dict.fromkeys(boundary_of(comparison)[0] for comparison in found.values()))}."
    known = [at for at in range(len(head)) if any(row[at] != "–" for row in listed)]
    head, listed = [head[at] for at in known], [[row[at] for at in known] for row in listed]
    return [*opened(Table(head, listed, name="flips"), OPEN, f"of {len(rows)}"), Text(note, look="note")]


def _told(comparison: Comparison) -> pd.DataFrame:
    """The steps that a table names: the flips, or else each prompt's step of largest KL where that is not 0."""
    flips = flips_of(comparison)
    if len(flips):
        return flips
    steps = comparison.same_text(comparison.steps)
    largest = steps.loc[steps.dropna(subset=["kl"]).groupby("example")["kl"].idxmax()]
    named = largest.assign(id=largest["example"].map(comparison.examples.set_index("example")["id"]))
    return named[named["kl"] > 0]


def _texts(comparison: Comparison) -> dict[int, str]:
    """The text of every token id that there is a text of."""
    tokens = comparison.tokens
    return dict(zip(tokens["token"].astype(int), tokens["text"].astype(str), strict=True))


def tokens_fragment(comparison: Comparison) -> str:
    """The texts of a comparison to click on, as a notebook shows them: a page in a frame, which needs nothing from outside."""
    parts, heading = changes({"": comparison}), against(comparison.provenance)
    page = render("report", "what changed", parts, heading, scripts=SCRIPTS, sheets=SHEETS)
    return fragment(Text(page, look="frame"))


# What is said of it ----------------------------------------------------------------------------------------------------


def flips_of(comparison: Comparison) -> pd.DataFrame:
    """The steps at which the paths chose different tokens on the same text, with ``id``; by example and step."""
    steps = comparison.same_text(comparison.steps)
    flips = steps[steps["flipped"].astype(bool)]
    ids = comparison.examples.set_index("example")["id"]
    return flips.assign(id=flips["example"].map(ids)).sort_values(["example", "step"], ignore_index=True)


def boundary_of(comparison: Comparison) -> tuple[str, str]:
    """What the distance to the decision boundary is under the strategy in use, and its unit."""
    strategy = str(comparison.provenance["strategy"])
    if strategy == "greedy":
        return "how many logits a path's token was ahead of its next best", "logits"
    if strategy.startswith(("top_k", "top_p")):
        said = "how far the number drawn lay from where another token begins, in the cumulative probability of"
        return f"{said} {strategy}", "cumulative probability"
    return "not known under this strategy", ""


def no_boundary(comparison: Comparison) -> str:
    """What it means that a step has no distance."""
    drawn = str(comparison.provenance["strategy"]).startswith(("top_k", "top_p"))
    return "no other token could be drawn" if drawn and "boundary_a" in comparison.steps else "not recorded"


def kept_said(comparison: Comparison, maps: int, rows: int) -> list[str]:
    """What of a comparison the page holds, maps and attention rows of so many steps, and why not more."""
    if comparison.heads.empty and comparison.layers.empty:
        return ["No activation was recorded."]
    said, steps = [], len(comparison.steps)
    if comparison.heads.empty:
        said.append("No attention pattern was recorded.")
    elif "pattern" in comparison.derived:
        said.append("Attention was derived from queries and keys, beside a kernel that shows none.")
    if maps < steps or (rows < steps and len(comparison.heads)):
        said.append(
            f"Of {steps} steps {maps} have their map here and {rows} their attention (dotted): flips and the largest KL first."
        )
    return said


def square_said(comparison: Comparison) -> str:
    """How to see the attention of every query, and not of the newest alone."""
    call = (
        "kv.attention_comparison(both, prompts[{example}], model=model, example={example}, step={step}, layers=[{layer}])"
    )
    if comparison.provenance["protocol"] == "matched":
        return f"Every query's attention, for any step, where both is this comparison (kv.load(FOLDER)): {call}."
    return f"Every query's attention is compared on one text: kv.compare(..., protocol='matched'), then {call}."


# The data of one comparison --------------------------------------------------------------------------------------------


def packed_comparison(comparison: Comparison, maps: int = MAP_NUMBERS, rows: int = ROW_NUMBERS) -> bytes:
    """Everything that is drawn of one comparison, as compressed JSON; the same comparison gives the same bytes.

    A number on the page has three digits, and so many are in it.

    Args:
        comparison: The comparison.
        maps: Most numbers of maps and drift.
        rows: Most attention probabilities a path.
    """
    steps = comparison.steps.sort_values(_OF, ignore_index=True)
    prompts = comparison.tokens[comparison.tokens["path"] == "prompt"].sort_values(["example", "position"])
    # Each text is there once, and named by its number.
    chosen = [steps["token_a"], steps["token_b"], prompts["token"]]
    places, tokens = pd.factorize(pd.concat(chosen).astype(int))
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
        "said": kept_said(comparison, len(mapped["maps"]), len(attention)),
        "square": square_said(comparison),
        "patterns": len(comparison.heads) > 0,
        **mapped,
        "rows": attention,
    }
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def three_digits(values: Any) -> list[Any]:
    """Numbers to three digits as JSON has them: none for NaN, and infinity as a text that JavaScript reads as a number."""
    array = np.asarray(values, float)
    told = [
        None if v != v else float(f"{v:.3g}") if abs(v) < np.inf else f"{'-' * (v < 0)}Infinity"
        for v in array.ravel().tolist()
    ]
    return list(np.array(told, dtype=object).reshape(array.shape).tolist())


def _prompts(comparison: Comparison, steps: pd.DataFrame, texts: pd.Series) -> list[dict[str, Any]]:
    """Each prompt, with where its rows begin, how many there are, and its texts."""
    sizes = steps.groupby("example").size()
    starts = sizes.cumsum() - sizes
    return [
        {
            "id": str(row["id"]),
            "example": int(row["example"]),
            "start": int(starts[row["example"]]),
            "steps": int(sizes[row["example"]]),
            "tokens": int(row["prompt_tokens"]),
            "texts": texts.get(row["example"], []),
        }
        for row in comparison.examples.sort_values("example").to_dict("records")
        if row["example"] in sizes.index
    ]


def _maps(comparison: Comparison, steps: pd.DataFrame, most: int) -> dict[str, Any]:
    """The KL of each head and the drift of each layer at as many steps as there is room for."""
    site = site_of(comparison)

    drifted = comparison.layers[comparison.layers["site"] == site]
    named = {
        "map_layers": comparison.heads["layer"],
        "map_heads": comparison.heads["head"],
        "drift_layers": drifted["layer"],
    }
    names = {name: sorted(labels.unique().tolist()) for name, labels in named.items()}
    layers, heads, drifts = names.values()
    size = len(layers) * len(heads) + len(drifts)
    kept = _first(comparison, steps, most // size if size else 0)
    chosen = steps.loc[kept, _OF]
    maps = _grid(comparison.heads, chosen, "kl", layer=layers, head=heads)
    drift = _grid(drifted, chosen, "relative_l2", layer=drifts)
    each = zip(kept.tolist(), three_digits(maps), three_digits(drift), strict=True)
    return {**names, "site": site, "maps": {step: {"heads": of_heads, "drift": drift} for step, of_heads, drift in each}}


def _first(comparison: Comparison, steps: pd.DataFrame, most: int) -> np.ndarray:
    """Which steps come first: first flips, then by KL on the same text, then the others; in their order."""
    same = ~steps["after_flip"].astype(bool) | (comparison.provenance["protocol"] != "free")
    first = steps["flipped"].astype(bool) & ~steps["after_flip"].astype(bool)
    order = pd.DataFrame({"first": first, "same": same, "kl": steps["kl"]})
    ranked = order.sort_values(["first", "same", "kl"], ascending=False, kind="stable").index[:most]
    return np.sort(ranked.to_numpy())


def _grid(table: pd.DataFrame, chosen: pd.DataFrame, value: str, **labels: list[int]) -> np.ndarray:
    """A column of a table as ``[step, *labels]``, NaN where there is none."""
    grid = np.full((len(chosen), *map(len, labels.values())), np.nan)
    places = chosen.assign(place=np.arange(len(chosen)))
    if grid.size:
        found = table[[*_OF, *labels, value]].merge(places, on=_OF)
        at = [np.searchsorted(names, found[label]) for label, names in labels.items()]
        grid[(found["place"].to_numpy(), *at)] = found[value]
    return grid


def _attention(comparison: Comparison, steps: pd.DataFrame, most: int) -> dict[int, list[dict[str, Any]]]:
    """By step, the attention rows there is room for, with where their keys begin."""
    rows, found = comparison.attention_rows, dict[int, list[dict[str, Any]]]()
    if rows.empty:
        return found
    rows = within(rows, steps, most).sort_values([*_OF, "layer", "head", "position"], ignore_index=True)
    rows = rows.merge(steps[_OF].assign(place=np.arange(len(steps))), on=_OF)
    rows = rows.assign(difference=rows["a"].astype(float) - rows["b"].astype(float))
    for (place, layer, head), own in rows.groupby(["place", "layer", "head"]):
        # Both paths read nearly alike: beside each other they take little room.
        values = {name: three_digits(own[name]) for name in ("a", "b", "difference")}
        row = {"layer": int(layer), "head": int(head), "first": int(own["position"].min()), **values}
        found.setdefault(int(place), []).append(row)
    return found
