"""What the root-cause experiments found, a sentence each, with how many it is of, its interval and the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import between, counted, listed, models_on, number, typical_said, upper
from kvinterp.reading.results import only

__all__ = ["ladder_title_of", "said_of_root_cause"]


def said_of_root_cause(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[str]:
    """What was found, from tables of :class:`kvinterp.experiments.root_cause.RootCause` and the provenance of each model."""
    lines = [
        f"{models_on(provenance)}. Intervals are 95%; other machines "
        "choose other orders of addition, and every number from here on is this one's.",
    ]
    said: dict[str, Callable[..., list[str]]] = {
        "accumulation": lambda sums: [_said_of_sums(sums)],
        "propagation": _said_of_propagation,
        "kv_write": _said_of_writing,
        "flips": lambda flips: _said_of_flips(flips, tables["correlations"]),
        "ladder": _said_of_ladder,
        "gqa": _said_of_sharing,
        "repeated_heads": _said_of_repeats,
    }
    found = (line for name, say in said.items() if name in tables for line in say(tables[name]))
    return [*lines, *found, *_said_of_seeds(tables)]


def _said_of_sums(sums: pd.DataFrame) -> str:
    values = only(sums, product="values")
    low, high = values["length"].min(), values["length"].max()
    said = f"1. Sums over {low} to {high} positions, one term after another, of random signs. The error"
    for column, to, after in (
        ("mean_relative", "the terms' magnitudes", ";"),
        ("relative_to_result", "the result", "."),
    ):
        grown = []
        for name, group in values.groupby("accumulate", sort=False):
            table = group.pivot(index="seed", columns="length", values=column)
            ratio = (table[high] / table[low]).dropna()
            grown.append(f"{name} {number(ratio.mean())}-fold on average ({typical_said(ratio, 'seed')})")
        said += f" relative to {to} changes " + ", ".join(grown) + after
    return said


def _said_of_propagation(behind: pd.DataFrame) -> list[str]:
    deepest = behind[(behind["layer"] == behind["layer"].max()) & (behind["source"] == 0)]
    if behind["layer"].max() == 0 or deepest[["l2_growth", "relative_growth"]].dropna().empty:
        return []
    said = "2. Layer 0's output rounded once, at the last layer, as a multiple of what it was there: "
    parts = []
    for column, name in (("l2_growth", "absolute L2 (the paper's measure)"), ("relative_growth", "relative to the stream")):
        medians = deepest.groupby("model")[column].median()
        parts.append(f"{name} {between(list(medians))}")
    count, prompts = deepest["model"].nunique(), deepest["prompt"].nunique()
    return [f"{said}{'; '.join(parts)} (medians over {counted(prompts, 'prompt')} of each of {count} models)."]


def _said_of_writing(written: pd.DataFrame) -> list[str]:
    if written.empty:
        return []
    said = []
    for kernels, group in written.groupby("kernels", sort=False):
        if not group["relative_error"].max() > 0:
            said.append(f"exactly 0 ({kernels})")
            continue
        interval = _typical(group, "relative_error")
        said.append(f"{number(group['relative_error'].mean())}{interval} ({kernels})")
    return [
        "3. K and V written alone against those written jointly, mean relative error, interval over "
        f"{counted(written['prompt'].nunique(), 'prompt')}: {', '.join(said)}."
    ]


def _typical(table: pd.DataFrame, column: str, by: str = "prompt") -> str:
    return f" ({typical_said(table[column], clusters=table[by].to_numpy(str))})"


_AGAINST = {"mean_kl": "free", "mean_kl_before_flip": "earlier", "matched_mean_kl": "matched"}


def _said_of_flips(flips: pd.DataFrame, correlations: pd.DataFrame) -> list[str]:
    lines = []
    for (strategy, kernels), group in flips.groupby(["strategy", "kernels"], sort=False):
        flipped = group.dropna(subset=["flip_index"])
        said = f"4. {strategy}, {kernels} kernels: {len(flipped)} of {len(group)} decodes flip a token"
        if len(flipped):
            free, before, matched = (
                f"{number(flipped[name].mean())}{_typical(flipped, name, 'id')}"
                for name in ("mean_kl", "mean_kl_before_flip", "matched_mean_kl")
            )
            said += f"; of these mean KL {free} nats over all free steps, {before} up to the flip, {matched} matched"
        known = only(correlations, strategy=strategy, kernels=kernels).dropna(subset=["pearson"])
        whole = only(known, model="all")
        for row in (whole if len(whole) else known).to_dict("records"):
            if row["against"] in _AGAINST:
                of = "" if row["model"] == "all" or correlations["model"].nunique() == 1 else f" of {row['model']}"
                several = "data_seed" in known and known["data_seed"].nunique() > 1
                of += f" on the prompts of seed {row['data_seed']}" if several else ""
                said += f"; Pearson{of} of flip step and {_AGAINST[row['against']]} KL {row['pearson']:+.2f}"
                if row["pearson_low"] == row["pearson_low"]:
                    said += f" ({row['pearson_low']:+.2f} to {row['pearson_high']:+.2f}"
                    zero = row["pearson_low"] <= 0 <= row["pearson_high"]
                    said += f"{', which 0 is in' if zero else ''}, over {counted(row['prompts'], 'prompt')})"
        lines.append(said + ".")
    return lines


def _said_of_ladder(ladder: pd.DataFrame) -> list[str]:
    ladder = only(ladder, protocol="matched")
    failed = int(ladder["failed"].sum())
    ladder = ladder[~ladder["failed"].astype(bool)]
    if ladder.empty:
        return []
    means = ladder.groupby(["dtype", "kernels", "model"], sort=False)["rms_logit"].mean()
    rungs = []
    for (dtype, kernels), found in means.groupby(level=[0, 1], sort=False):
        rungs.append(f"{dtype} {kernels} {between(list(found))}")
    one = means.index.get_level_values("model").nunique() == 1
    said = f"5. RMS logit difference{'' if one else ', smallest and largest of the models'}: {'; '.join(rungs)}"
    said += f" (means of {counted(ladder['id'].nunique(), 'prompt')})."
    if failed:
        said += f" {failed} runs could not be compared."
    fixed, native = (
        only(ladder, kernels=kernels).groupby("dtype", sort=False)["max_abs_logit"].max()
        for kernels in ("batch_invariant", "native")
    )
    gone = [dtype for dtype, left in fixed.items() if left == 0 and native.get(dtype, 0.0) > 0]
    if gone:
        said += (
            f" One fixed order leaves no difference in {listed(gone)} where the machine's kernels make one: the order of "
            "additions is what does it here. Both add in float32 or wider and round once, so this is no statement about sums "
            "kept in float16."
        )
    return [said]


def _said_of_sharing(table: pd.DataFrame) -> list[str]:
    spread = table.groupby("query_heads_per_kv_head")[["heads_touched", "attn_out"]].median()
    shown = (f"{int(n)} a KV head: {row['heads_touched']:g}, {number(row['attn_out'])}" for n, row in spread.iterrows())
    return [
        "6. Query heads touched by one KV head's error, and the attention output's relative L2, medians over "
        f"{counted(table['prompt'].nunique(), 'prompt')}, heads and positions: " + "; ".join(shown) + "."
    ]


def _said_of_repeats(table: pd.DataFrame) -> list[str]:
    lines = []
    for model, copies in table.groupby("model", sort=False):
        shared = [str(int(count)) for count in sorted(set(copies["query_heads_per_kv_head"]), reverse=True)]
        said = (
            f"7. {model} with its K and V heads repeated, so that {listed(shared)} query heads share one, on the same tokens "
            f"(float64 logits within {number(copies['float64_difference'].max())} of the model as it was):"
        )
        for kernels, group in copies.groupby("kernels", sort=False):
            by = group.pivot(index="id", columns="repeated", values="rms_logit")
            means = by.mean()
            alike = all(
                not (wide.sub(wide[1], axis=0).abs() > 0).any(axis=None)
                for wide in (group.pivot(index="id", columns="repeated", values=name) for name in _MEASURED)
            )
            over = counted(len(by), "prompt")
            if alike:
                shown = f"{number(means[1])}, and every measure the same number at every ratio ({over})"
            else:
                change = (by[by.columns.max()] - by[1]).to_numpy(float)
                shown = f"{' and '.join(map(number, means))}; the last less the first "
                shown += f"{number(change.mean())} on average ({typical_said(change)})"
            drawn = ", errors drawn for each KV head" if "+" in kernels else " kernels"
            said += f" {kernels}{drawn}, RMS logit difference {shown};"
        lines.append(said[:-1] + ".")
    return lines


_MEASURED = ("rms_logit", "mean_kl", "relative_l2", "pattern_kl")


def _said_of_seeds(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """How far what was found of one set of prompts is from what was found of another: what is smaller is the prompts' luck."""
    by_seed: dict[str, pd.Series] = {}
    for name, table in tables.items():
        if "data_seed" not in table or table["data_seed"].nunique() < 2:
            continue
        if name == "propagation" and table["layer"].max() > 0:
            deepest = table[(table["layer"] == table["layer"].max()) & (table["source"] == 0)].groupby("data_seed")
            by_seed["median growth of absolute L2"] = deepest["l2_growth"].median()
            by_seed["of relative L2"] = deepest["relative_growth"].median()
        if name == "ladder":
            rung = only(table, dtype="float16", kernels="native", protocol="matched")
            by_seed["RMS logit difference (float16, native)"] = rung.groupby("data_seed")["rms_logit"].mean()
        if name == "correlations":
            whole = only(table, model="all")
            for against in ("mean_kl", "matched_mean_kl"):
                known = only(whole if len(whole) else table, against=against).dropna(subset=["pearson"])
                by_seed[f"Pearson of flip step and {_AGAINST[against]} KL"] = known.groupby("data_seed")["pearson"].mean()
    shown = [f"{n} {number(v.min())} to {number(v.max())}" for n, v in by_seed.items() if len(v) > 1]
    if not shown:
        return []
    count = max(len(values) for values in by_seed.values())
    return [f"8. The same on each of {count} sets of prompts, smallest and largest: {'; '.join(shown)}."]


def ladder_title_of(table: pd.DataFrame) -> str:
    """What the ladder shows of precision and of a fixed order, as far as its numbers do."""
    mean = table.groupby(["model", "dtype", "kernels"])["rms_logit"].mean().unstack("kernels")
    native = mean.get("native", pd.Series(dtype=float)).unstack("dtype")
    said = []
    if {"float16", "float32"} <= set(native):
        shrinks = (native["float32"] < native["float16"]).sum()
        said.append(f"float32 shrinks the difference of {shrinks} of {len(native)} models")
    fixed = mean.get("batch_invariant", pd.Series(dtype=float)).dropna()
    if len(fixed):
        said.append(f"a fixed order of additions leaves none in {(fixed == 0).sum()} of {len(fixed)} runs")
    return upper("; ".join(said)) or "Every rung"
