"""The run that wrote a text beside its recomputation: how far apart they are inside, and what a
reader of activations sees of it.

Activations of generated text are nearly always those of a clean forward over the finished text.
That is another run than the one that chose the tokens. Both are recorded here on the same tokens,
and beside them a null: the same recomputation with as many tokens more behind the text, which on
paper changes nothing at the text's own positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.result import Contents, Result, signed
from kvinterp.comparison.which_run_findings import charts_of_runs, headline_of_runs, rows_of_runs
from kvinterp.errors import InputError, shown, unexpected
from kvinterp.models import Adapter, wrap
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import hook_point_of, hook_points_of
from kvinterp.models.inputs import encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.sites import CACHE_POSITIONS, LAYOUTS
from kvinterp.models.threads import own_threads
from kvinterp.paths import ExecutionPath, path_named, run
from kvinterp.recording import Generation, generated, record
from kvinterp.recording.generation import Pass, Stitched

PROBES = 64
"""Random directions of a residual stream that stand in for probes where none are given."""
GENERATE = "generate"
"""The run of the model's own ``generate``."""


@runtime_checkable
class Encoder(Protocol):
    """Anything with features: SAELens's ``SAE``, or a module of one's own with this method."""

    def encode(self, x: Tensor) -> Tensor:
        """Returns the activations of the features, ``[..., feature]``; a feature fires where its
        activation is not 0.
        """


Change = Callable[[Tensor, Tensor], Tensor]
"""A function of a site's rows of two runs, ``[position, ...]``: the share that differs at each
position.
"""


@dataclasses.dataclass(repr=False)
class WhichRun(Result):
    """Two runs of the same texts, by site, layer and position.

    Attributes:
        distances: One row an example, site, layer and position: ``part`` (prompt or generated),
            ``relative_l2`` (the norm of the difference over the norm of the recomputation), and
            ``null``, the same of two recomputations.
        readouts: One row an example, readout, site, layer and position: ``changed``, the share that
            differs (of the top neurons, of features that fire in either run, of probes' signs, of
            heads' argmaxes), and ``null``.
        texts: One row an example and position: ``token`` and its ``text`` (the id, where the model
            has no tokenizer).
        provenance: The runs, model and machine.
    """

    VERB: ClassVar = "which-run"
    headline, rows, charts = headline_of_runs, rows_of_runs, charts_of_runs

    distances: pd.DataFrame
    readouts: pd.DataFrame
    texts: pd.DataFrame
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """Names the model, the run and the number of texts in one line."""
        texts = self.distances["example"].nunique()
        return f"<WhichRun of {models_of([self.provenance])}: {self.provenance['run']}, {counted(texts, 'text')}>"

    def written(self) -> Contents:
        """Returns both tables with their provenance, and the summary."""
        tables = {"distances": self.distances, "readouts": self.readouts, "texts": self.texts}
        return signed(tables, self.provenance), {"provenance": self.provenance}

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> WhichRun:
        """Makes the result of its tables."""
        return cls(
            tables["distances"], tables["readouts"], tables["texts"], dict(summary["provenance"])
        )

    def overview(self) -> pd.DataFrame:
        """One row a readout, site and layer: the share that differs at generated positions, its
        null, and n.
        """
        rows = self.readouts.query("part == 'generated'").groupby(
            ["readout", "site", "layer"], as_index=False
        )
        return rows.agg(
            changed=("changed", "mean"), null=("null", "mean"), positions=("changed", "size")
        )

    def forks(self) -> pd.DataFrame:
        """The positions at which the runs part further than any position of the null does, the
        furthest first.
        """
        table = self.distances
        limit = table.groupby(["site", "layer"])["null"].transform("max")
        beyond = table.assign(limit=limit)[table["relative_l2"] > limit]
        return beyond.sort_values("relative_l2", ascending=False, ignore_index=True)

    def fork_points(self) -> pd.DataFrame:
        """The positions among :meth:`forks`, one a row, the furthest first.

        Returns:
            ``example``, ``position``, ``part``; ``places``, how many sites and layers part there;
            ``first_layer``, the first of them; ``relative_l2`` and ``limit`` of the site and layer
            that part furthest in units of the null's largest; ``limit`` is 0 where the null was
            exactly 0 at all sites and layers that part there, and these positions come last.
        """
        forks = self.forks()
        # A null of exactly 0 is no unit: any difference at all is beyond it.
        units = forks["limit"].where(forks["limit"] > 0)
        forks = forks.assign(times=(forks["relative_l2"] / units).fillna(0.0))
        forks = forks.sort_values(["times", "relative_l2"], ascending=False, kind="stable")
        table = forks.groupby(["example", "position", "part"], sort=False, as_index=False)
        points = table.agg(
            hook_points=("site", "size"), first_layer=("layer", "min"), relative_l2=("relative_l2", "first"),
            limit=("limit", "first"), site=("site", "first"), layer=("layer", "first"),
        )  # fmt: skip
        return points.reset_index(drop=True)


def which_run(
    model: Any,
    prompts: Any,
    layers: Iterable[int] | int | None = None,
    *,
    run: str | ExecutionPath = GENERATE,
    max_new_tokens: int = 32,
    top: int = 32,
    probes: Mapping[Any, Tensor] | None = None,
    features: Mapping[Any, Encoder] | None = None,
    first: int = 0,
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> WhichRun:
    """Holds the run that wrote each text against its recomputation, one forward over the finished
    text.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        layers: Layers to look at, such as 0,2,-1. Default: all.
        run: What writes the texts: generate (the model's own), or a path such as cached+int8.
        max_new_tokens: The most tokens of a text.
        top: How many of the largest neurons are held against each other.
        probes: Directions by site and layer, ``{("resid_post", 3): [probe, width]}``; a probe
            decides by the sign of its product with a row. Default: random directions at every
            layer, drawn from seed 0, as stand-ins.
        features: Objects with ``encode(x)`` (SAELens's ``SAE``, a ``torch.nn.Module``), by site and
            layer, or by a hook's name.
        first: The number of the first prompt.
        within: Opens the context in which each text is written, such as
            ``lambda: kv.steer(model, vector, layer=3)``; the recomputation is made outside of it,
            as a clean forward over a steered text is.

    Raises:
        InputError: Something given does not fit the model.
        UnsupportedError: The model cannot give a site, or has no ``generate``.

    Example:
        >>> kv.which_run(model, prompts, features={("resid_post", 3): sae}).overview()  # doctest: +SKIP
    """
    adapter = wrap(model)
    check_whole("top", top, 1)
    tokens = encode_all(adapter, prompts, max_new_tokens)
    readings = _readings(adapter, layers, top, probes, features)
    names = list(dict.fromkeys([*_sites(adapter), *(site for site, _ in readings)]))
    _, hook_points = hook_points_of(adapter, names, layers)
    hook_points = list(dict.fromkeys([*hook_points, *readings]))
    path = run if run == GENERATE else path_named(cast(Any, run))
    distances, readouts, texts = [], [], []
    with own_threads(adapter), torch.no_grad(), adapter.one_call():
        for example, prompt in enumerate(tokens, first):
            with within():
                wrote = _wrote(adapter, prompt, path, hook_points, max_new_tokens)
            fed = wrote.text[: len(wrote.positions)]
            more = fed[: adapter.facts.context - len(fed)]
            alone, longer = (_recomputed(adapter, text, hook_points) for text in (fed, fed + more))
            texts.append(
                _positions(wrote).assign(example=example, text=_shown_tokens(adapter, fed))
            )
            for hook_point in hook_points:
                rows = [
                    _rows(tensor, hook_point[0], len(fed))
                    for tensor in (wrote[hook_point], alone[hook_point], longer[hook_point])
                ]
                base = _positions(wrote).assign(
                    example=example, site=hook_point[0], layer=hook_point[1]
                )
                # A text that fills the context leaves no room for a null.
                apart, null = _apart(rows[0], rows[1]), _apart(rows[2], rows[1]) if more else np.nan
                distances.append(base.assign(relative_l2=apart, null=null))
                for readout, change in readings.get(hook_point, ()):
                    seen = (change(rows[0], rows[1]), change(rows[2], rows[1]))
                    changed, control = (shares.double().cpu().numpy() for shares in seen)
                    readouts.append(
                        base.assign(
                            readout=readout, changed=changed, null=control if more else np.nan
                        )
                    )
    about = provenance(
        adapter,
        run=str(path),
        max_new_tokens=max_new_tokens,
        top=top,
        probes="random" if probes is None else "given",
        within=within is not contextlib.nullcontext,
    )
    apart, changed, written = (
        pd.concat(pieces, ignore_index=True) for pieces in (distances, readouts, texts)
    )
    return WhichRun(apart, changed, written, about)


# The runs -----------------------------------------------------------------------------------------


def _sites(adapter: Adapter) -> list[str]:
    """What every model is asked for, as far as it has it."""
    return [
        "resid_post",
        *(site for site in ("post", "pattern") if adapter.supports(site, adapter.facts.layers - 1)),
    ]


def _wrote(
    adapter: Adapter,
    prompt: Sequence[int],
    path: str | ExecutionPath,
    hook_points: Sequence[HookPoint],
    steps: int,
) -> Generation:
    """The run that wrote the text."""
    sites, layers = (
        list(dict.fromkeys(site for site, _ in hook_points)),
        sorted({layer for _, layer in hook_points}),
    )
    if isinstance(path, str):
        return generated(adapter, prompt, sites, layers, max_new_tokens=steps)[0]
    how: dict[str, Any] = {
        "record": sites,
        "layers": layers,
        "positions": "all",
        "max_new_tokens": steps,
    }
    trace = run(adapter, list(prompt), path, **how)
    count, cut = len(trace.prompt) + len(trace.fed), len(trace.prompt)
    if path.form == "recompute":
        records: Mapping[HookPoint, Tensor] = {
            hook_point: rows[-1] for hook_point, rows in trace.records.items()
        }
    else:
        passes = [Pass(0, cut, 0), *(Pass(at, at + 1, at) for at in range(cut, count))]
        pieces = {
            hook_point: [tensor[None] for tensor in rows]
            for hook_point, rows in _by_position(trace.records, passes).items()
        }
        records = Stitched(pieces.__getitem__, list(pieces), passes, 0, (0, count))
    return Generation(trace.prompt, trace.tokens, records, tuple(range(count)), str(path))


def _by_position(
    records: Mapping[HookPoint, list[Tensor]], passes: Sequence[Pass]
) -> Mapping[HookPoint, list[Tensor]]:
    """Patterns with a key at each position: where a policy dropped rows, those that are left lie
    side by side.
    """
    spread = dict(records)
    for (site, layer), kept in records.items():
        rows_left = records.get((CACHE_POSITIONS, layer))
        if not LAYOUTS[site].keys or rows_left is None:
            continue
        fill = 0.0 if site == "pattern" else -torch.inf
        spread[site, layer] = []
        for tensor, rows, here in zip(kept, rows_left, passes, strict=True):
            # [kv_head, key] for [query_head, query, key]
            at = (
                rows.repeat_interleave(len(tensor) // len(rows), 0)[:, None]
                .expand_as(tensor)
                .to(tensor.device)
            )
            whole = tensor.new_full((*tensor.shape[:2], here.stop), fill)
            spread[site, layer].append(whole.scatter(2, at, tensor))
    return spread


def _recomputed(
    adapter: Adapter, text: Sequence[int], hook_points: Sequence[HookPoint]
) -> Mapping[HookPoint, Tensor]:
    """What one forward without a cache computes over a text."""
    sites, layers = (
        list(dict.fromkeys(site for site, _ in hook_points)),
        sorted({layer for _, layer in hook_points}),
    )
    with record(adapter, sites, layers, positions="all") as seen, adapter.own_state([]):
        adapter.forward(torch.tensor([text], device=adapter.device))
    return {hook_point: tensors[0][0] for hook_point, tensors in seen.kept.items()}


def _rows(tensor: Tensor, site: str, count: int) -> Tensor:
    """A site's rows with the position first: ``[position, ...]``, for a pattern
    ``[position, head, key]``.
    """
    if not LAYOUTS[site].keys:
        return tensor[:count]
    return tensor[:, :count, :count].transpose(0, 1)


def _positions(text: Generation) -> pd.DataFrame:
    positions = np.array(text.positions)
    part = np.where(positions < len(text.prompt), "prompt", "generated")
    tokens = np.array(text.text)[positions]
    return pd.DataFrame({"position": positions, "token": tokens, "part": part})


def _shown_tokens(adapter: Adapter, tokens: Sequence[int]) -> list[str]:
    """Each token as text; its id without a tokenizer."""
    return [
        f"{token} " if adapter.tokenizer is None else adapter.decode([token]) for token in tokens
    ]


def _apart(a: Tensor, b: Tensor) -> np.ndarray:
    """The norm of the difference of each row over the norm of the second."""
    a, b = (rows.double().flatten(1) for rows in (a, b))
    return cast(np.ndarray, ((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-300)).cpu().numpy())


# What is read off them ----------------------------------------------------------------------------


def _readings(
    adapter: Adapter,
    layers: Iterable[int] | int | None,
    top: int,
    probes: Mapping[Any, Tensor] | None,
    features: Mapping[Any, Encoder] | None,
) -> dict[HookPoint, list[tuple[str, Change]]]:
    """What is read off each site and layer."""
    _, hook_points = hook_points_of(adapter, _sites(adapter), layers)
    found: dict[HookPoint, list[tuple[str, Change]]] = {}
    for hook_point in hook_points:
        if hook_point[0] == "post":
            found.setdefault(hook_point, []).append((f"top {top} neurons", _top_changed(top)))
        if hook_point[0] == "pattern":
            found.setdefault(hook_point, []).append(("argmax of a head", _argmax_changed))
    if probes is None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(PROBES, adapter.facts.width, generator=generator, dtype=torch.float64)
        probes = {hook_point: drawn for hook_point in hook_points if hook_point[0] == "resid_post"}
        name = "sign of a random probe"
    else:
        name = "sign of a probe"
    for key, directions in probes.items():
        found.setdefault(_hook_point(adapter, key, "probes"), []).append(
            (name, _signs_changed(directions))
        )
    for key, encoder in (features or {}).items():
        if not callable(getattr(encoder, "encode", None)):
            raise unexpected(
                "features",
                encoder,
                "by site and layer an object with encode(x), such as SAELens's SAE",
            )
        found.setdefault(_hook_point(adapter, key, "features"), []).append(
            ("feature that fires", _features_changed(encoder))
        )
    return found


def _hook_point(adapter: Adapter, key: Any, what: str) -> HookPoint:
    hook_point = hook_point_of(key)
    if (
        not (isinstance(hook_point, tuple) and len(hook_point) == 2)
        or hook_point[0] not in LAYOUTS
        or not LAYOUTS[hook_point[0]].gathers
    ):
        raise InputError(
            f"{what} were given for {shown(key)}: expected a site with a vector at each position and a layer, such as "
            "('resid_post', 3), or a hook such as 'blocks.3.hook_resid_post'."
        )
    hook_points_of(adapter, [hook_point[0]], [hook_point[1]])
    return cast(HookPoint, hook_point)


def _top_changed(top: int) -> Change:
    def change(a: Tensor, b: Tensor) -> Tensor:
        count = min(top, a.shape[-1])
        picked = [
            torch.zeros(rows.shape, dtype=torch.bool).scatter(
                1, rows.cpu().abs().topk(count).indices, True
            )
            for rows in (a, b)
        ]
        return 1 - (picked[0] & picked[1]).sum(1) / count

    return change


def _argmax_changed(a: Tensor, b: Tensor) -> Tensor:
    return (a.argmax(-1) != b.argmax(-1)).double().mean(1)


def _signs_changed(directions: Tensor) -> Change:
    def change(a: Tensor, b: Tensor) -> Tensor:
        scores = [
            rows.double().flatten(1) @ directions.double().to(rows.device).T for rows in (a, b)
        ]
        return ((scores[0] > 0) != (scores[1] > 0)).double().mean(1)

    return change


def _features_changed(encoder: Encoder) -> Change:
    """The features that fire in one run alone, among those that fire in either."""

    def change(a: Tensor, b: Tensor) -> Tensor:
        dtype = next((p.dtype for p in getattr(encoder, "parameters", list)()), torch.float32)
        fires = [encoder.encode(rows.to(dtype)) != 0 for rows in (a, b)]
        return (fires[0] ^ fires[1]).sum(1) / (fires[0] | fires[1]).sum(1).clamp(min=1)

    return change
