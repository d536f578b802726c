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
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.models import Adapter, wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE, asked_pair, logit_difference
from kvinterp.models.attaching import Listener, Site
from kvinterp.models.hook_names import layers_with, one_site
from kvinterp.models.inputs import chosen_layers, encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.sites import LAYOUTS
from kvinterp.models.threads import own_threads
from kvinterp.patching.distances import DISTANCES, check_finite, name_of, one_number
from kvinterp.patching.given import Given
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import PATCHED_CACHE, Patch, Where, check_patch_site, heads_at, positions_of, stored_sites
from kvinterp.patching.path_patching import Sending, path_said, reaching, receivers_of
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import path_named
from kvinterp.recording import PathHook, Recorder

log = logging.getLogger("kvinterp")

OVER = {
    "positions": "one block of positions of one layer at a time, all its heads",
    "heads": "one head of one layer at a time, at all positions",
    "heads,positions": "one head of one layer at one block of positions at a time",
}
METHODS = {
    "patches": "a forward with each patch",
    "attribution": "one gradient for all of them: times the difference of the activations, right to first order",
}
Metric = Callable[[Float[Tensor, "batch position vocab"]], Any]
"""TransformerLens's: a number of the logits ``[batch, position, vocab]``."""

Run = Callable[[Any], Float[Tensor, "batch position vocab"]]
"""A forward with a hook."""
_CHECKED = ["layer", "column", "attributed", "patched"]


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
        method: A name of METHODS.
        receiver: Of path patching the ends of the paths, as in "q of layer 5, head 1"; else empty.
        checked: Of an attribution some patches made in truth: layer, column (its number), attributed and patched, the changes.
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
    method: str = "patches"
    receiver: str = ""
    checked: pd.DataFrame = dataclasses.field(default_factory=lambda: pd.DataFrame(columns=_CHECKED))
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is of, in one line."""
        shape = " by ".join(map(str, self.values.shape))
        ends = f"{self.distance} {self.corrupted:.3g} corrupted, {self.clean:.3g} clean"
        checked = f"with error {self.error:.1%}" if len(self.checked) else "not checked"
        how = "" if self.method == "patches" else f", {self.method} {checked}"
        how += f", along the stream to {self.receiver}" if self.receiver else ""
        how += "; both are equal, so no recovery is defined" if self.clean == self.corrupted else ""
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

    @property
    def error(self) -> float:
        """How far the attributions checked are from true patches: L2 of the differences over L2 of the true changes."""
        wrong, true = (self.checked["attributed"] - self.checked["patched"], self.checked["patched"])
        norms = [float(column.astype(float).pow(2).sum()) ** 0.5 for column in (wrong, true)]
        return norms[0] / norms[1] if norms[1] else float("nan")

    def overview(self) -> pd.DataFrame:
        """The ten places that bring most."""
        return self.frame.sort_values("recovery", ascending=False, kind="stable").head(10).reset_index(drop=True)

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its table, and the ends and texts that it is read with."""
        names = ("site", "over", "distance", "clean", "corrupted", "texts", "differ", "pairs", "method", "receiver")
        about = {name: getattr(self, name) for name in names}
        tables = {"patches": self.frame} | ({"checked": self.checked} if len(self.checked) else {})
        return signed(tables, self.provenance), {"about": about, "provenance": self.provenance}

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
        more = {"checked": tables["checked"]} if "checked" in tables else {}
        return cls(
            **about, values=numbers["value"], recovery=numbers["recovery"], unchanged=numbers["unchanged"].bool(),
            layers=layers, columns=columns, provenance=table.attrs, **more,
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
    receiver: Any = None,
    method: str = "patches",
    check: int = 8,
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
        receiver: Path patching: what alone gets what a patch brings, along the residual stream, with all attention and MLPs
            between held as the corrupted prompt has them. A hook's name such as ``"blocks.5.attn.hook_q"`` (at all positions), a
            :class:`Patch` without a donor, which may name heads and positions, or a list of them; the last ``resid_post`` is
            the logits' side. Two forwards a place (:mod:`kvinterp.patching.path_patching`).
        method: ``"patches"``, or ``"attribution"``: of one forward and backward of the corrupted prompts the gradient of what
            is measured, times the difference of the activations. As good as what is measured is linear; ``check`` shows it.
        check: How many attributions to hold against true patches: half the largest, the others spread over all places.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not exist, or the prompts cannot be aligned.
        NonFiniteError: NaN or Inf appeared in the logits.
        UnsupportedError: This model does not show the site.

    Source: Meng et al. 2022 (arXiv 2202.05262), section 2; Zhang and Nanda 2024 (arXiv 2309.16042) on what to measure; of
    attribution Nanda 2023, and Syed et al. 2023 (arXiv 2310.10348), eq. (1).

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
        ("method", method, METHODS),
        ("progress", progress, words.Progress),
    ):
        check_choice(name, value, known)
    pair = asked_pair(adapter, "function" if callable(distance) else distance, answers)
    if over == "heads":
        check_unread("block", block, 1, f"over={over!r} has no blocks; leave it out, or patch over='positions'")
    receivers = () if receiver is None else receivers_of(adapter, receiver)
    if receivers and method != "patches":
        raise InputError("a receiver was given with method='attribution', which has no paths: leave one of them out.")
    if method == "patches":
        check_unread("check", check, 8, "true patches need no check; leave it out, or give method='attribution'")
    pairs = _aligned(adapter, clean, corrupted)
    differ = tuple(sorted({at for each in pairs for at in check_aligned(*each)}))
    length, rows = len(pairs[0][0]), tuple(layers_with(adapter, site, chosen_layers(adapter, layers)))
    senders = reaching([Patch(site, (layer,)) for layer in rows], receivers, layers is None)
    rows = tuple(layer for sender in senders for layer in sender.layers or ())
    low, high = Patch(site, positions="all" if positions is None else positions_of(positions)).span(length)
    if not 0 <= low < high:
        raise InputError(f"positions={positions!r} hold none of the prompt's, which are 0 to {length - 1}.")
    columns = _columns(adapter, site, over, (low, high), check_whole("block", block))
    asked = _Asked(adapter, site, over, (low, high), pairs, distance, pair, progress, receivers, rows, columns)
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        if method == "attribution":
            # In inference mode nothing has a gradient.
            with torch.inference_mode(False):
                measured, unchanged, checked = asked.attributed(check_whole("check", check, 0))
        else:
            measured, unchanged, checked = asked.patched()
    check_finite(measured, "the patched runs")
    values = measured[2:].reshape(len(rows), len(columns))
    if bool(unchanged.all()):
        log.warning("activation_patching: every patch of %r %s: both prompts have the same there", site, UNCHANGED)
    recovery = metrics.recovery((measured[0] - measured[1]).expand_as(values), measured[0] - values)
    ends, texts = (float(measured[0]), float(measured[1])), tuple(adapter.pieces(pairs[0][1]))
    about = provenance(adapter, site=site, over=over, distance=asked.name, method=method, pairs=len(pairs))
    return ActivationPatching(
        site, over, asked.name, *ends, values, recovery, unchanged.cpu().reshape(values.shape), rows,
        tuple(columns), texts, differ, len(pairs), method, path_said(receivers), checked, about,
    )  # fmt: skip


_Found = tuple[Float64[Tensor, " run"], Bool[Tensor, " place"], pd.DataFrame]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is patched and measured; each method gives the measure of clean, corrupted and every place, of each place whether
    its patch changed nothing, and the table of what was checked.
    """

    adapter: Adapter
    site: str
    over: str
    span: tuple[int, int]
    pairs: Sequence[tuple[list[int], list[int]]]
    distance: str | Metric
    pair: tuple[int, int] | None
    progress: str
    receivers: tuple[Patch, ...]
    layers: tuple[int, ...]
    columns: Sequence[Any]

    @property
    def name(self) -> str:
        """What the measure is called."""
        return self.distance if isinstance(self.distance, str) else name_of(self.distance)

    @property
    def places(self) -> list[tuple[int, Any]]:
        """Layer and column of each patch."""
        return list(itertools.product(self.layers, self.columns))

    @torch.no_grad()
    def patched(self) -> _Found:
        """By a forward a patch: of one pair from the first patched block on, of several pairs, or for a function, a whole one."""
        pure, corrupted, donor, clean = self._given()
        ends, between = [self._measure(clean, clean)], None
        if self.receivers:
            last = max(layer for each in self.receivers for layer in each.layers or ())
            between = Recorder(self.adapter, ["attn_out", "mlp_out"], range(last + 1), positions="all")
        if len(self.pairs) > 1 or callable(self.distance):
            run: Run = functools.partial(pure.whole, corrupted)
            base = run(between)
        else:
            (_, tokens), *_ = self.pairs
            run = lambda hook: pure.patched(tokens, 0, hook)[None, None]  # noqa: E731
            if between is not None:
                between.begin_step(0)
            base = pure.capture(tokens, between)[None, None]
        ends.append(self._measure(base, clean))
        held = None if between is None else _given_by("corrupted prompts", between)
        found, changed = self._each(self.places, run, clean, donor, held)
        return torch.stack([*ends, *found]), ~torch.stack(changed), pd.DataFrame(columns=_CHECKED)

    def attributed(self, check: int) -> _Found:
        """By the gradient at the corrupted prompts, and some places patched in truth."""
        with torch.no_grad():
            pure, corrupted, donor, clean = self._given()
        gradients = Gradients(self.adapter, [(self.site, layer) for layer in self.layers])
        with torch.enable_grad():
            base = self._measure(pure.whole(corrupted, gradients), clean)
            if not base.requires_grad:
                raise InputError(
                    f"distance={self.name!r} has no gradient with respect to the logits, which method='attribution' takes: "
                    "give one of torch's differentiable operations, or method='patches'."
                )
            changes = gradients.times(base, {place: donor.records[place] for place in gradients.places})
        base, places = base.detach(), self.places
        found = torch.stack([self._summed(changes[self.site, layer], column) for layer, column in places])
        sample = _sample(found, check)
        with torch.no_grad():
            run = functools.partial(pure.whole, corrupted)
            true, _ = self._each([places[number] for number in sample], run, clean, donor)
            clean_end = self._measure(clean, clean)
        checked = [
            (places[number][0], number % len(self.columns), float(found[number]), float(value - base))
            for number, value in zip(sample, true, strict=True)
        ]
        apart = {at: (donor.records[at] != shown).double() for at, shown in gradients.shown.items()}
        changed = torch.stack([self._summed(apart[self.site, layer], column) for layer, column in places])
        measured = torch.cat([torch.stack([clean_end, base]), base + found])
        return measured, changed == 0, pd.DataFrame(checked, columns=_CHECKED)

    def _given(self) -> tuple[PureRecompute, Tensor, Given, Tensor]:
        """The path, the corrupted prompts as rows, what the clean ones give, and their logits."""
        adapter, pure = self.adapter, PureRecompute(self.adapter, path_named("recompute"))
        clean, corrupted = (torch.tensor(each, device=adapter.device) for each in zip(*self.pairs, strict=True))
        recorder = Recorder(adapter, list(stored_sites(adapter, self.site)), self.layers, positions="all")
        logits = pure.whole(clean, recorder)
        return pure, corrupted, _given_by("clean prompts", recorder), logits

    def _each(
        self, places: Sequence[tuple[int, Any]], run: Run, clean: Tensor, donor: Given, held: Given | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The measure with each patch, or with what it brings to the receivers alone; and whether it changed anything."""
        found, changes = [], []
        for layer, column in tqdm(places, "patching", unit="patch", disable=None if self.progress == "bar" else True):
            head, spot = _parts(self.over, column)
            patch = Patch(self.site, (layer,), None if head is None else (head,), spot or self.span, (0,), donor)
            length = len(self.pairs[0][1])
            if self.receivers:
                sending = Sending(self.adapter, patch, self.receivers, held, None, length)
                run(sending)
                hook = sending.receiving
            else:
                hook = PatchHook(self.adapter, [patch], None, length)
            found.append(self._measure(run(hook), clean))
            changes.append(torch.stack(hook.changed).any())
        return found, changes

    def _measure(self, logits: Tensor, clean: Tensor) -> Float64[Tensor, ""]:
        if callable(self.distance):
            return one_number(self.distance, logits)
        shown, clean = logits[:, -1], clean[:, -1].to(logits)
        if self.pair is not None:
            return logit_difference(shown, self.pair).mean()
        if self.distance == "kl" and shown.requires_grad:  # The accurate one carries no gradient.
            before, after = (torch.log_softmax(each.double(), -1) for each in (clean, shown))
            return torch.nn.functional.kl_div(after, before, reduction="none", log_target=True).sum(-1).mean()
        return DISTANCES[self.distance](clean, shown).double().mean()

    def _summed(self, changes: Tensor, column: Any) -> Float64[Tensor, ""]:
        """What one place changes: its share of the sum over batch, positions, heads and all else."""
        layout, (head, spot) = LAYOUTS[self.site], _parts(self.over, column)
        if spot is not None:
            changes = changes.narrow(layout.rows, spot[0], spot[1] - spot[0])
        return (changes if head is None else changes.select(layout.heads, head)).sum()


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


def _given_by(name: str, recorder: Recorder) -> Given:
    recorder.end_step()
    return Given(name, {at: kept[-1] for at, kept in recorder.kept.items()})


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


def _sample(found: Tensor, check: int) -> list[int]:
    """The numbers of the places to patch in truth: half of them those with the largest attribution, the others evenly spread."""
    if check >= len(found):
        return list(range(len(found)))
    largest = found.abs().argsort(descending=True, stable=True).tolist()
    spread = [round(number) for number in torch.linspace(0, len(largest) - 1, max(check - check // 2, 1)).tolist()]
    return sorted({*largest[: check // 2], *(spread if check else ())})


class Gradients(PathHook):
    """Adds a zero to each place, whose gradient is the place's, and so cuts no graph in two.

    Args:
        adapter: The model.
        wanted: The places.

    Raises:
        UnsupportedError: Nothing that is put there is read, or not all that goes on from there is seen.
    """

    def __init__(self, adapter: Adapter, wanted: Sequence[Site]) -> None:
        self.zeros: dict[Site, Tensor] = {}
        self.shown: dict[Site, Tensor] = {}
        self.listeners: dict[Site, Listener] = {}
        for site, layer in wanted:
            if adapter.derives(site):
                raise UnsupportedError(
                    f"the {site} has no gradient under attention {adapter.facts.attention!r}, where it never leaves the kernel "
                    "and is derived beside it: load the model with attention='eager' (attn_implementation='eager' in "
                    "transformers), or attribute q, k, v or z."
                )
            if site in (*PATCHED_CACHE, "resid_mid"):
                raise UnsupportedError(
                    f"{site!r} has no one place whose gradient is its own: attribute resid_pre, attn_out, mlp_out, q, k, v or z, "
                    "or give method='patches'."
                )
            adapter.tap(site, layer)
            self.listeners[site, layer] = self._listener((site, layer))

    def _listener(self, place: Site) -> Listener:
        def listener(tensor: Tensor) -> Tensor:
            self.shown[place] = tensor.detach()
            self.zeros[place] = torch.zeros_like(tensor, requires_grad=True)
            return tensor + self.zeros[place]

        return listener

    def times(self, measured: Tensor, clean: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
        """The gradient times how far the clean activations are from those shown, element by element, in float64."""
        found = torch.autograd.grad(measured, list(self.zeros.values()), allow_unused=True)
        return {
            place: torch.zeros_like(self.shown[place]).double()
            if gradient is None
            else gradient.double() * (clean[place].double() - self.shown[place].double())
            for place, gradient in zip(self.zeros, found, strict=True)
        }
