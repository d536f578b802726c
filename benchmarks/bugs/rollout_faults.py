"""The half of the bank of mismatch files (benchmarks/rollouts.py) whose writer had not read the judge's causes.

Each engine is made by hand of a transformers model: what it gives for sampled texts, each with a prompt of one length. Of each: a
pattern of the cause that would be right to name (empty where nothing could be), and one of the tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

Rows = Callable[[Any, list[list[int]], int], list[np.ndarray]]
LLAMA, GEMMA, SMOL = "zoo:llama64-mini", "zoo:gemma2-mini", "real:smollm2-135m"
EVERY = "all 6 sequences are off"
REPLY = "from their first generated token on|from position 4[89]|from generated token [12] |all 6 sequences are off"
"""A file that has no log-probs of the prompts begins with the reply."""


@torch.no_grad()
def logits_of(model: Any, ids: list[int], **more: Any) -> Tensor:
    return model(torch.tensor([ids]), **more).logits[0]


def chosen(logits: Tensor, ids: list[int]) -> np.ndarray:
    rows = logits.double().log_softmax(-1)
    return np.array([np.nan, *(float(rows[t - 1, ids[t]]) for t in range(1, len(ids)))])


def alone(engine: Callable[[Any, list[int], int], np.ndarray]) -> Rows:
    return lambda model, texts, cut: [engine(model, ids, cut) for ids in texts]


def of_logits(change: Callable[[Tensor, list[int], int], Tensor]) -> Rows:
    """What stands behind the logits: replies alone have log-probs."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        found = chosen(change(logits_of(model, ids).double(), ids, cut), ids)
        found[:cut] = np.nan
        return np.where(np.isfinite(found), found, np.nan)

    return alone(engine)


def behind(edit: Callable[[list[int]], list[int]]) -> Rows:
    """The engine saw another prompt; its replies' log-probs are right for that one."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        seen = edit(ids[:cut])
        own = chosen(logits_of(model, [*seen, *ids[cut:]]), [*seen, *ids[cut:]])
        return np.r_[np.full(cut, np.nan), own[len(seen) :]]

    return alone(engine)


def counts(ids: list[int], cut: int, at: int, size: int) -> Tensor:
    return torch.bincount(torch.tensor(ids[cut : at + 1] or [0]), minlength=size) * (at >= cut)


def penalty(frequency: float, presence: float) -> Rows:
    """OpenAI's penalties, over what was generated."""

    def change(logits: Tensor, ids: list[int], cut: int) -> Tensor:
        for at in range(cut - 1, len(ids) - 1):
            seen = counts(ids, cut, at, logits.shape[1])
            logits[at] -= frequency * seen + presence * (seen > 0)
        return logits

    return of_logits(change)


def biased(bias: float) -> Rows:
    """A logit bias on the likeliest token that no text drew, as one that is banned is never drawn."""

    def rows(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
        logits = [logits_of(model, ids).double() for ids in texts]
        mass = torch.cat([row.softmax(-1) for row in logits]).mean(0)
        mass[sorted({token for ids in texts for token in ids})] = 0
        token, found = int(mass.argmax()), []
        for row, ids in zip(logits, texts, strict=True):
            row[:, token] += bias
            found.append(np.r_[np.full(cut, np.nan), chosen(row, ids)[cut:]])
        return found

    return rows


def likeliest(share: int) -> Rows:
    """In every so-manieth sequence the log-prob of the likeliest token, not of the one drawn."""

    def rows(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
        found = []
        for number, ids in enumerate(texts):
            logits = logits_of(model, ids).double().log_softmax(-1)
            row = chosen(logits, ids)
            if number % share == 0:
                row[1:] = logits[:-1].amax(-1).numpy()
            found.append(np.r_[np.full(cut, np.nan), row[cut:]])
        return found

    return rows


def cached(prompt: Callable[[Any], Any], spoil: Callable[[Any, int], None] = lambda cache, cut: None) -> Rows:
    """The prompt's cache by another model or with something done to it, the reply from it a token at a time."""

    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        cache = DynamicCache(config=model.config)
        parts = [prompt(model)(torch.tensor([ids[:cut]]), past_key_values=cache).logits[0]]
        spoil(cache, cut)
        parts += [model(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in ids[cut:]]
        row = chosen(torch.cat(parts), ids)
        return np.r_[np.full(cut, np.nan), row[cut:]]

    return alone(engine)


def noisy(share: float) -> Callable[[Any], Any]:
    def older(model: Any) -> Any:
        other, draw = copy.deepcopy(model), torch.Generator().manual_seed(5)
        for parameter in other.parameters():
            parameter.data += share * parameter.float().std() * torch.randn(parameter.shape, generator=draw).to(parameter)
        return other

    return older


def fp8_keys(cache: Any, cut: int) -> None:
    """The prompt's keys alone, with a scale a tensor that brings the largest to 448."""
    for layer in cache.layers:
        scale = layer.keys.float().abs().amax() / 448
        layer.keys.copy_(((layer.keys.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(layer.keys))


def shuffled_blocks(cache: Any, cut: int) -> None:
    """Two blocks of 16 rows of the prompt have changed places in every layer: attention adds them up in another order."""
    for layer in cache.layers:
        for held in (layer.keys, layer.values):
            first = held[:, :, :16].clone()
            held[:, :, :16] = held[:, :, 16:32]
            held[:, :, 16:32] = first


def masked(hidden: Callable[[Tensor, Tensor, int], Tensor]) -> Rows:
    """A forward with further pairs of query and key hidden: ``hidden(query, key, cut)``."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        at = torch.arange(len(ids))
        query, key = at[:, None], at[None]
        mask = torch.zeros(len(ids), len(ids), dtype=next(model.parameters()).dtype)
        mask = mask.masked_fill((key > query) | hidden(query, key, cut), torch.finfo(mask.dtype).min)
        row = chosen(logits_of(model, ids, attention_mask=mask[None, None]), ids)
        return np.r_[np.full(cut, np.nan), row[cut:]]

    return alone(engine)


def context_shift(size: int) -> Rows:
    """A context of so many rows is full: the older half is dropped, again and again (llama.cpp, n_keep = 0)."""

    def hidden(query: Tensor, key: Tensor, cut: int) -> Tensor:
        half = size // 2
        dropped = torch.where(query >= size, ((query - size) // half + 1) * half, 0)
        return key < dropped

    return masked(hidden)


def padded(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """Every third text stands behind seven pads that nobody masked."""
    pad = getattr(model.config, "pad_token_id", None) or 0
    found = []
    for number, ids in enumerate(texts):
        front = [pad] * (7 * (number % 3 == 0))
        row = chosen(logits_of(model, [*front, *ids]), [*front, *ids])[len(front) :]
        found.append(np.r_[np.full(cut, np.nan), row[cut:]])
    return found


def shifted(by: int, which: set[int]) -> Rows:
    def rows(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
        found = []
        for number, ids in enumerate(texts):
            row = chosen(logits_of(model, ids), ids)
            if number in which:
                row = np.r_[row[:1], row[1 + by :], row[1 : 1 + by]]
            found.append(row)
        return found

    return rows


def both(temperature: float, share: float) -> Rows:
    """A cache in 8 bits, and log-probs after a temperature."""

    class Cache(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
            keys, values = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
            return super().update(keys, values, *args, **more)

    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        logits = model(torch.tensor([ids]), past_key_values=Cache()).logits[0].double() / temperature
        return np.r_[np.full(cut, np.nan), chosen(logits, ids)[cut:]]

    return alone(engine)


@torch.no_grad()
def hot_sound(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """Sampled warm, and the log-probs are the model's own."""
    return [np.r_[np.full(cut, np.nan), chosen(logits_of(model, ids), ids)[cut:]] for ids in texts]


def files(file: Callable[..., Any]) -> Iterator[Any]:
    """Yields the files; ``file`` takes name, rows, dtype, said, place and model."""
    kinds: list[tuple[str, Rows, Rows, str, str, str]] = [
        ("a prompt without its last newline", behind(lambda p: [*p[:-1]]), behind(lambda p: [p[0], *p[2:]]),
         "prompt|prefix|tokens before", REPLY, LLAMA),
        ("a prompt with another beginning", behind(lambda p: p[20:]), behind(lambda p: [p[0], *p[4:]]),
         "prompt|prefix|tokens before", REPLY, LLAMA),
        ("frequency penalty", penalty(0.5, 0.0), penalty(0.05, 0.0), "frequency", REPLY, LLAMA),
        ("presence penalty", penalty(0.0, 1.0), penalty(0.0, 0.1), "presence", REPLY, LLAMA),
        ("a token that is banned", biased(-100.0), biased(-1.0), "bias|banned", "", LLAMA),
        ("the likeliest token's log-prob", likeliest(1), likeliest(3), "likeliest", REPLY + "|sequences 1 and 4", LLAMA),
        ("a prefix of older weights", cached(noisy(0.05)), cached(noisy(0.01)), "prefix|older|prompt", REPLY, LLAMA),
        ("keys of the prompt in fp8", cached(lambda m: m, fp8_keys), cached(lambda m: m, fp8_keys), "fp8", REPLY, LLAMA),
        ("context shift at 64", context_shift(64), context_shift(96), "older half is dropped|shift|window", "from position (6[3-6]|9[5-8])", LLAMA),
        ("pads in front", padded, padded, "pad|prompt|prefix", "sequences 1 and 4", LLAMA),
        ("three rows further on in some", shifted(3, {2, 5}), shifted(2, {3}), "shifted", "sequences 3 and 6|sequence 4 ", LLAMA),
        ("fp8 cache and a temperature", both(0.7, 1.0), both(0.9, 1.0), "fp8.*temperature|temperature.*fp8", REPLY, LLAMA),
        ("a reply that sees no prompt", masked(lambda q, k, cut: (q >= cut) & (k < cut)),
         masked(lambda q, k, cut: (q >= cut) & (k < cut // 4)), "prompt|prefix|window", REPLY, LLAMA),
        ("a prompt with another beginning, gemma", behind(lambda p: p[20:]), behind(lambda p: [p[0], *p[4:]]),
         "prompt|prefix|tokens before", REPLY, GEMMA),
    ]  # fmt: skip
    for name, large, small, said, place, model in kinds:
        yield file(f"held out: {name}, large", large, "float32", said, place, model)
        yield file(f"held out: {name}, near the null", small, "bfloat16", said, place, model)
    # Keys are rotated before they are cached, so that rows may lie in any order.
    exchanged = cached(lambda m: m, shuffled_blocks)
    yield file("sound, held out: two blocks of the prompt's cache exchanged", exchanged, "float32", model=LLAMA)
    for dtype in ("float32", "float16", "bfloat16"):
        for model in (LLAMA, GEMMA):
            yield file(f"sound, held out: replies alone in {dtype} of {model}", hot_sound, dtype, model=model)
            plain = cached(lambda m: m)
            yield file(f"sound, held out: a token at a time in {dtype} of {model}", plain, dtype, model=model)
    yield file(f"held out: a prompt without its last newline, of {SMOL}, large", behind(lambda p: [*p[:-1]]), "float32",
               "prompt|prefix|tokens before", REPLY, SMOL)  # fmt: skip
    yield file(f"held out: frequency penalty, of {SMOL}, large", penalty(0.5, 0.0), "bfloat16", "frequency", REPLY, SMOL)
    yield file(f"sound, held out: replies alone in bfloat16 of {SMOL}", hot_sound, "bfloat16", model=SMOL)
