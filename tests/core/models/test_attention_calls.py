"""Attention is recognised in torch's calls however it is written, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvinterp.models.attention_calls import Fused, Product, Recogniser, Scores, Values

HEADS, ROWS, KEYS, WIDTH = 3, 2, 5, 4


class Listening(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recogniser, self.found = Recogniser(), []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append(self.recogniser.recognise(func, args, kwargs or {}, result))
        return result


def heard(run: Callable[[], Any]) -> list[Any]:
    with Listening() as listening:
        run()
    return [one for one in listening.found if one is not None]


def activations() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, HEADS, ROWS, WIDTH), torch.randn(1, HEADS, KEYS, WIDTH), torch.randn(1, HEADS, KEYS, WIDTH)


def by_matmul(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2) * 0.5).softmax(-1) @ value


def by_bmm(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Heads flattened into the batch for the products, and apart for the softmax, as Falcon and Bloom have them."""
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    bias = torch.zeros(HEADS, ROWS, KEYS)
    scores = torch.baddbmm(bias, batch1=q, batch2=k.transpose(-1, -2)).view(1, HEADS, ROWS, KEYS)
    return torch.bmm(torch.softmax(scores, -1).view(HEADS, ROWS, KEYS), v)


def with_a_sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One more number in the softmax than there are keys, dropped again, as GPT-OSS has it."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = torch.cat([scores, torch.zeros(1, HEADS, ROWS, 1)], -1)
    return torch.matmul(torch.nn.functional.softmax(scores, dim=-1)[..., :-1], value)


def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every argument named: an audit of such a model ended with an IndexError."""
    scores = torch.matmul(input=query, other=key.transpose(-1, -2))
    return torch.matmul(input=torch.softmax(input=scores, dim=-1), other=value)


@pytest.mark.parametrize("attend", [by_matmul, by_bmm, with_a_sink, by_name])
def test_products_with_a_softmax_between_are_attention(attend: Callable[..., Tensor]) -> None:
    query, key, value = activations()
    product, scores, values = heard(lambda: attend(query, key, value))
    assert [type(one) for one in (product, scores, values)] == [Product, Scores, Values]
    assert torch.equal(scores.product.a.flatten(), query.flatten())
    assert torch.equal(scores.product.b.transpose(-1, -2).flatten(), key.flatten())
    assert torch.equal(values.values.flatten(), value.flatten())
    assert values.scores is scores


def test_the_fused_call_is_attention_with_its_mask() -> None:
    query, key, value = activations()
    mask = torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool)
    attend = torch.nn.functional.scaled_dot_product_attention
    named = {"query": query, "key": key, "value": value, "attn_mask": mask}
    calls = (
        lambda: attend(query, key, value, attn_mask=mask),
        lambda: attend(query, key, value, mask),
        lambda: attend(**named),
    )
    for given in calls:
        (found,) = heard(given)
        assert isinstance(found, Fused)
        assert found.mask is mask
        assert found.key is key


def test_weights_and_a_routers_softmax_are_no_attention() -> None:
    hidden, weight = torch.randn(1, ROWS, WIDTH), torch.randn(WIDTH, 7)
    assert heard(lambda: torch.softmax(hidden @ weight, -1)) == []
    a, b = torch.randn(1, ROWS, WIDTH), torch.randn(1, WIDTH, KEYS)
    # As many rows as the product, but of two dimensions: a choice of experts.
    (product,) = heard(lambda: (a @ b, torch.softmax(hidden[0] @ weight, -1)))
    assert isinstance(product, Product)
