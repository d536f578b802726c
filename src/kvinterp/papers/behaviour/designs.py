"""Lists of policies that together answer one question: the source's grid, a factorial at matched
variance, one place at a time.

The factorial takes apart what multiplicative noise ``kv * m`` does: it may flip signs (``m`` below
0), shift the mean (``m`` is not 1 on average) and change magnitudes at random. Every arm has the
same mean square of ``m - 1``, so that none is larger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from kvinterp.errors import InputError
from kvinterp.models import ModelInfo
from kvinterp.policies import ComposedPolicy, Policy, policy_named

GRID = (
    "q8_0",
    "q4_0",
    "uniform(-1,1)",
    "uniform(-1.5,1.5)",
    "uniform(0,2)",
    "uniform(-2,2)",
    "normal(0,0.25)",
    "normal(0,0.5)",
)
"""What the study of errors in the KV cache ran beside its control."""
FACTORS = ("flips", "shift", "magnitude")
DESIGNS = ("grid", "factorial", "tensors", "layers", "heads")


@dataclasses.dataclass(frozen=True)
class Design:
    """Policies and what is asked of them.

    Attributes:
        policies: Their text forms.
        contrasts: By name the weights of policies whose sum of scores answers it.
    """

    policies: tuple[str, ...]
    contrasts: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


def designed(name: str, base: str, rms: float, facts: ModelInfo) -> Design:
    """The policies of a design.

    Args:
        name: One of :data:`DESIGNS`.
        base: The policy that is put on K or V, or in some layers or heads alone.
        rms: The root mean square of the factorial's relative error.
        facts: The model's facts.

    Raises:
        InputError: The base cannot be told where to act, or no factorial has this error.
    """
    if name == "grid":
        return Design(GRID)
    if name == "factorial":
        arms = factorial(rms)
        return Design(tuple(arms), effects(arms))
    if name == "tensors":
        k, v = (placed(base, on=on) for on in ("k", "v"))
        return Design((k, v), {"K against V": {k: 1.0, v: -1.0}})
    if name == "layers":
        half = facts.layers // 2
        early, late = (
            placed(base, layers=tuple(some)) for some in (range(half), range(half, facts.layers))
        )
        return Design((early, late), {"early against late layers": {early: 1.0, late: -1.0}})
    heads = [placed(base, heads=(head,)) for head in range(facts.kv_heads)]
    rest = -1.0 / max(len(heads) - 1, 1)
    # One of two heads says it of the other.
    contrasted = heads if len(heads) > 2 else heads[:-1]
    contrasts = {
        f"KV head {number} against the others": {one: 1.0 if one == head else rest for one in heads}
        for number, head in enumerate(contrasted)
    }
    return Design(tuple(heads), contrasts)


def placed(base: str, **where: object) -> str:
    """A policy's text form with other fields, such as ``on="k"``.

    Raises:
        InputError: It has no such field, or has it set already.
    """
    policy = policy_named(base)
    fields = {field.name: field for field in dataclasses.fields(policy)}
    if not where.keys() <= fields.keys():
        raise InputError(
            f"policy {base} cannot be put on {' or '.join(where)} alone: give a base that can, as uniform(-1,1)."
        )
    for name in where:
        if getattr(policy, name) != fields[name].default:
            raise InputError(
                f"the base {base} has its own {name}, which the design chooses: give the base without it."
            )
    return str(dataclasses.replace(policy, **where))


def factorial(rms: float) -> dict[str, tuple[int, int, int]]:
    """Multiplicative noise of one size that flips signs, shifts the mean and changes magnitudes, or
    not.

    Args:
        rms: The root mean square of the relative error of every arm.

    Returns:
        The levels of :data:`FACTORS` by text form. Without flips and shift the largest error there
        is is that of ``uniform(-1,1)``, 0.577; above that this arm is left out.

    Raises:
        InputError: No arm of one factor exists at this size.
    """
    if not 0.05 <= rms < 1.4:
        raise InputError(
            f"a factorial at a relative error of {rms:g} was asked for: expected 0.05 to 1.4, as in 0.577."
        )
    half = math.sqrt(3) * rms
    # Half of the mean square is the shift's, half the spread's.
    mean, spread = rms / math.sqrt(2), half / math.sqrt(2)
    # 1 / (1 - 2p) and back, so that the mean stays; and four times p where it may shift.
    scale, share_turned = 1 / math.sqrt(1 + rms**2), rms**2 / 4
    arms = {
        f"uniform({-half:.5g},{half:.5g})": (int(half > 1), 0, 1),
        f"uniform({-1 / scale:.5g},{1 / scale:.5g},preserve=magnitude+mean)": (1, 0, 0),
        f"uniform({rms:.5g},{rms:.5g})": (0, 1, 0),
        f"uniform({-1 / (1 - 2 * share_turned):.5g},{1 / (1 - 2 * share_turned):.5g},preserve=magnitude)": (
            1,
            1,
            0,
        ),
        f"uniform({mean - spread:.5g},{mean + spread:.5g})": (0, 1, 1),
        f"uniform({-mean - spread:.5g},{-mean + spread:.5g})": (int(mean + spread > 1), 1, 1),
    }
    if half <= 1 and rms >= 0.4:
        arms[f"normal(0,{rms:.5g})"] = (1, 0, 1)
    return {str(policy_named(text)): levels for text, levels in arms.items()}


def effects(arms: Mapping[str, tuple[int, int, int]]) -> dict[str, dict[str, float]]:
    """The weights of arms whose sum is the least-squares effect of each factor, the others held."""
    levels = np.array([(1, *levels_of_arm) for levels_of_arm in arms.values()], dtype=float)
    inverse = np.linalg.pinv(levels)
    return {
        name: dict(zip(arms, inverse[1 + row], strict=True)) for row, name in enumerate(FACTORS)
    }


# Seeds --------------------------------------------------------------------------------------------


def is_seeded(policy: Policy) -> bool:
    """Whether a policy draws random numbers."""
    inside = policy.policies if isinstance(policy, ComposedPolicy) else ()
    return any(field.name == "seed" for field in dataclasses.fields(policy)) or any(
        map(is_seeded, inside)
    )


def reseeded(policy: Policy, seed: int) -> Policy:
    """The same policy with other draws; itself where it draws none."""
    if isinstance(policy, ComposedPolicy):
        return dataclasses.replace(
            policy, policies=tuple(reseeded(one, seed) for one in policy.policies)
        )
    return dataclasses.replace(policy, seed=seed) if is_seeded(policy) else policy  # type: ignore[call-arg]
