"""The statistics of trainer and rollout log-probs that reinforcement learning libraries print,
under their names.

``r = trainer - rollout`` of the same token, ``rho = exp r``. ``k1`` (verl's ``rollout_corr/kl``,
OpenRLHF's ``vllm_kl``) and ``k3`` (``rollout_corr/k3_kl``, prime-rl's ``mismatch_kl``) estimate
KL(rollout || trainer) only where the tokens were sampled from the rollout without truncation; on a
fixed text they are statistics of the difference. Sources: verl trainer/ppo/rollout_corr_helper.py
and utils/debug/metrics.py, NeMo-RL loss_functions.py, TRL grpo_trainer.py.
"""

from __future__ import annotations

import numpy as np

CLAMP = 20.0
LARGEST = 700.0
"""Log-probs are clipped at minus this, beyond which an exponential is no float64."""
CAP = 2.0
"""verl's default threshold for importance weights, and slime's ``tis_clip``."""
CLIP = 0.2
"""The default of TRL's ``epsilon``, verl's ``clip_ratio`` and slime's ``eps_clip``."""
SEQUENCE_CLIP = (3e-4, 4e-4)
"""The clip of a sequence's mean ratio, below and above 1, with which GSPO was run (arXiv
2507.18071).
"""
SEQUENCE_CAP = 3.0
"""TRL's default ``vllm_importance_sampling_cap``, above which it masks a sequence."""
INTERVALS = ("k1", "k3", "ratio_clipfrac", "tis_clipfrac", "gspo_clipfrac", "token_mult_prob_error")
"""The statistics that get an interval."""
FEWEST = 6
"""The fewest sequences that are resampled."""


def rollout_statistics(
    trainer: np.ndarray, rollout: np.ndarray, sequence: np.ndarray
) -> dict[str, float]:
    """Computes the statistics over tokens that both sides gave.

    Args:
        trainer: ``[token]``, the trainer's log-probs in nats.
        rollout: ``[token]``, the engine's log-probs in nats.
        sequence: ``[token]``, the sequence of each token.
    """
    trainer, rollout = trainer.clip(min=-LARGEST), rollout.clip(min=-LARGEST)
    r = trainer - rollout
    clamped = r.clip(-CLAMP, CLAMP)
    rho, absolute = np.exp(clamped), np.abs(r)
    _, index, counts = np.unique(sequence, return_inverse=True, return_counts=True)
    sums = np.bincount(index, clamped)
    # The importance ratio of a sequence: the product of its tokens' ratios.
    ratios = np.exp(np.bincount(index, r).clip(-CLAMP, CLAMP))
    weights = np.minimum(rho, CAP)
    seconds, firsts = np.exp(trainer), np.exp(rollout)
    means = [np.bincount(index, side) / counts for side in (trainer, rollout)]
    geometric = np.exp((np.bincount(index, r) / counts).clip(-CLAMP, CLAMP))
    below, above = 1 - SEQUENCE_CLIP[0], 1 + SEQUENCE_CLIP[1]
    apart = np.abs(seconds - firsts)
    spread = seconds.std() * firsts.std()
    statistics = {
        "tokens": len(r),
        "k1": -r.mean(),
        "k2": (r**2 / 2).mean(),
        "k3": (rho - 1 - clamped).mean(),
        "chi2_token": (rho**2).mean() - 1,
        "chi2_seq": np.exp((2 * sums).clip(-CLAMP, CLAMP)).mean() - 1,
        "rollout_is_min": rho.min(),
        "rollout_is_p01": np.quantile(rho, 0.01),
        "rollout_is_p99": np.quantile(rho, 0.99),
        "rollout_is_max": rho.max(),
        "rollout_is_eff_sample_size": 1 / ((weights / weights.mean()) ** 2).mean(),
        "rollout_is_seq_mean": ratios.mean(),
        "rollout_is_seq_min": ratios.min(),
        "rollout_is_seq_max": ratios.max(),
        "geometric_is_mean": geometric.mean(),
        "ratio_clipfrac": (np.abs(rho - 1) > CLIP).mean(),
        "tis_clipfrac": (rho > CAP).mean(),
        "gspo_clipfrac": ((geometric < below) | (geometric > above)).mean(),
        "sequence_masked": (ratios > SEQUENCE_CAP).mean(),
        "rollout_probs_diff_mean": apart.mean(),
        "rollout_probs_diff_max": apart.max(),
        "rollout_actor_probs_pearson_corr": np.corrcoef(seconds, firsts)[0, 1]
        if spread > 0
        else 1.0,
        "token_mult_prob_error": np.exp(absolute.clip(max=CLAMP)).mean(),
        "sampling_logp_difference_mean": absolute.mean(),
        "sampling_logp_difference_max": absolute.max(),
        "training_ppl": np.exp((-means[0]).clip(max=LARGEST)).mean(),
        "rollout_ppl": np.exp((-means[1]).clip(max=LARGEST)).mean(),
        "ppl_ratio": np.exp((means[1] - means[0]).clip(-CLAMP, CLAMP)).mean(),
    }
    return {name: float(value) for name, value in statistics.items()}


def rollout_intervals(
    trainer: np.ndarray,
    rollout: np.ndarray,
    sequence: np.ndarray,
    chance: float = 1e-3,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Intervals of :data:`INTERVALS`, by resampling whole sequences; NaN of fewer than
    :data:`FEWEST`.

    Args:
        trainer: As for :func:`rollout_statistics`.
        rollout: The same.
        sequence: The same.
        chance: How often each end may be missed.
        seed: Seeds the resampling.
    """
    _, index, counts = np.unique(sequence, return_inverse=True, return_counts=True)
    if len(counts) < FEWEST:
        return dict.fromkeys(INTERVALS, (float("nan"), float("nan")))
    r = (trainer - rollout).clip(-CLAMP, CLAMP)
    rho = np.exp(r)
    geometric = np.exp(np.bincount(index, r) / counts)
    cut = (geometric < 1 - SEQUENCE_CLIP[0]) | (geometric > 1 + SEQUENCE_CLIP[1])
    tokens = {"k1": -r, "k3": rho - 1 - r, "ratio_clipfrac": np.abs(rho - 1) > CLIP, "tis_clipfrac": rho > CAP,
              "token_mult_prob_error": np.exp(np.abs(r))}  # fmt: skip
    # A mean over tokens is a ratio of two sums over sequences.
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = {
        name: (np.bincount(index, values), counts) for name, values in tokens.items()
    }
    sums["gspo_clipfrac"] = cut.astype(float), np.ones(len(counts))
    drawn = np.random.default_rng(seed).integers(0, len(counts), (round(10 / chance), len(counts)))
    found = {}
    for name, (above, below) in sums.items():
        low, high = np.quantile(above[drawn].sum(-1) / below[drawn].sum(-1), [chance, 1 - chance])
        found[name] = float(low), float(high)
    return found
