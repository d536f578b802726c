"""What ``--calls`` says of the model's own dtype: how far a program moves logits there, beside two recomputations."""

from __future__ import annotations

import json

import pytest
import torch

import kvinterp as kv
from kvinterp.auditing.own_dtype import Distance, distance_of, distances_of
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named, programs_named
from kvinterp.models.hooks import wrapping_methods

QUICK = {"rungs": ("float64",), "lengths": (5,), "sweep": "no", "programs": 1, "seconds": 1.0}
BATCH = "rows(0+3+1+2)+feed(9)+select(0+2+3)+feed(2,1)"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_distance_and_the_null_go_with_the_dtype(dtype):
    """A program of a right model only adds up in another order, and so do two recomputations."""
    adapter = kv.load_model("zoo:gqa2-mini", dtype=dtype)
    for one in distances_of(adapter, programs_named("batched(8),padded(left,5),chunked(4),forked(4)")):
        assert (one.word, one.why, one.dtype) == ("right", "", dtype)
        unit = torch.finfo(getattr(torch, dtype)).eps
        largest = max(one.logits, one.null)
        assert largest < 2000 * unit
        assert dtype != "float64" or one.changed == 0
    assert one.tokens == 28  # 4 of the prefix, 3 that are taken back, 13 and 8.


def test_what_a_program_moves_is_heard_in_logits_to_the_end():
    """A shift of every cached step by a whole logit is no reason to stop: it is a figure here."""
    adapter = kv.load_model("zoo:gqa2-mini", dtype="float64")

    def shifted(_, own, *given, **named):
        out = own(*given, **named)
        cache = named.get("past_key_values")
        if cache is not None and out.logits.shape[1] == 1:
            out.logits = out.logits + 2 * torch.nn.functional.one_hot(torch.tensor(7), out.logits.shape[-1])
        return out

    subject = ModelSubject(adapter, ())
    program = program_named("rows(0)+feed(9)+feed(3,1)")
    sound = distance_of(subject, program)
    with wrapping_methods([subject.model], "forward", shifted):
        found = distance_of(subject, program)
    assert found.logits == pytest.approx(2.0)
    assert found.tokens == sound.tokens == 12
    assert sound.logits < 1e-10
    assert "moves logits by at most 2, and another token comes first at" in found.said


def test_the_figures_stand_in_the_reading_the_json_and_on_the_page(tmp_path):
    verdict = kv.audit(
        kv.load_model("zoo:gqa2-mini", dtype="bfloat16"), calls=f"padded(left,5),{BATCH}", out=tmp_path, **QUICK
    )
    assert [one.dtype for one in verdict.distances] == ["bfloat16"] * 2
    assert verdict.distances[1].program.startswith("rows(0+3+1+2)+feed(9,0)")
    lines = [one.said for one in verdict.distances]
    assert all(line in verdict.sentences() for line in lines)
    told = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))["distances"]
    assert [Distance(**row) for row in told] == [*verdict.distances] == [*kv.load(tmp_path).distances]
    assert [one.name for one in verdict.distances] == ["padded(left,5)", ""]
    assert lines[0].startswith("in bfloat16 padded(left,5) moves logits by at most")
    assert lines[0].endswith(" (rows(5)+feed(22,0)+feed(8,1)).")
    assert lines[1].startswith("in bfloat16 rows(0+3+1+2)+feed(9,0)")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    top = page[: page.index("<details")]
    assert ">How far what was asked for moves logits in bfloat16<" in top
    for one in verdict.distances:
        assert f'data-head="asked for">{one.name or one.program}</td>' in top
        assert f'data-head="largest logit difference">{one.logits:.2g}</td>' in top
        assert f'data-head="of two recomputations">{one.null:.2g}</td>' in top
    # Each stands once, as a row of the table and no sentence besides.
    assert "moves logits by at most" not in page


def test_without_calls_there_is_no_figure(tmp_path):
    verdict = kv.audit(kv.load_model("zoo:gqa2-mini", dtype="bfloat16"), out=tmp_path, **QUICK)
    assert verdict.distances == ()
    assert "what was asked for" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_functions_and_given_caches_have_figures_too():
    adapter = kv.load_model("zoo:gqa2-mini", dtype="float32")
    model = adapter.model

    def step(ids, cache):
        out = model(ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values

    called = {"calls": "chunked(4)", "programs": 1, "seconds": 1.0}
    of_functions = kv.audit(full=lambda ids: model(ids, use_cache=False).logits, step=step, **called)
    on_static = kv.audit(adapter, cache="static", **called)
    for verdict in (of_functions, on_static):
        (one,) = verdict.distances
        assert (one.word, one.dtype, one.tokens) == ("right", "float32", 25)
        assert one.logits < 1e-3


def test_what_a_model_does_not_offer_is_said():
    (one,) = distances_of(kv.load_model("zoo:gqa2-mini", dtype="float16", kind="hooked"), programs_named("static"))
    assert one.word == "refused"
    assert one.tokens == 0
    assert one.said.startswith(
        "in float16 nothing was compared in static (rows(0,cache=static)+feed(17,0)+feed(8,1)): this model does not"
    )
