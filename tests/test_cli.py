"""The command line: what it writes, what it says, and one sentence with an exit code for whatever goes wrong."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import http.server
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp import __version__
from kvinterp.cli import app
from kvinterp.cli.listing import LISTED
from kvinterp.commands.base import SAID, WIDTH
from kvinterp.commands.choices import check_early
from kvinterp.commands.options import OPTION
from kvinterp.commands.registry import command_of, experiment_named, experiment_read, experiments, question_of
from kvinterp.models.naming import HUB_SECONDS
from kvinterp.paths import path_named
from kvinterp.paths.path import FORMS, OPTIONS
from synthetic import CHARTS
from writing import cells_of

pytestmark = pytest.mark.xdist_group("command line")
MODEL = "zoo:mistral-mini"
QUICK = ("--max-new-tokens", "3", "--device", "cpu")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}


def started(code: str) -> subprocess.Popen[str]:
    """A process in which Ctrl-C works, whatever the one that runs the tests was told about it."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# What it writes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One comparison with everything recorded."""
    out = tmp_path_factory.mktemp("cli") / "out"
    options = (
        "--prompts",
        "arithmetic:2",
        "--kind",
        "native",
        "--record",
        "resid_post,pattern,kv",
        "--layers",
        "0,-1",
        "--figures",
        "png",
    )
    return out, kvinterp("compare", MODEL, "--out", out, *options, *QUICK)


def test_compare_writes_what_the_issue_promises(done: tuple[Path, Result]) -> None:
    out, made = done
    assert made.exit_code == 0, made.output
    steps = pd.read_parquet(out / "steps.parquet")
    wanted = ["example", "step", "token_a", "token_b", "kl", "js", "max_abs_logit", "margin_a", "margin_b", "flipped"]
    assert set(wanted) <= set(steps.columns)
    assert sorted(zip(steps["example"], steps["step"], strict=True)) == [(e, s) for e in (0, 1) for s in range(3)]
    assert pd.read_parquet(out / "examples.parquet")["id"].tolist() == ["arithmetic-0-0", "arithmetic-0-1"]
    for name in ("layers", "heads", "kv_steps", "kv_positions"):
        frame = pd.read_parquet(out / f"{name}.parquet")
        assert sorted(frame["layer"].unique()) == [0, 3], name
    figures = {p.stem for p in (out / "figures").glob("*.png")}
    assert figures == {*CHARTS}
    assert cells_of(out) == []


def test_a_folder_that_nobody_names_bears_the_names_of_command_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("compare", MODEL, "--prompts", "arithmetic:1", "--record", "", *QUICK)
    assert kvinterp(*given).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compare-mistral-mini"]
    wrong("folder 'out/compare-mistral-mini' already holds a result", *given)


def test_it_says_what_it_found_and_where_it_is(done: tuple[Path, Result]) -> None:
    out, made = done
    summary = json.loads((out / "summary.json").read_text())
    before, _, after = made.stdout.partition("\n\n")
    assert len(before.splitlines()) <= SAID + 1
    assert max(map(len, before.splitlines())) <= WIDTH
    assert summary["reading"][0] in " ".join(before.split())
    assert after.startswith("page  ")
    assert str(out / "report.html") in made.stdout
    assert f"more  {out}: tables, figures, summary.json" in made.stdout


def test_without_record_the_pattern_is_derived_beside_sdpa_and_it_says_so(tmp_path: Path) -> None:
    run = kvinterp("compare", MODEL, "--prompts", "arithmetic:1", *QUICK, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.stderr
    assert "loading zoo:mistral-mini as native in float16 on cpu" in run.stderr
    assert "pattern is derived beside attention 'sdpa', which runs as it is and shows none" in run.stderr
    assert "Traceback" not in run.stderr
    assert "cached against recompute on zoo:mistral-mini (native, float16, matched; " in run.stdout
    assert not (tmp_path / "out" / "figures").exists(), "nobody asked for files"
    page = (tmp_path / "out" / "report.html").read_text()
    titles = [
        json.loads(gzip.decompress(base64.b64decode(each)))["title"] for each in re.findall(r'data-chart="([^"]+)"', page)
    ]
    assert sum("(derived)" in title for title in titles) == 1
    assert any("K and V by position" in title for title in titles)
    assert "derived beside a fused kernel, which shows no pattern" in page


def test_prompts_from_a_file_and_free_sampling(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "mine", "prompt": "Question: Ben has 3 pens."}\n{"text": "Instruction: Say yes."}\n')
    made = kvinterp(
        "compare", MODEL, "--prompts", file, "--out", tmp_path / "out", *QUICK, "--protocol", "free",
        "--strategy", "top_p(0.9,2.0)", "--a", "cached[chunk=4]", "--b", "recompute@float32", "--record", "",
        "--stop", "length",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["paths"] == {"a": "cached[chunk=4]", "b": "recompute@float32"}
    assert summary["strategy"] == "top_p(0.9,2)"
    examples = pd.read_parquet(tmp_path / "out" / "examples.parquet")
    assert examples["id"].tolist() == ["mine", "line-2"]
    assert pd.read_parquet(tmp_path / "out" / "layers.parquet").empty


# List, version, help ---------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert kvinterp("--version").stdout == f"kvinterp {__version__}\n"
    shown = kvinterp("--help").stdout
    assert all(verb in shown for verb in ("compare", "audit", "list"))


def test_alone_it_prints_the_commands() -> None:
    made = kvinterp()
    assert made.exit_code == 0
    assert made.stdout.strip() == kvinterp("--help").stdout.strip()
    named = re.findall(r"(?m)^│ ([a-z][a-z-]*) ", made.stdout)
    assert len(named) <= 12, "all that one keeps in mind"
    alone = [name for name in experiments() if command_of(name) == (name,)]
    assert {*named} == {*alone, "study", "show", "list"}


def test_studies_are_listed_under_study() -> None:
    made = kvinterp("study")
    assert made.exit_code == 0
    named = re.findall(r"(?m)^│ ([a-z][a-z-]*) ", made.stdout)
    assert {*named} == {name for name in experiments() if command_of(name) == ("study", name)}
    assert CliRunner().invoke(app, ["study", "--help"]).stdout.strip() == made.stdout.strip()


def test_help_says_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = kvinterp("compare", "--help").stdout
    named = set(re.findall(r"(?m)^│ \*?\s*(--[a-z-]+) ", shown))
    assert {"--out", "--prompts", "--a", "--b", "--record", "--seed", "--overwrite", "--json", "--help"} <= named


AT_ONCE = (
    ("patch zoo:gqa2-mini --layer 2", "unknown option '--layer': did you mean '--layers'"),
    ("study mitigate zoo:gqa2-mini --sede 3", "unknown option '--sede'"),
    ("kernels --model zoo:gqa2-mini", "unknown option '--model': it stands without a name, as in 'kvinterp kernels zoo"),
    ("study chain --models zoo:gqa2-mini", "unknown option '--models': it stands without a name"),
    (
        "compare gqa2-mni",
        "model 'gqa2-mni' cannot be found (HF_HUB_OFFLINE is set and no copy of it is in the local cache): "
        "did you mean zoo:gqa2-mini?",
    ),
    ("audit --dtype float32 gpt22", "model 'gpt22' cannot be found"),
    ("compare nobody-here/none", "model 'nobody-here/none' cannot be found"),
    ("study behaviour nobody-here/none", "model 'nobody-here/none' cannot be found"),
    ("study behaviour zoo:nope", "unknown zoo model 'nope'"),
    ("decompose ./nowhere", "model folder './nowhere' does not exist"),
    ("patch zoo:gqa2-mini --kind=nativ", "did you mean 'native'"),
    ("decompose zoo:gqa2-mini --dtype fp99", "unknown dtype 'fp99'"),
    ("audit zoo:gqa2-mini --rungs fp16,fp12", "unknown dtype 'fp12'"),
    ("audit zoo:gqa2-mini --against nowhere.jsonl", "--against 'nowhere.jsonl' does not exist"),
    ("audit zoo:gqa2-mini --format vlm", "unknown format 'vlm'"),
    ("compare zoo:gqa2-mini --b cahced", "path 'cahced' cannot be read"),
    ("compare zoo:gqa2-mini --b cached@float61", "unknown dtype 'float61'"),
    ("compare zoo:gqa2-mini --b cached+int5", "unknown policy 'int5'"),
    ("kernels zoo:gqa2-mini --kernels batch_variant", "unknown kernel mode 'batch_variant'"),
    ("study behaviour zoo:gqa2-mini --strategy top_q(2)", "unknown strategy 'top_q'"),
    ("study kv-error zoo:gqa2-mini --policy int8 --policy int5", "unknown policy 'int5'"),
    ("compare zoo:gqa2-mini --protocol match", "protocol='match' was given: expected 'matched' or 'free'"),
    ("patch zoo:gqa2-mini --batch-size 0", "Invalid value for '--batch-size'"),
    ("compare zoo:gqa2-mini --max-new-tokens few", "Invalid value for '--max-new-tokens'"),
    ("study root-cause zoo:gqa2-mini --prompts nowhere.txt", "prompt file 'nowhere.txt' does not exist"),
)
"""What is wrong with a command, and what is said of it before anything heavy is imported: it took 5 to 29 s."""


HELP = ("", "list", "show", "study", *(" ".join(command_of(name)) for name in experiments()))


def test_lists_help_and_errors_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import json, sys; from kvinterp.cli import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['kvinterp', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as left: assert left.code == (2 if '--out' in line else 0), line\n"
        "    heavy = {'torch', 'transformers', 'transformer_lens', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)"
    )
    errors = [f"{line} --out {tmp_path / 'out'}" for line, _ in AT_ONCE]
    right = ["list", *(f"list {what}" for what in LISTED), *(f"{command} --help" for command in HELP)]
    (tmp_path / "summary.json").write_text("{}")
    errors += [f"compare zoo:gqa2-mini --out {tmp_path}", f"patch zoo:gqa2-mini --out {tmp_path / 'summary.json'}"]
    given = [sys.executable, "-c", code, json.dumps([*right, *errors])]
    made = subprocess.run(given, capture_output=True, text=True, check=False, env=environment())
    assert made.returncode == 0, made.stderr
    said = [*(said for _, said in AT_ONCE), "already holds a result", "cannot be written"]
    for words, error in zip(said, [line for line in made.stderr.splitlines() if line.startswith("error: ")], strict=True):
        assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answers", ["404", "never"])
def test_a_hub_is_asked_once_and_for_no_longer_than_two_seconds(answers: str) -> None:
    asked, left = [], threading.Event()

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            left.wait(60 if answers == "never" else 0)
            self.send_error(404)

        def log_message(self, *given: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        code = (
            "import sys, time; from kvinterp.models import naming\n"
            "begun = time.monotonic()\n"
            "try: naming.check_reached('gqa2-mni')\n"
            "except ValueError as error: print(time.monotonic() - begun, error)\n"
            "assert 'torch' not in sys.modules"
        )
        given = [sys.executable, "-c", code]
        made = subprocess.run(given, capture_output=True, text=True, check=False, env=environment() | place)
        left.set()
        hub.shutdown()
    assert made.returncode == 0, made.stderr
    seconds, _, said = made.stdout.partition(" ")
    assert asked == ["/gqa2-mni/resolve/main/config.json"]
    assert "the hub says" in said if answers == "404" else "cannot be reached" in said
    assert "did you mean zoo:gqa2-mini? Otherwise expected a hub id" in said
    assert answers == "404" or float(seconds) >= HUB_SECONDS, "it was given its time"
    assert float(seconds) < 20


def test_what_is_read_from_a_source_is_what_is_imported() -> None:
    from kvinterp.auditing.programs.names import NAMES as PROGRAMS
    from kvinterp.auditing.programs.names import OPERATIONS
    from kvinterp.common.spec import fields_of, first_line, plugin_rows
    from kvinterp.common.words import unwrapped
    from kvinterp.engines.readers.registry import BINARY, READERS
    from kvinterp.metrics import REGISTRY
    from kvinterp.models import KINDS, SITES
    from kvinterp.paths import KERNELS, STRATEGIES
    from kvinterp.policies import POLICIES

    for name in experiments():
        read, imported = (
            [
                (field.name, field.type, field.default, {**field.metadata.get(OPTION, {}), "only": None, "early": None})
                for field in fields
            ]
            for fields in map(dataclasses.fields, (experiment_read(name), experiment_named(name)))
        )
        assert read == imported, name
        assert experiment_read(name).OVERWRITES == experiment_named(name).OVERWRITES
        assert question_of(name) == unwrapped(sys.modules[experiment_named(name).__module__].__doc__ or "")
    operations = [{"as text": f"rows(...)+{row['name']}(...)", **row} for row in plugin_rows(OPERATIONS)]
    plugins = {
        "strategies": plugin_rows(STRATEGIES),
        "kernels": plugin_rows(KERNELS),
        "calls": [*plugin_rows(PROGRAMS), *operations],
    }
    for what, rows in plugins.items():
        assert LISTED[what]() == rows, what
    for row, (name, kind) in zip(LISTED["policies"](), POLICIES.items(), strict=True):
        bits = [16 if (own := kind().bits_stored(tensor, 128)) is None else own for tensor in ("k", "v")]
        told = (name, str(kind()), fields_of(kind), first_line(kind), f"{sum(bits) * 4:g}", kind.SOURCE)
        assert tuple(row.values()) == told
    metrics = [(row["name"], row["what it is"]) for row in LISTED["metrics"]()]
    assert metrics == [(metric.name, first_line(metric.function)) for metric in REGISTRY.values()]
    assert [row["kind"] for row in LISTED["kinds"]()] == [*KINDS]
    paths = [path_named(row["path"]) for row in LISTED["paths"]()]
    assert {path.form for path in paths} == {*FORMS}
    changed = {
        field.name
        for path in paths
        for field in dataclasses.fields(path)
        if getattr(path, field.name) != getattr(path_named(path.form), field.name)
    }
    assert {*OPTIONS, "policy", "dtype"} <= changed
    assert [row["site"] for row in LISTED["sites"]()][: len(SITES)] == [*SITES]
    check_early(experiment_read("audit"), {"format": BINARY})
    for name in READERS:
        check_early(experiment_read("audit"), {"format": name})
    for given in (
        {"calls": ",".join(map(str, [*PROGRAMS, "rows(0+4)+feed(9)+crop(2)", "padded(left,5)+static"]))},
        {"device": "cuda:1"},
    ):
        check_early(experiment_read("audit"), given)
    for given in ({"calls": "padded(left,5),paded"}, {"calls": "rows(0)+fed(9)"}, {"device": "cupu"}, {"device": "cuda:x"}):
        with pytest.raises(kv.InputError, match="unknown"):
            check_early(experiment_read("audit"), given)


def test_what_is_planted_by_tests_is_no_policy_to_choose() -> None:
    assert "planted" not in kvinterp("list", "policies").stdout
    with pytest.raises(kv.InputError, match="unknown policy 'planted'"):
        kv.path_named("cached+planted(1)")


# Bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("zoo:mistral-mni",), "unknown zoo model 'mistral-mni': did you mean 'mistral-mini'"),
        ((MODEL, "--prompts", "aritmetic:3"), "unknown prompt generator 'aritmetic': did you mean 'arithmetic'"),
        ((MODEL, "--prompts", "nowhere.jsonl"), "prompt file 'nowhere.jsonl' does not exist"),
        ((MODEL, "--protocol", "match"), "protocol='match' was given: expected 'matched' or 'free'"),
        ((MODEL, "--layers", "0,two"), "'--layers': '0,two' cannot be read: expected whole numbers"),
        ((MODEL, "--layers", "9"), "layer 9 does not exist: zoo:mistral-mini has layers 0 to 3"),
        ((MODEL, "--device", "gpu9"), "unknown device 'gpu9'"),
        ((MODEL, "--max-new-tokens", "2000"), "more than the context of zoo:mistral-mini, 1024 positions"),
        ((MODEL, "--record", "attn_scores"), "site 'attn_scores' cannot be compared"),
    ],
)
def test_bad_choices_are_one_sentence_and_leave_nothing_behind(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    given = dict(zip(options[1::2], options[2::2], strict=True))
    rest = [part for pair in {"--prompts": "arithmetic:1", "--device": "cpu", **given}.items() for part in pair]
    wrong(said, "compare", options[0], *rest, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_result_is_in_the_way(done: tuple[Path, Result]) -> None:
    wrong(
        "already holds a result: choose another folder with --out, or pass --overwrite", "compare", MODEL, "--out", done[0]
    )


def test_usage_errors_leave_with_2() -> None:
    assert kvinterp("compare").exit_code == 2
    assert kvinterp("compare", MODEL, "--no-such").exit_code == 2
    assert kvinterp("list", "nothing").exit_code == 2
    assert kvinterp("comapre").exit_code == 2


def test_failed_prompts_are_named_and_all_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.models.native import NativeAdapter

    forward = NativeAdapter.forward
    monkeypatch.setattr(NativeAdapter, "forward", lambda *given: forward(*given) * torch.nan)
    made = kvinterp("compare", MODEL, "--prompts", "arithmetic:2", *QUICK, "--out", tmp_path)
    assert made.exit_code == 2
    assert "prompt arithmetic-0-0 is left out: path cached: NaN first appeared in the logits at step 0" in made.stderr
    assert "error: none of the 2 prompts could be compared" in made.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["counts"]["failed"] == 2


# Interrupted -----------------------------------------------------------------------------------------------------------

READING = """
import os, signal, sys
import kvinterp.cli as cli
cli.experiment_named = lambda name: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["kvinterp", "compare", "zoo:gqa2-mini", "--out", "out"]
cli.main()
"""


def test_interrupted_while_the_options_are_read_nothing_was_begun() -> None:
    """It left with 1 and "Aborted!", which an audit's caller reads as a bug that was found."""
    process = started(READING)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted: nothing was begun.")


@pytest.mark.parametrize(("asked", "lines"), [("compare --help", 0), ("study kv-error --help", 70)])
def test_what_is_read_no_further_is_no_error(asked: str, lines: int) -> None:
    """`kvinterp compare --help | head` ended with an error and exit code 2, and later `... kv-error --help | head -70`."""
    command = [sys.executable, "-m", "kvinterp", *asked.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


class _Left(io.StringIO):
    """A pipe whose reader leaves after some writes."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.number = after, os.open(os.devnull, os.O_WRONLY)

    def fileno(self) -> int:
        return self.number

    def write(self, text: str) -> int:
        self.after -= 1
        if self.after < 0:
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.parametrize(
    "arguments", [["--help"], *([*command_of(name), "--help"] for name in experiments())], ids=" ".join
)
@pytest.mark.parametrize("after", [0, 3])
def test_every_command_is_quiet_when_its_reader_leaves(
    arguments: list[str], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = io.StringIO()
    monkeypatch.setattr(sys, "stdout", _Left(after))
    monkeypatch.setattr(sys, "stderr", error)
    with pytest.raises(SystemExit) as left:
        typer.main.get_command(app).main(arguments)
    assert (left.value.code, error.getvalue()) == (0, "")


THREE = (
    *("compare", MODEL, "--prompts", "arithmetic:3", *QUICK, "--strategy", "top_p(0.99,3.0)", "--stop", "length"),
    *("--layers", "0"),
)
"""Three prompts; what cuts it off leaves one."""


def test_interrupted_after_one_prompt_it_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it goes on from there is tests/core/commands/test_compare.py's, and every verb's with a real signal."""
    from kvinterp.common.store import CellStore

    keep = CellStore.keep

    def interrupted(self: CellStore, *part: Any) -> None:
        keep(self, *part)
        raise KeyboardInterrupt

    monkeypatch.setattr(CellStore, "keep", interrupted)
    made = kvinterp(*THREE, "--out", tmp_path)
    _says_what_is_there(tmp_path, made.exit_code, made.stderr)
    made = kvinterp("show", tmp_path, "--rewrite", "--no-open")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("This run was interrupted: only what was finished by then is in it.")


def _says_what_is_there(cut: Path, code: int, said: str) -> None:
    assert code == 130, said
    assert "interrupted: what was finished is on disk" in said
    assert "Traceback" not in said
    summary = json.loads((cut / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["counts"] == {"examples": 1, "steps": 3, "failed": 0, "planned": 3}
    assert pd.read_parquet(cut / "steps.parquet")["example"].unique().tolist() == [0]
