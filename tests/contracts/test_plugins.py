"""What holds of every policy and every kernel mode that is found, so of one that is dropped into its folder tomorrow.

Policies are asked without a model's arithmetic wherever that could blur an answer: the same keys and values go through a store in
other pieces, and what attention reads must be the same to the bit.
"""

import contextlib
import dataclasses
import itertools

import pytest
import torch

import kvinterp as kv
from kvinterp.paths.kernels import KERNELS
from kvinterp.paths.model_cache import growing_store
from kvinterp.policies import POLICIES, CacheRows, ComposedPolicy, policy_named
from kvinterp.policies.base import Selective
from kvinterp.recording import PathHook
from support import PROMPT, Case, assert_bitwise

pytestmark = pytest.mark.bits

STEPS, QUERY_HEADS, WIDTH = 4, 4, 64
"""Heads as wide as a block format needs."""
PROMPT_ROWS, ROWS, TAKEN_UP = 126, 134, 130
"""Longer than the windows and groups that policies have, with a multiple of each passed in the prompt and after it."""
every_policy = pytest.mark.parametrize("name", POLICIES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
SEEDED = [name for name, kind in POLICIES.items() if "seed" in {field.name for field in dataclasses.fields(kind)}]


@pytest.fixture(scope="session")
def grouped(tmp_path_factory):
    """Tiny models with heads of 64, by their query heads a KV head and their kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = {}

    def get(group, kind="native"):
        if (group, kind) not in made:
            torch.manual_seed(group)
            sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "num_hidden_layers": 2}
            heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": QUERY_HEADS // group, "head_dim": WIDTH}
            config = LlamaConfig(**sizes, **heads, initializer_range=0.15, max_position_embeddings=512)
            folder = tmp_path_factory.mktemp("grouped")
            LlamaForCausalLM(config).save_pretrained(folder)
            made[group, kind] = kv.load_model(str(folder), kind=kind, dtype="float32", device="cpu")
        return made[group, kind]

    return get


# A policy in a store, fed by hand ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rows:
    """Keys, values and what attention makes of them in each layer, of ``batch`` sequences."""

    keys: list
    values: list
    weights: list

    def of(self, sequence):
        return Rows(*([one[sequence : sequence + 1] for one in each] for each in (self.keys, self.values, self.weights)))


def rows(batch=1, seed=0, dtype=torch.float32, kv_heads=2):
    """Random ones; the attention in 256ths, whose sums are exact in any order."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(batch, *shape, generator=random, dtype=torch.float64).to(dtype)

    keys, values = ([draw(kv_heads, ROWS, WIDTH) for _ in range(2)] for _ in range(2))
    shape = (batch, QUERY_HEADS, ROWS, ROWS)
    weights = [torch.randint(0, 257, shape, generator=random).tril() / 256 for _ in range(2)]
    return Rows(keys, values, weights)


class Reads(PathHook):
    """What attention reads now."""

    def on_read(self, place, keys, values):
        self.now = place, keys.clone(), values.clone()


def shown(site, weights, place, begun):
    assert site in ("pattern", "attn_scores"), f"the contracts show policies no {site!r} yet: add it here"
    heads = 1 if place.positions_left is None else place.positions_left.shape[1]
    positions = place.positions.expand(len(weights), heads, -1).repeat_interleave(QUERY_HEADS // heads, 1)
    queries = weights[:, :, begun : place.stop]
    return queries.gather(3, positions[:, :, None].expand(-1, -1, queries.shape[2], -1))


def fed(model, policy, given, prompt=PROMPT_ROWS, chunk=None):
    """What attention reads in every layer of every step: positions, keys, values."""
    reads, found = Reads(), []
    store = growing_store(model, kv.Cached(policy), len(given.keys[0]), prompt, ROWS - prompt, [reads])
    starts = [*range(0, prompt, chunk or prompt), *range(prompt, ROWS), ROWS]
    for begun, stop in itertools.pairwise(starts):
        for layer, (keys, values, weights) in enumerate(zip(given.keys, given.values, given.weights, strict=True)):
            store.update(layer, keys[:, :, begun:stop], values[:, :, begun:stop])
            for site in policy.sites:
                store.hear(site, layer, shown(site, weights, reads.now[0], begun))
            if begun >= prompt:
                found.append((layer, begun, *reads.now))
        store.settle()
    return found


def assert_alike(some, others, what):
    assert len(some) == len(others) > 0
    for (layer, step, place, *pair), (_, _, other, *pair_of_other) in zip(some, others, strict=True):
        where = f"of layer {layer} at position {step}, {what}"
        assert torch.equal(place.positions.expand(pair[0].shape[:3]), other.positions.expand(pair[0].shape[:3])), where
        for tensor, one, two in zip("kv", pair, pair_of_other, strict=True):
            assert_bitwise(one, two, f"{tensor} {where}", ("sequence", "head", "row", "element"))


# Text forms ----------------------------------------------------------------------------------------------------------------


def test_there_are_some():
    assert {"identity", "uniform", "truncate"} <= set(POLICIES)
    assert SEEDED
    assert {"native", "split_k", "batch_invariant"} <= set(KERNELS)


@every_policy
def test_a_policys_text_form_reads_as_it_is_written(name):
    policy = POLICIES[name]()
    changed = {"on": "v", "layers": (0, 2), "heads": (1,), "keys": "after"} if isinstance(policy, Selective) else {}
    if name in SEEDED:
        changed |= {"seed": -3}
    for one in (policy, *(dataclasses.replace(policy, **{field: value}) for field, value in changed.items())):
        assert policy_named(str(one)) == one
        path = kv.path_named(f"cached[chunk=4]+{one}@float64")
        assert kv.path_named(str(path)) == path
        assert path.policy == one
    assert str(kv.path_named(f"cached+{policy}")) == ("cached" if name == "identity" else f"cached+{policy}")


@every_policy
def test_a_policy_says_what_is_stored_and_what_it_depends_on(name):
    policy = POLICIES[name]()
    for tensor in ("k", "v"):
        bits = policy.bits_stored(tensor, WIDTH)
        assert bits is None or 0 < bits <= 64
    assert set(policy.depends_on) <= {"prompt", "chunks"}


# What comes out --------------------------------------------------------------------------------------------------------------


@pytest.mark.each
@every_policy
@every_dtype
def test_shapes_and_dtypes_are_kept_and_nothing_is_changed_in_place(grouped, name, dtype):
    given, same = rows(dtype=dtype), rows(dtype=dtype)
    for _, _, place, keys, values in fed(grouped(2), POLICIES[name](), given):
        assert keys.dtype == values.dtype == dtype
        assert keys.shape == values.shape == (1, 2, place.positions.shape[-1], WIDTH)
    for one, other in zip([*given.keys, *given.values], [*same.keys, *same.values], strict=True):
        assert_bitwise(one, other, "what it was given")


@every_policy
def test_write_and_read_change_nothing_in_place(grouped, name):
    """Asked by themselves: a store hands over views of its own memory."""
    policy = POLICIES[name]().start(grouped(2).facts)
    keys, values = torch.randn(2, 1, 2, 7, WIDTH)
    given = keys.clone(), values.clone()
    for act in (policy.write, policy.read):
        with contextlib.suppress(kv.UnsupportedError):
            act(*given, CacheRows(0, 0, 7, rotated=True))
        assert_bitwise(given[0], keys, "keys")
        assert_bitwise(given[1], values, "values")


@every_policy
def test_a_prompt_in_chunks_is_read_as_one_at_once(grouped, name):
    policy, given = POLICIES[name](), rows()
    if "chunks" in policy.depends_on:
        pytest.skip(f"{name} says that it depends on chunks")
    whole = fed(grouped(2), policy, given)
    assert_alike(fed(grouped(2), policy, given, chunk=37), whole, "in chunks")


@every_policy
def test_a_decode_taken_up_again_goes_on_as_it_would_have(grouped, name):
    """With the answer so far as part of the prompt, as when it is computed anew."""
    policy, given = POLICIES[name](), rows()
    if "prompt" in policy.depends_on:
        pytest.skip(f"{name} says that it depends on where the prompt ends")
    went_on = [found for found in fed(grouped(2), policy, given) if found[1] >= TAKEN_UP]
    assert_alike(fed(grouped(2), policy, given, prompt=TAKEN_UP), went_on, "taken up again")


@every_policy
def test_sequences_of_a_batch_are_read_as_each_alone(grouped, name):
    policy, given = POLICIES[name](), rows(batch=2)
    together = fed(grouped(2), policy, given)
    for sequence in range(2):
        alone = fed(grouped(2), policy, given.of(sequence))
        part = [
            (layer, step, dataclasses.replace(place, positions_left=None if place.positions_left is None else place.positions_left[sequence][None]),
             keys[sequence][None], values[sequence][None]) for layer, step, place, keys, values in together
        ]  # fmt: skip
        assert_alike(part, alone, f"sequence {sequence}")


@every_policy
def test_no_state_is_left_between_prompts_nor_between_layers(grouped, name):
    policy, given, other = POLICIES[name](), rows(), rows(seed=1)
    first = fed(grouped(2), policy, given)
    fed(grouped(2), policy, other, prompt=9, chunk=4)
    assert_alike(fed(grouped(2), policy, given), first, "after another prompt")
    assert policy == POLICIES[name]()
    mixed = Rows(*([one[0], two[1]] for one, two in zip(vars(given).values(), vars(other).values(), strict=True)))
    own = [[found for found in each if found[0] == 0] for each in (fed(grouped(2), policy, mixed), first)]
    assert_alike(*own, "beside another layer")


@pytest.mark.parametrize("name", SEEDED)
def test_layers_tensors_heads_positions_and_seeds_have_draws_of_their_own(grouped, name):
    ones = [torch.ones(1, 2, ROWS, WIDTH) for _ in range(2)]
    given, drawn = dataclasses.replace(rows(), keys=ones, values=ones), []
    for seed in (0, 1):
        policy = POLICIES[name](seed=seed)
        for layer, step, _, keys, values in fed(grouped(2), policy, given):
            drawn += [*keys[0, :, -3:].flatten(0, 1), *values[0, :, -3:].flatten(0, 1)] if step == ROWS - 1 else []
            assert layer in (0, 1)
    vectors = torch.stack(drawn)
    assert len(vectors.unique(dim=0)) == len(vectors) == 2 * 2 * 2 * 2 * 3


def tried(work):
    """What comes of it, or how it is refused."""
    try:
        return work()
    except kv.KvinterpError as error:
        return type(error)


@every_policy
def test_composition_is_associative_and_has_a_text_form(grouped, name):
    """With the two policies that are listed after it."""
    names, given = [*POLICIES], rows()
    a, b, c = (POLICIES[names[(names.index(name) + more) % len(names)]]() for more in range(3))
    flat, left, right = (
        ComposedPolicy((a, b, c)),
        ComposedPolicy((ComposedPolicy((a, b)), c)),
        ComposedPolicy((a, ComposedPolicy((b, c)))),
    )
    assert str(flat) == str(left) == str(right)
    assert policy_named(str(flat)) == flat
    one, *others = (tried(lambda policy=policy: fed(grouped(2), policy, given)) for policy in (flat, left, right))
    for other in others:
        if isinstance(one, type):
            assert one is other
        else:
            assert_alike(other, one, f"{flat} otherwise in brackets")


# In a model ----------------------------------------------------------------------------------------------------------------------


def run(model, path, **more):
    return kv.run(model, list(PROMPT), path, **{"max_new_tokens": STEPS, "stop": "length", "logits": "keep"} | more)


@pytest.mark.parametrize("path", [f"cached+{name}" for name in POLICIES] + [f"cached[kernels={name}]" for name in KERNELS])
def test_law_1_and_2_hold_under_it(grouped, path):
    """Equal to itself, and to itself while it is recorded."""
    model = grouped(2)
    plain = run(model, path)
    assert_bitwise(run(model, path).logits, plain.logits, "logits of a second run")
    assert_bitwise(run(model, path, record="resid_post,attn_out").logits, plain.logits, "logits of a recorded run")


@pytest.mark.each
@every_policy
@pytest.mark.parametrize("group", [1, 2, 4])
def test_law_3_holds_with_any_number_of_query_heads_a_kv_head(grouped, name, group):
    """The prefill's attention reads K and V as they were computed, whatever is kept of them."""
    found = run(grouped(group), f"cached+{name}", record="cache_v")
    assert found.records["cache_v", 1][-1].shape == (QUERY_HEADS // group, WIDTH)
    assert found.logits.isfinite().all()
    assert_bitwise(found.logits[0], run(grouped(group), "recompute", max_new_tokens=1).logits[0], "logits of step 0")


@every_policy
@pytest.mark.parametrize("kind", ["bridge", pytest.param("hooked", marks=pytest.mark.hooked)])
def test_it_runs_in_every_kind_of_model_or_says_why_not(grouped, name, kind):
    model = grouped(2, kind)
    found = tried(lambda: run(model, f"cached+{name}"))
    if found is not kv.UnsupportedError:
        assert_bitwise(found.logits[0], run(model, "recompute", max_new_tokens=1).logits[0], "logits of step 0")


@every_policy
def test_a_head_it_does_not_fit_is_refused_before_anything_runs(load, name):
    """By ``start``; what it does not refuse runs."""
    model = load(Case("llama-gqa", "native", "sdpa"))
    fits = tried(lambda: POLICIES[name]().start(model.facts))
    found = tried(lambda: run(model, f"cached+{name}"))
    assert (fits is kv.UnsupportedError) == (found is kv.UnsupportedError)
