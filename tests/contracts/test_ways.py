"""Every way that TransformerLens and transformers run a model, by every one of record, patched and run.

Each is right, in its numbers and in its count of steps, or one sentence; never silence, and never a hook left.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvinterp as kv
from kvinterp.models import Adapter
from support import PROMPT, Case, assert_bitwise, cases, nothing_left, plain_forward

KINDS = [
    Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager"),
    Case("llama-gqa", "native", "sdpa"), Case("gpt2", "bridge"), Case("gpt2", "native", "eager"),
]  # fmt: skip
TOKENS = torch.tensor([PROMPT])
NEW = 4
SITES = "resid_pre,resid_post,z"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        name: What its users call it.
        run: Runs the bare model on token ids.
        lengths: Positions that each of its forwards computes for a prompt of 12.
        kinds: The kinds of model that have it.
        rows: Rows of the batch in each forward, for a prompt of one row.
    """

    name: str
    run: Callable[[Any, Tensor], Any]
    lengths: tuple[int, ...] = (12,)
    kinds: tuple[str, ...] = ("hooked", "bridge", "native")
    rows: int = 1


def _generate(use_cache: bool) -> Callable[[Any, Tensor], Any]:
    def run(model: Any, tokens: Tensor) -> Any:
        if hasattr(model, "cfg"):
            told = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
            return model.generate(tokens, max_new_tokens=NEW, use_past_kv_cache=use_cache, **told)
        return _transformers_generate(model, tokens, use_cache=use_cache)

    return run


def _transformers_generate(model: Any, tokens: Tensor, **more: Any) -> Any:
    mask = torch.ones_like(tokens)
    told = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    return model.generate(tokens, attention_mask=mask, **told, **more)


def _beams(model: Any, tokens: Tensor) -> Any:
    return _transformers_generate(getattr(model, "original_model", model), tokens, num_beams=3)


def _autocast(model: Any, tokens: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens)


def _with_hooks(model: Any, tokens: Tensor) -> Any:
    return model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda tensor, hook: None)])


def _streamed(model: Any, tokens: Tensor) -> None:
    told = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    # Without a tokenizer a HookedTransformer streams without a cache.
    cached = hasattr(model, "original_model")
    for _ in model.generate_stream(tokens, max_new_tokens=NEW, max_tokens_per_yield=1, use_past_kv_cache=cached, **told):
        pass


def _in_turn(model: Any, tokens: Tensor) -> None:
    """Two generators that take turns: each forward is one step for whatever is open."""
    first, second = (_one_by_one(model, row) for row in (tokens, tokens.flip(1)))
    for _ in zip(first, second, strict=True):
        pass


def _one_by_one(model: Any, tokens: Tensor) -> Iterator[None]:
    for stop in (3, 5):
        model(tokens[:, :stop])
        yield


CACHED, WHOLE = (12, 1, 1, 1), (12, 13, 14, 15)
TL = ("hooked", "bridge")
HF = ("bridge", "native")
WAYS = [
    Way("__call__", lambda m, t: m(t)),
    Way("forward", lambda m, t: m.forward(t)),
    Way("a batch", lambda m, t: m(torch.cat([t, t.flip(1)])), rows=2),
    Way("generate", _generate(True), CACHED),
    Way("generate without a cache", _generate(False), WHOLE),
    Way("generate_stream", _streamed, CACHED, ("bridge",)),
    Way("generate_stream without a cache", _streamed, WHOLE, ("hooked",)),
    Way("generate a batch", lambda m, t: _generate(True)(m, torch.cat([t, t.flip(1)])), CACHED, rows=2),
    Way("beams", _beams, CACHED, HF, rows=3),
    Way("hf_generate", lambda m, t: _transformers_generate(m.original_model, t), CACHED, ("bridge",)),
    Way("run_with_hooks", _with_hooks, kinds=TL),
    Way("run_with_cache", lambda m, t: m.run_with_cache(t), kinds=TL),
    Way("the model inside", lambda m, t: m.original_model(t), kinds=("bridge",)),
    Way("the decoder inside", lambda m, t: getattr(m, "original_model", m).base_model(t), kinds=HF),
    Way("autocast", _autocast),
    Way("from a generator", lambda m, t: list(_one_by_one(m, t)), (3, 5)),
    Way("generators in turn", _in_turn, (3, 3, 5, 5)),
]


def cases_and_ways() -> Any:
    """Every kind of model with every way that it has; by default one model and one attention of each kind."""
    marks = {
        case: [pytest.mark.hooked] * (case.kind == "hooked") + [pytest.mark.long] * (case in KINDS[3:]) for case in KINDS
    }
    return pytest.mark.parametrize(
        ("case", "way"),
        [
            pytest.param(case, way, id=f"{case}-{way.name}", marks=marks[case])
            for case in KINDS
            for way in WAYS
            if case.kind in way.kinds
        ],
    )


@contextlib.contextmanager
def plain_hooks(adapter: Adapter) -> Iterator[list[list[Tensor]]]:
    """What plain hooks of torch's see: the residual stream that leaves each block, forward by forward."""
    kept: list[list[Tensor]] = [[] for _ in adapter.blocks]
    handles = [
        block.register_forward_hook(
            lambda _, __, output, seen=seen: seen.append((output if isinstance(output, Tensor) else output[0]).clone())
        )
        for block, seen in zip(adapter.blocks, kept, strict=True)
    ]
    yield kept
    for handle in handles:
        handle.remove()


# record ----------------------------------------------------------------------------------------------------------------


@cases_and_ways()
def test_record_hears_every_forward_with_its_own_numbers(load: Any, case: Case, way: Way) -> None:
    adapter = load(case)
    model = adapter.model
    with torch.no_grad(), nothing_left(model, lambda: way.run(model, TOKENS)):
        with plain_hooks(adapter) as plain:
            way.run(model, TOKENS)
        with kv.record(model, SITES, positions="all") as seen:
            way.run(model, TOKENS)
    assert seen.recorded_steps == list(range(len(way.lengths)))
    for layer, kept in enumerate(plain):
        assert [tensor.shape[:2] for tensor in seen.kept["resid_post", layer]] == [(way.rows, n) for n in way.lengths]
        for found, wanted in zip(seen.kept["resid_post", layer], kept, strict=True):
            assert_bitwise(found, wanted, f"resid_post at layer {layer}")
        assert len(seen.kept["resid_pre", layer]) == len(seen.kept["z", layer]) == len(way.lengths)


@cases(KINDS)
def test_record_reads_the_cache_that_generate_makes(load: Any, case: Case) -> None:
    adapter = load(case)
    sites = ("cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre", "cache_v")
    with torch.no_grad(), nothing_left(adapter.model), kv.record(adapter.model, sites, positions="all") as seen:
        out = _generate(True)(adapter.model, TOKENS)
    trace = kv.run(
        adapter, PROMPT, "cached", record=sites, positions="all", max_new_tokens=NEW, continuation=out[0, 12:15].tolist(),
        stop="length",
    )  # fmt: skip
    for place, kept in trace.records.items():
        assert [tensor.shape[2] for tensor in seen.kept[place]] == list(WHOLE)
        for found, wanted in zip(seen.kept[place], kept, strict=True):
            torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


# patched ---------------------------------------------------------------------------------------------------------------


@cases_and_ways()
def test_patched_patches_every_forward(load: Any, case: Case, way: Way) -> None:
    """The donor holds nothing but ones, so block 1 must be given ones by every forward, at every position it computes.

    A step that is miscounted has a donor of another length, which is refused; so is a batch, for a donor of one prompt.
    """
    adapter = load(case)
    model = adapter.model
    with torch.no_grad(), nothing_left(model, lambda: way.run(model, TOKENS)):
        # A donor for any way: it recomputes, so that its step n has 12 + n rows.
        width = adapter.facts.width
        records = {("resid_post", 0): [torch.ones(12 + step, width, dtype=adapter.dtype) for step in range(NEW)]}
        donor = kv.Trace("recompute", PROMPT, (), PROMPT[: NEW - 1], records, tuple(range(NEW)))
        patch = kv.Patch("resid_post", (0,), positions="all", donor=donor)
        why = "prompts are run at once" if way.rows > 1 else "positions cannot be matched" if way.lengths[0] != 12 else None
        if why is not None:
            with pytest.raises(kv.InputError, match=why), kv.patched(model, patch):
                way.run(model, TOKENS)
            return
        with kv.patched(model, patch) as hook, kv.record(model, "resid_pre", (1,), positions="all") as seen:
            way.run(model, TOKENS)
    assert hook.moved == [len(way.lengths)]
    assert [tensor.shape[1] for tensor in seen.kept["resid_pre", 1]] == list(way.lengths)
    assert all(bool((tensor == 1).all()) for tensor in seen.kept["resid_pre", 1])


@cases(KINDS)
def test_patched_moves_logits_as_a_plain_hook_does(load: Any, case: Case) -> None:
    adapter = load(case)
    model, (block, *_) = adapter.model, list(adapter.blocks)
    other = kv.run(adapter, PROMPT[::-1], "recompute", record="resid_post", positions="all", max_new_tokens=1)
    given = other.records["resid_post", 0][0][None]

    def put(_: Any, __: Any, output: Any) -> Any:
        return given if isinstance(output, Tensor) else (given, *output[1:])

    with torch.no_grad(), nothing_left(model):
        handle = block.register_forward_hook(put)
        wanted = plain_forward(model, TOKENS)
        handle.remove()
        with kv.patched(model, kv.Patch("resid_post", (0,), positions="all", donor=other)):
            assert_bitwise(plain_forward(model, TOKENS), wanted, "logits")
        assert not torch.equal(wanted, plain_forward(model, TOKENS))


@cases(KINDS)
def test_patched_leads_the_cache_of_generate(load: Any, case: Case) -> None:
    """The cache that generate makes by itself is patched at every forward, the first one too, and is left as it was."""
    adapter = load(case)
    model = adapter.model
    plain = _generate(True)(model, TOKENS)[0, 12:15].tolist()
    donor = kv.run(
        adapter, PROMPT[::-1], "recompute", record="kv,cache_k_pre", positions="all", continuation=plain, max_new_tokens=NEW,
        stop="length",
    )  # fmt: skip
    with torch.no_grad(), nothing_left(model):
        patch = kv.Patch("kv", (1,), positions="all", donor=donor)
        with kv.patched(model, patch) as hook, kv.record(model, "cache_v", (1,), positions="all") as seen:
            _generate(True)(model, TOKENS)
        with kv.record(model, "cache_v", (1,), positions="all") as unpatched:
            _generate(True)(model, TOKENS)
    # Keys and values, at each of the forwards.
    assert hook.moved == [2 * NEW]
    torch.testing.assert_close(seen.kept["cache_v", 1][0], unpatched.kept["cache_v", 1][0])


# run -------------------------------------------------------------------------------------------------------------------


@cases_and_ways()
def test_run_before_within_and_behind_every_way(load: Any, case: Case, way: Way) -> None:
    """A verb that a user calls while a forward of theirs is on its way, from a hook: both give what they give alone.

    Within a record its passes were taken for the forward's own, and the sentence said that something had stopped it.
    """
    adapter = load(case)
    model = adapter.model
    told = {"max_new_tokens": 2, "stop": "length", "logits": "keep"}
    within: list[Tensor] = []

    def ask(*_: Any) -> None:
        if not within:
            within.append(torch.empty(0))
            with torch.autocast("cpu", enabled=False):
                within[0] = kv.run(adapter, PROMPT, **told).logits

    with torch.no_grad(), nothing_left(model, lambda: way.run(model, TOKENS)):
        with plain_hooks(adapter) as alone:
            way.run(model, TOKENS)
        before = kv.run(adapter, PROMPT, **told).logits
        handle = list(adapter.blocks)[1].register_forward_hook(ask)
        with plain_hooks(adapter) as asked:
            way.run(model, TOKENS)
        for logits in (within[0], kv.run(adapter, PROMPT, **told).logits):
            assert_bitwise(logits, before, "logits")
        assert_bitwise(asked[1][-1], alone[1][-1], "resid_post of the way's last forward")
        within.clear()
        with pytest.raises(kv.InputError, match="began within another one"), kv.record(model, "resid_post"):
            way.run(model, TOKENS)
        handle.remove()
