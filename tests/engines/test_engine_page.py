"""The page of another engine's log-probs: tokens shaded on one scale, the worst sequence first, and small for a rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page
from kvinterp.auditing.checks import Check
from kvinterp.auditing.verdict import Verdict
from kvinterp.engines.page import OPEN, engine_fragment, page, shaded

RNG = np.random.default_rng(0)


def table(sequences: int = 8, length: int = 40, **texts: str) -> pd.DataFrame:
    """Differences of one unit of 0.01 nats; sequence 3 is far off from position 20 on, and one token is not given."""
    at = np.tile(np.arange(length), sequences)
    name = np.repeat([texts.get(f"s{n}", f"s{n}") for n in range(sequences)], length)
    ours = np.where(at == 0, np.nan, -2.0)
    engine = ours + 0.01 * RNG.choice([-0.5, 0.5], len(at))
    engine[(name == texts.get("s3", "s3")) & (at >= 20)] += 0.31
    engine[5] = np.nan
    return pd.DataFrame({
        "sequence": name, "position": at, "part": np.where(at < 10, "prompt", "tokens"), "token": at,
        "text": texts.get("text", " word"), "engine": engine, "ours": ours, "difference": engine - ours,
    })  # fmt: skip


def verdict(tokens: pd.DataFrame | None, word: str = "bug", **given: Any) -> Verdict:
    found = {"rungs": [], "tried": [], "begins": 20, "beside": "float16", "our_mean_distance": 0.01} | given
    checks = (Check("readable", "passed", EVIL, None), Check("shape", "passed", "from position 20 on", None))
    reading = f"FAIL  {word}  another engine's log-probs against x\n  it is reproduced (n = 9)."
    return Verdict(word, None, 20, "", "", {}, checks, (), reading, provenance={"model": EVIL}, given=found, tokens=tokens)


def test_shades_are_units_of_rounding_and_the_worst_sequence_is_first() -> None:
    found = shaded(table(), (0.01, "rounding"), 20)
    looks = [sequence["tokens"] for sequence in found["sequences"]]
    first = looks[0]
    assert found["sequences"][0]["name"] == "s3"
    assert found["sequences"][0]["number"] == 4, "line 1 and the map count from 1"
    assert len(found["sequences"]) == 8
    assert [look for _, look, _ in first[8:12]] == ["p", "p", "", ""], "half a unit has no shade"
    assert first[20][1] == "a4 s"
    assert {look for _, look, _ in first[21:]} == {"a4"}, "31 units, above ours"
    assert first[20][2].startswith("20: engine -1.6")
    assert found["behind"] == 8 * 20
    (missing,) = (row[5] for row in looks if row[5][1].startswith("n"))
    assert missing[2] == "5: not given"
    assert {row[0][1] for row in looks} == {"p"}, "the first token has no log-prob, and nobody left it out"


@IN_A_BROWSER[0]
@IN_A_BROWSER[1]
def test_the_page_in_a_browser(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    """Every shade can be read in light and dark, wide and narrow; an id and a token that are markup stay text."""
    every = table(s3=EVIL, text=EVIL)
    every.loc[41:52, "difference"] = 0.01 * np.array([1, -1, 4, -4, 12, -12, 40, -40, 140, -140, 0, 0.2])
    file = tmp_path / "report.html"
    file.write_text(page(verdict(every)), encoding="utf-8")
    check_page(page_opened, file)
    opened = page_opened(file)
    check_markup(opened)
    assert opened.page.locator("details .shaded").count() == 8 - OPEN
    opened.quiet()
    assert "<img" not in engine_fragment(verdict(every))
