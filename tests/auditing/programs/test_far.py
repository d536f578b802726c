"""Faults that lie far or behind special tokens are found by the first programs that go there, and by none without them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.cache_utils import DynamicLayer

import kvinterp as kv
from kvinterp.auditing.edges import edge_programs, past
from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import PLAIN, RIGHT, WRONG
from kvinterp.auditing.programs.reach import Reach
from kvinterp.auditing.programs.search import EARLY, FIRST, far, run_program, search
from kvinterp.auditing.uses import _checks, _cut, _over

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "eos_token_id": 2}
ROWS = tuple(f"rows({'+'.join('0' * n)})" for n in (9, 17))


def llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "max_position_embeddings": 2048, **more}))


def gpt2(**more: Any) -> Any:
    return GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_positions": 2048, **more}))


def mistral(**more: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**{**SMALL, "sliding_window": 8, **more}))


def gemma2(**more: Any) -> Any:
    return Gemma2ForCausalLM(Gemma2Config(**{**SMALL, "head_dim": 8, "sliding_window": 16, **more}))


class Call:
    """One forward on a cache, as a fault sees it."""

    def __init__(self, given: dict[str, Any], memory: dict[Any, Any]) -> None:
        cache = given.get("past_key_values")
        self.given, self.memory, self.cache = given, memory, cache
        self.past = 0 if cache is None else int(cache.get_seq_length())
        self.ids, self.mask, self.positions = (given.get(n) for n in ("input_ids", "attention_mask", "position_ids"))
        self.rows, self.width = (0, 0) if self.ids is None else self.ids.shape

    def move(self, begin: int) -> None:
        """Numbers the columns from another position on."""
        self.given["position_ids"] = torch.arange(begin, begin + self.width)[None].expand(self.rows, -1)

    def change(self, ids: torch.Tensor) -> None:
        self.given["input_ids"] = ids


def other_token(call: Call) -> None:
    call.change((call.ids + 1) % 99)


def when(holds: Callable[[Call], Any], wrong: Callable[[Call], None] = other_token) -> Callable[[Call], None]:
    """A fault of forwards on a filled cache."""

    def fault(call: Call) -> None:
        if call.past and call.ids is not None and bool(holds(call)):
            wrong(call)

    return fault


def hides_pads(call: Call) -> None:
    """A token with the pad's id is masked, whoever fed it."""
    if call.past and call.ids is not None:
        mask = torch.ones(call.rows, call.past + call.width, dtype=torch.long) if call.mask is None else call.mask.clone()
        mask[:, call.past :] *= (call.ids != 0).long()
        call.given["attention_mask"] = mask


def kept_by_shape(call: Call) -> None:
    """Positions that were told are kept by their shape."""
    if call.positions is not None and call.past:
        call.given["position_ids"] = call.memory.setdefault((call.past, call.positions.shape), call.positions)


def counts_rows(call: Call) -> None:
    """Pads are masked where there are several rows; without a cache, alone too."""
    if call.mask is not None and call.rows == 1 and call.given.get("use_cache") is not False:
        call.given["attention_mask"] = torch.ones_like(call.mask)


def after_an_end(call: Call) -> None:
    """What was cached before an end is forgotten."""
    if call.past and call.ids is not None and call.width > 1 and bool((call.ids == 2).any()):
        call.move(0)


def follows_a_pad(call: Call) -> None:
    """Once one row is fed its pad at the end, the others are numbered as if they stood still."""
    if call.past and call.width == 1 and call.rows > 1 and bool((call.ids == 0).any()):
        call.given["position_ids"] = (
            torch.full((call.rows, 1), call.past - 1) if call.positions is None else call.positions - 1
        )


def window_rounds(call: Call) -> None:
    """A ring of a window is right until it has gone round three times."""
    if 3 * 16 < call.past < 4 * 16 and call.width == 1:
        other_token(call)


FAULTS = {
    "positions in a byte": (llama, when(lambda c: c.past >= 256), r"feed\(254"),
    "a table of 300": (gpt2, when(lambda c: c.past >= 300 and c.width == 1), r"feed\(472|feed\(510|feed\(511"),
    "wrong from 1,100 on": (llama, when(lambda c: c.past >= 1100), rf"feed\({1100}"),
    "the second row at 512": (llama, when(lambda c: c.rows > 1 and c.past >= 512 and c.width == 1), r"rows\(0\+3\)\+feed\(511"),
    "a static cache past 512": (
        llama, when(lambda c: c.past >= 512 and type(c.cache).__name__ == "StaticCache"), r"rows\(0,cache=static\)\+feed\(1022"
    ),
    "generate past 1,000": (llama, when(lambda c: c.past >= 1000 and c.positions is not None), r"generate\(1022"),
    "more than 48 at once": (gemma2, when(lambda c: c.width > 48), r"feed\(60"),
    "nine rows": (gpt2, when(lambda c: c.rows >= 9), r"rows\(0\+0\+0\+0\+0\+0\+0\+0\+0\)|rows\(0\+1\+2\+0\+1\+2"),
    "seventeen rows": (llama, when(lambda c: c.rows >= 17), r"rows\(0\+1\+2\+0\+0|rows\(0(\+0){16}\)"),
    "seventeen rows, reordered": (mistral, None, r"reorder\(16"),
    "more than 8 taken back": (llama, None, r"crop\(12\)"),
    "three windows": (gemma2, window_rounds, r"feed\(56\)\+feed\(4|feed\(18\)\+feed\(2,1\)\+feed\(17"),
    "a pad is masked": (llama, hides_pads, "tokens=special"),
    "an end begins anew": (gemma2, after_an_end, "tokens=special"),
    "rows that ended": (llama, follows_a_pad, "ends"),
    "kept by shape": (gpt2, kept_by_shape, "rows=same"),
    "a lone padded row": (mistral, counts_rows, r"rows\(4\)|rows\(3\)"),
}  # fmt: skip


def planted(name: str, monkeypatch: pytest.MonkeyPatch) -> ModelSubject:
    """A model with a fault; those of the cache's own methods are planted in the library."""
    from transformers import DynamicCache

    build, fault, _ = FAULTS[name]
    torch.manual_seed(0)
    model = build().eval()
    own = type(model).forward

    def forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
        call = Call({"input_ids": input_ids, **given}, vars(self).setdefault("memory", {}))
        if fault is not None:
            fault(call)
        return own(self, **call.given)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", forward)
    crop, reorder = DynamicCache.crop, DynamicCache.reorder_cache
    if name == "more than 8 taken back":
        monkeypatch.setattr(DynamicCache, "crop", lambda self, n: crop(self, max(n, -8) if n < 0 else n))
    if name.endswith("reordered"):
        monkeypatch.setattr(
            DynamicCache, "reorder_cache", lambda self, rows: reorder(self, rows if len(rows) < 17 else rows.sort()[0])
        )
    return ModelSubject(kv.wrap(model))


def first_programs(subject: ModelSubject) -> list[str]:
    """Those of all programs that do not depend on a draw."""
    over = [text for texts in edge_programs(subject.given, "no")[0].values() for text in texts]
    return [text for text in (*FIRST, *far(subject.context), *over) if subject.offers(program_named(text).rows)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_far_or_special_is_found_by_a_program_that_goes_there(name, monkeypatch):
    """Each of them passed under "35 of 35 uses tried": no program that was run by default went there."""
    subject = planted(name, monkeypatch)
    there = [text for text in first_programs(subject) if re.search(FAULTS[name][2], text)]
    assert there
    assert run_program(subject, program_named(FIRST[0])).word == RIGHT
    assert WRONG in [run_program(subject, program_named(text)).word for text in there]


def test_special_tokens_stand_in_texts_as_any_other_token() -> None:
    """Every second token is a pad, an end or a beginning in turn; of RoBERTa, which numbers tokens by the pad, no pad."""
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(llama(eos_token_id=[2, 3]).eval()))
    assert (subject.pad, subject.end, subject.controls) == (0, 2, (0, 2, 3, 1))
    run = run_program(subject, program_named("rows(0+1,tokens=special,pad=end)+feed(9)+feed(4,1)"))
    assert run.word == RIGHT
    assert run.texts[0][1::2] == [0, 2, 3, 1, 0, 2]
    assert run.ids[1, 0] == 2
    assert set(run.texts[0][::2]).isdisjoint(subject.controls)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(vocab_size=99, is_decoder=True, pad_token_id=1, bos_token_id=0, eos_token_id=2, **sizes)
    assert set(ModelSubject(kv.wrap(RobertaForCausalLM(config).eval())).controls) == {0, 2}


def test_tokens_that_own_code_is_fed_hold_the_first_few_ids() -> None:
    """Nobody says what they are of functions: a step that begins anew at one of them was right in every program."""
    weights = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))

    def full(ids: torch.Tensor) -> torch.Tensor:
        return weights[ids].cumsum(1)

    def step(ids: torch.Tensor, cache: Any) -> Any:
        begun = full(ids) if cache is None or bool((ids == 2).any()) else full(ids) + cache
        return begun, begun[:, -1:]

    subject = FunctionSubject(full, step)
    assert subject.controls == (0, 1, 2, 3, 4, 5)
    assert run_program(subject, program_named("rows(0)+feed(9)+feed(6,1)")).word == RIGHT
    assert run_program(subject, program_named("rows(0,tokens=special)+feed(9)+feed(6,1)+feed(6,1)")).word == WRONG


def test_the_null_of_many_rows_is_measured_and_rows_that_mix_are_no_fault() -> None:
    """The null is that of three rows until more come; where many rows change the plain forward the use is off without a cache."""
    torch.manual_seed(0)
    model = llama().eval()
    text = ROWS[1] + "+feed(5)+feed(2,1)"
    subject = ModelSubject(kv.wrap(model))
    assert run_program(subject, program_named(text)).word == RIGHT
    assert [*subject._among] == [17]
    model.model.layers[0].register_forward_hook(
        lambda m, args, out: out + 0.1 * out.mean(0, keepdim=True) if len(out) > 8 else out
    )
    run = run_program(ModelSubject(kv.wrap(model)), program_named(text))
    assert (run.word, "in a batch of 17 rows" in run.why) == (PLAIN, True)


def test_what_programs_or_seconds_cut_off_is_said_and_how_far_they_went() -> None:
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(llama().eval()))
    ahead = {text: size for text, size in far(600).items() if size == 512}
    programs = sum(subject.offers(program_named(text).rows) for text in FIRST) + 1
    found = search(subject, programs, 60.0, further=[*map(program_named, ["rows(0)+feed(254)+feed(5,1)", *ahead])])
    names = {str(program_named(text)): (past(size), size) for text, size in ahead.items()}
    (cut,) = _cut(found, names, programs, 60.0)
    assert (cut.name, cut.status, cut.hint) == (past(512), "not run", "--programs")
    assert cut.detail.startswith(f"{len(ahead)} programs more, since ")
    reach = {check.name: check.reach for check in _checks(subject, found) if check.status == RIGHT}
    assert reach["batch"].rows == 17
    assert reach["crop and go on"].taken_back == 17
    assert (reach["decode step"].positions, reach["decode step"].context) == (259, 2048)
    assert reach["generate() on a filled cache, given the whole text"].turns == 3


def test_the_nearest_that_goes_far_comes_before_most_of_what_is_tried_first() -> None:
    """Defect: an audit of a model of 135 million weights ended at position 82, since nothing that goes far came in time."""
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(llama().eval()))
    found = search(subject, EARLY + 1, 60.0, further=[*map(program_named, far(2048))])
    assert max(reach.positions for reach in found.reach.values()) == 259


def test_programs_go_as_far_as_half_of_the_seconds_take_them() -> None:
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(llama(max_position_embeddings=600).eval()))
    ahead = [program_named(text) for text in far(600)]
    found = search(subject, len(FIRST) + len(ahead), 1e-3, further=ahead)
    assert set(found.cut) >= set(ahead)
    assert not search(subject, 0, 9.0, further=ahead).cut, "nothing was to be tried"


def test_a_shrunk_program_is_called_by_the_edge_that_it_still_goes_over() -> None:
    class Shrunk:
        origin = "rows(0)+feed(1022,0)+feed(5,1)"

    one: Any = Shrunk()
    names = {one.origin: (past(1024), 1024)}
    for text, said in {
        "feed(1022)+feed(3,1)": " past 1,024 positions",
        "feed(300)": " past 256 positions",
        "feed(9)": "",
    }.items():
        one.program = program_named(f"rows(0)+{text}")
        assert _over(one, names) == said


def test_the_larger_of_each_number_is_kept() -> None:
    assert Reach(5, 9, 1).beside(Reach(2, 9, 17, turns=2)) == Reach(5, 9, 17, 0, 0, 2)
    assert str(Reach()) == ""


CLEAN = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "gemma2": gemma2}


@pytest.mark.parametrize("name", [*list(CLEAN)[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in list(CLEAN)[1:])])
def test_a_sound_model_is_right_however_far_it_goes(name: str) -> None:
    torch.manual_seed(0)
    subject = ModelSubject(
        kv.wrap(CLEAN[name](**{"n_positions" if name == "gpt2" else "max_position_embeddings": 600}).eval())
    )
    words = {text: run_program(subject, program_named(text)).word for text in first_programs(subject)}
    assert WRONG not in words.values(), [text for text, word in words.items() if word == WRONG]


@pytest.mark.parametrize("method", ["reorder_cache", "batch_repeat_interleave", "crop"])
def test_rows_of_a_large_cache_are_moved_and_taken_back(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: what is tried first moved seven columns each, so that what is wrong behind 24 or 32 of them passed."""
    own = getattr(DynamicLayer, method)

    def moved(self: Any, given: Any) -> None:
        values = self.values
        own(self, given)
        if method == "reorder_cache" and values.shape[2] > 24:
            self.values = values
        if method == "batch_repeat_interleave" and given >= 3:
            self.values = values.repeat(given, 1, 1, 1)
        if method == "crop" and self.values.shape[2] >= 32:
            self.values = self.values.roll(1, 2)

    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(llama().eval()))
    part = {"reorder_cache": "reorder(", "crop": "crop("}.get(method, "repeat(")
    programs = [program_named(text) for text in FIRST if part in text]
    assert {run_program(subject, program).word for program in programs} == {RIGHT}
    monkeypatch.setattr(DynamicLayer, method, moved)
    assert WRONG in {run_program(subject, program).word for program in programs}


def test_a_batch_goes_to_the_end_of_a_context_between_two_edges() -> None:
    """Defect: of a context of 512 a batch was never fed behind position 262."""
    assert "rows(0+3)+feed(506)+feed(6,1)" in far(512)


@pytest.mark.parametrize("made", [mistral, gemma2])
def test_a_4d_mask_is_not_given_past_a_window(made: Callable[..., Any]) -> None:
    """Defect: a sound windowed model failed where a drawn program's mask had a column more than its cache had rows."""
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(made(sliding_window=8).eval()))
    near, past = (program_named(f"rows(1,told=float_mask)+feed(5)+feed({n},1)") for n in (2, 9))
    assert subject.offers(near.rows)
    assert (subject.holds(near), subject.holds(past)) == (True, False)
    assert run_program(subject, near).word == RIGHT
