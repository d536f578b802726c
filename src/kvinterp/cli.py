"""The command line: one command a verb, thin over the package.

Heavy things are imported inside the commands, so that ``kvinterp --help`` answers at once. Every error kvinterp raises on
purpose becomes one sentence on stderr and exit code 2; an interrupted run ends with 130, its finished part on disk.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvinterp._version import __version__
from kvinterp.errors import InputError, KvinterpError, unknown

if TYPE_CHECKING:
    from kvinterp.models import Adapter


__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does decoding from a KV cache compute the same thing as recomputing the prefix?",
)


def main() -> None:
    """The entry point ``kvinterp``."""
    app()


RESUMES = "what was finished is on disk; the same command goes on from there"
NOTHING = "nothing was written; run the same command again"


def _told(interrupted: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns kvinterp's own errors and interruptions into one sentence and an exit code.

    Args:
        interrupted: What an interruption leaves behind.
    """

    def wrapped(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            before = signal.signal(signal.SIGTERM, _interrupt)
            try:
                command(*args, **kwargs)
            except KvinterpError as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(2) from error
            except KeyboardInterrupt as error:
                typer.echo(f"interrupted: {interrupted}.", err=True)
                raise typer.Exit(130) from error
            finally:
                signal.signal(signal.SIGTERM, before)

        return run

    return wrapped


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        typer.echo(f"kvinterp {__version__}")
        raise typer.Exit


# Options that several commands take --------------------------------------------------------------------------------------

Model = Annotated[str, typer.Argument(help="zoo:NAME, a transformers checkpoint folder, or a hub id.")]
Prompts = Annotated[str, typer.Option(help="A .jsonl file, or arithmetic:N, restate:N, instructions:N.")]
Kind = Annotated[str, typer.Option(help="native, hooked or bridge.")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; CUDA where there is one.")]
Attention = Annotated[str | None, typer.Option(help="For native: sdpa, eager, ...; its own unless given.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the tables, figures and report.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result that is already in the folder.")]

# compare ---------------------------------------------------------------------------------------------------------------


@app.command("compare")
@_told(RESUMES)
def compare_command(
    model: Model,
    out: Out,
    prompts: Prompts = "arithmetic:6",
    a: Annotated[str, typer.Option("--a", help="The leading path.")] = "cached",
    b: Annotated[str, typer.Option("--b", help="The path it is compared with.")] = "recompute",
    dtype: Dtype = "float16",
    kind: Kind = "native",
    protocol: Annotated[str, typer.Option(help="matched or free.")] = "matched",
    strategy: Annotated[str, typer.Option(help="greedy, top_k(50,0.8), top_p(0.95,0.8).")] = "greedy",
    max_new_tokens: Annotated[int, typer.Option(help="Most steps a prompt.")] = 48,
    record: Annotated[
        str | None,
        typer.Option(
            help="Sites to compare, comma-separated; '' for none. "
            "Unless given: resid_post,pattern,kv, without those that the model cannot give.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to compare, as in 0,2,-1; all unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds the random numbers of the strategy.")] = 0,
    device: Device = None,
    attention: Attention = None,
    batch_size: Annotated[int, typer.Option(help="Most prompts a batch; used where it keeps the bits.")] = 1,
    stop: Annotated[str, typer.Option(help="'end of sequence' or 'length'.")] = "end of sequence",
    overwrite: Overwrite = False,
) -> None:
    """Run a model along two paths on the same prompts and write what differs, step by step."""
    from kvinterp.experiments import Compare

    _speak()
    experiment = Compare(
        model=model,
        prompts=prompts,
        a=a,
        b=b,
        kind=kind,
        dtype=dtype,
        protocol=protocol,
        strategy=strategy,
        max_new_tokens=max_new_tokens,
        record=record,
        layers=_numbers("--layers", layers, "0,2,-1"),
        seed=seed,
        device=device,
        attention=attention,
        batch_size=batch_size,
        stop=stop,
    )
    (result,) = experiment.run(out, "overwrite" if overwrite else "error")
    for line in result.comparison.where().splitlines():
        typer.echo(line)
    failures = result.comparison.failures
    for row in failures.to_dict("records"):
        typer.echo(f"prompt {row['id']} is left out: {row['message']}", err=True)
    if result.comparison.steps.empty:
        raise KvinterpError(f"none of the {len(failures)} prompts could be compared; {out / 'summary.json'} says why.")
    from kvinterp.views import write_report

    _say_where(out, write_report([result], out))


def _numbers(option: str, text: str | None, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} cannot be read: expected whole numbers with commas, as in {example}."
        ) from error


# patch and decompose ---------------------------------------------------------------------------------------------------


@app.command("patch")
@_told(NOTHING)
def patch_command(
    model: Model,
    out: Out,
    site: Annotated[str, typer.Option(help="kv, cache_k, cache_v, resid_post, attn_out, ...")] = "kv",
    sweep: Annotated[str, typer.Option(help="single, cumulative, cumulative-from, heads, kv-heads or blocks.")] = "single",
    direction: Annotated[str, typer.Option(help="into-recompute or into-cached.")] = "into-recompute",
    steps: Annotated[str, typer.Option(help="every or first.")] = "every",
    protocol: Annotated[str, typer.Option(help="matched or free.")] = "matched",
    distance: Annotated[str, typer.Option(help="l2, kl or margin; several with commas, the first leads.")] = "l2,kl",
    examples: Annotated[int | None, typer.Option(help="Patch only so many prompts, those of the highest KL.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="paper or matched: sets site, sweep, direction, steps, protocol, examples and distance."),
    ] = None,
    prompts: Prompts = "arithmetic:6",
    kind: Kind = "native",
    dtype: Dtype = "float16",
    max_new_tokens: Annotated[int, typer.Option(help="Most steps a prompt.")] = 32,
    device: Device = None,
    attention: Attention = None,
    controls: Annotated[str, typer.Option(help="all, quick (without planted causes) or none.")] = "all",
    overwrite: Overwrite = False,
) -> None:
    """Move tensors of one path into the other, one place at a time, and write how much of the difference each recovers."""
    from kvinterp.data import load_prompts
    from kvinterp.models import load_model
    from kvinterp.patching import PRESETS
    from kvinterp.patching import sweep as run_sweep

    existing = _free(out, overwrite)
    if preset is not None and preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    chosen = {
        "site": site,
        "over": sweep,
        "direction": direction,
        "steps": steps,
        "protocol": protocol,
        "max_new_tokens": max_new_tokens,
        "examples": examples,
        "distance": distance,
        **(PRESETS[preset] if preset else {}),
    }
    adapter = load_model(model, kind=kind, dtype=dtype, device=device, attention=attention)
    made = run_sweep(adapter, load_prompts(prompts), **chosen, controls=controls)
    from kvinterp.results import write_tables
    from kvinterp.views import save_sweep_figures
    from kvinterp.views.said_of_patching import said_of_sweep

    summary = made.summary()
    tables = {"recovery": made.recovery, "steps": made.steps, "controls": made.controls}
    files = write_tables(out, tables, summary, existing)
    _say([*said_of_sweep(summary), ""], [*files, *save_sweep_figures(made, out / "figures")])


@app.command("decompose")
@_told(NOTHING)
def decompose_command(
    model: Model,
    out: Out,
    prompts: Prompts = "arithmetic:6",
    kind: Kind = "native",
    dtype: Dtype = "float16",
    max_new_tokens: Annotated[int, typer.Option(help="Most steps a prompt.")] = 32,
    device: Device = None,
    attention: Attention = None,
    overwrite: Overwrite = False,
) -> None:
    """Split the difference by what makes it: rows computed alone (now, or when decoded), the prompt's rows made anew."""
    from kvinterp.data import load_prompts
    from kvinterp.models import load_model
    from kvinterp.patching import decompose

    existing = _free(out, overwrite)
    adapter = load_model(model, kind=kind, dtype=dtype, device=device, attention=attention)
    made = decompose(adapter, load_prompts(prompts), max_new_tokens=max_new_tokens)
    from kvinterp.results import write_tables
    from kvinterp.views import save_decomposition_figure
    from kvinterp.views.said_of_patching import said_of_decomposition

    summary = made.summary()
    tables = {"decomposition": made.steps, "layers": made.layers}
    files = write_tables(out, tables, summary, existing)
    _say([*said_of_decomposition(summary), ""], [*files, *save_decomposition_figure(made, out / "figures")])


def _free(out: Path, overwrite: bool, last: str = "summary.json") -> str:
    """Speaks up, and says how an existing result is treated; raises before anything slow where one is in the way."""
    from kvinterp.results import check_free

    _speak()
    existing = "overwrite" if overwrite else "error"
    check_free(out, existing, last, names=(last,))
    return existing


def _say(lines: Iterable[object], files: Iterable[Path] = ()) -> None:
    for line in (*lines, *files):
        typer.echo(str(line))


# audit and kernels -----------------------------------------------------------------------------------------------------


@app.command("audit")
@_told(NOTHING)
def audit_command(
    model: Annotated[str, typer.Argument(help="zoo:NAME, a transformers checkpoint folder, a hub id; or a config.json.")],
    out: Out = Path("kvinterp-audit"),
    random_init: Annotated[bool, typer.Option("--random-init", help="Random weights, from the config alone.")] = False,
    prompts: Annotated[
        str | None,
        typer.Option(help="A .jsonl file, or arithmetic:N, ...; two of random tokens unless given.", show_default=False),
    ] = None,
    kind: Kind = "native",
    dtype: Dtype = "float16",
    rungs: Annotated[str, typer.Option(help="Precisions to climb.")] = "bfloat16,float16,float32,float64",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths after which tokens are fed singly; unless given 5,63,64,65,96,97,128 and those beside the "
            "model's own window.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens fed singly after each.")] = 3,
    seed: Annotated[int, typer.Option(help="Seeds random prompts and random weights.")] = 0,
    device: Device = None,
    attention: Attention = None,
    overwrite: Overwrite = False,
) -> None:
    """Say whether cached decoding is right: equal, rounding, a kernel, a hidden cast, a wrong dtype, a bug or overflow.

    Exit code 0 for equal, rounding and kernel; 1 for a bug, a hidden cast, a wrong dtype or overflow; 2 for bad input.
    """
    from kvinterp.auditing import audit

    _free(out, overwrite, "verdict.json")
    given = _prompts(prompts)
    adapter = _subject(model, random_init, kind, dtype, seed, device, attention)
    with _status(f"auditing {adapter.facts.name}") as tell:
        found = audit(
            adapter,
            given,
            rungs=tuple(part.strip() for part in rungs.split(",")),
            lengths=_numbers("--lengths", lengths, "5,63,64"),
            steps=steps,
            seed=seed,
            out=out,
            progress=tell,
        )
    typer.echo(found.reading)
    typer.echo("")
    typer.echo(f"page     {out / 'audit.html'}")
    typer.echo(f"verdict  {out / 'verdict.json'}")
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _prompts(text: str | None) -> Any:
    from kvinterp.data import load_prompts

    return None if text is None else load_prompts(text)


def _subject(
    model: str, random_init: bool, kind: str, dtype: str, seed: int, device: str | None, attention: str | None
) -> Adapter:
    from kvinterp.models import dtype_named, load_model

    if not random_init:
        return load_model(model, kind=kind, dtype=dtype, device=device, attention=attention)
    from kvinterp.auditing import random_model

    if kind != "native":
        raise InputError(f"--kind {kind!r} was given with --random-init: expected native, leave one of the two out.")
    wanted = dtype_named(dtype)
    assert wanted is not None
    return random_model(model, wanted, seed, device, attention)


@contextlib.contextmanager
def _status(what: str) -> Iterator[Callable[[str], None]]:
    """Says on stderr what runs now: in one line that changes, or line by line where there is no terminal."""
    from rich.console import Console

    from kvinterp.listing import escaped

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: typer.echo(f"{what}: {now}", err=True)
        return
    with console.status(escaped(what)) as shown:
        yield lambda now: shown.update(escaped(f"{what}: {now}"))


@app.command("kernels")
@_told(NOTHING)
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
    overwrite: Overwrite = False,
) -> None:
    """Measure which of a model's operations give other bits for another number of rows or keys, or another batch."""
    from rich.console import Console

    from kvinterp.auditing import kernels_table
    from kvinterp.listing import escaped, table_of
    from kvinterp.results import write_tables

    _speak()
    existing = "error" if out is None else _free(out, overwrite)
    adapter = _subject(model, random_init, kind, dtype, seed, device, attention)
    with _status(f"measuring the operations of {adapter.facts.name}"):
        made = kernels_table(adapter, sizes=_numbers("--sizes", sizes, "1,2,17,64") or (), kernels=kernels, seed=seed)
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
    Console().print(table)
    typer.echo(str(made))
    if out is not None:
        summary = {"first": made.first, "reading": str(made), "provenance": made.about}
        _say((), write_tables(out, {"kernels": made.table}, summary, existing))


def _same_bits(row: dict[str, Any]) -> str:
    return "=" if row["same_bits"] else f"{row['first_size_that_differs']:g}: {row['max_ulp_of_row']:.2g} ULP"


# root-cause ------------------------------------------------------------------------------------------------------------


@app.command("root-cause")
@_told(RESUMES)
def root_cause_command(
    models: Annotated[list[str], typer.Argument(help="zoo:NAME, checkpoint folders or hub ids.")],
    out: Out,
    prompts: Prompts = "arithmetic:20",
    flip_kernels: Annotated[str, typer.Option(help="Kernels under which flips are looked for.")] = "split_k(8,float16)",
    flip_strategy: Annotated[str, typer.Option(help="And the strategy, beside greedy.")] = "top_p(1.0,2.0)",
    flip_steps: Annotated[int, typer.Option(help="Most steps of each there.", min=1)] = 48,
    flip_seeds: Annotated[int, typer.Option(help="How many seeds of the sampling.", min=1)] = 3,
    ladder_prompts: Annotated[int, typer.Option(help="How many of the prompts go up the ladder.", min=1)] = 6,
    ladder_steps: Annotated[int, typer.Option(help="Most steps of each there.", min=1)] = 16,
    kind: Kind = "native",
    device: Device = None,
    attention: Attention = None,
    overwrite: Overwrite = False,
) -> None:
    """Run the FP16 paper's five root-cause experiments and the grouped-query one: a table and a figure each."""
    from kvinterp.data import load_prompts
    from kvinterp.experiments.root_cause import root_cause
    from kvinterp.models import load_model
    from kvinterp.provenance import provenance
    from kvinterp.results import Parts, write_tables
    from kvinterp.views import save_root_cause_figures
    from kvinterp.views.root_cause_words import said_of_root_cause

    existing = _free(out, overwrite)
    given = load_prompts(prompts)
    adapters = [load_model(model, kind=kind, dtype="float16", device=device, attention=attention) for model in models]
    settings = {
        "models": {adapter.facts.name: adapter.fingerprint() for adapter in adapters},
        "prompts": [prompt.text for prompt in given],
        "kind": kind,
        "attention": attention,
        "flips": [flip_kernels, flip_strategy, flip_steps, flip_seeds],
        "ladder": [ladder_prompts, ladder_steps],
        "device": provenance(adapters[0])["device"],
    }
    parts = Parts(out, settings, existing)
    with _status("root cause") as tell:
        tables, about = root_cause(
            adapters,
            given,
            flip_kernels,
            flip_strategy,
            flip_steps,
            range(flip_seeds),
            ladder_prompts,
            ladder_steps,
            progress=tell,
            keep=parts.made,
        )
    reading = said_of_root_cause(tables, about)
    files = write_tables(out, tables, {"reading": reading, "provenance": about}, existing)
    figures = save_root_cause_figures(tables, about, out / "figures")
    parts.clear()
    _say([*reading, ""], [*files, *figures])


# demo ------------------------------------------------------------------------------------------------------------------


@app.command("demo")
@_told(RESUMES)
def demo_command(
    out: Out = Path("kvinterp-demo"),
    smoke: Annotated[bool, typer.Option("--smoke", help="One problem and few steps: does everything run?")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also write the four figures as one picture here.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare two small trained models in FP16, two kinds and two protocols each, and write a report."""
    from kvinterp.experiments import Demo
    from kvinterp.experiments.demo import SMOKE

    _speak()
    results = (SMOKE if smoke else Demo()).run(out, "overwrite" if overwrite else "error")
    from kvinterp.views import save, write_report
    from kvinterp.views.report import overview_of

    page = write_report(results, out)
    if picture is not None:
        save(overview_of(results), picture)
        typer.echo(f"picture  {picture}")
    for result in results:
        typer.echo(result.comparison.where().splitlines()[0])
    _say_where(out, page)


def _say_where(out: Path, page: Path) -> None:
    typer.echo("")
    typer.echo(f"report   {page}")
    typer.echo(f"figures  {out / 'figures'}")
    runs = out / "runs" / "*" if (out / "runs").is_dir() else out
    typer.echo(f"tables   {runs / 'steps.parquet'}, examples, layers, heads, kv")
    typer.echo(f"summary  {runs / 'summary.json'}")


def _speak() -> None:
    """Shows kvinterp's own log lines on stderr."""
    log = logging.getLogger("kvinterp")
    # Made anew for every command: standard error may be another stream by now.
    for handler in [h for h in log.handlers if h.get_name() == "kvinterp.cli"]:
        log.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.set_name("kvinterp.cli")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


# list ------------------------------------------------------------------------------------------------------------------


class What(str, enum.Enum):
    """What can be listed."""

    models = "models"
    kinds = "kinds"
    sites = "sites"
    strategies = "strategies"
    policies = "policies"
    kernels = "kernels"
    protocols = "protocols"


@app.command("list")
@_told(NOTHING)
def list_command(
    what: Annotated[What | None, typer.Argument(help="Everything, unless said.", show_default=False)] = None,
) -> None:
    """Show the models, kinds, sites, strategies, policies, kernels and protocols there are."""
    from rich.console import Console

    from kvinterp.listing import listed

    console = Console()
    for item in What if what is None else (what,):
        console.print(listed(item.value))


if __name__ == "__main__":
    main()
