"""The audit's verdicts on models whose answer is known, its page, its errors, and its helper for pytest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import build, some
from transformers import AutoTokenizer

import kvinterp as kv
from kvinterp.auditing.arguments import RUNGS
from kvinterp.auditing.audit import audit
from kvinterp.auditing.building import random_model
from kvinterp.auditing.ladder import PrecisionRun
from kvinterp.auditing.page import distinguished, issue_tables
from kvinterp.auditing.verdict import VERDICTS
from kvinterp.models import wrap, zoo
from kvinterp.models.hooks import first_of
from kvinterp.testing import CacheInconsistency, assert_cache_consistent
from pages import Page
from support import Case

pytestmark = [pytest.mark.bits, pytest.mark.slow]

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
    return audit(model, **{"lengths": (9,), "steps": 2, "sweep": "no", "checks": "none", **more})


def one_prompt(length: int = 40, seed: int = 5) -> list[list[int]]:
    return [torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()]


# Known answers ---------------------------------------------------------------------------------------------------------


SOME = {
    "gemma2": ("float32", "float64"),
    "gpt2": ("float16", "float32"),
    "falcon": ("float16", "float32"),
    "gpt_oss": ("bfloat16", "float32"),
}
"""What runs by default: four architectures, each in two precisions."""


@pytest.mark.parametrize(
    ("name", "rungs"), [*SOME.items(), *(pytest.param(name, RUNGS, marks=pytest.mark.long) for name in CLEAN)]
)
def test_a_clean_model_is_no_bug(name: str, rungs: tuple[str, ...]) -> None:
    verdict = quick(build(name), prompts=one_prompt(), lengths=(9, 33), rungs=rungs)
    assert verdict.exit_code == 0, verdict.reading
    assert set(verdict.evidence) == set(rungs)
    for rung, evidence in verdict.evidence.items():
        # Whatever this processor's kernels do: with a fixed order there is nothing left to excuse.
        assert evidence["fixed_order_checks"] > 40, f"{rung}: {evidence}"
        assert evidence["fixed_order_bitwise_equal"] == evidence["fixed_order_checks"], f"{rung}: {evidence}"
        assert evidence["fixed_order_max_abs_logit"] == 0, f"{rung}: {evidence}"


class Backwards(torch.overrides.TorchFunctionMode):
    """A kernel that adds up a projection of one row from the last term to the first, on any processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and args[0].numel() == args[0].shape[-1]:
            total = torch.zeros(args[1].shape[0], dtype=args[0].dtype)
            for term in range(args[0].shape[-1] - 1, -1, -1):
                total = total + args[0].flatten()[term] * args[1][:, term]
            return total.reshape(*args[0].shape[:-1], -1) + (0 if len(args) < 3 or args[2] is None else args[2])
        return func(*args, **(kwargs or {}))


def test_an_expert_choice_that_rounding_tips_is_rounding() -> None:
    """Experts whose scores are equal but for rounding: either may be chosen, and the block's output is another then."""
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1:] = layer.mlp.gate.weight.data[:1] * (1 + 1e-7 * torch.arange(1, 4)[:, None])
    with Backwards():
        verdict = audit(model, seed=1, rungs=("float32", "float64"), lengths=(9,), steps=3, sweep="no", checks="none")
    assert verdict.exit_code == 0, verdict.reading
    assert "tips the choice" in verdict.reading
    first = verdict.evidence["float32"]["first_tensor"]
    assert (first["tensor"], first["taken_away_by"], first["nearly_equal"]) == ("expert choice", "choice", True)


@pytest.mark.parametrize("name", some(HIDDEN, ("mamba",)))
def test_a_float32_cast_inside_is_named(name: str) -> None:
    """In float64 the difference stops at float32's level: a note for who serves float32, a failure for who asked for float64."""
    verdict = quick(build(name), prompts=one_prompt(), rungs=("float32", "float64"))
    assert verdict.exit_code == 0, verdict.reading
    assert any("float32 inside" in note and HIDDEN[name] in note for note in verdict.notes), verdict.reading
    first = verdict.evidence["float64"]["first_tensor"]
    assert (first["taken_away_by"], first["cast_to"]) == ("cast", "float32")
    asked = quick(build(name).double(), prompts=one_prompt(), rungs=("float32", "float64"))
    assert (asked.verdict, asked.exit_code) == ("hidden-cast", 1), asked.reading
    assert HIDDEN[name] in asked.module
    assert quick(build(name).double(), prompts=one_prompt(), rungs=("float64",), allow=("hidden-cast",)).exit_code == 0


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


def test_nan_on_the_cached_path_only_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    from planting import on_update

    def lost(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
        return store(k * float("nan") if decoding and cache.get_seq_length(1) >= 10 else k, v)

    on_update(lost, 1)(monkeypatch)
    verdict = quick(build("llama"), prompts=one_prompt(), rungs=("float32",), lengths=(9,))
    assert (verdict.verdict, verdict.first_layer, verdict.first_position, verdict.tensor) == ("overflow", 1, 10, "NaN")
    assert "cached path" in verdict.reading
    assert verdict.module.startswith("model.layers.1.self_attn")


def test_a_rung_that_overflows_does_not_condemn_the_model() -> None:
    """A float32 model whose activations are beyond float16's range is right in the precision it was given in."""
    model = build("llama")
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)
    verdict = quick(model, prompts=one_prompt(), rungs=("float16", "float32", "float64"))
    assert verdict.exit_code == 0, verdict.reading
    assert "in float16 it overflows" in verdict.reading
    assert verdict.evidence["float16"]["nonfinite"]["module"] == "model.layers.1.mlp.down_proj"


def test_values_on_a_16_bit_grid_are_the_wrong_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def narrow(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.bfloat16).to(output.dtype)

    model.lm_head.register_forward_hook(narrow)
    verdict = quick(model, prompts=one_prompt(), rungs=("float32",))
    assert (verdict.verdict, verdict.module) == ("wrong-dtype", "lm_head")
    assert "bfloat16" in verdict.reading


class CoarseKernel(torch.overrides.TorchFunctionMode):
    """An attention kernel with another tile from key 20 on, off by a thousand roundings, or as much as 16 bits round."""

    def __init__(self, as_coarse_as: str) -> None:
        super().__init__()
        self.as_coarse_as = as_coarse_as

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func is not torch.nn.functional.scaled_dot_product_attention
            or args[0].shape[-2] != 1
            or args[1].shape[-2] <= 20
        ):
            return result
        if self.as_coarse_as == "16 bits":
            return result.to(torch.bfloat16).to(result.dtype)
        return result * (1 + 2**9 * torch.finfo(result.dtype).eps)


def test_a_kernel_that_changes_at_a_position_is_told_from_a_bug() -> None:
    """An excuse's size is of its own dtype: what 16 bits round is no kernel's in 32."""
    how: dict[str, Any] = {
        "rungs": ("float32", "float64"),
        "lengths": (9, 23),
        "steps": 2,
        "sweep": "yes",
        "checks": "none",
    }
    with CoarseKernel("itself"):
        verdict = audit(build("llama"), one_prompt(), **how)
    assert (verdict.verdict, verdict.exit_code) == ("kernel", 0), verdict.reading
    assert verdict.first_layer is None
    assert "attention output of layer 0" in verdict.reading
    assert "position 20" in verdict.reading
    with CoarseKernel("16 bits"):
        verdict = audit(build("llama"), one_prompt(), **how)
    assert (verdict.verdict, verdict.first_layer, verdict.tensor) == ("bug", 0, "attention output"), verdict.reading
    assert "more than any order of additions can be off" in verdict.reading


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One audit in every precision, with its folder."""
    out = tmp_path_factory.mktemp("audit")
    adapter = wrap(build("llama"), name="<script>alert(1)</script>")
    return quick(adapter, prompts=one_prompt(), lengths=(9, 33), out=out, detail="everything"), out


@pytest.mark.xdist_group("one audit")
def test_the_rungs_hold_the_evidence(written: tuple[Any, Path]) -> None:
    """What the ladder is judged by: scaling, the null control, and a fixed order of additions."""
    everything, _ = written
    rounding = {name: everything.rung(name) for name in ("bfloat16", "float16", "float32", "float64")}
    for name, rung in rounding.items():
        found = rung.summary()
        assert set(rung.steps["prefill"]) == {9, 33}, name
        assert set(rung.local["layer"]) == {-1, 0, 1, 2, 3}, name
        assert found["null_max_abs_logit"] is not None
        assert set(rung.local["part"]) == {"input", "output"}
        assert (rung.fixed.steps["max_abs"] == 0).all()
        assert (rung.fixed.every_error["error"] == 0).all()
    assert rounding["float64"].summary()["max_abs_logit"] < 1e-6 * rounding["float32"].summary()["max_abs_logit"]


# Every kind, the zoo, a config alone -----------------------------------------------------------------------------------


@pytest.mark.hooked
@pytest.mark.parametrize("kind", ["hooked", "bridge", "native"])
def test_every_kind_of_model_can_be_audited(kind: str, load: Any) -> None:
    verdict = quick(load(Case("llama-gqa", kind), "float16"), rungs=("float16", "float64"))
    assert verdict.exit_code == 0, verdict.reading


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    model = build("llama")
    model.config.save_pretrained(tmp_path)
    adapter = random_model(tmp_path / "config.json", seed=4)
    assert quick(adapter, rungs=("float32", "float64")).exit_code == 0
    again = random_model(tmp_path, seed=4)  # A folder as on the hub, with nothing but its config.json.
    assert sorted(p.name for p in tmp_path.iterdir() if "generation" not in p.name) == ["config.json"]
    assert adapter.fingerprint() == again.fingerprint()


# What is written -------------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("one audit")
def test_the_folder_holds_the_verdict_and_a_page_that_needs_nothing_else(written: tuple[Any, Path]) -> None:
    everything, out = written
    fields = json.loads((out / "verdict.json").read_text())
    names = ("verdict", "exit_code", "first_layer", "first_position", "tensor", "module", "evidence", "checks", "notes")
    assert set(names) <= set(fields)
    assert fields["verdict"] == everything.verdict.verdict
    assert fields["verdict"] in VERDICTS
    assert set(fields["evidence"]) == {"bfloat16", "float16", "float32", "float64"}
    page = Page((out / "report.html").read_text())
    assert "svg" in page.tags
    assert page.tags.count("script") == 1, "the page's own; the model's name must be escaped"
    assert [link for link in page.wanted if link.startswith(("http", "//"))] == []
    for heading in ("Layer", "Max Abs Diff", "Mean Abs Diff", "Full Forward", "Prefill+Decode", "Abs Diff", "Equal"):
        assert heading in page.text, f"the report of transformers#46190 has a column {heading}"


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_layer_table_is_a_plain_loops(name: str) -> None:
    """The report format of transformers#46190, row for row what its own script computes from hidden states.

    Their last is after the final norm, so what the last block returned is a row of its own: it once stood under the other's name.
    """
    model = build(name)
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("llama-mini"))
    everything = quick(
        wrap(model, tokenizer), prompts=one_prompt(12), lengths=(9,), rungs=("float32",), detail="everything"
    )
    rung = everything.rung("float32")
    shown = int(rung.top["position"].iloc[0])
    tokens = torch.tensor(one_prompt(12))[:, : shown + 1]
    last: list[torch.Tensor] = []
    block = model.model.layers[-1].register_forward_hook(lambda *given: last.append(first_of(given[-1])[0, -1]))
    with torch.no_grad(), block:
        cache = None
        for piece in (tokens[:, :9], *tokens[:, 9:].split(1, 1)):
            out = model(piece, past_key_values=cache, use_cache=True, output_hidden_states=True)
            cache = out.past_key_values
        full = model(tokens, use_cache=False, output_hidden_states=True)
    sides = [(a[0, -1], b[0, -1]) for a, b in zip(full.hidden_states, out.hidden_states, strict=True)]
    sides = [*sides[:-1], (last[-1], last[-2]), sides[-1], (full.logits[0, -1], out.logits[0, -1])]
    gaps = [(a - b).double().abs() for a, b in sides]
    assert rung.layers["max_abs"].tolist() == [gap.max().item() for gap in gaps]
    assert rung.layers["mean_abs"].tolist() == [gap.mean().item() for gap in gaps]
    assert rung.top["difference"].tolist() == gaps[-1].topk(5).values.tolist()
    (logits, top, layers), _ = issue_tables(rung)
    assert [(row[0], row[1]) for row in layers.rows] == [
        (str(min(n, len(sides) - 3)), f"{gap.max().item():.6e}") for n, gap in enumerate(gaps[:-1])
    ]
    called = [row[-1] for row in layers.rows]
    assert called[1] == "hidden_states[1]"
    assert called[-2:] == [
        "the last block's output, before the final norm",
        "hidden_states[-1]: after the final norm",
    ]
    assert logits.rows == [[f"{gaps[-1].max().item():.6e}", f"{gaps[-1].mean().item():.6e}", str(torch.equal(*sides[-1]))]]
    assert [row[-1] for row in top.rows] == [repr(tokenizer.decode([index])) for index in rung.top["index"]]


def test_what_a_block_returned_in_each_of_its_runs_has_its_own_name() -> None:
    gaps = {"max_abs": 0.0, "mean_abs": 0.0, "position": 9, "prefill": 9}
    rows = [(-1, "output"), (0, "output"), (0, "output"), (1, "output"), (1, "output"), (2, "normed"), (2, "output")]
    layers = pd.DataFrame([{"layer": layer, "part": part, **gaps} for layer, part in rows])
    top = pd.DataFrame({"index": [3], "recompute": [1.0], "cached": [1.0], "difference": [0.0]})
    (_, _, shown), _ = issue_tables(PrecisionRun("float32", torch.float32, layers=layers, top=top))
    assert [row[-1] for row in shown.rows] == [
        "hidden_states[0]: the embedding",
        *(f"block {block}'s output, run {run} of 2" for block in (0, 1) for run in (1, 2)),
        "hidden_states[-1]: after the final norm",
    ]


def test_two_different_logits_look_different() -> None:
    assert distinguished([(1.5, 1.5), (-0.8623130, -0.8623128)]) == [("1.5", "1.5"), ("-0.862313", "-0.8623128")]
    ((left, right),) = distinguished([(0.3464703, float(np.nextafter(0.3464703, 1)))])
    assert left != right
    assert distinguished([(0.0, -0.0)]) == [("0", "0")]


# The pytest helper, and bad input --------------------------------------------------------------------------------------


def test_the_pytest_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    from planting import key_wrong_by_a_thousandth, on_update

    quickly: Any = {"lengths": (5,), "steps": 2, "checks": "none", "rungs": ("float32", "float64")}
    assert assert_cache_consistent(build("llama"), **quickly).exit_code == 0
    on_update(key_wrong_by_a_thousandth, 1)(monkeypatch)
    with pytest.raises(CacheInconsistency, match="K of layer 1"):
        assert_cache_consistent(build("llama"), **quickly)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"rungs": ("float8",)}, "float16, float32"),
        ({"lengths": ()}, "at least 1"),
        ({"prompts": []}, "empty"),
        ({"prompts": [[5, 9999, 3, 4]]}, "9999"),
        ({"prompts": [[5, 6]]}, "fewer than 3"),
        ({"lengths": (3.5,)}, "whole numbers"),
        ({"sweep": True}, "'yes' or 'no'"),
    ],
)
def test_bad_input(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(kv.InputError, match=words):
        quick(build("llama"), **choices)
