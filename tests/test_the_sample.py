"""What runs by default meets every pair, is the same on every machine, and leaves out no model that the tests have."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sampling import chosen, left_out
from support import CASES, FEATURES, TINY_CASES, Case


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def items(marks: tuple[str, ...] = (), **parameters: Any) -> list[Any]:
    """What pytest would collect of a function with these parameters."""
    return [
        Item(
            nodeid=f"test_it[{'-'.join(map(str, values))}]",
            callspec=SimpleNamespace(params=dict(zip(parameters, values, strict=True))),
            get_closest_marker=lambda name: name in marks,
            own_markers=[SimpleNamespace(name=name) for name in marks],
        )
        for values in itertools.product(*parameters.values())
    ]


def met(taken: set[Any], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(item.callspec.params[name] for name in names) for item in taken}


def featured(taken: set[Any]) -> set[tuple[str, str, str | None]]:
    cases: list[Case] = [item.callspec.params["case"] for item in taken]
    return {(feature, case.kind, case.attention) for case in cases for feature in FEATURES[case.model]}


def test_every_feature_meets_every_kind_dtype_and_path() -> None:
    family = items(case=CASES, dtype=("float16", "float32"), path=("cached", "recompute"))
    taken = family_sample(family)
    assert len(taken) < len(family) / 10
    assert featured(taken) == featured(set(family))
    assert len(met(taken, "dtype", "path")) == 4
    for name in ("dtype", "path"):
        ways = {(case.kind, case.attention, value) for case, value in met(taken, "case", name)}
        assert ways == {(case.kind, case.attention, value) for case, value in met(set(family), "case", name)}
    assert any(case.model.startswith("zoo:") for (case,) in met(taken, "case"))


def family_sample(family: list[Any]) -> set[Any]:
    taken = {item.nodeid for item in chosen(family)}
    # Whatever the order in which they are collected.
    assert {item.nodeid for item in chosen(family[::-1])} == taken
    left = {item.nodeid for item in left_out(family)}
    assert left == {item.nodeid for item in family} - taken
    return {item for item in family if item.nodeid in taken}


def test_marks() -> None:
    pairs, each = (items((mark,), a="abc", b="de", c="fg") for mark in ("pairs", "each"))
    assert [len(met(family_sample(pairs), *names)) for names in ("ab", "bc", "ac")] == [6, 4, 6]
    assert [len(met(family_sample(each), name)) for name in "abc"] == [3, 2, 2]
    assert len(family_sample(each)) == 3
    assert not left_out(items(a="abc"))
    assert len(left_out(items(("long",), a="abc"))) == 3
    assert not left_out(items(("always",), case=TINY_CASES))


def test_of_what_is_slow_one_case_runs_by_default() -> None:
    """And of a test without cases none; all that were chosen run with ``--slow``."""
    family = items(("slow",), a="abc")
    assert len(left_out(family)) == 2
    assert not left_out(family, slow=True)
    for item in (of_module := items(("slow",), a="abc")):
        item.own_markers = []
    assert len(left_out(of_module)) == 3
    alone = [Item(nodeid="test_alone", get_closest_marker=lambda name: name == "slow", own_markers=[])]
    assert left_out(alone) == set(alone)
    assert not left_out(alone, slow=True)
    both = items(("slow", "each"), a="abc", b="de")
    assert len(left_out(both)) == 5
    assert len(left_out(both, slow=True)) == 3


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Two stop the collection of the whole suite, which a run of either alone does not show."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []
