"""Tasks of lm-evaluation-harness: found, loaded, run on a path, and compared document by document.

Imported only where it is used, since ``lm_eval`` is an extra.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from scipy import stats

from kvinterp import metrics
from kvinterp.errors import InputError, KvinterpError
from kvinterp.study.behaviour.harness import PathLM

FEWSHOT_SEED = 1234
"""Seeds the choice of worked examples, as in the harness."""


@functools.lru_cache(maxsize=4)
def _manager(include: str | None, defaults: bool) -> TaskManager:
    return TaskManager(include_path=include, include_defaults=defaults)


def manager_of(names: Sequence[str], include: str | None, unsafe_code: bool) -> TaskManager:
    """What knows these tasks: a folder of one's own where it has them all, and else the harness's thousands too.

    Raises:
        InputError: One is not known; or the folder's code may not run.
    """
    if include is not None and not unsafe_code:
        raise InputError(
            f"--include {include} was given, and task files run code of their own (YAML functions, templates): read them, and "
            "pass --unsafe-code if you trust them."
        )
    if include is not None:
        own = _manager(include, False)
        if set(names) <= set(own.all_tasks):
            return own
    every = _manager(include, True)
    for name in names:
        if name not in every.task_index:
            near = difflib.get_close_matches(name, every.all_tasks, n=3, cutoff=0.5)
            guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise InputError(
                f"unknown task {name!r}: {guess}lm-evaluation-harness has {len(every.all_tasks):,} tasks, groups and tags, "
                "which `lm-eval ls tasks` lists; --include names a folder of your own."
            )
    return every


def evaluated(
    lm: PathLM,
    name: str,
    *,
    include: str | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    chat: str = "none",
    system: str | None = None,
    unsafe_code: bool = False,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Runs a task, or a group of them.

    Args:
        lm: The model on its path.
        name: The task, group or tag.
        include: A folder of one's own tasks.
        limit: Most documents of a task.
        fewshot: How many worked examples; the task's own number unless given, and where that is 0.
        chat: ``"template"``: prompts are messages, in the tokenizer's chat template; ``"none"``.
        system: The system message.
        unsafe_code: Whether code may run that a folder of one's own brings, and what the model writes.

    Returns:
        Two tables and what else is known: ``results`` (task, metric, filter, higher_is_better, value, documents, fewshot,
        of ``"task"`` or ``"group"``), ``samples`` (task, doc, metric, filter, value, weight, answer); and the versions of
        harness and tasks, and the counts of :class:`PathLM`.

    Raises:
        InputError: The task cannot be loaded, or this model cannot run it.
    """
    manager = manager_of([name], include, unsafe_code)
    with _randomness_kept():
        found = _loaded(manager, name, fewshot)
        try:
            with _quiet():
                results: Any = evaluate(
                    lm, found, limit=limit, bootstrap_iters=0, system_instruction=system,
                    apply_chat_template=chat == "template", fewshot_as_multiturn=chat == "template",
                    confirm_run_unsafe_code=unsafe_code,
                )  # fmt: skip
        except KvinterpError:
            raise
        except (ValueError, ImportError, NotImplementedError) as error:
            hint = "; --unsafe-code runs it" if "unsafe" in str(error) and not unsafe_code else ""
            raise InputError(f"task {name!r} cannot be run on this model: {error}{hint}.") from error
    about = {"versions": results["versions"], "counts": dict(lm.counts)}
    return {"results": _results_of(results), "samples": _samples_of(results)}, about


def _loaded(manager: TaskManager, name: str, fewshot: int | None) -> Any:
    """Its tasks, with their data."""
    try:
        with _quiet():
            found: Any = manager.load([name])
    except ImportError as error:
        raise InputError(f"task {name!r} needs a package that is not installed ({error}): install it.") from error
    except OSError as error:
        raise InputError(
            f"the data of task {name!r} are neither on this machine nor to be had from where the task says ({error}): load them "
            "once where there is internet, or give a task over a file of yours with --include."
        ) from error
    except Exception as error:  # What a task's own code raises is anything.
        raise InputError(f"task {name!r} cannot be loaded ({type(error).__name__}: {error}): take another.") from error
    for task in found["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (fewshot is not None and own != 0):
            task.set_config("num_fewshot", fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the harness prints and warns of (a task's defaults) off standard output: it is no result."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    """Seeds what tasks draw from, and puts it back."""
    state, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(0)
        np.random.seed(FEWSHOT_SEED)
        torch.manual_seed(FEWSHOT_SEED)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)


def _results_of(results: Mapping[str, Any]) -> pd.DataFrame:
    rows = []
    groups = results.get("groups") or {}
    for task, values in {**results["results"], **groups}.items():
        for key, value in values.items():
            metric, comma, name = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                rows.append(
                    {
                        "task": task,
                        "of": "group" if task in groups else "task",
                        "metric": metric,
                        "filter": name,
                        "higher_is_better": (results["higher_is_better"].get(task) or {}).get(metric),
                        "value": float(value),
                        "documents": int(values.get("sample_len") or values.get("sample_count") or 0),
                        "fewshot": results["n-shot"].get(task),
                    }
                )
    return pd.DataFrame(rows)


def _samples_of(results: Mapping[str, Any]) -> pd.DataFrame:
    rows = []
    for task, samples in results["samples"].items():
        for sample in samples:
            answer = json.dumps(sample["resps"], default=str)
            for metric in sample["metrics"]:
                value, weight = _number_of(sample[metric])
                named = {"task": task, "doc": int(sample["doc_id"]), "metric": metric, "filter": sample["filter"]}
                rows.append({**named, "value": value, "weight": weight, "answer": answer})
    columns = ["task", "doc", "metric", "filter", "value", "weight", "answer"]
    return pd.DataFrame(rows, columns=columns)


def _number_of(value: Any) -> tuple[float, float]:
    """A document's score: a number, or one with a weight (a log-likelihood and how many words it is of)."""
    if isinstance(value, bool | int | float | np.number):
        return float(value), 1.0
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int | float) for one in value):
        return float(value[0]), float(value[1])
    return math.nan, math.nan


# How documents become a score -----------------------------------------------------------------------------------------

_AGGREGATIONS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mean": lambda values, weights: float(values.mean()),
    "perplexity": lambda values, weights: float(np.exp(-values.mean())),
    "weighted perplexity": lambda values, weights: float(np.exp(-values.sum() / weights.sum())),
    "bits": lambda values, weights: float(-values.sum() / weights.sum() / np.log(2)),
}
"""Those whose interval is known from the documents; of any other metric the score stands alone."""


def compared(results: pd.DataFrame, samples: pd.DataFrame, against: str) -> pd.DataFrame:
    """The results with their intervals, and beside those of the path they are compared with.

    Args:
        results: As :func:`evaluated` gives them, of several paths, with a column ``path``.
        samples: The same.
        against: The path that others are compared with; any other text for none.

    Returns:
        ``results`` with ``low`` and ``high``: the 95% interval (Clopper and Pearson's where documents are right or wrong,
        else by bootstrap over documents); ``difference`` from the other path with ``difference_low`` and ``difference_high``
        (bootstrap over documents, both paths on the same ones; none where no document changed, which says nothing of others),
        ``changed``: on how many documents the two differ; and, where documents are
        right or wrong, ``better`` and ``worse``: on how many it alone is right or wrong, and ``p``: McNemar's, exact.
    """
    keys = ["task", "metric", "filter"]
    by = {place: table.sort_values("doc", ignore_index=True) for place, table in samples.groupby([*keys, "path"])}
    rows = []
    for row in results.to_dict("records"):
        place = tuple(row[key] for key in keys)
        own, other = by.get((*place, row["path"])), by.get((*place, against))
        beside = None if row["path"] == against else other
        rows.append({**row, **_NOTHING, **({} if own is None else _beside(float(row["value"]), own, beside))})
    return pd.DataFrame(rows)


def changed(samples: pd.DataFrame, paths: Sequence[str]) -> pd.DataFrame:
    """The documents that have another score on the last path than on the first, with what was answered on each."""
    keys = ["task", "doc", "metric", "filter"]
    if len(paths) < 2:
        return samples.head(0)[keys]
    one, other = (samples[samples["path"] == path].drop(columns=["path", "weight"]) for path in (paths[0], paths[-1]))
    beside = one.merge(other, on=keys, suffixes=(f", {paths[0]}", f", {paths[-1]}"))
    return beside[beside[f"value, {paths[0]}"] != beside[f"value, {paths[-1]}"]].reset_index(drop=True)


_NOTHING = dict.fromkeys(
    ("low", "high", "difference", "difference_low", "difference_high", "changed", "better", "worse", "p"), math.nan
)


def _beside(score: float, own: pd.DataFrame, other: pd.DataFrame | None) -> dict[str, float]:
    values, weights = own["value"].to_numpy(), own["weight"].to_numpy()
    how = next((f for f in _AGGREGATIONS.values() if math.isclose(f(values, weights), score, rel_tol=1e-9)), None)
    if how is None:
        return {}
    binary = bool(np.isin(values, (0.0, 1.0)).all()) and bool((weights == 1).all())
    documents = np.arange(len(values))

    def value(of: np.ndarray) -> float:
        return how(values[of.astype(int)], weights[of.astype(int)])

    found: Any = metrics.share_of(values) if binary else metrics.clustered_interval(value, documents, documents)
    made = {"low": float(found.low), "high": float(found.high)}
    if other is None or other["doc"].tolist() != own["doc"].tolist():
        return made
    theirs, others = other["value"].to_numpy(), other["weight"].to_numpy()

    def difference(of: np.ndarray) -> float:
        at = of.astype(int)
        return how(values[at], weights[at]) - how(theirs[at], others[at])

    changed = int((values != theirs).sum())
    made |= {"difference": difference(documents), "changed": float(changed)}
    if changed:
        made["difference_low"], made["difference_high"] = metrics.clustered_interval(difference, documents, documents)
    if binary:
        better, worse = int((values > theirs).sum()), int((values < theirs).sum())
        p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
        made |= {"better": float(better), "worse": float(worse), "p": p}
    return made
