"""A router's logits are patched as any other site."""

import pytest
import torch

import kvinterp as kv
from routed import PROMPT, built, router

pytestmark = pytest.mark.bits
HOW = {"max_new_tokens": 5, "progress": "none"}
SHARE = 1e-5
"""What float32 inside routers leaves of a share of 1, where a planted choice moves the logits by a tenth and more."""


def test_a_routers_logits_are_patched_as_any_other_site():
    """With a router that gives other logits to a row alone, its logits carry all of the difference."""
    model = built("mixtral")
    gate = router(model, 2)
    own, weight = gate.forward, gate.weight

    def forward(hidden):
        if hidden.reshape(-1, hidden.shape[-1]).shape[0] > 1:
            return own(hidden)
        gate.weight = torch.nn.Parameter(weight.flip(0), requires_grad=False)
        try:
            return own(hidden)
        finally:
            gate.weight = weight

    gate.forward = forward
    swept = kv.sweep(kv.wrap(model), [PROMPT], "router", stop="length", controls="quick", **HOW)
    for row in swept.recovery.to_dict("records"):
        assert row["recovery"] == pytest.approx(float(row["layer"] == 2), abs=SHARE), row
    control = swept.controls.set_index("control")["recovery"]
    assert control["together"] == pytest.approx(1.0, abs=SHARE)
