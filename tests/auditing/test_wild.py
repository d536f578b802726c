"""The table of architectures: each use has a column, and each failure a word that no other hides."""

from __future__ import annotations

from kvinterp.auditing.programs.search import FIRST
from wild.__main__ import searched
from wild.making import CAUSAL, subject_of, written
from wild.page import BEYOND, COLUMNS, column_of, line_of, verdict


def row(**told):
    return {"type": "x", "why": "", "uses": {}, "wrong": [], **told}


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
