"""Score a model on lm-evaluation-harness tasks along any path and policy, beside another path, document by document."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from kvinterp.common.files import is_folder
from kvinterp.common.numbers import counted, listed, number
from kvinterp.common.result import Result
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel, finding, findings_of, only
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import Charts, OfModel, Parts, Tables
from kvinterp.study.experiments.choices import taken_by
from kvinterp.study.experiments.options import option
from kvinterp.study.results import records


@dataclasses.dataclass(frozen=True)
class Eval(OfModel):
    """What does a policy on K and V cost in the scores that models are judged by?"""

    TABLES: ClassVar = ("results", "samples", "changed")
    DRAWN: ClassVar = ("eval_scores",)
    UNIT: ClassVar = "tasks"

    tasks: str = option(
        "gsm8k", "Tasks, groups or tags of lm-evaluation-harness, with commas; `lm-eval ls tasks` lists them."
    )
    policy: str | None = option(None, "A policy for K and V: --policy q8_0 is short for --path cached+q8_0.")
    path: str | None = option(None, "The path to score, such as cached+q8_0. Default: cached.")
    against: str = option("cached", "The path to compare with, on the same documents; none for no comparison.")
    through: int = option(
        1,
        "How many of the last context tokens to feed through the cache, where a task asks for likelihoods or for one token and "
        "an exact prefill alone would give the answer.",
        min=0,
    )
    include: str | None = option(
        None, "A folder with your own task files (YAML). They can run code, so --unsafe-code is needed."
    )
    limit: int | None = option(None, "The most documents of each task. Default: all.", min=1)
    fewshot: int | None = option(
        None, "How many worked examples precede each question. Default: the task's own number.", min=0
    )
    chat: str = option("none", "Wrap prompts in the tokenizer's chat template: 'template' or 'none'.")
    system: str | None = option(None, "A system message before each prompt.")
    seed: int = option(0, "Seed for the texts that tasks sample.")
    unsafe_code: bool = option(False, "Run the code in --include, and tasks that execute what the model writes.")
    batch_size: int = option(
        1, "The most requests in one batch. Batching is used only where it gives the same bits.", decides="nothing", min=1
    )

    def paths(self) -> list[str]:
        """The paths it is run on, the one that is compared with first."""
        from kvinterp.paths import path_named

        if self.policy is not None and self.path is not None:
            raise InputError(
                f"--policy {self.policy} and --path {self.path} were both given: write the policy into the path."
            )
        asked = self.path or ("cached" if self.policy is None else f"cached+{self.policy}")
        wanted = [asked] if self.against == "none" else [self.against, asked]
        return list(dict.fromkeys(str(path_named(text)) for text in wanted))

    def cells(self) -> list[Cell]:
        """A cell a task and path."""
        from kvinterp.study.experiments.circumstances import tried

        paths = self.paths()
        more = taken_by(self, measured, _harness().evaluated)
        for adapter in self.adapters():
            tried(adapter, paths)
        return [
            Cell(
                f"task-{place}-{turn}",
                f"{__name__}:measured",
                {**more, "model": self.named(), "task": name, "path": path},
                f"{name} on {path}",
            )
            for place, name in enumerate(self._names())
            for turn, path in enumerate(paths)
        ]

    def settings(self) -> dict[str, Any]:
        """With the harness's version, and what is in the folder of one's own tasks."""
        found = super().settings()
        found["made_with"] = {**found["made_with"], "lm_eval": importlib.metadata.version("lm_eval")}
        return {**found, "included": None if self.include is None else _digest(Path(self.include))}

    def reduce(self, made: Parts) -> Result:
        """The scores, each with its interval and beside the other path's."""
        from kvinterp.study.behaviour.evaluating import changed, compared

        tables, paths = joined(made), self.paths()
        results = compared(tables["results"], tables["samples"], paths[0] if len(paths) > 1 else "")
        abouts = [about for _, about in made.values()]
        counts = {path: Counter[str]() for path in paths}
        for about in abouts:
            counts[about["path"]].update(about["counts"])
        summary = {
            "results": records(results),
            "paths": paths,
            "through": self.through,
            "counts": {path: dict(total) for path, total in counts.items()},
            "versions": {name: version for about in abouts for name, version in about["versions"].items()},
            "lm_eval": importlib.metadata.version("lm_eval"),
            "provenance": abouts[0]["provenance"],
        }
        tables = {"results": results, "samples": tables["samples"], "changed": changed(tables["samples"], paths)}
        return Result(tables, summary)

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """The first score on both paths, and which requests never read the cache."""
        summary, results = result.summary, result.tables["results"]
        first, asked = summary["paths"][0], summary["paths"][-1]
        row = only(results, path=asked).iloc[0]
        lines = [f"{asked} scores {number(row['value'])} in {score_named(row)} ({counted(row['documents'], 'document')})."]
        other = only(results, path=first, task=row["task"], metric=row["metric"], filter=row["filter"])
        if first != asked and len(other):
            same = "every document's score is the same" if not row["changed"] else f"{int(row['changed'])} score otherwise"
            lines[0] = f"{lines[0][:-1]}, {first} {number(other['value'].iloc[0])}: {same}."
        counts = summary["counts"]
        if alone := counts[asked]["answered_by_prefill"]:
            of = counted(counts[asked]["requests"], "request")
            lines.append(
                f"{alone} of {of} never read the cache: no policy touched them (--through feeds their last tokens)."
            )
        if self.seed and not counts[asked].get("sampled"):
            lines.append(f"No request of these tasks samples: --seed {self.seed} changed nothing.")
        if cut := {path: held["truncated"] for path, held in counts.items() if held["truncated"]}:
            said = listed([f"{count} on {path}" for path, count in cut.items()])
            lines.append(f"Contexts were cut from the left to fit the model's: {said}.")
        return lines

    def findings(self, result: Result) -> pd.DataFrame:
        """Each score on each path, and the difference on the same documents."""
        rows, first = [], result.summary["paths"][0]
        for row in result.tables["results"].to_dict("records"):
            more: dict[str, Any] = {"n": row["documents"], "unit": "documents", "path": row["path"]}
            rows.append(finding(score_named(row), row["value"], (row["low"], row["high"]), **more))
            if row["path"] == first or pd.isna(row["difference"]):
                continue
            note = "every document's score is the same on both"
            if row["changed"]:
                note = f"{counted(int(row['changed']), 'document')} with another score"
            if row["changed"] and not pd.isna(row["p"]):
                note = f"{counted(int(row['better']), 'document')} only {row['path']} has right, {int(row['worse'])} only {first}"
            rows.append(finding(f"{score_named(row)}, less that on {first}", row["difference"],
                                (row["difference_low"], row["difference_high"]), null=0, note=note, p=row["p"],
                                test="" if pd.isna(row["p"]) else "McNemar's exact, not corrected,", **more))  # fmt: skip
        return findings_of(rows)

    def charts(self, result: Result) -> Charts:
        """Each score in its own unit, a line a path."""
        panels = []
        for _, mine in result.tables["results"].groupby(["task", "metric", "filter"], sort=False):
            row = mine.iloc[0]
            better = {True: ", higher is better", False: ", lower is better"}.get(row["higher_is_better"], "")
            label = f"{score_named(row)}{better}, {row['documents']} documents"
            panels.append(Panel(mine, "value", "path", "dots", scale="linear", label=label))
        return {"eval_scores": Chart("What each path scores, with 95% intervals over documents", panels[:24])}

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.tasks.split(",") if name.strip()))

    def check(self) -> None:
        """Tasks, paths and folder too."""
        from kvinterp.common.checks import check_choice, check_seed

        super().check()
        if not (names := self._names()):
            raise InputError("no task was given: name at least one, as in --tasks gsm8k,wikitext.")
        self.paths()
        check_choice("chat", self.chat, ("none", "template"))
        check_seed(self.seed)
        if self.include is not None and not is_folder(Path(self.include)):
            raise InputError(f"--include {self.include} is no folder: give one that holds task files (YAML).")
        _harness().manager_of(names, self.include, self.unsafe_code)


def score_named(row: Mapping[str, Any]) -> str:
    """A score's name: task, metric, and the filter where there is one."""
    kept = "" if row["filter"] == "none" else f" ({row['filter']})"
    return f"{row['task']}, {row['metric']}{kept}"


def _harness() -> Any:
    """What runs tasks.

    Raises:
        InputError: The extra is not installed.
    """
    try:
        from kvinterp.study.behaviour import evaluating
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise InputError("lm-evaluation-harness is not installed: pip install 'kvinterp[eval]'.") from error
    return evaluating


def measured(
    model: Mapping[str, Any],
    task: str,
    path: str,
    through: int,
    seed: int,
    batch_size: int,
    progress: str = "none",
    **settings: Any,
) -> tuple[Tables, dict[str, Any]]:
    """One task on one path."""
    from kvinterp.models.provenance import provenance
    from kvinterp.study.behaviour.harness import PathLM

    adapter = loaded(model)
    lm = PathLM(adapter, path, through, batch_size, seed, progress)
    tables, about = _harness().evaluated(lm, task, **settings)
    return {name: table.assign(path=path) for name, table in tables.items()}, {
        **about,
        "path": path,
        "provenance": provenance(adapter, path=path, through=through),
    }


def _digest(folder: Path) -> str:
    """Of what is in a folder of tasks: another question is not gone on with."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(place for place in folder.rglob("*") if place.is_file() and "__pycache__" not in place.parts):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
