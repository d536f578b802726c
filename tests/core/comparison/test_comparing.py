"""What a comparison says, and what may be asked of one."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaForCausalLM

import kvinterp as kv
from kvinterp.common.numbers import number
from kvinterp.comparison import Comparison, comparing
from kvinterp.comparison.findings import headline_of
from kvinterp.metrics.recovery import ONLY_THE_PREFILL
from kvinterp.models import Adapter
from support import Case, random_model
from synthetic import comparison

pytestmark = pytest.mark.bits

PROMPT = (3, 17, 44, 9, 71, 26, 58, 5, 33, 90, 12, 64)
SHORT = {"max_new_tokens": 3, "stop": "length"}


@pytest.fixture(scope="module")
def model() -> Adapter:
    return kv.load_model("zoo:mistral-mini", kind="native", device="cpu", attention="eager")


# Before and after the flip -------------------------------------------------------------------------------------------


def test_kl_of_two_texts_is_told_apart_from_that_of_rounding() -> None:
    """In the free protocol the mean KL of 2 nats after a flip drowned the 1e-6 before it, in where() and in the reading."""
    made = comparison((0, 1), flip=2, protocol="free")
    made.steps.loc[made.steps["after_flip"], "kl"] = 2.0
    made.layers.loc[(made.layers["step"] > 2) & (made.layers["layer"] == 1), "relative_l2"] = 1.0
    said = made.where()
    assert "mean KL behind a flip, where the two texts differ 2 nats (n = 4 steps)" in said
    assert "median of a prompt's mean KL 3.5 × 10⁻⁷ nats" in said.replace("\xa0", " ")
    assert "layer 1: median relative L2 of resid_post 7.1 × 10⁻⁴" in said.replace("\xa0", " "), (
        "rows after the flip do not count"
    )
    matched = comparison((0, 1), flip=2)
    assert "behind a flip" not in matched.where(), "the contexts stay the same in the matched protocol"


def test_every_table_says_which_rows_are_after_the_flip(model: Adapter) -> None:
    both = kv.compare(model, kv.load_prompts("arithmetic:3"), b="recompute@bfloat16", protocol="free",
                      strategy="top_p(0.99,3.0)", max_new_tokens=8, stop="length", record="resid_post,cache_v",
                      cache_errors="whole", progress="none")  # fmt: skip
    flips = both.examples.set_index("example")["flip_index"]
    assert flips.notna().any()
    for frame in (both.steps, both.layers, both.kv_steps, both.kv):
        assert (frame["after_flip"] == (frame["step"] > frame["example"].map(flips))).all()
    assert both.heads["after_flip"].dtype == bool


# Traces that were recorded apart ---------------------------------------------------------------------------------------


def traces(model: Adapter, sites: str, **options: Any) -> list[kv.Trace]:
    paths = ("cached", "recompute@float64")
    return [kv.run(model, PROMPT, path, record=sites, logits="keep", **SHORT, **options) for path in paths]


def test_heads_of_traces_keep_their_numbers(model: Adapter) -> None:
    """Heads 2 and 3, recorded alone, were called 0 and 1 in the table."""
    pytest.importorskip("kvinterp.engines")
    whole = kv.compare_traces(*traces(model, "pattern")).heads
    some = kv.compare_traces(*traces(model, "pattern", heads=[3, 2])).heads
    assert set(some["head"]) == {2, 3}
    keys = ["step", "layer", "head"]
    wanted = whole[whole["head"].isin([2, 3])].sort_values(keys, ignore_index=True)
    pd.testing.assert_frame_equal(some.sort_values(keys, ignore_index=True), wanted)
    table = kv.compare_traces(*traces(model, "cache_v", kv_heads=[1], positions="all")).kv_positions
    assert set(table["kv_head"]) == {1}


# What is given -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"continuation": [9999]}, "continuation holds token id 9999"),
        ({"continuation": [1.5]}, r"continuation \[1.5\] was given: expected whole numbers"),
        ({"seed": None}, "seed=None was given: expected a whole number"),
        ({"strategy": None}, "strategy=None was given"),
        ({"b": None}, "path=None was given"),
        ({"layers": 1.5}, "layers=1.5 was given"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    model: Adapter, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the checked signatures that the tests run with: a user has none.
    for name in ("compare_each", "compare_examples"):
        monkeypatch.setattr(comparing, name, inspect.unwrap(getattr(comparing, name)))
    compare = inspect.unwrap(kv.compare)
    with pytest.raises(kv.InputError, match=said) as error:
        compare(model, PROMPT, progress="none", **SHORT | options)
    assert "\n" not in str(error.value)


def test_each_side_of_two_models_has_its_name_and_the_first_tensor_that_differs_is_named():
    """Both sides were called "recompute" of the first one's model, and where they part was left to whoever reads the layers."""
    pytest.importorskip("kvinterp.engines")
    sound, wrong = (kv.load_model("zoo:llama64-mini", dtype="float32", device="cpu") for _ in range(2))
    wrong.facts = dataclasses.replace(wrong.facts, name="mine")
    with torch.no_grad():
        wrong.model.model.layers[2].self_attn.k_proj.weight.mul_(1.25)
    how = {"max_new_tokens": 3, "continuation": [5, 6], "record": "resid_post,q,k,v", "positions": "all", "stop": "length"}
    a, b, again = (kv.run(m, [3, 5, 7, 9], "recompute", logits="keep", **how) for m in (sound, wrong, sound))
    said = kv.compare_traces(a, b).where()
    assert said.startswith("recompute of zoo:llama64-mini against recompute of mine on zoo:llama64-mini and mine (")
    assert "layer 2, K: first recorded tensor that differs by more than rounding, relative L2 0.2 " in said
    assert "layer 2: median relative L2 of resid_post" in said
    assert "the first layer beyond rounding" in said
    same = kv.compare_traces(a, again).where()
    assert same.startswith("recompute against recompute on zoo:llama64-mini (")
    assert "first recorded tensor" not in same


def test_where_nothing_was_decoded_equality_says_nothing_of_the_cache(model: Any) -> None:
    """A chat model ended a plain question at once, and the comparison said "bit for bit" without a word on why."""
    only = kv.compare(model, ["Tom has 3 apples."], max_new_tokens=1, record="", progress="none")
    assert "no token was decoded" in only.where()
    more = kv.compare(model, ["Tom has 3 apples."], max_new_tokens=3, stop="length", record="", progress="none")
    assert "no token was decoded" not in more.where()
    assert headline_of(only) == [ONLY_THE_PREFILL]
    assert headline_of(more) != [ONLY_THE_PREFILL]


@pytest.mark.parametrize("site", ["q", "k", "v", "z", "result", "post", "embed"])
def test_a_vector_at_each_position_is_compared_by_its_relative_l2(site):
    """Whatever a run records with one vector at each position, or one a head, compare takes too."""
    adapter, prompt, settings = kv.load_model("zoo:gqa2-mini"), list(range(5, 12)), {"max_new_tokens": 4, "stop": "length"}
    layers = kv.compare(adapter, [prompt], record=site, **settings, progress="none").tables["layers"]
    fed = kv.run(adapter, prompt, **settings).tokens[:-1]
    a, b = (kv.run(adapter, prompt, path, record=site, continuation=fed, **settings) for path in ("cached", "recompute"))
    for row in layers.to_dict("records"):
        one, other = (trace.records[site, row["layer"]][row["step"]].flatten().double() for trace in (a, b))
        assert row["relative_l2"] == pytest.approx(float((one - other).norm() / other.norm()), rel=1e-6)
    assert set(layers["layer"]) == ({0} if site == "embed" else {0, 1, 2, 3})


class Changed(torch.nn.Module):
    """A head whose logits are changed behind it."""

    def __init__(self, head, change):
        super().__init__()
        self.head, self.change, self.weight = head, change, head.weight

    def forward(self, hidden):
        return self.change(hidden, self.head(hidden))


def small(change):
    model = random_model(LlamaForCausalLM, vocab_size=64, initializer_range=0.3)
    model.lm_head = Changed(model.lm_head, change).eval()
    return model


def longer(hidden, logits):
    """Other logits for another number of rows, so that the paths differ whatever the kernels do."""
    return logits + 1e-5 * hidden.shape[1] * torch.arange(64)


def masked(value):
    def change(hidden, logits):
        logits = longer(hidden, logits)
        logits[..., 60:] = value
        return logits

    return change


@pytest.mark.parametrize("value", [-math.inf, -1e30, torch.finfo(torch.float32).min])
def test_the_unit_is_not_that_of_a_masked_vocabulary(value):
    settings = {"max_new_tokens": 8, "stop": "length", "record": "", "progress": "none"}
    compared = kv.compare(small(masked(value)), [[1, 2, 3], [4, 5, 6, 7]], **settings)
    assert torch.finfo(torch.float32).eps / 4 < compared.provenance["null"]["unit"] < 1e-4


def test_what_is_left_out_has_no_part_in_the_null():
    """The first prompt gives NaN from its longest texts on; the other is compared, and its null is what it has alone."""

    def change(hidden, logits):
        return longer(hidden, logits).masked_fill(torch.tensor(hidden.shape[1] > 9), math.nan)

    settings = {"max_new_tokens": 5, "stop": "length", "record": "", "progress": "none"}
    whole = kv.compare(small(change), [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6]], **settings)
    alone = kv.compare(small(change), [[4, 5, 6]], **settings)
    assert list(whole.failures["id"]) == ["0"]
    assert whole.provenance.get("null") == alone.provenance.get("null")


def test_the_null_of_several_prompts_is_the_largest_of_theirs():
    settings = {"max_new_tokens": 8, "stop": "length", "record": "", "progress": "none"}
    model, prompts = small(longer), [[1, 2, 3], [4, 5, 6, 7], [9]]
    each = [kv.compare(model, [prompt], **settings) for prompt in prompts]
    nulls = [one.provenance["null"] for one in each if "null" in one.provenance]
    for parts in (each, each[::-1]):
        null = Comparison.joined(parts).provenance["null"]
        assert null["max_abs_logit"] == max(one["max_abs_logit"] for one in nulls)
        assert null["positions"] == sum(one["positions"] for one in nulls)
    assert kv.compare(model, prompts, **settings).provenance["null"]["positions"] == null["positions"]
    assert "null" not in kv.compare(model, prompts, **settings | {"max_new_tokens": 1}).provenance


def test_the_null_is_two_recomputations_of_the_same_positions():
    """The null of the sentence, and its unit, are what plain forwards of the model give."""
    adapter, prompt = kv.wrap(small(longer)), list(range(5, 12))
    compared = kv.compare(adapter, [prompt], max_new_tokens=9, stop="length", record="", progress="none")
    fed = kv.run(adapter, prompt, max_new_tokens=9, stop="length").tokens[:-1]
    text, start, stop = torch.tensor([[*prompt, *fed]]), len(prompt) - 1, len(prompt) + 4
    with torch.no_grad():
        whole, half = (adapter.model(t, use_cache=False).logits[0, start:] for t in (text, text[:, :stop]))
    unit = 2.0 ** math.floor(math.log2(whole.amax(-1).abs().max())) * torch.finfo(torch.float32).eps
    whole = whole[:5]
    expected = {
        "max_abs_logit": float((whole.double() - half.double()).abs().max()),
        "unit": unit,
        "positions": 5,
        "dtype": "float32",
        "prompts": 1,
    }
    assert compared.provenance["null"] == expected
    said = compared.where().replace("(", "")
    assert f"two recomputations of the same positions differ by {number(expected['max_abs_logit'])}" in said
    same = kv.compare(adapter, [prompt], "recompute", "recompute", max_new_tokens=3, record="", progress="none")
    assert "null" not in same.provenance


def test_what_a_quantised_cache_costs_is_said_first():
    """Tokens that flip, the KL and the bytes of a context of 4,096, which no sentence of the terminal had."""
    adapter, settings = kv.wrap(small(longer)), {"max_new_tokens": 9, "stop": "length", "record": "", "progress": "none"}
    prompts = [[5, 6, 7 + more] for more in range(6)]
    compared = kv.compare(adapter, prompts, "cached+int8", "recompute", **settings)
    steps, plain = compared.steps, adapter.facts.cache_bytes(4096, 32)
    stored = adapter.facts.cache_bytes(4096, 8 + 32 / adapter.facts.head_dim)
    assert compared.provenance["cache_bytes"] == {"context": 4096, "a": stored, "b": plain}
    first = compared.where().splitlines()[0].partition("): ")[2]
    flips = int(steps["flipped"].sum())
    assert first.startswith(f"{flips} of {len(steps)} tokens flip" if flips != 1 else f"1 of {len(steps)} tokens flips")
    assert "95% interval" in first.partition("The median")[0]
    assert f"The median of a prompt's mean KL is {number(steps.groupby('example')['kl'].mean().median())} nats" in first
    saved = f"cached+int8 stores {stored:,} bytes of K and V, the model's own cache {plain:,}: {plain - stored:,} bytes"
    assert f"For a context of 4,096 tokens {saved} (" in first
    assert first.index("flip") < first.index("median") < first.index("bytes") < first.index("logits differ")
    noisy = kv.compare(adapter, [[5, 6, 7]], "cached+uniform(-1,1)", "cached", **settings)
    assert "flip" in noisy.where().splitlines()[0]
    assert "bytes" not in noisy.where(), "noise takes as many"
    assert "cache_bytes" not in kv.compare(adapter, [[5, 6, 7]], **settings).provenance


def test_the_largest_relative_error_is_not_said_to_be_what_carries_the_difference(load: Any) -> None:
    """Defect: where K had huge channels, whose vectors are long, it named V of the last layer, and K of the first carried it."""
    model = load(Case("llama-gqa", "native"))
    said = kv.compare(model, PROMPT, "cached+int4", "cached", max_new_tokens=3, progress="none").where()
    line = next(line for line in said.splitlines() if "largest mean relative error of K and V" in line)
    assert "of a vector's own length, which is no share of the logits' difference" in line
    assert "kv.localise" in line
