"""Policies that let go of rows: each against its rule written out beside transformers' own loop, and known answers."""

import pytest
import torch
import transformers

import kvinterp as kv
from kvinterp.models import ModelInfo
from kvinterp.policies import CacheRows, policy_named
from plain import FED, check_thinned, forced_run
from support import PROMPT, Case, assert_bitwise

STEPS = len(FED) + 1
EVICTING = ("sinks(2,4)", "h2o(0.25,0.25)", "tova(0.5)", "snapkv(0.5,3,3)", "knorm(0.5)")
evicting = pytest.mark.parametrize("policy", EVICTING)
# One, two and four query heads share a KV head.
SHARED = {
    1: Case("llama-mha", "native", "eager"),
    2: Case("llama-gqa", "native", "sdpa"),
    4: Case("llama3-rope", "native", "eager"),
}


def positions(trace, layer=0):
    """The positions that attention reads at each step, by KV head."""
    return [kept.tolist() for kept in trace.records["cache_positions", layer]]


# Against a loop that shares nothing with it ------------------------------------------------------------------------------


def sinks_by_hand():
    def choose(layer, places, pattern, keys):
        return torch.tensor([row for row, place in enumerate(places[0, 0].tolist()) if place < 2 or row >= places.shape[2] - 4]
                            ).expand(*places.shape[:2], -1)  # fmt: skip

    return choose


def best(scores, room):
    """The rows of the largest scores, ``[kv_head][row]``."""
    return torch.tensor([[sorted(range(len(row)), key=lambda at: -row[at])[:room] for row in scores]])


def h2o_by_hand():
    totals = {}

    def choose(layer, places, pattern, keys):
        heads, shared = places.shape[1], pattern.shape[1] // places.shape[1]
        scores = []
        for head in range(heads):
            for row, place in enumerate(places[0, head].tolist()):
                mass = pattern[0, head * shared : (head + 1) * shared, :, row].double().sum().item()
                totals[layer, head, place] = totals.get((layer, head, place), 0.0) + mass
            found = [totals[layer, head, place] for place in places[0, head].tolist()]
            scores.append(found[:-3] + [float("inf")] * 3)
        return best(scores, 6)

    return choose


def tova_by_hand():
    def choose(layer, places, pattern, keys):
        found = pattern[0, :, -1].double().mean(0).tolist()
        return best([[*found[:-1], float("inf")]] * places.shape[1], 6)

    return choose


def once(scores_of):
    """A rule that is asked when the prompt is whole, and keeps six of its twelve rows."""

    def choose(layer, places, pattern, keys):
        if places.shape[2] > len(PROMPT) or int(places.max()) >= len(PROMPT):
            return torch.arange(places.shape[2]).expand(*places.shape[:2], -1)
        return best(scores_of(places.shape[1], pattern, keys), 6)

    return lambda: choose


def snapkv_scores(heads, pattern, keys):
    shared, scores = pattern.shape[1] // heads, []
    for head in range(heads):
        mass = pattern[0, head * shared : (head + 1) * shared, -3:, :-3].double().sum((0, 1)).tolist()
        around = [0.0, *mass, 0.0]
        scores.append([sum(around[at : at + 3]) / 3 for at in range(len(mass))] + [float("inf")] * 3)
    return scores


def knorm_scores(heads, pattern, keys):
    return [[-sum(x * x for x in row) for row in head] for head in keys[0].tolist()]


BY_HAND = dict(
    zip(EVICTING, (sinks_by_hand, h2o_by_hand, tova_by_hand, once(snapkv_scores), once(knorm_scores)), strict=True)
)


@pytest.mark.parametrize("shared", SHARED)
@evicting
def test_rows_are_let_go_of_by_the_rule(load, policy, shared):
    facts = load(SHARED[shared]).facts
    assert facts.query_heads == shared * facts.kv_heads
    check_thinned(load, SHARED[shared], BY_HAND[policy](), f"cached+{policy}")


ROWS = {
    "sinks(2,4)": [12, 7, 7, 7, 7, 7],
    "sinks(0,1)": [12, 2, 2, 2, 2, 2],
    "h2o(0.25,0.25)": [12, 7, 7, 7, 7, 7],
    "h2o(0,0)": [12, 2, 2, 2, 2, 2],
    "tova(0.75)": [12, 4, 4, 4, 4, 4],
    "snapkv(0.75,4,1)": [12, 5, 6, 7, 8, 9],
    "snapkv(0.9,12)": [12, 13, 14, 15, 16, 17],
    "knorm(0.99)": [12, 2, 3, 4, 5, 6],
    "knorm(0)": [12, 13, 14, 15, 16, 17],
    "low_rank(3)+knorm(0.5)+sinks(1,6)": [12, 7, 8, 8, 8, 8],
}


@pytest.mark.parametrize("policy", ROWS)
def test_as_many_rows_stay_in_every_layer_as_is_documented(load, policy):
    model = load(SHARED[2])
    found = forced_run(model, f"cached+{policy}", record="cache_v", positions="all")
    for layer in range(model.facts.layers):
        assert [kept.shape[-1] for kept in found.records["cache_positions", layer]] == ROWS[policy]


# Known answers -----------------------------------------------------------------------------------------------------------


def facts(query_heads, kv_heads):
    return ModelInfo("made up", "none", 1, query_heads, kv_heads, 8, 16, 10, 200, (None,), True, "eager")


NEEDLE = 37


@pytest.mark.parametrize("query_heads", [2, 4, 8])
def test_what_keeps_a_tenth_by_attention_keeps_a_needle_that_a_window_forgets(query_heads):
    """Of a hundred rows the 38th is attended to by the queries after it; its key is the shortest."""
    rows, place = 100, CacheRows(0, 0, 100, rotated=True, prompt=100)
    pattern = torch.ones(2, query_heads, rows, rows).tril()
    pattern[:, :, NEEDLE + 1 :, NEEDLE] = 60
    pattern /= pattern.sum(-1, keepdim=True)
    keys = torch.full((2, 2, rows, 8), 2.0)
    keys[:, :, NEEDLE] = 0.5
    for text in ("h2o(0.05,0.05)", "tova(0.9)", "snapkv(0.9,5,1)", "snapkv(0.9,5,5)", "knorm(0.9)", "sinks(4,6)"):
        policy = policy_named(text).start(facts(query_heads, 2))
        for site in policy.sites:
            policy.see(site, pattern, place)
        kept = policy.keep(keys, keys, place).expand(2, 2, -1)
        assert kept.shape[-1] == rows // 10, text
        found = (kept == NEEDLE).any(-1)
        assert bool(found.all()) == (text != "sinks(4,6)"), text
        assert bool(found.any()) == (text != "sinks(4,6)"), text


def test_each_sequence_and_kv_head_keeps_its_own_rows():
    """Two sequences and two KV heads, each with its own needle, with one, two and four query heads a KV head."""
    needles = torch.tensor([[11, 23], [31, 43]])
    for shared in (1, 2, 4):
        pattern = torch.full((2, 2, 60, 60), 1e-3)
        pattern.scatter_(3, needles[:, :, None, None].expand(2, 2, 60, 1), 1.0)
        pattern = pattern.repeat_interleave(shared, 1).tril()
        for text in ("h2o(0.05,0.05)", "snapkv(0.9,5,1)"):
            policy, place = policy_named(text).start(facts(2 * shared, 2)), CacheRows(0, 0, 60, rotated=True, prompt=60)
            policy.see("pattern", pattern, place)
            kept = policy.keep(torch.zeros(2, 2, 60, 8), torch.zeros(2, 2, 60, 8), place)
            assert torch.equal((kept[..., None] == needles.flatten()).any(2).reshape(4, 4), torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("policy", ["sinks(2,100)", "sinks", "snapkv", "knorm(0)", "tova(0)"])
@pytest.mark.parametrize("case", SHARED.values(), ids=str)
def test_what_has_room_for_the_whole_text_changes_no_bit(load, case, policy):
    if policy == "tova(0)":
        policy = "h2o(0.99,0.99)"
    model = load(case)
    assert_bitwise(
        forced_run(model, f"cached+{policy}").logits, forced_run(model, "cached").logits, "logits", ("step", "vocab")
    )


# In pieces, several at once, again -----------------------------------------------------------------------------------------


# Which models may let go of rows -------------------------------------------------------------------------------------------


def tiny(stem, **more):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "initializer_range": 0.15,
    }
    if stem == "Mpt":
        sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "max_seq_len": 96, "initializer_range": 0.15}
    torch.manual_seed(3)
    config = getattr(transformers, f"{stem}Config")(**sizes, **more)
    return kv.wrap(getattr(transformers, f"{stem}ForCausalLM")(config).eval(), name=stem)


FALCON = {"multi_query": True, "new_decoder_architecture": False}
BY_ROW = {"Bloom": {}, "Mpt": {}, "Falcon": {"alibi": True, **FALCON}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", BY_ROW)
def test_a_model_that_scores_keys_by_the_number_of_their_row_lets_go_of_none(stem, dtype):
    """ALiBi's bias is of the row's number, which is another's once a row before it was let go of."""
    model = tiny(stem, **BY_ROW[stem])
    for policy in ("sinks(2,4)", "low_rank(4)+knorm(0.5)"):
        with pytest.raises(kv.UnsupportedError, match="scores a key by the number of its row"):
            forced_run(model, kv.Cached(policy, dtype=str(dtype)))
    forced_run(model, kv.Cached("low_rank(4)", dtype=str(dtype)))
