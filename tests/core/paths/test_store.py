"""The store alone, fed tensors: what attention reads and what is kept, under policies, patches and evictions, on every memory."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig

from kvinterp.models import ModelInfo
from kvinterp.models.cache_kinds import Dynamic, Static
from kvinterp.models.transformers_cache import TransformersCache
from kvinterp.paths.store import Growing, Store
from kvinterp.policies import ComposedPolicy, Identity, Policy
from support import Louder, Rounds

FACTS = ModelInfo("stub", "Stub", 1, 4, 2, 6, 24, 97, 96, (None,), True, "eager")
CONFIG = LlamaConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
PIECES = (4, 4, 4, 1, 1, 1)
PREFILL = 12
LAST_CHUNK = 2
"""Three chunks of a prompt, then three single tokens."""


@dataclasses.dataclass(frozen=True)
class Sinks(Policy):
    def keep(self, keys, values, place):
        rows = torch.arange(keys.shape[2])
        return torch.cat([rows[:1], rows[1:][-3:]])


POLICIES = {
    "identity": (Identity(), lambda keys, values: (keys, values)),
    "rounds": (Rounds(), lambda keys, values: (keys.bfloat16().float(), values.bfloat16().float())),
    "louder": (Louder(), lambda keys, values: (keys, values * 2)),
    "both": (
        ComposedPolicy((Rounds(), Louder())),
        lambda keys, values: (keys.bfloat16().float(), values.bfloat16().float() * 2),
    ),
}
memories = pytest.mark.parametrize("memory", ["dynamic", "static", "growing"])
policies = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture
def pieces():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(1, 2, count, 6, generator=generator) for _ in "kv") for count in PIECES]


def feeding(pieces, memory, policy, prefill=PREFILL, listeners=(), cache_dtype=None):
    """For each piece what attention reads, and what was put in until then."""
    kinds = {"dynamic": Dynamic(), "static": Static()}
    kept = Growing(sum(PIECES)) if memory == "growing" else TransformersCache(kinds[memory].make(CONFIG, sum(PIECES)))
    store = Store(FACTS, policy, 1, torch.float32, torch.device("cpu"), listeners, kept, cache_dtype, prefill)
    for number in range(len(pieces)):
        keys, values = (tensor.clone() for tensor in pieces[number])
        keys, values = (
            store.update(0, keys, values)
            if store.library_cache is None
            else store.library_cache.model_cache.update(keys, values, 0)
        )
        whole = [torch.cat([piece[side] for piece in pieces[: number + 1]], 2) for side in (0, 1)]
        # A static cache hands over its empty room too.
        filled = min(keys.shape[2], whole[0].shape[2])
        yield store, (keys[:, :, :filled], values[:, :, :filled]), whole
        store.settle()


@policies
@memories
def test_a_prefill_reads_what_was_computed_and_decode_what_is_kept(pieces, memory, policy):
    """Defect A: ``read`` was asked in the prefill, and the second chunk read what ``write`` had made of the first."""
    policy, changed = POLICIES[policy]
    for number, (_, read, whole) in enumerate(feeding(pieces, memory, policy)):
        wanted = whole if number <= LAST_CHUNK else changed(*whole)
        assert all(map(torch.equal, read, wanted)), f"piece {number}"


@policies
@memories
def test_a_stored_prefill_reads_what_is_kept(pieces, memory, policy):
    policy, changed = POLICIES[policy]
    for number, (_, read, whole) in enumerate(feeding(pieces, memory, policy, prefill=0)):
        assert all(map(torch.equal, read, changed(*whole))), f"piece {number}"


@memories
def test_a_narrower_cache_is_read_after_the_prefill(pieces, memory):
    for number, (_, read, whole) in enumerate(feeding(pieces, memory, Identity(), cache_dtype=torch.bfloat16)):
        wanted = whole if number <= LAST_CHUNK else [tensor.bfloat16().float() for tensor in whole]
        assert all(map(torch.equal, read, wanted)), f"piece {number}"


@pytest.mark.parametrize("patched", [0, 1, 3, 4])
@policies
@memories
def test_a_patched_row_stays_as_it_was_put_and_all_others_as_they_were(pieces, memory, policy, patched):
    """Defects B and C: ``read`` was applied twice to the other rows, and a patch of the prefill overwrote what was written."""
    policy, changed = POLICIES[policy]
    reads = []

    def patch(place, keys, values):
        reads.append(place)
        if len(reads) - 1 != patched:
            return None
        keys, values = keys.clone(), values.clone()
        keys[:, :, 1:3], values[:, :, 1:3] = 7.0, 9.0
        return keys, values

    for number, (_, read, whole) in enumerate(feeding(pieces, memory, policy, listeners=[patch])):
        keys, values = whole if number <= LAST_CHUNK else changed(*whole)
        if number >= patched:
            keys[:, :, 1:3], values[:, :, 1:3] = 7.0, 9.0
        assert torch.equal(read[0], keys), f"K of piece {number}"
        assert torch.equal(read[1], values), f"V of piece {number}"


@pytest.mark.parametrize(("prefill", "third"), [(PREFILL, list(range(12))), (0, [0, 5, 6, 7, 8, 9, 10, 11])])
@pytest.mark.parametrize("memory", ["dynamic", "growing"])
def test_rows_that_were_let_go_of_are_read_no_more_and_the_others_named(pieces, memory, prefill, third):
    places = []
    fed = feeding(pieces, memory, Sinks(), prefill, [lambda place, keys, values: places.append(place)])
    for number, (store, read, whole) in enumerate(fed):
        positions = places[-1].positions[0]
        for tensor, full in zip(read, whole, strict=True):
            assert torch.equal(tensor, full[:, :, positions[0]]), f"piece {number}"
        assert store.length(0) == sum(PIECES[: number + 1])
    assert [place.positions[0, 1].tolist() for place in places[2:]] == [
        third, [0, 9, 10, 11, 12], [0, 10, 11, 12, 13], [0, 11, 12, 13, 14],
    ]  # fmt: skip
    if memory == "dynamic":
        # Four rows are left, and the next token's position is the fifteenth.
        assert store.library_cache.model_cache.get_seq_length() == 15
        assert store.library_cache.model_cache.get_mask_sizes(1, 0) == (5, 11)
