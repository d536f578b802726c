"""Kernel modes: what each changes, what it leaves alone, and that nothing of it stays behind."""

from __future__ import annotations

import pytest
import torch

import kvinterp as kv
from kvinterp.paths import Cached, kernels_named, path_named
from kvinterp.paths.kernels import SplitK, fixed_order
from support import CASES, ZOO_CASES, Case, assert_bitwise, cases, hooks_of

pytestmark = pytest.mark.bits

PROMPT = (1, 60, 200, 33, 470, 81, 12, 9, 301, 44, 18, 77, 90, 121, 305, 6, 270, 55, 31, 402)
LONG = (*PROMPT, *reversed(PROMPT))
"""Forty tokens: longer than gemma2-mini's window of 32, so that its cache has slid."""


def compared(adapter: kv.Adapter, mode: str, prompt: tuple[int, ...] = LONG, steps: int = 4) -> kv.Comparison:
    tokens = [token % adapter.facts.vocabulary for token in prompt]
    a, b = f"cached[kernels={mode}]", f"recompute[kernels={mode}]"
    return kv.compare(
        adapter, tokens, a, b, max_new_tokens=steps, stop="length", record="resid_post,kv", progress="none"
    )  # fmt: skip


@cases(CASES)
def test_batch_invariant_makes_both_paths_bitwise_equal_in_float16(case: Case, load) -> None:
    """Every zoo model and every tiny one, every kind: logits, residual streams, keys and values."""
    result = compared(load(case, "float16"), "batch_invariant")
    assert (result.steps["max_abs_logit"] == 0).all()
    assert (result.layers["l2"] == 0).all()
    assert (result.kv_steps["relative_error"] == 0).all()


@pytest.mark.slow
@cases(ZOO_CASES)
def test_split_k_makes_the_paths_differ(case: Case, load) -> None:
    result = compared(load(case, "float16"), "split_k(4,float16)")
    assert result.steps["max_abs_logit"][0] == 0, "step 0 has many rows on both paths"
    assert (result.steps["max_abs_logit"][1:] > 0).all()


def test_split_k_in_one_layer_leaves_the_layers_before_it_alone(load) -> None:
    adapter = load(Case("zoo:mistral-mini", "native", "eager"), "float16")
    tokens = list(PROMPT)
    mode = "batch_invariant"
    base = kv.run(adapter, tokens, f"cached[kernels={mode}]", max_new_tokens=2, record="resid_post", stop="length")
    plain = kv.run(adapter, tokens, "cached", max_new_tokens=2, record="resid_post", stop="length", continuation=base.fed)
    split = Cached(kernels=SplitK(4, "float16", ("linear",), (2,)))
    cut = kv.run(adapter, tokens, split, max_new_tokens=2, record="resid_post", stop="length", continuation=base.fed)
    for layer in range(2):
        assert_bitwise(cut.records["resid_post", layer][1], plain.records["resid_post", layer][1], f"layer {layer}")
    assert not torch.equal(cut.records["resid_post", 2][1], plain.records["resid_post", 2][1])


def test_split_k_of_the_unembedding_changes_logits_only(load) -> None:
    adapter = load(Case("zoo:mistral-mini", "hooked"), "float16")
    split = Cached(kernels="split_k(4,float16,unembed)")
    runs = [
        kv.run(adapter, list(PROMPT), path, max_new_tokens=3, record="resid_post", stop="length", logits="keep",
               continuation=PROMPT[:2])
        for path in (Cached(), split)
    ]  # fmt: skip
    for (site, layer), kept in runs[0].records.items():
        for step, tensor in enumerate(kept):
            assert_bitwise(tensor, runs[1].records[site, layer][step], f"{site} of layer {layer} at step {step}")
    assert not torch.equal(runs[0].logits[1:], runs[1].logits[1:])


def test_layer_cast_gives_the_bits_of_float32_compute(load) -> None:
    """Sixteen-bit weights are exactly representable in float32, so computing in float32 is the same computation."""
    for case in (Case("zoo:mistral-mini", "native", "sdpa"), Case("zoo:gemma2-mini", "native", "eager")):
        adapter = load(case, "float16")
        cast, wide = (
            kv.run(adapter, list(PROMPT), path, max_new_tokens=4, stop="length", logits="keep", continuation=PROMPT[:3])
            for path in (Cached(kernels="layer_cast"), Cached(dtype="float32"))
        )
        assert cast.logits.dtype == torch.float32
        assert_bitwise(cast.logits, wide.logits, str(case), ("step", "token"))


# The arithmetic itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(257, 131).to(dtype), torch.randn(131, 70).to(dtype)
    whole = fixed_order.product(a, b)
    for rows in (1, 2, 17, 64, 128):
        for first in (0, 5):
            assert_bitwise(fixed_order.product(a[first : first + rows], b), whole[first : first + rows], f"{rows} rows")


def test_a_product_does_not_depend_on_how_many_rows_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits a processor's cache or a GPU: one row at a time, and all together."""
    a, b = torch.randn(37, 100), torch.randn(100, 50)
    found = []
    for most in (1, 1 << 26):
        monkeypatch.setattr(fixed_order, "_BLOCK", (most, most))
        found.append(fixed_order.product(a, b))
    assert_bitwise(*found)


def test_fixed_orders_agree_with_torch_in_float64() -> None:
    torch.manual_seed(3)
    a, b = torch.randn(4, 9, 50).double(), torch.randn(4, 50, 11).double()
    for order in ("lanes", "one by one"):
        torch.testing.assert_close(fixed_order.product(a, b, order), a @ b, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(fixed_order.sum_over(a, order), a.sum(-1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(fixed_order.softmax(a), a.softmax(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(fixed_order.log_softmax(a), a.log_softmax(-1), rtol=1e-13, atol=1e-13)
    w = torch.randn(50).double()
    torch.testing.assert_close(
        fixed_order.layer_norm(a, [50], w, w, 1e-5)[0],
        torch.nn.functional.layer_norm(a, [50], w, w, 1e-5),
        rtol=1e-12,
        atol=1e-12,
    )
    q, k, v = (torch.randn(2, 3, 7, 8).double() for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(fixed_order.attention(q, k, v, causal=True), expected, rtol=1e-12, atol=1e-12)
    x, taps, bias = torch.randn(2, 5, 9).double(), torch.randn(5, 1, 4).double(), torch.randn(5).double()
    expected = torch.nn.functional.conv1d(x, taps, bias, padding=3, groups=5)
    torch.testing.assert_close(fixed_order.depthwise_convolution(x, taps, bias, 3), expected, rtol=1e-12, atol=1e-12)


# Text forms, errors, and what is left behind --------------------------------------------------------------------------


def test_nothing_stays_behind_after_an_error(load) -> None:
    """A hook that raises inside a forward leaves no mode on torch's stacks and no hook on the model."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from kvinterp.paths import Runner
    from kvinterp.recording import PathHook

    adapter = load(Case("llama-gqa", "native", "eager"), "float32")
    before = hooks_of(adapter.model)

    class Breaks(PathHook):
        def __init__(self) -> None:
            self.listeners = {("resid_post", 1): lambda _: 1 / 0}

    for mode in ("batch_invariant", "split_k(4,float16)", "layer_cast"):
        path, tokens = path_named(f"cached[kernels={mode}]"), torch.tensor([[5, 6, 7]])
        with pytest.raises(ZeroDivisionError), Runner(adapter, path, tokens, 2, [Breaks()]) as runner:
            runner.advance()
        assert hooks_of(adapter.model) == before
        assert _get_current_dispatch_mode() is None


# Attention as one kernel ----------------------------------------------------------------------------------------------

SDPA = torch.nn.functional.scaled_dot_product_attention


def one_row(dtype: torch.dtype = torch.float16, keys: int = 37, rows: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((1, 4, rows, 16), (1, 4, keys, 16), (1, 4, keys, 16))
    return tuple((4 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes)


def under(text: str, load: object, *tensors: torch.Tensor, **more: object) -> torch.Tensor:
    with kernels_named(text).mode(load(Case("llama-gqa", "native", "sdpa"))):
        return SDPA(*tensors, **more)


def test_split_k_of_the_values_leaves_the_scores_unrounded(load) -> None:
    """It rounded them to float16 too, a difference that was none of the values'."""
    query, key, value = one_row()
    scores = (query.float() @ key.float().transpose(-1, -2)) * 16**-0.5
    weights = scores.softmax(-1).half().float()
    pieces = [
        (w @ v).half() for w, v in zip(weights.split(10, -1), value.float().split(10, -2), strict=True)
    ]  # fmt: skip
    expected = pieces[0] + pieces[1] + pieces[2] + pieces[3]
    assert_bitwise(under("split_k(4,float16,values)", load, query, key, value), expected)
    rounded = (query.float() @ key.float().transpose(-1, -2)).half().float() * 16**-0.5
    assert not torch.equal(rounded.softmax(-1).half(), weights.half()), "rounding the scores would show"
