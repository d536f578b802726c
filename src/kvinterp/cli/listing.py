"""What ``kvinterp list`` shows: everything that can be named, read from the source, so that nothing
slow is imported.
"""

from __future__ import annotations

import functools
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvinterp.commands.registry import experiments, question_of
from kvinterp.common.source import ROOT, source
from kvinterp.common.spec import fields_of, first_line, plugin_rows, plugins_read
from kvinterp.common.vocabulary import PATHS, PROTOCOLS
from kvinterp.common.wings import handed, taken
from kvinterp.models import real, zoo
from kvinterp.models.sites import GROUPS, SITES

Row = dict[str, str]


def described(what: str, rows: list[Row]) -> Iterator[str]:
    """The rows of a list as lines: a name, and below it what is said of it."""
    for row in rows:
        name, *columns = row.items()
        yield name[1]
        for column, text in columns:
            if text:
                label = "" if len(columns) == 1 else f"{column}: "
                yield textwrap.fill(
                    label + text, 120, initial_indent="    ", subsequent_indent="      "
                )
    if what == "policies":
        yield POLICY_NOTE


def _models() -> list[Row]:
    rows = []
    for record in zoo.describe():
        right = ", ".join(f"{task} {share:.0%}" for task, share in record["accuracy"].items())
        what = f"{record['architecture'].removesuffix('ForCausalLM')}, {record['parameters'] / 1e6:.2g} M parameters"
        heads = f"{record['layers']} layers, {record['heads']} query heads, {record['kv_heads']} KV heads"
        cache = f"{4 * record['layers'] * record['kv_heads'] * record['head_dim']:,} bytes a token in 16 bits"
        about = {
            "what it is": f"{what}, {heads}",
            "K and V": cache,
            "right of held-out problems": right,
        }
        rows.append({"name": f"zoo:{record['name']}", **about})
    for name, one in real.REAL.items():
        if one.member.endswith(".gguf"):
            there = "" if real.is_here(name) else f"; {one.megabytes:.0f} MB, fetched by make real"
            rows.append({"name": f"real:{name}", "what it is": f"{one.what}{there}"})
    return rows


EXAMPLE = {"layers": 32, "kv_heads": 8, "head_dim": 128}
"""The shape of Llama-3.1-8B: what its cache stores of a token is 128 KiB in 16 bits."""
POLICY_NOTE = (
    "KiB per token: what a real implementation stores for K and V of one position, scales included, with {layers} layers, "
    "{kv_heads} KV heads and head_dim {head_dim} in a 16-bit cache; kvinterp itself keeps the model's dtype"
).format(**EXAMPLE)


def policy_rows() -> list[Row]:
    """A row of text for every policy."""
    rows = []
    for name, kind in plugins_read("kvinterp.policies.base:Policy").items():
        # Its defaults are the class's; to check them fp8 looks at dtypes of torch.
        policy: Any = object.__new__(kind)
        width = EXAMPLE["head_dim"]
        bits = [
            16 if (own := policy.bits_stored(tensor, width)) is None else own
            for tensor in ("k", "v")
        ]
        kib = sum(bits) * width * EXAMPLE["kv_heads"] * EXAMPLE["layers"] / 8 / 1024
        about = {"fields": fields_of(kind), "what it does": first_line(kind)}
        rows.append(
            {
                "name": name,
                "as text": str(policy),
                **about,
                "KiB per token": f"{kib:g}",
                "source": kind.SOURCE,
            }
        )
    return rows


def _metrics() -> list[Row]:
    kinds = source("kvinterp.metrics.base").KINDS
    files = [
        source(f"kvinterp.metrics.{file.name}")
        for file in pkgutil.iter_modules([str(ROOT / "kvinterp" / "metrics")])
    ]
    return [{"name": each.name, "fills": f"{kinds[each.kind].table}.{each.column}", "what it is": first_line(each.function)}
            for file in files if "METRICS" in file.nodes for each in file.METRICS]  # fmt: skip


def _pairs(name: str, entries: Mapping[str, str]) -> list[Row]:
    return [{name: key, "what it is": text} for key, text in entries.items()]


def _handed(name: str) -> list[Row]:
    """The rows that a wing makes."""
    return taken("lists", name, f"kvinterp list {name}")()  # type: ignore[no-any-return]


LISTED: dict[str, Callable[[], list[Row]]] = {
    "models": _models,
    "kinds": lambda: _pairs("kind", source("kvinterp.models.load").KINDS),
    "sites": lambda: _pairs(
        "site", SITES | {name: "group: " + ", ".join(group) for name, group in GROUPS.items()}
    ),
    "strategies": lambda: plugin_rows(plugins_read("kvinterp.paths.sampling:Strategy")),
    "policies": policy_rows,
    "metrics": _metrics,
    "kernels": lambda: plugin_rows(plugins_read("kvinterp.paths.kernels.base:Kernels")),
    "paths": lambda: _pairs("path", PATHS),
    "protocols": lambda: _pairs("protocol", PROTOCOLS),
    "experiments": lambda: _pairs(
        "command",
        {name: question_of(name).partition("\n\n")[0] for name in experiments()},
    ),
}
LISTED |= {name: functools.partial(_handed, name) for name in handed("lists")}
"""What can be named, each with what makes its rows; a test holds them against the registries."""
