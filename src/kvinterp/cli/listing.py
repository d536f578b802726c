"""What ``kvinterp list`` shows: tables of everything that can be named."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvinterp.common.console import escaped, table_of

if TYPE_CHECKING:
    from rich.table import Table


def _models() -> Table:
    from kvinterp.models import real, zoo

    table = table_of("models", "name", "what it is", "layers", "heads/KV", "right of held-out problems")
    for record in zoo.describe():
        right = "\n".join(f"{task} {share:.0%}" for task, share in record["accuracy"].items())
        family, heads = record["architecture"].removesuffix("ForCausalLM"), f"{record['heads']}/{record['kv_heads']}"
        what = f"{family}, {record['parameters'] / 1e6:.2g} M parameters"
        table.add_row(f"zoo:{record['name']}", what, str(record["layers"]), heads, right)
    for name, one in real.REAL.items():
        if one.member.endswith(".gguf"):
            there = "" if real.is_here(name) else f"\n{one.megabytes:.0f} MB, fetched by make real"
            table.add_row(f"real:{name}", f"{one.what}{there}", "", "", "")
    table.caption = "and any transformers checkpoint folder, GGUF file or hub id"
    return table


def _sites() -> Table:
    from kvinterp.models.sites import GROUPS, SITES

    return _pairs("sites", "site", SITES | {name: "group: " + ", ".join(group) for name, group in GROUPS.items()})


EXAMPLE = {"layers": 32, "kv_heads": 8, "head_dim": 128}
"""The shape of Llama-3.1-8B: what its cache stores of a token is 128 KiB in 16 bits."""


def _policies() -> Table:
    table = table_of("policies", *POLICY_COLUMNS)
    for row in policy_rows():
        table.add_row(*map(escaped, row))
    table.caption = POLICY_NOTE
    return table


POLICY_COLUMNS = ("name", "as text", "fields", "what it does", "KiB per token", "source")
POLICY_NOTE = (
    "KiB per token: what a real implementation stores for K and V of one position, scales included, with {layers} layers, "
    "{kv_heads} KV heads and head_dim {head_dim} in a 16-bit cache; kvinterp itself keeps the model's dtype"
).format(**EXAMPLE)


def policy_rows() -> list[tuple[str, ...]]:
    """A row of text for every policy, in the order of POLICY_COLUMNS."""
    from kvinterp.policies import POLICIES

    rows: list[tuple[str, ...]] = []
    for name, kind in POLICIES.items():
        policy, width = kind(), EXAMPLE["head_dim"]
        bits = [16 if (found := policy.bits_stored(tensor, width)) is None else found for tensor in ("k", "v")]
        kib = sum(bits) * width * EXAMPLE["kv_heads"] * EXAMPLE["layers"] / 8 / 1024
        rows.append((name, str(policy), _values_of(kind), _told(kind), f"{kib:g}", kind.SOURCE))
    return rows


def _metrics() -> Table:
    from kvinterp.metrics import KINDS, REGISTRY

    table = table_of("metrics", "name", "fills", "what it is")
    for metric in REGISTRY.values():
        table.add_row(metric.name, f"{KINDS[metric.kind].table}.{metric.column}", _told(metric.function))
    return table


def _experiments() -> Table:
    from kvinterp.study.experiments.registry import experiments, question_of

    return _pairs("experiments", "command", {name: question_of(name).splitlines()[0] for name in experiments()})


def _fields(title: str, classes: dict[str, type]) -> Table:
    table = table_of(title, "name", "values", "what it does")
    for name, found in classes.items():
        table.add_row(name, _values_of(found), _told(found))
    return table


def _told(plugin: object) -> str:
    """The first line of a docstring."""
    return (plugin.__doc__ or "").strip().splitlines()[0]


def _values_of(kind: type) -> str:
    """The fields of a plugin and their defaults."""
    return ", ".join(
        field.name
        if field.default is dataclasses.MISSING
        else f"{field.name}={field.default if field.default != () else 'all'}"
        for field in sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))
    )


def _pairs(title: str, name: str, entries: dict[str, str]) -> Table:
    table = table_of(title, name, "what it is")
    for row in entries.items():
        table.add_row(*row)
    return table


def _from(room: str, name: str) -> Any:
    """What is called so in a room, which is imported once it is asked for."""
    return getattr(importlib.import_module(f"kvinterp.{room}"), name)


LISTED: dict[str, Callable[[], Table]] = {
    "models": _models,
    "kinds": lambda: _pairs("kinds", "kind", _from("models", "KINDS")),
    "sites": _sites,
    "strategies": lambda: _fields("strategies", _from("paths", "STRATEGIES")),
    "policies": _policies,
    "metrics": _metrics,
    "kernels": lambda: _fields("kernels", _from("paths", "KERNELS")),
    "calls": lambda: _fields("calls", _from("paths.calls", "CALLS")),
    "protocols": lambda: _pairs("protocols", "protocol", _from("comparison", "PROTOCOLS")),
    "experiments": _experiments,
}
"""What can be listed, each with what makes its table."""
