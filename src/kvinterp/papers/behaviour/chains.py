"""The telephone game: a text restated again and again along a path, and what becomes of it."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.data import Prompt
from kvinterp.data.chat import chat_tokens
from kvinterp.data.restate import score
from kvinterp.errors import InputError, reason, shown
from kvinterp.models import Adapter, real
from kvinterp.models.door import quiet_transformers
from kvinterp.papers.behaviour.decoding import write
from kvinterp.papers.behaviour.divergence import conditions, with_ends
from kvinterp.paths import ExecutionPath, Greedy, Strategy, TopP, run

TEXT = "{text}"
"""Where a template takes the text."""
ARM = ["model", "arm", "temperature"]
CHAIN = [*ARM, "text", "seed"]
"""What names one chain in a table."""


def played(
    adapter: Adapter,
    path: str | ExecutionPath,
    text: str,
    number: int,
    seeds: Sequence[int],
    hops: int,
    ask: Callable[[str], Sequence[int]],
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    done: Callable[[int], object] = lambda count: None,
) -> list[list[str]]:
    """Chains of one text, one a seed: the text itself, then what each hop made of it.

    The random numbers belong to text, seed and hop, so that every path draws the same. At
    temperature 0 a text that comes
    again goes on as it went before: what follows is copied, not computed.

    Args:
        adapter: The model.
        path: How it runs.
        text: What is restated first.
        number: Which of several texts it is.
        seeds: The chains.
        hops: How often it is restated.
        ask: The token ids that ask for a text to be restated.
        temperature: Of the sampling; 0 is greedy.
        max_new_tokens: Most tokens of a restatement.
        batch_size: Most chains in a batch; used where that keeps the bits.
        done: Told how many hops are finished, as they are.
    """
    strategy: Strategy = TopP(1.0, temperature) if temperature else Greedy()
    chains = {seed: [text] for seed in seeds}
    for hop in range(hops):
        # What followed a text when it was there before.
        known = {
            seed: chain[after]
            for seed, chain in chains.items()
            if not temperature and (after := chain.index(chain[-1]) + 1) < len(chain)
        }
        asked = [seed for seed in seeds if seed not in known]
        written = write(
            adapter, path, [ask(chains[seed][-1]) for seed in asked], max_new_tokens, strategy=strategy,
            seed=number * 100_000 + hop, examples=asked, batch_size=batch_size,
        )  # fmt: skip
        known |= {seed: spoken(each.text) for seed, each in zip(asked, written, strict=True)}
        for seed, chain in chains.items():
            chain.append(known[seed])
        done(len(chains))
    return list(chains.values())


_THOUGHT = re.compile(r"^(?:(?!<think>).)*</think>|<think>.*?(?:</think>|$)", re.DOTALL)


def spoken(text: str) -> str:
    """What a model said without what it thought: ``<think>`` blocks are left out, one without an
    end to the end.
    """
    return _THOUGHT.sub("", text).strip()


def tokens_of(
    adapter: Adapter, template: str, chat: str, system: str | None
) -> Callable[[str], list[int]]:
    """How a text is asked to be restated, as token ids.

    Args:
        adapter: The model.
        template: The request, with ``{text}`` where the text goes.
        chat: ``"template"``: a message in the tokenizer's chat template; ``"none"``: the bare text.
        system: What comes before it.

    Raises:
        InputError: The tokenizer has no chat template.
    """
    if chat == "none":
        return lambda text: adapter.encode(
            (f"{system}\n" if system else "") + template.replace(TEXT, text)
        )
    first = [{"role": "system", "content": system}] if system else []

    def ask(text: str) -> list[int]:
        messages = [*first, {"role": "user", "content": template.replace(TEXT, text)}]
        return chat_tokens(adapter.tokenizer, messages, adapter.facts.name)

    ask("")  # What has no chat template is refused before anything runs.
    return ask


# What a text is worth -----------------------------------------------------------------------------


def facts_of(prompt: Prompt) -> tuple[str, ...]:
    """What a restatement has to keep: the prompt's own facts, or else its numbers and the names
    within its sentences.
    """
    if prompt.facts:
        return prompt.facts
    names = re.findall(r"(?<=[a-z,;] )[A-Z]\w+", prompt.text)
    return tuple(dict.fromkeys([*re.findall(r"\d+(?:[.,]\d+)*", prompt.text), *names]))


def share_kept(facts: Sequence[str], text: str) -> float:
    """How many of the facts a text has as words of their own, as a share; NaN where there are
    none.
    """
    kept = [score(Prompt("", "", facts=(fact,)), text) for fact in facts]
    return float(np.mean(kept)) if kept else np.nan


def check_embedder(name: str) -> None:
    """Raises InputError where an embedder needs what is not here: asked before a model is
    loaded.
    """
    if name.startswith("real:"):
        real.path(name.removeprefix("real:"))
    if (
        name not in ("counts", "model")
        and importlib.util.find_spec("sentence_transformers") is None
    ):
        raise InputError(
            f"embedder {name!r} is a sentence-transformers model, which needs pip install 'kvinterp[chains]'; counts and model "
            "need nothing."
        )


def embedder_named(name: str, adapter: Adapter) -> Callable[[Sequence[str]], np.ndarray]:
    """What turns texts into vectors ``[text, width]``, of which the cosine is taken.

    Args:
        name: ``"counts"``: how often each word of the texts occurs, which knows no synonyms;
            ``"model"``: the mean over positions of the model's own last residual stream; or a
            sentence-transformers model, by name or folder, such as ``"real:all-minilm-l6-v2"``.
        adapter: The model.

    Raises:
        InputError: sentence-transformers is not installed, or has no such model; or one of
            ``real:`` was not fetched.
    """
    check_embedder(name)
    if name == "counts":
        return _counts
    if name == "model":
        return lambda texts: np.stack([_pooled(adapter, text) for text in texts])
    from sentence_transformers import SentenceTransformer

    path = real.path(name.removeprefix("real:")) if name.startswith("real:") else name
    try:
        with quiet_transformers():
            embedder = SentenceTransformer(str(path), device=str(adapter.device))
    # Its folders are read by several libraries, each with errors of its own.
    except Exception as error:
        raise InputError(
            f"embedder {shown(name)} cannot be loaded ({reason(error)}): give a name or a folder, counts, model or "
            "real:all-minilm-l6-v2."
        ) from error
    # One by one: a text has the same vector whatever stands beside it.
    return lambda texts: np.asarray(
        embedder.encode(list(texts), batch_size=1, show_progress_bar=False)
    )


def _counts(texts: Sequence[str]) -> np.ndarray:
    words = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    return pd.DataFrame(words).fillna(0).to_numpy(float)


def _pooled(adapter: Adapter, text: str) -> np.ndarray:
    last = adapter.facts.layers - 1
    tokens, site = adapter.encode(text or " "), "resid_post"
    trace = run(
        adapter, tokens, "recompute", max_new_tokens=1, record=site, layers=[last], positions="all"
    )
    (stream,) = trace.records[site, last]
    return np.asarray(stream.double().mean(0).cpu())


def cosines(vectors: np.ndarray) -> np.ndarray:
    """The cosine of each vector with the first; 0 where one is nothing."""
    lengths = np.linalg.norm(vectors, axis=1)
    known = lengths * lengths[0]
    return np.divide(vectors @ vectors[0], known, out=np.zeros(len(vectors)), where=known > 0)


# What chains come to ------------------------------------------------------------------------------


def cycles_of(chains: pd.DataFrame) -> pd.DataFrame:
    """Which chains come back to a text that they held before, to the letter.

    Args:
        chains: A row a hop: :data:`CHAIN`, hop, said.

    Returns:
        A row a chain: :data:`CHAIN`; ``enters``, the hop of the first text that comes again, and
            ``period``, after how many
        hops it does: 1 is a fixed point. NaN where none comes again. At temperature 0 the chain
            stays there; above it may leave.
    """
    rows = []
    for labels, chain in conditions(chains.sort_values("hop"), *CHAIN):
        again = chain[chain["said"].duplicated()].head(1)
        enters = chain.loc[chain["said"].isin(again["said"]), "hop"].min()
        rows.append(
            {**labels, "enters": float(enters), "period": float(again["hop"].min() - enters)}
        )
    return pd.DataFrame(rows)


def curves_of(chains: pd.DataFrame) -> pd.DataFrame:
    """Mean similarity and share of facts by hop, of each model, arm and temperature, with Student's
    intervals over texts.
    """
    rows = []
    for labels, group in conditions(chains, *ARM, "hop"):
        rows.append(labels | {"chains": len(group)})
        for column in ("similarity", "facts"):
            over = metrics.mean_of(group.groupby("text")[column].mean().dropna())
            rows[-1] |= with_ends(column, group[column].mean(), over.low, over.high)
    return pd.DataFrame(rows)


def deltas_of(chains: pd.DataFrame, control: str) -> pd.DataFrame:
    """How far each arm's last texts are from the control's: chains of one text and seed are paired.

    Args:
        chains: A row a hop: :data:`CHAIN`, hop, similarity, facts.
        control: The arm that others are compared with.

    Returns:
        A row a model, arm and temperature, sorted: ``similarity`` and ``facts`` of the last hop,
        ``delta`` (the arm's minus the control's similarity) with Student's interval over texts
        (chains of one are not independent), ``chains``, those ``better`` and ``worse`` than the
        control's, ``same_text``, and ``half_life``: the median of the first hop whose similarity is
        at most a half, of the ``halved`` chains that have one.
    """
    halves = chains[chains["similarity"] <= 0.5].groupby(CHAIN)["hop"].min().rename("half")
    last = chains[chains["hop"] == chains["hop"].max()].join(halves, on=CHAIN)
    last = last.assign(pair=last.groupby([*ARM, "text"])["seed"].rank())
    keys = ["model", "temperature", "text", "pair"]
    own = last[last["arm"] == control][[*keys, "similarity", "said"]]
    beside = last.merge(own, on=keys, suffixes=("", "_control"))
    rows = []
    for labels, group in conditions(beside, *ARM):
        delta = group["similarity"] - group["similarity_control"]
        over, half = metrics.mean_of(delta, group["text"]), group["half"].dropna()
        rows.append(
            {
                **labels, "chains": len(group),
                "similarity": group["similarity"].mean(), "facts": group["facts"].mean(),
                **with_ends("delta", delta.mean(), over.low, over.high),
                "better": (delta > 0).sum(), "worse": (delta < 0).sum(),
                "same_text": (group["said"] == group["said_control"]).sum(),
                "halved": len(half), "half_life": half.median(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows).sort_values("delta", kind="stable", ignore_index=True)


def attractors_of(chains: pd.DataFrame) -> pd.DataFrame:
    """Where chains are drawn to and how strongly: a text's length, and its similarity, regressed on
    those a hop before.

    With the slope a and the intercept b the position is b / (1 - a), where a step changes nothing,
    and the strength 1 - a: 0 where nothing draws, 1 where one hop is enough. Position and strength
    of an attractor are Perez et al.'s (2025, arXiv 2407.04503); that the line goes through
    successive hops, and not from first to last texts, is ours: it needs few first texts.

    Args:
        chains: A row a hop: :data:`CHAIN`, hop, words, similarity.

    Returns:
        A row a model, arm, temperature and ``of`` (``words`` or ``similarity``): position, strength
        with its interval from the slope's standard error, pairs. NaN where fewer than three pairs
        vary.
    """
    rows = []
    for labels, group in conditions(chains.sort_values("hop"), *ARM):
        for measure in ("words", "similarity"):
            before = group.groupby(CHAIN)[measure].shift(1)
            x, y = before.dropna().astype(float), group.loc[before.notna(), measure].astype(float)
            position = strength = far = np.nan
            if len(x) > 2 and x.nunique() > 1:
                line: Any = stats.linregress(x, y)
                far = stats.t.ppf(0.975, len(x) - 2) * line.stderr
                strength = 1 - line.slope
                position = line.intercept / strength if abs(strength) > 1e-9 else np.nan
            drawn = {
                "position": position,
                **with_ends("strength", strength, strength - far, strength + far),
            }
            rows.append({**labels, "of": measure, "pairs": len(x), **drawn})
    return pd.DataFrame(rows)
