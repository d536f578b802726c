"""The bytes that a cache of its own format takes: each row and head in the format that it has there, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvinterp.models.adapter import ModelInfo
from kvinterp.policies import CacheRows, policy_named
from kvinterp.policies.size import cache_bytes

CONTEXT, WIDTH, HEADS = 4096, 64, 3


def facts(*windows: int | None) -> ModelInfo:
    """A model of as many layers."""
    sizes: dict[str, Any] = {"layers": len(windows), "query_heads": 6, "kv_heads": HEADS, "head_dim": WIDTH, "width": 384}
    about: dict[str, Any] = {"vocabulary": 100, "context": 8192, "cached_keys_rotated": True, "attention": "sdpa"}
    return ModelInfo("m", "M", **sizes, windows=windows, **about)


ROW = HEADS * WIDTH
"""Numbers of a position in K, or in V, of one layer."""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("identity", 2 * 2 * CONTEXT * ROW * 2),
        # A block of 32 numbers takes 18 bytes.
        ("q4_0", 2 * 2 * CONTEXT * ROW // 32 * 18),
        ("hadamard+q8_0", 2 * 2 * CONTEXT * ROW // 32 * 34),
        ("q8_0(on=k)", 2 * CONTEXT * (ROW // 32 * 34 + ROW * 2)),
        ("q8_0(layers=1)", 2 * CONTEXT * (ROW * 2 + ROW // 32 * 34)),
        ("q8_0(heads=2)", 2 * 2 * CONTEXT * (2 * WIDTH * 2 + WIDTH // 32 * 34)),
        ("sinks(4,20)", 2 * 2 * 24 * ROW * 2),
        ("sinks(4,20)+q8_0", 2 * 2 * 24 * ROW // 32 * 34),
        ("uniform(-1,1)", 2 * 2 * CONTEXT * ROW * 2),
    ],
)
def test_every_number_is_counted_in_its_own_format(policy: str, expected: int) -> None:
    assert cache_bytes(policy_named(policy), facts(None, None), 16, CONTEXT) == expected


def test_a_window_keeps_its_own_rows() -> None:
    assert cache_bytes(policy_named("q4_0"), facts(128, None), 16, CONTEXT) == facts(128, None).cache_bytes(CONTEXT, 4.5)


@pytest.mark.parametrize("context", [1, 32, 33, 64, 65, 100])
def test_kivis_window_is_what_attention_reads_unrounded(context: int) -> None:
    policy = policy_named("kivi(4,32,32)")
    rows = torch.randn(1, HEADS, context, WIDTH, generator=torch.Generator().manual_seed(0))
    place = CacheRows(0, 0, context, True, prompt=context)
    read = policy.start(facts(None)).read(rows.clone(), rows.clone(), place)
    exact = [int((tensor == rows).all(-1)[0, 0].sum()) for tensor in read]
    assert [policy.exact_rows(tensor, context) for tensor in ("k", "v")] == exact
    bits = [(context - kept) * ROW * 5 + kept * ROW * 16 for kept in exact]
    assert cache_bytes(policy, facts(None), 16, context) == sum(bits) // 8
