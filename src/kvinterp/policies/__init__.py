"""WHAT IS DONE TO K AND V: one file a policy.

A policy is a frozen dataclass with up to two methods, each from tensors to tensors: ``write`` sees the keys and values of
new positions before the cache keeps them, ``read`` sees everything attention is about to read. Neither changes its
arguments in place. Which layer, and which absolute positions, the :class:`Place` says.

The prefill attends to the tensors it has just made, before ``write``: step 0 is the same on both paths whatever the policy.
A recompute path keeps nothing, so there ``write`` changes what attention reads at every position.
"""

from kvinterp.policies.base import Chain, Place, Policy
from kvinterp.policies.identity import Identity
from kvinterp.policies.registry import POLICIES, policy_named

__all__ = ["POLICIES", "Chain", "Identity", "Place", "Policy", "policy_named"]
