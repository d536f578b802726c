"""Attribution patching: right to first order, found where it was planted, its error against true patches said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from support import PROMPT, Case, cases, plain_forward

KINDS = [Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager")]
CLEAN = tuple(70 if at in (3, 4) else token for at, token in enumerate(PROMPT))
NEAR = tuple(70 if at == 3 else token for at, token in enumerate(PROMPT))
PAIR = (11, 23)
HOW: dict[str, Any] = {"distance": "logit_difference", "answers": PAIR, "progress": "none"}
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "pattern")


@cases(KINDS)
@pytest.mark.parametrize("site", SITES)
def test_it_is_right_to_first_order(load: Any, case: Case, site: str) -> None:
    """The clean prompt's embedding is brought nearer to the corrupted one's: the error goes down as the distance does.

    transformers computes its norms in float32 in a float64 model too, so that there nothing smaller can be told from rounding.
    """
    adapter = load(case, "float64")
    found = {}
    large, small = (1e-2, 1e-4) if case.kind == "hooked" else (1e-1, 1e-2)
    for scale in (large, small):
        with nearer(adapter, scale):
            how = {**HOW, "block": 6, "layers": (0, 1)}
            true = kv.activation_patching(adapter, NEAR, PROMPT, site, **how)
            linear = kv.activation_patching(adapter, NEAR, PROMPT, site, method="attribution", check=4, **how)
        assert len(linear.checked) >= 2
        changes = [each.values - each.corrupted for each in (true, linear)]
        assert float(changes[0].abs().max()) > 0
        found[scale] = float((changes[1] - changes[0]).norm() / changes[0].norm())
    assert linear.error < 0.1
    assert found[small] < 3 * found[large] * small / large or found[small] < 1e-6, found


class nearer:
    """Brings the embedding of the one token that differs near to that of the corrupted prompt's."""

    def __init__(self, adapter: Any, scale: float) -> None:
        source = adapter.model.embed if adapter.kind == "hooked" else adapter.source.get_input_embeddings()
        self.weight = next(p for p in source.parameters() if p.shape[0] == adapter.facts.vocabulary)
        self.scale = scale

    def __enter__(self) -> None:
        self.before = self.weight.detach().clone()
        with torch.no_grad():
            self.weight[NEAR[3]] = self.before[PROMPT[3]] + self.scale * self.before[NEAR[3]]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self.weight.copy_(self.before)


@cases(KINDS)
def test_a_planted_place_is_found(load: Any, case: Case) -> None:
    """What differs enters at positions 3 and 4: the stream there has it, and by heads the one that is read has it alone."""
    adapter = load(case, "float32")
    found = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_pre", method="attribution", layers=0, **HOW)
    assert bool((found.values[0, [0, 1, 2, 5, 11]] == found.corrupted).all()), "nowhere else is any difference"
    assert int(found.recovery.abs().argmax()) in (3, 4)
    # Heads 0 to 2 of layer 1 are silenced: what attention brings is brought by head 3.
    silenced = kv.Patch("z", 1, heads=(0, 1, 2), positions="all", donor=lambda x: x * 0)
    with kv.patched(adapter.model, silenced):
        by_head = kv.activation_patching(
            adapter, CLEAN, PROMPT, "z", "heads", method="attribution", layers=1, check=0, **HOW
        )
    assert int(by_head.recovery.abs().argmax()) == 3
    assert bool((by_head.values[0, :3] == by_head.corrupted).all())


@cases(KINDS)
def test_its_error_is_said(load: Any, case: Case) -> None:
    adapter = load(case, "float32")
    for over in ("heads", "heads,positions", "positions"):
        true = kv.activation_patching(adapter, CLEAN, PROMPT, "z", over, **HOW)
        found = kv.activation_patching(adapter, CLEAN, PROMPT, "z", over, method="attribution", check=6, **HOW)
        for row in found.checked.itertuples():
            change = float(true.values[found.layers.index(row.layer), row.column] - true.corrupted)
            assert row.patched == pytest.approx(change, abs=1e-6)
        wrong = found.checked["attributed"] - found.checked["patched"]
        assert found.error == pytest.approx(float((wrong**2).sum() ** 0.5 / (found.checked["patched"] ** 2).sum() ** 0.5))
        assert any("Attribution is off by" in line for line in found.sentences())
        assert "attribution with error" in repr(found)


ZOO = [Case("zoo:gqa2-mini", "native", "sdpa"), Case("zoo:llama-mini", "bridge"), Case("zoo:mqa-mini", "hooked")]


@cases(ZOO)
def test_its_error_on_trained_models_is_that_of_every_place(load: Any, case: Case) -> None:
    """Digits of a sum: checked at every place the error said is that beside the map of true patches; of a sample it is near."""
    adapter = load(case, "float32")
    how: dict[str, Any] = {"distance": "logit_difference", "answers": ("8", "6"), "progress": "none"}
    for site, over in (("z", "heads"), ("resid_pre", "positions")):
        given = (adapter, "7 + 1 =", "5 + 1 =", site, over)
        true = kv.activation_patching(*given, **how)
        found = kv.activation_patching(*given, method="attribution", check=true.values.numel(), **how)
        changes = true.values - true.corrupted
        expected = float((found.values - found.corrupted - changes).norm() / changes.norm())
        assert len(found.checked) == changes.numel()
        assert found.error == pytest.approx(expected, rel=1e-4)
        assert expected > 0


@cases(KINDS)
def test_every_distance_has_its_gradient_or_says_that_it_has_none(load: Any, case: Case) -> None:
    """The accurate KL carries none, so that the default distance ended in a traceback of torch's."""
    adapter = load(case)
    for distance in ("kl", "l2"):
        given = (adapter, CLEAN, PROMPT, "resid_pre")
        how: dict[str, Any] = {"distance": distance, "layers": 0, "progress": "none"}
        found = kv.activation_patching(*given, method="attribution", check=0, **how)
        true = kv.activation_patching(*given, **how)
        assert found.corrupted == pytest.approx(true.corrupted, rel=1e-6)
        assert (found.values[0] != found.corrupted).nonzero().flatten().tolist() == [3, 4]
    with pytest.raises(kv.InputError, match="has no gradient with respect to the logits"):
        kv.activation_patching(
            adapter, CLEAN, PROMPT, distance=lambda logits: logits.detach().sum(), method="attribution", progress="none"
        )


def test_in_inference_mode_and_unchecked(load: Any) -> None:
    """Inference mode was blamed on the user's function; and an error of nan % was said where nothing had been checked."""
    how: dict[str, Any] = {"distance": lambda logits: logits[:, -1, 3].mean(), "method": "attribution", "check": 0}
    found = kv.activation_patching(load(KINDS[0]), CLEAN, PROMPT, progress="none", **how)
    with torch.inference_mode():
        again = kv.activation_patching(load(KINDS[0]), CLEAN, PROMPT, progress="none", **how)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(found.values, again.values)
    assert "attribution not checked" in repr(found)
    assert "attributed and not checked" in found.sentences()[0]


def test_a_pattern_beside_sdpa_says_what_shows_it(load: Any) -> None:
    """It advised method='patches', which is refused there as well."""
    with pytest.raises(kv.UnsupportedError, match="load the model with attention='eager'"):
        kv.activation_patching(load(ZOO[0]), "7 + 1 =", "5 + 1 =", "pattern", method="attribution", progress="none")


@cases(KINDS)
def test_it_takes_one_backward_and_leaves_nothing(load: Any, case: Case) -> None:
    """A gradient by torch alone: of the difference with respect to the block's output, times how far the clean one is."""
    adapter = load(case, "float64")
    kept: dict[str, torch.Tensor] = {}

    def keep(_: Any, __: Any, out: Any) -> None:
        kept["out"] = out[0] if isinstance(out, tuple) else out
        if kept["out"].requires_grad:
            kept["out"].retain_grad()

    handle = adapter.blocks[0].register_forward_hook(keep)
    for parameter in adapter.model.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        plain_forward(adapter.model, torch.tensor([CLEAN]))
    clean = kept["out"]
    with torch.enable_grad():
        logits = adapter.forward(torch.tensor([PROMPT]))[0, -1]
        (logits[PAIR[0]] - logits[PAIR[1]]).backward()
    handle.remove()
    expected = (kept["out"].grad * (clean - kept["out"].detach())).sum(-1)[0]
    adapter.model.zero_grad(set_to_none=True)
    found = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_post", method="attribution", layers=0, **HOW)
    torch.testing.assert_close(found.values[0] - found.corrupted, expected, rtol=1e-8, atol=1e-10)
    assert all(parameter.grad is None for parameter in adapter.model.parameters())
