"""Errors that were once excused because they were small, or because something near them was: each is named now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from planting import on_update, quick

from kvinterp.auditing.values import difference, row_errors

pytestmark = pytest.mark.slow


def where(verdict: Any) -> tuple[Any, ...]:
    return verdict.verdict, verdict.first_layer, verdict.tensor


def test_a_logit_that_is_minus_infinity_hides_no_other() -> None:
    """The prompt's rows were divided by their largest magnitude, infinite where a model rules a token out."""
    never = -torch.inf
    mine, theirs = (
        torch.tensor([[1.0, never], [0.0, 3.0], [never, 2.0]]),
        torch.tensor([[2.0, never], [0.0, 3.0], [4.0, 2.0]]),
    )
    assert row_errors(mine, theirs).tolist() == [0.5, 0.0, torch.inf]
    assert [difference(a, b) for a, b in zip(mine, theirs, strict=True)] == [0.5, 0.0, torch.inf]


def residual_sum_off(patch: pytest.MonkeyPatch, factor: float, layer: int = 1) -> None:
    """One block returns its residual stream times a factor in a cached step."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

    original = Block.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, hidden_states, *args, **kwargs)
        return made * factor if self.self_attn.layer_idx == layer and hidden_states.shape[1] == 1 else made

    patch.setattr(Block, "forward", forward)


@pytest.mark.parametrize("factor", [1.01, pytest.param(1.1, marks=pytest.mark.long)])
def test_a_residual_sum_that_is_off_in_decode(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1% it was called a kernel; no module inside the block is off, only what the block adds up."""
    residual_sum_off(monkeypatch, factor)
    verdict = quick(build("llama"))
    assert where(verdict) == ("bug", 1, "residual sum"), verdict.reading
    assert verdict.module == "model.layers.1"
    assert verdict.first_position == 9


@pytest.mark.parametrize("factor", [pytest.param(0.0, marks=pytest.mark.long), 1.001])
def test_an_input_changed_between_two_blocks(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the model hands a block another input in decode: every block by itself is right."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

    model, original = build("llama"), Block.__call__

    def call(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        changed = self.self_attn.layer_idx == 2 and hidden_states.shape[1] == 1
        return original(self, hidden_states * factor if changed else hidden_states, *args, **kwargs)

    monkeypatch.setattr(Block, "__call__", call)
    verdict = quick(model)
    assert where(verdict) == ("bug", 2, "block input"), verdict.reading


def test_a_router_that_takes_the_worst_experts_in_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are right and the choice is not: no rounding brings the worst past the best."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router

    original, topk = Router.forward, torch.topk

    def forward(self: Any, hidden_states: Any) -> Any:
        if hidden_states.shape[0] > 1:
            return original(self, hidden_states)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "topk", lambda x, k, dim=-1: topk(x, k, dim=dim, largest=False))
            return original(self, hidden_states)

    monkeypatch.setattr(Router, "forward", forward)
    verdict = quick(build("mixtral"))
    assert where(verdict) == ("bug", 0, "expert choice"), verdict.reading
    assert verdict.exit_code == 1


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rungs", [("float16", "bfloat16"), ("bfloat16", "float16", "float32", "float64")])
def test_a_key_off_by_half_a_percent_in_the_serving_dtype_only(
    dtype: torch.dtype, rungs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
        return store((k.float() * 1.005).to(k.dtype) if decoding and k.dtype == dtype else k, v)

    on_update(change, 1)(monkeypatch)
    verdict = quick(build("llama").to(dtype), rungs=rungs)
    assert where(verdict) == ("bug", 1, "K"), verdict.reading


@pytest.mark.parametrize("everywhere", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_bfloat16_cache_in_a_float16_model(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are 16 bits wide; bfloat16 rounds eight times more coarsely."""

    def change(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
        if k.dtype != torch.float16 or not (everywhere or decoding):
            return store(k, v)
        keys, values = store(k.to(torch.bfloat16).to(k.dtype), v.to(torch.bfloat16).to(v.dtype))
        return (keys, values) if decoding else (k, v)

    on_update(change, 1)(monkeypatch)
    verdict = quick(build("llama").half(), rungs=("float16", "float32"))
    assert where(verdict) == ("hidden-cast", 1, "K"), verdict.reading
    assert "bfloat16" in verdict.reading
    assert verdict.exit_code == 1


def opaque_attention(monkeypatch: pytest.MonkeyPatch, scale: float) -> str:
    """An attention kernel that runs in 16 bits only and that torch hands tensors to, as flash attention is.

    It adds up in another order for one row; with a scale other than 1 a cached step's scores are off.
    """
    from transformers import AttentionInterface

    def kernel(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any) -> Any:
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("this kernel takes float16 and bfloat16 only")
        groups, rows = query.shape[1] // key.shape[1], query.shape[2]
        import numpy as np

        keys, values = (t.repeat_interleave(groups, 1).float().numpy() for t in (key, value))
        scores = query.float().numpy() @ keys.swapaxes(-1, -2) * (scaling * (scale if rows == 1 else 1))
        seen = np.tril(np.ones((rows, keys.shape[2])), keys.shape[2] - rows)
        scores = np.where(seen > 0, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        order = slice(None, None, -1 if rows == 1 else 1)
        made = (powers[..., order] / powers.sum(-1, keepdims=True)) @ values[..., order, :]
        return torch.from_numpy(made).to(query.dtype).transpose(1, 2).contiguous(), None

    name = "sixteen_bits_only"
    AttentionInterface.register(name, kernel)
    return name


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.02])
def test_where_only_16_bit_kernels_run(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fixed order can reach inside, and no other precision runs: the block in float64 on the same inputs tells."""
    name = opaque_attention(monkeypatch, scale)
    model = build("llama").to(dtype)
    model.set_attn_implementation(name)
    verdict = quick(model, rungs=("float16", "bfloat16", "float32", "float64"))
    if scale == 1:
        assert verdict.exit_code == 0, verdict.reading
    else:
        assert (verdict.verdict, verdict.first_layer) == ("bug", 0), verdict.reading
        assert "self_attn" in verdict.module
