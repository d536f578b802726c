"""Steps that are measured together give the numbers of each measured alone, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest
import torch

from kvinterp import metrics
from kvinterp.comparison import tables as tables_module
from kvinterp.comparison.tables import Differences

pytestmark = pytest.mark.bits

STEPS, LAYERS, BATCH, HEADS = 7, (0, 2), 2, 4


def shown(kind: str, step: int, other: torch.dtype) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """What two nearby paths show at a step."""
    made = torch.Generator().manual_seed(step)
    for dtype in (torch.float32, other):
        seen = {}
        for layer in LAYERS:
            length = 5 + step
            if kind == "windows":
                length = min(length, 8) if layer else length
            if kind == "shorter" and dtype is other:
                length = min(length, 7)
            seen["resid_post", layer] = torch.randn(BATCH, 48, generator=made).to(dtype)
            seen["pattern", layer] = torch.randn(BATCH, HEADS, length, generator=made).softmax(-1).to(dtype)
            for number, site in enumerate(("cache_k", "cache_v")):
                width = 16 if kind != "widths" else 16 * (number + 1)
                seen[site, layer] = torch.randn(BATCH, 2, length, width, generator=made).to(dtype)
            if kind == "sites":
                seen["attn_out", layer] = torch.randn(BATCH, 48, generator=made).to(dtype)
        yield seen


def tables(kind: str, block: int, other: torch.dtype, vocabulary: int = 97) -> dict[str, pd.DataFrame]:
    """Those of a decode; with a block of 0 each step is measured when it comes."""
    differences = Differences(LAYERS, range(HEADS), range(2), "whole")
    for step in range(STEPS):
        logits = torch.randn(BATCH, vocabulary, generator=torch.Generator().manual_seed(step))
        # The first row flips at step 3, the second ends before step 6.
        marks = torch.tensor([int(step > 2), -1 if step > 4 else 0], dtype=torch.int8)
        pair = logits, (logits * 1.001).to(other)
        differences.add(step, [7, 4], 5 + step, pair, (*shown(kind, step, other),), marks)  # type: ignore[arg-type]
        for table in metrics.KINDS if block == 0 else ():
            differences._measure(table)
    return differences.frames([7, 4])


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "windows", "shorter", "widths", "sites"])
def test_what_waits_is_measured_to_the_same_bits(kind: str, other: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step a call against as many as the default lets wait, and against a few in several calls; rows in one order too."""
    alone = tables(kind, 0, other)
    assert len(alone["steps"]) == STEPS * BATCH
    for block in (tables_module.BLOCK, 5000):
        monkeypatch.setattr(tables_module, "BLOCK", block)
        together = tables(kind, block, other)
        for name, frame in alone.items():
            assert len(frame), name
            pd.testing.assert_frame_equal(together[name], frame, check_exact=True, obj=f"{name}, block {block}")


def test_a_step_is_kept_as_it_was_shown() -> None:
    """A cache that is written in place shows other numbers by the time a block is measured."""

    def kept(change: bool) -> dict[str, pd.DataFrame]:
        differences = Differences(LAYERS, range(HEADS), range(2))
        for step in range(3):
            paths = [*shown("plain", step, torch.float32)]
            logits = torch.randn(2, BATCH, 9, generator=torch.Generator().manual_seed(step)).unbind()
            marks = torch.zeros(BATCH, dtype=torch.int8)
            paths[1] = {place: tensor + 1 for place, tensor in paths[1].items()}
            differences.add(step, [0, 1], 5 + step, logits, (paths[0], paths[1]), marks)  # type: ignore[arg-type]
            for tensor in (*logits, *paths[0].values(), *paths[1].values()) if change else ():
                tensor.zero_()
        return differences.frames([0, 1])

    as_shown, changed = kept(False), kept(True)
    for name, frame in as_shown.items():
        pd.testing.assert_frame_equal(changed[name], frame, check_exact=True, obj=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [0, 1, 37, 199, 200])
@pytest.mark.parametrize("odd", [None, torch.inf, torch.nan])
def test_vectors_that_are_equal_are_not_measured_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kept: int, odd: float | None
) -> None:
    """Among equal vectors any number of others; equal ones that are not finite have no number, and get none."""
    made = torch.Generator().manual_seed(kept)
    a = torch.randn(2, 5, 20, 24, generator=made).to(dtype)
    b = a.clone()
    rows = torch.randperm(200, generator=made)[:kept]
    b.view(-1, 24)[rows] *= 1.01
    a[0, 0, 0, 3] = -0.0
    b[0, 0, 0, 3] = 0.0
    if odd is not None:
        a[1, 2, 3, 4] = b[1, 2, 3, 4] = odd
    found = tables_module._cache_errors(a, b, 1000)
    monkeypatch.setattr(tables_module, "_unequal_vectors", lambda a, b: None)
    for name, wanted in tables_module._cache_errors(a, b, 1000).items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=0, equal_nan=True)
        assert bool(wanted.isnan().any()) == (odd is not None)
