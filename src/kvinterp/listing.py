"""What ``kvinterp list`` shows: tables of everything that can be named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvinterp.console import table_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["listed"]


def listed(what: str) -> Table:
    """The table of one kind of thing: models, kinds, sites, strategies, policies, metrics, kernels, protocols or experiments."""
    makers = {
        "models": _models,
        "kinds": _kinds,
        "sites": _sites,
        "strategies": _strategies,
        "policies": _policies,
        "metrics": _metrics,
        "kernels": _kernels,
        "protocols": _protocols,
        "experiments": _experiments,
    }
    return makers[what]()


def _models() -> Table:
    from kvinterp.models import zoo

    table = table_of("models", "name", "family", "parameters", "layers", "heads/KV", "right of held-out")
    for record in zoo.describe():
        right = ", ".join(f"{task} {share:.0%}" for task, share in record["accuracy"].items())
        family, heads = record["architecture"].removesuffix("ForCausalLM"), f"{record['heads']}/{record['kv_heads']}"
        table.add_row(f"zoo:{record['name']}", family, f"{record['parameters']:,}", str(record["layers"]), heads, right)
    table.caption = "and any transformers checkpoint folder or hub id"
    return table


def _kinds() -> Table:
    from kvinterp.models import KINDS

    return _pairs("kinds", "kind", KINDS)


def _sites() -> Table:
    from kvinterp.models.sites import GROUPS, SITES

    return _pairs("sites", "site", SITES | {name: "group: " + ", ".join(group) for name, group in GROUPS.items()})


def _strategies() -> Table:
    from kvinterp.paths import STRATEGIES

    return _fields("strategies", STRATEGIES)


def _policies() -> Table:
    from kvinterp.policies import POLICIES

    return _fields("policies", POLICIES)


def _metrics() -> Table:
    from kvinterp.metrics import KINDS, REGISTRY

    table = table_of("metrics", "name", "fills", "what it is")
    for metric in REGISTRY.values():
        first = (metric.function.__doc__ or "").strip().splitlines()[0]
        table.add_row(metric.name, f"{KINDS[metric.kind].table}.{metric.column}", first)
    return table


def _kernels() -> Table:
    from kvinterp.paths import KERNELS

    return _fields("kernels", KERNELS)


def _protocols() -> Table:
    from kvinterp.comparison import PROTOCOLS

    return _pairs("protocols", "protocol", PROTOCOLS)


def _experiments() -> Table:
    from kvinterp.experiments.registry import experiments, question_of

    return _pairs("experiments", "command", {name: question_of(name).splitlines()[0] for name in experiments()})


def _fields(title: str, classes: dict[str, type]) -> Table:
    import dataclasses

    table = table_of(title, "name", "values", "what it does")
    for name, found in classes.items():
        values = ", ".join(
            field.name
            if field.default is dataclasses.MISSING
            else f"{field.name}={field.default if field.default != () else 'all'}"
            for field in dataclasses.fields(found)
        )
        table.add_row(name, values, (found.__doc__ or "").strip().splitlines()[0])
    return table


def _pairs(title: str, name: str, entries: dict[str, str]) -> Table:
    table = table_of(title, name, "what it is")
    for key, value in entries.items():
        table.add_row(key, value)
    return table
