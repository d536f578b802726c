"""WHAT IS DONE TO K AND V: one file a policy.

A policy is a frozen dataclass that overrides methods of :class:`Policy`, which map tensors to
tensors: ``write`` changes the keys and values of new positions before the cache keeps them,
``read`` changes rows of the cache before attention reads them, ``keep`` chooses the rows that stay
after attention has read, and ``see`` gets the sites that the policy names. The :class:`CacheRows` hold
the layer and the absolute positions. A policy with state returns a copy from ``start``; several
make a :class:`ComposedPolicy`, ``a+b``.

In the prefill attention reads the rows it has just computed, before ``write`` and ``read``: step 0
is the same on both paths whatever the policy. With ``cached[prefill=stored]`` it reads what the
cache keeps, as llama.cpp does. A recompute path keeps nothing, so there ``write`` and ``read``
change what attention reads at every position.
"""

from kvinterp.policies.base import CacheRows, ComposedPolicy, Policy
from kvinterp.policies.identity import Identity
from kvinterp.policies.registry import POLICIES, policy_named

Place = CacheRows  # The name by which policies of others import it.
