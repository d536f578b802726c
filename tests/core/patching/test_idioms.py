"""What users of TransformerLens and nnsight type, beside what their own library gives, on the three kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.models.hooks import first_of, put_first
from support import PROMPT, Case, assert_bitwise, cases, plain_forward

KINDS = [Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager")]
HOOKED, NATIVE = KINDS[0], KINDS[2]
CLEAN = tuple(70 if at in (3, 4) else token for at, token in enumerate(PROMPT))
PAIR = (11, 23)
QUIET: dict[str, Any] = {"progress": "none"}


def rows(*prompts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(prompts)


def difference(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, PAIR[0]].double() - logits[:, -1, PAIR[1]].double()).mean()


def patched(adapter: Any, tokens: torch.Tensor, *patches: kv.Patch) -> torch.Tensor:
    with kv.patched(adapter.model, patches), torch.no_grad():
        return plain_forward(adapter.model, tokens)


# Prompts and metrics -----------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_tokens_of_one_prompt_go_through_everywhere(load: Any, case: Case) -> None:
    adapter = load(case)
    clean, corrupted = rows(CLEAN), rows(PROMPT)
    found = kv.activation_patching(adapter, clean, corrupted, block=4, **QUIET)
    assert torch.equal(found.values, kv.activation_patching(adapter, CLEAN, PROMPT, block=4, **QUIET).values)
    how = {"max_new_tokens": 3, **QUIET}
    assert kv.compare(adapter, corrupted, **how).steps.equals(kv.compare(adapter, [PROMPT], **how).steps)
    swept = [kv.sweep(adapter, given, controls="none", **how).recovery for given in (corrupted, [corrupted], PROMPT)]
    assert swept[0].equals(swept[1])
    assert swept[0].equals(swept[2])
    assert len(kv.run(adapter, rows(CLEAN, PROMPT), max_new_tokens=1)) == 2
    with pytest.raises(kv.InputError, match="holds 2 rows, each a prompt"):
        kv.run(adapter, [rows(CLEAN, PROMPT)], max_new_tokens=1)


@cases(KINDS)
@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_out", "z", "pattern", "result", "mlp_out", "resid_post"])
def test_a_recorder_shows_what_the_model_went_on_with(load: Any, case: Case, site: str) -> None:
    """A recorder that was opened first showed what was there before the patch, and what comes of the patch one site on."""
    adapter, tokens = load(case), rows(PROMPT)
    patches = [kv.Patch(site, layer, positions="all", donor=lambda x: x * 0.5) for layer in (0, adapter.facts.layers - 1)]
    sites, shown = f"{site},resid_post", []
    with kv.patched(adapter, patches), kv.record(adapter, sites, positions="all") as seen, torch.no_grad():
        plain_forward(adapter.model, tokens)
    shown.append(seen)
    with kv.record(adapter, sites, positions="all") as seen, kv.patched(adapter, patches), torch.no_grad():
        plain_forward(adapter.model, tokens)
    shown.append(seen)
    for place in shown[0]:
        assert torch.equal(shown[0][place], shown[1][place]), place


@cases(KINDS)
@pytest.mark.parametrize("site", ["resid_pre", "attn_out", "mlp_out", "resid_post"])
def test_a_recorder_hears_behind_the_users_hooks_and_patches_before_them(load: Any, case: Case, site: str) -> None:
    """As TransformerLens's own cache does, whose hooks come last; of the first block and of the last, which ends the pass."""
    adapter, tokens, last = load(case), rows(PROMPT), load(case).facts.layers - 1
    model = adapter.model

    def half(x: torch.Tensor, hook: Any = None) -> torch.Tensor:
        return x * 0.5

    def run() -> None:
        """Twice: the hooks come off and on again between two forwards."""
        with torch.no_grad():
            for _ in range(2):
                if case.kind != "native":
                    model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{at}.hook_{site}", half) for at in (0, last)])
                    continue
                taps = [adapter.tap(site, at) for at in (0, last)]
                handles = [
                    tap.module.register_forward_pre_hook(lambda _, args: (half(args[0]), *args[1:]))
                    if tap.side == "input"
                    else tap.module.register_forward_hook(lambda _, __, out: put_first(out, half(first_of(out))))
                    for tap in taps
                ]
                model(tokens)
                for handle in handles:
                    handle.remove()

    patches = [kv.Patch(site, at, positions="all", donor=lambda x: x * 0.5) for at in (0, last)]
    with kv.patched(adapter, patches), kv.record(adapter, site, positions="all") as wanted, torch.no_grad():
        plain_forward(model, tokens)
    with kv.record(adapter, site, positions="all") as outer, kv.record(adapter, site, positions="all") as inner:
        run()
    for place in wanted:
        for seen in (outer, inner):
            assert all(torch.equal(kept, wanted[place]) for kept in seen.kept[place]), place
    with kv.record(adapter, site, positions="all") as seen, kv.patched(adapter, patches):
        run()
    assert not torch.equal(seen.kept[site, last][1], wanted[site, last]), "both halve it"
    assert torch.equal(seen.kept[site, 0][1], wanted[site, 0] * 0.5)


@cases(KINDS)
def test_a_function_of_logits_is_a_metric_and_pairs_go_in_one_batch(load: Any, case: Case) -> None:
    """The named difference, the same as a function, and the mean over pairs of what each gives alone."""
    adapter = load(case, "float64")
    how: dict[str, Any] = {"site": "attn_out", "block": 6, **QUIET}
    named = kv.activation_patching(adapter, CLEAN, PROMPT, distance="logit_difference", answers=PAIR, **how)
    own = kv.activation_patching(adapter, CLEAN, PROMPT, distance=difference, **how)
    torch.testing.assert_close(own.values, named.values, rtol=1e-9, atol=1e-9)
    assert own.distance == "difference"
    other = (*PROMPT[:-1], 5), (*CLEAN[:-1], 5)
    for distance in ("kl", "l2", difference):
        alone = [kv.activation_patching(adapter, *pair, distance=distance, **how) for pair in ((CLEAN, PROMPT), other)]
        both = kv.activation_patching(adapter, [CLEAN, other[0]], rows(PROMPT, other[1]), distance=distance, **how)
        assert both.pairs == 2
        torch.testing.assert_close(both.values, (alone[0].values + alone[1].values) / 2, rtol=1e-9, atol=1e-9)
        assert both.corrupted == pytest.approx((alone[0].corrupted + alone[1].corrupted) / 2, rel=1e-9)


# Donors ------------------------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_a_cache_a_tensor_and_a_function_give(load: Any, case: Case) -> None:
    adapter = load(case)
    two, site = rows(PROMPT, PROMPT[::-1]), "resid_post"
    with kv.record(adapter.model, "resid_post", positions="all") as seen, torch.no_grad():
        plain_forward(adapter.model, rows(CLEAN, CLEAN[::-1]))
    clean = seen.kept[site, 1][0]
    whole = patched(adapter, two, kv.Patch(site, 1, positions="all", donor=clean))
    assert torch.equal(whole, patched(adapter, two, kv.Patch(site, 1, positions="all", donor=lambda x: clean)))
    assert torch.equal(whole[:, -1:], patched(adapter, two, kv.Patch(site, 1, positions=-1, donor=clean[:, -1:]))[:, -1:])
    # A vector of the width goes in at each position, and a function adds one.
    vector = clean[0, 3]
    steered = patched(adapter, two, kv.Patch(site, 0, positions="all", donor=lambda x: x + vector))
    handle = adapter.blocks[0].register_forward_hook(
        lambda _, __, out: (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector
    )
    with torch.no_grad():
        assert torch.equal(steered, plain_forward(adapter.model, two))
    handle.remove()

    def theirs(resid: torch.Tensor, hook: Any) -> None:
        assert hook.name == "blocks.0.hook_resid_post"
        resid[:, 3:5] = vector

    assert torch.equal(
        patched(adapter, two, kv.Patch(site, 0, positions=slice(3, 5), donor=vector)),
        patched(adapter, two, kv.Patch(site, 0, positions="all", donor=theirs)),
    )
    # Only the head named is replaced, of a cache site too.
    for where in ("z", "v", "kv"):
        zeros = kv.Patch(where, 1, heads=1, positions="all", donor=lambda x: x * 0)
        as_zero = kv.Patch(where, 1, heads=(1,), positions="all", donor="zero")
        cached = where == "kv"
        one, other = (_with_cache(adapter, each) if cached else patched(adapter, two, each) for each in (zeros, as_zero))
        assert torch.equal(one, other)


def _with_cache(adapter: Any, patch: kv.Patch) -> torch.Tensor:
    with kv.patched(adapter.model, patch), torch.no_grad():
        if adapter.kind == "hooked":
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache

            return adapter.model(
                rows(PROMPT),
                past_kv_cache=Cache.init_cache(adapter.model.cfg, "cpu", 1),
                attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            )
        out = adapter.model(rows(PROMPT), use_cache=True)
        return out if isinstance(out, torch.Tensor) else out.logits


# Names -------------------------------------------------------------------------------------------------------------------


@pytest.mark.hooked
def test_steering_and_a_newest_position_are_run_with_hooks_s(load: Any) -> None:
    adapter, tokens = load(HOOKED), rows(PROMPT)
    vector = torch.linspace(-1, 1, adapter.facts.width)

    def steer(resid: torch.Tensor, hook: Any) -> torch.Tensor:
        resid[:, -1] += vector
        return resid

    with torch.no_grad():
        expected = adapter.model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", steer)])
    for patch in (
        kv.Patch("blocks.1.hook_resid_pre", positions=-1, donor=lambda x: x + vector),
        kv.Patch("resid_pre", layers=1, positions=slice(None), donor=steer),
    ):
        assert_bitwise(patched(adapter, tokens, patch), expected, "logits")


@pytest.mark.parametrize("use_cache", [True, False])
def test_steering_the_newest_position_of_a_generation_is_warned_of(
    use_cache: bool, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """kv.Patch's default means another text with a cache than without one, which was said nowhere."""
    adapter = load(NATIVE, "float64")
    vector = 4 * torch.linspace(-1, 1, adapter.facts.width, dtype=torch.float64)
    own = kv.run(adapter, PROMPT, "cached", record="resid_post", max_new_tokens=4, stop="length")

    def steered(cache: bool, **where: Any) -> tuple[torch.Tensor, bool]:
        caplog.clear()
        patch = kv.Patch("resid_post", layers=(0,), **{"donor": lambda x: x + vector, **where})
        how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        with kv.patched(adapter.model, patch):
            made = adapter.model.generate(rows(PROMPT), use_cache=cache, output_logits=True, **how)
        return torch.stack(made.logits), "positions='all' patches every position" in caplog.text

    logits, warned = steered(use_cache)
    assert warned
    assert float((logits - steered(not use_cache)[0]).abs().max()) > 1e-3, "the two texts agree: the test shows nothing"
    logits, warned = steered(use_cache, positions="all")
    assert not warned
    assert float((logits - steered(not use_cache, positions="all")[0]).abs().max()) < 1e-9
    assert not steered(use_cache, donor=own)[1], "a trace says what each step is to hold"
    assert not steered(use_cache, steps=(0,))[1]
    with kv.patched(adapter.model, kv.Patch("resid_post", layers=(0,), donor=lambda x: x + vector)), torch.no_grad():
        for tokens in (PROMPT, PROMPT[:-2]):
            adapter.model(rows(tokens))
    assert not caplog.text, "texts one after another are no generation"


# What was recorded, and results --------------------------------------------------------------------------------------------


@cases(KINDS)
def test_what_was_recorded_is_a_tensor(load: Any, case: Case) -> None:
    adapter, tokens = load(case), rows(PROMPT, CLEAN)
    with kv.record(adapter.model, "resid_post,pattern", positions="all") as seen, torch.no_grad():
        plain_forward(adapter.model, tokens)
    assert seen["resid_post", 1].shape == (2, len(PROMPT), adapter.facts.width)
    assert torch.equal(seen["blocks.1.hook_resid_post"], seen.kept["resid_post", 1][0])
    assert list(seen) == seen.keys() == list(seen.kept)
    assert "blocks.0.attn.hook_pattern" in seen
    assert ("z", 0) not in seen
    stacked = seen.stack_activation("resid_post")
    assert torch.equal(stacked, torch.stack([seen["resid_post", layer] for layer in range(2)]))
    cache = seen.to_activation_cache()
    assert torch.equal(cache["resid_post", 1], seen["resid_post", 1])
    if case.kind != "native":
        with torch.no_grad():
            _, theirs = adapter.model.run_with_cache(tokens)
        for name in cache:
            torch.testing.assert_close(cache[name], theirs[name], rtol=0, atol=0)
        torch.testing.assert_close(stacked, theirs.stack_activation("resid_post"), rtol=0, atol=0)
    with kv.record(adapter.model, "resid_post") as seen, torch.no_grad():
        for each in (tokens, tokens[:, :5]):
            plain_forward(adapter.model, each)
    assert seen["resid_post", 0].shape == (2, 2, adapter.facts.width), "two forwards, stacked"
    assert seen.to_activation_cache(0)["resid_post", 0].shape == (2, 1, adapter.facts.width)
    with pytest.raises(kv.InputError, match="forward=2 was not recorded"):
        seen.to_activation_cache(2)
