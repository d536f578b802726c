"""What a reader of activations sees of the run that wrote a text, beside its recomputation: a law over models, dtypes and caches.

    python benchmarks/which_run.py [--sae out/sae] [--only zoo smollm2 random caches] [--texts 6] [--new 24]

Every setting is one call of ``kv.which_run``: the model's own ``generate`` (or a path with a smaller cache) on matched tokens, held
against one forward over the finished text, and beside it a null: that forward with as many tokens more behind the text. A line a
setting is added to the file of rows as it is made, and what is there is not made again. The tables and the picture are made of it.
Shares are means over texts with 95% intervals, a text counting once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "auditing"))

import architectures  # noqa: E402

import kvinterp as kv  # noqa: E402
from kvinterp import metrics  # noqa: E402
from kvinterp.models.provenance import machine  # noqa: E402

DTYPES = ("float16", "bfloat16")
ZOO = ("gqa2-mini", "gemma2-mini", "llama-mini", "llama64-mini", "mistral-mini", "moe-mini", "mqa-mini")
RANDOM = (
    "llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi", "olmo2", "falcon", "mixtral",
)  # fmt: skip
CACHES = ("cached+int8", "cached+int4", "cached+sinks(4,24)")
SMOLLM2 = "real:smollm2-135m"
BLOCKS = {"first third": 0, "second third": 1, "last third": 2}

Row = dict[str, Any]


def settings(only: list[str]) -> Iterator[tuple[str, str, str, str, str]]:
    """Group, model, dtype, run and prompts of each setting."""
    for dtype in reversed(DTYPES):
        if "zoo" in only:
            yield from (("zoo", f"zoo:{name}", dtype, "generate", "arithmetic") for name in ZOO)
        if "random" in only:
            yield from (("random", f"random {name}", dtype, "generate", "tokens") for name in RANDOM)
        if "smollm2" in only:
            yield "SmolLM2", SMOLLM2, dtype, "generate", "natural"
    if "caches" in only:
        yield from (("SmolLM2", SMOLLM2, "bfloat16", run, "natural") for run in CACHES)
        yield from (("zoo", "zoo:gqa2-mini", "bfloat16", run, "arithmetic") for run in CACHES)
    if "smollm2" in only:
        yield from (("SmolLM2", SMOLLM2, dtype, "generate", "natural, long") for dtype in reversed(DTYPES))


def model_of(name: str, dtype: str) -> Any:
    """The model."""
    if name.startswith("random "):
        return kv.wrap(architectures.build(name.removeprefix("random ")).to(getattr(torch, dtype)), name=name)
    return kv.load_model(name, dtype=dtype, device="cpu")


def prompts_of(kind: str, count: int) -> list[Any]:
    """So many prompts."""
    if kind == "tokens":
        draw = torch.Generator().manual_seed(0)
        return torch.randint(3, 131, (count, 40), generator=draw).tolist()
    if kind == "natural, long":
        texts = [prompt.text for prompt in kv.load_prompts(f"natural:{4 * count}")]
        return [" ".join(texts[at : at + 4]) for at in range(0, 4 * count, 4)]
    return list(kv.load_prompts(f"{kind}:{count}"))


def measured(found: kv.WhichRun, layers: int) -> list[Row]:
    """The shares of each readout by part of the text and by layer, and the distances."""
    tables = [
        found.readouts,
        found.distances.query("site == 'resid_post'").assign(
            readout="distance", changed=lambda table: table["relative_l2"]
        ),
    ]
    rows = []
    for table in tables:
        table = table.assign(block=(table["layer"] * 3 // layers).clip(upper=2))
        for (readout, part), whole in table.groupby(["readout", "part"], sort=False):
            pieces = [("all", whole), *((name, whole[whole["block"] == at]) for name, at in BLOCKS.items())]
            middle = whole.groupby("example")["position"].transform("median")
            pieces += [
                ("first half", whole[whole["position"] <= middle]),
                ("second half", whole[whole["position"] > middle]),
            ]
            for over, piece in pieces:
                if piece.empty:
                    continue
                row = {"readout": readout, "part": part, "over": over, "rows": len(piece), "n": piece["example"].nunique()}
                excess = piece.assign(excess=piece["changed"] - piece["null"])
                for name in ("changed", "null", "excess"):
                    test = metrics.mean_of(excess[name], excess["example"])
                    row |= {name: test.effect, f"{name}_low": test.low, f"{name}_high": test.high}
                rows.append(row)
    return rows


def measure(given: argparse.Namespace) -> pd.DataFrame:
    """Measures what is not kept yet."""
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in given.rows.read_text().splitlines()] if given.rows.exists() else []
    done = {tuple(line["setting"]) for line in lines}
    for setting in settings(given.only):
        if setting in done:
            continue
        _, name, dtype, run, kind = setting
        model = model_of(name, dtype)
        features = {sae.hook_point: sae for sae in map(kv.load_sae, given.sae)} if name == SMOLLM2 else None
        how = {"features": features, "max_new_tokens": given.new, "run": run}
        try:
            found = kv.which_run(model, prompts_of(kind, given.texts), **how)
        except kv.InputError as error:
            print(f"{setting}: {error}", file=sys.stderr)
            continue
        line = {"setting": setting, "rows": measured(found, model.facts.layers), "machine": machine(torch.device("cpu"))}
        lines.append(line)
        with given.rows.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print("measured", *setting, flush=True)
    keys = ["group", "model", "dtype", "run", "prompts"]
    return pd.DataFrame(
        [{**dict(zip(keys, line["setting"], strict=True)), **row} for line in lines for row in line["rows"]]
    )


def share(row: Any, name: str) -> str:
    """A share in percent with its interval."""
    middle, low, high = (100 * row[key] for key in (name, f"{name}_low", f"{name}_high"))
    return f"{middle:.2g}" if low != low else f"{middle:.2g} ({low:.2g} to {high:.2g})"


def table_of(rows: pd.DataFrame, part: str = "generated", over: str = "all") -> str:
    """Markdown: a line a setting, a column a readout, each share beside its null."""
    names = ["feature that fires", "top 32 neurons", "argmax of a head", "sign of a random probe"]
    lines = ["| model, dtype, run | n | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    chosen = rows[(rows["part"] == part) & (rows["over"] == over)]
    for (model, dtype, run, prompts), table in chosen.groupby(["model", "dtype", "run", "prompts"], sort=False):
        by_name = {row["readout"]: row for _, row in table.iterrows()}
        cells = [
            f"{share(by_name[name], 'changed')}; {100 * by_name[name]['null']:.2g}" if name in by_name else ""
            for name in names
        ]
        what = f"{model}, {dtype}" + ("" if run == "generate" else f", `{run}`") + ", long" * prompts.endswith("long")
        lines.append(f"| {what} | {table['n'].max()} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: pd.DataFrame, here: dict[str, Any], picture: Path) -> None:
    """A panel a readout, a line a setting's dtype: the share at generated positions, with its interval, and the null."""
    from kvinterp.common.files import write_whole
    from kvinterp.report.style import line_of, png, sheet, sign

    chosen = rows[(rows["part"] == "generated") & (rows["over"] == "all") & (rows["readout"] != "distance")]
    chosen = chosen.assign(name=chosen["model"].str.replace("real:|zoo:", "", regex=True) + chosen["run"].map(
        lambda run: "" if run == "generate" else " " + run.removeprefix("cached")) + chosen["prompts"].map(
        lambda kind: ", long" if kind.endswith("long") else ""))  # fmt: skip
    names, readouts = list(dict.fromkeys(chosen["name"])), list(dict.fromkeys(chosen["readout"]))
    with sheet(10, 1.2 + 0.2 * len(names)) as figure:
        panels = figure.subplots(1, len(readouts), sharey=True)
        for panel, readout in zip(panels.flat, readouts, strict=True):
            for at, dtype in enumerate(DTYPES):
                table = chosen[(chosen["readout"] == readout) & (chosen["dtype"] == dtype)]
                height = [names.index(name) + 0.3 * at - 0.15 for name in table["name"]]
                style = line_of(at) | {"linestyle": "none"}
                panel.plot(100 * table["changed"], height, label=dtype, **style)
                panel.hlines(
                    height, 100 * table["changed_low"], 100 * table["changed_high"], color=style.get("color"), lw=1
                )
                panel.plot(100 * table["null"], height, "|", color="0.35", markersize=8, label="null" if at else None)
            panel.set_xscale("symlog", linthresh=0.01)
            panel.set(xlabel="% that differs", title=readout)
            panel.set_xlim(0, 110)
            panel.set_xticks([0, 0.1, 10], ["0", "0.1", "10"])
            panel.minorticks_off()
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        sign(figure, f"{here['device']}; the run that wrote the text against its recomputation", [here])
        write_whole(picture, png(figure))


def distance(text: kv.Generation, adapter: Any) -> float:
    """How far the residual streams of a text's generated positions are from those of one forward over the finished text: relative L2,
    the mean over positions and layers.
    """
    with kv.record(adapter, "resid_post", positions="all") as clean, torch.no_grad():
        adapter.forward(torch.tensor([text.text[: len(text.positions)]]))
    written, layers = slice(len(text.prompt), len(text.positions)), range(adapter.facts.layers)
    pairs = [(text["resid_post", n][written].double(), clean["resid_post", n][0, written].double()) for n in layers]
    return float(torch.stack([((one - other).norm(dim=-1) / other.norm(dim=-1)).mean() for one, other in pairs]).mean())


def separate(count: int, new: int) -> str:
    """Markdown: what a generation without a cache, whose forwards have other numbers of rows, has of that distance; tokens that differ are
    counted.
    """
    lines = [
        "| model | cached | without a cache, rows as they were written | the cache's share | texts with other tokens |",
        "|---|---|---|---|---|",
    ]
    for name in ZOO:
        adapter, found = kv.load_model(f"zoo:{name}", dtype="bfloat16", device="cpu"), []
        for prompt in prompts_of("arithmetic", count):
            both = [
                kv.generated(adapter, prompt, "resid_post", max_new_tokens=new, use_cache=how)[0] for how in (True, False)
            ]
            found.append((*(distance(text, adapter) for text in both), both[0].tokens != both[1].tokens))
        table = pd.DataFrame(found, columns=["cached", "uncached", "other"])
        table["share"] = table["cached"] - table["uncached"]
        tests = [metrics.mean_of(table[name], table.index) for name in ("cached", "uncached", "share")]
        cells = [f"{test.effect:.2g} ({test.low:.2g} to {test.high:.2g})" if test.effect else "0" for test in tests]
        lines.append(f"| {name} | {' | '.join(cells)} | {table['other'].sum()} of {count} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the tables, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["zoo", "random", "smollm2", "caches"])
    parser.add_argument("--sae", nargs="*", default=[], help="autoencoders of SmolLM2, as tools/sae/train.py writes them")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rows", type=Path, default=ROOT / "out" / "which_run.jsonl")
    parser.add_argument("--figure", type=Path, default=ROOT / "figures" / "which_run.png")
    parser.add_argument(
        "--separate", action="store_true", help="only what a generation without a cache has of the distance"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.separate:
        print(separate(given.texts, given.new))
        return
    rows = measure(given)
    print("\nShare in % that differs at generated positions (95% interval); null\n\n" + table_of(rows))
    for part, over in (("prompt", "all"), *(("generated", name) for name in (*BLOCKS, "first half", "second half"))):
        print(f"\n{part}, {over}\n\n" + table_of(rows, part, over))
    draw(rows, machine(torch.device("cpu")), given.figure)


if __name__ == "__main__":
    main()
