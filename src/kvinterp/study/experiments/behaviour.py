"""Measure whether cached decoding writes what recomputing the prefix writes: how often and when they differ, and by how much.

This is the FP16 paper's behavioural characterisation (arXiv 2604.15409, sections 5.2 and 6.1), with controls. Every
decode runs in the matched protocol: both paths get the same tokens, so any difference is arithmetic. Up to the first
flipped token the paper's free protocol, where each path gets its own tokens, gives the same bits, so only decodes that
flip run free as well. Greedy decoding draws nothing and runs once, however many seeds there are. Two nulls stand beside
each result, and the distance of each path from float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd

from kvinterp.common import words
from kvinterp.common.checks import check_choice
from kvinterp.common.numbers import between, counted, number
from kvinterp.common.progress import each
from kvinterp.common.result import Result
from kvinterp.comparison import COLUMNS, PARTS, Comparison, compare_examples
from kvinterp.comparison.facts import judged
from kvinterp.data import Prompt, load_prompts
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel, finding, only
from kvinterp.models import Adapter
from kvinterp.models.threads import own_threads
from kvinterp.paths import Cached, Recompute, Runner, strategy_named
from kvinterp.paths.lanes import Memory, Suffixed
from kvinterp.study.behaviour.divergence import behaviour_tables
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import Charts, Parts, Rows, Tables
from kvinterp.study.experiments.circumstances import tried
from kvinterp.study.experiments.of_models import OfModels
from kvinterp.study.experiments.options import DRAWS, option, sampled, shared

TRUTH = "recompute@float64"
NULLS = ("same path twice", "longer suffix")


@dataclasses.dataclass(frozen=True)
class Behaviour(OfModels):
    """Do a cached and a recomputing path write the same, and does it matter for the answers?"""

    DRAWN: ClassVar = ("behaviour",)
    TABLES: ClassVar[tuple[str, ...]] = (
        "decodes",
        "kl_by_step",
        "survival",
        "divergence",
        "growth",
        "accuracy",
        "strategy_pairs",
        "examples",
        "nulls",
        "oracle",
        "flip_steps",
        "flip_tokens",
        "failures",
    )
    UNIT: ClassVar = "cells"

    dtype: str = shared("dtype")
    strategies: tuple[str, ...] = option(
        ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)"),
        "How tokens are chosen; may be given several times.",
        flag="--strategy",
    )
    seeds: int = option(
        2,
        "Seeds for each sampled strategy; greedy runs once.",
        min=1,
        only=(lambda asked: sampled(*asked.strategies), DRAWS),
    )
    max_new_tokens: int = option(64, "The most tokens to generate per text.", min=1)
    stop: str = option(
        "end of sequence", "When a text ends: at the 'end of sequence' token, or only at the 'length' asked for."
    )
    kernels: str = option("", "Kernels for both paths, such as split_k(8,float16). Default: the machine's own.")
    controls: int = option(8, "How many examples to run the nulls and the float64 reference on.", min=0)
    block: int = option(10, "How many examples make one piece of work, which a restarted run does not repeat.", min=1)
    batch_size: int = option(1, "The most prompts in one batch. Batching is used only where it gives the same bits.", min=1)

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """A model with its weights in the dtype that was chosen."""
        return {**super().model_settings(name), "dtype": self.dtype}

    def check(self) -> None:
        """Strategies and paths too."""
        super().check()
        if not self.strategies:
            raise InputError("the list of strategies is empty: give at least one, such as greedy.")
        check_choice("stop", self.stop, words.Stop)
        self.chosen_strategies()
        paths_of(self.kernels)

    def chosen_strategies(self) -> list[str]:
        """The strategies in their text forms, each once."""
        return list(dict.fromkeys(str(strategy_named(text)) for text in self.strategies))

    # What is run ---------------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """A cell a model, block of examples, strategy and seed; those of the controls behind them."""
        self.check()
        cells = []
        for place, (model, adapter) in enumerate(zip(self.models, self.adapters(), strict=True)):
            tried(adapter, paths_of(self.kernels))
            cells += [*self._decodes(f"behaviour-{place}", self.model_settings(model))]
            cells += [*self._controls(f"behaviour-{place}", self.model_settings(model), adapter.facts.name)]
        return cells

    def _decodes(self, key: str, model: Mapping[str, Any]) -> Iterator[Cell]:
        strategies = self.chosen_strategies()
        # The same for all of a block: they share what they compute.
        shared = {"model": model, "strategies": strategies, **self.choices(*_PASSED)}
        for block, first in enumerate(range(0, len(load_prompts(self.prompts)), self.block)):
            settings = {**shared, "first": first, "most": self.block, "batch_size": self.batch_size}
            for turn, strategy in enumerate(strategies):
                for seed in range(1 if strategy == "greedy" else self.seeds):
                    yield Cell(f"{key}-{block}-{turn}-{seed}", f"{__name__}:decoded", settings)

    def _controls(self, key: str, model: Mapping[str, Any], name: str) -> Iterator[Cell]:
        shared = {"model": model, "most": self.controls, **self.choices(*_PASSED)}
        if not self.controls:
            return
        for turn, strategy in enumerate(self.chosen_strategies()):
            for null in NULLS:
                settings = {**shared, "strategy": strategy, "null": null}
                told = f"null of {name}: {null}" * (turn == 0)
                yield Cell(f"{key}-null-{turn}-{null.split()[0]}", f"{__name__}:null_of", settings, told)
        yield Cell(f"{key}-oracle", f"{__name__}:oracle_of", shared, f"float64 beside {name}")

    # What it comes to ----------------------------------------------------------------------------------------------------

    def tables(self, parts: Parts) -> Tables:
        """What the decodes say, and the controls."""
        controls = ("-null-", "-oracle")
        decodes = joined({key: parts[key] for key in parts if not any(name in key for name in controls)})
        tables = behaviour_tables(decodes["decodes"], decodes["steps"])
        for name, part, columns in (("nulls", "-null-", _NULL), ("oracle", "-oracle", _ORACLE)):
            controls_found = joined({key: parts[key] for key in parts if part in key})
            tables[name] = controls_found["table"] if controls_found else pd.DataFrame(columns=columns)
        return tables | {name: decodes[name] for name in ("flip_steps", "flip_tokens", "failures")}

    def provenance_notes(self) -> dict[str, Any]:
        """How it was decoded."""
        return {"kernels": self.kernels or "native", "max_new_tokens": self.max_new_tokens, "stop": self.stop}

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How many decodes flip a token, and how far apart the paths are until then."""
        table = only(result.tables["divergence"], protocol="matched")
        flips, decodes = int(table["diverged"].sum()), int(table["decodes"].sum())
        kl = [float(kl_of_one) for kl_of_one in table["typical_kl"].fillna(table["mean_kl"])]
        lines = [
            f"A token flips in {flips} of {counted(decodes, 'decode')}; fed the same tokens, the paths are {between(kl)} nats "
            "of KL apart (median example)."
        ]
        if failed := len(result.tables["failures"]):
            lines.append(f"{counted(failed, 'decode')} gave NaN or Inf and stand apart, in failures.")
        return lines

    def rows(self, tables: Tables) -> Rows:
        """Flips, KL and its growth, answers, examples, nulls, and which path is nearer to float64."""
        rows: Rows = []
        of_examples: dict[str, Any] = {"unit": "examples"}
        free = only(tables["divergence"], protocol="free").set_index(["model", "strategy"])
        for row in only(tables["divergence"], protocol="matched").to_dict("records"):
            labels = {"model": row["model"], "strategy": row["strategy"]}
            apart = free.loc[row["model"], row["strategy"]]
            above = int(apart["above_bound"])
            beyond = (
                f"of {counted(above, 'decode')} above what the logits' difference allows: after a flip it is of two texts"
            )
            for what, side, note in (("matched", row, ""), ("free", apart, f"; {beyond}" if above else "")):
                ends, mean = (side["typical_kl_low"], side["typical_kl_high"]), f"mean {number(side['mean_kl'])}"
                rows.append(finding(f"median KL of an example, {what}", side["typical_kl"], ends, side["n"], measure="nats",
                                    note=mean + note, **of_examples, **labels))  # fmt: skip
            rows += [
                finding("decodes in which a token flips", row["rate"], (row["low"], row["high"]), row["n"], measure="%",
                        note=f"{row['diverged']} of {row['decodes']} decodes", **of_examples, **labels),
                finding("steps at risk that flip", row["flip_rate"], (row["flip_rate_low"], row["flip_rate_high"]), row["n"],
                        measure="%", **of_examples, **labels),
                finding("largest difference of a logit, fed the same", row["max_abs_logit"], n=row["n"],
                        note=f"allows a KL of {number(row['kl_bound'])} at most", **of_examples, **labels),
            ]  # fmt: skip
        for row in tables["growth"].dropna(subset=["low", "high"]).to_dict("records"):
            rows.append(finding(f"slope of the KL over the steps, {row['protocol']}", row["slope"], (row["low"], row["high"]),
                                row.get("n", 0), measure="nats a step", model=row["model"], strategy=row["strategy"],
                                **of_examples))  # fmt: skip
        for row in tables["accuracy"].to_dict("records"):
            labels = {"model": row["model"], "strategy": row["strategy"]}
            rows += [finding("right answers", row[f"accuracy_{side}"], n=row["n"], measure="%", path=path, **of_examples,
                             **labels) for side, path in (("a", "cached"), ("b", "recompute"))]  # fmt: skip
            rows.append(finding("right answers, cached less recompute", row["difference"], (row["low"], row["high"]), row["n"],
                                test=row["test"], p=row["p"], p_corrected=row["p_bh"], **of_examples,
                                **labels))  # fmt: skip
        for model, group in tables["examples"].groupby("model", sort=False):
            shares = group["diverges"].value_counts()
            rows += [finding(f"examples that {name} flip a token", shares.get(name, 0) / len(group), n=len(group), measure="%",
                             model=model, **of_examples) for name in ("always", "sometimes", "never")]  # fmt: skip
        for (model, null), group in tables["nulls"].groupby(["model", "null"], sort=False):
            differ, steps = int(group["differing_steps"].sum()), int(group["steps"].sum())
            note = f"{int(group['flips'].sum())} chosen tokens with them"
            rows.append(finding(f"null, {null}: steps whose logits differ", differ / max(steps, 1), n=steps, unit="steps",
                                measure="%", note=note, model=model))  # fmt: skip
        for model, group in tables["oracle"].groupby("model", sort=False):
            rows.append(finding("examples in which the cached path is nearer to float64", (group["nearer"] == "a").mean(),
                                n=len(group), measure="%", model=model, **of_examples,
                                note=f"neither in {int((group['nearer'] == 'equal').sum())}"))  # fmt: skip
        return rows

    def charts(self, result: Result) -> Charts:
        """KL of every step, how long decodes stay the same, and the answers of both paths."""
        tables, notes = result.tables, self.notes(result)
        by: dict[str, Any] = {"x": "step", "color": "strategy", "facet": "model", "xlabel": "decode step", "ends": "band"}
        charts = {}
        if len(tables["kl_by_step"]):
            charts["behaviour_kl_by_step"] = Chart("How far apart the two paths are at every step", [
                Panel(only(tables["kl_by_step"], protocol=protocol), y="median_kl", label=f"median KL (nats),\n{protocol}", **by)
                for protocol in ("matched", "free")
            ], notes)  # fmt: skip
        if len(tables["survival"]):
            table = tables["survival"].rename(columns={"survival_low": "low", "survival_high": "high"})
            # Before the first flip all survive.
            begin = table.groupby(["model", "strategy"], sort=False).head(1).assign(step=0, survival=1.0, low=1.0, high=1.0)
            label = "share of decodes\nwithout a flipped token"
            panel = Panel(pd.concat([begin, table]), y="survival", kind="step", scale="share", label=label, **by)
            charts["behaviour_survival"] = Chart("How long decodes stay the same (Kaplan and Meier)", [panel], notes)
        if len(table := tables["accuracy"]):
            table = table.assign(line=table["model"].str.removeprefix("zoo:") + ", " + table["strategy"])
            right = table.melt("line", ["accuracy_a", "accuracy_b"], "path", "right")
            charts["behaviour_accuracy"] = Chart("Right answers on both paths", [
                Panel(right, "right", "line", "dots", color="path", scale="share", label="share of right answers",
                      names={"accuracy_a": "cached", "accuracy_b": "recompute"}),
                Panel(table, "difference", "line", "dots", scale="linear", level=0, label="cached less recompute, 95% interval"),
            ], notes)  # fmt: skip
        return charts

    def notes(self, result: Result) -> list[str]:
        """How it was decoded."""
        first = next(iter(result.summary["provenance"].values()))
        return [f"kernels {first['kernels']}", f"{first['max_new_tokens']} tokens at most", f"until {first['stop']}"]

    def page_parts(self, result: Result) -> list[Any]:
        """The decodes that flip, token by token; an experiment that keeps no decodes has none to show."""
        if "decodes" not in result.tables:
            return []
        from kvinterp.study.report.tokens import changes

        return changes(flipped_decodes(result.tables, paths_of(self.kernels)))


_PASSED = ("prompts", "max_new_tokens", "stop", "kernels")
_NULL = ("strategy", "null", "steps", "differing_steps", "flips", "max_abs_logit", "mean_kl", "n", "model")
_ORACLE = ("example", "id", "error_a", "error_b", "nearer", "model")


def paths_of(kernels: str) -> tuple[str, str]:
    """The two paths under some kernels."""
    chosen = kernels or "native"
    return str(Cached(kernels=chosen)), str(Recompute(kernels=chosen))


def flipped_decodes(tables: Tables, paths: tuple[str, str]) -> dict[str, Comparison]:
    """The decodes that flip, each path on its own text, as comparisons without activations: one a model, strategy and seed."""
    comparisons = {}
    keys = ["model", "strategy", "seed"]
    free = only(tables["decodes"], protocol="free")
    for place, steps in tables["flip_steps"].groupby(keys, sort=False):
        label = dict(zip(keys, place, strict=True))
        examples, tokens = (only(table, **label) for table in (free, tables["flip_tokens"]))
        empty = {name: pd.DataFrame(columns=COLUMNS.get(name, ())) for name in PARTS}
        parts = {"steps": steps, "examples": examples[examples["diverged"]], "tokens": tokens}
        about = {
            "paths": dict(zip("ab", paths, strict=True)),
            "protocol": "free",
            "strategy": label["strategy"],
            "derived": [],
        }
        name = f"{label['model'].removeprefix('zoo:')}, {label['strategy']}, seed {label['seed']}"
        comparisons[name] = Comparison(**{**empty, **parts}, provenance=about)
    return comparisons


# Decodes ---------------------------------------------------------------------------------------------------------------


def decoded(
    keys: Sequence[str],
    keep: Callable[..., None],
    model: Mapping[str, Any],
    prompts: str,
    strategies: Sequence[str],
    first: int,
    most: int,
    batch_size: int,
    **settings: Any,
) -> None:
    """The decodes of a block of examples, under each strategy and seed that a key names; kept when all are finished.

    Without batches the strategies of an example go one after the other, and steps whose text two of them share are computed
    once.
    """
    adapter = loaded(model)
    numbered_prompts = list(enumerate(load_prompts(prompts)))[first : first + most]
    tables_of_key: dict[str, list[Tables]] = {key: [] for key in keys}
    with own_threads(adapter):
        blocks = [numbered_prompts] if batch_size > 1 else [[one] for one in numbered_prompts]
        for some in each(
            blocks, f"decodes of {adapter.facts.name}, examples {first} to {first + len(numbered_prompts) - 1},", "part"
        ):
            memory = Memory() if batch_size == 1 else None
            for key in keys:
                turn, seed = map(int, key.split("-")[-2:])
                options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "memory": memory}
                tables_of_key[key].append(decodes_of(adapter, dict(some), strategies[turn], **options, **settings))
    for key, parts in tables_of_key.items():
        tables = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}
        keep(key, {name: table.assign(model=adapter.facts.name) for name, table in tables.items()})


def decodes_of(
    adapter: Adapter,
    prompts: Mapping[int, Prompt],
    strategy: str = "greedy",
    seed: int = 0,
    kernels: str = "",
    max_new_tokens: int = 64,
    stop: str = "end of sequence",
    batch_size: int = 1,
    memory: Memory | None = None,
) -> Tables:
    """Prompts decoded in the matched protocol, and those that flip in the free one too.

    Args:
        adapter: The model.
        prompts: By the number of the example, which its random numbers belong to.
        strategy: How tokens are chosen.
        seed: Seeds what is drawn.
        kernels: Those of both paths; the machine's own where it is empty.
        max_new_tokens: Most tokens of a text.
        stop: ``"end of sequence"`` or ``"length"``.
        batch_size: Most prompts in a batch.
        memory: What other decodes of these prompts have computed.

    Returns:
        ``decodes``, a row an example and protocol: id, prompt_tokens, steps, flip_index (NaN: none), diverged, mean_kl,
        mean_kl_before_flip (with the flip's own step), mean_kl_after_flip, early_kl and late_kl (the mean of the first and the
        last quarter of the steps), mean_js, max_kl, max_abs_logit (over the steps at
        which both were fed the same), kl_bound (half its square, which no mean over those steps exceeds), smallest_margin,
        margin_at_flip (of the cached path's two largest logits), correct_a, correct_b (NA where no answer is known), text_a,
        text_b. In the matched protocol the second path writes no text of its own: correct_b is NA. ``steps``: those matched
        and, of decodes that flip, those free. ``flip_steps`` and ``flip_tokens``: of the latter every step and token, as
        :class:`kvinterp.comparison.Comparison` has them. ``failures``: what gave NaN or Inf.
    """
    a, b = paths_of(kernels)
    lanes = (Runner, Runner) if memory is None else (memory.lane, memory.lane)
    options: dict[str, Any] = {"strategy": strategy, "seed": seed, "max_new_tokens": max_new_tokens, "stop": stop}
    options |= {"batch_size": batch_size, "lanes": lanes}

    def ran(numbers: Sequence[int], first: str, second: str, **extra: Any) -> Comparison:
        chosen = [prompts[number] for number in numbers]
        return compare_examples(adapter, chosen, first, second, examples=numbers, **options, **extra)

    matched = ran(list(prompts), a, b)
    comparisons = {"matched": matched}
    texts = matched.examples.set_index("example")["text_a"]
    written = pd.DataFrame({"text_a": texts, "text_b": texts})
    flipped = [int(number) for number in matched.examples.dropna(subset=["flip_index"])["example"]]
    if flipped:
        comparisons["free"] = ran(flipped, a, b, protocol="free")
        # To its own end, which a comparison of both does not wait for.
        alone = ran(flipped, b, a).examples.set_index("example")["text_a"]
        written.loc[alone.index, "text_b"] = alone
    end = getattr(adapter.tokenizer, "eos_token", None)
    tables = _tables(comparisons, prompts, written, str(end) if end else "")
    return {name: table.assign(strategy=strategy, seed=seed) for name, table in tables.items()}


def _tables(
    comparisons: Mapping[str, Comparison], prompts: Mapping[int, Prompt], written: pd.DataFrame, end: str
) -> Tables:
    rows = {protocol: _rows(comparison) for protocol, comparison in comparisons.items()}
    matched = rows["matched"]
    stays = matched[matched["flip_index"].isna()]
    free = pd.concat([rows["free"], stays]).sort_values("example") if "free" in rows else stays
    free = free[[column for column in free if not column.startswith("text_")]].merge(written, on="example")
    decodes = pd.concat([matched.assign(protocol="matched"), free.assign(protocol="free")], ignore_index=True)
    for side in ("a", "b"):
        right = [
            # In the matched protocol the second path writes no text of its own.
            pd.NA
            if (side, row.protocol) == ("b", "matched")
            else _right(prompts[row.example], getattr(row, f"text_{side}"), end)
            for row in decodes.itertuples()
        ]
        decodes[f"correct_{side}"] = pd.array(right, dtype="boolean")
    columns = ["example", "step", "kl", "max_abs_logit", "rms_logit", "margin_a", "flipped", "after_flip"]
    steps = [comparison.steps[columns].assign(protocol=protocol) for protocol, comparison in comparisons.items()]
    failures = [comparison.failures.assign(protocol=protocol) for protocol, comparison in comparisons.items()]
    flips = comparisons.get("free") or comparisons["matched"]
    some = slice(None) if "free" in comparisons else slice(0)
    return {
        "decodes": decodes,
        "steps": pd.concat(steps, ignore_index=True),
        "flip_steps": flips.steps.iloc[some],
        "flip_tokens": flips.tokens.iloc[some],
        "failures": pd.concat(failures),
    }


def _right(prompt: Prompt, text: str, end: str) -> bool | Any:
    # What stands behind the end of the text, where it was decoded to a length, is no part of the answer.
    right = judged(prompt, text.partition(end)[0] if end else text)
    return pd.NA if right is None else right


def _rows(comparison: Comparison) -> pd.DataFrame:
    """A row a decode, as :func:`decodes_of` gives them, but for what is right."""
    steps, together = comparison.steps, comparison.same_text(comparison.steps)
    first = steps[steps["flipped"] & ~steps["after_flip"]].set_index("example")
    rows = comparison.examples.drop(columns=["token_divergence"]).set_index("example")
    largest = together.groupby("example")["max_abs_logit"].max()
    measures = {"mean_js": steps.groupby("example")["js"].mean(), "max_abs_logit": largest, "kl_bound": largest**2 / 2}
    # Of the steps behind the prefill's, which is the same computation on both paths.
    part = steps["step"] / steps.groupby("example")["step"].transform("max")
    for name, chosen in (("early_kl", (steps["step"] > 0) & (part <= 0.25)), ("late_kl", part > 0.75)):
        measures[name] = steps[chosen].groupby("example")["kl"].mean()
    rows = rows.assign(diverged=rows["flip_index"].notna(), margin_at_flip=first["margin_a"], **measures)
    return rows.reset_index()


# Controls --------------------------------------------------------------------------------------------------------------


def null_of(
    model: Mapping[str, Any],
    prompts: str,
    most: int,
    strategy: str,
    null: str,
    kernels: str,
    **settings: Any,
) -> pd.DataFrame:
    """How far a path is from itself: run twice, or of the recompute path with more tokens behind the prefix."""
    adapter, (a, b) = loaded(model), paths_of(kernels)
    same = null == NULLS[0]
    paths, lanes = ((a, a), (Runner, Runner)) if same else ((b, b), (Runner, Suffixed))
    comparison = compare_examples(adapter, load_prompts(prompts)[:most], *paths, lanes=lanes, strategy=strategy, **settings)
    steps = comparison.steps
    row = {
        "strategy": strategy,
        "null": null,
        "steps": len(steps),
        "differing_steps": int((steps["max_abs_logit"] > 0).sum()),
        "flips": int(steps["flipped"].sum()),
        "max_abs_logit": float(steps["max_abs_logit"].max()),
        "mean_kl": float(steps["kl"].mean()),
        "n": len(comparison.examples),
        "model": adapter.facts.name,
    }
    return pd.DataFrame([row])


def oracle_of(model: Mapping[str, Any], prompts: str, most: int, kernels: str, **settings: Any) -> pd.DataFrame:
    """The largest logit error of each path, both fed the tokens that float64 chooses, and which is nearer to float64."""
    adapter = loaded(model)
    rows = []
    for example, prompt in enumerate(load_prompts(prompts)[:most]):
        lanes, row = (Memory().lane, Runner), {"example": example, "id": prompt.id}
        for side, path in zip("ab", paths_of(kernels), strict=True):
            steps = compare_examples(adapter, prompt, TRUTH, path, lanes=lanes, **settings).steps
            row[f"error_{side}"] = steps["max_abs_logit"].max()
        rows.append(row)
    table = pd.DataFrame(rows).dropna()
    nearer = [
        "equal" if one == other else "a" if one < other else "b"
        for one, other in zip(table["error_a"], table["error_b"], strict=True)
    ]
    return table.assign(nearer=nearer, model=adapter.facts.name)
