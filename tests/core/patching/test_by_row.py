"""Lanes that resume at the same block in one batch: each has the bits that it has alone, or it goes alone."""

import pytest
import torch

import kvinterp as kv
from kvinterp.patching import by_row, recompute
from kvinterp.paths import Runner, batches
from support import Case, assert_bitwise, cases

pytestmark = pytest.mark.bits

PROMPTS = [[5, 17, 3, 44, 9, 31, 60, 8, 2, 71], [44, 8, 2, 19, 5, 3]]
KINDS = [Case("llama-gqa", "hooked"), Case("mistral-window", "bridge"), Case("llama-gqa", "native", "eager")]
SWEPT = [("z", "heads"), ("pattern", "heads"), ("kv", "kv-heads"), ("resid_mid", "blocks"), ("resid_post", "blocks")]
INVARIANT = {"recompute": "recompute[kernels=batch_invariant]", "cached": "cached[kernels=batch_invariant]+normal(0,0.3)"}
HOW = {"max_new_tokens": 4, "stop": "length", "logits": "keep", "controls": "none", "progress": "none"}


@pytest.fixture(autouse=True)
def quick_check(monkeypatch):
    """Compares fewer numbers before a batch is run: each test compares every bit of what came of it."""
    monkeypatch.setattr(batches, "CHECKED_NUMBERS", 2000)


def both(model, site, over, **more):
    """One by one, and in batches."""
    blocks = {"block": 4} if over == "blocks" else {}
    return (kv.sweep(model, PROMPTS, site, over, **{**HOW, **blocks, **more}, batch_size=size) for size in (1, 4))


def assert_same(alone, together):
    for example, logits in alone.logits.items():
        assert_bitwise(logits, together.logits[example], f"example {example}")
    assert together.recovery.equals(alone.recovery)


@pytest.mark.slow
@pytest.mark.parametrize(("site", "over"), SWEPT)
@cases(KINDS)
def test_each_has_the_bits_it_has_alone(load, case, site, over):
    """With this machine's kernels, which may or may not allow a batch, and with kernels that always do."""
    model = load(case)
    assert_same(*both(model, site, over))
    alone, together = both(model, site, over, **INVARIANT)
    assert_same(alone, together)
    assert (alone.recovery["d_before"] > 0).any()
    assert together.provenance["work"]["forwards"] < alone.provenance["work"]["forwards"] / 1.5


@cases(KINDS[2:])
def test_a_lane_that_leaves_the_text_goes_alone(load, case, monkeypatch):
    forward, on_the_text = recompute.PureRecompute._forward, []

    def seen(self, tokens, kept, hook, rows=1):
        if rows > 1:
            on_the_text.append(tokens == self._captured)
        return forward(self, tokens, kept, hook, rows)

    monkeypatch.setattr(recompute.PureRecompute, "_forward", seen)
    alone, together = both(
        load(case), "kv", "kv-heads", **(INVARIANT | {"cached": "cached[kernels=batch_invariant]+normal(0,3)"}),
        protocol="free", max_new_tokens=6,
    )  # fmt: skip
    assert_same(alone, together)
    chosen = torch.cat([logits.argmax(-1) for logits in alone.logits.values()])
    assert (chosen[:, 2:] != chosen[:, 1:2]).any(), "a patched run chose another token, or this test shows nothing"
    assert on_the_text
    assert all(on_the_text), "a batch of another text was not checked"


@cases(KINDS[2:])
def test_where_a_batch_does_not_keep_the_bits_there_is_none(load, case, monkeypatch):
    monkeypatch.setattr(by_row, "batched_alike", lambda *_: False)
    alone, together = both(load(case), "z", "heads")
    assert_same(alone, together)
    assert together.provenance["work"] == alone.provenance["work"]


@pytest.mark.slow
@pytest.mark.parametrize(("site", "over"), [*SWEPT[:1], *SWEPT[2:4]])
@cases(KINDS)
def test_patches_of_the_cached_path_are_rows_of_one_run(load, case, site, over, monkeypatch):
    """Whatever their layers: none of them can begin later than the others."""
    model, sizes, start = load(case), [], Runner.__init__

    def started(self, adapter, path, prompt, *args, **kwargs):
        sizes.append(len(prompt))
        start(self, adapter, path, prompt, *args, **kwargs)

    how = {"direction": "into-cached", "positions": "all" if site == "kv" else "newest"}
    assert_same(*both(model, site, over, **how))
    monkeypatch.setattr(by_row, "batched_alike", lambda *_: True)
    monkeypatch.setattr(Runner, "__init__", started)
    noisy = INVARIANT | {"recompute": "recompute[kernels=batch_invariant]+normal(0,0.3)"}
    alone, together = both(model, site, over, **how, **noisy)
    assert_same(alone, together)
    assert max(sizes) == 4
    assert (alone.recovery["d_before"] > 0).any()
