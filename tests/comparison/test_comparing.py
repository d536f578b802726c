"""What a comparison says, and what may be asked of one."""

from __future__ import annotations

import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.comparison import Comparison
from kvinterp.models import Adapter
from synthetic import comparison


@pytest.fixture(scope="module")
def model() -> Adapter:
    return kv.load_model("zoo:mistral-mini", kind="native", device="cpu")


# Before and after the flip -------------------------------------------------------------------------------------------


def test_kl_of_two_texts_is_told_apart_from_that_of_rounding() -> None:
    """In the free protocol the mean KL of 2 nats after a flip drowned the 1e-6 before it, in where() and in the reading."""
    made = comparison((0, 1), flip=2, protocol="free")
    made.steps.loc[made.steps["after_flip"], "kl"] = 2.0
    made.layers.loc[(made.layers["step"] > 2) & (made.layers["layer"] == 1), "relative_l2"] = 1.0
    said = made.where()
    assert "nats up to the flip and 2.00e+00 nats after it" in said
    assert "site resid_post, layer 2" in said, "the rows after the flip, where layer 1 is far off, do not count"
    matched = comparison((0, 1), flip=2)
    assert "after it" not in matched.where(), "the contexts stay the same in the matched protocol"


def test_every_table_says_which_rows_are_after_the_flip(model: Adapter) -> None:
    both = kv.compare(model, kv.load_prompts("arithmetic:3"), b="recompute@bfloat16", protocol="free",
                      strategy="top_p(0.99,3.0)", max_new_tokens=8, stop="length", record="resid_post,cache_v",
                      progress="none")  # fmt: skip
    flips = both.examples.set_index("example")["flip_index"]
    assert flips.notna().any()
    for frame in (both.steps, both.layers, both.kv):
        assert (frame["after_flip"] == (frame["step"] > frame["example"].map(flips))).all()
    assert both.heads["after_flip"].dtype == bool


def test_a_failure_among_the_others_leaves_the_columns_types() -> None:
    parts = [comparison((0,)), comparison((1,), flip=1)]
    joined = Comparison.joined(parts)
    assert all(getattr(joined, name)["after_flip"].dtype == bool for name in ("steps", "layers", "heads", "kv"))
    assert isinstance(joined.layers, pd.DataFrame)
