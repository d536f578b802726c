"""Measure how much of the cached path's divergence each mitigation removes, and what it costs in
computation and memory.

Every path is fed the tokens of a recompute path with the same kernels. What remains of its
divergence from that path is what the mitigation leaves; its distance from float64 is given too.
Computation is counted in rows that each block processes per new token, memory in bytes per token
that a real cache would store. Then each policy on K and V (a compression) is combined with the
choice of path: does its error add to that of decoding from a cache, or does one make the other
larger?
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.commands.kit import (
    Cell,
    CellResults,
    Chart,
    Charts,
    InputError,
    OfModel,
    Panel,
    Result,
    Rows,
    Tables,
    compare_examples,
    counted,
    finding,
    finding_from,
    joined,
    metrics,
    number,
    option,
    shared,
    tried,
)
from kvinterp.models import dtype_named
from kvinterp.paths import Cached, Recompute, path_named, run
from kvinterp.policies import policy_named

TRUTH = "recompute@float64"

COSTS = {
    "rows_a_token": "rows that a block computes for a new token",
    "bytes_a_token": "bytes of K and V a token",
}
FRONT = "on the front: no path is better in one and as good in all"


class Mitigate(OfModel):
    """What does a mitigation leave of the divergence, and at what cost?"""

    SUMMED = ("mitigations", "interactions")
    NOTED = ("max_new_tokens",)

    prompts: str = shared("prompts", "arithmetic:8")
    path: tuple[str, ...] = option(
        (
            "cached",
            "cached[cache=float32]",
            "cached[refresh=16]",
            "cached[refresh=4]",
            "cached[refresh=1]",
            "cached[smooth=0.5]",
            "cached[kernels=layer_cast]",
            "cached[kernels=batch_invariant]",
        ),
        "A mitigation, written as a path (docs/paths.md); may be given several times.",
        empty="refused",
    )
    policy: tuple[str, ...] = option(
        ("int8", "int4"),
        "A policy to combine with cached and recompute; may be given several times.",
    )
    max_new_tokens: int = shared("max_new_tokens", 24, min=2)

    def cells(self) -> list[Cell]:
        """A cell a path, beside its reference and beside float64; three a policy."""
        pairs: dict[str, tuple[str, str]] = {}
        for path in map(path_named, self.path):
            if path.form != "cached":
                raise InputError(
                    f"path {str(path)!r} is no mitigation of the cached path: expected cached[...], as in cached[refresh=4]."
                )
            pairs[f"path {path}"] = (
                str(Recompute(dtype=path.dtype, kernels=path.kernels)),
                str(path),
            )
            pairs[f"truth {path}"] = TRUTH, str(path)
        for policy in map(policy_named, self.policy):
            if policy.evicts or policy.sites:
                raise InputError(
                    f"policy {policy} lets go of rows or chooses them by attention, and the recompute path holds none: it "
                    f"cannot be crossed with the path; give it as --path cached+{policy}."
                )
            pairs[f"alone {policy}"] = "recompute", str(Recompute(policy))
            pairs[f"both {policy}"] = "recompute", str(Cached(policy, prefill="stored"))
        if self.policy:
            pairs["neither"] = "recompute", "cached"
        tried(self.adapter(), (text for both in pairs.values() for text in both))
        return [
            Cell(f"pair-{number}", self.measured, {"what": what, "a": a, "b": b})
            for number, (what, (a, b)) in enumerate(pairs.items())
        ]

    def measured(self, what: str, a: str, b: str) -> pd.DataFrame:
        """One path beside its reference: a row a prompt, over the steps from 1 on."""
        adapter, prompts, options = (
            self.adapter(),
            self.prompt_list,
            self.choices("max_new_tokens"),
        )
        steps = compare_examples(adapter, prompts, a, b, **options).steps.query("step > 0")
        steps = steps.assign(
            squared=steps["rms_logit"] ** 2,
            differs=steps["max_abs_logit"] > 0,
            flip=~steps["top1_agree"].astype(bool),
        )
        by = steps.groupby("example")
        table = (
            by[["kl", "squared"]]
            .mean()
            .join(by[["differs", "flip"]].sum())
            .assign(steps=by.size())
            .reset_index()
        )
        # Only a mitigation has a cost that is asked for.
        rows, bytes_ = (
            _cost(adapter, prompts[0], b, **options)
            if what.startswith("path")
            else (np.nan, np.nan)
        )
        what, _, of = what.partition(" ")
        # What is said of the path is the same on each of its lines.
        return table.assign(
            what=what, of=of, reference=a, path=b, rows_a_token=rows, bytes_a_token=bytes_
        )

    def tables(self, results: CellResults) -> Tables:
        """What each leaves and costs, and how each policy's error goes with the path's."""
        examples = joined(results)["table"]
        return {
            "examples": examples,
            "mitigations": pareto(costs_of(examples)),
            "interactions": interactions_of(examples),
        }

    def summary(self, tables: Tables) -> dict[str, Any]:
        """How many prompts there are too."""
        return {"prompts": int(tables["examples"]["example"].nunique()), **super().summary(tables)}

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """Which path leaves least."""
        table = result.tables["mitigations"]
        least = table.sort_values(["mean_kl", "rows_a_token", "bytes_a_token"], kind="stable").iloc[
            0
        ]
        alike = int((table["mean_kl"] == least["mean_kl"]).sum())
        who = (
            f"{least['path']} leaves"
            if alike == 1
            else f"{least['path']} and {counted(alike - 1, 'other')} leave"
        )
        left = f"KL {number(least['mean_kl'])} nats" if least["differ"] else "nothing, bit for bit"
        return [
            f"Of {counted(len(table), 'path')}, {who} least of the divergence from the path's own recompute path: {left} "
            f"({counted(int(least['prompts']), 'prompt')}). Costs are rows computed and bytes stored, not seconds."
        ]

    def rows(self, result: Result) -> Rows:
        """What each path leaves and costs, and whether each policy's error adds to the path's."""
        for row in result.tables["mitigations"].to_dict("records"):
            of_path = functools.partial(finding, path=row["path"])
            nats = functools.partial(of_path, n=row["prompts"], measure="nats")
            yield nats("median KL left, of the path's own recompute path", row["typical_kl"], (row["low"], row["high"]),
                       note=FRONT if row["pareto"] else "")  # fmt: skip
            yield nats("mean KL left", row["mean_kl"])
            yield of_path(
                "flips",
                row["flips"] / max(row["steps"], 1),
                n=row["steps"],
                unit="steps",
                measure="%",
            )
            yield nats("mean KL from float64", row["truth_kl"])
            yield from (of_path(what, row[cost]) for cost, what in COSTS.items())
        for row in result.tables["interactions"].to_dict("records"):
            word = (
                "more than their sum"
                if row["low"] > 0
                else "less than their sum"
                if row["high"] < 0
                else ""
            )
            word = word or (
                "too few prompts" if pd.isna(row["low"]) else "not told apart from their sum"
            )
            what = "median of the squared logit error of policy and path together, less each alone"
            yield finding_from(
                row, what, "contrast", n=row["prompts"], verdict=word, policy=row["policy"]
            )

    def charts(self, result: Result) -> Charts:
        """Divergence left against rows computed; and of policies and paths where they were
        crossed.
        """
        table = result.tables["mitigations"]
        table = table.assign(line=table["pareto"].map({True: FRONT, False: "behind it"}))
        dots = functools.partial(Panel, y="path", kind="dots", color="line")
        crossed = result.tables["interactions"]
        crossed = crossed.assign(added=crossed["policy_alone"] + crossed["path_alone"])
        bars = {
            "policy_alone": "policy alone",
            "path_alone": "path alone",
            "added": "their sum",
            "both": "both together",
        }
        long = crossed.melt("policy", list(bars), "part", "error")
        return {
            "mitigations": Chart("What is left, and what it costs", [
                dots(table, "typical_kl", label="KL from its recompute path (nats, median, 95% interval)"),
                dots(table, "rows_a_token", label="rows that a block computes for each new token", scale="log", ends="none"),
            ]),
            "mitigations_interaction": Chart("Does a policy's error add to that of decoding from a cache?", [
                Panel(long, "error", "policy", "dots", color="part", names=bars, label="mean squared logit error")
            ]),
        }  # fmt: skip


def _cost(adapter: Any, prompt: Any, text: str, max_new_tokens: int) -> tuple[float, float]:
    """Rows that the first block is given for each token decoded after the prefill, and bytes that a
    cache stores of a token.
    """
    path, counts = path_named(text), list[int]()
    compute_dtype, store_dtype = dtype_named(path.dtype), dtype_named(path.cache_dtype)
    running = adapter if compute_dtype is None else adapter.at(compute_dtype)

    def count(_: Any, args: Any, kwargs: Any) -> None:
        stream = next(
            argument for argument in (*args, *kwargs.values()) if hasattr(argument, "shape")
        )
        counts.append(stream.shape[:2].numel())

    handle = next(iter(running.blocks)).register_forward_pre_hook(count, with_kwargs=True)
    try:
        decoded = len(run(adapter, prompt, path, max_new_tokens=max_new_tokens).tokens) - 1
    finally:
        handle.remove()
    facts, bits = running.facts, 0.0
    for tensor in ("k", "v"):
        of_policy = path.policy.bits_stored(tensor, facts.head_dim)
        plain = 8 * (store_dtype or path.kernels.compute_dtype(running.dtype)).itemsize
        bits += plain if of_policy is None else of_policy
    return sum(counts[1:]) / max(
        decoded, 1
    ), bits * facts.head_dim * facts.kv_heads * facts.layers / 8


# What the pairs say -------------------------------------------------------------------------------


def costs_of(examples: pd.DataFrame) -> pd.DataFrame:
    """What each mitigation leaves of the divergence, and what it costs.

    Args:
        examples: A row a pair and prompt: what, path, kl, squared, differs, flip, steps,
            rows_a_token, bytes_a_token.

    Returns:
        One row a path: reference, prompts, steps, mean_kl (nats, of prompts' means), typical_kl
        (their median) with its 95% interval over prompts (low, high), rms_logit, differ (steps
        whose logits differ), flips, truth_kl and truth_rms_logit (from float64), rows_a_token,
        bytes_a_token.
    """
    rows = []
    for path, group in examples[examples["what"] == "path"].groupby("path", sort=False):
        truth = examples[(examples["what"] == "truth") & (examples["path"] == path)]
        first = group.iloc[0]
        rows.append(
            {
                **first[["path", "reference"]],
                "prompts": len(group),
                "steps": group["steps"].sum(),
                **dict(
                    zip(
                        ("mean_kl", "typical_kl", "low", "high"),
                        metrics.typical(group["kl"])[:4],
                        strict=True,
                    )
                ),
                "rms_logit": np.sqrt(group["squared"].mean()),
                "differ": group["differs"].sum(),
                "flips": group["flip"].sum(),
                "truth_kl": truth["kl"].mean(),
                "truth_rms_logit": np.sqrt(truth["squared"].mean()),
                **first[list(COSTS)],
            }
        )
    return pd.DataFrame(rows)


def pareto(costs: pd.DataFrame) -> pd.DataFrame:
    """The table with ``pareto``: whether no other path leaves, computes and stores as little, and
    less of one of them.
    """
    three = costs[["mean_kl", "rows_a_token", "bytes_a_token"]].to_numpy(float)
    return costs.assign(
        pareto=[not ((three <= one).all(1) & (three < one).any(1)).any() for one in three]
    )


def interactions_of(examples: pd.DataFrame) -> pd.DataFrame:
    """Whether a policy's error and the path's add up, in mean squares of the logits' difference
    from the plain recompute path.

    Independent errors add in their squares. The contrast is both together, less the policy alone
    (on the recompute path), less the path alone (cached, no policy); the cell without either is 0.

    Returns:
        One row a policy: prompts, policy_alone, path_alone, both (logits squared, means of
        prompts), contrast, its median over prompts with the 95% interval (low, high), and ratio,
        both over the sum of the two.
    """
    path = examples[examples["what"] == "neither"].set_index("example")["squared"]
    rows = []
    for policy, group in examples[examples["what"].isin(["alone", "both"])].groupby(
        "of", sort=False
    ):
        alone, both = (
            group[group["what"] == what].set_index("example")["squared"]
            for what in ("alone", "both")
        )
        contrast = metrics.typical(both - alone - path.reindex(both.index))
        added = alone.mean() + path.mean()
        ratio = both.mean() / added if added > 0 else np.nan
        rows.append(
            (
                policy,
                len(both),
                alone.mean(),
                path.mean(),
                both.mean(),
                contrast.median,
                *contrast.interval,
                ratio,
            )
        )
    names = [
        "policy",
        "prompts",
        "policy_alone",
        "path_alone",
        "both",
        "contrast",
        "low",
        "high",
        "ratio",
    ]
    return pd.DataFrame(rows, columns=names)
