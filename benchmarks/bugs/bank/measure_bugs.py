"""Plain transformers code, no kvinterp: what each planted bug does to the logits, and that the full forward keeps its bits.

Run as `python benchmarks/bugs/bank/measure_bugs.py [name ...]`; prints one line a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from bank.bug import Bug
from bank.bugs import BUGS
from bank.measure import cached, relative, steps, tokens


def _full(model: nn.Module, ids: Tensor, **more: Tensor) -> Tensor:
    return model(ids, use_cache=False, **more).logits


def _chunks(model: nn.Module, length: int) -> float:
    ids = tokens(length + 12)
    return relative(cached(model, ids, length, 4, 4, 4), _full(model, ids))


def _batch(model: nn.Module, length: int, step: int = 1) -> float:
    end = length + 3 * step
    ids = torch.cat((tokens(end), tokens(end, seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    full = _full(model, ids, attention_mask=mask, position_ids=positions)
    cache, found = None, []
    for start, stop in [(0, length), *((at, at + step) for at in range(length, end, step))]:
        out = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        found.append(out.logits)
    return relative(torch.cat(found, 1)[:, length:], full[:, length:])


def _generate(model: nn.Module, length: int) -> float:
    out = model.generate(
        tokens(length),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    return relative(torch.stack(out.logits, 1)[0, :], _full(model, out.sequences[:, :-1])[0, length - 1 :])


def _static(model: nn.Module, length: int) -> float:
    ids = tokens(length + 3)
    cache, found = StaticCache(config=model.config, max_cache_len=length + 8), []
    for chunk in ids.split([length, 1, 1, 1], dim=1):
        found.append(model(chunk, past_key_values=cache, use_cache=True).logits)
    return relative(torch.cat(found, 1), _full(model, ids))


def _crop(model: nn.Module, length: int) -> float:
    ids = tokens(length + 6)
    cache = DynamicCache(config=model.config)
    model(ids[:, : length + 3], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    found = [model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(length, length + 3)]
    return relative(torch.cat(found, 1), _full(model, ids[:, : length + 3])[:, length:])


def _reorder(model: nn.Module, length: int) -> float:
    ids = torch.cat((tokens(length + 3), tokens(length + 3, seed=1)))
    cache = DynamicCache(config=model.config)
    model(ids[:, :length], past_key_values=cache, use_cache=True)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids = ids.flip(0)
    found = [model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(length, length + 3)]
    return relative(torch.cat(found, 1), _full(model, ids)[:, length:])


def _padded_chunks(model: nn.Module, length: int) -> float:
    return _batch(model, length, 4)


def _sixteen(model: nn.Module, length: int) -> float:
    ids = tokens(length + 16)
    return relative(cached(model, ids, length, 16), _full(model, ids))


def _thirds(model: nn.Module, length: int) -> float:
    """Three rows, each of which takes the place of the next: a permutation that is not its own inverse."""
    ids, order = torch.cat([tokens(length + 3, seed) for seed in range(3)]), torch.tensor([2, 0, 1])
    return _moved(model, ids, ids[order], length, lambda cache: cache.reorder_cache(order))


def _repeat(model: nn.Module, length: int) -> float:
    ids = torch.cat([tokens(length + 3, seed) for seed in range(2)])
    return _moved(model, ids, ids.repeat_interleave(2, 0), length, lambda cache: cache.batch_repeat_interleave(2))


def _select(model: nn.Module, length: int) -> float:
    ids, rows = torch.cat([tokens(length + 3, seed) for seed in range(3)]), torch.tensor([2, 1])
    return _moved(model, ids, ids[rows], length, lambda cache: cache.batch_select_indices(rows))


def _mask(model: nn.Module, length: int) -> float:
    """Steps that are given a mask of ones and no positions."""
    ids, cache, found = tokens(length + 3), None, []
    for start, stop in [(0, length), *((at, at + 1) for at in range(length, length + 3))]:
        mask = torch.ones(1, stop, dtype=torch.long)
        out = model(ids[:, start:stop], attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    return relative(torch.cat(found, 1), _full(model, ids))


def _long(model: nn.Module, length: int) -> float:
    return steps(model, 140)


def _end(model: nn.Module, length: int) -> float:
    return steps(model, 253)


def _one(model: nn.Module, length: int) -> float:
    return steps(model, 1)


def _twice(model: nn.Module, length: int) -> float:
    """Steps after another request was served."""
    steps(model, length - 2)
    return steps(model, length)


def _moved(model: nn.Module, ids: Tensor, then: Tensor, length: int, move: Callable[[DynamicCache], None]) -> float:
    cache = DynamicCache(config=model.config)
    model(ids[:, :length], past_key_values=cache, use_cache=True)
    move(cache)
    found = [model(then[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(length, length + 3)]
    return relative(torch.cat(found, 1), _full(model, then)[:, length:])


def _generate_padded(model: nn.Module, length: int) -> float:
    ids = torch.cat((tokens(length), tokens(length, seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    mask = torch.cat((mask, mask.new_ones(2, 3)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    full = _full(model, out.sequences[:, :-1], attention_mask=mask, position_ids=positions)
    return relative(torch.stack(out.logits, 1), full[:, length - 1 :])


PATHS = {
    "steps": steps,
    "chunks": _chunks,
    "batch": _batch,
    "generate": _generate,
    "static": _static,
    "crop": _crop,
    "reorder": _reorder,
    "sixteen": _sixteen,
    "padded-chunks": _padded_chunks,
    "thirds": _thirds,
    "repeat": _repeat,
    "generate-padded": _generate_padded,
    "select": _select,
    "mask": _mask,
    "long": _long,
    "end": _end,
    "one": _one,
    "twice": _twice,
}


@torch.no_grad()
def measured(bug: Bug) -> tuple[float, float, bool]:
    """The path's relative difference before planting and after, and whether the full forward kept its bits."""
    path = PATHS[bug.path]
    ids = tokens(bug.lengths[-1] + 4)
    model = bug.build()
    before, full = path(model, bug.lengths[-1]), _full(model, ids)
    with pytest.MonkeyPatch.context() as monkeypatch:
        bug.plant(model, monkeypatch)
        return before, path(model, bug.lengths[-1]), torch.equal(full, _full(model, ids))


def _main(names: list[str]) -> None:
    for name, bug in BUGS.items():
        if names and name not in names:
            continue
        try:
            before, after, kept = measured(bug)
            print(
                f"{name:44} {bug.architecture:18} clean {before:.0e} planted {after:.1e} full forward {'kept' if kept else 'CHANGED'}",
                flush=True,
            )
        except Exception as error:
            print(f"{name:44} {bug.architecture:18} FAILED {type(error).__name__} {str(error)[-150:]}", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
