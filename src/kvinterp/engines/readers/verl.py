"""Batches of verl as JSON: ``data.batch`` of the trainer with its tensors as lists, padded left and
right.

Source: verl/trainer/ppo/ray_trainer.py and rollout_corr_helper.py.
"""

from kvinterp.engines.readers.trl import Trl


class Verl(Trl):
    """A record with ``prompts``, ``responses`` and ``rollout_log_probs``."""

    ids = ("prompts", "responses")
    engine = ("rollout_log_probs",)
    trainer = "old_log_probs"
    masks = ("attention_mask",)
    reply_mask = "response_mask"
