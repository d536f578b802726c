"""A new policy, metric, kernel mode or experiment is one new file: listed, run, in the tables, in the contracts, a command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import kvinterp
from command_line import one_after_another, program

pytestmark = [pytest.mark.xdist_group("one file"), pytest.mark.slow]

FILES = {
    "policies/halved.py": '''"""Keys and values, smaller."""

import dataclasses

from kvinterp.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Halved(Policy):
    """Keeps a share of every number."""

    share: float = 0.5

    def write(self, keys, values, place):
        return keys * self.share, values * self.share
''',
    "metrics/farthest.py": '''"""The farthest logit."""

from kvinterp.metrics.base import Metric, float64_pair


def farthest(a, b):
    """Largest absolute difference of two logits, doubled."""
    one, other = float64_pair(a, b, "logits")
    return 2 * (one - other).abs().amax(-1)


METRICS = (Metric("farthest_doubled", farthest, "logits", 0.0, nonnegative=True),)
''',
    "metrics/sign.py": '''"""Whether two paths' logits have the same signs; and how far apart the first numbers of two head vectors are."""

from kvinterp.metrics.base import Metric


def same_signs(a, b):
    """Share of the vocabulary whose logits have one sign."""
    return (a.sign() == b.sign()).double().mean(-1)


def first_apart(a, b):
    """Distance of the first numbers."""
    return (a[..., 0].double() - b[..., 0].double()).abs()


METRICS = (
    Metric("same_signs", same_signs, "logits", 1.0, nonnegative=True),
    Metric("first_apart", first_apart, "kv", 0.0, nonnegative=True, over=("max", "mean")),
)
''',
    "paths/kernels/untouched.py": '''"""``untouched``: the machine's own kernels under another name."""

import dataclasses

from kvinterp.paths.kernels.base import KernelMode, Kernels


@dataclasses.dataclass(frozen=True)
class Untouched(Kernels):
    """Touches nothing."""

    def mode(self, adapter):
        return KernelMode()
''',
    "papers/studies/counting.py": '''"""Count to a number, for nobody."""

import dataclasses
import pandas as pd

from kvinterp.commands.cells import Cell
from kvinterp.common.result import Result
from kvinterp.commands.base import Experiment
from kvinterp.commands.options import option


class Counting(Experiment):
    """How far?"""

    most: int = option(3, "How far to count.")
    by_names: tuple[int, ...] = option((1, 2), "What is added.", example="1,2")

    def cells(self):
        return [Cell(f"number-{n}", counted, {"n": n, "more": list(self.by_names)}) for n in range(self.most)]

    def reduce(self, made):
        tables = {"numbers": pd.concat([tables["table"] for tables, _ in made.values()], ignore_index=True)}
        return Result(tables, {"count": len(made)})

    def sentences(self, outcome):
        return [f"counted to {outcome.summary['count']}"]


def counted(n, more):
    return pd.DataFrame({"n": [n + sum(more)]})
''',
}


IN_EVERY_TABLE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import kvinterp as kv

torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)).eval()
short = {"max_new_tokens": 4, "progress": "none", "cache_errors": "whole"}
found = kv.compare(model, [[1, 2, 3, 4]], a="cached", b="recompute@bfloat16", **short)
assert found.steps["same_signs"].between(0.5, 1).all()
later = found.kv[found.kv["step"] > 0]
assert (found.kv_positions["first_apart"].max(), later["first_apart"].max()) == (later["first_apart"].max(),) * 2
assert 0 < found.kv_steps["first_apart_mean"].max() < found.kv_steps["first_apart"].max()
print(kv.__file__)
"""
PATH = "cached[kernels=untouched]+halved(0.25)"
SHORT = ("--a", PATH, "--prompts", "arithmetic:1", "--max-new-tokens", "3", "--stop", "length", "--record", "")
PROGRAMS = {
    "list": program("list"),
    "list metrics": program("list", "metrics"),
    "list experiments": program("list", "experiments"),
    "compare": program("compare", "zoo:gqa2-mini", *SHORT, "--dtype", "float32", "--out", "compared"),
    "tables": IN_EVERY_TABLE,
    "help": program("study", "counting", "--help"),
    "count": program("study", "counting", "--most", "2", "--by-names", "1,10", "--out", "out"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    package = Path(str(kvinterp.__file__)).parent
    shutil.copytree(package, folder / "kvinterp", ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in FILES.items():
        (folder / "kvinterp" / name).write_text(content)
    return folder


def environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def printed(copy: Path) -> Callable[[str], str]:
    """What each program printed."""
    said = one_after_another(PROGRAMS, copy, environment(copy))

    def get(name: str) -> str:
        out, error = said[name]
        assert not error, error[-3000:]
        return out

    return get


def test_each_is_listed(printed):
    shown = printed("list")
    for words in ("halved", "farthest_doubled", "untouched", "counting", "same_signs", "first_apart"):
        assert words in shown
    assert "kv.first_apart" in printed("list metrics")
    assert "Count to a number" in printed("list experiments")


def test_policy_kernel_mode_and_metric_run_and_fill_a_table(printed, copy):
    printed("compare")
    steps = pd.read_parquet(copy / "compared" / "steps.parquet").set_index("step")
    assert steps.loc[0, "farthest_doubled"] == 0
    assert (steps.loc[1:, "farthest_doubled"] > 1e-3).all()
    assert (steps["farthest_doubled"] == 2 * steps["max_abs_logit"]).all()


def test_a_metric_of_logits_and_one_of_keys_and_values_are_in_every_table(printed, copy):
    assert printed("tables").strip() == str(copy / "kvinterp" / "__init__.py")


def test_an_experiment_is_a_command(printed, copy):
    shown = printed("help")
    assert "--most" in shown
    assert "--by-names" in shown
    assert "How far to count." in shown
    assert "counted to 2" in printed("count")
    assert pd.read_parquet(copy / "out" / "numbers.parquet")["n"].tolist() == [11, 12]
