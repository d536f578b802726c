"""Measure what errors in the KV cache do to behaviour: answers, likelihoods and degenerate texts,
in percent of a control.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.commands.kit import (
    DRAWS,
    Adapter,
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
    counted,
    finding,
    finding_from,
    joined,
    load_prompts,
    model,
    number,
    option,
    sampled,
    shared,
    tried,
    used_by,
)
from kvinterp.common.checks import check_number
from kvinterp.common.spec import split
from kvinterp.data import loop_at_end, outside_share, score, task_words
from kvinterp.errors import NonFiniteError
from kvinterp.models.inputs import encode
from kvinterp.models.threads import own_threads
from kvinterp.papers.behaviour.decoding import likelihoods, write
from kvinterp.papers.behaviour.designs import DESIGNS, Design, designed, is_seeded, reseeded
from kvinterp.papers.behaviour.scores import AGAIN, CONTROL, METRICS, contrasted, scored
from kvinterp.papers.studies import equivalent_noise
from kvinterp.paths import Cached
from kvinterp.policies import policy_named

READINGS = ("stored", "exact")
"""What attention reads in the prefill: what the cache keeps, as in llama.cpp, or what was
computed.
"""
SHARES = ("loops", "outside")
"""Scores of which the control has little or nothing, so that percent of it say little."""
ANSWERS = ("instructions", "next_token", "problems")
SIGNIFICANT = 0.05
STRING = 10
"""Words of a string whose last one is guessed."""
_NOISE_PROMPTS, _NOISE_TOKENS = 4, 16
"""On how many prompts, and tokens of each, the noise that a policy amounts to is measured."""
_STORED = {"exact": "", "stored": "[prefill=stored]"}
"""How a path says what attention reads in the prefill."""


class KvError(OfModel):
    """How much error in K and V does behaviour bear, and of which kind, where, and under which
    reading of the prompt?
    """

    SUMMED = ("scores", "contrasts")
    NOTED = ("strategy",)

    model: str = model("zoo:llama64-mini")
    design: str = option(
        "grid",
        "What to vary: grid, factorial, tensors, layers, heads (several with commas), all, or none.",
        among=(*DESIGNS, "all", "none"),
        commas="between",
    )
    policies: tuple[str, ...] = option(
        (),
        "Another policy to run as well, such as q5_1; may be given several times.",
        flag="--policy",
    )
    base: str = option(
        "normal(0,0.5)",
        "The policy for the designs tensors, layers and heads, which apply it to one part of the cache at a time.",
        only=used_by("design", "tensors", "layers", "heads"),
    )
    rms: float = option(
        0.57735,
        "Root mean square of the relative error in the factorial design; uniform(-1,1) has 0.577.",
        only=used_by("design", "factorial"),
    )
    readings: str = option(
        "stored,exact",
        "What attention reads in the prefill: stored or exact K and V, or both in turn.",
        among=READINGS,
        commas="between",
    )
    repeats: int = option(
        5,
        "How many runs of each setting, with new noise and new samples.",
        min=1,
        only=(lambda asked: asked.draws(), DRAWS),
    )
    instructions: str = option(
        "instructions:12",
        "Prompts that ask for instructions to be followed: a generator or a .jsonl file.",
    )
    problems: str = option("arithmetic:12", "Prompts with problems to solve.")
    texts: str = option("restate:8", "Prompts with given answers, whose perplexity is measured.")
    strings: str = option("instructions:24", "Prompts from which strings of ten words are cut.")
    strategy: str = option(
        "top_p(0.95,0.8)",
        "How tokens are chosen. The default is llama.cpp's, without its top-k of 40.",
    )
    max_new_tokens: int = shared("max_new_tokens", 100, min=1)
    dtype: str = option("float32", "The dtype of every run, the control included.")

    # What is run ----------------------------------------------------------------------------------

    def designs(self, adapter: Adapter) -> dict[str, Design]:
        """The designs that were asked for, and ``given``, the user's own policies.

        Raises:
            InputError: A policy does not fit a design.
        """
        designs = {
            name: designed(name, self.base, self.rms, adapter.facts)
            for name in self.chosen_designs()
        }
        if self.policies:
            designs["given"] = Design(
                tuple(dict.fromkeys(str(policy_named(text)) for text in self.policies))
            )
        return designs

    def chosen_designs(self) -> list[str]:
        """The names of the designs."""
        names = _split(self.design)
        return list(DESIGNS) if "all" in names else [name for name in names if name != "none"]

    def draws(self) -> bool:
        """Whether a repeat is another draw of anything: of the sampling, or of a policy's noise."""
        seeded = (is_seeded(policy_named(text)) for text in self.policies)
        return sampled(self.strategy) or bool(self.chosen_designs()) or any(seeded)

    def check(self) -> None:
        """Designs, policies and what the prompts are of too."""
        super().check()
        check_number("rms", self.rms)
        for name in ("instructions", "problems"):
            source = getattr(self, name)
            tasks = {prompt.task for prompt in load_prompts(source)}
            if not all(tasks):
                raise InputError(
                    f"--{name} {source!r} has a prompt without a task, which nothing can score."
                )
            if other_tasks := sorted(
                task for task in tasks if (task == "instructions") != (name == "instructions")
            ):
                raise InputError(
                    f"--{name} {source!r} holds prompts of the task {other_tasks[0]!r}, not {name}."
                )
        if not all(prompt.answer.strip() for prompt in load_prompts(self.texts)):
            raise InputError(
                f"--texts {self.texts!r} has a prompt without an answer: give one, as in restate:16."
            )
        strings_of(self.strings)
        if not self.chosen_designs() and not self.policies:
            raise InputError(
                "no design and no policy was given: give --policy, or a design such as grid."
            )

    def cells(self) -> list[Cell]:
        """A cell a policy, reading and repeat; those of control, and behind them the noise that
        each policy amounts to.
        """
        adapter = self.adapter()
        readings = _split(self.readings)
        policies = dict.fromkeys(
            text for design in self.designs(adapter).values() for text in design.policies
        )
        policies.pop("identity", None)
        tried(
            adapter,
            (f"cached{_STORED[reading]}+{text}" for text in policies for reading in readings),
        )
        cells = []
        arms = [(label, "identity", ["exact"]) for label in (CONTROL, AGAIN)]
        arms += [(text, text, readings) for text in policies]
        for index, (label, text, readings_of_arm) in enumerate(arms):
            once = not sampled(self.strategy) and not is_seeded(policy_named(text))
            for reading in readings_of_arm:
                for repeat in range(1 if once else self.repeats):
                    # Other draws of the sampling, and nothing else: what that alone changes is the
                    # floor.
                    draw = repeat + self.repeats * (label == AGAIN)
                    arm = {
                        "label": label,
                        "policy": text,
                        "reading": reading,
                        "repeat": repeat,
                        "draw": draw,
                    }
                    cells.append(Cell(f"run-{index}-{reading}-{repeat}", self.measured, arm))
        return cells + [
            Cell(f"noise-{index}", self.noise_of, {"policy": text})
            for index, text in enumerate(policies)
            if not policy_named(text).sites
        ]

    def measured(
        self, label: str, policy: str, reading: str, repeat: int, draw: int
    ) -> pd.DataFrame:
        """The examples of one policy, reading and repeat."""
        sources, options = (
            self.choices("instructions", "problems", "texts", "strings"),
            self.choices("strategy", "max_new_tokens"),
        )
        table = behaviour_of(self.adapter(), policy, reading, repeat, draw, sources, **options)
        return table.assign(policy=label, reading=reading, repeat=repeat)

    def noise_of(self, policy: str) -> pd.DataFrame:
        """The error of a policy on a few of the problems."""
        prompts = load_prompts(self.problems)[:_NOISE_PROMPTS]
        return equivalent_noise.error_of_policy(
            self.adapter(), prompts, policy_named(policy), _NOISE_TOKENS
        )

    def tables(self, results: CellResults) -> Tables:
        """Scores beside control, the designs' contrasts, every text, and the noise that each policy
        amounts to.
        """
        runs, noises = (
            joined({key: results[key] for key in results if key.startswith(kind)})
            for kind in ("run-", "noise-")
        )
        examples, columns = runs["table"], ["policy", "bits", "relative_rms", "sign_flips"]
        noise = (
            equivalent_noise.pooled(noises["table"], ["policy"])
            if noises
            else pd.DataFrame(columns=columns)
        )
        designs = self.designs(self.adapter())
        group = {text: name for name in reversed(designs) for text in designs[name].policies}
        scores = scored(examples).merge(noise[columns], on="policy", how="left")
        scores.insert(0, "design", scores["policy"].map(group))
        contrasts = contrasted(examples, self._contrasts(designs))
        return {"scores": scores, "contrasts": contrasts, "examples": examples, "noise": noise}

    def summary(self, tables: Tables) -> dict[str, Any]:
        """How it was decoded, and how often that failed, too."""
        how = self.choices("strategy", "repeats", "max_new_tokens")
        return {**how, "failed": int(tables["examples"]["failed"].sum()), **super().summary(tables)}

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How many policies change a score, and how large an error changes none."""
        scores = result.tables["scores"].query("policy != @AGAIN")
        changed = set(scores.loc[scores["q"] < SIGNIFICANT, "policy"])
        lines = [
            f"{len(changed)} of {counted(scores['policy'].nunique(), 'policy')} change a score of behaviour "
            f"({counted(int(scores['prompts'].max()), 'prompt')} at most, false discovery rate {SIGNIFICANT:.0%})."
        ]
        spared = scores[~scores["policy"].isin(changed)].nlargest(1, "relative_rms")
        for most in spared.to_dict("records"):
            lines[0] += (
                f" The largest error that is not shown to change any is {most['policy']}, {number(most['relative_rms'])} "
                "times the root mean square of K and V."
            )
        if failed := result.summary["failed"]:
            lines.append(
                f"{counted(failed, 'run')} of a prompt gave NaN or Inf logits and counts as wrong."
            )
        return lines

    def rows(self, result: Result) -> Rows:
        """Every score as percent of control (a share where the control has little of it), then the
        designs' contrasts.
        """
        for row in result.tables["scores"].sort_values("q", kind="stable").to_dict("records"):
            meaning, control = METRICS[row["metric"]].meaning, row["control"]
            if row["metric"] in SHARES or pd.isna(row["percent"]):
                # The ends of a share are those of its difference from control, which is paired.
                name, null = meaning, control
                estimate, ends = row["value"], (control + row["low"], control + row["high"])
            else:
                name, null = f"{meaning}, of control", 1
                estimate, *ends = (row[f"percent{end}"] / 100 for end in ("", "_low", "_high"))  # type: ignore[assignment]
            yield finding(
                name, estimate, ends, row["prompts"], measure="%", null=null, p=row["p"], p_corrected=row["q"],
                verdict="differs from control" if row["q"] < SIGNIFICANT else "",
                note="the floor: only the draws of the sampling differ" if row["policy"] == AGAIN else "",
                policy=row["policy"], reading=f"prefill={row['reading']}",
            )  # fmt: skip
        for row in result.tables["contrasts"].to_dict("records"):
            meaning = "log of " * (row["metric"] == "perplexity") + METRICS[row["metric"]].meaning
            name = f"{row['contrast']}: difference in {meaning}"
            yield finding_from(row, name, "difference", n=row["prompts"], null=0, p=row["p"])

    def charts(self, result: Result) -> Charts:
        """Every policy's scores; percent of control against the error in K and V; the contrasts of
        the designs.
        """
        scores, contrasts = result.tables["scores"], result.tables["contrasts"]
        percent = scores.assign(low=scores["percent_low"], high=scores["percent_high"])
        shares = scores.assign(**{end: scores["control"] + scores[end] for end in ("low", "high")})
        readings = {name: f"prefill={name}" for name in dict.fromkeys(scores["reading"])}

        def panel(
            table: pd.DataFrame, metrics: Sequence[str], x: str, y: str = "policy", **options: Any
        ) -> Panel:
            return Panel(
                table[table["metric"].isin(metrics)],
                x,
                y,
                **{"facet": "metric", "titles": _TITLES, **options},
            )

        dots = functools.partial(panel, kind="dots", color="reading", names=readings)
        of_control = functools.partial(dots, label="% of control", level=100)
        with_error = percent[
            percent["metric"].isin(ANSWERS)
            & (percent["relative_rms"] > 0)
            & percent["percent"].notna()
        ]
        full = with_error["bits"].max()
        of = [f"{bits:g} bits" if bits < full else "noise" for bits in with_error["bits"]]
        less = functools.partial(
            panel, contrasts, x="difference", y="contrast", kind="dots", scale="linear", level=0
        )
        return {
            "kv_error": Chart("What each policy does to behaviour", [
                of_control(percent, ANSWERS, "percent", scale="linear"),
                of_control(percent, ["perplexity"], "percent", scale="log"),
                dots(shares, SHARES, "value", label="share", scale="share"),
            ]),
            "kv_error_noise": Chart("Does the size of the error foretell what it does?", [
                panel(group, ANSWERS, "relative_rms", "percent", kind="points", xscale="log", color="of", scale="linear",
                      level=100, label=f"% of control,\nprefill={reading}",
                      xlabel="root mean square of the error, relative")
                for reading, group in with_error.assign(of=of).groupby("reading", sort=False)
            ]),
            "kv_error_contrasts": Chart("Contrasts of the designs", [
                less(["instructions", "problems"], label="difference of shares"),
                less(["perplexity"], facet="", titles={}, label="difference of the logarithm of perplexity"),
            ]),
        }  # fmt: skip

    def _contrasts(self, designs: Mapping[str, Design]) -> dict[str, dict[tuple[str, str], float]]:
        """By name the weights of policies and readings."""
        readings = _split(self.readings)
        contrasts = {
            f"{name}, prefill={reading}": {
                (text, reading): weight for text, weight in weights.items()
            }
            for design in designs.values()
            for name, weights in design.contrasts.items()
            for reading in readings
        }
        for text in (
            text for design in designs.values() for text in design.policies if len(readings) > 1
        ):
            contrasts[f"{text}: stored against exact"] = {
                (text, "stored"): 1.0,
                (text, "exact"): -1.0,
            }
        return contrasts


_TITLES = {name: measure.meaning for name, measure in METRICS.items()}


def _split(text: str) -> list[str]:
    """The names that an option has between commas, each once."""
    return list(dict.fromkeys(split(text, ",")))


# One run ------------------------------------------------------------------------------------------


def behaviour_of(
    adapter: Adapter,
    policy: str,
    reading: str,
    repeat: int,
    draw: int,
    sources: Mapping[str, str],
    strategy: str = "greedy",
    max_new_tokens: int = 100,
) -> pd.DataFrame:
    """What a model writes and thinks likely under a policy, prompt by prompt.

    Every prompt has noise of its own, so that prompts are independent of each other. The last
    token of a string's or a text's context goes through the cache under either reading: no answer
    is the prefill's alone.

    Args:
        adapter: The model.
        policy: The policy.
        reading: What the prefill reads, one of :data:`READINGS`.
        repeat: Which draws of the noise.
        draw: Which draws of the sampling.
        sources: The prompts: ``instructions`` and ``problems`` are scored, the likelihood of the
            answers of ``texts`` is measured, and ``strings`` are cut from texts.
        strategy: How tokens are chosen.
        max_new_tokens: Most tokens of a text.

    Returns:
        One row a task and prompt: task, prompt, id, correct, loop, outside, tokens, nats (a token),
        text, failed (NaN or Inf logits; then nothing is right, and nats is not known).
    """

    def text(path: Any, number: int, prompt: Any, known: frozenset[str]) -> dict[str, Any]:
        tokens = encode(adapter, prompt, max_new_tokens)
        (written,) = write(
            adapter, path, [tokens], max_new_tokens, strategy=strategy, seed=draw, examples=[number]
        )
        return {
            "correct": score(prompt, written.text),
            "loop": loop_at_end(written.tokens) > 0,
            "outside": outside_share(written.text, known),
            "tokens": len(written.tokens),
            "text": written.text,
        }

    def likelihood(path: Any, _: int, context: str, answer: str) -> dict[str, Any]:
        before, whole = encode(adapter, context, 1), encode(adapter, context + answer, 1)
        if whole[: len(before)] != before:
            before = whole[: len(before) - 1]
        after = whole[len(before) :]
        (likely,) = likelihoods(adapter, path, [(before, after)])
        return {
            "correct": likely.greedy,
            "nats": -likely.log_probability / len(after),
            "tokens": len(after),
        }

    tasks: dict[str, list[tuple[Any, ...]]] = {}
    for task in ("instructions", "problems"):
        prompts = load_prompts(sources[task])
        known = task_words(prompts)
        tasks[task] = [(prompt.id, text, prompt, known) for prompt in prompts]
    tasks["texts"] = [
        (prompt.id, likelihood, prompt.text, f" {prompt.answer}")
        for prompt in load_prompts(sources["texts"])
    ]
    tasks["strings"] = [
        (name, likelihood, context, word) for name, context, word in strings_of(sources["strings"])
    ]
    rows = []
    with own_threads(adapter):
        for task, questions in tasks.items():
            for number, (name, answer, *question) in enumerate(questions):
                path = Cached(
                    reseeded(policy_named(policy), 100_000 * repeat + number), prefill=reading
                )
                try:
                    scores = answer(path, number, *question) | {"failed": False}
                except NonFiniteError:
                    scores = {"correct": False, "failed": True}
                rows.append({"task": task, "prompt": number, "id": name, **scores})
    return pd.DataFrame(rows)


def strings_of(source: str) -> list[tuple[str, str, str]]:
    """Strings of ten words from the beginning of prompts and answers: name, the first nine, and the
    tenth.

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
