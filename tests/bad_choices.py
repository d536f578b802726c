"""Command lines whose choices are bad: an option, several together, what surrounds them, where the answer goes, how much."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from bad_arguments import TEXTS
from bad_files import Results
from right_commands import MODEL, RIGHT, Case, options_of, with_option

# Options ---------------------------------------------------------------------------------------------------------------

ANY = {
    *("out", "prompts", "texts", "text", "instructions", "problems", "strings", "template", "system", "examples"),
    *("layers", "record", "batch_size", "overwrite", "allow", "seed", "policy", "kernels", "attention", "more", "answer"),
}
"""Fields of which a text that is drawn may be right; of all others none is, but for a number where numbers are asked for."""


def _is_number(text: str) -> bool:
    if "," in text:
        return all(map(_is_number, text.split(",")))
    return text.strip().lstrip("+-").replace("_", "").isdecimal() or text in ("1.5", "1e5")


def of_options(chosen: random.Random) -> Case:
    """One option of one command is given a text."""
    verb = chosen.choice(sorted(RIGHT))
    options = options_of(verb)
    field = chosen.choice(sorted(options))
    flag, hint = options[field]
    text = chosen.choice(TEXTS)
    judged = "any" if field in ANY or _is_number(text) else "refused"
    if hint in (int, int | None) and field != "batch_size" and text in ("1" + "0" * 25, "18446744073709551616"):
        judged = "refused"
    return Case([verb, *with_option(RIGHT[verb], flag, text)], judged)


# Streams, environment ----------------------------------------------------------------------------------------------------

STREAMS = ["stdout=full", "stdout=closed", "stdout=pipe", "stderr=full", "stderr=closed", "stderr=pipe"]
LINES: dict[str, tuple[list[str], int]] = {
    "list": (["list"], 0),
    "list models": (["list", "models"], 0),
    "list --json": (["list", "--json"], 0),
    "--version": (["--version"], 0),
    "--help": (["--help"], 0),
    "compare --help": (["compare", "--help"], 0),
    "compare": (["compare", *RIGHT["compare"]], 0),
    "compare --json": (["compare", *RIGHT["compare"], "--json"], 0),
    "audit": (["audit", *RIGHT["audit"]], 0),
    "audit --json": (["audit", *RIGHT["audit"], "--json"], 0),
    "kernels": (["kernels", *RIGHT["kernels"]], 0),
    "show": (["show", "out", "--no-open"], 0),
    "show --json": (["show", "out", "--no-open", "--json"], 0),
    "report": (["report", "out"], 0),
    "wrong option": (["compare", MODEL, "--nosuch"], 2),
    "wrong option --json": (["compare", MODEL, "--nosuch", "--json"], 2),
    "wrong value": (["compare", *RIGHT["compare"], "--dtype", "x"], 2),
    "wrong value --json": (["compare", *RIGHT["compare"], "--dtype", "x", "--json"], 2),
}


def of_streams(chosen: random.Random, results: Results) -> Case:
    """Standard output or error takes nothing. What could not be said is no answer: an exit code of 0 needs one that arrived."""
    name = chosen.choice(sorted(LINES))
    arguments, code = LINES[name]
    streams = chosen.choice(STREAMS)
    source = results.folder("compare") / "out" if arguments[0] in ("show", "report") else None
    # A reader that leaves, as head does, has what it asked for; so says the shell's 141 too. Who closes the output asks for none.
    codes = {"stdout=full": (2,), "stdout=closed": (0, 2), "stdout=pipe": (0, 2, 141, -13)}.get(streams, (0, 2))
    codes = (2,) if code == 2 else codes
    if "--json" in arguments and streams == "stdout=closed":
        codes = (2,)

    def prepare(folder: Path) -> None:
        if source is not None:
            shutil.copytree(source, folder / "out")

    return Case(arguments, "streams", prepare, {"BROWSER": "true"}, streams, codes, shown=streams)


ENVIRONMENT: list[dict[str, str | None]] = [
    {"MPLBACKEND": "nosuch"},
    {"MPLBACKEND": "tkagg"},
    {"MPLBACKEND": "module://nosuch"},
    {"MPLCONFIGDIR": "/dev/null"},
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONOPTIMIZE": "1"},
    {"HOME": None},
    {"HOME": "/nonexistent"},
    {"HOME": "/dev/null"},
    {"HOME": ""},
    {"TMPDIR": "/nonexistent"},
    {"TMPDIR": "/dev/null"},
    {"LANG": "C", "LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "POSIX", "PYTHONUTF8": "0"},
    {"COLUMNS": "1"},
    {"COLUMNS": "0"},
    {"COLUMNS": "-5"},
    {"COLUMNS": "x"},
    {"COLUMNS": "1" + "0" * 12},
    {"TERM": "nosuch"},
    {"TERM": "dumb", "FORCE_COLOR": "1"},
    {"OMP_NUM_THREADS": "x"},
    {"OMP_NUM_THREADS": "0"},
    {"OMP_NUM_THREADS": "-1"},
    {"OMP_NUM_THREADS": "1,1"},
    {"KVINTERP_THREADS": "x"},
    {"HF_HUB_OFFLINE": "2"},
    {"HF_HUB_OFFLINE": "x"},
    {"HF_HUB_OFFLINE": ""},
    {"HF_HOME": "/dev/null"},
    {"HF_HOME": ""},
    {"HF_ENDPOINT": "x"},
    {"XDG_CACHE_HOME": "/dev/null"},
    {"TRANSFORMERS_VERBOSITY": "nosuch"},
    {"TOKENIZERS_PARALLELISM": "x"},
    {"CUDA_VISIBLE_DEVICES": "x"},
    {"SOURCE_DATE_EPOCH": "x"},
    {"SOURCE_DATE_EPOCH": "9" * 30},
    {"TZ": "nosuch"},
    {"RAY_ADDRESS": "nosuch:1"},
    {"PYTHONHASHSEED": "3"},
    {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": "/dev/null"},
    {"NO_COLOR": "1", "CLICOLOR_FORCE": "1"},
    {"USER": None, "LOGNAME": None},
    {"PATH": ""},
    {"TQDM_DISABLE": "x"},
    {"TQDM_MININTERVAL": "x"},
    {"PYTHONWARNINGS": "nosuch"},
]
"""What may surround a command. None bears on the answer, so the answer is there; or a sentence says what to mend."""


def of_environment(chosen: random.Random, number: int) -> Case:
    """A variable is odd."""
    environment = ENVIRONMENT[number % len(ENVIRONMENT)]
    name = chosen.choice(["compare", "compare", "list", "wrong value"])
    if any(each.startswith(("MPL", "SOURCE", "PYTHONO", "OMP", "TMP", "KV")) for each in environment):
        name = "compare"
    arguments, _ = LINES[name]
    judged = {"compare": "same", "wrong value": "refused"}.get(name, "any")
    return Case(arguments, judged, environment=environment, shown=f"{environment}")


# Choices that do not go together, and what would take for ever ----------------------------------------------------------------

CONTRADICTIONS: list[list[str]] = [
    ["audit", MODEL, "--config", "config.json", "--out", "out"],
    ["audit", MODEL, "--class", "torch.nn:Linear", "--out", "out"],
    ["audit", *RIGHT["audit"], "--thorough"],
    ["audit", "--random-init", "--out", "out"],
    ["audit", *RIGHT["audit"], "--allow", "nosuch"],
    ["compare", *RIGHT["compare"], "--layers", "0"],
    ["compare", *RIGHT["compare"], "--kind", "hooked", "--attention", "eager"],
    ["compare", *RIGHT["compare"], "--kind", "bridge", "--attention", "nosuch"],
    ["compare", *RIGHT["compare"], "--a", "cached[cache=static]+sinks(2,8)"],
    ["compare", *RIGHT["compare"], "--a", "cached@float64[cache=float16,cache=float32]"],
    *[
        ["compare", *RIGHT["compare"], "--a", f"{form}[call={call}]"]
        for form, call in (
            *[("cached", each) for each in ("", "nosuch", "padded(up,5)", "padded(left,0)", "padded(left,5", "batched(1)")],
            *[("cached", each) for each in ("padded(left,1000000000)", "batched(1000000)", "beams(99999)", "forked(9999)")],
            *[("cached", each) for each in ("os.system(1)", "verified(2),refresh=2", "forked(2),cache=static", "\x1b[31m")],
            *[("recompute", each) for each in ("beams(2)", "generate")],
        )
    ],
    *[
        ["audit", *with_option(RIGHT["audit"], "--checks", "default"), "--calls", each]
        for each in ("nosuch", "all,all", ",", "beams(1000000)")
    ],
    ["chain", *RIGHT["chain"], "--text", "a b c"],
    ["chain", *RIGHT["chain"], "--template", "no place"],
    ["patch", *RIGHT["patch"], "--preset", "nosuch"],
    ["patch", *RIGHT["patch"], "--preset", "paper", "--site", "kv", "--sweep", "nosuch"],
    ["patch", *RIGHT["patch"], "--answer", "a"],
    ["patch", *RIGHT["patch"], "--steps", "99"],
    ["kernels", *RIGHT["kernels"], "--sizes", ""],
    ["layer-drift", *RIGHT["layer-drift"], "--step", "30"],
    ["layer-drift", *RIGHT["layer-drift"], "--contrast", "layer 99"],
    ["localisation", *RIGHT["localisation"], "--part", "residual", "--part", "nosuch"],
    ["kv-error", *RIGHT["kv-error"], "--design", "grid", "--policy", "int8"],
    ["susceptibility", *RIGHT["susceptibility"], "--sizes", "-1"],
    ["susceptibility", *RIGHT["susceptibility"], "--noise", "nosuch"],
    ["mitigate", *RIGHT["mitigate"], "--path", "recompute+int8"],
    ["root-cause", *RIGHT["root-cause"], "--seeds", "2", "--prompts", "a b c"],
    ["list", "models", "kinds"],
    ["show", "out", "--rewrite"],
]
"""Lines in which a choice is unknown, has no meaning beside another, or would not be used: run, it would be printed as if."""


def of_choices(chosen: random.Random, number: int) -> Case:
    """Choices of which one is of another command, or does not go with another."""
    if number < len(CONTRADICTIONS):
        return Case(CONTRADICTIONS[number], "refused")
    verb, other = chosen.choice(sorted(RIGHT)), chosen.choice(sorted(RIGHT))
    mine = {flag for flag, _ in options_of(verb).values()}
    foreign = sorted((flag, field) for field, (flag, _) in options_of(other).items() if flag and flag not in mine)
    if not foreign:
        return Case([verb, *RIGHT[verb], "--nosuch", "1"], "refused")
    flag, _ = chosen.choice(foreign)
    return Case([verb, *RIGHT[verb], flag, "1"], "refused")


def of_cost(chosen: random.Random, number: int) -> Case:
    """What would take for ever, or all memory, is refused before it begins."""
    lines = COSTS[number % len(COSTS)] if number < len(COSTS) else None
    if lines is not None:
        arguments, prepare = lines
        return Case(arguments(), "refused", prepare, shown=f"cost {number}: {' '.join(arguments())[:80]}")
    counted = [
        (verb, flag)
        for verb in sorted(RIGHT)
        for field, (flag, hint) in options_of(verb).items()
        if hint in (int, int | None)
        and field
        not in ("batch_size", "seed", "block", "controls", "divergent", "count", "most", "examples", "above", "bins")
        and not field.endswith("_prompts")
    ]
    verb, flag = counted[number % len(counted)]
    huge = chosen.choice([10**23, 10**12, 10**9])
    return Case([verb, *with_option(RIGHT[verb], flag, str(huge))], "refused")


def _prompts(verb: str, text: str, flag: str = "--prompts") -> Callable[[], list[str]]:
    return lambda: [verb, *with_option(RIGHT[verb], flag, text)]


def _file(name: str, write: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: write(folder / name)


def _nothing(folder: Path) -> None:
    pass


MANY = 10**6
COSTS: list[tuple[Callable[[], list[str]], Callable[[Path], None]]] = [
    *[
        (_prompts(verb, "p.txt"), _file("p.txt", lambda place: place.write_text("word " * (MANY // 5)) and None))
        for verb in ("compare", "behaviour", "patch", "decompose")
    ],
    (
        _prompts("compare", "p.jsonl"),
        _file("p.jsonl", lambda place: place.write_text(json.dumps({"prompt": "word " * (MANY // 5)})) and None),
    ),
    (
        _prompts("compare", "p.jsonl"),
        _file("p.jsonl", lambda place: place.write_text(json.dumps({"prompt": "a b", "id": "x" * MANY})) and None),
    ),
    (_prompts("compare", "p.txt"), _file("p.txt", lambda place: place.write_text("a\n" * (MANY // 20)) and None)),
    (_prompts("chain", "p.txt", "--texts"), _file("p.txt", lambda place: place.write_text("word " * (MANY // 5)) and None)),
    (_prompts("compare", "word " * (MANY // 5)), _nothing),
    (_prompts("compare", "x" * MANY), _nothing),
    (_prompts("compare", "x" * MANY, "--a"), _nothing),
    (_prompts("compare", "cached+" + "int8+" * 10**6 + "int8", "--a"), _nothing),
    (_prompts("compare", "cached[" + "chunk=4," * 10**6 + "]", "--a"), _nothing),
    (_prompts("compare", "(" * 10**6, "--a"), _nothing),
    (_prompts("compare", "x" * MANY, "--strategy"), _nothing),
    (_prompts("compare", "x" * MANY, "--dtype"), _nothing),
    (_prompts("compare", "x" * MANY, "--record"), _nothing),
    (_prompts("compare", "0," * 10**7 + "0", "--layers"), _nothing),
    (_prompts("compare", "x" * 10**7, "--out"), _nothing),
    (_prompts("compare", "x" * MANY, ""), _nothing),
    (_prompts("mitigate", "x" * MANY, "--path"), _nothing),
    (
        lambda: [
            "mitigate",
            *RIGHT["mitigate"],
            *itertools.chain.from_iterable(("--path", f"cached[refresh={n}]") for n in range(1, 30_000)),
        ],
        _nothing,
    ),
    (
        lambda: [
            "equivalent-noise",
            *RIGHT["equivalent-noise"],
            *itertools.chain.from_iterable(("--policy", f"normal(0,{n})") for n in range(1, 30_000)),
        ],
        _nothing,
    ),
    (lambda: ["behaviour", *itertools.repeat(MODEL, 60_000), *RIGHT["behaviour"][1:]], _nothing),
    (_prompts("chain", ",".join(map(str, range(10**6))), "--temperatures"), _nothing),
    (_prompts("susceptibility", ",".join(map(str, range(1, 10**6))), "--sizes"), _nothing),
    (_prompts("kernels", ",".join(map(str, range(1, 10**6))), "--sizes"), _nothing),
    (_prompts("kernels", "1" + "0" * 12, "--sizes"), _nothing),
    (_prompts("audit", "1" + "0" * 12, "--lengths"), _nothing),
    *[
        (_prompts(verb, text, flag), _nothing)
        for verb, flag in (
            ("compare", "--prompts"),
            ("behaviour", "--prompts"),
            ("kv-error", "--problems"),
        )
        for text in (
            "arithmetic:1" + "0" * 12,
            "arithmetic:1000000",
            "arithmetic(1000000,shots=1000)",
            "restate:1" + "0" * 23,
        )
    ],
    (_prompts("compare", "arithmetic:2:1" + "0" * 23), _nothing),
    (_prompts("kv-error", "instructions:1" + "0" * 12, "--instructions"), _nothing),
    (_prompts("chain", "restate:1" + "0" * 12, "--texts"), _nothing),
]
"""Lines whose cost is not in a count: texts of a megabyte, and lists as long as a command line takes."""
