"""What a policy may do to K and V: write, read, keep, see; against plain loops of transformers, which share nothing with it."""

import dataclasses

import pytest
import torch

import kvinterp as kv
from kvinterp.policies import ComposedPolicy, Policy
from kvinterp.policies.sinks import Sinks
from plain import FED, check_thinned, forced_run
from support import PROMPT, Case, Louder, Rounds, assert_bitwise, assert_close

STEPS = len(FED) + 1
NATIVE = [Case("llama-gqa", "native", "sdpa"), Case("llama-gqa", "native", "eager")]
LETTING_GO = [*NATIVE, Case("llama-gqa", "bridge"), Case("gpt2", "native", "eager")]
every_case = pytest.mark.parametrize("case", LETTING_GO, ids=str)
native = pytest.mark.parametrize("case", NATIVE, ids=str)
both_caches = pytest.mark.parametrize("cache", ["dynamic", "preallocated"])


@dataclasses.dataclass(frozen=True)
class HeavyHitters(Policy):
    """Keeps in each head the rows that were attended to most so far, as H2O does, and the newest."""

    rows: int = 6
    evicts = True

    @property
    def sites(self):
        return ("pattern",)

    def start(self, facts):
        return _Counting(self.rows, facts)


class _Counting(HeavyHitters):
    def __init__(self, rows, facts):
        super().__init__(rows)
        self.heads, self.seen = facts.kv_heads, {}

    def see(self, site, tensor, place):
        mass = tensor.double().sum(2).unflatten(1, (self.heads, -1)).sum(2)
        total = self.seen.setdefault(place.layer, torch.zeros(*mass.shape[:2], 200, dtype=torch.float64))
        total.scatter_add_(2, place.positions.expand_as(mass), mass)

    def keep(self, keys, values, place):
        total = self.seen[place.layer].gather(2, place.positions.expand(*keys.shape[:3])).clone()
        total[..., -1] = torch.inf
        return total.topk(min(self.rows, keys.shape[2]), -1).indices


@dataclasses.dataclass(frozen=True)
class Halves(Policy):
    """Keeps half of every value and reads it back, exactly in any binary format."""

    def write(self, keys, values, place):
        return keys, values / 2

    def read(self, keys, values, place):
        return keys, values * 2


# Letting go of rows ----------------------------------------------------------------------------------------------------


def first_two_and_newest_eight(layer, positions, pattern, keys):
    rows = torch.arange(positions.shape[2])
    return torch.cat([rows[:2], rows[2:][-8:]]).expand(*positions.shape[:2], -1)


def most_attended():
    totals = {}

    def choose(layer, positions, pattern, keys):
        mass = pattern.double().sum(2).unflatten(1, (positions.shape[1], -1)).sum(2)
        total = totals.setdefault(layer, torch.zeros(*positions.shape[:2], 200, dtype=torch.float64))
        total.scatter_add_(2, positions, mass)
        found = total.gather(2, positions)
        found[..., -1] = torch.inf
        return found.topk(6, -1).indices

    return choose


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "choose"), [(Sinks(2, 8), lambda: first_two_and_newest_eight), (HeavyHitters(), most_attended)],
                         ids=["sinks", "heavy hitters"])  # fmt: skip
@both_caches
@every_case
def test_rows_are_let_go_of_as_by_hand(load, case, cache, policy, choose):
    found = check_thinned(load, case, choose(), kv.Cached(policy, cache=cache))
    assert found.records["cache_positions", 0][-1].shape[-1] < len(PROMPT)


@pytest.mark.slow
@both_caches
@every_case
def test_a_policy_that_lets_nothing_go_changes_no_bit(load, case, cache):
    model = load(case)
    kept = forced_run(model, kv.Cached(Sinks(2, 100), cache=cache), record="kv", positions="all")
    assert_bitwise(kept.logits, forced_run(model, kv.Cached(cache=cache)).logits, "logits", ("step", "vocab"))
    assert kept.records["cache_positions", 1][-1][0].tolist() == list(range(len(PROMPT) + STEPS - 1))


@native
def test_rows_are_let_go_of_once_the_exact_prefill_is_over_and_between_the_chunks_of_a_stored_one(load, case):
    model = load(case).at(torch.float64)
    whole, chunked = (forced_run(model, kv.Cached(Sinks(2, 8), chunk=chunk), record="cache_v") for chunk in (None, 4))
    assert_close(chunked.logits, whole.logits, "logits in chunks", relative=1e-5)
    stored = forced_run(model, kv.Cached(Sinks(1, 3), chunk=4, prefill="stored"), record="cache_v", positions="all")
    assert stored.records["cache_positions", 0][0][0].tolist() == [0, 5, 6, 7, 8, 9, 10, 11]
    assert not torch.allclose(stored.logits[0], whole.logits[0])


@dataclasses.dataclass(frozen=True)
class Wrong(Policy):
    """Names rows that are not there, or as many in each layer as it likes."""

    rows: tuple[int, ...] = ()
    more: int = 0

    def keep(self, keys, values, place):
        return torch.tensor([*self.rows, *range(3, 3 + self.more * place.layer)], dtype=torch.long)


@pytest.mark.parametrize("rows", [(), (99,), (-1, 2), (1, 1)])
def test_rows_that_are_not_there_are_an_error(load, rows):
    with pytest.raises(kv.InputError, match="names rows of layer 0 that are not there, or one twice, or none"):
        forced_run(load(NATIVE[0]), kv.Cached(Wrong(rows)))


def test_what_cannot_let_go_of_rows_says_so(load):
    model = load(NATIVE[0])
    with pytest.raises(kv.UnsupportedError, match="keeps 1 rows in one layer and 2 in another"):
        forced_run(model, kv.Cached(Wrong((0,), 1)))
    for cache in ("static", "quantized(8,fp8)"):
        with pytest.raises(kv.UnsupportedError, match=r"policy sinks\(2,8\) lets go of rows, and a .*Cache cannot"):
            forced_run(model, kv.Cached(Sinks(2, 8), cache=cache))
    with pytest.raises(kv.UnsupportedError, match="slides a window over"):
        forced_run(load(Case("mistral-window", "native", "sdpa")), kv.Cached(Sinks(2, 8)))
    for policy in (Sinks(2, 8), HeavyHitters(), ComposedPolicy((Halves(), Sinks(2, 8)))):
        with pytest.raises(kv.InputError, match="recompute keeps no rows"):
            kv.Recompute(policy)


@pytest.mark.hooked
def test_a_hooked_transformer_lets_go_of_no_rows(load):
    """It turns cached keys by the number of their row, which would be another."""
    for policy in (Sinks(2, 8), ComposedPolicy((Halves(), HeavyHitters()))):
        with pytest.raises(kv.UnsupportedError, match="turns cached keys by the number of their row"):
            forced_run(load(Case("llama-gqa", "hooked")), kv.Cached(policy))


@every_case
def test_a_path_that_lets_go_of_rows_is_compared_over_all_positions(load, case):
    """A row that was let go of is a key of probability 0, as one that slid out of a window is."""
    found = kv.compare(load(case), list(PROMPT), kv.Cached(Sinks(2, 8)), "cached", max_new_tokens=STEPS, stop="length",
                       progress="none")  # fmt: skip
    heads = found.heads.groupby("step").kl.max()
    assert (heads[0], len(heads)) == (0, STEPS)
    assert (heads[1:] > 0).all()
    assert found.steps.kl[0] == 0
    same = kv.compare(load(case), list(PROMPT), kv.Cached(Sinks(2, 99)), "cached", max_new_tokens=STEPS, stop="length",
                      progress="none")  # fmt: skip
    assert (same.heads.kl == 0).all()


# Several at once -------------------------------------------------------------------------------------------------------


@native
def test_what_one_wrote_last_is_read_first(load, case):
    """Halving what was rounded is undone before anything else reads it."""
    model = load(case)
    chained = forced_run(model, kv.Cached(ComposedPolicy((Rounds(), Halves(), Sinks(2, 8)))))
    assert_bitwise(
        chained.logits,
        forced_run(model, kv.Cached(ComposedPolicy((Rounds(), Sinks(2, 8))))).logits,
        "logits",
        ("step", "vocab"),
    )


# The prefill -----------------------------------------------------------------------------------------------------------

KINDS = [*NATIVE, Case("llama-gqa", "bridge"), pytest.param(Case("llama-gqa", "hooked"), marks=pytest.mark.hooked)]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


@pytest.mark.parametrize("policy", [Louder(), Rounds(), ComposedPolicy((Rounds(), Louder()))], ids=str)
@pytest.mark.parametrize("chunk", [None, 4])
@every_kind
def test_a_stored_prefill_is_the_recompute_path_under_the_same_policy(load, case, chunk, policy):
    model = load(case)
    stored, recomputed, plain = (
        forced_run(model, path, max_new_tokens=1).logits
        for path in (kv.Cached(policy, chunk=chunk, prefill="stored"), kv.Recompute(policy, chunk=chunk), "recompute")
    )
    assert_bitwise(stored, recomputed, "step 0")
    assert not torch.equal(stored, plain)


# Refreshing ------------------------------------------------------------------------------------------------------------


@pytest.mark.bits
@every_kind
def test_a_cache_refreshed_at_every_step_is_the_recompute_path(load, case):
    """Law 3 at every step: each one is a prefill, which reads what it computes."""
    model = load(case, "float16")
    for chunk in (None, 4):
        fresh, plain = (forced_run(model, make(chunk=chunk)).logits for make in (lambda chunk: kv.Cached(refresh=1, chunk=chunk),
                        lambda chunk: kv.Recompute(chunk=chunk)))  # fmt: skip
        assert_bitwise(fresh, plain, "logits", ("step", "vocab"))


@every_kind
def test_a_refresh_forgets_what_the_policy_did(load, case):
    model = load(case)
    found = forced_run(model, kv.Cached(Louder(), refresh=3)).logits
    plain = forced_run(model, "recompute").logits
    equal = [torch.equal(a, b) for a, b in zip(found, plain, strict=True)]
    assert equal == [step % 3 == 0 for step in range(STEPS)]


# Patches ---------------------------------------------------------------------------------------------------------------
