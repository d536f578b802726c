"""The bank: every clean model passes, every planted bug fails with the right place.

The models and bugs in `benchmarks/bugs/bank` were made without looking at how the audit works. By default a few of both run; all of them run
with `pytest --everything tests/auditing/test_bank.py`, and `python benchmarks/bugs/bank/table.py` makes their table.
"""

from __future__ import annotations

import pytest
from architectures import some
from bank.bugs import BUGS
from bank.clean import CLEAN, KNOWN_TRANSFORMERS_BUGS
from bank.run import CANNOT_TELL, FAIL, PASS, audited, audited_bug, wrong_about

BY_DEFAULT = {"gpt2-float16", "falcon-multi-head", "first-key-zero", "sum-of-a-block-off-by-one-percent"}
"""Two of either, in the cache and in a block, in float32 and in 16 bits, drawn from those that take a few seconds."""

FEW = {"programs": 30, "seconds": 12}
"""As many programs as try each use of the cache once: by default a case takes seconds."""

CANNOT_TELL_SHARE = 0.03
_told: dict[str, dict[str, int]] = {"clean": {}, "bugs": {}}


def _cases(names: dict[str, object]) -> list[object]:
    marks = [pytest.mark.bank]
    return [
        pytest.param(name, marks=marks if name in BY_DEFAULT else [*marks, pytest.mark.long], id=name) for name in names
    ]


@pytest.mark.parametrize("name", _cases(CLEAN))
def test_a_clean_model_passes(name: str) -> None:
    verdict = audited(CLEAN[name].build(), CLEAN[name].dtype, **FEW if name in BY_DEFAULT else {})
    _told["clean"][name] = verdict.exit_code
    if verdict.exit_code == CANNOT_TELL:
        pytest.xfail(f"cannot tell: {verdict.reading}")
    assert verdict.exit_code == PASS, (
        f"{name}: {verdict.verdict} at layer {verdict.first_layer}, {verdict.tensor}: {verdict.reading}"
    )


@pytest.mark.parametrize("name", _cases(BUGS))
def test_a_planted_bug_fails_with_its_place(name: str) -> None:
    verdict = audited_bug(BUGS[name], **FEW if name in BY_DEFAULT else {})
    _told["bugs"][name] = verdict.exit_code
    if verdict.exit_code == CANNOT_TELL:
        pytest.xfail(f"cannot tell: {verdict.reading}")
    assert not (wrong := wrong_about(BUGS[name], verdict)), f"{name}: {wrong}: {verdict.reading}"


@pytest.mark.bank
@pytest.mark.parametrize("kind", ["clean", "bugs"])
def test_it_can_tell_in_nearly_all_cases(kind: str) -> None:
    """Runs after the cases above and counts what they were told; on its own it has nothing to count, and says so."""
    told = _told[kind]
    if not told:
        pytest.skip("none of the cases that this counts ran in this process")
    unsure = [name for name, code in told.items() if code == CANNOT_TELL]
    assert len(unsure) <= CANNOT_TELL_SHARE * len(told), f"cannot tell of {len(unsure)} of {len(told)}: {unsure}"


@pytest.mark.bank
@pytest.mark.parametrize(
    "name",
    some(
        [name for name, known in KNOWN_TRANSFORMERS_BUGS.items() if known.where == "steps" and known.difference > 0.1], ()
    ),
)
def test_a_bug_of_transformers_itself_fails(name: str) -> None:
    """What plain transformers code shows to differ in float64 by far more than any rounding is no pass."""
    assert audited(KNOWN_TRANSFORMERS_BUGS[name].build(), "float32").exit_code == FAIL
