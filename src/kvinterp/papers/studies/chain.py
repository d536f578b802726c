"""Play the telephone game: restate a text again and again, with and without a policy on the cache.

Each output is the next input. The null is the same precision with other seeds, so the effect of a
policy is compared with the effect of another random draw. Chains of one text and seed draw the same
random numbers under every policy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvinterp.commands.kit import (
    Cell,
    CellResults,
    Chart,
    Charts,
    Experiment,
    InputError,
    Panel,
    Result,
    Rows,
    Tables,
    argument,
    between,
    counted,
    ends_of,
    finding,
    finding_from,
    joined,
    load_prompts,
    number,
    only,
    option,
    shared,
    tried,
)
from kvinterp.common.progress import counting
from kvinterp.data import Prompt
from kvinterp.papers.behaviour.chains import (
    TEXT,
    attractors_of,
    check_embedder,
    cosines,
    curves_of,
    cycles_of,
    deltas_of,
    embedder_named,
    facts_of,
    played,
    share_kept,
    tokens_of,
)
from kvinterp.papers.behaviour.divergence import conditions
from kvinterp.paths import Cached, TopP
from kvinterp.policies import Policy, policy_named
from kvinterp.policies.base import ComposedPolicy, Selective

CONTROL, NULL = "cached", "cached, other seeds"
_WITH_POLICY = (
    lambda asked: bool(asked.policies),
    "no policy was given; give one with --policy, or leave it out",
)


class Chain(Experiment):
    """Does the precision of the cache change where a text goes that is restated again and again?"""

    SUMMED = ("deltas", "cycles", "attractors")

    models: tuple[str, ...] = argument(
        ("zoo:gqa2-mini",), "zoo:NAME, checkpoint folders, GGUF files or hub ids."
    )
    policies: tuple[str, ...] = option(
        ("int8", "int4"),
        "A policy for K and V, such as int8; may be given several times.",
        flag="--policy",
    )
    on: str = option(
        "kv,k,v",
        "Apply each policy to both tensors (kv), to K alone (k), to V alone (v): one or several, with commas.",
        among=("kv", "k", "v"),
        commas="between",
        only=_WITH_POLICY,
    )
    prefill: str = option(
        "exact",
        "What attention reads in the prefill: exact K and V, or those the policy stored, as in llama.cpp and Ollama.",
        among=("exact", "stored"),
        only=_WITH_POLICY,
    )
    texts: str = option(
        "restate:6",
        "Texts to begin with: restate:N, or a .txt or .jsonl file.",
        only=(
            lambda asked: asked.text is None,
            "one text was given in their place; leave one of the two out",
        ),
    )
    text: str | None = option(None, "One text to begin with, instead of --texts.")
    template: str = option(
        "Text: {text}\nIn other words:", "The request; {text} stands for the text."
    )
    system: str | None = option(None, "A system message before the request.")
    chat: str = option(
        "none",
        "Wrap the request in the tokenizer's chat template: 'template' or 'none'.",
        among=("none", "template"),
    )
    hops: int = option(30, "How many times each text is restated.", min=1)
    temperatures: str = option(
        "0.7,0", "Sampling temperatures, with commas. At 0 each text has one chain."
    )
    seeds: int = option(
        4,
        "How many chains to run per text.",
        min=2,
        only=(
            lambda asked: any(asked.drawn_at()),
            "at temperature 0 nothing is drawn; add another, or leave it out",
        ),
    )
    max_new_tokens: int = option(64, "The most tokens in one restatement.", min=1)
    embedder: str = option(
        "counts",
        "How two texts are compared: counts (cosine of word counts), model (the model's own last residual stream, averaged), or "
        "a sentence-transformers model by name or folder, such as real:all-minilm-l6-v2.",
    )
    batch_size: int = option(
        1,
        "The most chains in one batch. Batching is used only where it gives the same bits.",
        decides="nothing",
        min=1,
    )
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def arms(self) -> dict[str, str]:
        """The paths by the names of their arms: no policy, the same with other seeds, and each
        policy on each tensor.
        """
        parts = [part.strip() for part in self.on.split(",")]
        for text in self.policies:
            tensors = getattr(policy_named(text), "on", "kv")
            if tensors != "kv" and not {"kv", tensors} & set(parts):
                raise InputError(
                    f"policy {text} is on {tensors.upper()} alone, and --on {self.on} leaves it out: add {tensors} to --on."
                )
        policies = [_on(policy_named(text), part) for text in self.policies for part in parts]
        return {
            CONTROL: "cached",
            NULL: "cached",
            **{str(one): str(Cached(one, prefill=self.prefill)) for one in policies},
        }

    def cells(self) -> list[Cell]:
        """A cell a model, arm, temperature and text."""
        texts, arms, temperatures = self._texts(), self.arms(), self.drawn_at()
        for adapter in self.adapters():
            # What is not there is said before anything runs.
            embedder_named(self.embedder, adapter)
            tokens_of(adapter, self.template, self.chat, self.system)
            tried(adapter, arms.values())
        cells = list[Cell]()
        for model, (arm, path), temperature in itertools.product(
            dict.fromkeys(self.models), arms.items(), temperatures
        ):
            if arm == NULL and not temperature:
                continue  # Nothing is drawn.
            count = self.seeds if temperature else 1
            seeds = [seed + (count if arm == NULL else 0) for seed in range(count)]
            settings = {
                "model": model,
                "arm": arm,
                "path": path,
                "temperature": temperature,
                "seeds": seeds,
            }
            for index in range(len(texts)):
                cells.append(
                    Cell(f"chain-{len(cells)}", self.measured, {**settings, "number": index})
                )
        return cells

    def measured(
        self,
        model: str,
        arm: str,
        path: str,
        temperature: float,
        number: int,
        seeds: Sequence[int],
        progress: str = "none",
    ) -> dict[str, pd.DataFrame]:
        """The chains of one text."""
        adapter, text = self.adapter(model), self._texts()[number]
        embed, facts = embedder_named(self.embedder, adapter), facts_of(text)
        ask = tokens_of(adapter, self.template, self.chat, self.system)
        options = self.choices("max_new_tokens", "batch_size") | {"temperature": temperature}
        with counting(self.hops * len(seeds), arm, "hop", progress) as bar:
            chains = played(
                adapter, path, text.text, number, seeds, self.hops, ask, **options, done=bar.update
            )
        rows = [
            {
                "model": adapter.facts.name, "arm": arm, "temperature": temperature, "text": number, "seed": seed, "hop": hop,
                "said": sentence, "words": len(sentence.split()), "similarity": similarity,
                "facts": share_kept(facts, sentence),
            }
            for seed, chain in zip(seeds, chains, strict=True)
            for hop, (sentence, similarity) in enumerate(zip(chain, cosines(embed(chain)), strict=True))
        ]  # fmt: skip
        return {"chains": pd.DataFrame(rows)}

    def settings(self) -> dict[str, Any]:
        """With the texts themselves: a file may change."""
        return {**super().settings(), "restated": [text.text for text in self._texts()]}

    def tables(self, results: CellResults) -> Tables:
        """What the chains come to."""
        chains = joined(results)["chains"]
        return {
            "chains": chains,
            "curves": curves_of(chains),
            "deltas": deltas_of(chains, CONTROL),
            "cycles": cycles_of(chains),
            "attractors": attractors_of(chains),
        }

    def summary(self, tables: Tables) -> dict[str, Any]:
        """How texts were restated and compared, too."""
        chosen = self.choices("hops", "seeds", "embedder")
        return {**super().summary(tables), **chosen, "control": CONTROL, "null": NULL}

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """The arm that ends farthest from no policy, beside what other seeds alone change."""
        deltas = result.tables["deltas"]
        arms = deltas[~deltas["arm"].isin((CONTROL, NULL))]
        texts = counted(result.tables["chains"]["text"].nunique(), "text")
        measured_by = f"{counted(result.summary['hops'], 'hop')}, {texts}, {similarity_named(result.summary['embedder'])}"
        if arms.empty:
            ends = between(only(deltas, arm=CONTROL)["similarity"])
            return [
                f"Without a policy, chains end at a similarity of {ends} to the first text ({measured_by})."
            ]
        row = arms.loc[arms["delta"].abs().idxmax()]
        if not (arms["same_text"] < arms["chains"]).any():
            return [f"No policy changes a last text, to the letter ({measured_by})."]
        null = only(deltas, arm=NULL, model=row["model"], temperature=row["temperature"])
        alone = (
            f", where other seeds alone change it by {number(null['delta'].iloc[0])}"
            if len(null)
            else ""
        )
        return [
            f"{row['arm']} changes the last similarity to the first text most, by {number(row['delta'])} on {row['model']} at "
            f"temperature {row['temperature']:g}{alone} ({measured_by})."
        ]

    def rows(self, result: Result) -> Rows:
        """Where the chains of each arm end beside those without a policy, which come back to a
        text, what draws their lengths.
        """
        at, tables = ("model", "temperature"), result.tables
        of_arm = functools.partial(finding_from, by=(*at, "arm"), unit="texts")
        texts = tables["chains"].groupby("model")["text"].nunique()
        for row in (
            tables["deltas"].assign(n=tables["deltas"]["model"].map(texts)).to_dict("records")
        ):
            if row["arm"] == CONTROL:
                half = f"{row['halved']} of {counted(row['chains'], 'chain')} fall to a half"
                yield of_arm(
                    row, "similarity of the last text to the first", "similarity", note=half
                )
                yield of_arm(row, "facts kept", "facts", measure="%")
                continue
            counts = "{better} better, {worse} worse, {same_text} with the same last text, of {chains}".format(
                **row
            )
            yield of_arm(row, "last similarity, less that without a policy", "delta", null=0,
                         verdict="every last text is the same, to the letter" * (row["same_text"] == row["chains"]),
                         note="the null: only the seeds differ" if row["arm"] == NULL else counts)  # fmt: skip
        for labels, group in conditions(tables["cycles"], *at):
            again = group["period"].notna()
            fixed = f"{(group['period'] == 1).sum()} of them to a fixed point" * bool(again.any())
            yield finding("chains that come back to a text, to the letter", again.mean(), n=len(group), unit="chains",
                          measure="%", note=fixed, **labels)  # fmt: skip
        pulls = only(tables["attractors"], arm=CONTROL, of="words").dropna(
            subset=["strength", "position"]
        )
        for row in pulls[pulls["strength"].between(0, 2, inclusive="neither")].to_dict("records"):
            yield finding_from(row, f"pull to {number(row['position'])} words (1: in one hop)", "strength", at, n=row["pairs"],
                               unit="hops", note="successive hops taken as independent")  # fmt: skip

    def charts(self, result: Result) -> Charts:
        """Similarity by hop, the final difference of every arm beside no policy, and a map of
        them.
        """
        notes = [similarity_named(result.summary["embedder"])]
        curves, deltas = (
            ends_of(table, column).assign(
                setting=table["model"] + ", temperature " + table["temperature"].map("{:g}".format)
            )
            for table, column in (
                (result.tables["curves"], "similarity"),
                (result.tables["deltas"], "delta"),
            )
        )
        deltas = deltas[deltas["arm"] != CONTROL].assign(what="a policy")
        deltas.loc[deltas["arm"] == NULL, "what"] = "other seeds, the null"
        deltas["line"] = deltas["arm"] + ", " + deltas["setting"]
        less, title = "last similarity less that without a policy", "What each policy changes"
        order = [*dict.fromkeys(curves["arm"])]
        cells = deltas.sort_values("arm", key=lambda arm: arm.map(order.index), kind="stable")
        return {
            "chain_curves": Chart("How far a text drifts", [
                Panel(curves, "hop", "similarity", color="arm", facet="setting", columns=2, ends="band", scale="share",
                      label="similarity to the\nfirst text (mean)", xlabel="hop (0 is the text itself)")
            ], notes),
            "chain_deltas": Chart(title, [
                Panel(deltas, "delta", "line", "dots", color="what", scale="linear", level=0, label=f"{less}, 95% interval")
            ], notes),
            "chain_map": Chart(title, [Panel(cells, "arm", "setting", "map", "delta", scale="linear", label=less)]),
        }  # fmt: skip

    def check(self) -> None:
        """Template, temperatures, texts and policies too."""
        super().check()
        if TEXT not in self.template:
            raise InputError(
                f"--template {self.template!r} takes no text: write {TEXT} where it goes."
            )
        check_embedder(self.embedder)
        self.drawn_at(), self._texts(), self.arms()

    def _texts(self) -> list[Prompt]:
        return [
            _bare(text) for text in load_prompts(self.texts if self.text is None else [self.text])
        ]

    def drawn_at(self) -> list[float]:
        """The temperatures, each once."""
        try:
            temperatures = [float(part) for part in self.temperatures.split(",")]
        except ValueError as error:
            raise InputError(
                f"--temperatures {self.temperatures!r}: expected numbers with commas, as in 0.7,0."
            ) from error
        for temperature in filter(None, temperatures):
            TopP(1.0, temperature)
        return list(dict.fromkeys(temperatures))


def similarity_named(embedder: str) -> str:
    """What similarity is measured with."""
    known = {
        "counts": "similarity is the cosine of word counts, which knows no synonyms",
        "model": "similarity is the cosine of the model's own last residual stream, averaged over positions",
    }
    return known.get(embedder, f"similarity is the cosine of embeddings by {embedder}")


def _on(policy: Policy, part: str) -> Policy:
    """A policy on K or V alone, or on both; of a composed policy each.

    Raises:
        InputError: It cannot be: it has no say over one tensor alone.
    """
    if part == "kv" or getattr(policy, "on", "kv") != "kv":
        # One that was given for K or V alone stays on it.
        return policy
    if isinstance(policy, ComposedPolicy):
        return dataclasses.replace(
            policy, policies=tuple(_on(one, part) for one in policy.policies)
        )
    if not isinstance(policy, Selective):
        raise InputError(f"policy {policy} cannot be on {part.upper()} alone: give --on kv.")
    return dataclasses.replace(policy, on=part)  # type: ignore[arg-type]


def _bare(prompt: Prompt) -> Prompt:
    """A generated problem without its request: the text that is to be restated."""
    text = prompt.text
    if prompt.task == "restate":
        text = text.removeprefix("Text: ").removesuffix("\nIn other words:")
    return dataclasses.replace(prompt, text=text.strip())
