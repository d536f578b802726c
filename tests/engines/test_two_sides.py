"""A file with an engine's and a trainer's log-probs: both are judged, and the first line names the side that is off."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
import writing_given

import kvinterp as kv
from command_line import kvinterp
from kvinterp.metrics.rollouts import rollout_intervals, rollout_statistics

LENGTH, CUT = 64, 28


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    text = [t for prompt in kv.load_prompts("natural:16") for t in model.encode(prompt.text)[1:]]
    return [[model.tokenizer.bos_token_id, *text[n * LENGTH : (n + 1) * LENGTH - 1]] for n in range(2)]


@torch.no_grad()
def jumping(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """Positions that jump without a mask: transformers takes what follows for another text, which does not see the first one."""
    places = torch.arange(len(ids))[None] + 3 * (torch.arange(len(ids)) >= cut)
    return planted.chosen(model(torch.tensor([ids]), position_ids=places, use_cache=False).logits[0], ids)


@torch.no_grad()
def folded(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """The same with a mask, which hides nothing: the prompt is seen from further away."""
    mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=model.dtype).triu(1)[None, None]
    places = torch.arange(len(ids))[None] + (torch.arange(len(ids)) >= cut)
    return planted.chosen(model(torch.tensor([ids]), position_ids=places, attention_mask=mask).logits[0], ids)


WRONG = {
    "unseen": (jumping, "the reply computed without its prompt, as where positions jump without a mask, reproduces it"),
    "moved": (folded, "positions +1 behind the prompt reproduces it"),
}


def file_of(model: Any, texts: Any, engine: Any, trainer: Any, place: Path) -> Path:
    """NeMo-RL's lines, of replies alone; of one side each column."""

    def line(ids: list[int]) -> dict[str, Any]:
        rows = [side(model.model, ids, CUT) for side in (engine, trainer)]
        # As it asks for them: by position and token.
        sides = [[{token: row[at]} for at, token in enumerate(ids)][1:] for row in rows]
        return writing_given.nemo(ids, CUT, *sides)

    return writing_given.lines([line(ids) for ids in texts], place)


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_the_side_that_is_off_is_named_and_why(fault: str, side: str, model: Any, texts: Any, tmp_path: Path) -> None:
    """A trainer with wrong positions ended PASS, rounding, exit code 0."""
    wrong, says = WRONG[fault]
    sides = {"engine": planted.prefill, "trainer": planted.decode} | {side: wrong}
    found = kv.audit(model, against=file_of(model, texts, *sides.values(), tmp_path / "a.jsonl"), declared="float32")
    first, why, other, *_ = found.reading.splitlines()
    assert first.startswith(f"FAIL  bug  the {side}'s log-probs"), str(found)
    assert says in why
    assert why.startswith(f"  the {side}: bug: ")
    assert other.startswith(f"  the {'trainer' if side == 'engine' else 'engine'}: rounding: ")
    assert found.exit_code == 1
    assert [row["verdict"] for row in found.given["sides"]] == ["bug" if side == name else "rounding" for name in sides]
    # Trainer over engine, whichever is off.
    assert abs(found.given["statistics"]["all"]["k1"]) > 1e-3
    assert f"mean {found.given['statistics']['all']['rollout_is_seq_mean']:.3g}" in found.reading
    null = found.given["statistics"]["null"]
    assert f"of rounding in float32 alone {null['k3']:.2g}" in found.reading
    assert null["k3"] < 1e-9 < found.given["statistics"]["all"]["k3"]


def test_where_both_are_right_both_are_said(model: Any, texts: Any, tmp_path: Path) -> None:
    file = file_of(model, texts, planted.prefill, planted.decode, tmp_path / "a.jsonl")
    made = kvinterp("audit", "zoo:llama64-mini", "--against", file, "--dtype", "float32", "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("PASS  rounding  both the engine's and the trainer's log-probs")
    found = kv.load(tmp_path / "out")
    assert {"engine", "trainer", "ours", "trainer_difference"} <= set(found.tokens)
    assert "both the engine's and the trainer's" in html.unescape((tmp_path / "out" / "report.html").read_text())


def test_what_cannot_be_told_of_one_side_is_no_pass(model: Any, texts: Any, tmp_path: Path) -> None:
    def hardly(model: Any, ids: list[int], cut: int) -> np.ndarray:
        row = planted.prefill(model, ids, cut)
        row[cut + 5 :] = 0.0
        return row

    found = kv.audit(
        model, against=file_of(model, texts, planted.prefill, hardly, tmp_path / "a.jsonl"), declared="float32"
    )
    assert found.reading.startswith("CANNOT TELL  cannot-tell  the trainer's log-probs"), str(found)
    assert found.exit_code == 3


def test_a_zero_is_judged_where_ours_is_zero_and_else_left_out_and_said(model: Any, tmp_path: Path) -> None:
    """A peaked model gives 0.0 itself: a third of its tokens were dropped as "the file has: 0.0 29 times"."""
    lines, certain, wrong = [], 0, 0
    for prompt in kv.load_prompts("arithmetic:2"):
        made = kv.run(model, prompt, "recompute@float64", max_new_tokens=40, stop="length", logits="keep")
        row = made.logits.log_softmax(-1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0].numpy().copy()
        row[row > -6e-8] = 0.0
        doubtful = np.flatnonzero(row < -1e-3)[:2]
        certain, wrong = certain + int((row == 0).sum()), wrong + len(doubtful)
        row[doubtful] = 0.0
        nothing, ids = [0.0] * len(made.prompt), [*made.prompt, *made.tokens]
        mask = [*[0] * len(made.prompt), *[1] * len(row)]
        lines.append({"token_ids": ids, "token_loss_mask": mask, "generation_logprobs": [*nothing, *row.tolist()]})
    assert min(certain, wrong) > 1, "the model is not peaked, and the test shows nothing"
    found = kv.audit(model, against=writing_given.lines(lines, tmp_path / "a.jsonl"), declared="float32")
    assert found.exit_code == 0, str(found)
    assert found.given["zeros"] == {"kept": certain, "left_out": wrong}
    assert f"{certain} of those judged are exactly 0, and so is ours, rounded." in found.reading
    assert f"In {wrong} places the file holds exactly 0 where ours is -" in found.reading
    prompts = sum(line["token_loss_mask"].count(0) for line in lines)
    assert f"{prompts} of the prompts and {wrong} of the replies." in found.reading


def test_intervals_cover_what_they_say_and_few_sequences_have_none() -> None:
    """Sequences of unequal length, each with a shift of its own: intervals at 95% miss the true mean in about one of 20."""
    draw, covered = np.random.default_rng(0), 0
    for repeat in range(60):
        sequence = np.repeat(np.arange(30), draw.integers(20, 60, 30))
        shift = draw.normal(0, 0.02, 30)[sequence]
        trainer = -1 + shift + draw.normal(0, 0.05, len(sequence))
        low, high = rollout_intervals(trainer, np.full(len(sequence), -1.0), sequence, 0.025, repeat)["k1"]
        covered += low <= 0 <= high
    assert 52 <= covered <= 60
    few = rollout_intervals(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]), np.array([0, 1]))
    assert all(np.isnan(ends).all() for ends in few.values())


def test_clipped_shares_are_those_of_their_definitions() -> None:
    found = rollout_statistics(np.log([0.5, 0.5, 0.9, 0.3]), np.log([0.5, 0.3, 0.2, 0.29]), np.array([0, 0, 1, 2]))
    assert found["ratio_clipfrac"] == 0.5
    assert found["tis_clipfrac"] == 0.25
    assert found["gspo_clipfrac"] == 1
    assert found["sequence_masked"] == pytest.approx(1 / 3)
