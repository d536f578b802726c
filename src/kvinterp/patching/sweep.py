"""Sweeps: the same patch at every layer, head or block of positions, with the controls that make the answer trustworthy."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp import metrics
from kvinterp.data import Prompt
from kvinterp.errors import InputError, located, unknown
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.adapter import RESIDUAL_SITES, Site
from kvinterp.patching.lanes import Donor, PureLane, RunnerLane
from kvinterp.patching.patch import PATCH_SITES, Patch, PatchWatcher, Positions, Window, stored_sites
from kvinterp.patching.planted import Plant, localise
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import ExecutionPath, path_named
from kvinterp.paths.runner import check_choice, encode
from kvinterp.provenance import provenance
from kvinterp.recording import chosen_layers
from kvinterp.recording.recorder import HEADS

__all__ = ["DIRECTIONS", "DISTANCES", "PRESETS", "SWEEPS", "Sweep", "sweep"]

SWEEPS = {
    "single": "one layer at a time",
    "cumulative": "layers 0 to l together",
    "cumulative-from": "layers l to the last together",
    "heads": "one head of one layer at a time (query heads, or KV heads for k, v and the cache)",
    "kv-heads": "one KV head of one layer's cache at a time",
    "blocks": "one block of positions at a time, in all layers",
}
DIRECTIONS = {
    "into-recompute": "the cached path's tensors are put into the recompute path",
    "into-cached": "the recompute path's tensors are put into the cached path, where they persist through K and V",
}
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": metrics.kl_divergence,
    "l2": lambda donor, other: (donor.double() - other.double()).norm(dim=-1),
    "margin": lambda donor, other: (metrics.logit_margin(donor) - metrics.logit_margin(other)).abs(),
}
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2604.15409, section 5.2: hidden states of the cached path are put into the recompute path at the first decode
    # step, one layer at a time and cumulatively, on the examples with the highest KL, 32 free-running steps.
    "paper": {
        "site": "resid_post",
        "direction": "into-recompute",
        "steps": "first",
        "protocol": "free",
        "max_new_tokens": 32,
    },
    "matched": {
        "site": "resid_post",
        "direction": "into-recompute",
        "steps": "every",
        "protocol": "matched",
        "max_new_tokens": 32,
    },
}


@dataclasses.dataclass(frozen=True)
class _Lane:
    """What one row of the table patches."""

    labels: dict[str, Any]
    patches: tuple[Patch, ...]
    control: str = ""


@dataclasses.dataclass
class Sweep:
    """Recovery of every patch of a sweep: ``1 - D(patched, donor) / D(unpatched, donor)``.

    Attributes:
        recovery: One row an example and patch: site, layer, head, positions, step_set, direction, protocol, example,
            recovery (a fraction; NaN where the unpatched paths are bitwise equal), d_before, d_after, defined.
        steps: One row an example, patch and step: d_before, d_after.
        controls: One row an example and control: self (0), other-prompt, floor, all-positions; and one row a planted cause
            (on the first prompt, in float64: the share of the difference found, at the place found).
        about: Paths, protocol, distance and provenance.
    """

    recovery: pd.DataFrame
    steps: pd.DataFrame
    controls: pd.DataFrame
    about: dict[str, Any]

    def aggregate(self) -> pd.DataFrame:
        """Over examples, for each patch: mean, median, quartiles and a bootstrap interval of the mean recovery."""
        rows = []
        for labels, group in self.recovery.groupby(["site", "layer", "head", "positions"], sort=False):
            values = group.loc[group["defined"], "recovery"].to_numpy()
            row = dict(zip(("site", "layer", "head", "positions"), labels, strict=True))
            row |= {"examples": len(group), "defined": len(values)}
            if len(values):
                interval = metrics.bootstrap_interval(values)
                quartiles = np.quantile(values, (0.25, 0.5, 0.75))
                row |= {"mean": values.mean(), "median": quartiles[1], "low_quartile": quartiles[0]}
                row |= {"high_quartile": quartiles[2], "interval_low": interval.low, "interval_high": interval.high}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        aggregate = self.aggregate()
        known = aggregate.dropna(subset=["mean"]) if "mean" in aggregate else aggregate.iloc[:0]
        best = known.loc[known["mean"].idxmax()].to_dict() if len(known) else None
        controls = self.controls.groupby("control")["recovery"].mean() if len(self.controls) else pd.Series(dtype=float)
        floor = self.controls[self.controls["control"] == "floor"] if len(self.controls) else self.controls
        return {
            **{k: v for k, v in self.about.items() if k != "provenance"},
            "examples": int(self.recovery["example"].nunique()),
            "examples_without_difference": int((~self.recovery.groupby("example")["defined"].first()).sum()),
            "best": best,
            "controls": {name: None if np.isnan(value) else float(value) for name, value in controls.items()},
            "floor": None if floor.empty else float(floor["d_after"].mean()),
            "provenance": self.about["provenance"],
        }


def sweep(
    model: Any,
    prompts: Any,
    site: str = "resid_post",
    over: str = "single",
    *,
    direction: str = "into-recompute",
    steps: str | tuple[int, ...] = "every",
    protocol: str = "matched",
    positions: Positions | None = None,
    layers: Iterable[int] | None = None,
    max_new_tokens: int = 32,
    distance: str = "kl",
    block: int = 16,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    controls: str = "all",
    progress: str = "bar",
) -> Sweep:
    """Patches one place at a time and says how much of the difference between the paths each recovers.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        site: A site of PATCH_SITES.
        over: What varies; see SWEEPS.
        direction: ``"into-recompute"`` or ``"into-cached"``.
        steps: ``"every"`` decode step, the ``"first"`` (step 1), or a tuple of steps.
        protocol: ``"matched"`` (all lanes are fed the cached path's tokens; D over the patched steps) or ``"free"``
            (each lane is fed its own tokens; D over all steps).
        positions: ``"newest"`` (default; ``"all"`` for the cache), ``"all"``, ``"earlier"`` or ``(start, stop)``.
        layers: Layers to sweep; all unless said.
        max_new_tokens: Most steps.
        distance: ``"kl"`` (nats, donor against patched), ``"l2"`` of the logits, or ``"margin"``.
        block: Positions in a block, for ``over="blocks"``.
        cached: The cached path.
        recompute: The recompute path.
        controls: ``"all"``; ``"quick"`` leaves out the planted causes, which need the model in float64; or ``"none"``.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: This kind of model cannot give the site.
    """
    adapter = wrap(model)
    for name, given, known in (
        ("direction", direction, DIRECTIONS),
        ("protocol", protocol, ("matched", "free")),
        ("distance", distance, DISTANCES),
        ("controls", controls, ("all", "quick", "none")),
        ("progress", progress, ("bar", "none")),
    ):
        check_choice(name, given, tuple(known))
    paths = (path_named(cached), path_named(recompute))
    if paths[0].form != "cached" or paths[1].form != "recompute" or paths[1].chunk is not None:
        raise InputError(
            f"a sweep needs a cached and an unchunked recompute path, and {paths[0]} and {paths[1]} were given."
        )
    single = isinstance(prompts, str | Prompt) or (len(prompts) > 0 and isinstance(prompts[0], int))
    items = [prompts] if single else list(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    tokens = [encode(adapter, item, max_new_tokens) for item in items]
    spot = positions if positions is not None else "all" if site in ("kv", "cache_k", "cache_v") else "newest"
    lanes = _lanes(adapter, site, over, spot, steps, layers, block, max(map(len, tokens)) + max_new_tokens)
    setting = _Setting(adapter, paths, direction, protocol, steps, distance, max_new_tokens, site, over)
    rows: list[dict[str, Any]] = []
    per_step: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    with located(f"model {adapter.facts.name}, {direction}"):
        for example, prompt in enumerate(
            tqdm(tokens, "patching", unit="prompt", disable=None if progress == "bar" else True)
        ):
            other = tokens[(example + 1) % len(tokens)] if len(tokens) > 1 else list(reversed(prompt))
            every = lanes + (_controls(adapter, spot, steps) if controls != "none" else [])
            for lane, row, by_step in _one_example(setting, every, prompt, other):
                row["example"] = example
                (checks if lane.control else rows).append(row)
                per_step += [] if lane.control else [{**row_labels(row), "example": example, **entry} for entry in by_step]
        if controls == "all":
            checks += _planted(adapter, tokens[0])
    about = {
        "site": site, "sweep": over, "direction": direction, "protocol": protocol, "steps": str(steps),
        "distance": distance,
        "paths": {"cached": str(paths[0]), "recompute": str(paths[1])}, "positions": str(spot),
        "provenance": provenance(adapter, max_new_tokens=max_new_tokens),
    }  # fmt: skip
    return Sweep(pd.DataFrame(rows), pd.DataFrame(per_step), pd.DataFrame(checks), about)


def row_labels(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that say which patch a row is about."""
    return {name: row[name] for name in ("site", "layer", "head", "positions")}


@dataclasses.dataclass(frozen=True)
class _Setting:
    adapter: Adapter
    paths: tuple[ExecutionPath, ExecutionPath]
    direction: str
    protocol: str
    steps: str | tuple[int, ...]
    distance: str
    max_new_tokens: int
    site: str
    over: str


def _lanes(
    adapter: Adapter,
    site: str,
    over: str,
    positions: Positions,
    steps: str | tuple[int, ...],
    layers: Iterable[int] | None,
    block: int,
    length: int,
) -> list[_Lane]:
    if site not in PATCH_SITES:
        raise unknown("patch site", site, PATCH_SITES)
    if over not in SWEEPS:
        raise unknown("sweep", over, SWEEPS)
    cache = site in ("kv", "cache_k", "cache_v")
    chosen = chosen_layers(adapter, layers)
    facts = adapter.facts

    def lane(where: Sequence[int], layer: int, head: int = -1, spot: Positions = positions) -> _Lane:
        patch = Patch(site, tuple(where), None if head < 0 else (head,), spot, steps)
        return _Lane({"site": site, "layer": layer, "head": head, "positions": _shown(spot)}, (patch,))

    if over == "single":
        made = [lane([layer], layer) for layer in chosen]
    elif over == "cumulative":
        made = [lane(range(layer + 1), layer) for layer in chosen]
    elif over == "cumulative-from":
        made = [lane(range(layer, facts.layers), layer) for layer in chosen]
    elif over == "blocks":
        if not isinstance(block, int) or block < 1:
            raise InputError(f"block={block!r} was given: expected a whole number of positions of at least 1.")
        spans = [(start, start + block) for start in range(0, length, block)]
        made = [lane(chosen, -1, -1, span) for span in spans]
    else:
        if over == "kv-heads" and not cache and site not in ("k", "v"):
            raise InputError(
                f"sweep 'kv-heads' needs a site with KV heads, and {site!r} was given: use kv, cache_k or cache_v."
            )
        if not cache and site not in HEADS:
            raise InputError(
                f"sweep {over!r} needs a site with heads, and {site!r} has none: use q, k, v, z, pattern or kv."
            )
        query = site in HEADS and HEADS[site][1] == "query"
        heads = range(facts.query_heads if query else facts.kv_heads)
        made = [lane([layer], layer, head) for layer, head in itertools.product(chosen, heads)]
    PatchWatcher(adapter, [patch for each in made for patch in each.patches])
    return made


def _controls(adapter: Adapter, positions: Positions, steps: str | tuple[int, ...]) -> list[_Lane]:
    last, middle = adapter.facts.layers - 1, adapter.facts.layers // 2

    def lane(name: str, layer: int, spot: Positions) -> _Lane:
        labels = {"site": "resid_post", "layer": layer, "head": -1, "positions": _shown(spot)}
        return _Lane(labels, (Patch("resid_post", (layer,), None, spot, steps),), name)

    return [
        lane("self", middle, "newest"),
        lane("other-prompt", middle, "newest"),
        lane("floor", last, "newest"),
        lane("all-positions", middle, "all"),
    ]


def _planted(adapter: Adapter, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Plants a difference in each kind of place and says where it was found."""
    middle = adapter.facts.layers // 2
    checks = []
    for plant in (Plant("kv", middle), Plant("row", middle), Plant("unembedding")):
        found = localise(adapter, list(prompt), plant, dtype="float64")
        right = found.place == plant.place and (plant.place == "unembedding" or found.layer == plant.layer)
        checks.append(
            {
                "control": f"planted {plant.place}",
                "site": found.place,
                "layer": found.layer,
                "recovery": found.share if right else float("nan"),
                "example": 0,
            }
        )
    return checks


def _shown(positions: Positions) -> str:
    return positions if isinstance(positions, str) else f"{positions[0]}:{positions[1]}"


def _one_example(
    setting: _Setting, lanes: Sequence[_Lane], prompt: Sequence[int], other: Sequence[int]
) -> list[tuple[_Lane, dict[str, Any], list[dict[str, float]]]]:
    """Advances donor, base, and one lane a patch beside each other, and measures every lane against the donor."""
    adapter, (cached, recompute) = setting.adapter, setting.paths
    donor_path, base_path = (cached, recompute) if setting.direction == "into-recompute" else (recompute, cached)
    donor_model, base_model = (adapter.at(dtype_named(path.dtype)) for path in (donor_path, base_path))
    room, count = setting.max_new_tokens, len(prompt)
    wanted = _wanted(donor_model, lanes)
    gather = [s for s in RESIDUAL_SITES if donor_path.form == "cached" and any(_spreads(lane, s) for lane in lanes)]
    donor = Donor(donor_model, wanted, count, gather)
    needs_self = any(lane.control == "self" for lane in lanes)
    needs_other = any(lane.control == "other-prompt" for lane in lanes)
    pure = PureRecompute(adapter, recompute)
    ends = adapter.end_tokens
    with contextlib.ExitStack() as stack:

        def runner(path: ExecutionPath, tokens: Sequence[int], watchers: Sequence[Any]) -> RunnerLane:
            return stack.enter_context(RunnerLane(adapter, path, tokens, room, watchers))

        giving = runner(donor_path, prompt, [donor])
        mirror = Donor(base_model, _wanted(base_model, [x for x in lanes if x.control == "self"]), count)
        stranger = Donor(donor_model, _wanted(donor_model, [x for x in lanes if x.control == "other-prompt"]), len(other))
        base: Any = runner(base_path, prompt, [mirror]) if needs_self or base_path.form == "cached" else None
        strange = runner(donor_path, other, [stranger]) if needs_other else None
        taking = []
        for lane in lanes:
            watcher = PatchWatcher(base_model, lane.patches, _source(lane, donor, mirror, stranger, count), count)
            pure_lane = PureLane(pure, prompt, watcher)
            taking.append(pure_lane if base_path.form == "recompute" else runner(base_path, prompt, [watcher]))
        unpatched = PureLane(pure, prompt, None) if base_path.form == "recompute" else base
        feeds: list[int | None] = [None] * (len(lanes) + 2)
        stranger_feed: int | None = None
        measured: list[Tensor] = []
        for step in range(room):
            donor_logits = giving.advance(feeds[0])
            if strange is not None:
                logits = strange.advance(stranger_feed)
                stranger_feed = int(logits.argmax())
            if isinstance(unpatched, PureLane):
                if base is not None:
                    base.advance(feeds[1])
                if _patched_at(lanes, step):
                    # Captured so that the lanes whose tokens agree can begin at their first patched block.
                    pure.capture([*unpatched.tokens, *([] if feeds[1] is None else [feeds[1]])])
            base_logits = unpatched.advance(feeds[1])
            rows = [base_logits, *(lane.advance(feed) for lane, feed in zip(taking, feeds[2:], strict=True))]
            stacked = torch.stack([row.to(donor_logits.device) for row in rows])
            measured.append(DISTANCES[setting.distance](donor_logits.expand_as(stacked), stacked))
            lead = int((donor_logits if donor_path.form == "cached" else base_logits).argmax())
            feeds = _feeds(setting.protocol, lead, donor_logits, rows)
            if lead in ends:
                break
    distances = torch.stack(measured).cpu().numpy()
    return [_row(setting, lane, distances[:, 0], distances[:, 1 + i]) for i, lane in enumerate(lanes)]


def _source(lane: _Lane, donor: Donor, mirror: Donor, stranger: Donor, count: int) -> Window:
    if lane.control == "self":
        return mirror.window
    if lane.control == "other-prompt":
        return lambda site, layer: stranger.window_aligned_to(donor.end, site, layer)
    return donor.window


def _feeds(protocol: str, lead: int, donor_logits: Tensor, rows: Sequence[Tensor]) -> list[int | None]:
    if protocol == "matched":
        return [lead] * (len(rows) + 1)
    return [int(donor_logits.argmax()), *(int(row.argmax()) for row in rows)]


def _patched_at(lanes: Sequence[_Lane], step: int) -> bool:
    return any(patch.active(step) for lane in lanes for patch in lane.patches)


def _wanted(adapter: Adapter, lanes: Sequence[_Lane]) -> list[Site]:
    return [
        (site, layer)
        for lane in lanes
        for patch in lane.patches
        for site in stored_sites(adapter, patch.site)
        for layer in chosen_layers(adapter, patch.layers)
    ]


def _spreads(lane: _Lane, site: str) -> bool:
    return any(patch.site == site and patch.positions != "newest" for patch in lane.patches)


def _row(
    setting: _Setting, lane: _Lane, before: np.ndarray, after: np.ndarray
) -> tuple[_Lane, dict[str, Any], list[dict[str, float]]]:
    steps = np.arange(len(before))
    active = np.array([any(patch.active(int(step)) for patch in lane.patches) for step in steps])
    counted = active if setting.protocol == "matched" else steps >= 1
    first = min(int(steps[counted][0]), 1) if counted.any() else 0
    d_before = float(before[counted].mean()) if counted.any() else 0.0
    d_after = float(after[counted].mean()) if counted.any() else 0.0
    recovered = float(
        metrics.recovery(torch.tensor(d_before, dtype=torch.float64), torch.tensor(d_after, dtype=torch.float64))
    )
    row = {
        **lane.labels,
        "step_set": str(setting.steps),
        "direction": setting.direction,
        "protocol": setting.protocol,
        "recovery": recovered,
        "d_before": d_before,
        "d_after": d_after,
        "defined": d_before > 0,
        "steps": int(counted.sum()),
        "first_step": first,
    }
    if lane.control:
        row["control"] = lane.control
    by_step = [
        {"step": int(step), "d_before": float(before[step]), "d_after": float(after[step])} for step in steps[counted]
    ]
    return lane, row, by_step
