"""The kernels table: it sees every operation, tells an invariant kernel from one that is not, and names the first."""

from __future__ import annotations

import pytest
import torch
from architectures import build

import kvinterp as kv
from kvinterp.auditing.shape_dependence import kernels_table

pytestmark = pytest.mark.bits

SIZES = (1, 2, 17, 33)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("llama", {"linear", "attention (SDPA)", "norm", "unembed"}),
        ("gemma2", {"linear", "scores", "softmax", "values", "norm", "unembed"}),
        ("gpt2", {"linear", "attention (SDPA)", "norm", "unembed"}),
        ("bloom", {"linear", "scores", "softmax", "values", "norm", "unembed"}),
        ("mixtral", {"linear", "attention (SDPA)", "norm", "unembed"}),
        ("mamba", {"linear", "convolution", "product", "norm", "unembed"}),
        ("mamba2", {"linear", "convolution", "norm", "unembed"}),
        ("qwen3_5", {"linear", "convolution", "product", "attention (SDPA)", "norm", "unembed"}),
    ],
)
def test_every_operation_is_there(name: str, operations: set[str]) -> None:
    # In float32 a row that is added up in two halves has other bits than a row among many, on every processor.
    result = kernels_table(build(name), sizes=SIZES, kernels="split_k(2,float32,linear)")
    called = result.table[result.table["calls"] > 0]
    assert set(called["operation"]) == operations
    shapes = {row["shape"] for row in called.to_dict("records") if row["operation"] == "linear"}
    assert len(shapes) >= 2, "each shape of linear has rows of its own"
    assert set(result.table["size"]) >= set(SIZES)
    assert result.first is not None
    assert result.first["operation"].startswith("linear"), result.first
    assert result.first["operation"] in str(result)


@pytest.mark.hooked
@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_transformer_lens_operations_are_there(kind: str) -> None:
    result = kernels_table(kv.load_model("zoo:mistral-mini", kind=kind), sizes=(1, 17))
    assert set(result.table["operation"]) == {"linear", "scores", "softmax", "values", "norm", "unembed"}
    assert "_original_component" not in "".join(result.table["where"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_shape_invariant_kernels_are_invariant(name: str) -> None:
    """Every operation, over rows, keys and batch; and then no operation differs in the model."""
    result = kernels_table(build(name).half(), sizes=SIZES, kernels="batch_invariant")
    bad = result.table[~result.table["bitwise_equal"]]
    assert bad.empty, bad.to_string()
    assert result.first is None
    assert "the newest row of each of 2 tokens fed after a prompt of 24 has the same bits" in str(result)


@pytest.mark.parametrize(
    ("name", "operation"), [("llama", "unembed"), ("gemma2", "scores"), ("gemma2", "values"), ("gemma2", "unembed")]
)
def test_split_k_of_one_operation_is_the_first_that_differs(name: str, operation: str) -> None:
    """The mode must know which operation runs: inside the model from its layers, in the table from being told."""
    model = build(name).to(torch.bfloat16)
    chosen = kernels_table(model, sizes=(1, 17), kernels=f"split_k(4,float16,{operation})")
    plain = kernels_table(model, sizes=(1, 17))
    rows = chosen.table.merge(plain.table, on=["operation", "shape", "varied", "size"], suffixes=("", "_plain"))
    worse = rows[rows["bitwise_equal_plain"] & ~rows["bitwise_equal"]]
    assert set(worse["operation"]) == {operation}
    assert chosen.first is not None
    # A processor may have a 16-bit kernel of its own that depends on the rows; then the model already differs before.
    assert chosen.first["operation"].startswith(operation) or chosen.first == plain.first, chosen.first


def test_a_planted_kernel_is_named() -> None:
    class OtherOrder(torch.overrides.TorchFunctionMode):
        """An unembedding that is off by one unit where it has one row."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            weight = (*args[1:], *(kwargs or {}).values())[0] if func is torch.nn.functional.linear else None
            single = weight is not None and weight.shape[0] == result.numel() == 131
            return torch.nextafter(result, torch.full_like(result, torch.inf)) if single else result

    model = build("llama")
    with OtherOrder():
        table = kernels_table(model, sizes=(1, 2), kernels="batch_invariant")
    assert table.first is None, "a fixed order replaces the planted kernel"
    with OtherOrder():
        native = kernels_table(model.half(), sizes=(1, 2)).summary()
    assert not native[(native["operation"] == "unembed") & (native["varied"] == "rows")]["same_bits"].any()


def test_the_seed_chooses_the_prompt():
    fed: list[list[int]] = []
    model = build("llama")
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(given[0].flatten().tolist()))
    for seed in (0, 1):
        kernels_table(model, sizes=(1, 2), seed=seed)
    half = len(fed) // 2
    first, other = fed[:half], fed[half:]
    assert first != other
    assert len(first) == len(other)
