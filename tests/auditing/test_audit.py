"""The audit's verdicts on models whose answer is known, its page, its errors, and its helper for pytest."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build

import kvinterp as kv
from kvinterp.auditing import VERDICTS, audit, random_model
from kvinterp.models import wrap
from kvinterp.testing import CacheInconsistency, assert_cache_consistent

HIDDEN = {
    "qwen3_5": "linear_attn",
    "mamba": "mixer",
    "mamba2": "mixer",
    "falcon_h1": "mamba",
    "jamba": "mamba",
}
"""Clean models that compute in float32 inside whatever dtype they are given, and the module that does."""

CLEAN = (
    "llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi", "olmo2", "falcon", "bloom", "lfm2",
    "mixtral", "olmoe", "opt", "phi3", "starcoder2", "cohere", "gpt_oss",
)  # fmt: skip


def quick(model: Any, **more: Any) -> Any:
    return audit(model, **{"lengths": (9, 33), "steps": 2, "sweep": "no", **more})


def one_prompt(length: int = 40, seed: int = 5) -> list[list[int]]:
    return [torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()]


# Known answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_no_bug(name: str) -> None:
    verdict = quick(build(name), prompts=one_prompt())
    assert verdict.verdict in ("equal", "rounding"), verdict.reading
    assert verdict.exit_code == 0
    for rung, evidence in verdict.evidence.items():
        assert evidence["block_error_in_unit_roundoffs"] < 32, f"{rung}: {evidence}"


@pytest.mark.parametrize("name", HIDDEN)
def test_a_float32_cast_inside_is_named(name: str) -> None:
    """In float64 the difference stops at float32's level; float32 itself is clean (FACTS: 9e-7 for Gated DeltaNet)."""
    verdict = quick(build(name), prompts=one_prompt())
    assert verdict.verdict == "hidden-cast", verdict.reading
    assert verdict.module.endswith(HIDDEN[name])
    assert "float32" in verdict.reading
    assert verdict.evidence["float64"]["first_tensor"]["explained_by_cast_to"] == "float32"
    assert verdict.exit_code == 1


def test_bamba_called_without_position_ids_is_a_bug() -> None:
    """transformers 5.23's Bamba numbers a cached token from 0 unless it is given position_ids (``generate`` gives them).

    Found by this audit: queries and keys of its attention layers are rotated to position 0. Given position_ids by hand the
    cached step agrees to 1e-6, which is asserted too, so that the test says which of the two it is about.
    """
    model = build("bamba")
    verdict = quick(model, prompts=one_prompt(), rungs=("float32", "float64"))
    tokens = torch.tensor(one_prompt())
    with torch.no_grad():
        whole = model(tokens[:, :13], use_cache=False).logits[0, -1]
        cache = model(tokens[:, :12], use_cache=True).past_key_values
        given = model(tokens[:, 12:13], past_key_values=cache, position_ids=torch.tensor([[12]])).logits[0, -1]
    assert (whole - given).abs().max() < 1e-5
    if verdict.verdict == "hidden-cast":
        pytest.skip("this transformers numbers Bamba's cached tokens by itself")
    assert (verdict.verdict, verdict.first_layer, verdict.tensor, verdict.first_position) == ("bug", 1, "Q", 9)


def test_equal_is_said_of_a_model_that_is() -> None:
    """One layer of identity: the logits are the embeddings', row by row the same in every precision."""
    model = build("gpt2")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(20).round_()  # Whole numbers: every sum is exact, so no order of additions can matter.
    for block in model.transformer.h:
        block.attn.c_attn.weight.data.zero_()
        block.mlp.c_fc.weight.data.zero_()
    model.lm_head.weight = torch.nn.Parameter(torch.eye(131, 48), requires_grad=False)
    verdict = quick(model, prompts=one_prompt(), rungs=("float32", "float64"))
    assert verdict.verdict == "equal", verdict.reading
    assert (verdict.first_layer, verdict.first_position, verdict.tensor) == (None, None, "")


def test_overflow_names_the_path_the_module_and_the_position() -> None:
    model = build("llama").half()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(6e4)
    verdict = quick(model, prompts=one_prompt())
    assert verdict.verdict == "overflow"
    assert (verdict.first_layer, verdict.module, verdict.first_position) == (1, "model.layers.1.mlp.down_proj", 0)
    assert verdict.exit_code == 1
    assert "recompute" in verdict.reading


def test_values_on_a_16_bit_grid_are_the_wrong_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def narrow(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.bfloat16).to(output.dtype)

    model.lm_head.register_forward_hook(narrow)
    verdict = quick(model, prompts=one_prompt(), rungs=("float32",))
    assert (verdict.verdict, verdict.module) == ("wrong-dtype", "lm_head")
    assert "bfloat16" in verdict.reading


def test_weights_stored_in_16_bits_are_no_wrong_dtype() -> None:
    """A checkpoint in float16 loaded in float32 has weights on float16's grid; its logits are not."""
    assert quick(build("llama").half().float(), prompts=one_prompt(), rungs=("float32",)).verdict == "rounding"


class CoarseKernel(torch.overrides.TorchFunctionMode):
    """An attention kernel with another tile from key 20 on, whose partial results pass through 16 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func is not torch.nn.functional.scaled_dot_product_attention
            or args[0].shape[-2] != 1
            or args[1].shape[-2] <= 20
        ):
            return result
        return result.to(torch.bfloat16).to(result.dtype)


def test_a_kernel_that_changes_at_a_position_is_told_from_a_bug() -> None:
    with CoarseKernel():
        verdict = audit(
            build("llama"), one_prompt(), lengths=(9, 33), steps=2, rungs=("float32", "float64"), sweep="yes"
        )  # fmt: skip
    assert verdict.verdict == "kernel", verdict.reading
    assert (verdict.first_layer, verdict.first_position, verdict.tensor) == (0, 20, "attention output")
    assert verdict.exit_code == 0


def test_a_rounding_difference_that_starts_at_a_position_is_a_kernels_too() -> None:
    """As sglang#25790: bitwise equal up to a tile's edge, rounding from there on."""

    class OtherOrder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sdpa = func is torch.nn.functional.scaled_dot_product_attention
            return result * (1 + 2**-7) if sdpa and args[0].shape[-2] == 1 and args[1].shape[-2] > 20 else result

    model = build("falcon").to(torch.bfloat16)
    with OtherOrder():
        verdict = audit(model, one_prompt(), lengths=(9, 33), steps=2, rungs=("bfloat16",), sweep="yes")
    assert verdict.verdict in ("kernel", "rounding"), verdict.reading
    if verdict.verdict == "kernel":
        assert verdict.first_position == 20


# Every kind, the zoo, a config alone -----------------------------------------------------------------------------------


@pytest.mark.hooked
@pytest.mark.parametrize("kind", ["hooked", "bridge", "native"])
def test_every_kind_of_model_can_be_audited(kind: str) -> None:
    verdict = quick(kv.load_model("zoo:mistral-mini", kind=kind), rungs=("float16", "float32", "float64"))
    assert verdict.verdict in ("equal", "rounding"), verdict.reading


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    model = build("llama")
    model.config.save_pretrained(tmp_path)
    adapter = random_model(tmp_path / "config.json", seed=4)
    assert quick(adapter, rungs=("float32", "float64")).verdict == "rounding"
    again = random_model(tmp_path, seed=4)
    assert adapter.fingerprint() == again.fingerprint()


# What is written -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attributes if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_folder_holds_the_verdict_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    model = build("llama")
    everything = quick(
        wrap(model, name="<script>alert(1)</script>"), prompts=one_prompt(), out=tmp_path, detail="everything"
    )
    fields = json.loads((tmp_path / "verdict.json").read_text())
    names = ("verdict", "first_layer", "first_position", "tensor", "module", "evidence", "confidence")
    assert set(names) <= set(fields)
    assert fields["verdict"] == everything.verdict.verdict
    assert fields["verdict"] in VERDICTS
    assert set(fields["evidence"]) == {"bfloat16", "float16", "float32", "float64", "float32, batch_invariant"}
    page = Page()
    html = (tmp_path / "audit.html").read_text()
    page.feed(html)
    assert "svg" in page.tags
    assert "script" not in page.tags, "the model's name must be escaped"
    assert [link for link in page.links if link.startswith(("http", "//"))] == []
    text = " ".join(page.text)
    for heading in ("Layer", "Max Abs Diff", "Mean Abs Diff", "Full Forward", "Prefill+Decode", "Abs Diff"):
        assert heading in text, f"the report of transformers#46190 has a column {heading}"


def test_the_layer_table_is_a_plain_loops() -> None:
    """The report format of transformers#46190, row for row what its own script computes from hidden states."""
    model = build("llama")
    everything = quick(model, prompts=one_prompt(12), lengths=(9,), rungs=("float32",), detail="everything")
    tokens = torch.tensor(one_prompt(12))[:, :11]
    with torch.no_grad():
        cache = None
        for piece in (tokens[:, :9], tokens[:, 9:10], tokens[:, 10:11]):
            out = model(piece, past_key_values=cache, use_cache=True, output_hidden_states=True)
            cache = out.past_key_values
        full = model(tokens, use_cache=False, output_hidden_states=True)
    table = everything.rung("float32").layers
    for layer in range(2):  # transformers' last hidden state is after the final norm.
        gap = (full.hidden_states[layer + 1][0, -1] - out.hidden_states[layer + 1][0, -1]).double().abs()
        assert table["max_abs"][layer] == gap.max().item()
    gap = (full.logits[0, -1] - out.logits[0, -1]).double().abs()
    assert everything.rung("float32").top["difference"].tolist() == gap.topk(5).values.tolist()


# The pytest helper, and bad input --------------------------------------------------------------------------------------


def test_the_pytest_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_planted import key_wrong_by_a_thousandth, on_update

    verdict = assert_cache_consistent(build("llama"), lengths=(9,), steps=2)
    assert verdict.verdict == "rounding"
    assert_cache_consistent(build("mamba"), lengths=(9,), steps=2, allow=("hidden-cast",))
    with pytest.raises(CacheInconsistency, match="casts to float32"):
        assert_cache_consistent(build("mamba"), lengths=(9,), steps=2)
    on_update(key_wrong_by_a_thousandth, 1)(monkeypatch)
    with pytest.raises(CacheInconsistency, match="K of layer 1"):
        assert_cache_consistent(build("llama"), lengths=(9,), steps=2)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"rungs": ("float8",)}, "float16, float32"),
        ({"lengths": ()}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"prompts": []}, "empty"),
        ({"prompts": [[5, 9999, 3, 4]]}, "9999"),
        ({"prompts": [[5, 6]]}, "fewer than 3"),
        ({"detail": "all"}, "everything"),
    ],
)
def test_bad_input(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(kv.InputError, match=words):
        quick(build("llama"), **choices)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for given in (tmp_path / "config.json", tmp_path / "missing.json", tmp_path / "nowhere"):
        with pytest.raises(kv.InputError):
            random_model(given)


def test_the_audit_leaves_the_model_alone() -> None:
    from support import hooks_of

    model = build("llama")
    before, weights = hooks_of(model), {n: p.clone() for n, p in model.named_parameters()}
    quick(model, prompts=one_prompt(), rungs=("float32", "float64"))
    assert hooks_of(model) == before
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
