"""Measure what errors in the KV cache do to behaviour: answers, likelihoods and degenerate texts, in percent of a control."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from kvinterp.common.numbers import counted, number
from kvinterp.common.result import Result
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel, finding
from kvinterp.study.behaviour.scores import AGAIN
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import Charts, OfModel, Parts, Rows, Tables
from kvinterp.study.experiments.choices import taken_by
from kvinterp.study.experiments.equivalent_noise import error_of_policy, pooled, usable
from kvinterp.study.experiments.options import DRAWS, argument, option, sampled
from kvinterp.study.results import records

if TYPE_CHECKING:
    from kvinterp.models import Adapter
    from kvinterp.study.behaviour.designs import Design

READINGS = ("stored", "exact")
"""What attention reads in the prefill: what the cache keeps, as in llama.cpp, or what was computed."""
SHARES = ("loops", "outside")
"""Scores of which the control has little or nothing, so that percent of it say little."""
ANSWERS = ("instructions", "next_token", "problems")
SIGNIFICANT = 0.05
STRING = 10
"""Words of a string whose last one is guessed."""
_NOISE_PROMPTS, _NOISE_TOKENS = 4, 16


def _in_design(*users: str) -> tuple[Callable[[Any], bool], str]:
    """Where only some designs read a choice."""
    advice = f"no design that was asked for uses it; add {' or '.join(users)} to --design"
    return lambda asked: bool({*users} & {*asked.chosen_designs()}), advice


@dataclasses.dataclass(frozen=True)
class KvError(OfModel):
    """How much error in K and V does behaviour bear, and of which kind, where, and under which reading of the prompt?"""

    TABLES: ClassVar = ("scores", "contrasts", "examples", "noise")

    model: str = argument("zoo:llama64-mini", "zoo:NAME, a transformers checkpoint folder, or a hub id.")
    design: str = option(
        "grid", "What to vary: grid, factorial, tensors, layers, heads (several with commas), all, or none."
    )
    policies: tuple[str, ...] = option(
        (), "Another policy to run as well, such as q5_1; may be given several times.", flag="--policy"
    )
    base: str = option(
        "normal(0,0.5)",
        "The policy for the designs tensors, layers and heads, which apply it to one part of the cache at a time.",
        only=_in_design("tensors", "layers", "heads"),
    )
    rms: float = option(
        0.57735,
        "Root mean square of the relative error in the factorial design; uniform(-1,1) has 0.577.",
        only=_in_design("factorial"),
    )
    readings: str = option("stored,exact", "What attention reads in the prefill: stored or exact K and V, or both in turn.")
    repeats: int = option(
        5,
        "How many runs of each setting, with new noise and new samples.",
        min=1,
        only=(lambda asked: asked.draws(), DRAWS),
    )
    instructions: str = option(
        "instructions:12", "Prompts that ask for instructions to be followed: a generator or a .jsonl file."
    )
    problems: str = option("arithmetic:12", "Prompts with problems to solve.")
    texts: str = option("restate:8", "Prompts with given answers, whose perplexity is measured.")
    strings: str = option("instructions:24", "Prompts from which strings of ten words are cut.")
    strategy: str = option("top_p(0.95,0.8)", "How tokens are chosen. The default is llama.cpp's, without its top-k of 40.")
    max_new_tokens: int = option(100, "The most tokens to generate per text.", min=1)
    dtype: str = option("float32", "The dtype of every run, the control included.")

    # What is run ---------------------------------------------------------------------------------------------------------

    def designs(self, adapter: Adapter) -> dict[str, Design]:
        """The designs that were asked for, and ``given``, the user's own policies.

        Raises:
            InputError: A name is unknown, or there is nothing to run.
            UnsupportedError: The model cannot run one of the policies.
        """
        from kvinterp.study.behaviour.designs import Design, designed

        designs = {name: designed(name, self.base, self.rms, adapter.facts) for name in self.chosen_designs()}
        if self.policies:
            designs["given"] = Design(self.policies)
        return {
            name: dataclasses.replace(one, policies=tuple(map(str, usable(one.policies, adapter))))
            for name, one in designs.items()
        }

    def chosen_designs(self) -> list[str]:
        """The names of the designs, checked."""
        from kvinterp.common.checks import check_known
        from kvinterp.study.behaviour.designs import DESIGNS

        names = [name.strip() for name in self.design.split(",") if name.strip()]
        for name in names:
            check_known("design", name, (*DESIGNS, "all", "none"))
        return list(dict.fromkeys(DESIGNS if "all" in names else [name for name in names if name != "none"]))

    def draws(self) -> bool:
        """Whether a repeat is another draw of anything: of the sampling, or of a policy's noise."""
        from kvinterp.policies import policy_named
        from kvinterp.study.behaviour.designs import is_seeded

        return (
            sampled(self.strategy) or bool(self.chosen_designs()) or any(map(is_seeded, map(policy_named, self.policies)))
        )

    def chosen_readings(self) -> list[str]:
        """The readings, checked."""
        from kvinterp.common.checks import check_known

        names = list(dict.fromkeys(name.strip() for name in self.readings.split(",")))
        for name in names:
            check_known("reading", name, READINGS)
        return names

    def check(self) -> None:
        """Designs, policies and what the prompts are of too."""
        from kvinterp.common.checks import check_number

        super().check()
        self.chosen_designs(), self.chosen_readings()
        check_number("rms", self.rms)
        for name in ("instructions", "problems"):
            if not all(prompt.task for prompt in load_prompts(getattr(self, name))):
                raise InputError(f"--{name} {getattr(self, name)!r} has a prompt without a task, which nothing can score.")
        for name, wrong in (("instructions", lambda task: task != "instructions"), ("problems", "instructions".__eq__)):
            if other_tasks := sorted({prompt.task for prompt in load_prompts(getattr(self, name)) if wrong(prompt.task)}):
                raise InputError(
                    f"--{name} {getattr(self, name)!r} holds prompts of the task {other_tasks[0]!r}, not {name}."
                )
        if not all(prompt.answer.strip() for prompt in load_prompts(self.texts)):
            raise InputError(f"--texts {self.texts!r} has a prompt without an answer: give one, as in restate:16.")
        strings_of(self.strings)
        if not self.chosen_designs() and not self.policies:
            raise InputError("no design and no policy was given: give --policy, or a design such as grid.")

    def cells(self) -> list[Cell]:
        """A cell a policy, reading and repeat; those of control, and behind them the noise that each policy amounts to."""
        from kvinterp.policies import policy_named
        from kvinterp.study.behaviour.designs import is_seeded
        from kvinterp.study.behaviour.scores import AGAIN, CONTROL
        from kvinterp.study.experiments.circumstances import tried

        (adapter,) = self.adapters()
        policies = dict.fromkeys(text for design in self.designs(adapter).values() for text in design.policies)
        policies.pop("identity", None)
        stored = {"exact": "", "stored": "[prefill=stored]"}
        tried(adapter, (f"cached{stored[reading]}+{text}" for text in policies for reading in self.chosen_readings()))
        shared = {"model": self.model_settings(), **taken_by(self, behaviour_of)}
        cells = []
        arms = [(CONTROL, "identity", ["exact"]), (AGAIN, "identity", ["exact"])]
        arms += [(text, text, self.chosen_readings()) for text in policies]
        for place, (label, text, readings) in enumerate(arms):
            once = not sampled(self.strategy) and not is_seeded(policy_named(text))
            for reading in readings:
                for repeat in range(1 if once else self.repeats):
                    # Other draws of the sampling, and nothing else: what that alone changes is the floor.
                    draw = repeat + self.repeats * (label == AGAIN)
                    what = {"label": label, "policy": text, "reading": reading, "repeat": repeat, "draw": draw}
                    told = f"{label}, prefill={reading}" * (repeat == 0)
                    key = f"run-{place}-{reading}-{repeat}"
                    cells.append(Cell(key, f"{__name__}:measured", {**shared, **what}, told))
        for place, text in enumerate(policies):
            if not policy_named(text).sites:
                settings = {"model": self.model_settings(), "prompts": self.problems, "policy": text}
                cells.append(Cell(f"noise-{place}", f"{__name__}:noise", settings, f"equivalent noise of {text}"))
        return cells

    def reduce(self, parts: Parts) -> Result:
        """Scores beside control, the designs' contrasts, every text, and the noise that each policy amounts to."""
        from kvinterp.models.provenance import provenance
        from kvinterp.study.behaviour.scores import contrasted, scored

        (adapter,) = self.adapters()
        runs = joined({key: parts[key] for key in parts if key.startswith("run-")})["table"]
        noises = joined({key: parts[key] for key in parts if key.startswith("noise-")})
        columns = ["policy", "bits", "relative_rms", "sign_flips"]
        noise = pooled(noises["table"], ["policy"]) if noises else pd.DataFrame(columns=columns)
        designs = self.designs(adapter)
        group = {text: name for name in reversed(designs) for text in designs[name].policies}
        scores = scored(runs).merge(noise[columns], on="policy", how="left")
        scores.insert(0, "design", scores["policy"].map(group))
        contrasts = contrasted(runs, dict(self._contrasts(designs)))
        summary = {
            "strategy": self.strategy,
            "repeats": self.repeats,
            "max_new_tokens": self.max_new_tokens,
            "failed": int(runs["failed"].sum()),
            "scores": records(scores),
            "contrasts": records(contrasts),
            "provenance": provenance(adapter, strategy=self.strategy),
        }
        tables = {"scores": scores, "contrasts": contrasts, "examples": runs, "noise": noise}
        return self.result_of(tables, summary)

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How many policies change a score, and how large an error changes none."""
        scores = result.tables["scores"]
        scores = scores[scores["policy"] != AGAIN]
        changed = set(scores.loc[scores["q"] < SIGNIFICANT, "policy"])
        lines = [
            f"{len(changed)} of {counted(scores['policy'].nunique(), 'policy')} change a score of behaviour "
            f"({counted(int(scores['prompts'].max()), 'prompt')} at most, false discovery rate {SIGNIFICANT:.0%})."
        ]  # fmt: skip
        spared = scores[~scores["policy"].isin(changed)].dropna(subset=["relative_rms"])
        if len(spared):
            most = spared.loc[spared["relative_rms"].idxmax()]
            lines[0] += (
                f" The largest error that is not shown to change any is {most['policy']}, {number(most['relative_rms'])} "
            )
            lines[0] += "times the root mean square of K and V."
        if failed := result.summary["failed"]:
            lines.append(f"{counted(failed, 'run')} of a prompt gave NaN or Inf logits and counts as wrong.")
        return lines

    def rows(self, tables: Tables) -> Rows:
        """Every score as percent of control (a share where the control has little of it), then the designs' contrasts."""
        from kvinterp.study.behaviour.scores import METRICS

        rows: Rows = []
        for row in tables["scores"].sort_values("q", kind="stable").to_dict("records"):
            meaning, extra = METRICS[row["metric"]].meaning, {"n": row["prompts"], "p": row["p"], "p_corrected": row["q"]}
            extra |= {"measure": "%", "policy": row["policy"], "reading": f"prefill={row['reading']}"}
            extra["verdict"] = "differs from control" if row["q"] < SIGNIFICANT else ""
            if row["policy"] == AGAIN:
                extra["note"] = "the floor: only the draws of the sampling differ"
            if row["metric"] in SHARES or pd.isna(row["percent"]):
                # The ends of a share are those of its difference from control, which is paired.
                ends = row["control"] + row["low"], row["control"] + row["high"]
                rows.append(finding(meaning, row["value"], ends, null=row["control"], **extra))
            else:
                ends = row["percent_low"] / 100, row["percent_high"] / 100
                rows.append(finding(f"{meaning}, of control", row["percent"] / 100, ends, null=1, **extra))
        for row in tables["contrasts"].to_dict("records"):
            meaning = METRICS[row["metric"]].meaning
            what = f"log of {meaning}" if row["metric"] == "perplexity" else meaning
            rows.append(finding(f"{row['contrast']}: difference in {what}", row["difference"], (row["low"], row["high"]),
                                row["prompts"], null=0, p=row["p"]))  # fmt: skip
        return rows

    def charts(self, result: Result) -> Charts:
        """Every policy's scores; percent of control against the error in K and V; the contrasts of the designs."""
        from kvinterp.study.behaviour.scores import METRICS

        scores, contrasts = result.tables["scores"], result.tables["contrasts"]
        titles = {name: measure.meaning for name, measure in METRICS.items()}
        percent = scores.assign(low=scores["percent_low"], high=scores["percent_high"])
        shares = scores.assign(**{end: scores["control"] + scores[end] for end in ("low", "high")})
        by: dict[str, Any] = {"y": "policy", "kind": "dots", "color": "reading", "facet": "metric", "titles": titles}
        by |= {"names": {name: f"prefill={name}" for name in dict.fromkeys(scores["reading"])}}
        charts = {"kv_error": Chart("What each policy does to behaviour", [
            Panel(only_these(percent, ANSWERS), "percent", label="% of control", level=100, scale="linear", **by),
            Panel(only_these(percent, ["perplexity"]), "percent", label="% of control", level=100, scale="log", **by),
            Panel(only_these(shares, SHARES), "value", label="share", scale="share", **by),
        ])}  # fmt: skip
        with_error = only_these(percent, ANSWERS)
        with_error = with_error[(with_error["relative_rms"] > 0) & with_error["percent"].notna()]
        if len(with_error):
            full = with_error["bits"].max()
            with_error = with_error.assign(of=[f"{bits:g} bits" if bits < full else "noise" for bits in with_error["bits"]])
            at: dict[str, Any] = {"x": "relative_rms", "y": "percent", "kind": "points", "xscale": "log", "color": "of"}
            at |= {"scale": "linear", "level": 100, "facet": "metric", "titles": titles}
            charts["kv_error_noise"] = Chart("Does the size of the error foretell what it does?", [
                Panel(group, label=f"% of control,\nprefill={reading}", xlabel="root mean square of the error, relative", **at)
                for reading, group in with_error.groupby("reading", sort=False)
            ])  # fmt: skip
        if len(contrasts):
            options: dict[str, Any] = {"x": "difference", "y": "contrast", "kind": "dots", "scale": "linear", "level": 0}
            charts["kv_error_contrasts"] = Chart("Contrasts of the designs", [
                Panel(only_these(contrasts, ["instructions", "problems"]), label="difference of shares", facet="metric",
                      titles=titles, **options),
                Panel(only_these(contrasts, ["perplexity"]), label="difference of the logarithm of perplexity", **options),
            ])  # fmt: skip
        return charts

    def _contrasts(self, designs: Mapping[str, Design]) -> Iterator[tuple[str, dict[tuple[str, str], float]]]:
        readings = self.chosen_readings()
        for design in designs.values():
            for name, weights in design.contrasts.items():
                for reading in readings:
                    yield f"{name}, prefill={reading}", {(text, reading): weight for text, weight in weights.items()}
        if len(readings) > 1:
            for text in dict.fromkeys(text for design in designs.values() for text in design.policies):
                yield f"{text}: stored against exact", {(text, "stored"): 1.0, (text, "exact"): -1.0}


def only_these(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The rows of some metrics."""
    return table[table["metric"].isin(list(names))]


# One run ---------------------------------------------------------------------------------------------------------------


def noise(model: Mapping[str, Any], prompts: str, policy: str) -> pd.DataFrame:
    """The sums of a policy's error on a few prompts."""
    from kvinterp.policies import policy_named

    return error_of_policy(loaded(model), load_prompts(prompts)[:_NOISE_PROMPTS], policy_named(policy), _NOISE_TOKENS)


def measured(
    model: Mapping[str, Any], label: str, policy: str, reading: str, repeat: int, draw: int, **settings: Any
) -> pd.DataFrame:
    """The examples of one policy, reading and repeat."""
    table = behaviour_of(loaded(model), policy, reading, repeat, draw, **settings)
    return table.assign(policy=label, reading=reading, repeat=repeat)


def behaviour_of(
    adapter: Adapter,
    policy: str,
    reading: str,
    repeat: int,
    draw: int,
    instructions: str,
    problems: str,
    texts: str,
    strings: str,
    strategy: str = "greedy",
    max_new_tokens: int = 100,
) -> pd.DataFrame:
    """What a model writes and thinks likely under a policy, prompt by prompt.

    Every prompt has noise of its own, so that prompts are independent of each other. Of strings and texts the last token of
    the context goes through the cache under either reading: no answer is the prefill's alone.

    Args:
        adapter: The model.
        policy: The policy.
        reading: What the prefill reads, one of :data:`READINGS`.
        repeat: Which draws of the noise.
        draw: Which draws of the sampling.
        instructions: Prompts that are scored.
        problems: The same.
        texts: Prompts with an answer, whose likelihood is measured.
        strings: Prompts of whose texts strings are made.
        strategy: How tokens are chosen.
        max_new_tokens: Most tokens of a text.

    Returns:
        One row a task and prompt: task, prompt, id, correct, loop, outside, tokens, nats (a token), text, failed (NaN or Inf
        logits; then nothing is right, and nats is not known).
    """
    from kvinterp.data import loop_at_end, outside_share, score, task_words
    from kvinterp.errors import NonFiniteError
    from kvinterp.models.inputs import encode
    from kvinterp.models.threads import own_threads
    from kvinterp.paths import Cached
    from kvinterp.policies import policy_named
    from kvinterp.study.behaviour.decoding import likelihoods, write
    from kvinterp.study.behaviour.designs import reseeded

    named = policy_named(policy)
    rows: Rows = []

    def add(task: str, number: int, name: str, answer: Any) -> None:
        path = Cached(reseeded(named, 100_000 * repeat + number), prefill=reading)
        try:
            found = answer(path) | {"failed": False}
        except NonFiniteError:
            found = {"correct": False, "failed": True}
        rows.append({"task": task, "prompt": number, "id": name, **found})

    def written(task: str, number: int, prompt: Any, known: frozenset[str]) -> None:
        tokens = encode(adapter, prompt, max_new_tokens)

        def answer(path: Any) -> dict[str, Any]:
            how: dict[str, Any] = {"strategy": strategy, "seed": draw, "examples": [number]}
            (made,) = write(adapter, path, [tokens], max_new_tokens, **how)
            loop = loop_at_end(made.tokens).period > 0
            told = {"correct": score(prompt, made.text), "loop": loop, "outside": outside_share(made.text, known)}
            return {**told, "tokens": len(made.tokens), "text": made.text}

        add(task, number, prompt.id, answer)

    def likely(task: str, number: int, name: str, context: str, answer: str) -> None:
        before, whole = encode(adapter, context, 1), encode(adapter, context + answer, 1)
        if whole[: len(before)] != before:
            before = whole[: len(before) - 1]
        after = whole[len(before) :]

        def asked(path: Any) -> dict[str, Any]:
            (found,) = likelihoods(adapter, path, [(before, after)])
            return {"correct": found.greedy, "nats": -found.log_probability / len(after), "tokens": len(after)}

        add(task, number, name, asked)

    with own_threads(adapter):
        for task, source in (("instructions", instructions), ("problems", problems)):
            prompts = load_prompts(source)
            known = task_words(prompts)
            for number, prompt in enumerate(prompts):
                written(task, number, prompt, known)
        for number, prompt in enumerate(load_prompts(texts)):
            likely("texts", number, prompt.id, prompt.text, f" {prompt.answer}")
        for number, (name, context, word) in enumerate(strings_of(strings)):
            likely("strings", number, name, context, word)
    return pd.DataFrame(rows)


def strings_of(source: str) -> list[tuple[str, str, str]]:
    """Strings of ten words from the beginning of prompts and answers: name, the first nine, and the tenth.

    Args:
        source: Prompts, as :func:`kvinterp.data.load_prompts` takes them.

    Returns:
        The tenth word with the space before it, as tokenizers have it.

    Raises:
        InputError: No text has ten words.
    """
    strings: list[tuple[str, str, str]] = []
    for prompt in load_prompts(source):
        text = f"{prompt.text} {prompt.answer}"
        ends = [word.end() for word in re.finditer(r"\S+", text)][:STRING]
        if len(ends) == STRING:
            strings.append((prompt.id, text[: ends[-2]], text[ends[-2] : ends[-1]]))
    if not strings:
        raise InputError(f"--strings {source!r} has no text of {STRING} words: give longer ones.")
    return strings
