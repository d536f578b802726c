"""The run that wrote a text: its activations are those that hooks of anybody's own around ``generate`` see, by bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import kvinterp as kv
from kvinterp.models.inputs import left_padded
from support import assert_bitwise, assert_close, nothing_left

PROMPTS = ([3, 17, 44, 9, 71, 26, 58, 5, 33], [90, 12, 64, 8])
SITES = "resid_pre,resid_post,attn_out,q,k,v,z,mlp_out,pattern"
NEW = 6
KINDS = [
    pytest.param(kind, marks=[pytest.mark.hooked] if kind == "hooked" else []) for kind in ("native", "hooked", "bridge")
]


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any) -> Any:
    eager = {"attention": "eager"} if request.param == "native" else {}
    return kv.load_model("zoo:gqa2-mini", kind=request.param, dtype="float32", **eager)


def _points(adapter: Any, layer: int) -> dict[str, tuple[nn.Module, str]]:
    """Where anybody would hook each site, without a word of kvinterp's."""
    if adapter.kind != "native":
        hooks = {site: f"blocks.{layer}.hook_{site}" for site in ("resid_pre", "resid_post", "attn_out", "mlp_out")}
        hooks |= {site: f"blocks.{layer}.attn.hook_{site}" for site in ("q", "k", "v", "z", "pattern")}
        return {site: (adapter.model.hook_dict[name], "output") for site, name in hooks.items()}
    block = adapter.model.model.layers[layer]
    attention = block.self_attn
    return {
        "resid_pre": (block, "input"),
        "resid_post": (block, "output"),
        "attn_out": (attention, "output"),
        "mlp_out": (block.mlp, "output"),
        "q": (attention.q_proj, "output"),
        "k": (attention.k_proj, "output"),
        "v": (attention.v_proj, "output"),
        "z": (attention.o_proj, "input"),
        "pattern": (attention, "weights"),
    }


@contextlib.contextmanager
def _plain_hooks(adapter: Any) -> Iterator[dict[tuple[str, int], list[Tensor]]]:
    seen: dict[tuple[str, int], list[Tensor]] = {}
    handles = []

    def keep(place: tuple[str, int], side: str, args: Any, output: Any) -> None:
        value = args[0] if side == "input" else output[1] if side == "weights" else output
        seen[place].append((value[0] if isinstance(value, tuple) else value).clone())

    for layer in range(adapter.facts.layers):
        for site, (module, side) in _points(adapter, layer).items():
            seen[site, layer] = []

            def hook(_: Any, args: Any, output: Any, place: Any = (site, layer), side: str = side) -> None:
                keep(place, side, args, output)

            handles.append(module.register_forward_hook(hook))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _joined(pieces: list[Tensor], row: int, site: str, pads: int, like: Tensor) -> Tensor:
    """The plain loop's own way to one tensor a text."""
    if site != "pattern":
        whole = torch.cat([piece[row].reshape(piece.shape[1], *like.shape[1:]) for piece in pieces])
        return whole[pads : pads + len(like)]
    size, end = like.shape[-1] + pads, 0
    whole = torch.zeros(like.shape[0], size, size)
    for piece in pieces:
        new = piece.shape[2]
        width = min(end + new, size)
        if end < size:
            whole[:, end : end + new, :width] = piece[row][:, : size - end, :width]
        end += new
    return whole[:, pads:, pads:]


def _check(adapter: Any, texts: list[kv.Generation], seen: dict[Any, list[Tensor]], pads: list[int]) -> None:
    differ = 0
    for row, text in enumerate(texts):
        for (site, layer), pieces in seen.items():
            differ += not torch.equal(text[site, layer], _joined(pieces, row, site, pads[row], text[site, layer]))
        assert len(text.records) == len(seen) == 9 * adapter.facts.layers
        assert text.path == "cached"
        assert not text["pattern", 0].triu(1).any()
    assert differ == 0


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "chunked": {"prefill_chunk_size": 4},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("how", OPTIONS)
@torch.no_grad()
def test_it_is_the_run_that_wrote_the_text(model: Any, how: str) -> None:
    """Every site of every layer has the bits that plain hooks around ``generate`` saw, and so have the tokens."""
    if how in ("chunked", "static") and not model.plain:
        pytest.skip("generate() of TransformerLens has no such option")
    with _plain_hooks(model) as seen, torch.random.fork_rng():
        torch.manual_seed(3)
        (text,) = kv.generated(model, PROMPTS[0], SITES, max_new_tokens=NEW, logits="keep", **OPTIONS[how])
    _check(model, [text], seen, [0])
    assert len(text.tokens) == NEW
    assert text.positions == tuple(range(len(PROMPTS[0]) + NEW - 1))
    if how != "sampled":
        assert text.logits is not None
        assert text.logits.argmax(-1).tolist() == list(text.tokens)


@pytest.mark.parametrize("how", OPTIONS)
@torch.no_grad()
def test_rows_of_a_padded_batch(model: Any, how: str) -> None:
    """Pads are taken out by row, of queries and of keys."""
    if not model.plain and (how in ("chunked", "static") or model.kind == "hooked"):
        pytest.skip("generate() of TransformerLens has no such option")
    with _plain_hooks(model) as seen, torch.random.fork_rng():
        torch.manual_seed(3)
        texts = kv.generated(model, list(PROMPTS), SITES, max_new_tokens=NEW, batch_size=2, **OPTIONS[how])
    assert [text.prompt for text in texts] == [tuple(prompt) for prompt in PROMPTS]
    _check(model, texts, seen, [0, 5])
    for text in texts:
        assert_close(text["pattern", 1].sum(-1), torch.ones(()).expand(8, len(text.positions)), absolute=1e-5)


@torch.no_grad()
def test_record_around_anybodys_generate(model: Any) -> None:
    """A list of texts through TransformerLens, a padded batch through transformers: the same object, a text a row."""
    texts = ["12 + 30 =", "Tom has 4 apples and buys 3 more. How many"]
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    if not model.plain:
        how |= {"stop_at_eos": False, "verbose": False}
    with _plain_hooks(model) as seen, kv.record(model, SITES, positions="all") as recorder:
        if model.kind == "hooked":
            model.model.generate(texts, **how)
        else:
            ids, mask = left_padded(model, [model.encode(text) for text in texts])
            model.model.generate(ids, attention_mask=mask, **how)
    found = recorder.texts()
    lengths = [len(text.prompt) for text in found]
    _check(model, found, seen, [max(lengths) - length for length in lengths])
    for text, prompt in zip(found, texts, strict=True):
        assert model.decode(text.prompt).strip().endswith(prompt)
        # A generate() that returns texts does not tell the token that it chose last.
        assert len(text.tokens) == NEW - (model.kind == "hooked")
        assert len(text.positions) == len(text.prompt) + NEW - 1


@torch.no_grad()
def test_a_text_that_goes_on_behind_an_end_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generate() that is told where texts end, or to go on, is taken at its word."""
    ids = torch.tensor([PROMPTS[0]])
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    others = {"eos_token_id": 1} if model.plain else {"stop_at_eos": False, "verbose": False}
    written = model.model.generate(ids, **how, **others)[0, ids.shape[1] :].tolist()
    # The last but one token that is written ends a text as the model has it, and another follows.
    monkeypatch.setattr(type(model), "end_tokens", (written[-2],))
    assert 1 not in written
    with kv.record(model, "resid_post", positions="all") as recorder:
        model.model.generate(ids, **how, **others)
    (text,) = recorder.texts()
    assert list(text.tokens) == written
    assert len(text.positions) == ids.shape[1] + NEW - 1


@torch.no_grad()
def test_texts_of_a_loop_of_ones_own(model: Any) -> None:
    """No ``generate``: the first forward is the prompt; without a cache each row is of the forward that first computed it."""
    ids = torch.tensor([PROMPTS[0]])
    for cached in (True, False):
        with nothing_left(model.model), kv.record(model, "resid_post,pattern", positions="all") as recorder:
            _, cache = model.call_with_cache(ids[:, :5], None, None, None)
            for end in (6, 7):
                if cached:
                    _, cache = model.call_with_cache(ids[:, end - 1 : end], cache, None, None)
                else:
                    model.forward(ids[:, :end])
        (text,) = recorder.texts()
        assert text.prompt == tuple(PROMPTS[0][:5])
        assert text.tokens == tuple(PROMPTS[0][5:7])
        # Nobody chose a token after the last one that was fed.
        assert text.path == ("cached" if cached else "recompute")
        assert len(text.positions) == 7
        newest = recorder.kept["resid_post", 1][1][0, -1]
        assert_bitwise(text["resid_post", 1][5], newest)
        assert text["pattern", 1].shape[1:] == (len(text.positions),) * 2


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[2]])
@torch.no_grad()
def test_the_cache_is_transformer_lenss(kind: str) -> None:
    """Its own functions take it, and give in float64 what they give on its own run without a cache."""
    model = kv.load_model("zoo:gqa2-mini", kind=kind, dtype="float64")
    sites = "resid_pre,resid_post,resid_mid,attn_out,mlp_out,z,pattern"
    (text,) = kv.generated(model, "12 + 30 =", sites, max_new_tokens=NEW)
    whole = torch.tensor([text.text[:-1]])
    _, plain = model.model.run_with_cache(whole)
    made = text.cache()
    for name in made.keys():  # noqa: SIM118
        assert_close(made[name], plain[name], name, relative=1e-6)
    ours, theirs = (cache.decompose_resid(apply_ln=True) for cache in (made, plain))
    assert_close(ours, theirs, relative=1e-6)
    answers = torch.tensor([[text.tokens[0]]]).expand(1, whole.shape[1])
    assert_close(made.logit_attrs(ours, answers), plain.logit_attrs(theirs, answers), relative=1e-6)
    assert_close(made.stack_head_results(), plain.stack_head_results(), relative=1e-6)


@torch.no_grad()
def test_a_generation_is_a_donor(model: Any) -> None:
    """As a trace it has the rows of each step; patched into its own run it changes nothing, into another's it does."""
    (text,) = kv.generated(model, PROMPTS[0], "resid_post,pattern", max_new_tokens=3)
    (other,) = kv.generated(model, PROMPTS[0][::-1], "resid_post", max_new_tokens=3)
    trace = text.trace()
    assert [tuple(rows.shape[1:]) for rows in trace.records["pattern", 0]] == [(9, 9), (1, 10), (1, 11)]
    for donor, same in ((trace, True), (other.trace(), False)):
        patch = kv.Patch("resid_post", (1,), positions=(9, 10), steps=(1,), donor=donor)
        with kv.record(model, "resid_post", layers=[3], positions="all") as seen, kv.patched(model, patch):
            ids = torch.tensor([PROMPTS[0]])
            model.generate(ids, torch.ones_like(ids), {"max_new_tokens": 3})
        (patched,) = seen.texts()
        assert torch.equal(patched["resid_post", 3][:9], text["resid_post", 3][:9])
        assert torch.equal(patched["resid_post", 3][9], text["resid_post", 3][9]) == same


def test_what_is_told() -> None:
    """A window of positions, a cache from before, a site that is not there: one sentence each; the path is said."""
    model = kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        with kv.record(model, "resid_post") as newest:
            model.model(ids)
        with pytest.raises(kv.InputError, match="positions='all'"):
            newest.texts()
        _, cache = model.call_with_cache(ids, None, None, None)
        with kv.record(model, "resid_post", positions="all") as late:
            model.call_with_cache(ids[:, :1], cache, None, None)
        with pytest.raises(kv.InputError, match="held 9 positions before"):
            late.texts()
    (text,) = kv.generated(model, PROMPTS[0], "resid_post", layers=[3], max_new_tokens=2)
    with pytest.raises(kv.InputError, match="it recorded resid_post"):
        text["pattern", 3]
    assert_bitwise(text["resid_post", -1], text["blocks.3.hook_resid_post"])
    frame = text.frame("resid_post")
    assert list(frame["part"].unique()) == ["prompt", "generated"]
    assert len(frame) == len(text.positions)
    assert "cached): 9 prompt tokens, 2 generated, resid_post of 1 layers at 10 positions" in repr(text)


@pytest.mark.parametrize("takes", ["takes rows", "takes none"])
def test_a_cache_that_is_not_read_is_said(takes: str) -> None:
    """A bridge that ignores its cache, or does not even fill it (transformers 5.24): one text, which says so."""
    model = kv.load_model("zoo:gqa2-mini", kind="bridge", dtype="float32")
    from transformers import DynamicCache

    keep = DynamicCache.update

    def update(self: Any, keys: Any, values: Any, *rest: Any, **more: Any) -> Any:
        if takes == "takes rows":
            keep(self, keys, values, *rest, **more)
        return keys, values

    try:
        DynamicCache.update = update
        with pytest.warns(kv.CacheNotReadWarning):
            (text,) = kv.generated(model, PROMPTS[0], "resid_post,pattern", max_new_tokens=3, logits="keep")
    finally:
        DynamicCache.update = keep
    assert text.path.startswith("cached, not read: one token fed after 9 saw 1 key")
    assert (len(text.prompt), len(text.tokens), len(text.positions), len(text.logits)) == (9, 3, 11, 3)
    alone = text["pattern", 0][:, 9:]
    assert torch.equal(alone, torch.eye(11)[9:].expand_as(alone)), "each step attended to its own row alone"


def test_several_texts_of_a_prompt_are_rows_and_beams_are_none() -> None:
    """Beams change places at every step: the activations of a row are no text's."""
    adapter = kv.load_model("zoo:gqa2-mini", dtype="float64")
    sampled = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW, "min_new_tokens": NEW}
    torch.manual_seed(0)
    texts = kv.generated(adapter, list(PROMPTS), "resid_post", batch_size=2, **sampled)
    assert [text.prompt for text in texts] == [tuple(prompt) for prompt in PROMPTS for _ in range(3)]
    assert len({text.tokens for text in texts}) > 1
    for text in texts:
        with kv.record(adapter, "resid_post", positions="all") as plain, torch.no_grad():
            adapter.model(torch.tensor([[*text.prompt, *text.tokens[:-1]]]))
        assert_close(text["resid_post", 3], plain["resid_post", 3][0], relative=1e-9)
    with kv.record(adapter, "resid_post", positions="all") as recorder, torch.no_grad():
        adapter.model.generate(torch.tensor([PROMPTS[0]]), num_beams=2, max_new_tokens=3)
    with pytest.raises(kv.UnsupportedError, match="2 beams, whose rows change places"):
        recorder.texts()


def test_a_generation_config_of_ones_own_says_whether_tokens_are_drawn() -> None:
    adapter = kv.load_model("zoo:gqa2-mini")
    own = GenerationConfig(do_sample=True, temperature=9.0, max_new_tokens=NEW)
    torch.manual_seed(0)
    drawn = {kv.generated(adapter, [list(PROMPTS[1])], generation_config=own)[0].tokens for _ in range(4)}
    assert len(drawn) > 1
