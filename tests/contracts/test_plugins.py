"""What holds of every policy and every kernel mode that is found, so of one that is dropped into its folder tomorrow."""

import pytest
import torch

import kvinterp as kv
from kvinterp.paths.kernels import KERNELS, kernels_named
from kvinterp.policies import POLICIES, Place, policy_named
from support import PROMPT, Case, assert_bitwise

pytestmark = pytest.mark.bits

CASE = Case("llama-gqa", "native", "sdpa")
WIDE = Case("zoo:gemma2-mini", "native", "eager")
"""For policies whose blocks do not fit the small heads of the other."""
STEPS = 4
PATHS = [f"cached+{name}" for name in POLICIES] + [f"cached[kernels={name}]" for name in KERNELS]
paths = pytest.mark.parametrize("path", PATHS)


def fitting(load, path):
    """The small model, or the wide one where the policy's blocks do not fit it."""
    model = load(CASE)
    try:
        kv.path_named(path).policy.start(model.facts)
    except kv.UnsupportedError:
        model = load(WIDE)
    return model


def test_there_are_some():
    assert "identity" in POLICIES
    assert {"native", "split_k", "batch_invariant"} <= set(KERNELS)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_text_form_reads_as_it_is_written(name):
    policy = POLICIES[name]()
    assert policy_named(str(policy)) == policy
    assert str(kv.path_named(f"cached+{policy}")) == ("cached" if name == "identity" else f"cached+{policy}")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_modes_text_form_reads_as_it_is_written(name):
    kernels = KERNELS[name]()
    assert kernels_named(str(kernels)) == kernels


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_changes_nothing_in_place(name):
    policy = POLICIES[name]()
    policy.check(4)
    keys, values = torch.randn(2, 1, 2, 7, 64)
    given = keys.clone(), values.clone()
    for act in (policy.write, policy.read):
        act(*given, Place(0, 0, 7, rotated=True))
        assert_bitwise(given[0], keys, "keys")
        assert_bitwise(given[1], values, "values")


@paths
def test_law_1_and_2_hold_under_it(load, path):
    """Equal to itself, and to itself while it is recorded."""
    model, given = fitting(load, path), {"max_new_tokens": STEPS, "stop": "length", "logits": "keep"}
    plain = kv.run(model, list(PROMPT), path, **given)
    assert_bitwise(kv.run(model, list(PROMPT), path, **given).logits, plain.logits, "logits of a second run")
    recorded = kv.run(model, list(PROMPT), path, record="resid_post,attn_out", **given)
    assert_bitwise(recorded.logits, plain.logits, "logits of a recorded run")


@pytest.mark.parametrize("name", POLICIES)
def test_law_3_holds_under_a_policy(load, name):
    """The prefill's attention reads K and V as they were computed, whatever is kept of them."""
    model = fitting(load, f"cached+{name}")
    rows = [
        kv.run(model, list(PROMPT), path, max_new_tokens=1, logits="keep").logits
        for path in (f"cached+{name}", "recompute")
    ]
    assert_bitwise(*rows, "logits of step 0")
