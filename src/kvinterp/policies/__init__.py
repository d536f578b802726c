"""WHAT IS DONE TO K AND V: one file a policy.

A policy is a frozen dataclass with up to two methods, each from tensors to tensors: ``write`` sees the keys and values of
new positions before the cache keeps them, ``read`` sees everything attention is about to read. Neither changes its
arguments in place. Which layer, and which absolute positions, the :class:`Place` says.
"""

from kvinterp.policies.base import Place, Policy
from kvinterp.policies.identity import Identity
from kvinterp.policies.registry import POLICIES, policy_named

__all__ = ["POLICIES", "Identity", "Place", "Policy", "policy_named"]
