"""prime-rl's ``token_exports/step_{N}/rank_{R}.jsonl``: inference and trainer side by side, null
for NaN.

Source: src/prime_rl/trainer/rl/token_export.py (schema_version 1).
"""

from kvinterp.engines.readers.nemo import Nemo


class Prime(Nemo):
    """A line with ``inference_logprobs``."""

    sides = ("inference_logprobs", "trainer_logprobs")
    mask = "loss_mask"
