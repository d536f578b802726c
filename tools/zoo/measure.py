"""Greedy accuracy of a checkpoint on heldout problems, batched, the same for training's end and for re-measuring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from transformers import PreTrainedModel

from kvinterp.data import TASKS, Example, Prompt

__all__ = ["HELDOUT_SEED", "accuracy", "answer_all", "heldout_prompts", "turn"]

HELDOUT_SEED = 1234
LONGEST_ANSWER = 72


def turn(example: Example) -> Example:
    """Lets text and restatement of a restate example change places; the facts stay."""
    head, text, tail = re.fullmatch(r"(Text: )(.*)(\nIn other words:)", example.prompt.text).groups()  # type: ignore[union-attr]
    prompt = replace(example.prompt, text=head + example.prompt.answer + tail, answer=text)
    return Example(prompt, f" {text}")


def heldout_prompts(task: str, count: int) -> list[Prompt]:
    """Gives the heldout problems that accuracies in the card are measured on."""
    return [example.prompt for example in TASKS[task].generate(count, HELDOUT_SEED, "heldout")]


def accuracy(model: PreTrainedModel, tokenizer: Any, count: int = 200) -> dict[str, float]:
    """Measures the fraction of heldout problems answered right, greedily, for each task.

    Args:
        model: A model in evaluation mode; it computes in the dtype of its weights.
        tokenizer: Its tokenizer.
        count: Problems of each task.
    """
    result = {}
    for task in TASKS:
        prompts = heldout_prompts(task, count)
        completions = answer_all(model, tokenizer, [prompt.text for prompt in prompts])
        right = sum(TASKS[task].score(prompt, text) for prompt, text in zip(prompts, completions, strict=True))
        result[task] = right / count
    return result


def answer_all(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], batch: int = 100) -> list[str]:
    """Completes texts greedily, in batches of like length padded on the left, with the model's own KV cache."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    answers = [""] * len(texts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True, padding_side="left")
        for index, tokens in zip(chosen, _greedy(model, inputs), strict=True):
            answers[index] = tokenizer.decode(tokens, skip_special_tokens=True)
    return answers


@torch.no_grad()
def _greedy(model: PreTrainedModel, inputs: Any) -> Int[torch.Tensor, "batch answer"]:
    width = inputs["input_ids"].shape[1]
    generate: Any = model.generate
    output = generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
    )
    return output[:, width:]
