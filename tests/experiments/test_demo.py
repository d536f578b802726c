"""The demo: what it plans, that it all runs, and that it goes on where it stopped."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import kvinterp.comparison
from kvinterp.cli import app
from kvinterp.errors import InputError
from kvinterp.study.experiments.demo import FLIPS, SMOKE, Demo

pytestmark = [pytest.mark.xdist_group("demo"), pytest.mark.slow]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke demo, made by its command."""
    folder = tmp_path_factory.mktemp("demo")
    made = CliRunner().invoke(app, ["demo", "--smoke", "--out", str(folder / "out"), "--picture", str(folder / "demo.png")])
    assert made.exit_code == 0, made.output
    assert str(folder / "out" / "report.html") in made.output
    return folder


def test_it_plans_two_models_two_kinds_two_protocols_and_a_ladder() -> None:
    plan = Demo().plan()
    main = {(run.model, run.kind, run.protocol) for run in plan.values() if run.dtype == "float16"}
    kinds = {kind for _, kind, _ in main}
    assert len(main) == 8
    assert "native" in kinds
    assert kinds & {"hooked", "bridge"}
    ladder = {(run.model, run.dtype) for run in plan.values() if run.dtype != "float16"}
    assert ladder == {(f"zoo:{m}-mini", d) for m in ("mistral", "gemma2") for d in ("float32", "float64")}
    assert all(run.attention is None and run.record is None for run in plan.values())


def test_it_writes_tables_figures_report_and_picture(smoke: Path) -> None:
    out = smoke / "out"
    assert {p.name for p in (out / "runs").iterdir()} == {*SMOKE.plan(), FLIPS}
    for name in SMOKE.plan():
        summary = json.loads((out / "runs" / name / "summary.json").read_text())
        assert summary["counts"]["failed"] == 0
        steps = pd.read_parquet(out / "runs" / name / "steps.parquet")
        assert (steps.loc[steps["step"] == 0, "max_abs_logit"] == 0).all(), "step 0 is the same computation (law 3)"
    html = (out / "report.html").read_text()
    assert html.count('class="drawn') == len(list((out / "figures").glob("*.png"))) + 1 >= 6, (
        "the first one is drawn narrow, too"
    )
    assert "derived" in html, "SDPA shows no pattern: it is worked out beside it, and called so"
    assert (smoke / "demo.png").stat().st_size > 20_000


@pytest.mark.bits
@pytest.mark.long
def test_it_holds_a_case_in_which_a_token_flips(tmp_path: Path) -> None:
    """On every processor: eight bits for K and V move the logits a thousand times further than the order of additions does."""
    # Some of the 40: eight are enough on most processors.
    ways = {"progress": "none", "figures": "none"}
    made = (Demo(flip_problems=count).flips().run(tmp_path / str(count), **ways) for count in (8, 32))
    assert any(result.examples["flip_index"].notna().any() for result in made)


def test_a_finished_demo_is_not_touched(smoke: Path) -> None:
    with pytest.raises(InputError, match="already holds a report"):
        Demo().run(smoke / "out")


@pytest.mark.parametrize("existing", ["overwrite", "use"])
@pytest.mark.parametrize("name", ["report.html", "figures/kl_by_step.png"])
def test_a_page_or_figure_of_somebody_elses_is_left_alone(tmp_path: Path, name: str, existing: str) -> None:
    """--overwrite removed a report.html that kvinterp had not written."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="which kvinterp did not write"):
        SMOKE.run(tmp_path, existing, "none")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / name]


def test_an_unfinished_demo_makes_only_what_is_missing(
    smoke: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(smoke / "out", tmp_path / "out")
    (tmp_path / "out" / "report.html").unlink()
    gone = "mistral-mini-native-float16-free"
    shutil.rmtree(tmp_path / "out" / "runs" / gone)
    compared: list[str] = []
    compare = kvinterp.comparison.compare

    @functools.wraps(compare)
    def counting(adapter: Any, *args: Any, **named: Any) -> Any:
        compared.append(f"{adapter.facts.name} {adapter.kind} {str(adapter.dtype)[6:]} {named['protocol']}")
        return compare(adapter, *args, **named)

    monkeypatch.setattr(kvinterp.comparison, "compare", counting)
    results = SMOKE.run(tmp_path / "out", progress="none", figures="none").members
    assert compared == ["zoo:mistral-mini native float16 free"]
    assert [r.folder.name for r in results] == [*SMOKE.plan(), FLIPS]


def test_without_hooked_transformer_the_bridge_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.errors import UnsupportedError

    def missing() -> type:
        raise UnsupportedError("the installed TransformerLens has no HookedTransformer")

    monkeypatch.setattr("kvinterp.models.convert.hooked_class", missing)
    kinds = {run.kind for run in Demo().plan().values()}
    assert kinds == {"bridge", "native"}
