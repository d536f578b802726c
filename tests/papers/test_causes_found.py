"""What the root-cause experiments say of made-up tables: headline and findings, each true in one world and false in another."""

from __future__ import annotations

import pandas as pd
import pytest

import synthetic
from kvinterp.common.result import Result
from kvinterp.papers.studies.root_cause import RootCause


def causes(grown: float = 16.0, shrinks: float = 0.5, written: float = 1e-6, native: float = 1e-3,
           fixed: float = 0.0, models: int = 2) -> dict[str, pd.DataFrame]:  # fmt: skip
    names = [f"m{number}" for number in range(models)]
    sums = [
        {"product": "values", "length": length, "accumulate": "float16", "seed": seed, "mean_relative": 1e-4,
         "relative_to_result": 1e-3 * (grown if length == 64 else 1.0) * (1 + 0.01 * seed)}
        for length in (16, 64) for seed in range(6)
    ]  # fmt: skip
    behind = [
        {"model": name, "prompt": prompt, "source": 0, "layer": layer, "l2": 1.0, "relative_l2": 1.0,
         "l2_growth": 2.0**layer, "relative_growth": shrinks**layer}
        for name in names for prompt in (0, 1) for layer in (0, 1)
    ]  # fmt: skip
    write = [
        {"kernels": kernels, "prompt": prompt, "relative_error": size * (1 + 0.1 * prompt)}
        for kernels, size in (("native", written), ("batch_invariant", 0.0)) for prompt in (0, 1, 2)
    ]  # fmt: skip
    ladder = [
        {"dtype": dtype, "kernels": kernels, "protocol": "matched", "model": name, "id": "p0", "failed": False,
         "rms_logit": size, "max_abs_logit": size}
        for name in names
        for dtype, kernels, size in (("float16", "native", native), ("float16", "batch_invariant", fixed))
    ]  # fmt: skip
    frames = {"accumulation": sums, "propagation": behind, "kv_write": write, "ladder": ladder}
    return {name: pd.DataFrame(rows) for name, rows in frames.items()}


def read(tables: dict[str, pd.DataFrame]) -> tuple[str, str]:
    """The headline, and all findings a line each."""
    from kvinterp.findings import findings_of, lines_of

    asked = RootCause(tuple(tables["propagation"]["model"].unique()))
    outcome = Result(tables, {"provenance": {"m0": synthetic.ABOUT}})
    return " ".join(asked.headline(outcome)), "\n".join(lines_of(findings_of(asked.rows(outcome))))


ORDER = "the order is the cause here"


@pytest.mark.parametrize(
    ("tables", "wanted", "unwanted"),
    [
        (causes(), ["leaves no difference in float16", ORDER, "says nothing of sums kept in float16", "changes 16-fold",
                    "2 times in absolute L2 and 0.5 times in relative L2", "differ where they are written under native."], []),
        (causes(grown=1.0, shrinks=3.0), ["changes 1-fold", "3 times in relative L2"], []),
        (causes(written=0.0), ["are equal under all kernels"], ["differ where they are written"]),
        (causes(fixed=1e-5), ["make a difference in float16; one fixed order of additions leaves a difference too"], [ORDER]),
        (causes(native=0.0), ["gave the same logits in every dtype"], [ORDER, "leaves a difference"]),
    ],
)  # fmt: skip
def test_the_headline_of_the_root_cause(tables: dict[str, pd.DataFrame], wanted: list[str], unwanted: list[str]) -> None:
    headline, _ = read(tables)
    assert [text for text in wanted if text not in headline] == [], headline
    assert [text for text in unwanted if text in headline] == []


def test_what_the_other_parts_found() -> None:
    for tables, wanted in (
        (causes(), ["relative to the result 16 times", "growth of absolute L2 from layer 0, rounded once, to the last layer 2",
                    "growth of relative L2 from layer 0, rounded once, to the last layer 0.5 times"]),
        (causes(grown=1.0, shrinks=3.0, written=0.0),
         ["relative to the result 1 times", "to the last layer 3 times", "native: median relative error of K and V, written alone "
          "against written with the prefix 0 "]),
    ):  # fmt: skip
        _, lines = read(tables)
        assert [text for text in wanted if text not in lines] == [], lines
