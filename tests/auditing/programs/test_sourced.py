"""Encoder-decoders, each row with a source of its own: sound ones are right, and each fault is found by a program."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.bart.modeling_bart import BartAttention

import kvinterp as kv
from kvinterp.auditing.own_code import behind
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.sourced import EncoderDecoderSubject
from kvinterp.errors import InputError

SIZES = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3,
}  # fmt: skip


def bart():
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(**SIZES, max_position_embeddings=64, forced_eos_token_id=None)).eval()


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def whisper():
    torch.manual_seed(0)
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 3}
    sizes = {**SIZES, "max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8}
    config = WhisperConfig(**sizes, **tokens, begin_suppress_tokens=None, suppress_tokens=None)
    return WhisperForConditionalGeneration(config).eval()


def came(subject, program):
    run = Run(subject, program_named(program))
    run.word, run.why = run.run()
    return run


PROGRAMS = (
    "rows(0+0+0)+feed(6)+feed(2,1)",
    "rows(0+0+0)+feed(6)+reorder(2+0+1)+feed(2,1)",
    "rows(0+0,seed=1)+feed(4)+repeat(2)+feed(2,1)",
    "rows(0+0)+generate(4,3)+feed(2,1)",
    "rows(0+0)+generate(4,4,beams)",
    "rows(0)+feed(4)+generate(2,3,new)",
    "rows(0)+feed(4)+generate(2,3)",
    "rows(0)+feed(6)+crop(2)+feed(2,1)",
    "rows(0+0,cache=static)+feed(4)+request(3)+feed(2,1)",
)


@pytest.mark.parametrize("build", [bart, t5, whisper])
def test_sound_ones_are_right_whatever_is_done_to_their_rows(build):
    subject = EncoderDecoderSubject(build())
    programs = [one for one in PROGRAMS if "beams" not in one or "beams" not in subject.no_generate]
    ran = {program: came(subject, program) for program in programs}
    assert {program: (run.word, run.why) for program, run in ran.items()} == dict.fromkeys(programs, (RIGHT, ""))
    assert all(run.uses for run in ran.values())
    # Each row reads a source of its own.
    first, second = (subject.plain(subject.tensor([[*begin, 20, 21]])) for begin in subject.begins[:2])
    assert not torch.allclose(first, second)


def t5gemma():
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

    torch.manual_seed(0)
    half = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "initializer_range": 0.3,
    }  # fmt: skip
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=half, decoder=half, vocab_size=97)).eval()


@pytest.mark.parametrize("text", ["generate(4,2)+feed(2,1)", "feed(4)+generate(2,2,new)+feed(1)", "generate(4,4,beams)"])
def test_generate_is_told_the_positions_that_the_forwards_beside_it_are(text):
    """It numbers a decoder's columns, pads and all: a step that was told a token's own number went on from another."""
    subject = EncoderDecoderSubject(t5gemma())
    assert subject.offset == 0
    run = came(subject, f"rows(0+2,seed=1)+{text}")
    assert (run.word, run.why) == (RIGHT, "")


def test_pads_of_the_decoder_are_hidden():
    subject = EncoderDecoderSubject(t5())
    assert came(subject, "rows(0+4)+feed(9)+feed(3,1)").word == RIGHT
    assert came(subject, "rows(0+6)+feed(4)+feed(8)+feed(2,1)").word == RIGHT


class FirstRow(BartAttention):
    """Once it is cached, every row reads the first row's source."""

    def forward(self, hidden_states, key_value_states=None, past_key_values=None, **more):
        if key_value_states is not None and past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            layer.values = layer.values[:1].expand_as(layer.values).contiguous()
        return super().forward(hidden_states, key_value_states=key_value_states, past_key_values=past_key_values, **more)


class Stays(EncoderDecoderCache):
    """The keys of the source stay where they are when rows move."""

    def reorder_cache(self, beam_idx):
        self.self_attention_cache.reorder_cache(beam_idx)


class Decoder(type(bart().model.decoder)):
    """Makes such a cache."""

    def forward(self, *given, **more):
        out = super().forward(*given, **more)
        if type(out.past_key_values) is EncoderDecoderCache:
            out.past_key_values.__class__ = Stays
        return out


def test_faults_between_rows_are_found_and_pasted():
    model = bart()
    model.model.decoder.layers[1].encoder_attn.__class__ = FirstRow
    run = came(EncoderDecoderSubject(model), "rows(0+0)+feed(4)+feed(1)")
    assert run.word == WRONG
    lines = pasted(run)
    assert "**source(0, 1)" in lines
    assert "EncoderDecoderCache" not in lines
    moved = bart()
    moved.model.decoder.__class__ = Decoder
    run = came(EncoderDecoderSubject(moved), "rows(0+0)+feed(4)+reorder(1+0)+feed(1)")
    assert run.word == WRONG
    assert "reorder_cache" in pasted(run)


def test_a_generate_of_its_own_is_not_asked_to_sample():
    """Whisper's raises when it returns several rows a prompt, with a cache and without: it was said to be the cache."""
    run = came(EncoderDecoderSubject(whisper()), "rows(0)+generate(1,1,sampled)")
    assert run.word != WRONG, run.why


def test_what_the_encoder_reads_can_be_given():
    model = whisper()
    heard = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(5))
    verdict = kv.audit(model, inputs={"input_features": heard}, programs=12, lengths=(5,))
    assert verdict.exit_code == 0, str(verdict)
    assert "20 + 20 encoded positions" in str(verdict)
    with pytest.raises(InputError, match="has no input_features"):
        kv.audit(model, inputs={"pixel_values": heard})


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**text, initializer_range=0.2),
        vision_config=CLIPVisionConfig(**seen, image_size=8, patch_size=4),
        image_token_id=90,
    )
    return LlavaForConditionalGeneration(config).eval()


PROMPT = [5, 90, 90, 90, 90, 7, 8]
IMAGE = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(4))}


def test_each_row_begins_with_an_image_of_its_own():
    subject = behind(kv.wrap(llava()), [PROMPT], IMAGE)
    programs = (
        "rows(0+4+1)+feed(3)+feed(2,1)",
        "rows(0+0)+feed(17,5)+reorder(1+0)+feed(2,1)",
        "rows(0+0,seed=1)+generate(3,3)+feed(2,1)",
        "rows(0+0)+generate(3,4,beams)",
        "rows(0,cache=static)+feed(3)+request(4)+feed(2)+crop(1)+feed(2,1)",
    )
    ran = {program: came(subject, program) for program in programs}
    assert {program: (run.word, run.why) for program, run in ran.items()} == dict.fromkeys(programs, (RIGHT, ""))
    first, second = (subject.plain(subject.tensor([[*begin[:-1], 20, 21]])) for begin in subject.begins[:2])
    assert torch.equal(first, second)  # Without its last token nothing tells which image a prompt has.
    first, second = (subject.plain(subject.tensor([[*begin, 20, 21]])) for begin in subject.begins[:2])
    assert not torch.allclose(first[:, : len(PROMPT)], second[:, : len(PROMPT)])


def test_another_batch_holds_whole_images():
    """Its columns were cut within an image: on a model that counts an image's tokens it raised, as if the model were wrong."""
    model, seen = llava(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
    assert came(behind(kv.wrap(model), [PROMPT], IMAGE), "rows(0+4)+request(3,1,rows=same)+feed(9)").word == RIGHT
    counts = {int((row == 90).sum()) for ids in seen for row in ids if len(row) > 1}
    assert counts <= {0, 4}


class Told(type(llava().model)):
    """What is told as positions takes the place of others that it makes itself, as with M-RoPE."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **more):
        length = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(length, length + input_ids.shape[1])[None] * (
                2 if bool((input_ids == 90).any()) else 1
            )
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **more)


def test_positions_are_not_told_where_an_image_makes_others():
    model = llava()
    model.model.__class__ = Told
    subject = behind(kv.wrap(model), [PROMPT], IMAGE)
    assert subject.offset is None
    assert behind(kv.wrap(llava()), [PROMPT], IMAGE).offset == 0


def test_a_row_that_reads_the_first_rows_image_is_found_and_pasted():
    model = llava()

    class First(type(model.model)):
        def get_image_features(self, *given, **more):
            out = super().get_image_features(*given, **more)
            if self.cached:
                out.pooler_output = [out.pooler_output[0]] * len(out.pooler_output)
            return out

        def forward(self, *given, use_cache=None, **more):
            self.cached = bool(use_cache)
            return super().forward(*given, use_cache=use_cache, **more)

    model.model.__class__ = First
    run = came(behind(kv.wrap(model), [PROMPT], IMAGE), "rows(0+0)+feed(3)+feed(1)")
    assert run.word == WRONG, run.why
    assert "**source(" in pasted(run)


def test_the_command_audits_an_encoder_decoder(tmp_path, monkeypatch):
    """Of a user's own code, or a checkpoint whose class is named, as for any other model."""
    from typer.testing import CliRunner

    from kvinterp.cli import app

    (tmp_path / "of_mine.py").write_text(
        "import torch, transformers as tf\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        f"    return tf.BartForConditionalGeneration(tf.BartConfig(**{SIZES!r}, max_position_embeddings=64))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ran = CliRunner().invoke(app, ["audit", "of_mine:make", "--out", "out", "--checks", "none", "--lengths", "5"])
    assert ran.exit_code == 0, ran.output
    assert "behind 24 + 17 + 11 encoded positions" in ran.output


def test_the_images_of_a_filled_cache_are_not_handed_to_generate_again():
    """Its lines read them once more, which raises where the new tokens hold none: they were withheld, and the fault had none."""
    model = llava()

    class Unnumbered(type(model)):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"position_ids": None}

    model.__class__ = Unnumbered
    run = came(behind(kv.wrap(model), [PROMPT], IMAGE), "rows(1)+feed(1)+generate(1,1,whole)")
    assert run.word == WRONG, run.why
    lines = pasted(run)
    assert lines.count("**source(") == 2, lines
    assert "model.generate(torch.tensor(" in lines
