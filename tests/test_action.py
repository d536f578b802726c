"""action.yml: its steps, run as GitHub's runner would, from a clean folder: red and annotated where a bug was planted, else green."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
BROUGHT = ("src", "tools/action", "pyproject.toml", "README.md", "LICENSE", "action.yml")
"""What of a checkout the action needs."""
MODELS = """
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


class MyConfig(LlamaConfig):
    def __init__(self, **given):
        super().__init__(**{**sizes, **given})


class Sound(LlamaForCausalLM):
    config_class = MyConfig


class Planted(LlamaForCausalLM):
    config_class = MyConfig

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **given):
        if position_ids is not None and past_key_values is not None and past_key_values.get_seq_length():
            position_ids = position_ids + 1
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **given)


def planted():
    return Planted(MyConfig())
"""
QUICKLY = "--checks quick --rungs float32 --lengths 5 --steps 1 --seconds 10"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What the steps did: the first exit code that is not 0, what they printed, and the page's folder."""

    code: int
    said: str
    page: Path
    outputs: str
    summary: str


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The action as a runner fetches it, and an environment with nothing of its own, on top of the suite's packages."""
    action, environment = tmp_path_factory.mktemp("action"), tmp_path_factory.mktemp("environment")
    for name in BROUGHT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (action / name).parent.mkdir(exist_ok=True)
        copy(
            ROOT / name,
            action / name,
            **({"ignore": shutil.ignore_patterns("*.egg-info")} if copy is shutil.copytree else {}),
        )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "suite.pth").write_text(sysconfig.get_path("purelib"))
    return action, environment


@pytest.fixture
def run(checkout: tuple[Path, Path], tmp_path: Path) -> Callable[..., Ran]:
    """Runs the steps in order, each as `shell: bash` is run, until one fails; those that say `always()` too."""
    action, environment = checkout
    work, temp = tmp_path / "work", tmp_path / "temp"
    work.mkdir(), temp.mkdir()
    (work / "mymodel.py").write_text(MODELS)
    files = {"GITHUB_OUTPUT": tmp_path / "outputs", "GITHUB_STEP_SUMMARY": tmp_path / "summary"}

    def steps(**given: str) -> Ran:
        inputs = {name: given.get(name, what.get("default", "")) for name, what in ACTION["inputs"].items()}
        assert not {*given} - {*inputs}
        known = {f"inputs.{name}": value for name, value in inputs.items()}
        known |= {"github.action_path": str(action), "runner.temp": str(temp)}

        def expanded(text: str) -> str:
            return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: known[found[1]], text)

        code, said, page = 0, [], Path()
        for step in ACTION["runs"]["steps"]:
            if code and step.get("if") != "always()":
                continue
            if "uses" in step:
                assert step["uses"].startswith("actions/upload-artifact@")
                page = Path(expanded(step["with"]["path"]))
                continue
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "what a user gives is no part of a script"
            script = temp / "script.sh"
            script.write_text(step["run"])
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            own |= {
                "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
                "PIP_NO_BUILD_ISOLATION": "0",
                "PIP_NO_INDEX": "1",
            }
            own |= {"GITHUB_WORKSPACE": str(work), **{name: str(file) for name, file in files.items()}}
            own |= {name: expanded(value) for name, value in step.get("env", {}).items()}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", script]
            ran = subprocess.run(command, cwd=work, env=own, capture_output=True, text=True, check=False, timeout=600)
            said.append(ran.stdout)
            code = code or ran.returncode
            assert ran.returncode in (0, 1), ran.stdout + ran.stderr[-3000:]
        outputs, summary = (file.read_text() if file.exists() else "" for file in files.values())
        return Ran(code, "".join(said), page, outputs, summary)

    return steps


@pytest.mark.slow
@pytest.mark.xdist_group("action")
@pytest.mark.parametrize("model", ["mymodel:Planted", "mymodel:Sound", "mymodel:planted"])
def test_a_planted_bug_is_red_at_its_line_and_a_sound_model_green(model: str, run: Callable[..., Ran]) -> None:
    ran = run(model=model, options=QUICKLY, artifact="mine")
    annotations = re.findall(r"(?m)^::error file=(.*?),line=(\d+),title=(.*?)::(.*)$", ran.said)
    verdict: dict[str, Any] = json.loads((ran.page / "verdict.json").read_text())
    assert "<html" in (ran.page / "report.html").read_text()
    assert ran.page.name == "mine"
    assert f"verdict={verdict['verdict']}" in ran.outputs
    assert verdict["reading"].splitlines()[0] in ran.summary
    if model == "mymodel:Sound":
        assert (ran.code, annotations) == (0, [])
        return
    ((file, line, title, message),) = annotations
    assert ran.code == 1
    assert file == "mymodel.py"
    assert MODELS.splitlines()[int(line) - 1].strip().startswith("def forward(self")
    assert title == "kvinterp audit%3A bug"
    assert "wrong: row 0 is off" in message


@pytest.mark.slow
@pytest.mark.xdist_group("action")
@pytest.mark.parametrize("known", ["mask and positions given", "several chunks"])
def test_a_baseline_lets_those_faults_pass_that_it_knows(known: str, run: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "work" / "known.json").write_text(json.dumps({"Planted": [known]}))
    ran = run(model="mymodel:Planted", options=QUICKLY, baseline="known.json")
    if known == "mask and positions given":
        assert (ran.code, "::error" in ran.said) == (0, False)
    else:
        assert ran.code == 1
        assert "mask and positions given: not among the faults of Planted that known.json knows" in ran.said


def test_every_input_is_used_and_every_used_one_is_given() -> None:
    used = set(re.findall(r"\$\{\{ *inputs\.([\w-]+) *\}\}", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == {*ACTION["inputs"]}
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in used)
    workflows = [yaml.safe_load(block) for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", page)]
    steps = [step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]]
    ours = [step for step in steps if "kvinterp@" in step.get("uses", "")]
    assert len(ours) == 3
    assert all({"model"} <= {*step["with"]} <= used for step in ours)
