"""Say whether cached decoding is right: PASS, FAIL or CANNOT TELL, with one word that says why.

Words that pass: equal, rounding, kernel. Words that fail: bug, unexplained, hidden-cast,
wrong-dtype, overflow. Words that fail with --against alone: misaligned, processed, policy. --json
prints the verdict for programs.

Exit codes: 0 it passes, or --allow names its word; 1 it fails; 2 bad input, or the model cannot
run; 3 cannot tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvinterp.auditing.arguments import CHECKS, RUNGS
from kvinterp.auditing.audit import against_named, audit
from kvinterp.auditing.building import is_code, random_model, users_model
from kvinterp.auditing.folder import check_own, put
from kvinterp.auditing.page import files_of, ladder_chart
from kvinterp.auditing.programs.names import programs_named
from kvinterp.auditing.verdict import VERDICTS
from kvinterp.commands.cells import loaded
from kvinterp.commands.kit import (
    Adapter,
    Cell,
    CellResult,
    CellResults,
    Experiment,
    InputError,
    Result,
    argument,
    check_known,
    load_prompts,
    option,
    shared,
)
from kvinterp.commands.running import folder_named
from kvinterp.common.checks import check_choice
from kvinterp.common.files import is_file
from kvinterp.common.progress import Tell
from kvinterp.common.spec import check_name, plugins_read, split
from kvinterp.common.wings import taken
from kvinterp.errors import shown
from kvinterp.models import dtype_named, load_model
from kvinterp.models.cache_kinds import cache_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _calls(text: str) -> None:
    package = "kvinterp.auditing.programs"
    operations = {"rows", *plugins_read(f"{package}.program:Operation", f"{package}.operations")}
    for call in split("" if text == "all" else text, ","):
        is_program = call.replace(" ", "").startswith("rows(")
        known = (
            operations if is_program else plugins_read(f"{package}.names:Name", f"{package}.names")
        )
        for part in split(call, "+"):
            check_name(
                "operation" if is_program else "program",
                part,
                known,
                "Values go in brackets, as in padded(left,5).",
            )


def _format(text: str) -> None:
    check_known("format", text, [row["name"] for row in taken("lists", "formats", "--format")()])


def check_file(name: str) -> None:
    """Raises InputError where no file of another engine's log-probs is there."""
    if not is_file(Path(name)):
        raise InputError(
            f"--against {shown(name)} does not exist or is no file: give a file of another engine's log-probs."
        )


_JUDGES = (
    lambda asked: asked.against is not None,
    "no file was given; give one with --against, or leave it out",
)


class Audit(
    Experiment,
    of="kvinterp.auditing.audit:audit",
    without=(
        "rungs",
        "sweep",
        "reach",
        "full",
        "step",
        "requests",
        "inputs",
        "lossy",
        "out",
        "detail",
        "declared",
    ),
):
    """Is a model's cached decoding right, and if not, what is wrong and where?"""

    OVERWRITES = "always"

    model: str | None = argument(
        None,
        "zoo:NAME, a transformers checkpoint folder or a hub id; a config.json with --random-init; or your own code, "
        "package.module:Class, or package.module:function, which is called without arguments and returns a model.",
    )
    own_class: str | None = option(
        None,
        "package.module:Class, your own class for MODEL's weights (with --random-init: for its config).",
        flag="--class",
    )
    config: Path | None = option(
        None,
        "The config.json for package.module:Class. Default: the default values of its config class.",
    )
    random_init: bool = shared("random_init")
    prompts: str | None = option(
        None,
        "A text, a .txt or .jsonl file, arithmetic:N, ... Default: two prompts of random tokens.",
    )
    kind: str = shared("kind")
    dtype: str | None = option(
        None,
        "float16, bfloat16, float32 or float64. Default: float16; for package.module:Class its own.",
    )
    rungs: str = option(",".join(RUNGS), "Precisions to run in, besides --dtype.")
    lengths: Any = option(example="5,63,64")
    checks: Any = option()
    thorough: bool = option(False, "The same as --checks thorough.")
    reach: bool = option(
        False,
        "Also decode past every limit in the config, however far: sliding window, RoPE switch, end of the context.",
    )
    calls: Any = option(early=_calls)
    cache: Any = option(
        only=(
            lambda asked: asked.against is None,
            "a file of --against brings no cache; leave it out",
        ),
    )
    lossy: bool = option(
        False,
        "Your own --cache is meant to lose something, as a quantised one does.",
        only=(
            lambda asked: asked.cache is not None,
            "no cache was given; give one with --cache, or leave it out",
        ),
    )
    seed: Any = option(
        only=(
            lambda asked: asked.prompts is None or asked.random_init or asked.is_own_code(),
            "prompts and weights are given; leave it out",
        ),
    )
    device: str | None = shared("device")
    attention: str | None = shared("attention")
    remote_code: bool = shared("remote_code")
    allow: Any = option()
    against: Any = option(early=check_file)
    format: Any = option(only=_JUDGES, early=_format)
    older: Any = option(only=_JUDGES)

    def is_own_code(self) -> bool:
        """Whether the model is the user's own code."""
        return self.own_class is not None or (self.model is not None and is_code(self.model))

    def check(self) -> None:
        """Precisions and words too."""
        super().check()
        if self.against is not None:
            self._check_against()
        check_known("checks", self.checks, CHECKS)
        for word in self.allow:
            check_known("verdict to allow", word, VERDICTS)
        for rung in self.rungs.split(","):
            dtype_named(rung.strip())
        if self.thorough and self.checks not in ("default", "thorough"):
            raise InputError(
                f"--thorough was given with --checks {self.checks!r}: leave one of the two out."
            )
        asked = {
            "reach": self.reach,
            "calls": programs_named(self.calls),
            "cache": self.cache and cache_named(self.cache),
        }
        for name, value in asked.items():
            if value and self.checks == "none":
                raise InputError(
                    f"--{name} was given with --checks none: leave one of the two out."
                )

    def _check_against(self) -> None:
        """Refuses what is read of the audit of a cache alone, and a file that is not there."""
        check_file(str(self.against))
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        for name in (
            "prompts",
            "rungs",
            "lengths",
            "steps",
            "checks",
            "thorough",
            "reach",
            "calls",
            "programs",
            "seconds",
        ):
            if getattr(self, name) != fields[name]:
                raise InputError(
                    f"--{name} was given with --against, which feeds the tokens of its file and runs no checks: leave it out."
                )

    def cells(self) -> list[Cell]:
        """One cell: a rung is judged beside the others."""
        return [Cell("audit", self.audited)]

    def audited(self, tell: Tell) -> CellResult:
        """The audit of a model, or the verdict on another engine's log-probs: its tables, and page
        and verdict as texts.
        """
        prompts = None if self.prompts is None else load_prompts(self.prompts)
        result: Any
        # What a user's code prints is no part of what this command says.
        with contextlib.redirect_stdout(sys.stderr):
            if self.against is None:
                settings = {
                    **self.arguments(),
                    "rungs": [part.strip() for part in self.rungs.split(",")],
                    "checks": "thorough" if self.thorough else self.checks,
                    "reach": "yes" if self.reach else "no",
                    "lossy": "yes" if self.lossy else "no",
                    "detail": "everything",
                    "progress": tell,
                }
                result = audit(self.adapter(), prompts, **settings)
            else:
                # --dtype is what the engine was said to run in. Weights that were rounded to it
                # would show no other precision.
                adapter = loaded({**self.model_settings(), "dtype": "float32"})
                older = None
                if self.older is not None:
                    trust = "trust" if self.remote_code else "refuse"
                    older = load_model(
                        self.older, self.kind, "float32", self.device, self.attention, trust
                    )
                how = (self.dtype, self.format, self.allow, self.seed, tell, older)
                result = against_named()(adapter, self.against, *how)
        texts, tables = files_of(result)
        return tables, {"texts": texts}

    def reduce(self, results: CellResults) -> Result:
        """What the audit says."""
        tables, about = results["audit"]
        verdict = json.loads(about["texts"]["verdict.json"])
        return Result(tables, verdict, about["texts"])

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """How the model is built: of a checkpoint, a config, or the user's code."""
        names = (
            "model",
            "own_class",
            "random_init",
            "kind",
            "dtype",
            "seed",
            "device",
            "attention",
            "remote_code",
        )
        return {
            "loader": f"{__name__}:subject",
            **self.choices(*names),
            "config": self.config and str(self.config),
        }

    def run(
        self, out: str | Path | None, existing: str = "error", *how: Any, **more: Any
    ) -> Result:
        """Audits, and writes page, tables and verdict over an earlier audit's."""
        if existing == "use":
            raise InputError(
                "existing='use' was given, and an audit is made anew each time: leave it out."
            )
        folder = None if out is None else Path(out)
        if folder is not None:
            check_own(folder)
        result: Result = super().run(None, "error", *how, **more)
        if folder is not None:
            put(result.others, folder, result.tables)
        result.folder = folder
        return result

    def save(
        self, result: Any, folder: Any, existing: str = "overwrite", figures: str = "none"
    ) -> Path:
        """Writes page, tables and verdict over an earlier audit's."""
        check_choice("existing", existing, ("overwrite",))
        texts, tables = (result.others, result.tables) if result.others else files_of(result)
        put(texts, folder := folder_named(folder), tables)
        return folder

    def figures(self, result: Result) -> dict[str, Figure]:
        """The ladder of precisions."""
        from kvinterp.report.charts import draw_chart

        chart = ladder_chart(result.contents()[1]["evidence"])
        return {} if chart is None else {"precision_ladder": draw_chart(chart, [])}

    def print_result(self, result: Result, echo: Callable[..., None]) -> None:
        """The verdict, and where it is."""
        echo(f"{result.summary['reading']}\n")
        assert result.folder is not None, "the command writes a folder"
        for what, name in {"page": "report.html", "verdict": "verdict.json"}.items():
            echo(f"{what:<8} {result.folder / name}")
        if not (
            result.summary["exit_code"] or self.against or self.random_init or self.is_own_code()
        ):
            echo(
                f"next     kvinterp compare {self.model}: what rounding does to its answers, token by token"
            )


def subject(
    model: str | None,
    random_init: bool,
    kind: str,
    dtype: str | None,
    seed: int,
    device: str | None,
    attention: str | None,
    remote_code: bool,
    own_class: str | None = None,
    config: str | None = None,
) -> Adapter:
    """The model that is asked about: of a checkpoint, of a config alone, or of the user's own code.

    Raises:
        InputError: The options do not fit each other.
    """
    trust = "trust" if remote_code else "refuse"
    torch_dtype = None if dtype is None else dtype_named(dtype)
    code = model if own_class is None and model is not None and is_code(model) else own_class
    if code is None:
        if model is None:
            raise InputError(
                "no model was given: expected zoo:NAME, a checkpoint folder, a hub id, a config.json with --random-init, or "
                "package.module:Class."
            )
        if config is not None:
            raise InputError(
                f"--config {str(config)!r} was given for {model!r}, which has its own: it is for package.module:Class. "
                "For a config alone give it in the place of the model, with --random-init."
            )
        if not random_init:
            return load_model(
                model,
                kind=kind,
                dtype=dtype or "float16",
                device=device,
                attention=attention,
                remote_code=trust,
            )
        if kind != "native":
            raise InputError(
                f"--kind {kind!r} was given with --random-init: expected native, leave one of the two out."
            )
        return random_model(model, torch_dtype or torch.float16, seed, device, attention, trust)
    if kind != "native" or attention is not None:
        raise InputError(
            f"{code!r} is your own code, which says itself what it is: leave --kind and --attention out."
        )
    source: str | Path | None = config if code is model else model
    if own_class is not None and config is not None:
        if model is not None:
            raise InputError(
                f"--config {str(config)!r} and {model!r} were both given for {code!r}: leave one of the two out."
            )
        source = config
    loaded = (
        code is not model and model is not None and not random_init and not model.endswith(".json")
    )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    weights = "loaded" if loaded else "random"
    return users_model(
        code,
        source,
        weights=weights,
        dtype=torch_dtype,
        seed=seed,
        device=device,
        remote_code=trust,
    )
