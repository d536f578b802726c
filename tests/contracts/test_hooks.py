"""Law 7 of docs/laws.md: no hook survives, whatever raises, nested or not; and the user's own hooks do."""

import contextlib
import dataclasses

import pytest
import torch

import kvinterp as kv
from kvinterp.paths import Runner, path_named
from kvinterp.policies import Policy
from kvinterp.recording import SiteHook
from support import PROMPT, Case, assert_bitwise, cases, hooks_of, plain_forward

pytestmark = pytest.mark.bits

TOKENS = torch.tensor([PROMPT])


class Planted(Exception):
    """What the tests raise where nothing should raise."""


@contextlib.contextmanager
def nothing_survives(adapter):
    """The hooks of every module, torch's function modes and the bits are the same at the end as they were before."""
    bits = plain_forward(adapter.model, TOKENS)
    # After the first forward: a bridge wires hooks of TransformerLens' own when it first runs.
    before = hooks_of(adapter.model)
    yield
    assert hooks_of(adapter.model) == before
    assert_bitwise(plain_forward(adapter.model, TOKENS), bits, "logits afterwards", ("batch", "position", "vocab"))
    assert_bitwise(
        kv.run(adapter, PROMPT, "recompute", max_new_tokens=1, logits="keep").logits,
        bits[:, -1],
        "logits of run() afterwards",
    )


class Breaking(SiteHook):
    """Raises when it sees a site at a step; every site the case has is hooked."""

    def __init__(self, adapter, case, site, layer, step, error):
        super().__init__(adapter, [(name, at) for name in case.sites for at in range(adapter.facts.layers)])
        self.trouble, self.error, self.step = (site, layer, step), error, 0

    def begin_step(self, step):
        self.step = step

    def see(self, site, layer, start, tensor):
        if (site, layer, self.step) == self.trouble:
            raise self.error("planted")


def broken_run(adapter, case, path, site, step, error=Planted):
    hook = Breaking(adapter, case, site, 1, step, error)
    with pytest.raises(error), Runner(adapter, path_named(path), TOKENS, 4, [hook]) as runner:
        runner.advance()
        for token in PROMPT[:3]:
            runner.advance(torch.tensor([token]))
    return hook


@pytest.mark.each
@cases()
def test_after_an_exception_in_what_a_recorder_calls(load, case):
    adapter = load(case)
    for site in case.sites:
        with nothing_survives(adapter):
            assert broken_run(adapter, case, "cached", site, 1).step == 1
    with nothing_survives(adapter):
        assert broken_run(adapter, case, "recompute", "resid_post", 2).step == 2


@cases()
def test_after_an_interrupt(load, case):
    """torch runs hooks marked always_call after an Exception, not after a KeyboardInterrupt, which a notebook's stop
    button raises: what such a hook would have closed must be closed all the same."""
    adapter = load(case)
    for site in ("mlp_out", "z", "pattern") if "pattern" in case.sites else ("mlp_out", "z"):
        with nothing_survives(adapter):
            assert broken_run(adapter, case, "cached", site, 0, KeyboardInterrupt).step == 0


@dataclasses.dataclass(frozen=True)
class Breaks(Policy):
    """Raises in ``write`` or in ``read``, at layer 1, once the cache holds the prompt."""

    method: str = "write"

    def write(self, keys, values, place):
        return self._passed("write", keys, values, place)

    def read(self, keys, values, place):
        return self._passed("read", keys, values, place)

    def _passed(self, method, keys, values, place):
        if method == self.method and place.layer == 1 and place.stop > len(PROMPT):
            raise Planted("planted")
        return keys, values


@pytest.mark.each
@cases()
def test_after_an_exception_in_a_policy(load, case):
    adapter = load(case)
    for method in ("write", "read"):
        for make in (kv.Cached, kv.Recompute):
            with nothing_survives(adapter), pytest.raises(Planted):
                kv.run(adapter, PROMPT, make(policy=Breaks(method)), max_new_tokens=4, record=case.sites, stop="length")
        with nothing_survives(adapter), pytest.raises(Planted):
            kv.compare(
                adapter, PROMPT, kv.Cached(policy=Breaks(method)), "recompute", max_new_tokens=4, record=case.compared,
                progress="none",
            )  # fmt: skip


@cases()
def test_after_an_exception_in_a_users_hook_which_stays(load, case):
    adapter = load(case)
    module = adapter.tap("resid_post", 1).module
    calls = []

    def theirs(*_):
        calls.append(1)
        if len(calls) == 3:
            raise Planted("planted")

    handle = module.register_forward_hook(theirs)
    try:
        with nothing_survives(adapter):
            calls += [0] * 10
            before = hooks_of(adapter.model)
            assert any("_forward_hooks" in kind for _, kind in before)
            calls.clear()
            with pytest.raises(Planted):
                kv.run(adapter, PROMPT, "cached", max_new_tokens=4, record=case.sites, stop="length")
            assert hooks_of(adapter.model) == before
        assert len(calls) > 3, "the user's hook no longer hears the model"
    finally:
        handle.remove()


@cases()
def test_nested_records_around_an_exception(load, case):
    """The inner one fails in the middle of a forward; the outer one goes on and then ends as usual."""
    adapter = load(case)
    bare = adapter.model
    sites = [site for site in case.sites if not site.startswith("cache")]
    with nothing_survives(adapter):
        with kv.record(bare, sites) as outer:
            around = hooks_of(bare)
            with pytest.raises(Planted), kv.record(bare, sites) as inner:
                inner.see = lambda site, layer, start, tensor: _raise() if (site, layer) == ("z", 1) else None
                plain_forward(bare, TOKENS)
            assert hooks_of(bare) == around
            plain_forward(bare, TOKENS)
        assert outer.kept["resid_post", 1][-1].shape == (1, adapter.facts.width)
    with nothing_survives(adapter), pytest.raises(Planted), kv.record(bare, sites), kv.record(bare, sites):
        plain_forward(bare, TOKENS)
        raise Planted("in the user's own lines")


def _raise():
    raise Planted("planted")


@cases()
def test_an_outer_record_hears_what_an_inner_one_and_a_run_hear(load, case):
    """One adapter for both: the listeners of the inner context once took the outer one's place."""
    adapter = load(case)
    with nothing_survives(adapter), kv.record(adapter, "resid_post,v") as outer:
        with kv.record(adapter, "resid_post,v") as inner:
            plain_forward(adapter.model, TOKENS)
        trace = kv.run(adapter, PROMPT, "recompute", max_new_tokens=1, record="resid_post,v")
    for site in ("resid_post", "v"):
        assert len(outer.kept[site, 1]) == 2
        assert len(inner.kept[site, 1]) == 1
        assert_bitwise(outer.kept[site, 1][0], inner.kept[site, 1][0], f"{site} as the outer and the inner one saw it")
        assert_bitwise(
            outer.kept[site, 1][1], trace.records[site, 1][0][None], f"{site} as the outer one and the run saw it"
        )


@pytest.mark.hooked
def test_transformer_lens_hooks_of_the_user_stay_and_work():
    from support import bare_hooked_transformer

    model = bare_hooked_transformer("rotary")
    heard = []
    model.add_hook("blocks.0.hook_resid_post", lambda tensor, hook: heard.append(tensor.shape))
    before = hooks_of(model)
    with kv.record(model, "resid_post"):
        model(TOKENS)
    kv.run(model, PROMPT, "cached", max_new_tokens=2, record="resid_post,pattern")
    assert hooks_of(model) == before
    assert len(heard) == 3
    model.reset_hooks()
    assert hooks_of(model) != before


def test_the_snapshot_of_hooks_sees_what_is_left_behind(load):
    """So that nothing_survives can fail."""
    adapter = load(Case("llama-gqa", "native", "eager"))
    before = hooks_of(adapter.model)
    handle = adapter.blocks[0].register_forward_pre_hook(lambda *_: None)
    assert hooks_of(adapter.model) != before
    handle.remove()
    assert hooks_of(adapter.model) == before
    with adapter.attached([("pattern", 0)]):
        assert hooks_of(adapter.model) != before
    assert hooks_of(adapter.model) == before
    with torch.overrides.TorchFunctionMode.__new__(_Mode):
        assert ("torch", "function modes") in hooks_of(adapter.model)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
