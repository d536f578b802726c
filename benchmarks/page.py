"""How large a page of many prompts is, how soon it opens and how soon a click is answered, in headless Chromium.

The base of the ratio is what the page would be without a script: the same tables with a figure drawn beforehand for every
token (its map of heads as SVG). Two such pages, of some hundred and of some thousand figures, are measured, and a page of all
of them is reckoned along the line through the two. The tables are made up, so no model runs:

    python benchmarks/page.py                       # 200 prompts of 128 steps; writes benchmarks/results/page-MACHINE.json
    python benchmarks/page.py --prompts 20 --steps 32 --out /tmp
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from kept import keep
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

from kvinterp._version import __version__
from kvinterp.comparison import COLUMNS, PARTS, Comparison
from kvinterp.models.provenance import device_name
from kvinterp.report.page import Text, render
from kvinterp.report.tokens import changes

WORDS = [" the", " of", " and", "\n", " answer", " is", " 12", ".", " a", " cat", "s", " 7", "=", " so", " one", " who"]
DRAWN = (200, 2000)
"""How many figures the plain pages are made of, from which one of all is reckoned."""


def made_up(prompts: int, steps: int, layers: int, heads: int, prompt: int = 64) -> Comparison:
    """A comparison of numbers drawn at random: a flip in every tenth prompt, attention rows of three steps each."""
    rng = np.random.default_rng(0)
    example, step = (axis.ravel() for axis in np.meshgrid(range(prompts), range(steps), indexing="ij"))
    count = len(example)
    kl = 10.0 ** rng.uniform(-9, -2, count)
    token = rng.integers(0, len(WORDS), count)
    flipped = (step == 40 % steps) & (example % 10 == 0)
    of = {"example": example, "step": step, "after_flip": False}
    table = pd.DataFrame({
        **of, "token_a": token, "token_b": np.where(flipped, (token + 1) % len(WORDS), token), "kl": kl, "flipped": flipped,
        "max_abs_logit": np.sqrt(kl), "probability_a": rng.uniform(size=count), "probability_b": rng.uniform(size=count),
        "margin_a": rng.uniform(0, 9, count), "margin_b": rng.uniform(0, 9, count), "top1_agree": ~flipped,
    })  # fmt: skip
    table = table.assign(boundary_a=table["margin_a"], boundary_b=table["margin_b"])
    return Comparison(
        **{name: pd.DataFrame(columns=COLUMNS.get(name, ())) for name in PARTS}
        | {
            "steps": table,
            "examples": pd.DataFrame({"example": range(prompts), "id": [f"prompt-{n}" for n in range(prompts)],
                                      "prompt_tokens": prompt, "steps": steps}),
            "heads": _spread(of, rng, {"layer": layers, "head": heads}, "kl"),
            "layers": _spread(of, rng, {"layer": layers}, "relative_l2").assign(site="resid_post"),
            "tokens": _tokens(table, prompts, prompt, rng),
            "attention_rows": _rows(table, layers, heads, prompt, rng),
        },
        provenance={"paths": {"a": "cached", "b": "recompute"}, "protocol": "matched", "strategy": "greedy", "derived": []},
    )  # fmt: skip


def _spread(of: dict[str, Any], rng: np.random.Generator, axes: dict[str, int], value: str) -> pd.DataFrame:
    size = int(np.prod([*axes.values()]))
    count = len(of["example"])
    labels = np.indices([*axes.values()]).reshape(len(axes), -1)
    return pd.DataFrame({
        **{name: np.repeat(column, size) if np.ndim(column) else column for name, column in of.items()},
        **{name: np.tile(labels[at], count) for at, name in enumerate(axes)},
        value: 10.0 ** rng.uniform(-10, -2, count * size),
    })  # fmt: skip


def _tokens(steps: pd.DataFrame, prompts: int, prompt: int, rng: np.random.Generator) -> pd.DataFrame:
    asked = pd.DataFrame({
        "example": np.repeat(range(prompts), prompt), "path": "prompt", "position": np.tile(range(prompt), prompts),
        "token": rng.integers(0, len(WORDS), prompts * prompt),
    })  # fmt: skip
    sides = [
        pd.DataFrame({"example": steps["example"], "path": side, "position": prompt + steps["step"],
                      "token": steps[f"token_{side}"]})
        for side in "ab"
    ]  # fmt: skip
    found = pd.concat([asked, *sides], ignore_index=True)
    return found.assign(text=[WORDS[token] for token in found["token"]])


def _rows(steps: pd.DataFrame, layers: int, heads: int, prompt: int, rng: np.random.Generator) -> pd.DataFrame:
    """Of the three steps of largest KL of each prompt, as a comparison keeps them."""
    kept = steps.loc[steps.groupby("example")["kl"].nlargest(3).index.get_level_values(1)]
    blocks = []
    for row in kept.itertuples():
        width = prompt + int(row.step)
        layer, head, position = (axis.ravel() for axis in np.indices([layers, heads, width]))
        a = rng.dirichlet(np.ones(width), layers * heads).ravel().astype(np.float32)
        b = a * (1 + 1e-3 * rng.standard_normal(a.size).astype(np.float32))
        columns = {
            "example": row.example,
            "step": row.step,
            "layer": layer,
            "head": head,
            "position": position,
            "a": a,
            "b": b,
        }
        blocks.append(pd.DataFrame({**columns, "after_flip": False}))
    return pd.concat(blocks, ignore_index=True)


def plain(made: Comparison, layers: int, heads: int, count: int) -> str:
    """A page of the pre-drawn maps of so many tokens."""
    heads_of = made.heads.merge(made.steps.head(count)[["example", "step"]], on=["example", "step"])
    figures = []
    for (example, step), found in heads_of.groupby(["example", "step"]):
        cells = "".join(
            f'<rect x="{12 * row.head}" y="{12 * row.layer}" width="11" height="11" fill="#4a148c"'
            f' opacity="{(np.log10(row.kl) + 10) / 8:.2f}"><title>{row.kl:.2e}</title></rect>'
            for row in found.itertuples()
        )
        figures.append(
            f'<h3>{example}, step {step}</h3><svg viewBox="0 0 {12 * heads} {12 * layers}" width="200">{cells}</svg>'
        )
    return render("plain", [Text("plain")]).replace("</main>", "".join(figures) + "</main>")


def along(few: float, many: float, whole: int) -> float:
    """What there would be of all figures, on the line through what there is of a few and of many."""
    return few + (many - few) / (DRAWN[1] - DRAWN[0]) * (whole - DRAWN[0])


def opened(page: Page, path: Path, ready: str) -> float:
    """Seconds from asking for a page until something is there."""
    begun = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector(ready)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - begun


ANSWERED = """(place) => new Promise((done) => {
  const cell = document.querySelector(place), begun = performance.now();
  cell.click();
  requestAnimationFrame(() => setTimeout(() => done((performance.now() - begun) / 1000)));
})"""


CHOSEN = """() => {
  const select = document.querySelector("#kv-changes select"), begun = performance.now();
  select.value = 7;
  select.dispatchEvent(new Event("change"));
  return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done((performance.now() - begun) / 1000))));
}"""


def measured(page: str, bases: tuple[str, str], repeats: int) -> dict[str, list[float]]:
    """Seconds: the page and the two plain ones opened, and in the page a token, a head and another prompt chosen."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    seconds: dict[str, list[float]] = {name: [] for name in ("opened", "token", "head", "prompt", "few", "many")}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        paths = [Path(folder) / f"{name}.html" for name in ("page", "few", "many")]
        for path, text in zip(paths, (page, *bases), strict=True):
            path.write_text(text, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(offline=True)
        # Side by side, so that a slow moment of the machine falls on all.
        for _ in range(repeats):
            tab = context.new_page()
            seconds["opened"].append(opened(tab, paths[0], "#kv-changes[data-drawn]"))
            seconds["token"].append(tab.evaluate(ANSWERED, ".kv-strips [data-at='0 9']"))
            seconds["head"].append(tab.evaluate(ANSWERED, ".kv-heat [data-at='0 0']"))
            seconds["prompt"].append(tab.evaluate(CHOSEN))
            tab.close()
            for name, path in zip(("few", "many"), paths[1:], strict=True):
                tab = context.new_page()
                seconds[name].append(opened(tab, path, "svg"))
                tab.close()
        browser.close()
    return seconds


def main() -> None:
    """Measures and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"prompts": 200, "steps": 128, "layers": 4, "heads": 8, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    given = parser.parse_args()
    made = made_up(given.prompts, given.steps, given.layers, given.heads)
    begun = time.perf_counter()
    page = render("page", changes({"": made}))
    written = time.perf_counter() - begun
    bases = [plain(made, given.layers, given.heads, count) for count in DRAWN]
    whole = given.prompts * given.steps
    seconds = measured(page, (bases[0], bases[1]), given.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    size, base = len(page.encode()), along(*(len(text.encode()) for text in bases), whole)
    opening = along(medians["few"], medians["many"], whole)
    found = {
        "tables": {name: getattr(given, name) for name in ("prompts", "steps", "layers", "heads")},
        "bytes": {"page": size, f"plain page of {whole} figures, reckoned": base, "ratio": size / base},
        "seconds": {"to write": written, "medians": medians, "all": seconds},
        "seconds to opened": {
            "page": medians["opened"],
            f"plain page of {whole} figures, reckoned from {DRAWN[0]} and {DRAWN[1]}": opening,
            "ratio": medians["opened"] / opening,
        },
        "provenance": {
            "kvinterp": __version__,
            "device": device_name(torch.device("cpu")),
            "python": platform.python_version(),
        },
    }
    keep(given.out, "page", found)
    table = Table("what", "page", "reckoned plain page", "ratio", title=f"{given.prompts} prompts of {given.steps} steps")
    table.add_row("bytes", f"{size:,}", f"{base:,.0f}", f"{size / base:.3f}")
    table.add_row("seconds to opened", f"{medians['opened']:.2f}", f"{opening:.2f}", f"{medians['opened'] / opening:.3f}")
    for name in ("token", "head", "prompt"):
        table.add_row(f"seconds to a {name} chosen", f"{medians[name]:.3f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
