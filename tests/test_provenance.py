"""What a result says of the machine that made it, and the one policy on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvinterp as kv
from kvinterp.cli import app
from kvinterp.models import threads
from kvinterp.models.provenance import kernel_flags, machine, provenance
from support import PROMPT, Case

CASE = Case("llama-gqa", "native", "sdpa")


def test_the_environment_and_the_processor_are_said(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    made = provenance(load(CASE))
    assert made["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "MKL_CBWR" not in made["environment"]
    assert made["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def test_of_a_gpu_the_libraries_that_choose_its_kernels_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    made = machine(torch.device("cuda"))
    assert made["device"] == "NVIDIA H100"
    assert {"cuda", "cudnn", "driver"} <= made.keys()
    assert made["environment"]["CUBLASLT_WORKSPACE_SIZE"] == "4096"


def test_deterministic_algorithms_are_asked_for_before_a_command_runs(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert not kernel_flags()["deterministic_algorithms"]
    try:
        with pytest.raises(SystemExit):
            app(["--deterministic", "list", "protocols"])
        made = provenance(load(CASE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert made["kernel_flags"]["deterministic_algorithms"] is True
    assert made["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_back_ends_of_attention_are_said() -> None:
    assert kernel_flags()["sdpa_backends"] == ["flash", "efficient", "cudnn", "math"]
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_flags()["sdpa_backends"] == ["math"]


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(threads.VARIABLE)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def seen_while(model: kv.Adapter, verb: Any) -> set[int]:
    found: set[int] = set()
    handle = model.blocks[0].register_forward_hook(lambda *_: found.add(torch.get_num_threads()))
    try:
        verb()
    finally:
        handle.remove()
    return found


VERBS = {
    "run": lambda model: kv.run(model, PROMPT, max_new_tokens=2).provenance["threads"],
    "compare": lambda model: kv.compare(model, PROMPT, max_new_tokens=2, progress="none").provenance["threads"],
    "sweep": lambda model: kv.sweep(model, PROMPT, max_new_tokens=2, controls="none", progress="none") and None,
    "decompose": lambda model: kv.decompose(model, PROMPT, max_new_tokens=2, progress="none") and None,
    "audit": lambda model: kv.audit(model, lengths=[5], steps=1, rungs=["float32"], sweep="no") and None,
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_small_model_runs_with_one_thread_and_the_number_is_put_back(load: Any, many_threads: Any, verb: str) -> None:
    model, said = load(CASE), []
    assert seen_while(model, lambda: said.append(VERBS[verb](model))) == {1}
    assert said[0] in (None, 1)
    assert torch.get_num_threads() == 3


def test_a_large_model_keeps_the_threads_there_are(load: Any, many_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL", 10)
    model = load(CASE)
    assert seen_while(model, lambda: kv.run(model, PROMPT, max_new_tokens=2)) == {3}
    assert threads.threads_for(model) == 3


def test_the_variable_sets_the_number(load: Any, many_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(CASE)
    monkeypatch.setenv(threads.VARIABLE, "2")
    assert seen_while(model, lambda: kv.run(model, PROMPT, max_new_tokens=2)) == {2}
    for wrong in ("0", "two", "-1", "1.5"):
        monkeypatch.setenv(threads.VARIABLE, wrong)
        with pytest.raises(kv.InputError, match=r"KVINTERP_THREADS=.* expected a whole number of threads"):
            kv.run(model, PROMPT, max_new_tokens=2)
    assert torch.get_num_threads() == 3
