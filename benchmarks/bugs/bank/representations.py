"""Models whose decode holds keys and values in another form than their prompt does, and computes the same function.

Each is a Llama whose attention, where it reads a cache, turns, shifts or reorders what it was given before it attends: what an
engine does that keeps rotated or latent keys, a ring buffer, or another order. Of the inner tensors none need be equal; of what
a block returns nothing may differ but by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bank.small import small

Form = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Tensor, Any, Callable[[Tensor], Tensor]]]
"""Of queries, keys, values and mask those of another form, and what brings the result back."""


def _turn(width: int, like: Tensor) -> Tensor:
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.to(like)


def _as_it_is(made: Tensor) -> Tensor:
    return made


def turned(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Queries and keys turned by the same rotation, as before a quantised cache."""
    turn = _turn(q.shape[-1], q)
    return q @ turn, k @ turn, v, mask, _as_it_is


def shifted(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Keys with the same vector added to each, which softmax cannot see."""
    return q, k + 0.5, v, mask, _as_it_is


def latent(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Values turned, and the result turned back."""
    turn = _turn(v.shape[-1], v)
    return q, k, v @ turn, mask, lambda made: made @ turn.T


def reordered(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Keys, values and mask in another order."""
    order = torch.randperm(k.shape[-2], generator=torch.Generator().manual_seed(k.shape[-2])).to(k.device)
    return q, k[..., order, :], v[..., order, :], None if mask is None else mask[..., order], _as_it_is


def rolled(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Keys, values and mask as a ring holds them that began elsewhere."""
    found = (None if each is None else each.roll(3, dim) for each, dim in ((k, -2), (v, -2), (mask, -1)))
    return q, *found, _as_it_is


FORMS: dict[str, Form] = {form.__name__: form for form in (turned, shifted, latent, reordered, rolled)}


# The same with an error, in layer 1 alone ---------------------------------------------------------------------------------


def turned_but_the_first_key(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """One key is not turned."""
    turn = _turn(q.shape[-1], q)
    return q @ turn, torch.cat([k[..., :1, :], k[..., 1:, :] @ turn], -2), v, mask, _as_it_is


def turned_back_the_wrong_way(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """The result is turned on instead of back."""
    turn = _turn(v.shape[-1], v)
    return q, k, v @ turn, mask, lambda made: made @ turn


def shifted_but_the_newest_key(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """A vector that softmax would not see if every key had it."""
    return q, torch.cat([k[..., :-1, :] + 0.05, k[..., -1:, :]], -2), v, mask, _as_it_is


def reordered_but_two_values(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
    """Two values change places with each other."""
    q, k, v, mask, back = reordered(q, k, v, mask)
    order = torch.arange(v.shape[-2])
    order[:2] = order[:2].flip(0)
    return q, k, v[..., order, :], mask, back


WRONG: dict[str, Form] = {
    form.__name__: form
    for form in (
        turned_but_the_first_key,
        turned_back_the_wrong_way,
        shifted_but_the_newest_key,
        reordered_but_two_values,
    )
}


# In parts, as kernels for long caches attend ------------------------------------------------------------------------------

PARTS = 4


def split(query: Tensor, key: Tensor, value: Tensor, scaling: float, stale: bool = False) -> Tensor:
    """Attention of one query over parts of the keys, each with a maximum of its own; ``stale``: the last takes another's."""
    heads = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(heads, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    most, total, made = [], [], []
    for keys, values in zip(scores.tensor_split(PARTS, -1), value.tensor_split(PARTS, -2), strict=True):
        if not keys.shape[-1]:
            continue
        most.append(keys.amax(-1, keepdim=True))
        weights = (keys - most[-1]).exp()
        total.append(weights.sum(-1, keepdim=True))
        made.append(weights @ values)
    if stale and len(most) == PARTS:
        most[-1] = most[-2]
    highest = torch.stack(most).amax(0)
    scales = [(each - highest).exp() for each in most]
    return sum(m * s for m, s in zip(made, scales, strict=True)) / sum(t * s for t, s in zip(total, scales, strict=True))


def _attention(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, Any]:
    back, rows, keys = _as_it_is, query.shape[-2], key.shape[-2]
    # Without a mask the kernel itself counts keys, in the order in which they come.
    if rows < keys and (rows == 1 or mask is not None) and (name not in WRONG or module.layer_idx == 1):
        if name.startswith("split"):
            if mask is None:
                stale = name == "split_stale" and module.layer_idx == 1
                return split(query, key, value, given["scaling"], stale).transpose(1, 2), None
        else:
            query, key, value, mask, back = (FORMS | WRONG)[name](query, key, value, mask)
    made, weights = sdpa_attention_forward(module, query, key, value, mask, **given)
    return back(made), weights


def attend(model: nn.Module, name: str) -> nn.Module:
    """Gives a model attention whose decode has this form."""
    AttentionInterface.register(f"sdpa_{name}", partial(_attention, name))
    AttentionMaskInterface.register(f"sdpa_{name}", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(f"sdpa_{name}")
    return model


def build(name: str, **config: Any) -> nn.Module:
    """A model whose decode has this form."""
    return attend(small("llama", **config), name)


# Mathematics that is inexact, or exact to the bit --------------------------------------------------------------------------


def _smoothed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    """A causal convolution of the values: by FFT of a prompt, as a sum of one token, as long convolutions are served."""
    rows, length = query.shape[-2], value.shape[-2]
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    decay = 0.7 ** torch.arange(length, device=value.device, dtype=value.dtype)
    if rows == 1:
        made = (value * decay.flip(0)[:, None]).sum(-2, keepdim=True)
    else:
        wide = value.float() if value.dtype != torch.float64 else value
        taps = torch.fft.rfft(decay.to(wide.dtype), 2 * length)
        made = torch.fft.irfft(torch.fft.rfft(wide, 2 * length, dim=-2) * taps[:, None], 2 * length, dim=-2)[
            ..., :length, :
        ]
        made = made.to(value.dtype)
    return made[..., -rows:, :].transpose(1, 2), None


def _summed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    """Sums of the values of up to nine tokens, exact for whole numbers."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    made = sum(nn.functional.pad(value, (0, 0, back, 0))[..., : value.shape[-2], :] for back in range(9))
    return made[..., -query.shape[-2] :, :].transpose(1, 2), None


def _own_attention(name: str, function: Any, **config: Any) -> nn.Module:
    AttentionInterface.register(f"sdpa_{name}", function)
    AttentionMaskInterface.register(f"sdpa_{name}", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = small("llama", **config)
    model.set_attn_implementation(f"sdpa_{name}")
    # They count what is on the cache, and read the empty slots of a static one.
    model._can_compile_fullgraph = False
    return model


def convolved(**config: Any) -> nn.Module:
    """A model of long convolutions."""
    return _own_attention("convolved", _smoothed, **config)


class _Nothing(nn.Module):
    def forward(self, stream: Tensor) -> Tensor:
        return torch.zeros_like(stream)


def whole_numbers(**config: Any) -> nn.Module:
    """A model all of whose numbers are small whole ones, in every precision."""
    model: Any = _own_attention("summed", _summed, **config)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            few = torch.rand(weight.shape, generator=drawn) < 0.05
            weight.copy_(few * torch.randint(-1, 2, weight.shape, generator=drawn))
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
        layer.mlp = _Nothing()
    model.model.norm = nn.Identity()
    return model


# A residual that the next block adds ----------------------------------------------------------------------------------------


def deferred(wrong: float = 1.0, **config: Any) -> nn.Module:
    """A model whose blocks, where they decode, return what they add, and leave the rest to be added by the next.

    Args:
        wrong: What block 1 takes of what it was left, 1 where it is right.
        config: As for :func:`small`.
    """
    model: Any = small("llama", **config)
    left: list[Tensor] = []
    for number, layer in enumerate(model.model.layers):
        layer.__class__ = _Deferring
        layer.left, layer.takes = left, wrong if number == 1 else 1.0
        layer.last = number == len(model.model.layers) - 1
    return model


class _Deferring(LlamaDecoderLayer):
    def forward(self, stream: Tensor, *args: Any, **given: Any) -> Tensor:
        whole = stream + self.takes * self.left.pop() if self.left else stream
        made = super().forward(whole, *args, **given)
        if stream.shape[1] > 1 or self.last:
            return made
        self.left.append(whole)
        return made - whole
