"""The page that shows attention side by side: one HTML file with circuitsvis inside it once, and nothing else.

Only its own two scripts may run and nothing may be loaded: it works offline, and text that came with a prompt stays text.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float64

__all__ = ["AttentionPage", "ShownHead"]

_DIGITS = 6
_ATTENTION, _MORE, _LESS, _LATER = "#3b0f70", "#0072b2", "#d55e00", "#e4e4e4"


@dataclasses.dataclass(frozen=True, eq=False)
class ShownHead:
    """One head: what is said of it, and the two patterns, pooled or cropped alike.

    Attributes:
        row: layer, head, kl, largest_row_kl and largest_row.
        a: The first path's probabilities.
        b: The second path's.
    """

    row: dict[str, Any]
    a: Float64[np.ndarray, "side side"]
    b: Float64[np.ndarray, "side side"]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPage:
    """Everything the page says.

    Attributes:
        title: Its heading.
        sentences: What was compared, and what is shown of it.
        paths: The labels of the two paths.
        tokens: Text of each row and column.
        places: For each of them its position or positions and whether they are the prompt's, decoded or the newest, as text.
        heads: The heads, in the order shown.
    """

    title: str
    sentences: tuple[str, ...]
    paths: tuple[str, str]
    tokens: tuple[str, ...]
    places: tuple[tuple[str, str], ...]
    heads: tuple[ShownHead, ...]

    def html(self) -> str:
        """The page as text."""
        bundle = _bundle()
        data = json.dumps({"tokens": self.tokens, "figures": _figures(self.heads)}, separators=(",", ":"))
        # No "<" in the data, so nothing in it can end or open a script element; the rest of it is ASCII.
        data = data.replace("<", "\\u003c")
        allowed = " ".join(f"'sha256-{_hash(script)}'" for script in (bundle, _DRAW))
        policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; font-src data:"
        said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.sentences)
        sections = "".join(_section(number, head, self.paths) for number, head in enumerate(self.heads))
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1>{said}{_LEGEND}{self._strip()}<main>{sections}</main>"
            f'<script type="application/json" id="patterns">{data}</script>'
            f"<script>{bundle}</script><script>{_DRAW}</script></body></html>\n"
        )

    def _strip(self) -> str:
        parts = [
            f'<span class="{kind}" title="{position}, {kind}">{html.escape(token)}</span>'
            for token, (position, kind) in zip(self.tokens, self.places, strict=True)
        ]
        return f'<p class="tokens">{"".join(parts)}</p>'


def _figures(heads: Sequence[ShownHead]) -> list[dict[str, Any]]:
    figures = []
    for number, head in enumerate(heads):
        difference = head.a - head.b
        scale = float(np.abs(difference).max()) or 1.0
        for side, values, limit, colour in (
            ("a", head.a, 1.0, _ATTENTION),
            ("b", head.b, 1.0, _ATTENTION),
            ("difference", difference, scale, _MORE),
        ):
            rows = [[float(f"{v:.{_DIGITS}g}") for v in row[: at + 1]] for at, row in enumerate(values.tolist())]
            figures.append({"id": f"head-{number}-{side}", "rows": rows, "limit": limit, "colour": colour})
    return figures


def _section(number: int, head: ShownHead, paths: tuple[str, str]) -> str:
    row, (a, b) = head.row, paths
    most = f"largest row: {_nats(row['largest_row_kl'])} at position {row['largest_row']}"
    captions = (("a", a), ("b", b), ("difference", f"difference: {_scale(head)}"))
    figures = "".join(
        f'<figure><figcaption>{html.escape(text)}</figcaption><div id="head-{number}-{side}"></div></figure>'
        for side, text in captions
    )
    return (
        f'<section class="head"><h2>layer {row["layer"]}, head {row["head"]} <b>KL {_nats(row["kl"])}</b> '
        f"<small>{most if row['largest_row_kl'] else 'and 0 in every row'}</small></h2>"
        f'<div class="row">{figures}</div></section>'
    )


def _scale(head: ShownHead) -> str:
    # A difference far below the largest is as good as white, so those that are not 0 are counted.
    side, largest = len(head.a), float(np.abs(head.a - head.b).max())
    cells, differing = side * (side + 1) // 2, int(np.count_nonzero(head.a != head.b))
    return f"±{largest:.2g}, in {differing} of {cells} cells" if differing else f"0 in all {cells} cells"


def _nats(value: float) -> str:
    return "exactly 0 nats" if value == 0 else f"{value:.2e} nats"


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _bundle() -> str:
    """The code of the installed circuitsvis, made fit to stand inside a page."""
    source = resources.files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    # In a JavaScript string "<\\/" means "</", but it ends no script element. The source map is a file that is not there.
    return source.replace("</script", "<\\/script").partition("//# sourceMappingURL")[0].replace("\r", "")


def _ramp(*colours: str) -> str:
    return f'<span class="ramp" style="background:linear-gradient(90deg,{",".join(colours)})"></span>'


_LEGEND = (
    f'<p class="legend">Rows are queries, columns keys; hover for the numbers, given to {_DIGITS} digits. '
    f"{_ramp('#fff', _ATTENTION)} attention, 0 to 1. "
    f"{_ramp(_LESS, '#fff', _MORE)} difference, first minus second, on the scale written above each: orange where the "
    f"first path attends less, blue where it attends more. {_ramp(_LATER, _LATER)} later keys, which no query sees.</p>"
)

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff;margin:1.2em auto;max-width:80em;padding:0 1em}
h1{font-size:1.35em;margin:0 0 .4em}h2{font-size:1em;margin:0 0 .3em;font-weight:600}h2 b{margin:0 .6em}
h2 small{font-weight:400;color:#555}p{margin:.3em 0;max-width:62em}
.legend{color:#444}.ramp{display:inline-block;width:4.5em;height:.8em;border:1px solid #999;vertical-align:-.08em}
.tokens{font:12px/1.9 ui-monospace,monospace;max-width:none;overflow-wrap:anywhere}
.tokens span{padding:.15em .3em;margin-right:2px;border-bottom:2px solid #bbb;background:#f4f4f4}
.tokens .decoded{border-color:#0072b2}.tokens .newest{border-color:#000;font-weight:700}
.head{border-top:1px solid #ddd;padding:.7em 0}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(17em,1fr));gap:1.8em}
figure{margin:0;min-width:0}figcaption{color:#333;overflow-wrap:anywhere}
"""

_DRAW = f"""
"use strict";
const patterns = JSON.parse(document.getElementById("patterns").textContent);
const waiting = patterns.figures.slice();
function drawNext() {{
  const figure = waiting.shift();
  if (!figure) {{
    document.body.dataset.drawn = String(patterns.figures.length);
    return;
  }}
  const side = patterns.tokens.length;
  CircuitsVis.render(figure.id, CircuitsVis.AttentionPattern, {{
    tokens: patterns.tokens,
    attention: figure.rows.map((row) => row.concat(Array(side - row.length).fill(0))),
    minValue: -figure.limit,
    maxValue: figure.limit,
    negativeColor: "{_LESS}",
    positiveColor: figure.colour,
    upperTriColor: "{_LATER}",
    showAxisLabels: true,
    maskUpperTri: true,
  }});
  setTimeout(drawNext);
}}
drawNext();
"""
