"""WHAT IS DONE TO K AND V: one file a policy.

A policy is a frozen dataclass that overrides what it needs of :class:`Policy`, each from tensors to tensors: ``write`` sees the
keys and values of new positions before the cache keeps them, ``read`` sees what is held before attention reads it, ``keep``
says which rows stay once attention has read, and ``see`` hears the sites it asked for. Which layer, and which absolute
positions, the :class:`Place` says. One with state hands out a fresh twin in ``start``; several make a :class:`Chain`, ``a+b``.

In the prefill attention reads what it has just computed, before ``write`` and ``read``: step 0 is the same on both paths
whatever the policy. With ``cached[prefill=stored]`` it reads what the cache keeps, as llama.cpp does. A recompute path keeps
nothing, so there ``write`` and ``read`` change what attention reads at every position.
"""

from kvinterp.policies.base import Chain, Place, Policy
from kvinterp.policies.identity import Identity
from kvinterp.policies.registry import POLICIES, policy_named
