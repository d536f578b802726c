"""The promise of CONTRIBUTING: a new metric is one new file, and every table, list and law has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kvinterp

FILES = {
    "sign.py": '''
        """Whether two paths' logits have the same signs; and how far apart the first numbers of two head vectors are."""

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
}
ASKED = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import kvinterp as kv
from kvinterp.cli import app
from kvinterp.comparison.forecast import forecast
from typer.testing import CliRunner

torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)).eval()
found = kv.compare(model, [[1, 2, 3, 4]], a="cached", b="recompute@bfloat16", max_new_tokens=4, progress="none", cache_errors="whole")
assert found.steps["same_signs"].between(0.5, 1).all()
later = found.kv[found.kv["step"] > 0]
assert (found.kv_positions["first_apart"].max(), later["first_apart"].max()) == (later["first_apart"].max(),) * 2
assert 0 < found.kv_steps["first_apart_mean"].max() < found.kv_steps["first_apart"].max()
listed = CliRunner().invoke(app, ["list", "metrics"]).output
assert "same_signs" in listed and "kv.first_apart" in listed, listed
print(kv.__file__)
"""


def test_a_metric_of_one_new_file_is_in_the_tables_and_in_the_list(tmp_path):
    copy = tmp_path / "kvinterp"
    shutil.copytree(Path(kvinterp.__file__).parent, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for name, text in FILES.items():
        lines = text.strip("\n").splitlines()
        (copy / "metrics" / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    made = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, env=environment, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout.strip() == str(copy / "__init__.py")
