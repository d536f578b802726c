"""Measure whether cached decoding writes what recomputing the prefix writes: how often and when
they differ, and by how much.

This is the FP16 paper's behavioural characterisation (arXiv 2604.15409, sections 5.2 and 6.1), with
controls. Every
decode runs in the matched protocol: both paths get the same tokens, so any difference is
arithmetic. Up to the first flipped token the paper's free protocol, where each path gets its own
tokens, gives the same bits, so only decodes that flip run free as well. Greedy decoding draws
nothing and runs once, however many seeds there are. Two nulls stand beside each result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.commands.kit import (
    DRAWS,
    Adapter,
    Cell,
    CellResults,
    Chart,
    Charts,
    OfModels,
    Panel,
    Result,
    Rows,
    Tables,
    between,
    compare_examples,
    counted,
    each,
    ends_of,
    finding,
    finding_from,
    joined,
    number,
    only,
    option,
    paths_of,
    sampled,
    shared,
    stacked,
    tried,
)
from kvinterp.common import words
from kvinterp.comparison import COLUMNS, PARTS, Comparison
from kvinterp.data import Prompt
from kvinterp.data.tasks import judged
from kvinterp.findings import UNKNOWN
from kvinterp.models.threads import own_threads
from kvinterp.papers.behaviour.divergence import behaviour_tables, conditions
from kvinterp.paths import Runner, strategy_named
from kvinterp.paths.decoders import Memory, Suffixed

NULLS = ("same path twice", "longer suffix")


class Behaviour(OfModels):
    """Do a cached and a recomputing path write the same, and does it matter for the answers?"""

    NOTED = ("kernels", "max_new_tokens", "stop")

    dtype: str = shared("dtype")
    strategies: tuple[str, ...] = option(
        ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)"),
        "How tokens are chosen; may be given several times.",
        flag="--strategy",
        empty="refused",
    )
    seeds: int = option(
        2,
        "Seeds for each sampled strategy; greedy runs once.",
        min=1,
        only=(lambda asked: sampled(*asked.strategies), DRAWS),
    )
    max_new_tokens: int = shared("max_new_tokens", 64, min=1)
    stop: str = shared(
        "stop",
        among=words.Stop,
    )
    kernels: str = shared("kernels")
    controls: int = option(8, "How many examples to run the nulls on.", min=0)
    block: int = option(
        10,
        "How many examples make one piece of work, which a restarted run does not repeat.",
        min=1,
    )
    batch_size: int = shared(
        "batch_size",
        min=1,
    )

    def chosen_strategies(self) -> list[str]:
        """The strategies in their text forms, each once."""
        return list(dict.fromkeys(str(strategy_named(text)) for text in self.strategies))

    # What is run ----------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """A cell a model, block of examples, strategy and seed; those of the controls behind
        them.
        """
        cells, strategies = [], self.chosen_strategies()
        for index, model, adapter in self.numbered_models():
            tried(adapter, paths_of(self.kernels))
            key = f"behaviour-{index}"
            for block, first in enumerate(range(0, len(self.prompt_list), self.block)):
                # The same for all of a block: they share what they compute.
                settings = {"model": model, "first": first, "most": self.block}
                for turn, strategy in enumerate(strategies):
                    for seed in range(1 if strategy == "greedy" else self.seeds):
                        cells.append(Cell(f"{key}-{block}-{turn}-{seed}", self.decoded, settings))
            for (turn, strategy), null in itertools.product(
                enumerate(strategies), NULLS if self.controls else ()
            ):
                settings = {"model": model, "strategy": strategy, "null": null}
                cells.append(Cell(f"{key}-null-{turn}-{null.split()[0]}", self.null_of, settings))
        return cells

    def decoded(
        self, keys: Sequence[str], keep: Callable[..., None], model: str, first: int, most: int
    ) -> None:
        """The decodes of a block of examples, under each strategy and seed that a key names; kept
        when all are finished.

        Without batches the strategies of an example go one after the other, and steps whose text
        two of them share are computed once.
        """
        adapter, strategies = self.adapter(model), self.chosen_strategies()
        prompts = list(enumerate(self.prompt_list))[first : first + most]
        blocks = [prompts] if self.batch_size > 1 else [[one] for one in prompts]
        what = f"decodes of {adapter.facts.name}, examples {first} to {first + len(prompts) - 1},"
        tables: dict[str, list[Tables]] = {key: [] for key in keys}
        with own_threads(adapter):
            for block in each(blocks, what, "part"):
                decoder = Memory().decoder if self.batch_size == 1 else Runner
                options = self.choices("kernels", "max_new_tokens", "stop", "batch_size") | {
                    "decoders": (decoder, decoder)
                }
                for key in keys:
                    turn, seed = map(int, key.split("-")[-2:])
                    tables[key].append(
                        decodes_of(adapter, dict(block), strategies[turn], seed, **options)
                    )
        for key, parts in tables.items():
            keep(
                key,
                {
                    name: table.assign(model=adapter.facts.name)
                    for name, table in stacked(parts).items()
                },
            )

    def null_of(self, model: str, strategy: str, null: str) -> pd.DataFrame:
        """How far a path is from itself: run twice, or of the recompute path with more tokens
        behind the prefix.
        """
        adapter, (a, b) = self.adapter(model), paths_of(self.kernels)
        paths, decoders = (
            ((a, a), (Runner, Runner)) if null == NULLS[0] else ((b, b), (Runner, Suffixed))
        )
        options = self.choices("max_new_tokens", "stop") | {
            "decoders": decoders,
            "strategy": strategy,
        }
        comparison = compare_examples(adapter, self.prompt_list[: self.controls], *paths, **options)
        steps = comparison.steps
        largest = steps["max_abs_logit"]
        counts = len(steps), (largest > 0).sum(), steps["flipped"].sum()
        row = (
            strategy,
            null,
            *counts,
            largest.max(),
            steps["kl"].mean(),
            len(comparison.examples),
            adapter.facts.name,
        )
        return pd.DataFrame([row], columns=_NULL)

    # What it comes to -----------------------------------------------------------------------------

    def tables(self, results: CellResults) -> Tables:
        """What the decodes say, and the controls."""
        decodes = joined(results)
        tables = behaviour_tables(decodes["decodes"], decodes["steps"])
        tables["nulls"] = joined(results, "-null-").get("table", pd.DataFrame(columns=_NULL))
        return tables | {name: decodes[name] for name in ("flip_steps", "flip_tokens", "failures")}

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How many decodes flip a token, and how far apart the paths are until then."""
        table = only(result.tables["divergence"], protocol="matched")
        flips, decodes = int(table["diverged"].sum()), int(table["decodes"].sum())
        kl = table["typical_kl"].fillna(table["mean_kl"]).tolist()
        line = (
            f"A token flips in {flips} of {counted(decodes, 'decode')}; fed the same tokens, the paths are {between(kl)} nats "
            "of KL apart (median example)."
        )
        return [line, *failures_of(result)]

    def rows(self, result: Result) -> Rows:
        """Flips, KL, answers and nulls."""
        tables = result.tables
        of_row = functools.partial(finding_from, by=("model", "strategy"), unit="examples")
        share = functools.partial(of_row, measure="%")
        free = only(tables["divergence"], protocol="free").set_index(
            ["model", "strategy"], drop=False
        )
        for row in only(tables["divergence"], protocol="matched").to_dict("records"):
            apart = free.loc[row["model"], row["strategy"]]
            beyond = (
                f"; of {counted(int(apart['above_bound']), 'decode')} above what the logits' difference allows: after a flip it "
                "is of two texts"
            )
            for side, note in ((row, ""), (apart, beyond * bool(apart["above_bound"]))):
                yield of_row(side, f"median KL of an example, {side['protocol']}", "typical_kl", measure="nats",
                             note=f"mean {number(side['mean_kl'])}{note}")  # fmt: skip
            yield share(
                row,
                "decodes in which a token flips",
                "rate",
                note=f"{row['diverged']} of {row['decodes']} decodes",
            )
            yield share(row, "steps at risk that flip", "flip_rate")
            yield of_row(row, "largest difference of a logit, fed the same", "max_abs_logit", ends=UNKNOWN,
                         note=f"allows a KL of {number(row['kl_bound'])} at most")  # fmt: skip
        for row in tables["accuracy"].to_dict("records"):
            for side, path in (("a", "cached"), ("b", "recompute")):
                yield share(row, "right answers", f"accuracy_{side}", ends=UNKNOWN, path=path)
            yield of_row(row, "right answers, cached less recompute", "difference", test=row["test"], p=row["p"],
                         p_corrected=row["p_bh"])  # fmt: skip
        for (model, null), group in tables["nulls"].groupby(["model", "null"], sort=False):
            differ, steps, flips = group[["differing_steps", "steps", "flips"]].sum().astype(int)
            yield finding(f"null, {null}: steps whose logits differ", differ / max(steps, 1), n=steps, unit="steps",
                          measure="%", note=f"{flips} chosen tokens with them", model=model)  # fmt: skip

    def charts(self, result: Result) -> Charts:
        """KL of every step, how long decodes stay the same, and the answers of both paths."""
        tables, made = result.tables, next(iter(result.summary["provenance"].values()))
        notes = [
            f"kernels {made['kernels']}",
            f"{made['max_new_tokens']} tokens at most",
            f"until {made['stop']}",
        ]
        panel = functools.partial(
            Panel, x="step", color="strategy", facet="model", xlabel="decode step", ends="band"
        )
        table = ends_of(tables["survival"], "survival")
        # Before the first flip all survive.
        begin = (
            table.groupby(["model", "strategy"], sort=False)
            .head(1)
            .assign(step=0, survival=1.0, low=1.0, high=1.0)
        )
        label = "share of decodes\nwithout a flipped token"
        accuracy = tables["accuracy"]
        accuracy = accuracy.assign(
            line=accuracy["model"].str.removeprefix("zoo:") + ", " + accuracy["strategy"]
        )
        right = accuracy.melt("line", ["accuracy_a", "accuracy_b"], "path", "right")
        return {
            "behaviour_kl_by_step": Chart("How far apart the two paths are at every step", [
                panel(only(tables["kl_by_step"], protocol=protocol), y="median_kl", label=f"median KL (nats),\n{protocol}")
                for protocol in ("matched", "free")
            ], notes),
            "behaviour_survival": Chart("How long decodes stay the same (Kaplan and Meier)", [
                panel(pd.concat([begin, table]), y="survival", kind="step", scale="share", label=label)
            ], notes),
            "behaviour_accuracy": Chart("Right answers on both paths", [
                Panel(right, "right", "line", "dots", color="path", scale="share", label="share of right answers",
                      names={"accuracy_a": "cached", "accuracy_b": "recompute"}),
                Panel(accuracy, "difference", "line", "dots", scale="linear", level=0,
                      label="cached less recompute, 95% interval"),
            ], notes),
        }  # fmt: skip

    def page_parts(self, result: Result) -> list[Any]:
        """The decodes that flip, token by token."""
        from kvinterp.report.tokens import changes

        return changes(flipped_decodes(result.tables, paths_of(self.kernels)))


_NULL = (
    "strategy",
    "null",
    "steps",
    "differing_steps",
    "flips",
    "max_abs_logit",
    "mean_kl",
    "n",
    "model",
)


def flipped_decodes(tables: Tables, paths: tuple[str, str]) -> dict[str, Comparison]:
    """The decodes that flip, each path on its own text, as comparisons without activations: one a
    model, strategy and seed.
    """
    comparisons = {}
    empty = {name: pd.DataFrame(columns=COLUMNS.get(name, ())) for name in PARTS}
    for label, steps in conditions(tables["flip_steps"], "model", "strategy", "seed"):
        examples = only(tables["decodes"], protocol="free", diverged=True, **label)
        parts = {
            "steps": steps,
            "examples": examples,
            "tokens": only(tables["flip_tokens"], **label),
        }
        strategy, sides = label["strategy"], dict(zip("ab", paths, strict=True))
        about = {"paths": sides, "protocol": "free", "strategy": strategy, "derived": []}
        name = f"{label['model'].removeprefix('zoo:')}, {strategy}, seed {label['seed']}"
        comparisons[name] = Comparison(**{**empty, **parts}, provenance=about)
    return comparisons


def failures_of(result: Result) -> list[str]:
    """How many decodes gave NaN or Inf, where some did."""
    failed = len(result.tables["failures"])
    return [f"{counted(failed, 'decode')} gave NaN or Inf and stand apart, in failures."] * bool(
        failed
    )


# Decodes ------------------------------------------------------------------------------------------


def decodes_of(
    adapter: Adapter,
    prompts: Mapping[int, Prompt],
    strategy: str = "greedy",
    seed: int = 0,
    kernels: str = "native",
    **options: Any,
) -> Tables:
    """Prompts decoded in the matched protocol, and those that flip in the free one too.

    Args:
        adapter: The model.
        prompts: By the number of the example, which its random numbers belong to.
        strategy: How tokens are chosen.
        seed: Seeds what is drawn.
        kernels: Those of both paths.
        options: ``max_new_tokens``, ``stop`` and ``batch_size``, as :func:`kvinterp.compare` takes
            them, and ``decoders``; those of one :class:`kvinterp.paths.decoders.Memory` compute once what
            decodes of these prompts share.

    Returns:
        ``decodes``, a row an example and protocol: id, prompt_tokens, steps, flip_index (NaN:
        none), diverged, mean_kl, mean_kl_before_flip (with the flip's own step),
        mean_kl_after_flip, mean_js, max_kl, max_abs_logit (over the steps at which both were fed
        the same), kl_bound (half its square, which no mean over those steps exceeds),
        smallest_margin, margin_at_flip (of the cached path's two largest logits), correct_a,
        correct_b (NA where no answer is known), text_a, text_b. In the matched protocol the second
        path writes no text of its own: correct_b is NA. ``steps``: those matched and, of decodes
            that flip, those free. ``flip_steps`` and ``flip_tokens``: of the latter every step and
            token, as :class:`kvinterp.comparison.Comparison` has them. ``failures``: what gave NaN
            or Inf.
    """
    a, b = paths_of(kernels)
    options |= {"strategy": strategy, "seed": seed}

    def ran(numbers: Sequence[int], first: str, second: str, **extra: Any) -> Comparison:
        chosen = [prompts[number] for number in numbers]
        return compare_examples(
            adapter, chosen, first, second, examples=numbers, **options, **extra
        )

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
    comparisons: Mapping[str, Comparison],
    prompts: Mapping[int, Prompt],
    written: pd.DataFrame,
    end: str,
) -> Tables:
    matched, *flipping = (_rows(comparison) for comparison in comparisons.values())
    free = pd.concat([*flipping, matched[matched["flip_index"].isna()]]).sort_values("example")
    free = free.drop(columns=["text_a", "text_b"], errors="ignore").merge(written, on="example")
    decodes = pd.concat(
        [matched.assign(protocol="matched"), free.assign(protocol="free")], ignore_index=True
    )
    for side in ("a", "b"):
        # What stands behind the end of the text, where it was decoded to a length, is no part of
        # the answer.
        texts = [text.partition(end)[0] if end else text for text in decodes[f"text_{side}"]]
        right = [
            judged(prompts[example], text)
            for example, text in zip(decodes["example"], texts, strict=True)
        ]
        decodes[f"correct_{side}"] = pd.array(right, dtype="boolean")
    # In the matched protocol the second path writes no text of its own.
    decodes.loc[decodes["protocol"] == "matched", "correct_b"] = pd.NA
    columns = [
        "example",
        "step",
        "kl",
        "max_abs_logit",
        "rms_logit",
        "margin_a",
        "flipped",
        "after_flip",
    ]
    both = stacked(
        {
            "steps": comparison.steps[columns].assign(protocol=protocol),
            "failures": comparison.failures.assign(protocol=protocol),
        }
        for protocol, comparison in comparisons.items()
    )
    *_, last = comparisons.values()
    some = slice(None if flipping else 0)
    return {
        "decodes": decodes,
        **both,
        "flip_steps": last.steps.iloc[some],
        "flip_tokens": last.tokens.iloc[some],
    }


def _rows(comparison: Comparison) -> pd.DataFrame:
    """A row a decode, as :func:`decodes_of` gives them, but for what is right."""
    steps, together = comparison.steps, comparison.same_text(comparison.steps)
    first = steps[steps["flipped"] & ~steps["after_flip"]].set_index("example")
    rows = comparison.examples.drop(columns=["token_divergence"]).set_index("example")
    largest = together.groupby("example")["max_abs_logit"].max()
    measures = {
        "mean_js": steps.groupby("example")["js"].mean(),
        "max_abs_logit": largest,
        "kl_bound": largest**2 / 2,
    }
    return rows.assign(
        diverged=rows["flip_index"].notna(), margin_at_flip=first["margin_a"], **measures
    ).reset_index()
