"""Causes of what an engine was fed, of its weights, its experts and its masks: named where they are planted, and not beside one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import planted
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import kvinterp as kv
from kvinterp.engines.judge import audit_engine
from kvinterp.engines.log_probs import logits_of
from kvinterp.engines.ways import PRECISIONS
from kvinterp.recording.engine_path import EnginePath

CUT, LENGTH = 40, 104

pytestmark = pytest.mark.xdist_group("judge")


@pytest.fixture(scope="module")
def moe() -> Any:
    return kv.load_model("zoo:moe-mini", kind="native", dtype="float32")


def texts_of(model: Any, count: int = 3) -> list[list[int]]:
    text = [t for prompt in kv.load_prompts("natural:12") for t in model.encode(prompt.text)[1:]]
    return [[model.tokenizer.bos_token_id, *text[n * LENGTH : (n + 1) * LENGTH - 1]] for n in range(count)]


def given(texts: list[list[int]], rows: list[np.ndarray], cut: int = CUT) -> list[EnginePath]:
    """A file with log-probs of the replies alone."""
    return [
        EnginePath(f"{n}", tuple(ids[:cut]), tuple(ids[cut:]), np.r_[np.full(cut, np.nan), row[cut:]])
        for n, (ids, row) in enumerate(zip(texts, rows, strict=True))
    ]


def why(found: kv.Verdict) -> str:
    return found.reading.splitlines()[1]


# What it was fed -------------------------------------------------------------------------------------------------------


def conversation(model: Any, reply: list[int], written: list[int], seen: list[int] | None = None) -> list[EnginePath]:
    """Two turns: the second's log-probs are behind the first's tokens as ``seen``, its prompt has them as ``written``."""
    ask, again = (
        list(model.encode("Question: Ben has 3 pens. How many?\nAnswer:")),
        list(model.encode("\nQuestion: And why?"))[1:],
    )
    answer = texts_of(model, 1)[0][1:65]
    network = model.model
    behind = [*ask, *(reply if seen is None else seen), *again]
    row = planted.prefill(network, [*behind, *answer], len(behind))[len(behind) :]
    prompt = [*ask, *written, *again]
    second = EnginePath("1", tuple(prompt), tuple(answer), np.r_[np.full(len(prompt), np.nan), row])
    first = EnginePath("0", tuple(ask), tuple(reply), planted.prefill(network, [*ask, *reply], len(ask)))
    return [first, second]


def split(model: Any, text: str) -> list[int]:
    """The ids of a text, a character at a time, as a model may draw them."""
    return [token for letter in text for token in list(model.encode(letter))[1:]]


def test_the_tokens_of_the_turn_before_are_tried_where_its_text_was_encoded_anew(model: Any) -> None:
    """trl#5224: turn 1 was decoded and tokenised again, so that turn 2's prompt is not what the engine saw."""
    text = " Ben has 3 pens and 4 more."
    reply, written = split(model, text), list(model.encode(text))[1:]
    assert reply != written
    found = audit_engine(model, conversation(model, reply, written), "float32")
    assert found.verdict == "misaligned", str(found)
    assert "the tokens of the turns before it in the file" in why(found), str(found)
    sound = audit_engine(model, conversation(model, reply, written, seen=written), "float32")
    assert sound.exit_code == 0, str(sound)


def test_what_a_template_left_out_of_an_earlier_turn_is_put_back_from_the_file(model: Any) -> None:
    """prime-rl#1334: the template strips what was thought in earlier turns; the engine's cache still had it."""
    reply = list(model.encode("<think>Ben had 3 and got 4, so 3 + 4 = 7</think>\nThe answer is 7."))[1:]
    written = list(model.encode("The answer is 7."))[1:]
    found = audit_engine(model, conversation(model, reply, written), "float32")
    assert "the tokens of the turns before it in the file" in why(found), str(found)


def test_think_parts_that_the_engine_did_not_see_are_left_out(model: Any) -> None:
    reply = list(model.encode("<think>Ben had 3 and got 4, so 3 + 4 = 7</think>\nThe answer is 7."))[1:]
    files = conversation(model, reply, reply, seen=list(model.encode("The answer is 7."))[1:])
    found = audit_engine(model, files[1:], "float32")
    assert "the prompt without its think parts" in why(found), str(found)


def test_a_prompt_that_the_engine_was_given_as_text_is_encoded_anew(model: Any) -> None:
    text = " Ben has 3 pens and 4 more."
    files = conversation(model, split(model, text), split(model, text), seen=list(model.encode(text))[1:])
    found = audit_engine(model, files[1:], "float32")
    assert "the prompt's text encoded anew" in why(found), str(found)


@pytest.mark.slow
def test_a_newline_behind_the_end_of_a_turn_that_the_file_lacks_is_put_back(model: Any) -> None:
    """verl#6501: templates write one, and what a trainer joins from turns has none."""
    end, newline = model.tokenizer.eos_token_id, model.encode("\n")[-1]
    reply = [*list(model.encode(" Ben has 3 pens."))[1:], end]
    files = conversation(model, reply, reply, seen=[*reply, newline])
    found = audit_engine(model, files[1:], "float32")
    assert f"with the token {newline} '\\n' at position {files[1].prompt.index(end) + 1}, between" in why(found), str(found)


# Experts ---------------------------------------------------------------------------------------------------------------


def routed(change: Callable[[Any, Tensor, Any], Any]) -> planted.Engine:
    """An engine whose routers give something else."""

    def engine(network: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(network)
        for layer in wrong.model.layers:
            layer.mlp.gate.register_forward_hook(lambda gate, args, out: change(gate, args[0].flatten(0, -2), out))
        return planted.prefill(wrong, ids, cut)

    return engine


def in_bfloat16(gate: Any, hidden: Tensor, out: Any) -> Any:
    logits = hidden.bfloat16() @ gate.weight.bfloat16().T
    best = logits.float().softmax(-1).topk(gate.top_k)
    return logits, best.values / best.values.sum(-1, keepdim=True), best.indices


def unnormalised(gate: Any, hidden: Tensor, out: Any) -> Any:
    best = (hidden @ gate.weight.T).softmax(-1).topk(gate.top_k)
    return out[0], best.values, best.indices


def fewer(gate: Any, hidden: Tensor, out: Any) -> Any:
    """The second expert is not used, and the first has all the weight."""
    return out[0], torch.tensor([1.0, 0.0]).expand_as(out[1]), out[2]


@pytest.mark.parametrize(
    ("change", "named"),
    [(in_bfloat16, "the router in bfloat16"), (unnormalised, "divided by their sum or not"), (fewer, "one expert fewer")],
)
def test_other_experts_are_named(change: Any, named: str, moe: Any) -> None:
    texts = texts_of(moe)
    found = audit_engine(moe, given(texts, [routed(change)(moe.model, ids, CUT) for ids in texts]), "float32")
    assert found.exit_code == 1, str(found)
    assert named in why(found), str(found)


def test_experts_that_rounding_chooses_in_a_sound_engine_are_not_named(moe: Any) -> None:
    texts = texts_of(moe)
    network = moe.at(torch.bfloat16).model
    found = audit_engine(moe, given(texts, [planted.decode(network, ids, CUT) for ids in texts]), "bfloat16")
    assert found.exit_code == 0, str(found)


# Masks -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def masked(model: Any, allowed: Callable[[int], Tensor], beside: int = 0) -> Iterator[EnginePath]:
    """Log-probs under a mask: ``allowed(position)`` is ``[vocabulary]``; with so many tokens beside the drawn one."""
    for number, ids in enumerate(texts_of(model)):
        logits, top, row = model.model(torch.tensor([ids[:CUT]])).logits[0, -1], {}, np.full(CUT, np.nan)
        ids, draw = ids[:CUT], torch.Generator().manual_seed(number)
        for at in range(CUT, LENGTH):
            inside = logits.double().masked_fill(~allowed(at), -torch.inf).log_softmax(-1)
            ids = [*ids, int(torch.multinomial(inside.exp(), 1, generator=draw))]
            row = np.r_[row, float(inside[ids[-1]])]
            if beside:
                best = inside.topk(beside)
                top[at] = (best.indices.numpy(), best.values.numpy())
            logits = model.model(torch.tensor([ids])).logits[0, -1]
        yield EnginePath(f"{number}", tuple(ids[:CUT]), tuple(ids[CUT:]), row, top)


@pytest.mark.slow
def test_a_mask_that_is_the_same_everywhere_is_named(model: Any) -> None:
    special = torch.zeros(model.facts.vocabulary, dtype=torch.bool)
    special[[0, 1, 2]] = True
    digits = torch.tensor([bool(piece) and set(piece) <= set("0123456789 +=.") for piece in model.pieces(range(512))])
    found = audit_engine(model, [*masked(model, lambda at: digits & ~special)], "float32")
    assert found.verdict == "processed", str(found)
    assert "renormalised over the tokens" in why(found) or "renormalised over tokens of the characters" in why(found)


@pytest.mark.slow
def test_a_mask_that_changes_is_told_from_what_is_given_beside_the_drawn_token(model: Any) -> None:
    """A grammar allows other tokens at each position; which, the file does not say."""
    sets = [torch.rand(model.facts.vocabulary, generator=torch.Generator().manual_seed(at)) < 0.5 for at in range(LENGTH)]
    files = [*masked(model, sets.__getitem__, beside=4)]
    found = audit_engine(model, files, "float32")
    assert "renormalised over allowed tokens, as under a grammar" in why(found), str(found)
    for path in files:
        path.top.clear()
    untold = audit_engine(model, files, "float32")
    assert untold.verdict == "unexplained", str(untold)
    assert "it is above ours each time" in why(untold), str(untold)


@torch.no_grad()
def test_a_repetition_penalty_is_named_by_its_size_since_it_divides_raw_logits(model: Any) -> None:
    """It was tried on log-probs, which are all below 0, and a presence penalty was blamed."""
    texts, rows = texts_of(model), []
    for ids in texts:
        logits = model.model(torch.tensor([ids])).logits[0].double()
        for at in range(len(ids)):
            seen = sorted(set(ids[: at + 1]))
            logits[at, seen] = torch.where(logits[at, seen] > 0, logits[at, seen] / 1.2, logits[at, seen] * 1.2)
        rows.append(planted.chosen(logits, ids))
    found = audit_engine(model, given(texts, rows), "float32")
    assert "repetition_penalty=1.2 over prompt and reply" in why(found), str(found)


# Weights of another time -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0, 0.7])
def test_an_adapter_that_is_added_twice_or_scaled_is_named_beside_its_base(size: float, model: Any) -> None:
    adapted = copy.deepcopy(model.model)
    draw = torch.Generator().manual_seed(3)
    deltas = {}
    for name, module in adapted.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            a, b = (torch.randn(n, 4, generator=draw) for n in module.weight.shape)
            deltas[name] = 0.02 * a @ b.T
            module.weight.data += deltas[name]
    wrong = copy.deepcopy(adapted)
    for name, module in wrong.named_modules():
        if name in deltas:
            module.weight.data += (size - 1) * deltas[name]
    wrapped = kv.wrap(adapted, tokenizer=model.tokenizer)
    texts = texts_of(model)
    files = given(texts, [planted.prefill(wrong, ids, CUT) for ids in texts])
    found = audit_engine(wrapped, files, "float32", older=model.model)
    assert f"{size:.3g} times the step from the older weights to these" in why(found), str(found)
    right = given(texts, [planted.decode(adapted, ids, CUT) for ids in texts])
    assert audit_engine(wrapped, right, "float32", older=model.model).exit_code == 0


# Two at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_two_causes_at_once_are_named_where_one_alone_leaves_most(model: Any) -> None:
    """The log-probs are after a temperature, and the positions behind the prompt are one too high."""
    texts, rows = texts_of(model), []
    for ids in texts:
        at = torch.arange(len(ids))[None]
        logits = model.model(torch.tensor([ids]), position_ids=at + (at >= CUT)).logits[0].double()
        rows.append(planted.chosen(logits / 0.8, ids))
    found = audit_engine(model, given(texts, rows), "float32")
    assert found.exit_code == 1, str(found)
    assert "after temperature 0.8 with positions +1 behind the prompt" in why(found), str(found)


# Packed rows -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_positions_that_do_not_begin_anew_in_a_packed_row_are_named_where_a_model_learned_them() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=512, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                        initializer_range=0.3)  # fmt: skip
    network = GPT2LMHeadModel(config).eval()
    texts = torch.randint(1, 64, (4, 80), generator=torch.Generator().manual_seed(1)).tolist()

    def rows(further: Callable[[int], int]) -> list[np.ndarray]:
        return [
            planted.chosen(network(torch.tensor([ids]), position_ids=torch.arange(80)[None] + further(n)).logits[0], ids)
            for n, ids in enumerate(texts)
        ]

    found = audit_engine(kv.wrap(network), given(texts, rows(lambda n: 80 * (n % 2))), "float32")
    assert "positions that go on from the text before it in the file" in why(found), str(found)
    assert "every second sequence is off" in str(found)
    assert audit_engine(kv.wrap(network), given(texts, rows(lambda n: 0)), "float32").exit_code == 0


def test_the_text_before_it_in_the_row_is_named_where_rows_are_packed_without_a_mask(model: Any) -> None:
    texts, rows = texts_of(model, 4), []
    for number, ids in enumerate(texts):
        before = texts[number - 1] if number % 2 else []
        rows.append(np.r_[np.nan, planted.prefill(model.model, [*before, *ids], CUT)[len(before) + 1 :]])
    found = audit_engine(model, given(texts, rows), "float32")
    assert "packed" in why(found), str(found)
    assert "every second sequence is off" in found.reading.splitlines()[0], str(found)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_products_of_16_bits_are_summed_in_float32_and_rounded_once(model: Any, name: str) -> None:
    """As accelerators make them, whatever this processor does with 16 bits."""
    (precision,) = (one for one in PRECISIONS if one.name == name)
    seen: list[tuple[Tensor, Tensor]] = []

    def compare(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        wide = torch.nn.functional.linear(args[0].float(), module.weight.float())
        seen.append((output, wide.to(output.dtype)))

    with model.one_call():
        layers = [each for each in model.at(getattr(torch, name)).model.modules() if isinstance(each, torch.nn.Linear)]
        for layer in layers:
            layer.register_forward_hook(compare)
        logits_of(model, [1, *range(5, 40)], 9, precision)
    assert len(seen) == len(layers)
    assert all(got.dtype == getattr(torch, name) and torch.equal(got, want) for got, want in seen)


def test_what_is_known_first_is_said_first(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    (ids,) = texts_of(model, 1)
    row = np.r_[np.nan, planted.prefill(model.model, ids, CUT)[1:]]
    row[50] -= 3.0
    with caplog.at_level("INFO", logger="kvinterp"):
        audit_engine(model, given([ids], [row]), "float32")
    (said,) = (record.getMessage() for record in caplog.records if "so far" in record.getMessage())
    assert "at most 3 (sequence 1, position 50)" in said


class _Fp8(DynamicCache):
    """Holds keys and values in fp8, and gives them back so."""

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        rounded = [part.clamp(-448, 448).to(torch.float8_e4m3fn).to(part.dtype) for part in (keys, values)]
        return super().update(*rounded, *rest, **more)


@pytest.mark.slow
@torch.no_grad()
def test_a_quantised_cache_of_a_deep_model_is_named_where_rounding_moves_its_codes() -> None:
    """What our float64 makes of the cause is as far from the engine's float32 as half of the whole distance."""
    try:
        model = kv.load_model("real:smollm2-135m", kind="native", dtype="float32")
    except kv.InputError:
        pytest.skip("the model is not here: make real")
    text = [t for prompt in kv.load_prompts("natural:24") for t in model.encode(prompt.text)]
    texts, rows = [text[n * 120 : (n + 1) * 120] for n in range(5)], []
    for ids in texts:
        cache = _Fp8(config=model.model.config)
        parts = [model.model(torch.tensor([ids[:40]]), past_key_values=cache).logits[0]]
        parts += [model.model(torch.tensor([[ids[at]]]), past_key_values=cache).logits[0] for at in range(40, 120)]
        rows.append(planted.chosen(torch.cat(parts), ids))
    found = audit_engine(model, given(texts, rows, 40), "float32")
    assert found.verdict == "policy", str(found)
    assert "fp8(e4m3) cache reproduces it" in why(found)
    assert "rounding anew before it moves what it gives by" in why(found)
