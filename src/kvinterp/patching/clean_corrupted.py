"""The field's usual experiment: a clean prompt's activations into the forward of a corrupted one, one place at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp import metrics
from kvinterp.errors import InputError, located
from kvinterp.inputs import check_choice, check_known, check_unread, check_whole, chosen_layers, encode
from kvinterp.models import Adapter, wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE, asked_pair
from kvinterp.models.hook_names import site_of
from kvinterp.models.threads import own_threads
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import PATCH_SITES, Patch, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.side_by_side import DISTANCES, check_finite
from kvinterp.paths import path_named, run

OVER = {
    "positions": "one block of positions of one layer at a time, all its heads",
    "heads": "one head of one layer at a time, at all positions",
}


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationPatching:
    """What each place of a clean prompt brings into a corrupted one.

    Attributes:
        site: What was moved.
        over: Whether columns are blocks of ``"positions"`` or ``"heads"``.
        distance: What was measured.
        clean: The distance on the clean prompt: 0, or the logit difference.
        corrupted: The same on the corrupted one, unpatched.
        values: The same with each patch, in nats for KL, in logits otherwise.
        recovery: ``1 - (clean - value) / (clean - corrupted)``: 1 where the patch gives the clean prompt's, 0 where it changes
            nothing; NaN where both prompts show the same.
        layers: The layers, which are the rows.
        columns: Of each column its block of positions (start, stop), or its head.
        texts: The corrupted prompt's tokens, by position.
        differ: The positions at which the prompts differ.
    """

    site: str
    over: str
    distance: str
    clean: float
    corrupted: float
    values: Float64[Tensor, "layer column"]
    recovery: Float64[Tensor, "layer column"]
    layers: tuple[int, ...]
    columns: tuple[Any, ...]
    texts: tuple[str, ...]
    differ: tuple[int, ...]

    def __repr__(self) -> str:
        """What it is of, in one line."""
        shape = " by ".join(map(str, self.values.shape))
        ends = f"{self.distance} {self.corrupted:.3g} corrupted, {self.clean:.3g} clean"
        return f"<ActivationPatching of {self.site}, layers by {self.over}, {shape}: {ends}>"

    @property
    def frame(self) -> pd.DataFrame:
        """One row a patch: layer, head or start, stop and text of the positions, value, recovery."""
        rows = []
        for (i, layer), (j, column) in itertools.product(enumerate(self.layers), enumerate(self.columns)):
            where: dict[str, Any] = {"head": column}
            if self.over == "positions":
                where = {"start": column[0], "stop": column[1], "text": "".join(self.texts[slice(*column)])}
            found = {"value": float(self.values[i, j]), "recovery": float(self.recovery[i, j])}
            rows.append({"layer": layer, **where, **found})
        return pd.DataFrame(rows)


def activation_patching(
    model: Any,
    clean: Any,
    corrupted: Any,
    site: str = "resid_pre",
    over: str = "positions",
    *,
    distance: str = "kl",
    answers: Sequence[str | int] | None = None,
    layers: Iterable[int] | None = None,
    block: int = 1,
    progress: str = "bar",
) -> ActivationPatching:
    """Puts a clean prompt's activations into the forward of a corrupted one, and says how much of its answer they restore.

    Measured on the logits of the newest position. One forward, so the paths do not matter: both begin with it.

    Args:
        model: A model of any kind, or an adapter.
        clean: The prompt that gives; a text, a prompt or token ids.
        corrupted: The prompt that takes, of as many tokens: positions are matched by number.
        site: A site of PATCH_SITES, or a hook's name of TransformerLens.
        over: ``"positions"`` or ``"heads"``.
        distance: ``"kl"`` (KL(clean || patched), nats), ``"l2"`` of the logits, or ``"logit_difference"`` of two answers.
        answers: For the last, the token whose logit counts and the one whose is taken off: texts of one token, or ids.
        layers: Layers (default: all).
        block: Positions in a block.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not exist, or the prompts cannot be aligned.
        NonFiniteError: NaN or Inf appeared in the logits.
        UnsupportedError: This model does not show the site.

    Source: Meng et al. 2022 (arXiv 2202.05262), section 2; Zhang and Nanda 2024 (arXiv 2309.16042) on what to measure.

    Example:
        >>> found = kv.activation_patching(  # doctest: +SKIP
        ...     model, clean, corrupted, distance="logit_difference", answers=(" Paris", " Rome")
        ... )
        >>> found.recovery.shape  # layers by positions  # doctest: +SKIP
    """
    adapter = wrap(model)
    site, own = site_of(site) if isinstance(site, str) else (site, None)
    layers = own if layers is None else layers
    check_known("patch site", site, PATCH_SITES)
    for name, value, known in (
        ("over", over, OVER),
        ("distance", distance, ("kl", "l2", LOGIT_DIFFERENCE)),
        ("progress", progress, ("bar", "none")),
    ):
        check_choice(name, value, known)
    pair = asked_pair(adapter, distance, answers)
    if over != "positions":
        check_unread("block", block, 1, f"over={over!r} has no blocks; leave it out, or patch over='positions'")
    tokens = [encode(adapter, prompt, 1) for prompt in (clean, corrupted)]
    differ = check_aligned(*tokens)
    rows, columns = (
        chosen_layers(adapter, layers),
        _columns(adapter, site, over, len(tokens[1]), check_whole("block", block)),
    )
    with located(f"model {adapter.facts.name}"), own_threads(adapter), torch.no_grad():
        path = path_named("recompute")
        give: dict[str, Any] = {"record": stored_sites(adapter, site), "layers": rows, "positions": "all", "logits": "keep"}
        donor = run(adapter, tokens[0], path, max_new_tokens=1, **give)
        pure, found = PureRecompute(adapter, path), []
        base = pure.capture(tokens[1])
        places = list(itertools.product(rows, columns))
        for layer, column in tqdm(places, "patching", unit="patch", disable=None if progress == "bar" else True):
            heads, spot = ((column,), "all") if over == "heads" else (None, column)
            patch = Patch(site, (layer,), heads, spot, (0,), donor)
            found.append(pure.patched(tokens[1], 0, PatchHook(adapter, [patch])))
        shown = torch.stack([donor.logits[0].to(base), base, *found])
    measured = _measured(distance, pair, shown)
    check_finite(measured, "the patched runs")
    values = measured[2:].reshape(len(rows), len(columns))
    recovery = metrics.recovery((measured[0] - measured[1]).expand_as(values), measured[0] - values)
    ends = float(measured[0]), float(measured[1])
    texts = tuple(adapter.pieces(tokens[1]))
    return ActivationPatching(site, over, distance, *ends, values, recovery, rows, tuple(columns), texts, differ)


def check_aligned(clean: Sequence[int], corrupted: Sequence[int]) -> tuple[int, ...]:
    """The positions at which two prompts' tokens differ.

    Raises:
        InputError: They are not of equal length, or the same.
    """
    if len(clean) != len(corrupted):
        raise InputError(
            f"one prompt has {len(clean)} tokens and the other {len(corrupted)}, and positions are matched by number: give "
            "prompts of as many tokens, such as two that differ in one word of one token."
        )
    differ = tuple(at for at, pair in enumerate(zip(clean, corrupted, strict=True)) if pair[0] != pair[1])
    if not differ:
        raise InputError("both prompts have the same tokens, so one brings nothing into the other: give another prompt.")
    return differ


def _measured(distance: str, pair: tuple[int, int] | None, shown: Float[Tensor, "run vocab"]) -> Float64[Tensor, " run"]:
    if pair is not None:
        return shown[:, pair[0]].double() - shown[:, pair[1]].double()
    return DISTANCES[distance](shown[:1].expand_as(shown), shown).double()


def _columns(adapter: Adapter, site: str, over: str, length: int, block: int) -> list[Any]:
    if over == "positions":
        return [(start, min(start + block, length)) for start in range(0, length, block)]
    count, _ = adapter.facts.heads_of(site)
    if not count:
        raise InputError(f"over='heads' needs a site with heads, and {site!r} has none: use q, k, v, z, pattern or kv.")
    return list(range(count))
