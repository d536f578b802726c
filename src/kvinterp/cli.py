"""The command line: one command a verb, thin over the package.

Heavy things are imported inside the commands, so that ``kvinterp --help`` answers at once. Every error kvinterp raises on
purpose becomes one sentence on stderr and exit code 2; an interrupted run ends with 130, its finished part on disk.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvinterp._version import __version__
from kvinterp.cli_audit import audit_command, kernels_command
from kvinterp.cli_parts import (
    NOTHING,
    RESUMES,
    Attention,
    Device,
    Dtype,
    Kind,
    Model,
    Out,
    Overwrite,
    Prompts,
    claim,
    free,
    numbers,
    say,
    speak,
    status,
    told,
)
from kvinterp.cli_parts import about as running
from kvinterp.errors import KvinterpError, unknown
from kvinterp.listing import echo, listed

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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        echo(f"kvinterp {__version__}")
        raise typer.Exit


# compare ---------------------------------------------------------------------------------------------------------------


@app.command("compare")
@told(RESUMES)
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
    cache_errors: Annotated[
        str, typer.Option(help="K/V errors: 'aggregated' by step and by position, or 'whole' (quadratic in the steps).")
    ] = "aggregated",
    overwrite: Overwrite = False,
) -> None:
    """Run a model along two paths on the same prompts and write what differs, step by step."""
    from kvinterp.experiments import Compare

    speak()
    claim(out)
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
        layers=numbers("--layers", layers, "0,2,-1"),
        seed=seed,
        device=device,
        attention=attention,
        batch_size=batch_size,
        stop=stop,
        cache_errors=cache_errors,
    )
    (result,) = experiment.run(out, "overwrite" if overwrite else "error")
    failures = result.comparison.failures
    for row in failures.to_dict("records"):
        echo(f"prompt {row['id']} is left out: {row['message']}", err=True)
    if result.comparison.steps.empty:
        raise KvinterpError(f"none of the {len(failures)} prompts could be compared; {out / 'summary.json'} says why.")
    from kvinterp.report import write_report

    page = write_report([result], out)
    say(result.comparison.where().splitlines())
    _say_where(out, page)


# patch and decompose ---------------------------------------------------------------------------------------------------


@app.command("patch")
@told(NOTHING)
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

    existing = free(out, overwrite, "recovery", "steps", "controls")
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
    from kvinterp.reading.patching import said_of_sweep
    from kvinterp.report import save_sweep_figures
    from kvinterp.results import write_tables

    summary = made.summary()
    tables = {"recovery": made.recovery, "steps": made.steps, "controls": made.controls}
    files = write_tables(out, tables, summary, existing, lambda place: save_sweep_figures(made, place), running())
    say([*said_of_sweep(summary), ""], files)


@app.command("decompose")
@told(NOTHING)
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

    existing = free(out, overwrite, "decomposition", "layers")
    adapter = load_model(model, kind=kind, dtype=dtype, device=device, attention=attention)
    made = decompose(adapter, load_prompts(prompts), max_new_tokens=max_new_tokens)
    from kvinterp.reading.patching import said_of_decomposition
    from kvinterp.report import save_decomposition_figure
    from kvinterp.results import write_tables

    summary = made.summary()
    tables = {"decomposition": made.steps, "layers": made.layers}
    files = write_tables(out, tables, summary, existing, lambda place: save_decomposition_figure(made, place), running())
    say([*said_of_decomposition(summary), ""], files)


# audit and kernels -----------------------------------------------------------------------------------------------------

app.command("audit")(audit_command)
app.command("kernels")(kernels_command)

# root-cause ------------------------------------------------------------------------------------------------------------


@app.command("root-cause")
@told(RESUMES)
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
    from kvinterp.experiments.circumstances import circumstances
    from kvinterp.experiments.root_cause import TABLES, root_cause
    from kvinterp.models import load_model
    from kvinterp.paths import strategy_named
    from kvinterp.paths.kernels import kernels_named
    from kvinterp.reading.root_cause import said_of_root_cause
    from kvinterp.report import save_root_cause_figures
    from kvinterp.results import Parts, write_tables

    existing = free(out, overwrite, *TABLES)
    kernels_named(flip_kernels)
    strategy_named(flip_strategy)
    given = load_prompts(prompts)
    adapters = [load_model(model, kind=kind, dtype="float16", device=device, attention=attention) for model in models]
    settings = {
        "verb": "root-cause",
        "models": models,
        "prompts": [prompt.text for prompt in given],
        "kind": kind,
        "attention": attention,
        "flips": [flip_kernels, flip_strategy, flip_steps, flip_seeds],
        "ladder": [ladder_prompts, ladder_steps],
        "made_with": {str(number): circumstances(adapter) for number, adapter in enumerate(adapters)},
    }
    parts = Parts(out, settings, existing)
    try:
        with status("root cause") as tell:
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
    except BaseException:
        parts.withdraw()
        raise
    reading = said_of_root_cause(tables, about)
    files = write_tables(
        out,
        tables,
        {"reading": reading, "provenance": about},
        existing,
        lambda place: save_root_cause_figures(tables, about, place),
        running(),
    )
    say([*reading, ""], files)


# demo ------------------------------------------------------------------------------------------------------------------


@app.command("demo")
@told(RESUMES)
def demo_command(
    out: Out = Path("kvinterp-demo"),
    smoke: Annotated[bool, typer.Option("--smoke", help="One problem and few steps: does everything run?")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also write the four figures as one picture here.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare two small trained models in FP16, two kinds and two protocols each, and write a report."""
    from kvinterp.experiments import Demo
    from kvinterp.experiments.demo import SMOKE
    from kvinterp.files import check_writable

    speak()
    claim(out)
    if picture is not None:
        check_writable(picture.parent, "--picture")
    demo = SMOKE if smoke else Demo()
    results = demo.run(out, "overwrite" if overwrite else "error")
    flips = demo.flips(out, "overwrite" if overwrite else "use")
    from kvinterp.report import overview_of, save, write_report

    if picture is not None:
        save(overview_of(results), picture)
    # The page last: where it is, everything is.
    page = write_report(results, out, flips)
    if picture is not None:
        say([f"picture  {picture}"])
    say(result.comparison.where().splitlines()[0] for result in [*results, flips])
    _say_where(out, page)


def _say_where(out: Path, page: Path) -> None:
    echo("")
    echo(f"report   {page}")
    echo(f"figures  {out / 'figures'}")
    runs = out / "runs" / "*" if (out / "runs").is_dir() else out
    echo(f"tables   {runs / 'steps.parquet'}, examples, layers, heads, kv_steps, kv_positions")
    echo(f"summary  {runs / 'summary.json'}")


# list ------------------------------------------------------------------------------------------------------------------


class What(str, enum.Enum):
    """What can be listed."""

    models = "models"
    kinds = "kinds"
    sites = "sites"
    strategies = "strategies"
    policies = "policies"
    metrics = "metrics"
    kernels = "kernels"
    protocols = "protocols"


@app.command("list")
@told(NOTHING)
def list_command(
    what: Annotated[What | None, typer.Argument(help="Everything, unless said.", show_default=False)] = None,
) -> None:
    """Show the models, kinds, sites, strategies, policies, metrics, kernels and protocols there are."""
    from rich.console import Console

    console = Console()
    for item in What if what is None else (what,):
        console.print(listed(item.value))


if __name__ == "__main__":
    main()
