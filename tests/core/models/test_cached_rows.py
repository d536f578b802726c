"""Whether cached rows are read is seen in what attention reads: a model that does not is named, and one that does is not.

TransformerLens's bridge looked for the cache under the name that it had before transformers 5.24, so that each decode step of
its ``generate()`` attended to itself alone, in silence.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache

import kvinterp as kv
from kvinterp.errors import CacheNotReadWarning, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.cached_rows import NOT_READ
from support import PROMPT, Case

KINDS = [
    pytest.param(Case("llama-gqa", "native", "sdpa"), id="sdpa"),
    pytest.param(Case("llama-gqa", "native", "eager"), id="eager"),
    pytest.param(Case("llama-gqa", "bridge"), id="bridge"),
    pytest.param(Case("rotary", "hooked"), id="hooked", marks=pytest.mark.hooked),
]


def _attention(adapter: Adapter, layer: int) -> Any:
    if adapter.kind == "native":
        return adapter.model.model.layers[layer].self_attn
    return adapter.model.blocks[layer].attn


@contextlib.contextmanager
def _dropping(adapter: Adapter, layers: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """The attention of these layers is not handed its cache, as where it looks for it under another name."""

    def drop(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {n: None if isinstance(v, Cache) or n == "past_kv_cache_entry" else v for n, v in kwargs.items()}

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(_attention(adapter, layer).register_forward_pre_hook(drop, with_kwargs=True))
        yield


def _ids(count: int = len(PROMPT)) -> torch.Tensor:
    return torch.tensor([PROMPT[:count]]) % 61


def _generate(adapter: Adapter, tokens: torch.Tensor, steps: int = 4) -> Any:
    if adapter.kind == "native":
        return adapter.model.generate(tokens, max_new_tokens=steps, do_sample=False, min_new_tokens=steps)
    return adapter.model.generate(tokens, max_new_tokens=steps, do_sample=False, stop_at_eos=False, verbose=False)


def _said(run: Callable[[], Any]) -> list[str]:
    """What was warned of in a run."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in heard if one.category is CacheNotReadWarning]


def _recorded(adapter: Adapter, run: Callable[[], Any]) -> list[str]:
    def recording() -> None:
        with kv.record(adapter.model, "resid_post"):
            run()

    return _said(recording)


@pytest.mark.parametrize("case", KINDS)
def test_a_step_that_attends_to_itself_alone_is_warned_of_once(load: Callable[..., Adapter], case: Case) -> None:
    adapter = load(case)
    assert not _recorded(adapter, lambda: _generate(adapter, _ids()))
    with _dropping(adapter):
        (said,) = _recorded(adapter, lambda: _generate(adapter, _ids()))
    assert NOT_READ in said
    assert "layer 0" in said
    assert "attn" in said
    assert " and 1 more" in said

    def patched() -> None:
        with kv.patched(adapter.model, kv.Patch("resid_post", (0,), donor="zero")), _dropping(adapter):
            _generate(adapter, _ids())

    (said,) = _said(patched)
    assert "kv.patched" in said
    assert NOT_READ in said


def test_the_first_layer_that_does_not_read_it_is_named(load: Callable[..., Adapter]) -> None:
    adapter = load(Case("llama-gqa", "native", "sdpa"))
    with _dropping(adapter, (1,)):
        (said,) = _recorded(adapter, lambda: _generate(adapter, _ids()))
    assert "layer 1 (model.layers.1.self_attn)" in said
    assert " more" not in said


class _Unread(DynamicCache):
    """A cache that keeps its rows and gives the new ones alone to be read."""

    def update(self, key_states: Any, value_states: Any, *given: Any, **more: Any) -> Any:
        super().update(key_states, value_states, *given, **more)
        return key_states, value_states


def test_rows_that_are_kept_and_not_read(load: Callable[..., Adapter]) -> None:
    """Also where the cache was filled before anything was recorded, and in a step of several tokens."""
    model = load(Case("llama-gqa", "native", "sdpa")).model

    def step(cache: Any, width: int) -> list[str]:
        with torch.no_grad():
            model(_ids(), past_key_values=cache)
            return _recorded(kv.wrap(model), lambda: model(_ids(width), past_key_values=cache))

    assert not step(DynamicCache(config=model.config), 1)
    assert not step(DynamicCache(config=model.config), 3)
    assert NOT_READ in step(_Unread(), 1)[0]


@pytest.mark.parametrize("case", KINDS)
def test_the_audit_names_the_cause_and_no_tensor_that_follows_from_it(load: Callable[..., Adapter], case: Case) -> None:
    pytest.importorskip("kvinterp.auditing")
    adapter = load(case)
    options: dict[str, Any] = {"rungs": ("float32",), "lengths": (5,), "steps": 1, "sweep": "no", "programs": 1}
    with _dropping(adapter):
        verdict = kv.audit(adapter.model, **options)
    assert verdict.verdict == "bug"
    assert (verdict.first_layer, verdict.tensor) == (0, "K")
    assert "attn" in verdict.module
    assert NOT_READ[1:] in str(verdict)
    assert "cos" not in str(verdict)
    assert "hint:" not in str(verdict)


def test_a_path_says_it_too(load: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load(Case("llama-gqa", "native", "sdpa"))
    run = functools.partial(kv.run, adapter, PROMPT, "cached", max_new_tokens=3, stop="length")
    assert not _said(run)
    with _dropping(adapter), pytest.raises(UnsupportedError, match=NOT_READ):
        run()
    with _dropping(adapter, (1,)):
        (said,) = _said(run)
        assert "layer 1" in said
        assert len(_said(lambda: kv.compare(adapter, [PROMPT, PROMPT[:7]], max_new_tokens=3))) == 1
        assert not _said(lambda: kv.run(adapter, PROMPT, "recompute", max_new_tokens=3))
    assert not _said(run)


SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "a state and no attention": ("Mamba", {"sizes": {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2}}),
    "a window of one": ("Mistral", {"sliding_window": 1}),
    "a window of two": ("Mistral", {"sliding_window": 2}),
    "linear attention first": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "sinks beside the keys": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 1},
    ),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sound_model_is_not_warned_of(tiny: Callable[..., Any], name: str, attention: str) -> None:
    stem, more = SOUND[name]
    adapter = kv.wrap(tiny(stem, attention="eager" if stem in ("GptOss", "Mamba") else attention, **more))
    for count in (9, 1):
        assert not _recorded(adapter, lambda count=count: _generate(adapter, _ids(count)))
    assert not _said(lambda: kv.run(adapter, _ids()[0].tolist(), "cached", max_new_tokens=3, stop="length"))


def test_a_layer_behind_linear_attention_is_warned_of(tiny: Callable[..., Any]) -> None:
    adapter = kv.wrap(tiny("Qwen3Next", attention="sdpa", **SOUND["linear attention first"][1]))
    with _dropping(adapter, (1,)):
        (said,) = _recorded(adapter, lambda: _generate(adapter, _ids()))
    assert "layer 1 (model.layers.1.self_attn)" in said


def test_a_cache_that_is_emptied_or_static_or_cut_off_is_no_fault(load: Callable[..., Adapter]) -> None:
    model = load(Case("llama-gqa", "native", "sdpa")).model

    def emptied() -> None:
        cache = DynamicCache(config=model.config)
        model(_ids(), past_key_values=cache)
        cache.crop(-len(PROMPT))
        model(_ids(5), past_key_values=cache)

    def interrupted() -> None:
        cache = DynamicCache(config=model.config)

        def stop(*_: Any) -> None:
            handle.remove()
            raise ValueError

        handle = model.model.layers[0].self_attn.register_forward_pre_hook(stop)
        with contextlib.suppress(ValueError):
            model(_ids(), past_key_values=cache)
        model(_ids(), past_key_values=cache)

    def static() -> None:
        cache = StaticCache(config=model.config, max_cache_len=20)
        model(_ids(), past_key_values=cache)
        model(_ids(1), past_key_values=cache)

    with torch.no_grad():
        for run in (emptied, interrupted, static):
            assert not _recorded(kv.wrap(model), run), run


def test_only_the_first_step_is_listened_to(load: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a step of two layers: four modes are entered, however many steps there are."""
    from kvinterp.models import cached_rows

    entered: list[int] = []
    functions = cached_rows.Functions
    monkeypatch.setattr(cached_rows, "Functions", lambda called: entered.append(1) or functions(called))
    adapter = load(Case("llama-gqa", "native", "sdpa"))
    _recorded(adapter, lambda: _generate(adapter, _ids(), 8))
    assert len(entered) == 4
