"""Activation patching: puts a clean prompt's activations into the forward of a corrupted one, one
place at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp import metrics
from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_unread, check_whole
from kvinterp.common.numbers import models_of
from kvinterp.common.progress import each
from kvinterp.common.result import Contents, Result, signed
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.errors import InputError, located
from kvinterp.models import wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE, logit_difference, pair_for
from kvinterp.models.hook_names import layers_with, one_site
from kvinterp.models.inputs import chosen_layers, encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.ablations import HandedRows
from kvinterp.patching.distances import DISTANCES, check_finite, name_of, one_number
from kvinterp.patching.findings import (
    charts_of_activation_patching,
    headline_of_activation_patching,
    rows_of_activation_patching,
)
from kvinterp.patching.hook import PatchHook, read_changes
from kvinterp.patching.patch import (
    Patch,
    Where,
    check_patch_site,
    heads_at,
    positions_of,
    stored_sites,
)
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
"""A metric in TransformerLens's form: one number of the logits ``[batch, position, vocab]``."""


@dataclasses.dataclass(eq=False, repr=False)
class ActivationPatching(Result):
    """How much of a clean prompt's answer each patched place restores in a corrupted prompt.

    Attributes:
        frame: One row a patch: layer, head, or start, stop and text of the positions; value, the
            distance with the patch (nats for KL, logits otherwise); recovery,
            ``1 - (clean - value) / (clean - corrupted)``: 1 if the patch gives the clean prompt's
            distance, 0 if it changes nothing, NaN if both prompts have the same distance;
            unchanged, whether both prompts have the same values there.
        site: The patched site.
        over: Whether columns are blocks of ``"positions"``, ``"heads"``, or both.
        distance: The name of the distance or function.
        clean: The distance on the clean prompt: 0, or the logit difference; with several pairs the
            mean.
        corrupted: The distance on the corrupted prompt, unpatched.
        texts: The corrupted prompt's tokens by position, in the first pair.
        differ: The positions at which the prompts of any pair differ.
        pairs: How many pairs of prompts.
        provenance: Model, machine and settings.
    """

    VERB: ClassVar = "activation-patching"
    headline, rows, charts = (
        headline_of_activation_patching,
        rows_of_activation_patching,
        charts_of_activation_patching,
    )

    frame: pd.DataFrame
    site: str
    over: str
    distance: str
    clean: float
    corrupted: float
    texts: Sequence[str]
    differ: Sequence[int]
    pairs: int
    provenance: dict[str, Any]

    @property
    def values(self) -> Float64[Tensor, "layer column"]:
        """The distance with each patch, a row a layer."""
        return self._grid("value")

    @property
    def recovery(self) -> Float64[Tensor, "layer column"]:
        """The recovery by each patch, a row a layer."""
        return self._grid("recovery")

    def _grid(self, name: str) -> Float64[Tensor, "layer column"]:
        return torch.tensor(self.frame[name].to_numpy(float)).reshape(
            self.frame["layer"].nunique(), -1
        )

    def __repr__(self) -> str:
        """Names the model, the site, the shape and the distances in one line."""
        shape, model = " by ".join(map(str, self.values.shape)), models_of([self.provenance])
        ends = f"{self.distance} {self.corrupted:.3g} corrupted, {self.clean:.3g} clean"
        note = "; both are equal, so no recovery is defined" if self.clean == self.corrupted else ""
        return f"<ActivationPatching of {model}: {self.site}, layers by {self.over}, {shape}: {ends}{note}>"

    def overview(self) -> pd.DataFrame:
        """The ten places that restore most."""
        return (
            self.frame.sort_values("recovery", ascending=False, kind="stable")
            .head(10)
            .reset_index(drop=True)
        )

    def written(self) -> Contents:
        """Returns the table with its provenance, and the summary."""
        # All but the table, which is first, and the provenance, which is last.
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:-1]}
        return signed({"patches": self.frame}, self.provenance), {
            "about": about,
            "provenance": self.provenance,
        }

    @classmethod
    def read(
        cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]
    ) -> ActivationPatching:
        """Makes a result of its table and summary."""
        return cls(tables["patches"], **summary["about"], provenance=tables["patches"].attrs)


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
    """Puts a clean prompt's activations into the forward of a corrupted one and measures how much
    of its answer they restore.

    Distances are of the logits of the newest position; a function gets those of all positions. It
    takes one forward, with which both paths begin, so the path does not matter. Several pairs go in
    one batch, and distances are means over the pairs.

    Args:
        model: A model of any kind, or an adapter.
        clean: The prompt whose activations are moved: a text, a prompt or token ids,
            ``[1, position]`` too; or a list or tensor of several.
        corrupted: The prompt that is patched, of as many tokens, since positions are matched by
            number; or as many prompts.
        site: A site of PATCH_SITES, a hook's or module's name, or a ``names_filter`` that takes
            hooks of one site.
        over: ``"positions"``, ``"heads"`` or ``"heads,positions"``.
        distance: ``"kl"`` (KL(clean || patched), nats), ``"l2"`` of the logits,
            ``"logit_difference"`` of two answers, or a function of the logits
            ``[batch, position, vocab]`` that gives one number, as TransformerLens's metrics do.
        answers: For ``"logit_difference"`` two tokens, the second of which is subtracted: texts, or
            ids.
        layers: Layers (default: all).
        positions: The positions that are patched (default: all), as in :class:`Patch`.
        block: Positions in a block.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: An argument names something that does not exist, or the prompts cannot be
            aligned.
        NonFiniteError: NaN or Inf appeared in the logits.
        UnsupportedError: This model does not show the site.

    Source: Meng et al. 2022 (arXiv 2202.05262), section 2; Zhang and Nanda 2024 (arXiv 2309.16042)
        on what to measure.

    Example:
        >>> result = kv.activation_patching(  # doctest: +SKIP
        ...     model, clean, corrupted, distance="logit_difference", answers=(" Paris", " Rome")
        ... )
        >>> result.recovery.shape  # layers by positions  # doctest: +SKIP
    """
    adapter = wrap(model)
    site, layers = one_site(adapter, site, layers)
    check_patch_site(site)
    over = over.replace(" ", "") if isinstance(over, str) else over
    check_choice("over", over, OVER)
    check_choice("progress", progress, words.Progress)
    if not callable(distance):
        check_choice("distance", distance, ("kl", "l2", LOGIT_DIFFERENCE))
    answer = pair_for(adapter, "function" if callable(distance) else distance, answers)
    check_whole("block", block)
    if over == "heads":
        check_unread(
            "block",
            block,
            1,
            f"over={over!r} has no blocks; leave it out, or patch over='positions'",
        )
    clean_ids, corrupted_ids = (encode_all(adapter, prompts, 1) for prompts in (clean, corrupted))
    if len(clean_ids) != len(corrupted_ids) or len({*map(len, clean_ids)}) > 1:
        raise InputError(
            f"{len(clean_ids)} clean prompts of {', '.join(map(str, sorted({*map(len, clean_ids)})))} tokens and "
            f"{len(corrupted_ids)} corrupted ones were given: give them in pairs, all of as many tokens, since a column is one "
            "position of all."
        )
    differ = sorted(
        {at for pair in zip(clean_ids, corrupted_ids, strict=True) for at in check_aligned(*pair)}
    )
    length, swept = (
        len(corrupted_ids[0]),
        layers_with(adapter, site, chosen_layers(adapter, layers)),
    )
    low, high = Patch(site, positions="all" if positions is None else positions_of(positions)).span(
        length
    )
    if not 0 <= low < high:
        raise InputError(
            f"positions={positions!r} hold none of the prompt's, which are 0 to {length - 1}."
        )
    blocks = [(start, min(start + block, high)) for start in range(low, high, block)]
    spans = [(low, high)] if over == "heads" else blocks
    heads = [None] if over == "positions" else range(heads_at(adapter, site, f"over={over!r}"))
    targets = list(itertools.product(swept, heads, spans))

    def measure(logits: Tensor) -> Float64[Tensor, ""]:
        if callable(distance):
            return one_number(distance, logits)
        newest = logits[:, -1]
        if answer is not None:
            return logit_difference(newest, answer).mean()
        return DISTANCES[distance](clean_logits[:, -1].to(logits), newest).double().mean()

    with located(f"model {adapter.facts.name}"), own_threads(adapter), torch.no_grad():
        pure = PureRecompute(adapter, path_named("recompute"))
        recorder = Recorder(adapter, list(stored_sites(adapter, site)), swept, positions="all")
        clean_logits = pure.whole(torch.tensor(clean_ids, device=adapter.device), recorder)
        recorder.end_step()
        donor = HandedRows(
            "clean prompts",
            {hook_point: record[-1] for hook_point, record in recorder.kept.items()},
        )
        # One pair resumes at the first patched block; several pairs, or a function, take a whole
        # forward a patch.
        if len(corrupted_ids) > 1 or callable(distance):
            run: Callable[..., Tensor] = functools.partial(
                pure.whole, torch.tensor(corrupted_ids, device=adapter.device)
            )
            base = run()
        else:
            run = lambda hook: pure.patched(corrupted_ids[0], 0, hook)[None, None]  # noqa: E731
            base = pure.capture(corrupted_ids[0])[None, None]
        distances, hooks = [measure(clean_logits), measure(base)], list[PatchHook]()
        for layer, head, span in each(targets, "patching", "patch", progress):
            patch = Patch(site, (layer,), None if head is None else (head,), span, (0,), donor)
            hooks.append(PatchHook(adapter, [patch], None, length))
            distances.append(measure(run(hooks[-1])))
        numbers, same = (
            torch.stack(distances).cpu(),
            [not any(wrote) for wrote in read_changes(hooks)],
        )
    check_finite(numbers, "the patched runs")
    if all(same):
        log.warning(
            "activation_patching: every patch of %r %s: both prompts have the same there",
            site,
            UNCHANGED,
        )
    ends, values, texts = numbers[:2], numbers[2:], adapter.pieces(corrupted_ids[0])
    recovery = metrics.recovery((ends[0] - ends[1]).expand_as(values), ends[0] - values)
    labels = [
        {"layer": layer}
        | ({} if head is None else {"head": head})
        | (
            {}
            if over == "heads"
            else {"start": span[0], "stop": span[1], "text": "".join(texts[slice(*span)])}
        )
        for layer, head, span in targets
    ]
    frame = pd.DataFrame(labels).assign(
        value=values.numpy(), recovery=recovery.numpy(), unchanged=same
    )
    name = distance if isinstance(distance, str) else name_of(distance)
    about = provenance(adapter, site=site, over=over, distance=name, pairs=len(corrupted_ids))
    clean_end, corrupted_end = ends.tolist()
    return ActivationPatching(
        frame, site, over, name, clean_end, corrupted_end, texts, differ, len(corrupted_ids), about
    )


def check_aligned(clean: Sequence[int], corrupted: Sequence[int]) -> tuple[int, ...]:
    """Returns the positions at which two prompts' tokens differ.

    Raises:
        InputError: The prompts have different lengths, or the same tokens.
    """
    if len(clean) != len(corrupted):
        raise InputError(
            f"one prompt has {len(clean)} tokens and the other {len(corrupted)}, and positions are matched by number: give "
            "prompts of as many tokens, such as two that differ in one word of one token."
        )
    differ = tuple(
        at for at, pair in enumerate(zip(clean, corrupted, strict=True)) if pair[0] != pair[1]
    )
    if not differ:
        raise InputError(
            "both prompts have the same tokens, so one brings nothing into the other: give another prompt."
        )
    return differ
