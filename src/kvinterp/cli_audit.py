"""The commands that ask whether a model is right: ``audit`` and ``kernels``."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvinterp.cli_parts import (
    NOTHING,
    Attention,
    Device,
    Dtype,
    Kind,
    Out,
    Overwrite,
    about,
    claim,
    free,
    numbers,
    say,
    speak,
    status,
    told,
)
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, shown
from kvinterp.listing import echo, escaped, table_of

if TYPE_CHECKING:
    from kvinterp.models import Adapter

__all__ = ["audit_command", "kernels_command"]

RemoteCode = Annotated[
    bool, typer.Option("--remote-code", help="Run the code that comes with a checkpoint; without this it is refused.")
]

# audit -----------------------------------------------------------------------------------------------------------------


@told(NOTHING)
def audit_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="zoo:NAME, a transformers checkpoint folder or a hub id; a config.json with --random-init; or your own code, "
            "package.module:Class, or package.module:function, which is called without arguments and returns a model.",
            show_default=False,
        ),
    ] = None,
    out: Out = Path("kvinterp-audit"),
    own_class: Annotated[
        str | None,
        typer.Option("--class", help="package.module:Class, for the weights or, with --random-init, the config of MODEL."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The config.json of package.module:Class; its config's defaults unless given."),
    ] = None,
    random_init: Annotated[bool, typer.Option("--random-init", help="Random weights, from the config alone.")] = False,
    prompts: Annotated[
        str | None,
        typer.Option(help="A .jsonl file, or arithmetic:N, ...; two of random tokens unless given.", show_default=False),
    ] = None,
    kind: Kind = "native",
    dtype: Dtype = "float16",
    rungs: Annotated[str, typer.Option(help="Precisions to climb beside --dtype.")] = "bfloat16,float16,float32,float64",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths after which tokens are fed singly; unless given 5,63,64,65,96,97,128 and those beside the "
            "model's own window.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens fed singly after each.")] = 3,
    checks: Annotated[
        str,
        typer.Option(help="What else is exercised (padding, generate(), other caches, ...): default, thorough or none."),
    ] = "default",
    thorough: Annotated[bool, typer.Option("--thorough", help="The same as --checks thorough.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A word that shall not fail, such as hidden-cast; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, and nothing else there.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write the checks as JUnit XML here.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds random prompts and random weights.")] = 0,
    device: Device = None,
    attention: Attention = None,
    remote_code: RemoteCode = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", hidden=True, help="Not needed: an audit writes its own folder again.")
    ] = False,
) -> None:
    """Say whether cached decoding is right: PASS, FAIL or CANNOT TELL, one word, and why.

    Passing words: equal, rounding, kernel. Failing words: bug, unexplained, hidden-cast, wrong-dtype, overflow.

    Exit codes: 0 it passes, or its word is one that --allow names; 1 it fails; 2 bad input, or the model cannot be run;
    3 cannot tell.
    """
    from kvinterp.auditing import audit
    from kvinterp.auditing.junit import junit_xml
    from kvinterp.auditing.report import check_own
    from kvinterp.files import check_writable, write_whole

    speak()
    if thorough and checks not in ("default", "thorough"):
        raise InputError(f"--thorough was given with --checks {checks!r}: leave one of the two out.")
    check_own(out)
    claim(out)
    if junit is not None:
        try:
            is_folder = junit.is_dir()
        except OSError as error:
            raise InputError(
                f"--junit {shown(junit)} cannot be written ({error.strerror}): expected the name of a file."
            ) from error
        if is_folder:
            raise InputError(f"--junit {shown(junit)} is a folder: expected the name of a file.")
        check_writable(junit.parent, "--junit")
    given = _prompts(prompts)
    # What a user's code prints is no part of what this command says.
    with contextlib.redirect_stdout(sys.stderr):
        adapter = _subject(
            model, own_class, config, random_init, kind, dtype, seed, device, attention, remote_code=remote_code
        )
        with status(f"auditing {adapter.facts.name}") as tell, _models_own_errors():
            found = audit(
                adapter,
                given,
                rungs=tuple(part.strip() for part in rungs.split(",")),
                lengths=numbers("--lengths", lengths, "5,63,64"),
                steps=steps,
                seed=seed,
                checks="thorough" if thorough else checks,
                allow=tuple(allow or ()),
                detail="everything",
                progress=tell,
            )
    found.save(out)
    if junit is not None:
        write_whole(junit, junit_xml(found))
    verdict = found.verdict
    echo(verdict.to_json() if as_json else f"{verdict.reading}\n")
    written = {"page": out / "audit.html", "verdict": out / "verdict.json", "junit": junit}
    for what, path in written.items():
        if path is not None:
            echo(f"{what:<8} {path}", err=as_json)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _prompts(text: str | None) -> Any:
    from kvinterp.data import load_prompts

    return None if text is None else load_prompts(text)


@contextlib.contextmanager
def _models_own_errors() -> Iterator[None]:
    """A model that is being written raises whatever its code meets first; that is no verdict, so it may not exit with 1."""
    try:
        yield
    except KvinterpError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = next(iter(str(error).strip().splitlines()), "")[:200]
        raise UnsupportedError(
            f"the audit could not be finished: {type(error).__name__} was raised ({said or 'without a message'}) in "
            f"{frame.name}, {os.path.basename(frame.filename)} line {frame.lineno}; kv.audit(model) shows the whole traceback."
        ) from error


def _subject(
    model: str | None,
    own_class: str | None,
    config: Path | None,
    random_init: bool,
    kind: str,
    dtype: str,
    seed: int,
    device: str | None,
    attention: str | None,
    remote_code: bool,
) -> Adapter:
    from kvinterp.auditing.building import is_code, random_model, users_model
    from kvinterp.models import dtype_named, load_model

    trust = "trust" if remote_code else "refuse"
    wanted = dtype_named(dtype)
    assert wanted is not None
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
            return load_model(model, kind=kind, dtype=dtype, device=device, attention=attention, remote_code=trust)
        if kind != "native":
            raise InputError(f"--kind {kind!r} was given with --random-init: expected native, leave one of the two out.")
        return random_model(model, wanted, seed, device, attention, trust)
    if kind != "native" or attention is not None:
        raise InputError(f"{code!r} is your own code, which says itself what it is: leave --kind and --attention out.")
    source: str | Path | None = config if code is model else model
    if own_class is not None and config is not None:
        if model is not None:
            raise InputError(
                f"--config {str(config)!r} and {model!r} were both given for {code!r}: leave one of the two out."
            )
        source = config
    loaded = code is not model and model is not None and not random_init and not model.endswith(".json")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    weights = "loaded" if loaded else "random"
    return users_model(code, source, weights=weights, dtype=wanted, seed=seed, device=device, remote_code=trust)


# kernels ---------------------------------------------------------------------------------------------------------------


@told(NOTHING)
def kernels_command(
    model: Annotated[str, typer.Option("--model", help="zoo:NAME, a checkpoint folder or a hub id.")] = "zoo:mistral-mini",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table; only printed unless given.")] = None,
    random_init: Annotated[bool, typer.Option("--random-init", help="Random weights, from the config alone.")] = False,
    kind: Kind = "native",
    dtype: Dtype = "float16",
    kernels: Annotated[
        str, typer.Option(help="native, batch_invariant, split_k(4,float16), flash_decoding(4), layer_cast.")
    ] = "native",
    sizes: Annotated[str, typer.Option(help="Numbers of rows, and of keys, to compare.")] = "1,2,17,64,128,257",
    seed: Annotated[int, typer.Option(help="Seeds the prompt.")] = 0,
    device: Device = None,
    attention: Attention = None,
    remote_code: RemoteCode = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure which of a model's operations give other bits for another number of rows or keys, or another batch."""
    from rich.console import Console

    from kvinterp.auditing import kernels_table
    from kvinterp.results import write_tables

    speak()
    existing = "error" if out is None else free(out, overwrite, "kernels")
    adapter = _subject(model, None, None, random_init, kind, dtype, seed, device, attention, remote_code)
    with status(f"measuring the operations of {adapter.facts.name}"):
        made = kernels_table(adapter, sizes=numbers("--sizes", sizes, "1,2,17,64") or (), kernels=kernels, seed=seed)
    varied = ("rows", "keys", "batch")
    table = table_of(
        f"{adapter.facts.name} ({kind}, {dtype}, {kernels} kernels)", "operation", "shape", *varied, "fixed by"
    )
    for (operation, shape), rows in made.summary().groupby(["operation", "shape"], sort=False):
        cells = {row["varied"]: _same_bits(row) for row in rows.to_dict("records")}
        fixes = ", ".join(sorted({text for text in rows["flags_that_fix"] if text}))
        table.add_row(*map(escaped, (operation, shape, *(cells.get(name, "") for name in varied), fixes)))
    table.caption = (
        "=: a row's bits stay the same; else the size from which they differ, and by how many ULP of its largest"
    )
    files: list[Path] = []
    if out is not None:
        summary = {"first": made.first, "reading": str(made), "provenance": made.about}
        files = write_tables(out, {"kernels": made.table}, summary, existing, about=about())
    Console().print(table)
    say([made], files)


def _same_bits(row: dict[str, Any]) -> str:
    return "=" if row["same_bits"] else f"{row['first_size_that_differs']:g}: {row['max_ulp_of_row']:.2g} ULP"
