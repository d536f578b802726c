"""What changed, token by token: the data of one comparison as a page holds them, and the parts of a page that show them.

The page's script draws on demand (``static/page.js``): the texts of both paths coloured by KL, for a chosen token its map of
heads and its drift by layer, for a chosen head its attention on both paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, counted, listed, number, upper
from kvinterp.comparison import Comparison
from kvinterp.comparison.attention_rows import within
from kvinterp.study.reading.changed import (
    boundary_of,
    changed_said,
    flips_of,
    kept_said,
    no_boundary,
    none_changed_said,
    square_said,
)
from kvinterp.study.reading.results import kind_of, model_of, site_of
from kvinterp.study.report.packing import packed, signed_codes, three_digits
from kvinterp.study.report.page import Column, Links, Packed, Table, Text, fragment, render
from kvinterp.study.results import Result

SCRIPTS, SHEETS = ("tables", "draw", "page"), ("draw",)
"""What a page with these parts runs, and its styles."""

MAP_NUMBERS, ROW_NUMBERS = 2**20, 2**17
"""Most numbers of maps and drift in a page, and most attention probabilities a path: about two megabytes, and less than one."""
FLIPS, CALLS = 100, 8
"""Most rows of the tables."""

_OF = ["example", "step"]


def called(results: Sequence[Result]) -> dict[str, Comparison]:
    """The comparisons by what tells them apart; by nothing where there is one."""
    found = {}
    usual = results[0].comparison.provenance
    for result in results:
        provenance = result.comparison.provenance
        name = [model_of(result), kind_of(result), provenance["protocol"]]
        name += [provenance["dtype"]] if provenance["dtype"] != usual["dtype"] else []
        name += [" against ".join(provenance["paths"].values())] if provenance["paths"] != usual["paths"] else []
        found[", ".join(name)] = result.comparison
    return {"": results[0].comparison} if len(results) == 1 else found


def changes(found: Mapping[str, Comparison]) -> list[Any]:
    """The parts of a page about what changed: sentences, flips first, and the texts to click on.

    Args:
        found: Comparisons with at least one step each, by what the reader calls them (one may be called ``""``).
    """
    parts: list[Any] = [Text("What changed", look="h2", name="changed")]
    same = {label: comparison for label, comparison in found.items() if flips_of(comparison).empty}
    # Flips first, in the list that is chosen from too.
    found = {label: comparison for label, comparison in found.items() if label not in same} | same
    folded = same if len(same) > 1 else {}
    parts += [Text(" ".join(changed_said(each)), label=label) for label, each in found.items() if label not in folded]
    parts += [Text(" ".join(none_changed_said(folded)))] if folded else []
    return [*parts, *(_flip_table(found) or _call_table(found)), _texts_of(found)]


def flips_shown(found: Mapping[str, Comparison]) -> list[Any]:
    """The same of decodes that flip alone, of which the page says elsewhere how many there are; nothing where there is none."""
    flips = sum(len(comparison.examples) for comparison in found.values())
    if not flips:
        return []
    said = f"{counted(flips, 'decode')} {'flips' if flips == 1 else 'flip'} a token"
    told = Text(f"{said}; here with the text of each path, its own.")
    return [Text("What changed", look="h2", name="changed"), told, *_flip_table(found), _texts_of(found)]


def _texts_of(found: Mapping[str, Comparison]) -> Packed:
    share = max(len(found), 1)
    blobs = {
        label: packed_comparison(comparison, MAP_NUMBERS // share, ROW_NUMBERS // share)
        for label, comparison in found.items()
    }
    return Packed("kv-changes", blobs)


def _flip_table(found: Mapping[str, Comparison]) -> list[Any]:
    """Each prompt's first flip, and folded away the later ones, which only equal inputs have."""
    first, later = list[list[Any]](), list[list[Any]]()
    for place, (label, comparison) in enumerate(found.items()):
        texts, seen = _texts(comparison), set()
        for row in flips_of(comparison).to_dict("records"):
            cells = [*_cells(row, texts, place), *_numbers(row, ("probability", "boundary")), number(row["kl"])]
            cells += [label] * (len(found) > 1)
            (later if row["example"] in seen else first).append(cells)
            seen.add(row["example"])
    if not first:
        return []
    meanings = dict.fromkeys(map(boundary_of, found.values()))
    units = {unit for _, unit in meanings if unit}
    distance = f"distance, {units.pop()}" if len(units) == 1 else "distance"
    head = [Column("prompt, step"), Column("path a chose", "code"), Column("path b chose", "code")]
    head += [Column(f"{what}, {side}", "number") for what in ("probability", distance) for side in "ab"]
    head += [Column("KL, nats", "number"), *_head(found)]
    cut = f"The first {FLIPS} of {len(first)} are shown. " if len(first) > FLIPS else ""
    meaning = "; or ".join(text for text, _ in meanings)
    note = (
        f"{cut}Probability: what each path gave the token that it chose, at temperature 1{_drawn_otherwise(found)}. "
        f"Distance: {meaning}. All have two or three digits."
    )
    folded = f"{min(len(later), FLIPS)} of the {len(later)} flips after a prompt's first"
    more = [Table(head, later[:FLIPS], folded=folded)] if later else []
    return [Table(head, first[:FLIPS], name="flips"), Text(note, look="note"), *more]


def _drawn_otherwise(found: Mapping[str, Comparison]) -> str:
    """That a draw has probabilities of its own, where one of the comparisons draws."""
    drawn = dict.fromkeys(s for comparison in found.values() if (s := comparison.provenance["strategy"]) != "greedy")
    return f" (the draw is from those of {listed(list(drawn))}, in which the distance is)" if drawn else ""


def _call_table(found: Mapping[str, Comparison]) -> list[Any]:
    """Where nothing flips: the prompts by their largest KL."""
    rows = []
    for place, (label, comparison) in enumerate(found.items()):
        texts, steps = _texts(comparison), comparison.same_text(comparison.steps)
        ids = comparison.examples.set_index("example")["id"]
        for row in steps.loc[steps.groupby("example")["kl"].idxmax()].to_dict("records"):
            shown = _cells({**row, "id": ids[row["example"]]}, texts, place)[:2]
            shown += [number(row["kl"]), *_numbers(row, ("boundary",)), *[label] * (len(found) > 1)]
            rows.append((row["kl"], shown))
    rows = sorted((row for row in rows if row[0] > 0), key=lambda each: -each[0])[:CALLS]
    if not rows:
        return []
    head = [Column("prompt, step"), Column("token", "code")]
    head += [*(Column(name, "number") for name in ("KL, nats", "distance, a", "distance, b")), *_head(found)]
    said = "; or ".join(dict.fromkeys(boundary_of(comparison)[0] for comparison in found.values()))
    return [
        Text("Instead of flips, each prompt's step of largest KL, the largest first:"),
        Table(head, [cells for _, cells in rows]),
        Text(f"Distance: {said}.", look="note"),
    ]


def _head(found: Mapping[str, Comparison]) -> list[Column]:
    return [Column("comparison")] if len(found) > 1 else []


def _cells(row: Mapping[str, Any], texts: Mapping[int, str], place: int) -> list[Any]:
    link = Links({f"{row['id']}, step {int(row['step'])}": f"at-{place}-{int(row['example'])}-{int(row['step'])}"})
    return [link, *(repr(texts.get(int(row[f"token_{side}"]), str(row[f"token_{side}"]))) for side in "ab")]


def _numbers(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [number(row.get(f"{name}_{side}", np.nan)) for name in names for side in "ab"]


def _texts(comparison: Comparison) -> dict[int, str]:
    """The text of every token id that there is a text of."""
    tokens = comparison.tokens
    return dict(zip(tokens["token"].astype(int), tokens["text"].astype(str), strict=True))


def tokens_fragment(comparison: Comparison) -> str:
    """The texts of a comparison to click on, as a notebook shows them: a page in a frame, which needs nothing from outside."""
    parts, heading = changes({"": comparison}), against(comparison.provenance)
    page = render("report", "what changed", parts, heading, scripts=SCRIPTS, sheets=SHEETS)
    return fragment(Text(page, look="frame"))


# The data of one comparison --------------------------------------------------------------------------------------------


def packed_comparison(comparison: Comparison, maps: int = MAP_NUMBERS, rows: int = ROW_NUMBERS) -> bytes:
    """Everything that is drawn of one comparison, as :func:`kvinterp.study.report.packing.packed` gives it.

    Args:
        comparison: The comparison.
        maps: Most numbers of maps and drift.
        rows: Most attention probabilities a path.
    """
    steps = comparison.steps.sort_values(_OF, ignore_index=True)
    texts = _Texts(_texts(comparison))
    columns = _of_steps(steps, texts)
    prompts, columns["prompt_text"] = _prompts(comparison, steps, texts)
    mapped, of_maps = _maps(comparison, steps, maps)
    of_rows = _attention(comparison, steps, rows)
    said, unit = boundary_of(comparison)
    head = {
        **{name: comparison.provenance[name] for name in ("paths", "protocol", "strategy")},
        "prompts": prompts,
        "texts": texts.found,
        "unit": unit,
        "distance": upper(said),
        "no_distance": no_boundary(comparison),
        "said": kept_said(comparison, len(of_maps["map_step"]), len({*of_rows["row_step"].tolist()})),
        "square": square_said(comparison),
        "patterns": comparison.count("heads") > 0,
        **mapped,
    }
    return packed(head, {**columns, **of_maps, **of_rows})


class _Texts:
    """The texts of tokens, each once, by number."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts, self._places, self.found = texts, dict[int, int](), list[str]()

    def places(self, tokens: pd.Series) -> np.ndarray:
        """The number of the text of each token."""
        return np.fromiter(map(self._place, tokens.astype(int)), "<u4", len(tokens))

    def _place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self.found)
            self.found.append(self._texts.get(token, str(token)))
        return self._places[token]


def _of_steps(steps: pd.DataFrame, texts: _Texts) -> dict[str, np.ndarray]:
    unknown = pd.Series(np.nan, steps.index)
    numbers = ("kl", "max_abs_logit", "probability_a", "probability_b", "boundary_a", "boundary_b", "margin_a", "margin_b")
    flags = steps["flipped"].astype(np.uint8) + 2 * steps["after_flip"].astype(np.uint8)
    return {
        **{f"text_{side}": texts.places(steps[f"token_{side}"]) for side in "ab"},
        **{name: three_digits(steps.get(name, unknown)) for name in numbers},
        "flags": flags.to_numpy(np.uint8),
    }


def _prompts(comparison: Comparison, steps: pd.DataFrame, texts: _Texts) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Each prompt, with where its rows begin, and the texts of all of their tokens."""
    starts = steps.groupby("example")["step"].agg(["size"])
    starts["start"] = starts["size"].cumsum() - starts["size"]
    tokens = comparison.tokens[comparison.tokens["path"] == "prompt"].sort_values(["example", "position"])
    lengths = tokens.groupby("example").size()
    ends = lengths.cumsum()
    found = []
    for row in comparison.examples.sort_values("example").to_dict("records"):
        example = row["example"]
        if example not in starts.index:
            continue
        count = int(lengths.get(example, 0))
        found.append({
            "id": str(row["id"]),
            "example": int(example),
            "start": int(starts.loc[example, "start"]),
            "steps": int(starts.loc[example, "size"]),
            "tokens": int(row["prompt_tokens"]),
            "prompt": [int(ends.get(example, 0)) - count, count],
        })  # fmt: skip
    return found, texts.places(tokens["token"])


def _maps(comparison: Comparison, steps: pd.DataFrame, most: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The KL of each head and the drift of each layer at as many steps as there is room for."""
    site = site_of(comparison)

    def rows(table: str, *columns: str) -> Iterator[pd.DataFrame]:
        for piece in comparison.pieces(table, *columns, "site"):
            yield piece[piece["site"] == site] if site and "site" in piece else piece

    names = {
        name: sorted({label for piece in rows(table, column) for label in piece[column].unique().tolist()})
        for name, table, column in (
            ("map_layers", "heads", "layer"),
            ("map_heads", "heads", "head"),
            ("drift_layers", "layers", "layer"),
        )
    }
    size = len(names["map_layers"]) * len(names["map_heads"]) + len(names["drift_layers"])
    kept = _first(comparison, steps, most // size if size else 0)
    chosen = steps.loc[kept, _OF]
    return {**names, "site": site}, {
        "map_step": kept.astype("<u4"),
        "map": three_digits(
            _grid(
                rows("heads", *_OF, "layer", "head", "kl"), chosen, "kl", layer=names["map_layers"], head=names["map_heads"]
            )
        ),
        "drift": three_digits(
            _grid(rows("layers", *_OF, "layer", "relative_l2"), chosen, "relative_l2", layer=names["drift_layers"])
        ),
    }


def _first(comparison: Comparison, steps: pd.DataFrame, most: int) -> np.ndarray:
    """Which steps come first: first flips, then by KL on the same text, then the others; in their order."""
    same = ~steps["after_flip"].astype(bool) | (comparison.provenance["protocol"] != "free")
    first = steps["flipped"].astype(bool) & ~steps["after_flip"].astype(bool)
    order = pd.DataFrame({"first": first, "same": same, "kl": steps["kl"]})
    ranked = order.sort_values(["first", "same", "kl"], ascending=False, kind="stable").index[:most]
    return np.sort(ranked.to_numpy())


def _grid(pieces: Iterable[pd.DataFrame], chosen: pd.DataFrame, value: str, **labels: list[int]) -> np.ndarray:
    """A column of a table, given in pieces, as ``[step, *labels]``, NaN where there is none."""
    grid = np.full((len(chosen), *map(len, labels.values())), np.nan)
    places = chosen.assign(place=np.arange(len(chosen)))
    for table in pieces if grid.size else ():
        found = table[[*_OF, *labels, value]].merge(places, on=_OF)
        at = [np.searchsorted(names, found[label]) for label, names in labels.items()]
        grid[(found["place"].to_numpy(), *at)] = found[value]
    return grid


def _attention(comparison: Comparison, steps: pd.DataFrame, most: int) -> dict[str, np.ndarray]:
    """The attention rows there is room for: one a step, layer and head, with where its keys begin."""
    rows = comparison.attention_rows
    if len(rows):
        rows = within(rows, steps, most).sort_values([*_OF, "layer", "head", "position"], ignore_index=True)
        rows = rows.merge(steps[_OF].assign(place=np.arange(len(steps))), on=_OF)
    else:
        rows = pd.DataFrame(columns=["place", "layer", "head", "position", "a", "b"], dtype=float)
    groups = rows.groupby(["place", "layer", "head"], sort=True)["position"].agg(["min", "size"]).reset_index()
    columns = {"step": "place", "layer": "layer", "head": "head", "first": "min", "size": "size"}
    a, b = (three_digits(rows[side]) for side in "ab")
    return {
        **{f"row_{name}": groups[column].to_numpy("<u4") for name, column in columns.items()},
        "row_a": a,
        # Both paths read nearly alike: what b's number is beyond a's is mostly 0, which takes no room.
        "row_b": b - a,
        "row_difference": signed_codes(rows["a"].astype(float) - rows["b"].astype(float)),
    }
