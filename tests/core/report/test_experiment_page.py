"""The page that every experiment gets: all that was found, nothing run, and no number that is not in its tables."""

import re
from pathlib import Path

import pandas as pd

from synthetic import experiment_page

MARKUP = "<script>alert(1)</script>"


def page(folder: Path, **changed: object) -> str:
    return experiment_page(folder, MARKUP, 100, **changed).read_text()


def test_it_shows_all_that_was_found_and_runs_nothing(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert MARKUP not in text
    assert text.count("&lt;script&gt;") >= 5
    assert "default-src 'none'" in text
    for said in ("It holds for 2 prompts.", "And why.", "1, 2", "none", "kernel_flags.tf32", "False"):
        assert said in text


def test_a_long_table_says_how_much_of_it_is_shown(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert "many: 100 rows of 4 columns, the first 40 here, all in many.parquet</caption>" in text
    (open_one,) = re.findall(r"<caption>many.*?</table>", text, re.DOTALL)
    assert open_one.count("<tr>") == 41, "the first table is open, where there are no findings"
    tables = {
        "few": pd.DataFrame({"kl": [0.25], "right": pd.array([None], "boolean")}),
        "more": pd.DataFrame({"kl": range(100)}),
    }
    short = page(tmp_path, tables=tables)
    assert "few: 1 row of 2 columns</caption>" in short
    (body,) = re.findall(r"<details id=.table-more.>.*?</details>", short, re.DOTALL)
    assert body.count("<tr>") == 41
    assert '<td class="number">0.25</td>' in short
