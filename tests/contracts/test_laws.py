"""Laws 1 to 5 of docs/laws.md, over every kind, the zoo, and tiny random models with what the zoo lacks."""

import dataclasses

import pytest
import torch

import kvinterp as kv
from kvinterp.policies import Policy
from support import PROMPT, Case, SoftmaxInItsOwnDtype, assert_bitwise, cases, plain_forward

pytestmark = pytest.mark.bits

STEPS = 5
DTYPES = ("float16", "float32")
UNIT_ROUNDOFF = 2.0**-53
"""Of float64."""

dtypes = pytest.mark.parametrize("dtype", DTYPES)
both_paths = pytest.mark.parametrize("path", ["cached", "recompute"])


def logits_of(model, path, **more):
    """Logits ``[step, vocab]`` over a given continuation, so that every run is fed the same tokens."""
    settings = {"max_new_tokens": STEPS, "continuation": PROMPT[: STEPS - 1], "stop": "length", "logits": "keep"} | more
    return kv.run(model, PROMPT, path, **settings).logits


def compared(model, case, a, b, prompts=(PROMPT,), **more):
    settings = {"max_new_tokens": STEPS, "stop": "length", "record": case.compared, "progress": "none"} | more
    return kv.compare(model, list(map(list, prompts)), a, b, **settings)


def nonzero(comparison, keep=lambda table: table):
    """Every number of every table that says that something differs, as text; empty where all are exactly zero."""
    wanted = {
        "steps": ["kl", "js", "max_abs_logit", "rms_logit", "top_probability_difference", "flipped", "after_flip"],
        "layers": ["l2", "relative_l2", "cosine_distance"],
        "heads": ["kl"],
        "kv_steps": ["differing", "relative_error", "relative_error_max", "ulp_mean", "ulp_max"],
    }
    found = []
    for name, columns in wanted.items():
        table = keep(getattr(comparison, name))
        for column in columns:
            wrong = table[~(table[column] == 0)]
            if len(wrong):
                found.append(f"{name}.{column}: {len(wrong)} of {len(table)}, as in {wrong.iloc[0].to_dict()}")
    return found


# Law 1 -----------------------------------------------------------------------------------------------------------------


@cases()
@both_paths
def test_law_1_a_path_compared_with_itself_is_bitwise_zero(load, case, path):
    comparison = compared(load(case, "float16"), case, path, path)
    assert nonzero(comparison) == []
    assert (comparison.layers["cosine"] == 1).all()
    assert comparison.steps["top1_agree"].all()
    assert len(comparison.steps) == STEPS
    assert not comparison.layers.empty
    assert not comparison.kv_steps.empty
    assert not comparison.heads.empty


def test_law_1_can_fail(load):
    """The same tables are full of numbers for two paths that differ: nothing above is zero because nothing is written."""
    case = Case("llama-gqa", "native", "eager")
    comparison = compared(load(case), case, "cached", "recompute@float16")
    names = {text.split(":")[0] for text in nonzero(comparison)}
    assert names >= {
        "steps.kl",
        "steps.max_abs_logit",
        "layers.l2",
        "heads.kl",
        "kv_steps.relative_error",
        "kv_steps.ulp_max",
    }


# Law 2 -----------------------------------------------------------------------------------------------------------------


@cases()
@both_paths
@dtypes
def test_law_2_recording_changes_nothing(load, case, path, dtype):
    model = load(case, dtype)
    bare = logits_of(model, path)
    for positions in ("newest", "all"):
        watched = logits_of(model, path, record=case.sites, positions=positions)
        assert_bitwise(watched, bare, f"logits with {positions} recorded", ("step", "vocab"))
    assert_bitwise(logits_of(model, path), bare, "logits after recording", ("step", "vocab"))


@cases()
def test_law_2_comparing_changes_nothing(load, case):
    model = load(case, "float16")
    bare, watched = (compared(model, case, "cached", "recompute", record=sites) for sites in ("", case.compared))
    assert bare.steps.equals(watched.steps)


@cases()
def test_law_2_recording_a_users_own_forward_changes_nothing(load, case):
    model = load(case).model
    tokens = torch.tensor([PROMPT])
    bare = plain_forward(model, tokens)
    sites = [site for site in case.sites if not site.startswith("cache")]
    for positions in ("newest", "all"):
        with kv.record(model, sites, positions=positions):
            assert_bitwise(plain_forward(model, tokens), bare, "logits of a recorded forward")
    assert_bitwise(plain_forward(model, tokens), bare, "logits after recording")


# Law 3 -----------------------------------------------------------------------------------------------------------------


@cases()
@dtypes
def test_law_3_step_0_is_bitwise_equal_on_both_paths(load, case, dtype):
    comparison = compared(load(case, dtype), case, "cached", "recompute", max_new_tokens=2)
    assert nonzero(comparison, lambda table: table[table["step"] == 0]) == []
    assert {0, 1} == set(comparison.steps["step"]) == set(comparison.kv_steps["step"])


@cases()
def test_law_3_holds_in_batches(load, case):
    """A batch in which it does not hold, as on some processors under eager attention, is run one prompt at a time (law 9)."""
    prompts = (PROMPT, PROMPT[::-1], tuple(token + 1 for token in PROMPT))
    comparison = compared(load(case), case, "cached", "recompute", prompts, max_new_tokens=2, batch_size=3)
    assert nonzero(comparison, lambda table: table[table["step"] == 0]) == []
    assert set(comparison.steps["example"]) == {0, 1, 2}


# Law 4 -----------------------------------------------------------------------------------------------------------------


def rounding_bound(facts, logits):
    """Largest logit difference that float64 rounding explains, from the model's sizes alone.

    A sum of n terms has a relative error of at most n unit roundoffs. Along the longest chain of sums a block has the
    norms, the projections, the scores, the softmax, the weighted values and the MLP; the errors of one sum are carried
    into the next and add up, and there are two paths. That blocks neither amplify nor damp what comes in is an
    assumption: residual streams of these models grow by less than 10 times over all their blocks. A float32 cast
    inside would show as 6e-8 times the logits, more than 1,000 times this bound.
    """
    positions = len(PROMPT) + STEPS
    block = 6 * facts.width + facts.head_dim * (1 + facts.query_heads) + 2 * positions + 4 * facts.width
    sums = facts.layers * block + 2 * facts.width
    return 2 * sums * UNIT_ROUNDOFF * float(logits.abs().max())


def casts_softmax_down(case):
    """Eager attention of the Llama and Gemma families in transformers, which the bridge has too; GPT-2's does not. So does the
    router of TransformerLens's mixture of experts."""
    if (case.model, case.kind) == ("zoo:moe-mini", "hooked"):
        return True
    return case.kind != "hooked" and case.attention != "sdpa" and case.model != "gpt2"


def difference_in_float64(model, **paths):
    """Largest logit difference of the two paths and what rounding explains of it."""
    cached, recomputed = (logits_of(model, make(**paths)) for make in (kv.Cached, kv.Recompute))
    assert cached.dtype == torch.float64
    return (cached - recomputed).abs().max().item(), rounding_bound(model.facts, recomputed)


@cases()
def test_law_4_in_float64_the_paths_agree_to_rounding(load, case):
    """Where transformers casts the softmax to float32, taking that one cast away must leave rounding only."""
    model = load(case).at(torch.float64)
    with SoftmaxInItsOwnDtype() as casts:
        apart, bound = difference_in_float64(model)
    assert bool(casts.taken) == casts_softmax_down(case), "is the softmax's cast to float32 still where it was?"
    assert apart <= bound, f"the paths differ by {apart:.2e}, and rounding explains {bound:.2e}"


# Law 5 -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Copies(Policy):
    """Does nothing to the values, but hands on other tensors, so that it is really asked."""

    def write(self, keys, values, place):
        return keys.clone(), values.clone()

    def read(self, keys, values, place):
        return keys.clone(), values.clone()


@dataclasses.dataclass(frozen=True)
class Rolls(Policy):
    """Moves the values of one layer by one place: no norm after attention can scale that away."""

    layer: int = 1

    def write(self, keys, values, place):
        return keys, values.roll(1, -1) if place.layer == self.layer else values


@cases()
@both_paths
def test_law_5_the_identity_policy_is_bitwise_a_no_op(load, case, path):
    model = load(case, "float16")
    path = kv.path_named(path)
    plain, kept, copied = (
        logits_of(model, dataclasses.replace(path, policy=policy))
        for policy in (Policy(), kv.policy_named("identity"), Copies())
    )
    assert_bitwise(kept, plain, "logits under identity", ("step", "vocab"))
    assert_bitwise(copied, plain, "logits under a policy that copies", ("step", "vocab"))
    changed = logits_of(model, dataclasses.replace(path, policy=Rolls()))
    assert not torch.equal(changed, plain), "a policy that rolls V changed nothing: policies are not asked"


@cases()
def test_law_3_holds_whatever_the_policy_does_to_the_cache(load, case):
    """The prefill reads the tensors it has just made; what the policy changed is read from step 1 on, and then it shows."""
    adapter = load(case)
    plain = kv.run(adapter, PROMPT, "cached", max_new_tokens=2, logits="keep")
    rolled = kv.run(adapter, PROMPT, kv.Cached(Rolls()), max_new_tokens=2, logits="keep", continuation=plain.tokens[:1])
    assert torch.equal(plain.logits[0], rolled.logits[0])
    assert not torch.equal(plain.logits[1], rolled.logits[1])
