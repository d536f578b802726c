"""The experts that another engine says its routers chose, beside those that ours choose on the same tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.numbers import counted, listed, share
from kvinterp.errors import InputError
from kvinterp.metrics.routing import compared_routing, routing_of
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.sites import ROUTING_SITES
from kvinterp.recording import Trace
from kvinterp.recording.around import record
from kvinterp.recording.given import GivenPath

FEWEST = 16
"""Of fewer positions in each half nothing is said of where experts belong."""
WINS = 0.5
"""Another place is named where it leaves less than this share of the choices that are not ours, held out too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """What our routers did on one text.

    Attributes:
        logits: For each layer with a router ``[position, expert]``.
        experts: ``[position, layer, chosen]``, in ascending order.
    """

    logits: list[Tensor]
    experts: np.ndarray

    @classmethod
    def of(cls, rows: dict[str, list[Tensor]]) -> Choices:
        """Of each site for each layer ``[position, ...]``."""
        chosen = torch.stack([each.sort(-1).values for each in rows["experts"]], 1)
        return cls(rows["router"], chosen.cpu().numpy())


def of_largest(choices: Choices) -> bool:
    """Whether the largest logits were chosen everywhere: a bias or groups of experts may decide, too."""
    for number, logits in enumerate(choices.logits):
        own = logits.gather(-1, torch.from_numpy(choices.experts[:, number]).to(logits.device))
        if bool((own.amin(-1) < logits.topk(own.shape[-1]).values.amin(-1)).any()):
            return False
    return True


def routed_layers(adapter: Adapter) -> list[int]:
    """The layers with a router."""
    return [layer for layer in range(adapter.facts.layers) if adapter.supports("experts", layer)]


def choices_of(adapter: Adapter, ids: Sequence[int], dtype: str) -> tuple[Choices, Tensor]:
    """Of one forward over a text, and its log-probs, ``[position, vocabulary]``."""
    model, layers = adapter.at(dtype_named(dtype)), routed_layers(adapter)
    with record(model, ROUTING_SITES, layers, positions="all") as seen:
        logits = model.forward(torch.tensor([list(ids)], device=model.device))[0]
    found = Choices.of({site: [seen[site, layer][0] for layer in layers] for site in ROUTING_SITES})
    return found, logits.double().log_softmax(-1)


def choices_along(trace: Trace, layers: Sequence[int]) -> Choices:
    """Of a path: all rows of the prompt, and the newest row of every step behind it."""

    def rows(site: str, layer: int) -> Tensor:
        first, *others = trace.records[site, layer]
        return torch.cat([first, *(each[-1:] for each in others)])

    return Choices.of({site: [rows(site, layer) for layer in layers] for site in ROUTING_SITES})


def fitted(adapter: Adapter, path: GivenPath, ours: Choices) -> tuple[np.ndarray, Counter[str]]:
    """The given experts as ours are laid out, those that are none as -1, and what these were.

    Raises:
        InputError: They are not as many as this model's routers choose.
    """
    given, layers, (_, count, chosen) = path.experts, routed_layers(adapter), ours.experts.shape
    assert given is not None
    every, numbers = adapter.facts.layers, ours.logits[0].shape[-1]
    # Engines may write a row for layers without a router, too.
    shapes = {shape for n in (count, every) for shape in ((n, chosen), (n * chosen,))}
    if given.shape[1:] not in shapes:
        raise InputError(
            f"{path.id} has experts of the shape {' x '.join(map(str, given.shape[1:]))} at each position, and "
            f"{adapter.facts.name} has routers in {count} of {every} layers, which choose {chosen} of {numbers}: give the model "
            "that the engine ran."
        )
    given = np.sort(given.reshape(len(given), -1, chosen), -1)
    given = given if given.shape[1] == count else given[:, layers]
    blank, beyond = (given == -1).any(-1), (given < -1).any(-1) | (given >= numbers).any(-1)
    twice = (given[..., 1:] == given[..., :-1]).any(-1) & ~blank & ~beyond
    # What was written last went in nowhere.
    words = {"null": blank[:-1], "a number that is no expert's": beyond, "an expert twice": twice}
    left = Counter({word: int(where.sum()) for word, where in words.items() if where.any()})
    return np.where((blank | beyond | twice)[..., None], -1, given), left


def routing_rows(name: str, given: np.ndarray, ours: Choices, other: Choices, layers: Sequence[int]) -> pd.DataFrame:
    """A row for each choice that was given: as a comparison's ``routing``, the given one beside ours.

    Args:
        name: The sequence's.
        given: ``[position, layer, chosen]``, -1 where none is given.
        ours: Our choices.
        other: Ours in another precision, for the engine gives no logits.
        layers: The layers with a router.
    """
    frames = []
    for number, layer in enumerate(layers):
        at = np.flatnonzero((given[: len(ours.experts), number] >= 0).all(-1))
        sides = [(ours, ours.experts[at, number]), (other, given[at, number])]
        pair = [routing_of(each.logits[number].cpu()[at].double(), torch.from_numpy(chosen)) for each, chosen in sides]
        found = {column: values.numpy() for column, values in compared_routing(*pair).items()}
        frames.append(pd.DataFrame({"sequence": name, "position": at, "layer": layer, **found}))
    return pd.concat(frames).sort_values(["position", "layer"], ignore_index=True)


def turned(table: pd.DataFrame) -> pd.DataFrame:
    """The choices that are others than ours, and are so by no more than a difference of both logits as large as rounding's."""
    return table[table["changed"] & (-table["margin_b"] <= 2 * table["difference"])]


def misplaced(pairs: Sequence[tuple[np.ndarray, np.ndarray]], layers: Sequence[int]) -> str:
    """Where else the given experts are ours: another position, other layers; empty where they fit nowhere better.

    Args:
        pairs: For each sequence the given and our experts, ``[position, layer, chosen]``.
        layers: The layers with a router.
    """
    shares = {shift: _alike(pairs, shift) for shift in (0, -1, 1)}
    if any(count < FEWEST for _, count in shares.values()):
        return ""
    straight, found = np.arange(len(layers)), {}
    own = [half[straight, straight].mean() for half in shares[0][0]]
    for shift, ((fit, held), _) in shares.items():
        order = np.where(fit.diagonal() == fit.max(1), straight, fit.argmax(1))
        if shift or (order != straight).any():
            found[shift] = (fit[straight, order].mean(), held[straight, order].mean(), order)
    best = max(found, key=lambda shift: found[shift][0], default=0)
    if not found or any(1 - there >= WINS * (1 - here) for there, here in zip(found[best][:2], own, strict=True)):
        return ""
    order = found[best][2]
    where = [f"position {best:+d}"] * bool(best)
    if (order != straight).any():
        where.append(f"layers {', '.join(str(layers[j]) for j in order)} in the place of {', '.join(map(str, layers))}")
    return f"they are ours of {listed(where)} at {found[best][1]:.1%} of the held-out choices, as given at {own[1]:.1%}"


def _alike(pairs: Sequence[tuple[np.ndarray, np.ndarray]], shift: int) -> tuple[np.ndarray, int]:
    """``[half, given layer, our layer]``: at which share of the positions both are the same, and of how many at least."""
    sums, counts = np.zeros((2, 1, 1)), np.zeros((2, 1))
    for given, ours in pairs:
        at = np.arange(max(0, -shift), min(len(given), len(ours) - shift))
        there = np.asarray((given[at] >= 0).all(-1))
        same = (given[at][:, :, None] == ours[at + shift][:, None]).all(-1) & there[..., None]
        halves = np.stack([at // 8 % 2 == 0, at // 8 % 2 == 1])
        sums = sums + np.einsum("hp,pij->hij", halves.astype(float), same)
        counts = counts + np.einsum("hp,pi->hi", halves.astype(float), there)
    return sums / np.maximum(counts, 1)[..., None], int(np.min(counts))


def said(table: pd.DataFrame, left: Counter[str], where: str) -> str:
    """How many choices are others than ours, whether rounding may have turned them, where, and what was not given."""
    none = ", ".join(f"{word} {counted(number, 'time')}" for word, number in left.most_common())
    behind = f" For not given stood {none}." if none else ""
    if table.empty:
        return f"no choice of experts was given.{behind}"
    changed = table[table["changed"]]
    text = f"{len(changed):,} of {len(table):,} choices of experts ({share(len(changed), len(table))}) are others than ours"
    if len(changed):
        first = changed.sort_values(["position", "layer"], kind="stable").iloc[0]
        by = table.groupby("layer")["changed"].mean()
        worst = by.idxmax()
        text += (
            f", {len(turned(table)):,} of them near-ties; the first at position {first['position']}, layer "
            f"{first['layer']} of {first['sequence']}, most in layer {worst} ({by[worst]:.2%})"
        )
    return f"{text}{f'; {where}' if where else ''}.{behind}"
