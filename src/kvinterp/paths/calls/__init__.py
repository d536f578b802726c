"""How the tokens of a path reach the model: each plan in a file of its own, found by :mod:`registry`."""

from kvinterp.paths.calls.base import Call
from kvinterp.paths.calls.registry import CALLS, call_named

__all__ = ["CALLS", "Call", "call_named"]
