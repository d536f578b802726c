"""The field's usual experiment: a clean prompt's activations into the forward of a corrupted one, one place at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp import metrics
from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_unread, check_whole
from kvinterp.common.result import Result, signed
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.errors import InputError, located
from kvinterp.models import Adapter, wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE, asked_pair, logit_difference
from kvinterp.models.hook_names import layers_with, one_site
from kvinterp.models.inputs import chosen_layers, encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.distances import DISTANCES, check_finite, name_of, one_number
from kvinterp.patching.given import Given
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import Patch, Where, check_patch_site, heads_at, positions_of, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import path_named
from kvinterp.recording import Recorder

log = logging.getLogger("kvinterp")

OVER = {
    "positions": "one block of positions of one layer at a time, all its heads",
    "heads": "one head of one layer at a time, at all positions",
    "heads,positions": "one head of one layer at one block of positions at a time",
}
Metric = Callable[[Float[Tensor, "batch position vocab"]], Any]
"""TransformerLens's: a number of the logits ``[batch, position, vocab]``."""

Run = Callable[[Any], Float[Tensor, "batch position vocab"]]
"""A forward with a hook."""


@dataclasses.dataclass(eq=False, repr=False)
class ActivationPatching(Result):
    """What each place of a clean prompt brings into a corrupted one.

    Attributes:
        site: What was moved.
        over: Whether columns are blocks of ``"positions"``, ``"heads"``, or both.
        distance: What was measured; of a function its name.
        clean: The distance on the clean prompt: 0, or the logit difference; the mean over pairs where there are several.
        corrupted: The same on the corrupted one, unpatched.
        values: The same with each patch, in nats for KL, in logits otherwise.
        recovery: ``1 - (clean - value) / (clean - corrupted)``: 1 where the patch gives the clean prompt's, 0 where it changes
            nothing; NaN where both prompts show the same.
        unchanged: Where the clean prompt has the very values of the corrupted one, so that a patch changes nothing.
        layers: The layers, which are the rows.
        columns: Of each column its block of positions (start, stop), its head, or (head, start, stop).
        texts: The corrupted prompt's tokens, by position; of the first pair.
        differ: The positions at which the prompts of any pair differ.
        pairs: How many pairs of prompts.
        provenance: What it was made with.
    """

    VERB: ClassVar = "activation-patching"

    site: str
    over: str
    distance: str
    clean: float
    corrupted: float
    values: Float64[Tensor, "layer column"]
    recovery: Float64[Tensor, "layer column"]
    unchanged: Bool[Tensor, "layer column"]
    layers: tuple[int, ...]
    columns: tuple[Any, ...]
    texts: tuple[str, ...]
    differ: tuple[int, ...]
    pairs: int = 1
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is of, in one line."""
        shape = " by ".join(map(str, self.values.shape))
        ends = f"{self.distance} {self.corrupted:.3g} corrupted, {self.clean:.3g} clean"
        how = "; both are equal, so no recovery is defined" if self.clean == self.corrupted else ""
        return f"<ActivationPatching of {self.site}, layers by {self.over}, {shape}: {ends}{how}>"

    @property
    def frame(self) -> pd.DataFrame:
        """One row a patch: layer, head or start, stop and text of the positions, value, recovery."""
        rows = []
        for (i, layer), (j, column) in itertools.product(enumerate(self.layers), enumerate(self.columns)):
            head, spot = _parts(self.over, column)
            where: dict[str, Any] = {} if head is None else {"head": head}
            if spot is not None:
                where |= {"start": spot[0], "stop": spot[1], "text": "".join(self.texts[slice(*spot)])}
            found = {"value": float(self.values[i, j]), "recovery": float(self.recovery[i, j])}
            rows.append({"layer": layer, **where, **found, "unchanged": bool(self.unchanged[i, j])})
        return pd.DataFrame(rows)

    def overview(self) -> pd.DataFrame:
        """The ten places that bring most."""
        return self.frame.sort_values("recovery", ascending=False, kind="stable").head(10).reset_index(drop=True)

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its table, and the ends and texts that it is read with."""
        names = ("site", "over", "distance", "clean", "corrupted", "texts", "differ", "pairs")
        about = {name: getattr(self, name) for name in names}
        return signed({"patches": self.frame}, self.provenance), {"about": about, "provenance": self.provenance}

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> ActivationPatching:
        """The same of its table."""
        about, table = dict(summary["about"]), tables["patches"]
        layers = tuple(dict.fromkeys(table["layer"].tolist()))
        names = [name for name in ("head", "start", "stop") if name in table]
        first = table[table["layer"] == layers[0]][names].to_numpy().tolist()
        columns = tuple(row[0] if len(row) == 1 else tuple(row) for row in first)
        numbers = {
            # An older version kept no "unchanged".
            name: torch.tensor(table.get(name, table["value"] * 0).to_numpy(float)).reshape(len(layers), -1)
            for name in ("value", "recovery", "unchanged")
        }
        about |= {name: tuple(about[name]) for name in ("texts", "differ")}
        return cls(
            **about, values=numbers["value"], recovery=numbers["recovery"], unchanged=numbers["unchanged"].bool(),
            layers=layers, columns=columns, provenance=table.attrs,
        )  # fmt: skip


def activation_patching(
    model: Any,
    clean: Any,
    corrupted: Any,
    site: Any = "resid_pre",
    over: str = "positions",
    *,
    distance: str | Metric = "kl",
    answers: Sequence[str | int] | None = None,
    layers: Iterable[int] | int | None = None,
    positions: Where | None = None,
    block: int = 1,
    progress: str = "bar",
) -> ActivationPatching:
    """Puts a clean prompt's activations into the forward of a corrupted one, and says how much of its answer they restore.

    Measured on the logits of the newest position; a function is given those of all. One forward, so the paths do not matter:
    both begin with it. Several pairs go in one batch, and what is measured is the mean over them.

    Args:
        model: A model of any kind, or an adapter.
        clean: The prompt that gives; a text, a prompt or token ids, ``[1, position]`` too; or a list or tensor of several.
        corrupted: The prompt that takes, of as many tokens: positions are matched by number. Or as many prompts.
        site: A site of PATCH_SITES, a hook's or module's name, or a ``names_filter`` that takes hooks of one site.
        over: ``"positions"``, ``"heads"`` or ``"heads,positions"``.
        distance: ``"kl"`` (KL(clean || patched), nats), ``"l2"`` of the logits, ``"logit_difference"`` of two answers, or a
            function of the logits ``[batch, position, vocab]`` that gives one number, as TransformerLens's metrics do.
        answers: For the logit difference, the token whose logit counts and the one whose is taken off: texts, or ids.
        layers: Layers (default: all).
        positions: The positions that are patched (default: all); as of a :class:`Patch`.
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
    site, layers = one_site(adapter, site, layers)
    check_patch_site(site)
    over = over.replace(" ", "") if isinstance(over, str) else over
    for name, value, known in (
        ("over", over, OVER),
        *([] if callable(distance) else [("distance", distance, ("kl", "l2", LOGIT_DIFFERENCE))]),
        ("progress", progress, words.Progress),
    ):
        check_choice(name, value, known)
    pair = asked_pair(adapter, "function" if callable(distance) else distance, answers)
    if over == "heads":
        check_unread("block", block, 1, f"over={over!r} has no blocks; leave it out, or patch over='positions'")
    pairs = _aligned(adapter, clean, corrupted)
    differ = tuple(sorted({at for each in pairs for at in check_aligned(*each)}))
    length, rows = len(pairs[0][0]), tuple(layers_with(adapter, site, chosen_layers(adapter, layers)))
    low, high = Patch(site, positions="all" if positions is None else positions_of(positions)).span(length)
    if not 0 <= low < high:
        raise InputError(f"positions={positions!r} hold none of the prompt's, which are 0 to {length - 1}.")
    columns = _columns(adapter, site, over, (low, high), check_whole("block", block))
    asked = _Asked(adapter, site, over, (low, high), pairs, distance, pair, progress, rows, columns)
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        measured, unchanged = asked.patched()
    check_finite(measured, "the patched runs")
    values = measured[2:].reshape(len(rows), len(columns))
    if bool(unchanged.all()):
        log.warning("activation_patching: every patch of %r %s: both prompts have the same there", site, UNCHANGED)
    recovery = metrics.recovery((measured[0] - measured[1]).expand_as(values), measured[0] - values)
    ends, texts = (float(measured[0]), float(measured[1])), tuple(adapter.pieces(pairs[0][1]))
    name = distance if isinstance(distance, str) else name_of(distance)
    about = provenance(adapter, site=site, over=over, distance=name, pairs=len(pairs))
    return ActivationPatching(
        site, over, name, *ends, values, recovery, unchanged.cpu().reshape(values.shape), rows,
        tuple(columns), texts, differ, len(pairs), about,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is patched and measured."""

    adapter: Adapter
    site: str
    over: str
    span: tuple[int, int]
    pairs: Sequence[tuple[list[int], list[int]]]
    distance: str | Metric
    pair: tuple[int, int] | None
    progress: str
    layers: tuple[int, ...]
    columns: Sequence[Any]

    @torch.no_grad()
    def patched(self) -> tuple[Float64[Tensor, " run"], Bool[Tensor, " place"]]:
        """The measure of clean, corrupted and every place, and whether its patch changed nothing.

        A forward a patch: of one pair from the first patched block on, of several pairs, or for a function, a whole one.
        """
        adapter, pure = self.adapter, PureRecompute(self.adapter, path_named("recompute"))
        clean, corrupted = (torch.tensor(each, device=adapter.device) for each in zip(*self.pairs, strict=True))
        recorder = Recorder(adapter, list(stored_sites(adapter, self.site)), self.layers, positions="all")
        wanted = pure.whole(clean, recorder)
        recorder.end_step()
        donor = Given("clean prompts", {at: kept[-1] for at, kept in recorder.kept.items()})
        if len(self.pairs) > 1 or callable(self.distance):
            run: Run = functools.partial(pure.whole, corrupted)
            base = run(None)
        else:
            (_, tokens), *_ = self.pairs
            run = lambda hook: pure.patched(tokens, 0, hook)[None, None]  # noqa: E731
            base = pure.capture(tokens, None)[None, None]
        found, changes = [self._measure(each, wanted) for each in (wanted, base)], []
        places = list(itertools.product(self.layers, self.columns))
        for layer, column in tqdm(places, "patching", unit="patch", disable=None if self.progress == "bar" else True):
            head, spot = _parts(self.over, column)
            patch = Patch(self.site, (layer,), None if head is None else (head,), spot or self.span, (0,), donor)
            hook = PatchHook(adapter, [patch], None, len(self.pairs[0][1]))
            found.append(self._measure(run(hook), wanted))
            changes.append(torch.stack(hook.changed).any())
        return torch.stack(found), ~torch.stack(changes)

    def _measure(self, logits: Tensor, clean: Tensor) -> Float64[Tensor, ""]:
        if callable(self.distance):
            return one_number(self.distance, logits)
        shown, clean = logits[:, -1], clean[:, -1].to(logits)
        if self.pair is not None:
            return logit_difference(shown, self.pair).mean()
        return DISTANCES[self.distance](clean, shown).double().mean()


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


def _aligned(adapter: Adapter, clean: Any, corrupted: Any) -> list[tuple[list[int], list[int]]]:
    """The pairs of prompts, each encoded, all of as many tokens."""
    given = [encode_all(adapter, prompts, 1) for prompts in (clean, corrupted)]
    if len(given[0]) != len(given[1]):
        raise InputError(
            f"{len(given[0])} clean prompts and {len(given[1])} corrupted ones were given: give them in pairs."
        )
    pairs = list(zip(*given, strict=True))
    lengths = sorted({len(clean) for clean, _ in pairs})
    if len(lengths) > 1:
        raise InputError(
            f"the clean prompts have {lengths[0]} to {lengths[-1]} tokens, and a column is one position of all pairs: "
            "give pairs of one length, or ask for each length by itself."
        )
    return pairs


def _parts(over: str, column: Any) -> tuple[int | None, tuple[int, int] | None]:
    """The head and the positions of a column, None for what it does not say."""
    if over == "heads":
        return column, None
    return (None, column) if over == "positions" else (column[0], (column[1], column[2]))


def _columns(adapter: Adapter, site: str, over: str, span: tuple[int, int], block: int) -> list[Any]:
    spots = [(start, min(start + block, span[1])) for start in range(*span, block)]
    if over == "positions":
        return spots
    count = heads_at(adapter, site, f"over={over!r}")
    return list(range(count)) if over == "heads" else [(head, *spot) for head in range(count) for spot in spots]
