"""Two functions of what is no decoder that kvinterp wraps: a module of one's own, an
encoder-decoder, a prompt with an image.

``full(ids)`` gives the logits without a cache, ``step(ids, cache)`` those of new positions and the
cache behind them; programs of a cache run on them as on anybody's own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.program import Program, Rows
from kvinterp.auditing.programs.sourced import EncoderDecoderSubject, PromptSubject
from kvinterp.auditing.programs.subject import Subject, row_draw
from kvinterp.common.checks import given_list
from kvinterp.errors import InputError, KvinterpError, reason, shown
from kvinterp.models import Adapter
from kvinterp.models.inputs import token_ids
from kvinterp.models.native import copied

FAR = (255, 509)
"""Prompts whose next tokens cross 256 columns, and fill 512: a cache of code of one's own may well
hold no more.
"""
REACHES = (*FAR, 511, 1023, 1100, 2047, 4095)
"""With ``reach``: over the sizes that caches are made of."""
FOLLOWS = (
    "what runs on this model does not follow a cast ({}), so programs were judged in its own dtype"
)
QUICK = 40
"""A forward that is gone further from takes this part of all seconds at most."""


def subject_of(model: Any, inputs: Any = None) -> Subject | None:
    """What programs run on, of a module that :func:`kvinterp.wrap` does not take; None where it
    cannot be asked either.

    Args:
        model: The module.
        inputs: What the encoder of an encoder-decoder reads, by name.
    """
    if not isinstance(model, nn.Module):
        return None
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return _encoder_decoder(model, inputs)
    return None if hasattr(config, "to_dict") else _module(model)


def texts_of(subject: Subject, prompts: Any) -> tuple[tuple[int, ...], ...]:
    """What the texts of rows begin with: prompts as token ids.

    Raises:
        InputError: They are none.
    """
    expected = "a list of prompts, each a list of token ids: nothing here knows a tokenizer"
    given, texts = given_list("prompts", prompts, expected), list[tuple[int, ...]]()
    for prompt in given:
        ids = None if isinstance(prompt, str) else token_ids(prompt)
        if not ids or not all(0 <= token < subject.known for token in ids):
            raise InputError(
                f"prompts holds {shown(prompt)}: expected token ids from 0 to {subject.known - 1}, at least one; nothing here "
                "knows a tokenizer."
            )
        texts.append(tuple(ids))
    return tuple(texts) or ((),)


def decoded(length: int, steps: int) -> Program:
    """A prompt of a length, behind which tokens are fed singly."""
    return Program(Rows((0,)), (Feed(length), Feed(steps, 1)))


def decoded_far(subject: Subject, steps: int, seconds: float, reach: str) -> list[Program]:
    """Decodes over lengths that the plain forward takes quickly, as far as it goes, and over the
    end of its context.

    Args:
        subject: The code; its context is found by trying, where the device survives what is too
            long.
        steps: Tokens that are fed singly behind each prompt.
        seconds: Of the processor that all programs may take: a forward takes a small part of them
            at most.
        reach: ``"yes"``: however long a forward takes.
    """
    last, draw = 0, row_draw(0, 0)
    text = [subject.token(draw) for _ in range((REACHES if reach == "yes" else FAR)[-1] + steps)]
    # An index that a GPU does not have ends all of its work.
    lengths = [*(FAR if reach == "no" else REACHES)] if not torch.cuda.is_initialized() else []
    for n, length in enumerate(lengths):
        began = time.process_time()
        if not _runs(subject, text[: length + steps]):
            low, high = last + steps if n else 0, length + steps
            while high - low > 1:
                low, high = (
                    (middle, high)
                    if _runs(subject, text[: (middle := (low + high) // 2)])
                    else (low, middle)
                )
            subject.context, lengths = low, [*lengths[:n], *[low - steps] * (low > steps + last)]
            subject.notes.append(f"the forward without a cache takes {low} tokens at most")
            break
        last = length
        if reach == "no" and time.process_time() - began > seconds / QUICK:
            lengths = lengths[: n + 1]
            break
    subject.context = (
        max(subject.context, last + steps) if lengths[-1:] == [last] else subject.context
    )
    subject.max_columns = min(subject.max_columns, subject.context)
    return [decoded(length, steps) for length in lengths]


def _runs(subject: Subject, text: list[int]) -> bool:
    try:
        return bool(len(subject.alone(text)) == len(text))
    except Exception:  # It is longer than the code takes.
        return False


def _module(model: nn.Module) -> FunctionSubject | None:
    """A module whose forward takes token ids and a cache, and returns logits and the cache: found
    by trying.
    """
    if len(inspect.signature(model.forward).parameters) < 2:
        return None
    model_copy = copied(model).eval()
    ids = torch.tensor([[1, 2, 3]], device=next((p.device for p in model_copy.parameters()), None))
    try:
        with torch.no_grad():
            logits, cache = model_copy(ids, None)
            again, _ = model_copy(ids[:, :1], cache)
    except Exception:  # It is called otherwise: kv.wrap says what is taken.
        return None
    shapes = [
        one.shape[:-1] for one in (logits, again) if isinstance(one, Tensor) and one.dim() == 3
    ]
    if cache is None or shapes != [(1, 3), (1, 1)]:
        return None
    yours = "model is yours: full = lambda ids: model(ids, None)[0]; step = model"
    name = type(model).__name__
    return FunctionSubject(
        lambda ids: model_copy(ids, None)[0], model_copy, name=name, device=ids.device, yours=yours
    )


def _encoder_decoder(model: nn.Module, inputs: Any = None) -> EncoderDecoderSubject:
    """In float64 with casts lifted, or where the model does not run so, as it is."""
    try:
        return EncoderDecoderSubject(model, inputs)
    except KvinterpError:
        raise
    except Exception as error:
        try:
            found = EncoderDecoderSubject(model, inputs, ())
        except Exception:
            # What it raises in either says more of the model than of a cast.
            raise error from None
        found.notes.append(FOLLOWS.format(reason(error)))
        return found


def behind(adapter: Adapter, prompts: Any, inputs: Any) -> PromptSubject:
    """A decoder behind prompts that hold more than text: each row begins with one of its own.

    Args:
        adapter: The model.
        prompts: One prompt or several, as token ids.
        inputs: Tensors by name, as the model's own forward takes them (``pixel_values``, ...), of
            one prompt; or a list of such, one a prompt.

    Raises:
        InputError: They are none.
    """
    given = [inputs] if isinstance(inputs, Mapping) else inputs
    named = isinstance(given, list | tuple) and all(
        isinstance(one, Mapping) and one and all(isinstance(name, str) for name in one)
        for one in given
    )
    ids = (
        [token_ids(one) for one in prompts]
        if isinstance(prompts, Sequence) and not isinstance(prompts, str)
        else []
    )
    if not named or not adapter.plain or not ids or not all(ids) or len(ids) != len(given):
        raise InputError(
            "inputs was given: expected a dictionary of what a transformers model's forward gets besides tokens, beside one "
            "prompt as token ids: kv.audit(model, [ids], inputs={...}); or a list of them, one a prompt."
        )
    texts = [list(one) for one in ids if one]
    try:
        return PromptSubject(adapter, texts, given)
    except KvinterpError:
        raise
    except Exception as error:
        try:
            found = PromptSubject(adapter, texts, given, ())
        except Exception:
            # What it raises in either says more of the model than of a cast.
            raise error from None
        found.notes.append(FOLLOWS.format(reason(error)))
        return found
