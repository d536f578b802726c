"""How the zoo was trained: ``make zoo`` makes it again, on one CPU thread a model.

Documents are generated (60% arithmetic, 20% restate, 20% instructions), start with BOS and end with EOS. Four batches
at a time are sorted by length, so that little is padding. The loss is the completion's cross-entropy plus a tenth of
the prompt's. The layers' matrices are trained with Muon, which brought the loss after 240 steps of ``mistral-mini``
from AdamW's 0.67 to 0.45 for a tenth more time. ``evaluate`` measures the shipped files again and ``card`` writes
``CARD.md`` from their ``training.json``.

Source of Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
Scalable for LLM Training" (the scale of its steps).
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers
import typer
from jaxtyping import Float, Int
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from kvinterp.data import split_of, stream
from kvinterp.errors import InputError
from kvinterp.models import zoo
from zoo.build import build_model, build_tokenizer
from zoo.card import write_card
from zoo.measure import accuracy, turn

__all__ = ["Plan", "app", "batches", "save", "tokenizer", "train"]

MIXTURE = {"arithmetic": 0.6, "restate": 0.2, "instructions": 0.2}


@dataclass(frozen=True)
class Plan:
    """What a training run is made of; the first four checkpoints were made with the same one.

    Attributes:
        steps: Optimizer steps.
        horizon: Steps after which the cosine reaches zero; a run may stop before.
        batch: Documents a step.
        rate: Peak learning rate of Muon, reached after ``warmup`` steps and let down by a cosine.
        embedding_rate: The same of AdamW, for embeddings and norms.
        warmup: Steps of linear warmup.
        decay: Weight decay of the layers' matrices.
        clip: Largest gradient norm.
        prompt_weight: Weight of a prompt token in the loss, where a completion token has 1.
        seed: Seed of weights and data.
        save_every: Steps between intermediate checkpoints.
        turned: Share of the restatements whose text and restatement change places, so that a model can restate what it
            wrote itself, again and again.
        compute: The dtype of the products, forward and backward; weights and their updates are float32.
    """

    steps: int = 1500
    horizon: int = 1500
    batch: int = 64
    rate: float = 3e-3
    embedding_rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.02
    clip: float = 1.0
    prompt_weight: float = 0.1
    seed: int = 7
    save_every: int = 300
    turned: float = 0.0
    compute: str = "float32"


PLANS = {
    "gemma2-mini": (Plan(steps=1000, horizon=1700, save_every=200),),
    # The second begins with the float16 weights that the first one wrote, and an optimizer that remembers nothing.
    "llama64-mini": (
        Plan(steps=800, horizon=800, batch=32, warmup=80, turned=0.5, compute="bfloat16"),
        Plan(steps=1500, horizon=1500, batch=32, warmup=60, turned=0.5, compute="bfloat16", seed=8, save_every=500),
    ),
}
"""The plans of each checkpoint, one after another; one plan, the same for all, unless it stands here."""


def documents(seed: int, turned: float = 0.0) -> Iterator[tuple[str, str]]:
    """Yields prompt and completion of the training mixture without end; see :class:`Plan` for ``turned``."""
    rng, coin = Random(seed), Random(seed)
    streams = {task: stream(task, seed + 1 + index, "train") for index, task in enumerate(MIXTURE)}
    while True:
        task = rng.choices(tuple(MIXTURE), tuple(MIXTURE.values()))[0]
        example = next(streams[task])
        if task == "restate" and coin.random() < turned:
            example = turn(example)
            if split_of(example.prompt.text) != "train":
                continue
        yield example.prompt.text, example.completion


def tokenizer() -> PreTrainedTokenizerFast:
    """Trains the one tokenizer of the zoo on 12,000 training documents."""
    return build_tokenizer(prompt + completion for prompt, completion in islice(documents(1), 12_000))


Batch = tuple[Int[torch.Tensor, "document position"], Float[torch.Tensor, "document position"]]


def batches(words: PreTrainedTokenizerFast, plan: Plan) -> Iterator[Batch]:
    """Yields token ids and loss weights, padded on the right; a weight is that of predicting the token it stands at."""
    source, rng = documents(plan.seed, plan.turned), Random(plan.seed)
    while True:
        chosen = list(islice(source, 4 * plan.batch))
        prompts = words([prompt for prompt, _ in chosen])["input_ids"]
        answers = words([answer for _, answer in chosen], add_special_tokens=False)["input_ids"]
        rows = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        groups = [rows[start : start + plan.batch] for start in range(0, len(rows), plan.batch)]
        rng.shuffle(groups)
        for group in groups:
            width = max(len(prompt) + len(answer) + 1 for prompt, answer in group)
            tokens = torch.full((len(group), width), words.pad_token_id)
            weights = torch.zeros(len(group), width)
            for row, (prompt, answer) in enumerate(group):
                whole = [*prompt, *answer, words.eos_token_id]
                tokens[row, : len(whole)] = torch.tensor(whole)
                weights[row, 1 : len(prompt)] = plan.prompt_weight
                weights[row, len(prompt) : len(whole)] = 1.0
            yield tokens, weights


def _rate(step: int, plan: Plan) -> float:
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    done = min(1.0, (step - plan.warmup) / max(1, plan.horizon - plan.warmup))
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _loss(model: PreTrainedModel, batch: Batch, compute: str) -> Float[torch.Tensor, ""]:
    tokens, weights = batch
    balance = getattr(model.config, "router_aux_loss_coef", 0.0)
    with torch.autocast("cpu", getattr(torch, compute), enabled=compute != "float32"):
        told = {"output_router_logits": True} if balance else {}
        output = model(input_ids=tokens, use_cache=False, **told)
        logits = output.logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    loss = (each * wanted).sum() / wanted.sum()
    # Without it two experts come to do all the work (Fedus et al. 2021, "Switch Transformers", section 2.2).
    return loss + balance * output.aux_loss if balance else loss


def train(name: str, out: Path, plan: Plan, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains one checkpoint and writes it, its tokenizer and its ``training.json``.

    Args:
        name: One of the zoo's names.
        out: The folder the checkpoint's own folder is made in.
        plan: Steps, batch, rate and seed.
        earlier: What an earlier plan gave, whose weights lie in ``out`` and are gone on with.

    Returns:
        What ``training.json`` holds.
    """
    words = tokenizer()
    model = build_model(name, plan.seed).train()
    if earlier is not None:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32).state_dict())
    optimizers = _optimizers(model, plan)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: _rate(step, plan)) for each in optimizers]
    began, tokens, longest, losses = time.monotonic(), 0, 0, []
    progress = tqdm(islice(batches(words, plan), plan.steps), total=plan.steps, desc=name, mininterval=10)
    for step, batch in enumerate(progress, start=1):
        loss = _loss(model, batch, plan.compute)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        tokens += int((batch[1] > 0).sum())
        longest = max(longest, batch[0].shape[1])
        losses.append(loss.item())
        if step % plan.save_every == 0 or step == plan.steps:
            seen = {"steps": step, "tokens": tokens, "longest": longest, "minutes": (time.monotonic() - began) / 60}
            record = _joined(earlier, _record(name, model, plan, seen, losses))
            record |= save(model, words, out / name, record, count=200 if step == plan.steps else 50)
            tqdm.write(f"{name} step {step}: loss {record['loss'][-1]}, accuracy {record['accuracy']}")
    return record


def _optimizers(model: PreTrainedModel, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon (torch 2.9 or later) for the matrices of the layers, AdamW for embeddings and norms."""
    named = [(weight.ndim == 2 and "embed" not in key, weight) for key, weight in model.named_parameters()]
    matrices, others = [w for inner, w in named if inner], [w for inner, w in named if not inner]
    return [
        torch.optim.Muon(matrices, lr=plan.rate, weight_decay=plan.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _record(name: str, model: PreTrainedModel, plan: Plan, seen: dict[str, Any], losses: list[float]) -> dict[str, Any]:
    width = max(1, len(losses) // 40)
    means = [sum(losses[start : start + width]) / width for start in range(0, len(losses) - width + 1, width)]
    return {
        "name": name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **seen,
        "minutes": round(seen["minutes"], 1),
        "horizon": plan.horizon,
        "batch": plan.batch,
        "rate": plan.rate,
        "embedding_rate": plan.embedding_rate,
        "seed": plan.seed,
        "prompt_weight": plan.prompt_weight,
        "turned": plan.turned,
        "compute": plan.compute,
        "loss_every": width,
        "loss": [round(mean, 4) for mean in means],
        "mixture": MIXTURE,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }


def _joined(earlier: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """What two plans gave: sums of what is counted, and the last one's choices and losses."""
    if earlier is None:
        return record
    own = ("steps", "batch", "horizon", "seed", "tokens", "minutes", "loss_every", "loss")
    summed = {key: round(earlier[key] + record[key], 1) for key in ("steps", "tokens", "minutes")}
    before = [*earlier.get("before", []), {key: earlier[key] for key in own}]
    return record | summed | {"longest": max(earlier["longest"], record["longest"]), "before": before}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def save(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, place: Path, record: dict[str, Any], count: int
) -> dict[str, Any]:
    """Writes a float16 checkpoint, measures it as read back, and writes ``training.json`` last.

    Args:
        model: The model in training; its own weights stay as they are.
        words: Its tokenizer.
        place: The checkpoint's folder.
        record: What is known of the training.
        count: Heldout problems of each task to measure on.

    Returns:
        The record with ``accuracy`` and ``accuracy_problems``.
    """
    half = type(model)(model.config).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(place)
    words.save_pretrained(place)
    _readable_by_transformers_4(place)
    measured = {"accuracy": measure(place, count), "accuracy_problems": count}
    text = json.dumps(record | measured, indent=1)
    (place / "training.json").write_text(text + "\n", encoding="utf-8")
    return measured


def _readable_by_transformers_4(place: Path) -> None:
    """Adds the names transformers 4 knows the rotary base and the tokenizer's class by; transformers 5 reads both."""
    for file, key, value in (
        ("config.json", "rope_theta", 10000.0),
        ("tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast"),
    ):
        path = place / file
        content = json.loads(path.read_text(encoding="utf-8")) | {key: value}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def measure(place: Path, count: int = 200, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Measures the accuracies of a checkpoint folder, computing in ``dtype`` from its float16 weights."""
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=dtype, attn_implementation="eager", trust_remote_code=False
    ).eval()
    return accuracy(model, AutoTokenizer.from_pretrained(place, trust_remote_code=False), count)


app = typer.Typer(add_completion=False, help="Trains, measures and describes the checkpoints of the zoo.")


class Compute(str, Enum):
    """A dtype that ``evaluate`` can compute in."""

    float32 = "float32"
    float16 = "float16"


Only = Annotated[str | None, typer.Option(help="One checkpoint; otherwise all of them.")]


def _chosen(only: str | None) -> tuple[str, ...]:
    if only is not None:
        try:
            zoo.folder(only)
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
        return (only,)
    return zoo.names()


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    only: Only = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; otherwise over the shipped files.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; otherwise those shipped.")] = None,
) -> None:
    """Trains checkpoints; with a command, does that instead."""
    torch.set_num_threads(1)
    if context.invoked_subcommand is not None:
        return
    target = out or zoo.folder("llama-mini").parent
    for name in _chosen(only):
        record = None
        for plan in PLANS.get(name, (Plan(),)):
            record = train(name, target, replace(plan, steps=steps) if steps else plan, record)
    if out is None:
        write_card()


@app.command()
def evaluate(
    only: Only = None,
    count: Annotated[int, typer.Option(min=1, help="Heldout problems of each task.")] = 200,
    dtype: Annotated[Compute, typer.Option(help="What is computed in, from the float16 weights.")] = Compute.float32,
) -> None:
    """Measures the shipped checkpoints again."""
    for name in _chosen(only):
        measured = measure(zoo.folder(name), count, getattr(torch, dtype.value))
        typer.echo(f"{name} {dtype.value}: " + ", ".join(f"{task} {value:.1%}" for task, value in measured.items()))


@app.command()
def card() -> None:
    """Writes CARD.md from the training.json files."""
    write_card()


if __name__ == "__main__":
    app()
