"""The command line: a command for every experiment, its options the experiment's own fields.

Experiments are imported when their command is called, and heavy things within them, so that ``kvinterp --help`` answers at
once. Every error kvinterp raises on purpose becomes one sentence on stderr and exit code 2; an interrupted run ends with 130,
its finished part on disk. With ``--json`` a command prints one JSON object on standard output, also for an error, and
everything else on standard error.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import logging
import os
import re
import signal
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvinterp._version import __version__
from kvinterp.cli.command import delivered, keyword, leave, refused, told, wrong_use
from kvinterp.cli.listing import LISTED
from kvinterp.common.console import echo, lines_of, names_in, rows_of
from kvinterp.common.progress import shown
from kvinterp.common.spec import check_length
from kvinterp.errors import InputError, check_docstrings, check_epoch
from kvinterp.models.finding import check_reached
from kvinterp.study.experiments.base import NOTHING, OPTION, Experiment
from kvinterp.study.experiments.choices import check_words
from kvinterp.study.experiments.registry import command_of, experiment_named, experiments, question_of

# Experiments as commands -----------------------------------------------------------------------------------------------


_NARROWEST = 20
"""Columns of a terminal that a help text needs."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Two paths side by side": ("compare", "patch", "decompose"),
    "Is it correct?": ("audit", "kernels"),
    "Many prompts": ("study",),
    "Results and names": ("show", "report", "list", "export"),
    "What errors in the cache do": (
        "kv-error", "equivalent-noise", "susceptibility", "flip-law", "mitigate", "chain",
    ),
    "The FP16 paper": (
        "behaviour", "boundary", "layer-drift", "localisation", "root-cause", "accumulation", "propagation", "kv-write", "ladder",
        "gqa",
    ),
}  # fmt: skip
"""Commands and studies as help shows them; others come last."""
_MATTER = (
    "out", "prompts", "a", "b", "site", "sweep", "policy", "policies", "preset", "against", "dtype",
    "max_new_tokens", "kind",
)  # fmt: skip
"""The options that help shows, the first five of them that a command has."""
_SHOWN_OPTIONS = 5
_PANELS: dict[str, tuple[str, ...]] = {
    "How": ("kind", "dtype", "device", "attention", "random_init", "remote_code", "batch_size", "seed", "engine"),
    "Where to": ("out", "overwrite", "as_json"),
}
"""The groups in which --help-all shows the options; what is in none of them is what is asked."""
_PLACE = re.compile(r"[\w.-]+/[\w.-]+|(zoo|real):.*|[./~].*")
"""What says by itself that it is a model's place: a hub id, a name of kvinterp's own, a folder."""


class _Verb(TyperCommand):
    """An experiment's command: its file is imported when more is asked of it than its help."""

    def __init__(self, name: str, panel: str) -> None:
        super().__init__(name, help=question_of(name), rich_help_panel=panel)
        self.every_option = False

    @functools.cached_property
    def _whole(self) -> Any:
        apart = typer.Typer(add_completion=False)
        apart.command(self.name)(_command_of(experiment_named(str(self.name))))
        return typer.main.get_command(apart)

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **extra: Any) -> Any:
        models = itertools.takewhile(lambda each: not each.startswith("-"), args)
        parts = [part for each in args for part in (each.split("=", 1) if each.startswith("--") else [each])]
        options = {flag[2:].replace("-", "_"): value for flag, value in itertools.pairwise(parts) if flag.startswith("--")}
        # What an experiment's file imports takes longer than a hub that is not there.
        with refused(args):
            check_words(options)
            for name in filter(_PLACE.fullmatch, models):
                check_reached(name)
        return super().make_context(info_name, args, *given, **extra)

    def get_params(self, ctx: Any) -> list[Any]:
        self.params, self.callback = self._whole.params, self._whole.callback
        return super().get_params(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option" and not each.hidden]
        own = [each for each in options if each.name not in ("help", "help_all")]
        first = sorted(own, key=lambda each: _MATTER.index(each.name) if each.name in _MATTER else len(_MATTER))
        hidden = [] if self.every_option else first[_SHOWN_OPTIONS:]
        places = {each.name: place for place, each in enumerate(first)}
        self.params.sort(key=lambda each: places.get(each.name, -1 if each.param_type_name == "argument" else len(places)))
        if self.every_option:
            for each in own:
                each.rich_help_panel = next((panel for panel, names in _PANELS.items() if each.name in names), "What")
        names = ", ".join(each.opts[0] for each in hidden)
        self.epilog = f"--help-all shows {len(hidden)} more options: {names}." if hidden else ""
        for each in hidden:
            each.hidden = True
        super().format_help(ctx, formatter)


class _Experiments(TyperGroup):
    """Commands, some of them experiments."""

    COMMAND: typing.ClassVar[tuple[str, ...]] = ()
    """What stands on the command line before the name of one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        panels = {name: panel for panel, names in GROUPS.items() for name in names}
        own = [name for name in experiments() if command_of(name) == (*self.COMMAND, name)]
        commands = {**{name: _Verb(name, panels.get(name, "Others")) for name in own}, **self.commands}
        order = [*(name for name in panels if name in commands), *(name for name in commands if name not in panels)]
        self.commands = {name: commands[name] for name in order}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


class _Studies(_Experiments):
    COMMAND = ("study",)


class _Verbs(_Experiments):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and args[0] in experiments():
            ctx.fail(f"{args[0]} is a study: give 'kvinterp {' '.join(command_of(args[0]))}'")
        return super().resolve_command(ctx, args)

    def main(self, *given: Any, **named: Any) -> Any:
        # In so few columns nothing is shown at all.
        if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns[:9]) < _NARROWEST:
            os.environ["COLUMNS"] = str(_NARROWEST)
        with delivered():
            return super().main(*given, **named)

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **extra: Any) -> Any:
        self._given = tuple(args)
        with wrong_use(self._given), refused(args):
            check_docstrings()
            check_epoch()
            return super().make_context(info_name, args, *given, **extra)

    def invoke(self, ctx: Any) -> Any:
        with wrong_use(self._given):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does decoding from a KV cache compute the same thing as recomputing the prefix?",
)


def main() -> None:
    """The entry point ``kvinterp``."""
    # While the command line is read there is nothing to leave behind; a command says for itself what it leaves.
    signal.signal(signal.SIGINT, leave)
    try:
        app()
    except Exception:
        # Of an error of kvinterp's own there is a traceback to report, and never the exit code of a verdict.
        traceback.print_exc()
    # The command line leaves by sys.exit: a 0 that nobody gave is no verdict.
    raise SystemExit(2)


studies = typer.Typer(
    cls=_Studies,
    help="Ask many prompts a question of the literature: each study by its name, as in kvinterp study behaviour MODEL.",
)
app.add_typer(studies, name="study", rich_help_panel="Many prompts")


@studies.callback(invoke_without_command=True)
def _studies(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        _help(ctx)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        echo(f"kvinterp {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        _help(ctx)


def _help(ctx: Any) -> None:
    """Prints the help of a command; rich prints it by itself."""
    text = ctx.get_help()
    if text.strip():
        echo(text)


def _help_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.command.every_option = True  # type: ignore[attr-defined]
        _help(ctx)
        raise typer.Exit


def _command_of(experiment: type[Experiment]) -> Callable[..., None]:
    """The function that typer makes the command of."""
    fields = [field for field in dataclasses.fields(experiment) if OPTION in field.metadata]
    examples = {field.name: field.metadata[OPTION]["example"] for field in fields if "example" in field.metadata[OPTION]}

    def command(
        out: Path | None, overwrite: bool, help_all: bool = False, engine: str = "local", **given: Any
    ) -> Mapping[str, Any]:
        for name, example in examples.items():
            given[name] = _numbers(f"--{name.replace('_', '-')}", given[name], example)
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        _speak()
        asked = experiment(**given | lists)
        out = asked.place() if out is None and experiment.OUT == "" else out
        with shown() as tell:
            outcome = asked.run(out, "overwrite" if overwrite else "error", tell=tell, engine=engine)
        (outcome.experiment or asked).say(outcome, echo)
        return {"verb": asked.verb(), **outcome.told()}

    hints = typing.get_type_hints(experiment)
    parameters = [_parameter(field, hints[field.name]) for field in fields]
    parameters += [_out(experiment.OUT), _overwrite(experiment.OVERWRITES), _EVERY]
    parameters += [_ENGINE] if command_of(experiment.verb()) != (experiment.verb(),) else []
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__doc__ = question_of(experiment.verb())
    return told(experiment.INTERRUPTED)(command)


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    shown = {
        name: value for name, value in field.metadata[OPTION].items() if name not in ("decides", "example", "only", "times")
    }
    flag, default = shown.pop("flag", f"--{field.name.replace('_', '-')}"), typing.cast(Any, field.default)
    if "example" in field.metadata[OPTION]:
        hint, default = str | None, default and ",".join(map(str, default))
    elif typing.get_origin(hint) is tuple:
        hint, default = list[str], list(default)
    if shown.pop("positional", "no") == "yes":
        info = typer.Argument(**shown)
        default = inspect.Parameter.empty if default is not None else None
    else:
        info = typer.Option(flag, **shown)
    return keyword(field.name, hint, default, info)


def _folder_named(text: str | Path) -> Path:
    """A folder's name; an empty one, as of a variable that is not set, would be the current folder."""
    if not str(text).strip():
        raise InputError("'' was given: expected the name of a folder; for the current one give .")
    return Path(text)


def _out(default: str | None) -> inspect.Parameter:
    said = "Folder for the tables, figures and report." + " Default: out/VERB-MODEL." * (default == "")
    info = typer.Option("--out", parser=_folder_named, metavar="PATH", help=said)
    return keyword("out", Path if default else Path | None, Path(default) if default else None, info)


def _overwrite(when: str) -> inspect.Parameter:
    needless = when == "always"
    said = "Not needed: it writes its own folder again." if needless else "Replace a result that is already in the folder."
    return keyword("overwrite", bool, False, typer.Option("--overwrite", help=said, hidden=needless))


_EVERY = keyword(
    "help_all",
    bool,
    False,
    typer.Option("--help-all", is_eager=True, expose_value=False, callback=_help_all, help="Show every option."),
)


_ENGINE = keyword("engine", str, "local", typer.Option("--engine", help="Where to run: local, ray or ray(WORKERS)."))
"""An option of every study."""


def _numbers(option: str, text: str | None, example: str) -> tuple[int, ...] | None:
    """Whole numbers with commas between them; None where nothing was given.

    Raises:
        InputError: Something else was given.
    """
    if text is None:
        return None
    check_length(option, text)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} cannot be read: expected whole numbers with commas, as in {example}."
        ) from error


# What runs, and what is logged -----------------------------------------------------------------------------------------


def _speak() -> None:
    """Shows kvinterp's own log lines on what is standard error when they are said: a bar of progress makes room for them."""
    log, spoken = logging.getLogger("kvinterp"), logging.Handler()
    spoken.set_name("kvinterp.cli")
    spoken.emit = lambda record: echo(spoken.format(record), err=True)  # type: ignore[method-assign]
    log.handlers = [*(each for each in log.handlers if each.get_name() != spoken.get_name()), spoken]
    log.setLevel(logging.INFO)


# report and list -------------------------------------------------------------------------------------------------------


_SHOWN = "the page is not finished; run the same command again"
"""What an interruption leaves behind."""
Folder = Annotated[Path, typer.Argument(parser=_folder_named, metavar="FOLDER", help="A folder that a command wrote.")]


@app.command("show", rich_help_panel="Results and names")
@told(_SHOWN)
def _show(
    folder: Folder,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="First make the page and figures again, from the tables; no model is loaded.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print where the page is; do not open it.")] = False,
) -> Mapping[str, Any]:
    """Open a result's page in the browser; any command may have written it."""
    from kvinterp.cli.showing import opened, page_of, rewritten

    _speak()
    said: list[str] = []
    if rewrite:
        with shown() as tell:
            tell("writing page and figures")
            said = rewritten(folder)
    page = page_of(folder)
    for line in (*said, *[""] * bool(said)):
        echo(line)
    seen = not no_open and opened(page)
    echo(page)
    if not (no_open or seen):
        echo("no browser could be started: open the page yourself.", err=True)
    found = {"verb": "show", "folder": str(folder), "exit_code": 0, "page": str(page), "opened": seen}
    return {**found, "reading": said} if rewrite else found


@app.command("report", rich_help_panel="Results and names")
@told(_SHOWN)
def _report(folder: Folder) -> Mapping[str, Any]:
    """Make a result's page again: the same as show --rewrite --no-open."""
    return _show.__wrapped__(folder, rewrite=True, no_open=True)  # type: ignore[attr-defined,no-any-return]


@app.command("export", rich_help_panel="Results and names")
@told("nothing was written; run the same command again")
def _export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Llama: zoo:NAME, a checkpoint folder or a hub id.")],
    out: Annotated[Path, typer.Option("--out", parser=_folder_named, metavar="FILE", help="The file to write, NAME.gguf.")],
    format: Annotated[str, typer.Option("--format", help="The file's format: gguf.")] = "gguf",
    dtype: Annotated[
        str, typer.Option("--dtype", help="The weights' dtype in the file: float32, float16 or bfloat16.")
    ] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
) -> Mapping[str, Any]:
    """Write a Llama as a GGUF file, so that llama.cpp can run it (docs/engines.md)."""
    from kvinterp.models import load_model
    from kvinterp.models.gguf_writing import check_export, export

    _speak()
    existing = "overwrite" if overwrite else "error"
    check_export(out, format, dtype, existing)
    export(load_model(model, kind="native", dtype="float32", device="cpu"), out, format, dtype, existing)
    echo(out)
    return {"verb": "export", "file": str(out), "bytes": out.stat().st_size, "exit_code": 0}


_WIDEST = 5
"""Columns of a table that can be read on a terminal of 80."""
What = enum.Enum("What", {name: name for name in LISTED}, type=str)  # type: ignore[misc]


@app.command("list", rich_help_panel="Results and names")
@told(NOTHING)
def _list(
    what: Annotated[
        What | None,
        typer.Argument(help="What to describe at length. Default: the names of everything.", show_default=False),
    ] = None,
) -> Mapping[str, Any]:
    """List what can be named: models, kinds, sites, strategies, policies, metrics, kernels, calls, protocols, experiments."""
    from rich.console import Console

    tables = {item.value: LISTED[item.value]() for item in (What if what is None else (what,))}
    console = Console()
    for name, table in tables.items():
        if what is None:
            also = f"; {table.caption}" if name == "models" else ""
            console.print(f"[bold]{name}[/bold]  {', '.join(names_in(table))}{also}")
        else:
            console.print(table if len(table.columns) <= _WIDEST else lines_of(table))
    if what is None:
        console.print("kvinterp list WHAT describes each, as in kvinterp list policies.")
    return {name: rows_of(table) for name, table in tables.items()}
