"""A vocabulary padded with minus infinity is compared over its tokens; NaN is refused, and where it is is said."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import PROMPT, Case

CASE = Case("llama-gqa", "native", "eager")
OPTIONS = {"max_new_tokens": 3, "stop": "length", "record": "", "progress": "none"}


@pytest.fixture
def padded(load: Any) -> Any:
    """Lets a test write a number into the last seven columns of the logits, or of one path's only."""
    model = load(CASE)
    handles = []

    def pad(value: float, rows: str = "all") -> kv.Adapter:
        def write(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
            if rows == "all" or (logits.shape[1] == 1) == (rows == "one"):
                logits[..., 90:] = value
            return logits

        handles.append(model.model.lm_head.register_forward_hook(write))
        return model

    yield pad
    for handle in handles:
        handle.remove()


def test_a_column_of_minus_infinity_on_both_paths_is_no_token(padded: Any) -> None:
    pytest.importorskip("kvinterp.engines")
    model = padded(-math.inf)
    both = kv.compare(model, PROMPT, "cached", "recompute@bfloat16", **OPTIONS)
    assert both.failures.empty
    traces = [
        kv.run(model, PROMPT, p, max_new_tokens=3, logits="keep", stop="length", continuation=[5, 7])
        for p in ("cached", "recompute")
    ]
    assert all(trace.logits[:, :90].isfinite().all() for trace in traces)
    told = kv.compare_traces(*traces).steps
    wanted = [kv.metrics.compare_logits(*(t.logits[step, :90] for t in traces)) for step in range(3)]
    for name in ("kl", "rms_logit", "max_abs_logit", "margin_a"):
        assert told[name].tolist() == [float(step[name]) for step in wanted], name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_another_padding_is_refused_and_said_where(padded: Any, value: float) -> None:
    model, what = padded(value), "NaN" if math.isnan(value) else "Inf"
    said = (
        rf"{what} first appeared in the logits at step 0, of token ids 90 to 96 \(7 of 97\), in float32: .* give them -inf"
    )
    with pytest.raises(kv.NonFiniteError, match=said) as caught:
        kv.compare(model, PROMPT, **OPTIONS)
    assert "\n" not in str(caught.value)
    with pytest.raises(kv.NonFiniteError, match=said):
        kv.run(model, PROMPT, max_new_tokens=2)


def test_a_column_that_only_one_path_pads_is_refused(padded: Any) -> None:
    """From step 1 on the cached path has one row: what it alone pads differs, and is no padding."""
    said = re.escape("Inf first appeared in the logits at step 1, of token ids 90 to 96 (7 of 97)")
    with pytest.raises(kv.NonFiniteError, match=said):
        kv.compare(padded(-math.inf, "one"), PROMPT, **OPTIONS)
