"""Holds two trees of kvinterp against each other: the same commands, the same tables, byte for byte once sorted.

    python tools/bits.py write FOLDER [--models zoo:gqa2-mini ...] [--kinds native hooked] [--verbs compare ...]
    python tools/bits.py hold BEFORE AFTER

``write`` runs every verb of the tree that is importable (PYTHONPATH chooses it) and keeps what it wrote; ``hold`` says which
tables, verdicts and readings differ. Run both on one machine, with one number of threads: other machines have other bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

MODELS = ("zoo:llama-mini", "zoo:gqa2-mini", "zoo:mistral-mini")
KINDS = ("native", "hooked")
VERBS: dict[str, list[str]] = {
    "compare": ["--prompts", "arithmetic:3", "--max-new-tokens", "12", "--record", "resid_post,attn_out,pattern,kv"],
    "free": ["--prompts", "arithmetic:3", "--max-new-tokens", "12", "--protocol", "free", "--strategy", "top_p(0.95,0.8)"],
    "split": ["--prompts", "arithmetic:2", "--max-new-tokens", "8", "--a", "cached[kernels=split_k(4,float16)]"],
    "patch": ["--prompts", "arithmetic:2", "--max-new-tokens", "6", "--site", "kv", "--sweep", "single,heads,blocks"],
    "stream": ["--prompts", "arithmetic:2", "--max-new-tokens", "6", "--preset", "paper"],
    "decompose": ["--prompts", "arithmetic:2", "--max-new-tokens", "6"],
    "root-cause": ["--prompts", "arithmetic:2", "--ladder-prompts", "1",
                   "--ladder-steps", "3"],
    "audit": [],
}  # fmt: skip
COMMANDS = {"free": ["compare"], "split": ["compare"], "stream": ["patch"], "root-cause": ["study", "root-cause"]}
"""The command of a verb that does not bear its name."""
MOVING = ("provenance", "seconds", "kvinterp", "when", "made", "finished", "started", "work",
          "about", "files", "sha256")  # fmt: skip
"""Keys of a summary that name the tree, its files or the clock."""


def main() -> None:
    """Writes or holds, and leaves with 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    verbs = parser.add_subparsers(dest="what", required=True)
    write = verbs.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--models", nargs="+", default=MODELS)
    write.add_argument("--kinds", nargs="+", default=KINDS)
    write.add_argument("--verbs", nargs="+", default=list(VERBS), choices=list(VERBS))
    hold = verbs.add_parser("hold")
    hold.add_argument("before", type=Path)
    hold.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.what == "write":
        written(given.folder, given.models, given.kinds, given.verbs)
    else:
        sys.exit(held(given.before, given.after))


def written(folder: Path, models: list[str], kinds: list[str], verbs: list[str]) -> None:
    """Runs the verbs on the models and kinds, each into a folder of its own."""
    for model in models:
        for kind in kinds:
            for verb in verbs:
                out = folder / model.replace(":", "-") / kind / verb
                command = [
                    *COMMANDS.get(verb, [verb]),
                    model,
                    "--kind",
                    kind,
                    "--out",
                    str(out),
                    "--overwrite",
                    *VERBS[verb],
                ]
                call = "import sys; from kvinterp.cli import main; sys.argv[0] = 'kvinterp'; main()"
                done = subprocess.run([sys.executable, "-c", call, *command], capture_output=True, text=True, check=False)
                out.mkdir(parents=True, exist_ok=True)
                # Paths of this folder are no part of what is said.
                said = (done.stdout + (done.stderr if done.returncode == 2 else "")).replace(str(out), "OUT")
                (out / "said.txt").write_text(f"exit code {done.returncode}\n{said}")
                print(f"{model} {kind} {verb}: exit code {done.returncode}", flush=True)


def held(before: Path, after: Path) -> int:
    """Says what differs between two folders; 1 where anything does, or where there is nothing to compare."""
    names = [sorted(path.relative_to(at).as_posix() for path in at.rglob("*") if kept(path)) for at in (before, after)]
    ran = [{name.rsplit("/", 1)[0] for name in each} for each in names]
    for run in sorted(ran[0] ^ ran[1]):
        print(f"  {run}: run in one tree only, not compared")
    names = [[name for name in each if name.rsplit("/", 1)[0] in ran[0] & ran[1]] for each in names]
    differing = [f"{name}: only in one" for name in sorted(set(names[0]) ^ set(names[1]))]
    both = sorted(set(names[0]) & set(names[1]))
    rows = 0
    for name in both:
        one, other = before / name, after / name
        if name.endswith(".parquet"):
            tables = [ordered(pd.read_parquet(path)) for path in (one, other)]
            rows += len(tables[0])
            columns = [set(table.columns) for table in tables]
            same = columns[0] == columns[1] and tables[0].equals(tables[1][list(tables[0].columns)])
        else:
            same = plain(one) == plain(other)
        if not same:
            differing.append(name)
    print(f"{len(both)} files, {rows} rows of tables: {len(differing)} differ")
    for name in differing:
        print(f"  {name}")
    return int(bool(differing) or not both)


def kept(path: Path) -> bool:
    """Whether it is a table, a summary, a verdict or what was said."""
    hidden = any(part.startswith(".") for part in path.parts)
    return path.is_file() and not hidden and path.suffix in (".parquet", ".json", ".txt", ".xml", ".csv")


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    """A table's rows in an order of their own, its columns by name."""
    table = table[sorted(table.columns)].astype({c: str for c in table.columns if table[c].dtype == object})
    return table.sort_values(list(table.columns), ignore_index=True) if len(table.columns) else table


def plain(path: Path) -> object:
    """What a file says, without the tree and the clock."""
    text = path.read_text()
    if path.suffix == ".json":
        return without(json.loads(text))
    lines = [line for line in text.splitlines() if not any(word in line for word in ("seconds", " s)", "time=", " ms"))]
    return [line.split(" in ")[0] if line.endswith(" s") else line for line in lines]


def without(value: object) -> object:
    """A JSON value without what names the tree or the clock."""
    if isinstance(value, dict):
        return {key: without(each) for key, each in value.items() if key not in MOVING}
    return [without(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
