"""The table of architectures: each use has a column, and each failure a word that no other hides."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from browser import SCHEMES, WIDTHS, faults_of
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import RIGHT
from kvinterp.auditing.programs.search import FIRST, run_program
from wild import __main__ as main
from wild import board, board_page, lens
from wild.__main__ import searched
from wild.making import AUTO, CAUSAL, file_of, known, subject_of, untried, written
from wild.page import BEYOND, COLUMNS, column_of, line_of, verdict, write, write_board

SEQUENCES, SPEECH, IMAGES = [auto for auto in AUTO if auto != CAUSAL]


def row(**told):
    return {**untried(CAUSAL, "x"), **told}


def test_every_use_has_a_column_and_every_column_a_use():
    made = {}
    exec(written(CAUSAL, "llama", {}), made)
    found = row(**searched(subject_of(CAUSAL, made["model"].eval())[0], len(FIRST)))
    assert all(column_of(use) for use in found["uses"]), found["uses"]
    assert line_of(found) == ["right"] * len(COLUMNS) + [""]
    assert verdict(found) == "right"


def test_a_wrong_use_is_not_hidden_by_a_right_one():
    wrong = {"use": "generate(), left padding", "beyond": "no"}
    said = row(uses={"generate()": {"word": "right"}, "left padding": {"word": "off without a cache too"}}, wrong=[wrong])
    words = dict(zip([*COLUMNS, BEYOND], line_of(said), strict=True))
    assert (words["generate"], words["padding"], words[BEYOND]) == ("**wrong**", "*off too*", "")
    assert verdict(said) == "wrong"
    assert verdict(row(wrong=[{"use": "left padding", "beyond": "yes"}])) == BEYOND
    assert verdict(row(why="not built")) == "not tried"


@pytest.mark.parametrize(
    ("auto", "name", "reads"),
    [
        (SEQUENCES, "bart", "24 + 17 + 11 encoded positions"),
        (SPEECH, "speech_to_text", "encoded positions"),
        (IMAGES, "llava", "pixel_values"),
        (IMAGES, "qwen3_5", "pixel_values, image_grid_thw, mm_token_type_ids"),
    ],
)
def test_rows_of_other_classes_read_a_source_each(auto, name, reads):
    """Small from the outermost config to the innermost, and each image changes what a row says."""
    made = {}
    exec(written(auto, name, known(auto)[name]), made)
    assert sum(parameter.numel() for parameter in made["model"].parameters()) < 1e6
    subject, line = subject_of(auto, made["model"].eval())
    assert subject.name.endswith(reads)
    assert line.startswith("inputs = [dict(pixel_values=") == (auto == IMAGES)
    assert run_program(subject, program_named("rows(0+0)+feed(6)+feed(2,1)")).word == RIGHT
    first, second = (subject.plain(subject.tensor([[*begin, 20]]))[:, -1] for begin in subject.begins[:2])
    assert float((first - second).abs().max()) > 1e-6


def test_what_reads_no_image_is_no_model_of_images():
    made = {}
    exec(written(CAUSAL, "llama", {}), made)
    with pytest.raises(ValueError, match="no way was found"):
        subject_of(IMAGES, made["model"].eval())


def test_each_class_has_its_page_and_a_failure_its_script(tmp_path, capsys):
    wrong = {
        "use": "left padding",
        "beyond": "no",
        "why": "",
        "error": 0.5,
        "place": "",
        "program": "rows(1)",
        "printed": "0.5",
    }
    rows = [
        {**untried(CAUSAL, "bart"), "uses": {"batch": {"word": "right"}}},
        {**untried(IMAGES, "llava"), "model": "model = 1", "inputs": "inputs = [2]", "wrong": [{**wrong, "lines": "print(inputs[0] / 4)"}]},
        untried(SEQUENCES, "bart", "not built"),
    ]  # fmt: skip
    for one in rows:
        (tmp_path / file_of(one["auto"], one["type"])).write_text(json.dumps(one))
    write(tmp_path, tmp_path)
    text, sources = ((tmp_path / name).read_text() for name in ("wild.md", "wild_sources.md"))
    assert "1 are right" in text
    assert "llava" not in text
    assert "1 are wrong" in sources
    assert "|`bart`|`AutoModelForSeq2SeqLM`|not built|" in sources
    assert "(wild_sources/llava.ImageTextToText-1.txt)" in sources
    exec((tmp_path / "wild_sources" / "llava.ImageTextToText-1.txt").read_text(), {})
    assert capsys.readouterr().out == "0.5\n"


def test_two_releases_are_compared_by_type_and_use(tmp_path):
    """What has another word in both, with the fault of whichever has one; a use that one has not tried is no change, nor is a type
    that the release names (as llama) and that was not walked there.
    """
    fault = {
        "use": "decode step",
        "beyond": "no",
        "why": "off by 0.4",
        "error": 0.4,
        "place": "K, layer 0",
        "program": "rows(0)+feed(2,1)",
        "printed": "0.4",
        "lines": "print(0.4)",
    }
    right = {"decode step": {"word": "right"}, "batch": {"word": "right"}}
    old = [{**row(uses=right), "type": name} for name in ("same", "worse", "gone", "unmade", "llama")]
    new = [
        {**row(uses={"decode step": {"word": "right"}, "fork": {"word": "right"}}), "type": "same"},
        {**row(uses={"batch": {"word": "right"}}, wrong=[fault]), "type": "worse"},
        {**row(why="ImportError: no"), "type": "unmade"},
    ]
    for name, rows in {"old": old, "new": new}.items():
        (tmp_path / name).mkdir()
        for one in rows:
            (tmp_path / name / file_of(one["auto"], one["type"])).write_text(json.dumps(one))
    before, after = (board.read(write_board(tmp_path / name, tmp_path / name / "board")) for name in ("old", "new"))
    said = [str(change) for change in board.changes(before, after)]
    assert said == [
        "gone: tried, then absent",
        "unmade: tried, then not tried",
        "worse, decode step: right, then wrong (off by 0.4; rows(0)+feed(2,1))",
    ]
    assert [str(change) for change in board.changes(after, before)][2].startswith(
        "worse, decode step: wrong, then right (off"
    )
    assert list(board.changes(before, before)) == []
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(SystemExit, match="is no board"):
        board.read(tmp_path / "none.json")


def test_a_script_of_transformer_lens_says_by_itself_whether_its_cache_is_right(tmp_path):
    """A row is right, wrong by how far it is off, or could not be tried; a diff names it with its kind."""
    (fault,) = [one for row, one in lens.scripts(["llama"]) if row["class"] == "TransformerBridge"]
    kept = row(auto="TransformerBridge of TransformerLens 4.3.0", type="llama", model="model = 1")
    right, wrong, raised = (lens.judged(kept, fault, said) for said in ("1.2e-07", "a line\n0.5", "KeyError: 'unembed'"))
    assert (right["uses"]["generate()"]["word"], right["wrong"], right["why"]) == ("right", [], "")
    assert (wrong["wrong"][0]["error"], raised["why"]) == (0.5, "KeyError: 'unembed'")
    for name, one in {"old": right, "new": wrong}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file_of(one["auto"], one["type"])).write_text(json.dumps(one))
    before, after = (board.read(write_board(tmp_path / name, tmp_path / name / "board")) for name in ("old", "new"))
    (change,) = board.changes(before, after)
    assert str(change) == (
        "TransformerBridge of TransformerLens 4.3.0, llama, generate(): right, then wrong "
        "(0.5 of the largest logit off the forward without a cache; generate(9,8))"
    )
    assert change.fault["script"] == f"model = 1\n{fault['lines']}"


def faulty(name, script, **told):
    one = {
        "use": "several chunks",
        "beyond": "no",
        "why": "0.2 off",
        "error": 0.2,
        "place": "K, layer 0",
        "program": "rows(0)",
        "printed": "0.2",
        "lines": script,
    }
    return row(type=name, wrong=[one | told])


def release_boards(folder, releases):
    """Boards of a folder, as the quick walk writes them."""
    folder.mkdir()
    for release, rows in releases.items():
        made = board.written(rows, {"torch": "2.13.0"}, {CAUSAL: ["llama", "mamba", "later"]})
        (folder / f"transformers-{release}.json").write_text(json.dumps(made))
    return board_page.boards_of(folder)


def test_the_page_of_releases_opens_the_script_of_each_fault_and_is_escaped(tmp_path):
    """The newest release is last (5.9 before 5.18); each link has its place, each badge its numbers, and a script is text."""
    right = row(type="llama", uses={"several chunks": {"word": "right"}})
    evil = "print('</pre><script>alert(1)</script>')"
    boards = release_boards(
        tmp_path / "quick",
        {
            "5.18.0": [right, faulty("mamba", evil), row(type="gone", uses={"batch": {"word": "right"}})],
            "5.9.0": [right, row(type="mamba", uses={"several chunks": {"word": "right"}})],
        },
    )
    assert [*boards] == ["5.9.0", "5.18.0"]
    assert board_page.before(boards, "5.18.0") == "5.9.0"
    with pytest.raises(SystemExit, match="no board is older"):
        board_page.before(boards, "5.9.0")
    text = board_page.write_boards(boards, tmp_path).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    links, places = (set(re.findall(pattern, text)) for pattern in (r'href="#([^"]+)"', r'id="([^"]+)"'))
    assert {"CausalLM.mamba.chunks", "types"} <= links <= places
    assert 'href="quick/transformers-5.9.0.json"' in text
    assert "In transformers 5.18.0, 1 of 3 types get a use of their cache wrong." in text
    assert "Since 5.9.0, 1 use became wrong: several chunks, with 5.18.0 (1 type)." in text
    assert "several chunks: right in 5.9.0, then <strong>wrong</strong>" in text
    assert '<th scope="row">llama</th>' in text
    assert "Absent, then tried: gone" in text
    assert "2 uses of 2 types were tried in 5.18.0 and in a release before it" in text
    said = json.loads((tmp_path / "badges" / "transformers-5.18.0.json").read_text())
    assert (said["message"], said["color"]) == ("1 of 3 types wrong", "red")  # Of three that there are.
    assert "0 of 2 types wrong (3 there are)" in (tmp_path / "badges" / "transformers-5.9.0.svg").read_text()


def test_a_cell_has_one_mark_where_all_releases_agree_and_else_one_each(tmp_path):
    uses = {"several chunks": {"word": "right"}, "batch": {"word": "right"}}
    boards = release_boards(
        tmp_path / "quick",
        {
            "5.1.0": [row(type="llama", uses=uses), row(type="later", uses=uses), row(type="mamba", uses=uses)],
            "5.2.0": [row(type="llama", uses=uses), faulty("mamba", "print(1)"), row(type="other", uses=uses)],
            "5.2.1": [{**row(type="llama", uses=uses), "auto": f"Bridge {lens.LENS} 4.3.0"}],  # No type of its own.
            "5.3.0": [row(type="llama", uses=uses), faulty("later", "print(1)"), row(type="other", uses=uses)],
        },
    )
    board_page.write_boards(boards, tmp_path)
    (table,) = [table for table in board_page.shown(boards)["tables"] if table["id"] == "types"]
    assert table["columns"] == ["chunks", "batch"]
    marks = {row["name"]: "".join(mark["text"] for mark in row["cells"][0]) for row in table["rows"]}
    assert marks == {"llama": "✓", "later": "✓·✗", "mamba": "✓✗·", "other": "–✓✓"}
    changed = [
        (pair["after"], one["name"])
        for pair in board_page.shown(boards)["pairs"]
        for use in pair["uses"]
        for one in use["types"]
    ]
    assert changed == [("5.2.0", "mamba"), ("5.3.0", "later")]  # Walked last three releases before.
    (since,) = [
        use["since"] for pair in board_page.shown(boards)["pairs"] for use in pair["uses"] if pair["after"] == "5.3.0"
    ]
    assert since == "5.1.0"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_the_page_of_releases_reads_in_a_browser(page_opened):
    """Wide and narrow, light and dark: nothing is cut off, and nothing is asked for but pictures beside it."""
    docs = Path(__file__).parents[2] / "docs"
    for scheme, width in itertools.product(SCHEMES, WIDTHS):
        opened = page_opened(docs / "board" / "index.html", width, scheme)
        # A browser shows a file's pictures and lets no script read them.
        opened.page.evaluate("document.querySelectorAll('img').forEach((picture) => picture.remove())")
        assert faults_of(opened) == [], (scheme, width)
        assert opened.console == []
        assert {url.partition(f"{docs.as_uri()}/")[2].rpartition(".")[2] for url in opened.asked} == {"svg"}


def test_a_type_that_takes_too_long_has_a_row_that_says_so(tmp_path, monkeypatch):
    """Neither absent nor wrong: the process that tries it is killed at its limit of the processor."""

    class NoScripts:
        def send(self, scripts):
            assert not scripts

        def recv(self):
            return []

    def never(*given):
        while True:
            pass

    monkeypatch.setattr(main, "tried", never)
    monkeypatch.setattr(main, "QUICK_SECONDS", 1)
    main.row_of(CAUSAL, "x", {}, 1, "each", tmp_path, NoScripts())
    (said,) = board.written([json.loads((tmp_path / "x.json").read_text())], {}, {CAUSAL: ["x"]})["rows"]
    assert said["why"] == "not tried: it takes more than 1 seconds of the processor"
    assert (said["uses"], said["wrong"]) == ({}, [])
    assert verdict(row(why=said["why"])) == "not tried"


def test_the_script_of_what_no_longer_raises_prints_nothing_and_that_is_said(monkeypatch):
    prints = {"pass": "", "print(2)": "2"}
    monkeypatch.setattr(main, "alone", lambda scripts: [prints[script] for script in scripts])
    shown = [board.Change(CAUSAL, "x", "batch", "wrong", "right", {"script": script}) for script in prints]
    none = board.Change(CAUSAL, "x", "", "absent", "tried")
    assert main.again([*shown, none]) == ["nothing, and it ends", "2", ""]


def test_a_report_has_what_got_worse_with_its_script_and_what_it_prints_now():
    before, after = (
        board.written([one], {}, {CAUSAL: ["mamba"]})
        for one in (row(type="mamba", uses={"several chunks": {"word": "right"}}), faulty("mamba", "print(0.2)"))
    )
    (worse,) = board.changes(before, after)
    second = dataclasses.replace(worse, type="mamba2", fault={**worse.fault, "script": "print(2)"})
    text = board_page.report("5.23.0", "5.24.0", [worse, second], ["0.3", ""])
    assert "Uses that were not wrong with 5.23.0 and are with 5.24.0: 2." in text
    assert "## several chunks: mamba, mamba2\n" in text
    assert "|`mamba`|0.2 off|K, layer 0|`rows(0)`|`0.3`|\n|`mamba2`|0.2 off|K, layer 0|`rows(0)`|`0.2`|\n" in text
    assert text.count("```python\nprint(0.2)\n```") == 1
    assert "print(2)" not in text
    (better,) = board.changes(after, before)
    text = board_page.report("5.23.0", "5.24.0", [better], [""])
    assert "nothing to report" in text
    assert "- mamba, several chunks: wrong, then right (0.2 off; rows(0))" in text
