"""jaxtyping names for recurring tensors, so that one shape has one name everywhere.

``*batch`` stands for any leading axes: steps, layers, heads, positions, or none. Within one
signature equal names must have equal sizes; beartype checks it under pytest where
KVINTERP_SIGNATURES is 1, and nowhere else.
"""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Float64
from torch import Tensor

#: Next-token logits, before the softmax.
Logits: TypeAlias = Float[Tensor, "*batch vocab"]

#: A residual stream at any site of any layer.
Residual: TypeAlias = Float[Tensor, "*batch width"]

#: Attention probabilities of one query over its keys; they sum to one up to the rounding of their
#  dtype.
Pattern: TypeAlias = Float[Tensor, "*batch key"]

#: Queries, keys, values or attention outputs, one vector a head.
HeadVectors: TypeAlias = Float[Tensor, "*batch head_dim"]

#: One number of a metric for each element of the batch.
Measure: TypeAlias = Float64[Tensor, "*batch"]

#: One yes or no for each element of the batch.
Flag: TypeAlias = Bool[Tensor, "*batch"]
