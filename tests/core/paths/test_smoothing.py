"""``smooth``: a mean of the cache and of a recomputation beside it, whose ends are the two, to the bit."""

import dataclasses
import functools

import pytest
import torch

import kvinterp as kv
from kvinterp.paths import Runner
from kvinterp.policies import Policy
from plain import FED, forced_run
from support import PROMPT, Case, assert_bitwise, assert_close, nothing_left

STEPS = len(FED) + 1
KINDS = [Case("llama-gqa", "native", "sdpa"), Case("mistral-window", "native", "eager"), Case("llama-gqa", "bridge")]
every_kind = pytest.mark.parametrize(
    "case", [*KINDS, pytest.param(Case("llama-gqa", "hooked"), marks=pytest.mark.hooked)], ids=str
)
POLICY = "uniform(-0.5,0.5)"


run = functools.partial(forced_run, record="kv", positions="all")


@pytest.mark.bits
@every_kind
def test_its_ends_are_the_cached_path_and_the_recompute_paths_keys_and_values(load, case):
    model = load(case, "float16")
    cached, all_cached = run(model, f"cached+{POLICY}"), run(model, f"cached[smooth=1]+{POLICY}")
    assert_bitwise(all_cached.logits, cached.logits, "logits at 1", ("step", "vocab"))
    recomputed, none_cached = run(model, "recompute"), run(model, f"cached[smooth=0]+{POLICY}")
    for site in ("cache_k", "cache_v"):
        for layer in range(model.facts.layers):
            for step in range(STEPS):
                assert_bitwise(all_cached.records[site, layer][step], cached.records[site, layer][step], f"{site} at 1")
                whole = recomputed.records[site, layer][step]
                read = none_cached.records[site, layer][step]
                assert_bitwise(read, whole[:, whole.shape[1] - read.shape[1] :], f"{site} of layer {layer} at 0")


@every_kind
def test_in_between_it_is_their_mean_at_every_step_anew(load, case):
    """In float64, where the two paths differ by the policy alone; the cache is not mixed into, so errors stay as large."""
    model = load(case).at(torch.float64)
    cached, mixed, exact = (run(model, path) for path in (f"cached+{POLICY}", f"cached[smooth=0.25]+{POLICY}", "recompute"))
    layer = 0  # What is computed there does not depend on what attention read.
    for step in range(1, STEPS):
        ours, theirs, read = (found.records["cache_v", layer][step] for found in (cached, exact, mixed))
        theirs = theirs[:, theirs.shape[1] - ours.shape[1] :]
        assert_close(read, 0.25 * ours + 0.75 * theirs, f"V at step {step}", relative=1e-12)
        assert not torch.equal(read, theirs)


@dataclasses.dataclass(frozen=True)
class Newest(Policy):
    """Keeps four rows."""

    def keep(self, keys, values, place):
        return torch.arange(keys.shape[2])[-4:]


def test_rows_that_a_policy_let_go_of_are_mixed_with_none(load):
    model = load(KINDS[0]).at(torch.float64)
    found, exact = run(model, kv.Cached(Newest(), smooth=0)), run(model, "recompute")
    for step in range(1, STEPS):
        assert_bitwise(found.records["cache_v", 1][step], exact.records["cache_v", 1][step][:, -5:], f"step {step}")


@pytest.mark.bits
def test_step_0_chunks_refreshes_and_a_stored_prefill(load):
    """An exact prefill reads what it computes; a stored one is mixed as every other step."""
    model, plain = load(KINDS[0], "float16"), {"record": None, "max_new_tokens": 4, "positions": "newest"}
    for options in ("", "chunk=4,", "refresh=2,"):
        form = options.replace("refresh=2,", "").strip(",")
        found = run(model, f"cached[{options}smooth=0.5]+{POLICY}", **plain).logits
        exact = run(model, f"recompute[{form}]" if form else "recompute", **plain).logits
        equal = [torch.equal(a, b) for a, b in zip(found, exact, strict=True)]
        assert equal == [step == 0 or ("refresh" in options and step % 2 == 0) for step in range(4)]
    stored = run(model, f"cached[smooth=0,prefill=stored]+{POLICY}", **plain).logits
    assert_bitwise(stored[0], run(model, "recompute", **plain).logits[0], "step 0 of a stored prefill")
    assert not torch.equal(run(model, f"cached[smooth=1,prefill=stored]+{POLICY}", **plain).logits[0], stored[0])


def test_nothing_of_the_run_beside_it_is_heard_or_left(load):
    model = load(KINDS[0])
    with nothing_left(model.model, lambda: run(model, "cached")):
        found = run(model, "cached[smooth=0.5]", record="resid_post", positions="all")
        assert [kept.shape[0] for kept in found.records["resid_post", 0]] == [len(PROMPT)] + [1] * (STEPS - 1)
        with pytest.raises(RuntimeError), Runner(model, kv.Cached(smooth=0.5), torch.tensor([PROMPT]), 3) as runner:
            runner.advance()
            raise RuntimeError
