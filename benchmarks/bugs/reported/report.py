"""A public report: where, when, the symptom in our words, the fault rebuilt small, and a plain loop that shows it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from bank.small import small as built
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Report:
    """What somebody reported.

    Args:
        link: Repository and number; several where one fault was reported twice.
        date: Of the first of them, year and month; empty where it isn't known.
        symptom: In our words.
        build: Makes a small model; with the fault, where it is asked to.
        shows: How far apart a plain loop finds the two ways, of the largest logit.
        blind: Whether it was found and rebuilt by somebody who had not read the audit.
        use: A part of the name of the use that has to be wrong, where the model has faults of its own besides.
    """

    link: str
    date: str
    symptom: str
    build: Callable[[bool], Any]
    shows: Callable[[Any], float]
    blind: bool = True
    use: str = ""


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """A model of somebody's own: `full(ids)` and `step(ids, cache)`."""

    full: Callable[[Tensor], Tensor]
    step: Callable[[Tensor, Any], tuple[Tensor, Any]]


def small(kind: str, **config: Any) -> nn.Module:
    """A small model of a type, in eval mode."""
    return built(kind, **config)


def changed(kind: str, change: Callable[..., None], fault: bool, **config: Any) -> nn.Module:
    """A small model whose class's forward has its arguments changed first, where a cache is filled."""
    model = small(kind, **config)
    own = type(model).forward

    @functools.wraps(own)
    def forward(self: Any, input_ids: Any = None, past_key_values: Any = None, **given: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            change(input_ids, past_key_values, given)
        return own(self, input_ids=input_ids, past_key_values=past_key_values, **given)

    if fault:
        type(model).forward = forward  # type: ignore[method-assign]
    return model


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def of_steps(*parts: int) -> Callable[[Any], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, sum(parts))
        want, given, got = model(ids, use_cache=False).logits, {}, []
        for part in ids.split(parts, 1):
            out = model(part, use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given = {name: getattr(out, name)}
            got.append(out.logits)
        return apart(torch.cat(got, 1), want)

    return shows


def of_chunks(size: int = 2, pads: int = 3, columns: int = 8) -> Callable[[Any], float]:
    """A left-padded prompt prefilled in chunks by generate(), against the row alone without a cache."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns)
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        more = {"prefill_chunk_size": size, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(padded, attention_mask=mask, max_new_tokens=1, do_sample=False, **more)
        return apart(made.logits[0], model(ids, use_cache=False).logits[:, -1])

    return shows


def of_generate(columns: int = 9, pads: int = 0, new: int = 8, beams: int = 1, **options: Any) -> Callable[[Any], float]:
    """generate() with such options against a greedy loop without a cache (beams: against use_cache=False): 1.0 if they differ."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns)
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": beams}
        more = {name: option(model) if callable(option) else option for name, option in options.items()}
        if beams > 1:
            given |= {"num_return_sequences": beams, "output_scores": True, "return_dict_in_generate": True}
            cached, plain = (model.generate(padded, use_cache=use, **given).sequences_scores for use in (True, False))
            return apart(cached, plain)
        got = model.generate(padded, attention_mask=mask, **given, **more)[:, pads:]
        for _ in range(new):
            logits = model(ids, use_cache=False).logits[:, -1]
            logits[:, 2] = -torch.inf  # the end, which min_new_tokens forbids
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return float(not torch.equal(got, ids))

    return shows


def of_pads(pads: int = 4, columns: int = 7, new: int = 3) -> Callable[[Any], float]:
    """A left-padded row with its mask and positions, then single tokens, against the row alone without a cache."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns + new)
        want = model(ids, use_cache=False).logits
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        told = "position_ids" in inspect.signature(type(model).forward).parameters
        given, got, done = {}, [], 0
        for part in padded.split([pads + columns] + [1] * new, 1):
            end = done + part.shape[1]
            if told:
                given["position_ids"] = positions[:, done:end]
            out = model(part, attention_mask=mask[:, :end], use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given[name], done = getattr(out, name), end
            got.append(out.logits)
        return apart(torch.cat(got, 1)[:, pads:], want)

    return shows
