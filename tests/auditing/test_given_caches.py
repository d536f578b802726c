"""An audit of a cache that is not the model's own: sound ones pass, each fault is found by its use, a lossy one is judged by itself."""

import sys
from pathlib import Path

import given_caches as given
import pytest
import torch
import transformers

import kvinterp as kv
from command_line import kvinterp
from command_line import wrong as refused
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.search import run_program
from kvinterp.auditing.subjects import GivenCache
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.cache_kinds import cache_named
from support import random_model

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def model():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    more = {"hidden_size": 64, "max_position_embeddings": 1024, "initializer_range": 0.3}
    return random_model(transformers.LlamaForCausalLM, 1, **heads, **more)


def audited(model, cache, **more):
    return kv.audit(model, cache=cache, **{"programs": 34, "seconds": 20} | more)


def wrong(verdict):
    return [check for check in verdict.checks if check.status == "wrong"]


USES = {
    "crop and go on": "rows(0)+feed(6)+feed(3,1)+crop(2)+feed(3,1)",
    "reorder_cache": "rows(0+0+0)+feed(6)+reorder(2+0+1)+feed(2,1)",
    "batch_select_indices": "rows(0+0+0)+feed(6)+select(2+0)+feed(2,1)",
    "batch_repeat_interleave": "rows(0+0)+feed(6)+repeat(2)+feed(2,1)",
    "batch": "rows(0+0+0)+feed(9)+feed(3,1)",
    "several chunks": "rows(0)+feed(48,16)+feed(32)+feed(2,1)",
    "left padding": "rows(0+4+1)+feed(9)+feed(3,1)",
    "beam search": "rows(0+0)+generate(5,6,beams)",
    "generate() on a filled cache, given the whole text": "rows(0)+generate(6,3)+generate(4,3)",
    "fork": "rows(0)+feed(6)+fork(2)+feed(2,1)",
    "prompt lookup": "rows(0)+generate(9,6,lookup)",
}


def subject(model, cache, lossy=False):
    return GivenCache(cache_named(cache), lossy).subject(kv.wrap(model))


def one(model, cache, use, lossy=False):
    return run_program(subject(model, cache, lossy), program_named(USES.get(use, use)))


@pytest.mark.parametrize("cache", [given.Copying, given.Slabs, given.InPages])
def test_a_sound_cache_is_right_in_every_use_and_its_own_methods_moved_its_rows(model, cache):
    asked = subject(model, cache)
    for use, program in USES.items():
        run = run_program(asked, program_named(program))
        assert run.word == "right", run.why
        assert use in run.uses


@pytest.mark.parametrize(
    ("cache", "use"),
    [
        (given.CropsTheFirstLayer, "crop and go on"),
        (given.ReordersKAlone, "reorder_cache"),
        (given.SelectForgetsALayer, "batch_select_indices"),
        (given.CountsOneMoreAfterCrop, "crop and go on"),
        (given.DropsRowsInBatches, "batch"),
        (given.InARing, "several chunks"),
    ],
)
def test_a_fault_is_found_by_its_use_and_shown_in_lines_that_make_the_cache(model, cache, use):
    run = one(model, cache, use)
    assert run.word == "wrong"
    assert f"past_key_values={cache.__name__}(" in pasted(run)
    assert one(model, cache, "rows(0)+feed(9)+feed(3,1)").word == "right"


def test_the_whole_audit_says_what_a_cache_offers_and_what_is_wrong(model):
    sound = audited(model, "static")
    assert not sound.exit_code, sound
    missing = {check.name: check.detail for check in sound.checks if check.status == "not run"}
    assert "no row was moved" in missing["batch_select_indices"]
    assert "crop and go on" in missing
    calls = ",".join(USES[use] for use in ("reorder_cache", "beam search"))
    verdict = audited(model, given.ReordersKAlone, programs=2, calls=calls)
    assert verdict.exit_code == 1
    assert [check.name for check in wrong(verdict)] == ["reorder_cache", "beam search"]
    # The model's own cache is right in them.
    assert "the model's own cache" not in str(verdict)


def test_a_cache_that_loses_is_excused_only_where_it_is_said_to(model):
    """Wrong in plain decoding is a bug, whatever the cache is called; declared, its uses are held against itself."""
    undeclared = audited(model, given.Eighths, programs=2)
    assert undeclared.exit_code == 1
    assert "lossy='yes'" in str(undeclared)
    declared = audited(model, given.Eighths, lossy="yes", programs=20)
    assert not declared.exit_code, declared
    assert "loses something, as it is said to" in str(declared)
    assert "the same cache without the use" in str(declared)
    run = one(model, given.EighthsReorderingKAlone, "reorder_cache", lossy=True)
    assert run.word == "wrong"
    assert "from the same cache without this use" in run.why
    assert "for ids in text.split(" in pasted(run)
    assert one(model, given.Eighths, "rows(0+0)+feed(6)+feed(2,1)+again()+feed(6)+feed(2,1)", lossy=True).word == "right"


def test_a_cache_of_sixteen_bits_is_held_against_the_plain_forward_where_its_casts_are_lifted(model):
    asked = GivenCache(cache_named(given.Half), True)
    adapter = kv.wrap(model)
    assert not asked.subject(adapter).lossy
    assert "loses nothing here" in asked.notes[0]
    with_casts = asked.subject(adapter, (torch.float32,))
    assert with_casts.lossy
    assert "loses something" in asked.notes[0]
    assert run_program(with_casts, program_named(USES["reorder_cache"])).word == "right"
    undeclared = GivenCache(cache_named(given.Half)).subject(adapter, (torch.float32,))
    assert run_program(undeclared, program_named("rows(0)+feed(9)+feed(3,1)")).word == "wrong"


def test_transformers_fp8_cache_is_held_against_itself_and_cannot_take_positions_back(model):
    """transformers#45510, #48700: crop and row moves of quantised layers act on what is not quantised yet."""
    assert one(model, "quantized(8,fp8)", "rows(0+0)+feed(9)+reorder(1+0)+feed(3,1)").word == "right"
    run = one(model, "quantized(8,fp8)", "crop and go on")
    assert run.word == "wrong"
    assert "IndexError" in run.why
    # What raised in the middle of a program is no property of the forward without a cache.
    assert one(model, "quantized(8,fp8)", "rows(0+0)+feed(6)+select(1+0)+feed(2,1)").word == "wrong"


def test_quantos_cache_takes_positions_back_wrongly(model):
    pytest.importorskip("optimum.quanto")
    run = one(model, "quantized(4)", "crop and go on")
    assert run.word == "wrong"
    assert "QuantizedCache('quanto', model.config, nbits=4)" in pasted(run)
    assert one(model, "quantized(4)", "rows(0+4)+feed(12)+reorder(1+0)+feed(3,1)").word == "right"
    # Its groups of 64 numbers are no row of 9 positions.
    assert one(model, "quantized(4)", "rows(0+0)+feed(9)+feed(3,1)").word == "refused"
    assert one(model, "quantized(4)", "rows(0)+feed(6)+fork(2)+feed(2,1)").word == "refused"


def test_what_no_cache_is_or_fits_is_said_in_a_sentence(model):
    with pytest.raises(InputError, match="holds the keys and values of one run: give its class"):
        kv.audit(model, cache=transformers.DynamicCache())
    with pytest.raises(InputError, match="lossy='yes' was given, and no cache"):
        kv.audit(model, lossy="yes")
    with pytest.raises(InputError, match="kvinterp's own"):
        kv.audit(model, cache="preallocated")
    with pytest.raises(InputError, match="only programs run on it"):
        kv.audit(model, cache=given.Copying, checks="none")
    with pytest.raises(UnsupportedError, match="between a GPU and the host"):
        kv.audit(model, cache="offloaded")


def test_the_command_asks_about_a_class_of_ones_own(tmp_path, monkeypatch):
    """It lies in the current folder, which a command that is a script elsewhere does not look into by itself."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != HERE])
    monkeypatch.delitem(sys.modules, "given_caches")
    monkeypatch.chdir(HERE)
    asked = ("audit", "zoo:gqa2-mini", "--cache", "given_caches:ReordersKAlone", "--programs", "17")
    made = kvinterp(*asked, "--out", tmp_path / "out")
    assert made.exit_code == 1, made.output
    assert "reorder_cache is wrong" in made.stdout
    assert (tmp_path / "out" / "verdict.json").exists()
    refused("no cache was given", "audit", "zoo:gqa2-mini", "--lossy")
