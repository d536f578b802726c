"""What transformers' own test suite asks of a model's cache, with its tolerances, in float32 as it runs there.

- `create_and_check_decoder_model_past_large_inputs`: three tokens fed at once on a cache, against the whole, allclose with atol 1e-3.
- `GenerationTesterMixin._check_similar_generate_outputs` (assisted decoding, static caches, continued generation): the same tokens, or scores
  up to and including the first other token within atol and rtol 1e-5. Here of generate() with a cache, without one, and on a static cache.
- `test_left_padding_compatibility`: logits of the last token with and without pads, atol and rtol 1e-5.

The suite checks the newest position, or a slice drawn at random; here all that is compared is looked at. What a model does not support
is skipped, as it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bank.detector import Detector, Found
from bank.measure import cached, tokens
from bank.subjects import Subject


def _large_inputs(model: nn.Module, length: int) -> bool:
    ids = tokens(length + 3)
    made, whole = cached(model, ids, length, 3)[:, length:], model(ids, use_cache=False).logits[:, length:]
    return torch.allclose(made, whole, atol=1e-3)


def _generated(model: nn.Module, ids: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, min_new_tokens=10, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True, **how,
    )  # fmt: skip
    return out.sequences[0, ids.shape[1] :], torch.stack(out.scores)[:, 0]


def _similar(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    same = one[0] == other[0]
    if bool(same.all()):
        return True
    first = int(same.int().argmin())
    return torch.allclose(one[1][: first + 1], other[1][: first + 1], atol=1e-5, rtol=1e-5)


def _without_cache(model: nn.Module, length: int) -> bool:
    ids = tokens(length)
    return _similar(_generated(model, ids), _generated(model, ids, use_cache=False))


def _static(model: nn.Module, length: int) -> bool:
    ids = tokens(length)
    return _similar(_generated(model, ids), _generated(model, ids, cache_implementation="static"))


def _left_padding(model: nn.Module, length: int) -> bool:
    ids, pads = tokens(length), 32
    mask = torch.cat((torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)), 1)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    padded = torch.cat((torch.zeros(1, pads, dtype=torch.long), ids), 1)
    alone = model(ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
    try:
        made = model(padded, attention_mask=mask, position_ids=positions).logits[:, -1]
    except TypeError:
        made = model(padded, attention_mask=mask).logits[:, -1]
    return torch.allclose(made, alone, atol=1e-5, rtol=1e-5)


TESTS = {
    "three tokens at once": _large_inputs,
    "generate() without a cache": _without_cache,
    "static cache": _static,
    "left padding": _left_padding,
}


@torch.no_grad()
def _detect(subject: Subject, model: nn.Module) -> Found:
    model = model.float()
    failed, skipped = [], []
    for name, passes in TESTS.items():
        try:
            if not passes(model, max(subject.lengths)):
                failed.append(name)
        # A model that cannot be used so is skipped, with whatever error its code meets first.
        except Exception:
            skipped.append(name)
    said = f"failed: {', '.join(failed) or 'none'}; skipped: {', '.join(skipped) or 'none'}"
    return Found("cannot tell" if len(skipped) == len(TESTS) else "yes" if failed else "no", said)


DETECTORS = (Detector("transformers-tests", "transformers' own cache tests and tolerances, in float32", _detect),)
