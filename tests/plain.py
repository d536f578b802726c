"""transformers' own decoding loop, as its users write it: it shares nothing with kvinterp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

import kvinterp as kv
from support import PROMPT, Case, assert_bitwise, assert_close

FED = (7, 81, 23, 23, 60)
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def forced_run(model: Any, path: Any, prompt: Sequence[int] = PROMPT, **more: Any) -> kv.Trace:
    """Runs a path that is fed FED after a prompt, with every step's logits."""
    settings = {"max_new_tokens": len(FED) + 1, "continuation": FED, "stop": "length", "logits": "keep"} | more
    return kv.run(model, list(prompt), path, **settings)


def plain_steps(model: nn.Module, prompt: Tensor, fed: Sequence[int] = FED, cache: Any = None) -> Iterator[Tensor]:
    """Logits ``[batch, vocab]`` of each step; the model makes its own cache unless one is given, and is given no position and no
    mask."""
    given = {} if cache is None else {"past_key_values": cache}
    output = model(prompt, use_cache=True, **given)
    yield output.logits[:, -1]
    for token in fed:
        row = prompt.new_full((len(prompt), 1), token)
        output = model(row, past_key_values=output.past_key_values, use_cache=True)
        yield output.logits[:, -1]


@torch.no_grad()
def plain_loop(model: nn.Module, prompt: Tensor, fed: Sequence[int] = FED, cache: Any = None) -> Tensor:
    """Those of one text, ``[step, vocab]``."""
    return torch.stack([row[0].clone() for row in plain_steps(model, prompt, fed, cache)])


def prefixes(prompt: Tensor, fed: Sequence[int] = FED) -> Iterator[Tensor]:
    """The whole texts so far at each step, ``[batch, position]``."""
    for step in range(len(fed) + 1):
        yield torch.cat([prompt, prompt.new_tensor([list(fed[:step])] * len(prompt))], 1)


@torch.no_grad()
def plain_recompute(model: nn.Module, prompt: Tensor, fed: Sequence[int] = FED) -> Tensor:
    """Logits ``[step, vocab]`` of the whole prefix at every step, without a cache."""
    return torch.stack([model(tokens, use_cache=False).logits[0, -1].clone() for tokens in prefixes(prompt, fed)])


@torch.no_grad()
def thinned_loop(model: nn.Module, prompt: Sequence[int], choose: Callable[..., Tensor]) -> tuple[Tensor, list[Any]]:
    """A decode with explicit positions and masks; after every forward ``choose`` says which rows of a layer stay.

    Args:
        model: A model with eager attention, in float64.
        prompt: Token ids; then come those of FED.
        choose: Given the layer, the positions of its rows ``[1, kv_head, row]``, the pattern of the forward and the keys held,
            the rows that stay, ``[1, kv_head, kept]``.

    Returns:
        Logits of every step, and for every step and layer the positions that attention read, with K and V.
    """
    tokens, cache, held, logits, read = torch.tensor([list(prompt)]), DynamicCache(), None, [], []
    for step in range(len(FED) + 1):
        feed = tokens if step == 0 else torch.tensor([[FED[step - 1]]])
        begun = 0 if step == 0 else len(prompt) + step - 1
        places = torch.arange(begun, begun + feed.shape[1])
        rows = 0 if held is None else held[0].shape[-1]
        mask = torch.zeros(1, 1, feed.shape[1], rows + feed.shape[1], dtype=torch.float64)
        mask[..., rows:] = torch.full((feed.shape[1], feed.shape[1]), torch.finfo(torch.float32).min).triu(1)
        out = model(feed, position_ids=places[None], attention_mask=mask, past_key_values=cache, use_cache=True,
                    output_attentions=True)  # fmt: skip
        logits.append(out.logits[0, -1])
        layers = cache.layers
        new = places.expand(1, layers[0].keys.shape[1], -1)
        held = [new if held is None else torch.cat([held[at], new], 2) for at in range(len(layers))]
        read.append([(held[at], layer.keys, layer.values) for at, layer in enumerate(layers)])
        for at, layer in enumerate(layers):
            index = choose(at, held[at], out.attentions[at], layer.keys).sort(-1).values
            for name in ("keys", "values"):
                whole = getattr(layer, name)
                setattr(layer, name, whole.gather(2, index[..., None].expand(*index.shape, whole.shape[3])))
            held[at] = held[at].gather(2, index)
    return torch.stack(logits), read


def check_thinned(load: Callable[..., Any], case: Case, choose: Callable[..., Tensor], path: Any) -> kv.Trace:
    """Positions, K and V, and logits of a path that lets go of rows are those of :func:`thinned_loop`, in float64 to rounding."""
    model, plain = (load(each).at(torch.float64) for each in (case, Case(case.model, "native", "eager")))
    wanted, read = thinned_loop(plain.model, PROMPT, choose)
    found = forced_run(model, path, record="kv", positions="all")
    # transformers' eager attention has a softmax in float32.
    assert_close(found.logits, wanted, "logits", ("step", "vocab"), relative=1e-5)
    for layer in range(plain.facts.layers):
        for step, (positions, keys, values) in enumerate(layers[layer] for layers in read):
            at = f"layer {layer}, step {step}"
            assert torch.equal(found.records["cache_positions", layer][step], positions[0]), at
            for site, tensor in (("cache_k", keys), ("cache_v", values)):
                assert_close(found.records[site, layer][step], tensor[0], f"{site}, {at}", relative=1e-6)
    return found


def check_law_10(
    model: nn.Module, prompt: Sequence[int], path: Any = "cached", cache: Callable[[], Any] | None = None
) -> None:
    """Both paths of a native model have the bits of the plain loops."""
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    plain = {
        path: lambda: plain_loop(model, tokens, cache=None if cache is None else cache()),
        "recompute": lambda: plain_recompute(model, tokens),
    }
    for each, loop in plain.items():
        given = forced_run(model, each, prompt).logits
        assert_bitwise(given.cpu(), loop().cpu(), f"logits, {each}", ("step", "vocab"))


def check_law_10_under(backend: str, model: nn.Module, prompt: Sequence[int]) -> None:
    """As :func:`check_law_10` with one backend of SDPA; skips where this device refuses it, and says with which words."""
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    with sdpa_kernel(BACKENDS[backend]):
        try:
            plain_loop(model, tokens)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            pytest.skip(f"{tokens.device.type} has no {backend} kernel for this: {str(error).splitlines()[0]}")
        check_law_10(model, prompt)
