"""Law 9 of docs/laws.md: prompts are batched only where that was checked to give the same bits, else one by one."""

import logging

import pytest
import torch

import kvinterp as kv
from kvinterp.paths import Runner
from support import PROMPT, Case, cases, hooks_of

pytestmark = pytest.mark.bits

PROMPTS = [[(token * factor + factor) % 90 + 4 for token in PROMPT] for factor in (1, 2, 3, 5)]
PROMPTS.insert(1, PROMPTS[0][:7])
"""Five prompts of two lengths: the four long ones can be batched, the short one stands between them."""

TABLES = ("steps", "examples", "layers", "heads", "kv_steps", "kv_positions", "failures")
FEW = [
    pytest.param(Case("llama-gqa", "hooked"), marks=pytest.mark.hooked),
    Case("llama-gqa", "bridge"),
    Case("llama-gqa", "native", "eager"),
]
few = pytest.mark.parametrize("case", FEW, ids=str)


def compared(model, case, **more):
    settings = {"max_new_tokens": 3, "stop": "length", "record": case.compared, "progress": "none"} | more
    return kv.compare(model, PROMPTS, **settings)


@pytest.fixture
def batches(monkeypatch):
    """The sizes of the batches that any path runs from here on, the check's own not counted."""
    from kvinterp.paths import batches

    sizes, checking = [], []
    check, start = batches.batched_alike, Runner.__init__

    def checked(*args):
        checking.append(1)
        try:
            return check(*args)
        finally:
            checking.pop()

    def started(self, adapter, path, prompt, *args, **kwargs):
        if not checking:
            sizes.append(prompt.shape[0])
        start(self, adapter, path, prompt, *args, **kwargs)

    monkeypatch.setattr(batches, "batched_alike", checked)
    monkeypatch.setattr(Runner, "__init__", started)
    return sizes


@pytest.fixture
def quick_check(monkeypatch):
    """Compares fewer numbers before a batch is run, where the test's own kernels leave nothing to luck."""
    monkeypatch.setattr("kvinterp.paths.batches.CHECKED_NUMBERS", 2000)


@pytest.mark.slow
@pytest.mark.each
@cases()
def test_a_batch_gives_the_same_tables_as_one_by_one(load, case, batches):
    model = load(case, "float16")
    alone = compared(model, case)
    assert set(batches) == {1}
    together = compared(model, case, batch_size=3)
    for name in TABLES:
        assert getattr(alone, name).equals(getattr(together, name)), f"the {name} differ; batches of {batches}"


@pytest.mark.slow
@few
def test_a_batch_is_really_run_where_the_kernels_do_not_see_it(load, case, batches, quick_check):
    """Kernels of one fixed order give the same bits whatever the batch: the check passes, and rightly."""
    model = load(case)
    paths = {"a": "cached[kernels=batch_invariant]", "b": "recompute[kernels=batch_invariant]"}
    alone = compared(model, case, max_new_tokens=2, **paths)
    batches.clear()
    together = compared(model, case, max_new_tokens=2, batch_size=3, **paths)
    assert batches == [3, 3, 1, 1, 1, 1]
    for name in TABLES:
        assert getattr(alone, name).equals(getattr(together, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 3])
def test_a_batch_that_changes_bits_is_not_used(load, batches, monkeypatch, caplog, quick_check, late):
    """A model whose kernels add a little to a batch's logits, from some number of cached positions on."""
    model = load(Case("llama-gqa", "native", "eager"))
    forward = type(model).forward

    def variant(self, tokens, store=None, mask=None, positions=None):
        logits = forward(self, tokens, store, mask, positions)
        begun = store is not None and store.length(0) > len(PROMPT) + late
        return logits + 2.0**-20 if tokens.shape[0] > 1 and begun else logits

    # Kernels of one fixed order, so that this is the only thing that a batch changes.
    path, settings = "cached[kernels=batch_invariant]", {"max_new_tokens": 5, "logits": "keep", "stop": "length"}
    alone = kv.run(model, PROMPTS, path, **settings)
    monkeypatch.setattr(model, "checked", {})
    monkeypatch.setattr(type(model), "forward", variant)
    batches.clear()
    with caplog.at_level(logging.INFO, logger="kvinterp"):
        together = kv.run(model, PROMPTS, path, batch_size=4, **settings)
    assert set(batches) == {1}
    assert "running them one by one" in caplog.text
    assert "batch of 4" in caplog.text
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case("llama-gqa", "native", "sdpa"), pytest.param(Case("gemma2", "native", "eager"), marks=pytest.mark.long)],
    ids=str,
)
def test_the_check_sees_what_the_logits_hide(load, case):
    """It once compared the newest logits of a few steps only, which in float16 were equal by luck on models as small as
    these, and the tables then were not those of single prompts. Every batch it lets through must be right at every step."""
    model = load(case, "float16")
    settings = {"max_new_tokens": 12, "record": "resid_post"}
    alone, together = (compared(model, case, batch_size=size, **settings) for size in (1, 4))
    assert alone.steps.equals(together.steps)
    assert alone.layers.equals(together.layers)


def test_the_check_leaves_no_hook(load, quick_check):
    model = load(Case("llama-gqa", "native", "eager"), "float16")
    before = hooks_of(model.model)
    kv.run(model, PROMPTS, max_new_tokens=2, batch_size=4)
    assert hooks_of(model.model) == before


@pytest.mark.slow
@few
def test_out_of_memory_halves_the_batch_and_says_so(load, case, batches, quick_check, monkeypatch, caplog):
    """Wherever it happens first: the check of the bits runs the same batch, and once let the error through."""
    model = load(case)
    path = "cached[kernels=batch_invariant]"
    wanted = kv.run(model, PROMPTS, path, max_new_tokens=2, logits="keep")
    monkeypatch.setattr(model, "checked", {})
    forward = type(model).forward

    def small(self, tokens, store=None):
        if tokens.shape[0] > 2:
            raise torch.OutOfMemoryError("planted")
        return forward(self, tokens, store)

    monkeypatch.setattr(type(model), "forward", small)
    batches.clear()
    with caplog.at_level(logging.WARNING, logger="kvinterp"):
        given = kv.run(model, PROMPTS, path, max_new_tokens=2, logits="keep", batch_size=4)
    assert "out of memory with a batch of 4: halved to 2" in caplog.text
    assert max(batches) == 2
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(wanted, given, strict=True))
    assert [t.prompt for t in given] == [tuple(prompt) for prompt in PROMPTS]
