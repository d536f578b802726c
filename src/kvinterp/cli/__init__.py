"""The command line: a command for every experiment, its options the experiment's own fields.

Experiments are imported when their command is called, and heavy things within them, so that
``kvinterp --help`` answers at once. Whatever goes wrong is one sentence on stderr and exit code 2;
an interrupted run ends with 130, its finished part on disk. With ``--json`` a command prints one
JSON object on standard output, also for an error, and everything else on standard error.
"""

import contextlib
import dataclasses
import enum
import functools
import inspect
import logging
import os
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvinterp._version import __version__
from kvinterp.cli.listing import LISTED, described
from kvinterp.commands.choices import check_early, check_models, default_folder
from kvinterp.commands.options import OPTION
from kvinterp.commands.registry import (
    command_of,
    experiment_named,
    experiment_read,
    experiments,
    question_of,
)
from kvinterp.common.collecting import seldom
from kvinterp.common.console import Dropping, echo
from kvinterp.common.files import SUMMARY, is_file, read_json, strict_json
from kvinterp.common.source import source
from kvinterp.errors import InputError, KvinterpError, out_of_memory, unknown, visible

_HOW = ("kind", "dtype", "device", "attention", "random_init", "remote_code", "batch_size", "seed")
"""The options that help shows in the group "How"; what is in no group is what is asked."""
_WrongUse: Any = typer.BadParameter.__base__
"""What the reader of the command line raises; newer versions of typer have a click of their own."""


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel="Where to",
        help="Print one JSON object on standard output, and everything else on standard error.",
    ),
]
"""The option that every command has."""


class _Verb(TyperCommand):
    """An experiment's command: its file is imported when more is asked of it than what it is
    for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, help=question_of(name))

    @functools.cached_property
    def _whole(self) -> Any:
        apart = typer.Typer(add_completion=False)
        apart.command(self.name)(_command_of(str(self.name)))
        return typer.main.get_command(apart)

    def make_context(
        self, info_name: str | None, args: list[str], *given: Any, **extra: Any
    ) -> Any:
        # What an experiment's file imports takes longer than a word that is misspelt, or a hub that
        # is not there.
        try:
            context = super().make_context(info_name, args, *given, **extra)
        except _WrongUse as error:
            if type(error).__name__ != "NoSuchOption":
                raise
            raise self._unknown(error.option_name) from error
        verb, kind, chosen = str(self.name), experiment_read(str(self.name)), context.params
        check_early(kind, chosen)
        check_models(chosen)
        existing = "overwrite" if chosen["overwrite"] or kind.OVERWRITES == "always" else "error"
        folder = chosen["out"] or default_folder(verb, chosen)
        source("kvinterp.commands.results").check_free(folder, verb, existing)
        if "torch" not in sys.modules:
            _speak()
            logging.getLogger("kvinterp").info("importing torch first, which takes seconds")
        return context

    def _unknown(self, option: str) -> InputError:
        """The error for an option that there is not."""
        command, first = f"kvinterp {' '.join(command_of(str(self.name)))}", self.params[0]
        if option.strip("-s") == str(first.name).strip("s"):
            return InputError(
                f"unknown option {option!r}: it stands without a name, as in '{command} zoo:gqa2-mini'."
            )
        known = [flag for param in self.params for flag in param.opts if flag.startswith("--")]
        return unknown("option", option, known, f"See '{command} --help'.")

    def get_params(self, ctx: Any) -> list[Any]:
        self.params, self.callback = self._whole.params, self._whole.callback
        return super().get_params(ctx)


class _Experiments(TyperGroup):
    """Commands, those of experiments before the others."""

    BEFORE: typing.ClassVar[tuple[str, ...]] = ()
    """What stands on the command line before the name of one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        own = {
            name: _Verb(name) for name in experiments() if command_of(name) == (*self.BEFORE, name)
        }
        self.commands = {**own, **self.commands}


class _Studies(_Experiments):
    BEFORE = ("study",)


class _Root(_Experiments):
    def main(self, args: list[str] | None = None, *given: Any, **named: Any) -> Any:  # type: ignore[override]
        """Runs a command, says what went wrong in a sentence, and leaves with an exit code."""
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in arguments
        if sys.stdout is None:
            echo(
                "error: standard output is closed, where what is found is printed: send it to a file.",
                err=True,
            )
            raise SystemExit(2)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                # Where the stream's encoding lacks a character an escape is shown.
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        with contextlib.ExitStack() as streams:
            # Help is printed by typer and rich, which would end with an error where a reader has
            # left.
            streams.enter_context(contextlib.redirect_stdout(Dropping(sys.stdout)))
            if sys.stderr is not None:
                streams.enter_context(contextlib.redirect_stderr(Dropping(sys.stderr)))
            try:
                with (
                    contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
                ):
                    found = self._called(arguments or ["--help"])
                if as_json:
                    echo(strict_json(found))
            except InputError as error:
                found = _refusal(error)
        raise SystemExit(found.get("exit_code", 0))

    def _called(self, arguments: list[str]) -> Mapping[str, Any]:
        """What a command gave, or the error that it ended with."""
        try:
            with self.make_context("kvinterp", arguments) as ctx:
                found = self.invoke(ctx)
            return found if isinstance(found, Mapping) else {}
        except typer.Exit as left:
            return {"exit_code": left.exit_code}
        except KvinterpError as error:
            return _refusal(error)
        except _WrongUse as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                echo(error.format_message())
                return {}
            command = error.ctx.command_path if error.ctx else "kvinterp"
            said = error.format_message().replace("Value error, ", "").rstrip(".")
            return _refusal(KvinterpError(f"{said}. See '{command} --help'."))
        except KeyboardInterrupt as error:
            said = f"interrupted: {error.args[0] if error.args else 'nothing was begun'}."
            echo(said, err=True)
            return {"error": said, "exit_code": 130}
        except Exception as error:
            if not out_of_memory(error):
                # A bug of kvinterp's: the traceback is to be reported, and the exit code is that of
                # no verdict.
                traceback.print_exc()
                return {"error": f"{type(error).__name__}: {error}", "exit_code": 2}
            what = f"({type(error).__name__}: {error})"
            return _refusal(
                KvinterpError(
                    f"there was not enough memory {what}: close what else runs, or ask for less."
                )
            )
        # sys.exit in a model's code, or a panic in Rust.
        except BaseException as error:
            said = f"code that was run raised {type(error).__name__} ({error}): expected code that returns, or raises an error."
            return _refusal(KvinterpError(said))


def _refusal(error: KvinterpError) -> dict[str, Any]:
    """Says an error, and gives what says it as JSON."""
    echo(f"error: {error}", err=True)
    return {"error": str(error), "exit_code": 2}


app = typer.Typer(
    cls=_Root,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does decoding from a KV cache compute the same thing as recomputing the prefix?",
)
studies = typer.Typer(
    cls=_Studies,
    no_args_is_help=True,
    help="Ask many prompts a question of the literature: each study by its name, as in kvinterp study behaviour MODEL.",
)
app.add_typer(studies, name="study")


def main() -> None:
    """The entry point ``kvinterp``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seldom()
    app()


def _version(value: bool) -> None:
    if value:
        echo(f"kvinterp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Run torch's deterministic algorithms only, with cuBLAS told so.",
        ),
    ] = False,
) -> None:
    if deterministic:
        # Before anything runs on a device: cuBLAS reads it once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        torch.use_deterministic_algorithms(True)


# Experiments as commands --------------------------------------------------------------------------


def _command_of(name: str) -> Callable[..., Mapping[str, Any]]:
    """The function that typer makes an experiment's command of."""
    read = experiment_read(name)

    def command(
        *,
        out: Annotated[
            Path | None,
            typer.Option(
                parser=_folder_named,
                metavar="PATH",
                rich_help_panel="Where to",
                help="Folder for tables and page. Default: out/VERB-MODEL.",
            ),
        ] = None,
        overwrite: Annotated[
            bool,
            typer.Option(
                "--overwrite",
                hidden=read.OVERWRITES == "always",
                rich_help_panel="Where to",
                help="Replace a result that is already in the folder.",
            ),
        ] = False,
        figures: Annotated[
            str,
            typer.Option(
                metavar="WHAT",
                rich_help_panel="Where to",
                help="page: the page draws them; png: also a PNG of each; none: no page.",
            ),
        ] = "page",
        as_json: Json = False,
        engine: Annotated[
            str,
            typer.Option(rich_help_panel="How", help="Where to run: local, ray or ray(WORKERS)."),
        ] = "local",
        **given: Any,
    ) -> Mapping[str, Any]:
        _speak()
        chosen = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        asked, folder = experiment_named(name)(**chosen), out or default_folder(name, chosen)
        existing = "overwrite" if overwrite else "error"
        result = asked.run(folder, existing, engine=engine, figures=figures)
        (result.experiment or asked).print_result(result, echo)
        return {"verb": asked.verb(), **result.json_output()}

    shared = dict(inspect.signature(command).parameters)
    del shared["given"]
    if command_of(name) == (name,):
        del shared["engine"]
    if read.OVERWRITES == "always":
        # Whose page is of its own.
        del shared["figures"]
    own = [_parameter(field) for field in dataclasses.fields(read) if OPTION in field.metadata]
    command.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__doc__ = question_of(name)
    return command


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The parameter of a command, as typer reads it, for a field that is an option."""
    ours = ("decides", "example", "only", "positional", "flag", "among", "commas", "empty", "early")
    # Options are words, numbers and paths.
    hint = eval(str(field.type), {"Path": Path})
    about, default = field.metadata[OPTION], typing.cast(Any, field.default)
    more = {name: value for name, value in about.items() if name not in ours}
    if "example" in about:
        hint, more["parser"] = str | None, functools.partial(_numbers, about["example"])
        default = default and ",".join(map(str, default))
    elif typing.get_origin(hint) is tuple:
        hint, default = list[str], list(default)
    if about.get("positional") == "yes":
        default, info = inspect.Parameter.empty if default else default, typer.Argument(**more)
    else:
        flag = about.get("flag", f"--{field.name.replace('_', '-')}")
        info = typer.Option(flag, rich_help_panel="How" if field.name in _HOW else None, **more)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, info],
    )


def _folder_named(text: str | Path) -> Path:
    """A folder's name; an empty one, as of a variable that is not set, would be the current
    folder.
    """
    if not str(text).strip():
        raise typer.BadParameter(
            "'' was given: expected the name of a folder; for the current one give ."
        )
    return Path(text)


def _numbers(example: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} cannot be read: expected whole numbers with commas, as in {example}."
        ) from None


def _speak() -> None:
    """Shows kvinterp's own log lines on what is standard error when they are said: a bar of
    progress makes room for them.
    """
    from tqdm import tqdm

    log, spoken = logging.getLogger("kvinterp"), logging.Handler()
    spoken.set_name("kvinterp.cli")
    spoken.emit = lambda record: tqdm.write(visible(spoken.format(record)), file=sys.stderr)  # type: ignore[method-assign]
    log.handlers = [
        *(each for each in log.handlers if each.get_name() != spoken.get_name()),
        spoken,
    ]
    log.setLevel(logging.INFO)


# show, report and list ----------------------------------------------------------------------------

Folder = Annotated[
    Path,
    typer.Argument(parser=_folder_named, metavar="FOLDER", help="A folder that a command wrote."),
]


@app.command("show")
def _show(
    folder: Folder,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            help="First make the page and figures again, from the tables; no model is loaded.",
        ),
    ] = False,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print where the page is; do not open it.")
    ] = False,
    as_json: Json = False,
) -> Mapping[str, Any]:
    """Open a result's page in the browser; any command may have written it."""
    import webbrowser

    _speak()
    page, lines = folder / "report.html", []
    if rewrite or not is_file(page):
        from kvinterp.commands.keeping import load

        result = load(folder)
        if not rewrite:
            raise InputError(
                f"folder {str(folder)!r} holds a result without a page: kvinterp show --rewrite makes one from its tables."
            )
        page, lines = result.report(), result.sentences()
        if (read_json(folder / SUMMARY) or {}).get("interrupted"):
            lines = ["This run was interrupted: only what was finished by then is in it.", *lines]
    for line in (*lines, *[""] * bool(lines)):
        echo(line)
    seen = False
    if not no_open:
        with contextlib.suppress(webbrowser.Error, OSError):
            seen = webbrowser.open(page.resolve().as_uri())
    echo(page)
    if not (no_open or seen):
        echo("no browser could be started: open the page yourself.", err=True)
    return {
        "verb": "show",
        "folder": str(folder),
        "exit_code": 0,
        "page": str(page),
        "opened": seen,
        "reading": lines,
    }


What = enum.Enum("What", {name: name for name in LISTED}, type=str)  # type: ignore[misc]


@app.command("list")
def _list(
    what: Annotated[
        What | None,
        typer.Argument(
            help="What to describe at length. Default: the names of everything.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> Mapping[str, Any]:
    """List what can be named: models, sites, strategies, policies, metrics, kernels and more."""
    if what is not None:
        rows = LISTED[what.value]()
        for line in described(what.value, rows):
            echo(line)
        return {what.value: rows}
    names = {kind: [next(iter(row.values())) for row in rows()] for kind, rows in LISTED.items()}
    for kind, of in names.items():
        echo(f"{kind}  {', '.join(of)}")
    echo("kvinterp list WHAT describes each, as in kvinterp list policies.")
    return names
