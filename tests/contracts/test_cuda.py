"""The laws on a GPU: `pytest -m cuda`. Law 10 runs on the CPU too, under the backends of SDPA that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvinterp as kv
from kvinterp.paths.model_cache import CHECKED_SITES
from plain import BACKENDS, check_law_10, check_law_10_under
from support import PROMPT as LONG_PROMPT
from support import assert_bitwise

PROMPT = [3, 9, 27, 81, 5, 15, 45, 8, 24, 72]
KINDS = ("native", "bridge", pytest.param("hooked", marks=pytest.mark.hooked))
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}

cuda = pytest.mark.cuda
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
# Heads of 64 are what fast kernels are written for, heads of 6 what they are not.
shapes = pytest.mark.parametrize(
    ("device", "heads", "dtype", "head_dim"),
    [("cpu", heads, "float32", 6) for heads in HEADS]
    + [
        pytest.param("cuda", heads, dtype, head_dim, marks=cuda)
        for heads in HEADS
        for dtype in ("float16", "bfloat16", "float32")
        for head_dim in (64, 6)
    ],
)


def llama(device: str, heads: str, dtype: str, head_dim: int, attention: str) -> Any:
    """A random model of two layers."""
    query, kept = HEADS[heads]
    config = LlamaConfig(
        vocab_size=97, hidden_size=4 * head_dim, intermediate_size=40, num_hidden_layers=2, num_attention_heads=query,
        num_key_value_heads=kept, head_dim=head_dim, max_position_embeddings=96, initializer_range=0.15,
    )  # fmt: skip
    config._attn_implementation = attention
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval().to(device, getattr(torch, dtype))


# Law 10: a native path has the bits of the plain loop ------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("backend", BACKENDS)
def test_law_10_under_every_backend_of_sdpa(device: str, heads: str, dtype: str, head_dim: int, backend: str) -> None:
    check_law_10_under(backend, llama(device, heads, dtype, head_dim, "sdpa"), LONG_PROMPT)


@shapes
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_law_10_with_the_backend_that_torch_chooses(
    device: str, heads: str, dtype: str, head_dim: int, attention: str
) -> None:
    check_law_10(llama(device, heads, dtype, head_dim, attention), LONG_PROMPT)


@devices
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_preallocated_cache_gives_those_bits_or_is_left(device: str, dtype: str) -> None:
    check_law_10(llama(device, "MHA", dtype, 6, "sdpa"), LONG_PROMPT, "cached[cache=preallocated]")


# The laws of every kind -------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> kv.Adapter:
    return kv.load_model("zoo:mistral-mini", kind=request.param, dtype="float16", device="cuda")


@cuda
@pytest.mark.parametrize("path", ["cached", "recompute"])
def test_a_path_against_itself_is_bitwise_zero(model: kv.Adapter, path: str) -> None:
    same = kv.compare(model, PROMPT, path, path, max_new_tokens=8, progress="none")
    assert (same.steps["max_abs_logit"] == 0).all()
    assert (same.layers["l2"] == 0).all()
    assert (same.kv_steps["relative_error"] == 0).all()


@cuda
def test_recording_changes_nothing(model: kv.Adapter) -> None:
    sites = [site for site in CHECKED_SITES if model.supports(site, 0)]
    for path in ("cached", "recompute"):
        bare, recorded = (kv.run(model, PROMPT, path, max_new_tokens=8, record=r, logits="keep") for r in ("", sites))
        assert_bitwise(bare.logits, recorded.logits, f"logits of {path}")


@cuda
def test_step_0_is_bitwise_equal(model: kv.Adapter) -> None:
    both = kv.compare(model, PROMPT, max_new_tokens=4, record="", progress="none")
    assert both.steps.loc[both.steps["step"] == 0, "max_abs_logit"].item() == 0


@cuda
def test_in_float64_the_paths_agree_to_rounding(model: kv.Adapter) -> None:
    if model.kind == "bridge":
        pytest.skip("the bridge's eager attention casts its softmax to float32")
    both = kv.compare(model, PROMPT, "cached@float64", "recompute@float64", max_new_tokens=8, record="", progress="none")
    assert both.steps["max_abs_logit"].max() < 1e-11


@cuda
def test_a_patch_of_its_own_tensors_is_a_no_op_and_leaves_no_hook(model: kv.Adapter) -> None:
    made = kv.sweep(model, PROMPT, "resid_post", max_new_tokens=6, controls="quick", progress="none")
    own = made.controls[made.controls["control"] == "self"]
    assert ((own["recovery"] == 0) | own["recovery"].isna()).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.source.modules()) or (
        model.kind != "native"
    )


@cuda
def test_the_audit_finds_no_bug(model: kv.Adapter) -> None:
    verdict = kv.audit(model, lengths=(5, 63, 64, 65), steps=2)
    assert verdict.exit_code == 0, verdict.reading
