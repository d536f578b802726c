"""Every way that TransformerLens and transformers run a model, by every one of record, patched and run.

Each is right, in its numbers and in its count of steps, or one sentence; never silence, and never a hook left.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvinterp as kv
from kvinterp.models import Adapter
from kvinterp.patching import donor_trace
from support import PROMPT, Case, assert_bitwise, bare_hooked_transformer, cases, hooks_of, plain_forward

KINDS = [
    Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager"),
    Case("llama-gqa", "native", "sdpa"), Case("gpt2", "bridge"), Case("gpt2", "native", "eager"),
]  # fmt: skip
TOKENS = torch.tensor([PROMPT])
OTHER = torch.tensor([PROMPT[::-1]])
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


def ways(*, rows: int | None = None) -> Any:
    chosen = [way for way in WAYS if rows is None or way.rows == rows]
    return pytest.mark.parametrize("way", chosen, ids=lambda way: way.name)


@contextlib.contextmanager
def nothing_left(model: nn.Module, way: Way | None = None) -> Iterator[None]:
    """Hooks, torch's modes and the bits of a plain forward are as before."""
    if way is not None:
        # transformers and TransformerLens hang hooks of their own the first time.
        way.run(model, TOKENS)
    bits = plain_forward(model, TOKENS)
    before = hooks_of(model)
    yield
    assert hooks_of(model) == before
    assert_bitwise(plain_forward(model, TOKENS), bits, "logits afterwards")


class Plain:
    """What a few plain hooks of torch's see: the residual stream that leaves each block, forward by forward."""

    def __init__(self, adapter: Adapter) -> None:
        self.kept: list[list[Tensor]] = [[] for _ in adapter.blocks]
        self.blocks = list(adapter.blocks)

    def __enter__(self) -> list[list[Tensor]]:
        self.handles = [
            block.register_forward_hook(
                lambda _, __, output, kept=kept: kept.append((output if isinstance(output, Tensor) else output[0]).clone())
            )
            for block, kept in zip(self.blocks, self.kept, strict=True)
        ]
        return self.kept

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def skip_unless(way: Way, case: Case) -> None:
    if case.kind not in way.kinds:
        pytest.skip(f"a {case.kind} model has no such way")


# record ----------------------------------------------------------------------------------------------------------------


@cases(KINDS)
@ways()
def test_record_hears_every_forward_with_its_own_numbers(load: Any, case: Case, way: Way) -> None:
    skip_unless(way, case)
    adapter = load(case)
    model = adapter.model
    with torch.no_grad(), nothing_left(model, way):
        with Plain(adapter) as plain:
            way.run(model, TOKENS)
        with kv.record(model, SITES, positions="all") as seen:
            way.run(model, TOKENS)
    assert seen.recorded_steps == list(range(len(way.lengths)))
    for layer, kept in enumerate(plain):
        assert [tensor.shape[:2] for tensor in seen["resid_post", layer]] == [(way.rows, n) for n in way.lengths]
        for found, wanted in zip(seen["resid_post", layer], kept, strict=True):
            assert_bitwise(found, wanted, f"resid_post at layer {layer}")
        assert len(seen["resid_pre", layer]) == len(seen["z", layer]) == len(way.lengths)


@cases(KINDS)
def test_record_reads_the_cache_that_generate_makes(load: Any, case: Case) -> None:
    adapter = load(case)
    sites = ("cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre", "cache_v")
    if adapter.kind == "hooked":
        pytest.skip("without a tokenizer a HookedTransformer generates without its cache")
    with torch.no_grad(), nothing_left(adapter.model), kv.record(adapter.model, sites, positions="all") as seen:
        out = generated(adapter.model, TOKENS)
    trace = kv.run(
        adapter, PROMPT, "cached", record=sites, positions="all", max_new_tokens=NEW, continuation=out[0, 12:15].tolist(),
        stop="length",
    )  # fmt: skip
    for place, kept in trace.records.items():
        assert [tensor.shape[2] for tensor in seen[place]] == list(WHOLE)
        for found, wanted in zip(seen[place], kept, strict=True):
            torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


def generated(model: Any, tokens: Tensor) -> Tensor:
    return _transformers_generate(getattr(model, "original_model", model), tokens)


# patched ---------------------------------------------------------------------------------------------------------------


@cases(KINDS)
@ways()
def test_patched_patches_every_forward(load: Any, case: Case, way: Way) -> None:
    """The donor is the way's own forwards with ones in place of what block 0 returns, so every forward must show ones.

    A step that is miscounted has a donor of another length, which is refused; so is a batch, for a donor of one prompt.
    """
    skip_unless(way, case)
    adapter = load(case)
    model = adapter.model
    with torch.no_grad(), nothing_left(model, way):
        # The row of ones that a donor of any way can give: it recomputes, so that step n has 12 + n positions.
        width = adapter.facts.width
        records = {("resid_post", 0): [torch.ones(12 + step, width, dtype=adapter.dtype) for step in range(NEW)]}
        donor = kv.Trace("recompute", PROMPT, (), PROMPT[: NEW - 1], records, tuple(range(NEW)))
        patch = kv.Patch("resid_post", (0,), positions="all", donor=donor)
        why = "prompts are run at once" if way.rows > 1 else "positions cannot be matched" if way.lengths[0] != 12 else None
        if why is not None:
            with pytest.raises(kv.InputError, match=why), kv.patched(model, patch):
                way.run(model, TOKENS)
            return
        with kv.patched(model, patch) as watcher, kv.record(model, "resid_pre", (1,), positions="all") as seen:
            way.run(model, TOKENS)
    assert watcher.moved == [len(way.lengths)]
    assert [tensor.shape[1] for tensor in seen["resid_pre", 1]] == list(way.lengths)
    assert all(bool((tensor == 1).all()) for tensor in seen["resid_pre", 1])


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
    if adapter.kind == "hooked":
        pytest.skip("without a tokenizer a HookedTransformer generates without its cache")
    model = adapter.model
    plain = generated(model, TOKENS)[0, 12:15].tolist()
    donor = kv.run(
        adapter, PROMPT[::-1], "recompute", record="kv", positions="all", continuation=plain, max_new_tokens=NEW,
        stop="length",
    )  # fmt: skip
    with torch.no_grad(), nothing_left(model):
        with kv.patched(model, kv.Patch("kv", (1,), positions="all", donor=donor)) as watcher:
            with kv.record(model, "cache_v", (1,), positions="all") as seen:
                generated(model, TOKENS)
        with kv.record(model, "cache_v", (1,), positions="all") as unpatched:
            generated(model, TOKENS)
    # Keys and values, at each of the forwards.
    assert watcher.moved == [2 * NEW]
    torch.testing.assert_close(seen["cache_v", 1][0], unpatched["cache_v", 1][0])


# run -------------------------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_run_in_another_thread_and_in_turns(load: Any, case: Case) -> None:
    """Two threads on one model ended in errors, in up to 31 hooks left, and once in a model that ran no more."""
    adapter = load(case)
    told = {"record": "resid_post,kv", "max_new_tokens": 3, "stop": "length", "logits": "keep"}
    jobs = [(prompt, path) for prompt in (PROMPT, PROMPT[::-1]) for path in ("cached", "recompute")]
    with nothing_left(adapter.model):
        wanted = [kv.run(adapter, prompt, path, **told) for prompt, path in jobs]
        found = in_threads([lambda p=prompt, q=path: kv.run(adapter.model, p, q, **told) for prompt, path in jobs])
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert_bitwise(one.logits, other.logits, "logits")


@cases(KINDS[:3])
def test_run_says_that_it_ran_under_autocast(load: Any, case: Case) -> None:
    adapter = load(case)
    told = {"max_new_tokens": 2, "stop": "length", "logits": "keep"}
    with nothing_left(adapter.model):
        plain = kv.run(adapter, PROMPT, **told)
        with torch.autocast("cpu", torch.bfloat16):
            cast = kv.run(adapter, PROMPT, **told)
    assert (plain.provenance["autocast"], cast.provenance["autocast"]) == ("off", "bfloat16")
    assert not torch.equal(plain.logits, cast.logits)


@cases(KINDS)
def test_run_of_the_decoder_inside_is_a_sentence(load: Any, case: Case) -> None:
    adapter = load(case)
    inside = adapter.blocks if case.kind == "hooked" else adapter.source.base_model
    with pytest.raises(kv.InputError, match=r"cannot wrap a ModuleList|has no language-model head"):
        kv.run(inside, PROMPT)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Runs them at once; raises the first error there was."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def one(number: int) -> None:
        start.wait()
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,), name=f"worker {number}") for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for each other"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(works))]


# Silence ---------------------------------------------------------------------------------------------------------------


@cases(KINDS[:3])
def test_what_heard_nothing_or_moved_nothing_says_why(load: Any, case: Case) -> None:
    adapter = load(case)
    model = adapter.model
    donor = kv.run(adapter, PROMPT, "recompute", record="resid_post", positions="all", max_new_tokens=3, stop="length")

    def patch(**more: Any) -> kv.Patch:
        return kv.Patch("resid_post", (0,), donor=donor, **more)

    with torch.no_grad(), nothing_left(model):
        with pytest.raises(kv.InputError, match="kv.record heard nothing: no forward of .* ran in it"):
            with kv.record(model, SITES):
                pass
        with pytest.raises(kv.InputError, match="kv.patched changed nothing: no forward of .* ran in it"):
            with kv.patched(model, patch()):
                pass
        for steps, said in (
            ((2,), r"it is for steps=\(2,\), and 1 forward ran, step 0:"),
            ("first", "it is for step 1, and"),
        ):
            with pytest.raises(kv.InputError, match=said), kv.patched(model, patch(steps=steps)):
                model(TOKENS)
        with pytest.raises(kv.InputError, match="donor trace did not record step 3"), kv.patched(model, patch()):
            for step in range(4):
                model(torch.tensor([[*PROMPT, *PROMPT[:step]]]))
        # A patch beside one that moves something is not silent either.
        with pytest.raises(kv.InputError, match="by the patch of 'resid_post'"):
            with kv.patched(model, [patch(), patch(steps=(1,))]):
                model(TOKENS)
        with pytest.raises(ZeroDivisionError), kv.record(model, SITES), kv.patched(model, patch()):
            raise ZeroDivisionError
        copied = copy.deepcopy(model)
        with pytest.raises(kv.InputError, match="a copy of it"), kv.record(model, SITES):
            copied(TOKENS)
        with pytest.raises(kv.InputError, match="a run in another dtype"), kv.record(model, SITES):
            kv.run(model, PROMPT, "cached@float64", max_new_tokens=1)


@cases([Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge")])
@pytest.mark.parametrize("call", ["__call__", "forward"])
def test_a_forward_that_stops_at_a_layer_is_whole_or_a_sentence(load: Any, case: Case, call: str) -> None:
    """Layers that did not run had an entry less than those that did, and every later entry was of another forward."""
    adapter = load(case)
    model = adapter.model
    forward = getattr(model, call)
    with torch.no_grad(), nothing_left(model):
        with kv.record(model, "resid_post", layers=[0]) as seen:
            forward(TOKENS, stop_at_layer=1)
            forward(TOKENS)
            forward(OTHER, stop_at_layer=1)
        assert len(seen["resid_post", 0]) == 3
        assert_bitwise(seen["resid_post", 0][0], seen["resid_post", 0][1], "resid_post")
        with pytest.raises(kv.InputError, match="ran the layers 0 to 0 only"), kv.record(model, "resid_post"):
            forward(TOKENS, stop_at_layer=1)
            forward(TOKENS)
        if case.kind == "hooked":
            middle = model(TOKENS, stop_at_layer=1)
            with kv.record(model, "resid_post", layers=[1]) as seen:
                forward(middle, start_at_layer=1)
            assert len(seen["resid_post", 1]) == 1


# Errors ----------------------------------------------------------------------------------------------------------------


@cases(KINDS[:3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["inside a block", "behind the blocks"])
def test_a_forward_that_was_cut_off_is_no_step(load: Any, case: Case, error: type[BaseException], where: str) -> None:
    adapter = load(case)
    model, armed = adapter.model, [False]
    if where == "behind the blocks" and error is KeyboardInterrupt:
        pytest.skip("torch tells no hook of it: the blocks ran, so the forward is a step")
    inside = getattr(list(adapter.blocks)[1], "mlp", None)
    head = model.unembed if case.kind == "hooked" else adapter.source.get_output_embeddings()

    def fault(*_: Any) -> None:
        if armed[0]:
            raise error("planted")

    donor = kv.run(adapter, PROMPT, "recompute", record="resid_post", positions="all", max_new_tokens=1)
    with torch.no_grad(), nothing_left(model):
        handle = (inside if where == "inside a block" else head).register_forward_pre_hook(fault)
        patch = kv.Patch(
            "resid_post",
            (0,),
            positions="all",
            steps=(1,),
            donor=dataclasses.replace(donor, prompt=PROMPT[:-1], steps=(1,)),
        )
        with kv.patched(model, patch) as watcher, kv.record(model, SITES, positions="all") as seen:
            model(TOKENS[:, :5])
            armed[0] = True
            with pytest.raises(error):
                model(OTHER)
            armed[0] = False
            assert watcher.moved == [0 if where == "inside a block" and False else watcher.moved[0]]
            model(TOKENS)
        handle.remove()
    assert seen.recorded_steps == [0, 1]
    assert [tensor.shape[1] for tensor in seen["resid_post", 1]] == [5, 12]
    assert {len(kept) for kept in seen.kept.values()} == {2}


# Contexts, copies and threads -------------------------------------------------------------------------------------------


@cases(KINDS[:3])
@pytest.mark.parametrize("same", ["one adapter", "the bare model"])
def test_contexts_left_in_the_wrong_order(load: Any, case: Case, same: str) -> None:
    """The one that was left last went deaf, and the one that was left first went on listening."""
    adapter = load(case)
    model = adapter if same == "one adapter" else adapter.model
    bare = adapter.model
    with torch.no_grad(), nothing_left(bare):
        first, second = kv.record(model, SITES), kv.record(model, "resid_post,mlp_out")
        one, other = first.__enter__(), second.__enter__()
        bare(TOKENS)
        first.__exit__(None, None, None)
        bare(OTHER)
        second.__exit__(None, None, None)
        bare(TOKENS)
    assert [len(kept) for kept in one.kept.values()] == [1] * len(one.kept)
    assert [len(kept) for kept in other.kept.values()] == [2] * len(other.kept)
    assert_bitwise(one["resid_post", 1][0], other["resid_post", 1][0], "resid_post as both heard it")


@cases(KINDS[:3])
def test_a_deep_copy_inside_is_another_model(load: Any, case: Case) -> None:
    adapter = load(case)
    model = adapter.model
    donor = kv.run(adapter, PROMPT[::-1], "recompute", record="resid_post", positions="all", max_new_tokens=1)
    with torch.no_grad(), nothing_left(model):
        plain, before = plain_forward(model, TOKENS), hooks_of(copy.deepcopy(model))
        with kv.patched(model, kv.Patch("resid_post", (0,), donor=donor)), kv.record(model, SITES) as seen:
            copied = copy.deepcopy(model)
            assert_bitwise(plain_forward(copied, TOKENS), plain, "logits of the copy")
            assert not torch.equal(plain_forward(model, TOKENS), plain)
        assert len(seen["resid_post", 0]) == 1
        assert {place: len(kept) for place, kept in hooks_of(copied).items()} == {
            place: len(kept) for place, kept in before.items()
        }


@cases(KINDS[:3])
def test_another_thread_runs_the_model_as_it_is(load: Any, case: Case, caplog: Any) -> None:
    """A plain forward of another thread got patched logits, and was recorded as one of this thread's."""
    adapter = load(case)
    model = adapter.model
    sites = SITES if case.attention == "sdpa" else f"{SITES},pattern"
    donor = kv.run(adapter, PROMPT[::-1], "recompute", record="resid_post", positions="all", max_new_tokens=1)
    patch = kv.Patch("resid_post", (0,), donor=donor)
    with torch.no_grad(), nothing_left(model):
        plain = plain_forward(model, TOKENS)
        with caplog.at_level(logging.WARNING, "kvinterp"):
            with kv.patched(model, patch), kv.record(model, sites) as seen:
                [theirs] = in_threads([lambda: plain_forward(model, TOKENS)])
                assert_bitwise(theirs, plain, "logits in the other thread")
                assert not torch.equal(plain_forward(model, TOKENS), plain)
        assert len(seen["resid_post", 0]) == 1
        assert "1 forwards of" in caplog.text
        assert "worker 0" in caplog.text
        for opened in (lambda: kv.record(model, sites), lambda: kv.patched(model, patch)):
            with pytest.raises(kv.InputError, match="ran in another thread \\('worker 0'\\)"), opened():
                in_threads([lambda: plain_forward(model, TOKENS)])


@cases(KINDS[:3])
def test_another_thread_may_not_hook_a_model_that_is_open_here(load: Any, case: Case) -> None:
    adapter = load(case)
    model = adapter.model

    def recorded() -> None:
        with kv.record(model, SITES):
            model(TOKENS)

    with torch.no_grad(), nothing_left(model):
        with kv.record(model, SITES):
            model(TOKENS)
            for work in (recorded, lambda: kv.run(model, PROMPT, max_new_tokens=1)):
                with pytest.raises(kv.InputError, match="in use by the thread 'MainThread', which has kv.record open"):
                    in_threads([work])
        in_threads([recorded])


# What cannot be heard --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(checkpoint: Any) -> Any:
    """A native model of this test's own, which it may compile and train; Dynamo forgets it."""
    model = kv.load_model(str(checkpoint("llama-gqa")), kind="native", dtype="float32", device="cpu").model
    torch._dynamo.reset()
    yield model
    torch._dynamo.reset()


USES = [
    lambda model: kv.run(model, PROMPT, max_new_tokens=1),
    lambda model: kv.compare(model, [list(PROMPT)], max_new_tokens=2, progress="none"),
    lambda model: recording(model, model),
]


def recording(model: Any, called: Any) -> kv.recording.Recorder:
    with torch.no_grad(), kv.record(model, SITES) as seen:
        called(TOKENS)
    return seen


def compiled_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize(
    ("compile_it", "said"),
    [
        (lambda model: model.compile(backend="eager"), "set its _compiled_call_impl to None"),
        (
            lambda model: model.model.layers[1].compile(backend="eager"),
            r"the module 'model.layers.1' of model .* is compiled",
        ),
        (compiled_forward, "delete its attribute 'forward'"),
    ],
)
@pytest.mark.parametrize("warm", ["warm", "cold"])
def test_a_compiled_model_is_a_sentence(fresh: Any, compile_it: Any, said: str, warm: str) -> None:
    """Warmed up, it ran no hook: record heard nothing, and under patched Dynamo unrolled a counter until memory ended."""
    donor = kv.run(fresh, PROMPT, "recompute", record="resid_post", max_new_tokens=1)
    before = hooks_of(fresh)
    compile_it(fresh)
    if warm == "warm":
        plain_forward(fresh, TOKENS)
    for use in (*USES, lambda model: kv.patched(model, kv.Patch("resid_post", donor=donor)).__enter__()):
        with pytest.raises(kv.UnsupportedError, match=said):
            use(fresh)
    assert hooks_of(fresh) == before


def test_what_torch_compile_returns_is_heard_or_a_sentence(fresh: Any) -> None:
    plain = recording(fresh, fresh)
    before = hooks_of(fresh)
    compiled = torch.compile(fresh, backend="eager")
    with pytest.raises(kv.InputError, match="give the model that was compiled"):
        kv.run(compiled, PROMPT)
    # Compiled while it is heard: Dynamo leaves the hooks alone.
    heard = recording(fresh, compiled)
    for place, kept in plain.kept.items():
        assert torch.allclose(heard[place][0], kept[0], atol=1e-5), place
    assert len(heard["resid_post", 0]) == 1
    torch._dynamo.reset()
    plain_forward(compiled, TOKENS)
    with pytest.raises(kv.InputError, match=r"heard nothing: .* torch.compile compiled before"):
        recording(fresh, compiled)
    assert hooks_of(fresh) == before


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn"])
def test_training_mode_after_wrap_is_a_sentence(fresh: Any, part: str) -> None:
    """Dropout was reported as a difference of paths."""
    adapter = kv.wrap(fresh)
    fresh.get_submodule(part).train()
    if part:
        fresh.get_submodule(part).attention_dropout = 0.5
    for use in (*USES[:2], lambda model: recording(model, model.model)):
        with pytest.raises(kv.InputError, match="is in training mode"):
            use(adapter)
    fresh.eval()
    kv.run(adapter, PROMPT, max_new_tokens=1)


@pytest.mark.hooked
def test_training_mode_means_nothing_to_a_hooked_transformer() -> None:
    model = bare_hooked_transformer("rotary")
    calm = kv.run(model, PROMPT, max_new_tokens=1, logits="keep")
    assert_bitwise(kv.run(model.train(), PROMPT, max_new_tokens=1, logits="keep").logits, calm.logits, "logits")
