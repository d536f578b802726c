"""What a study is composed of: experiments on kinds of models, their cells under one roof, their tables one below the other."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.common.result import Result
from kvinterp.errors import InputError
from kvinterp.study.cells import Cell, Made
from kvinterp.study.experiments.base import Experiment, Parts, Tables
from kvinterp.study.findings import labels_of

PRESETS: dict[str, dict[str, Any]] = {
    "zoo": {
        "models": ("zoo:llama-mini", "zoo:mistral-mini", "zoo:gemma2-mini"),
        "kinds": ("native", "hooked"),
        "prompts": "arithmetic:40",
        "strategies": ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)"),
        "seeds": 2,
        "max_new_tokens": 64,
        "dtype": "float16",
        # As many as a claim needs before anything is decided: five, and thirty before "never" is believed.
        "more": {
            "behaviour": {"controls": 30},
            "layer-drift": {"prompts": "arithmetic:20", "max_new_tokens": 24},
            "root-cause": {
                "kind": "native",
                "prompts": "arithmetic:10",
                "flip_steps": 32,
                "flip_seeds": 1,
                "ladder_prompts": 6,
                "ladder_steps": 8,
                "repeat_prompts": 6,
            },
            "localisation": {"kind": "native", "prompts": "arithmetic:20", "max_new_tokens": 16, "count": 5},
        },
    },
    # Under three minutes on two cores: as many of each as a claim needs, and five tokens, the fewest with a first quarter.
    "quick": {
        "models": ("zoo:mistral-mini",),
        "kinds": ("native",),
        "prompts": "arithmetic:30",
        "strategies": ("greedy", "top_p(0.95,0.8)"),
        "seeds": 1,
        "max_new_tokens": 5,
        "dtype": "float16",
        "more": {
            "behaviour": {"controls": 30},
            "root-cause": {
                # Fewer than ten, all on one side, are no evidence once corrected for as many tests as there are.
                "prompts": "arithmetic:10",
                "few_prompts": 10,
                "flip_steps": 1,
                "flip_seeds": 1,
                "ladder_steps": 4,
                "repeat_prompts": 6,
                "repeat_steps": 3,
            },
            "localisation": {"max_new_tokens": 3, "count": 6},
        },
    },
    # A model of 135 million parameters, in the 16 bits in which its tokens flip.
    "real": {
        "models": ("real:smollm2-135m",),
        "kinds": ("native", "hooked"),
        "prompts": "natural:48",
        "strategies": ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)"),
        "seeds": 2,
        "max_new_tokens": 128,
        "dtype": "bfloat16",
        "more": {
            "layer-drift": {"prompts": "natural:24", "max_new_tokens": 32},
            "root-cause": {
                "kind": "native",
                "prompts": "natural:6",
                "seeds": 1,  # Of natural prompts there is one set.
                "flip_steps": 24,
                "flip_seeds": 1,
                "ladder_prompts": 5,
                "ladder_steps": 8,
                "repeat_prompts": 5,
            },
            "localisation": {"kind": "native", "prompts": "natural:12", "max_new_tokens": 16, "count": 5},
        },
    },
    # What the paper's text lost is [?] here: the brackets of top_k and top_p, and the format of the few-shot prompt.
    "paper": {
        "models": ("meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.3", "google/gemma-2-2b"),
        "kinds": ("native(sdpa)", "native(eager)"),
        "prompts": "gsm8k(openai/gsm8k,shots=5,count=700,seed=42,cut=off)",
        "strategies": ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)"),
        "seeds": 5,
        "max_new_tokens": 128,
        "dtype": "float16",
        "more": {"root-cause": {"kind": "native"}, "localisation": {"kind": "native"}},
    },
}
"""What each preset sets, where nothing else is given."""

FINDINGS = "findings"
"""The table that every experiment has of its own."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One experiment of a study, on one kind of model.

    Attributes:
        name: The experiment's verb.
        kind: The kind, as it was given: ``native``, ``native(eager)``.
        experiment: The experiment with its choices.
    """

    name: str
    kind: str
    experiment: Experiment

    @property
    def label(self) -> str:
        """What it is called in the summary and on the page."""
        return f"{self.name}, {self.kind}"

    @property
    def prefix(self) -> str:
        """What stands before the keys of its cells."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind).strip("-")


# Cells -----------------------------------------------------------------------------------------------------------------


def united(cells: Mapping[Part, Sequence[Cell]]) -> list[Cell]:
    """The cells of several experiments, each under a key of its own; one that several have is taken once."""
    keyed = {key_of(part, cell): cell for part, each in cells.items() for cell in each}
    return [dataclasses.replace(cell, key=key) for key, cell in keyed.items()]


def key_of(part: Part, cell: Cell) -> str:
    """The key of a cell in the study: its kind, a digest of function and settings, and its own key behind them."""
    given = json.dumps([cell.function, dict(cell.settings)], sort_keys=True)
    return f"{part.prefix}-{hashlib.sha256(given.encode()).hexdigest()[:8]}-{cell.key}"


def of_part(part: Part, cells: Sequence[Cell], made: Parts) -> dict[str, Made]:
    """What the cells of one experiment gave, by its own keys."""
    return {cell.key: made[key] for cell in cells if (key := key_of(part, cell)) in made}


def cells_table(cells: Mapping[Part, Sequence[Cell]], finished: Iterable[str]) -> pd.DataFrame:
    """Every cell: whose it is, its function, what it was called with as JSON, and whether it is finished."""
    done = set(finished)
    rows = [
        {
            "experiment": part.name,
            "kind": part.kind,
            "key": (key := key_of(part, cell)),
            "function": cell.function,
            "settings": json.dumps(cell.settings, sort_keys=True),
            "finished": key in done,
        }
        for part, each in cells.items()
        for cell in each
    ]
    return pd.DataFrame(rows, columns=["experiment", "kind", "key", "function", "settings", "finished"])


# Tables ----------------------------------------------------------------------------------------------------------------


def labelled(found: Mapping[Part, Result]) -> Tables:
    """The tables of all experiments by name, those of one kind below those of another.

    Where there are several kinds, a model is called by both: ``zoo:llama-mini (hooked)``. A table that two experiments have in
    common is taken once.
    """
    kinds = {part.kind for part in found}
    tables: dict[str, dict[Any, pd.DataFrame]] = {}
    for part, result in found.items():
        for name, table in result.tables.items():
            if len(kinds) > 1:
                named = {"model": table["model"] + f" ({part.kind})"} if "model" in table else {"kind": part.kind}
                table = table.assign(**named)
            tables.setdefault(name, {}).setdefault(part if name == FINDINGS else part.kind, table)
    return {name: pd.concat(list(each.values()), ignore_index=True) for name, each in tables.items()}


def tables_of_part(part: Part, tables: Tables, kinds: Iterable[str]) -> Tables:
    """What :func:`labelled` made of the tables of one experiment, taken out again.

    Args:
        part: The experiment.
        tables: The tables of all.
        kinds: Every kind that there is.
    """
    own = {name: tables[name] for name in part.experiment.TABLES if name in tables}
    if FINDINGS in tables:
        mine = tables[FINDINGS][tables[FINDINGS]["experiment"] == part.name]
        # Labels of other experiments are no columns of its own.
        own |= {FINDINGS: mine.drop(columns=[n for n in labels_of(mine) if mine[n].isna().all()])} if len(mine) else {}
    if len(set(kinds)) < 2:
        return own
    found, ending = {}, f" ({part.kind})"
    for name, table in own.items():
        if "model" in table:
            mine = table[table["model"].str.endswith(ending)]
            found[name] = mine.assign(model=mine["model"].str.removesuffix(ending)).reset_index(drop=True)
        else:
            found[name] = table[table["kind"] == part.kind].drop(columns="kind").reset_index(drop=True)
    return found


class _Asked(dict[str, pd.DataFrame]):
    """Tables that are not there; it notes for which one is asked first."""

    name = ""

    def get(self, name: str, default: Any = None) -> Any:
        self.name = self.name or name
        return default


def claims_table(tables: Tables) -> pd.DataFrame:
    """What tables say of each claim, and in ``table`` which of them it rests on first."""
    from kvinterp.study.claims import CLAIMS, claims_of
    from kvinterp.study.claims.base import NotTestableError

    asked = {}
    for claim in CLAIMS:
        nothing = _Asked()
        with contextlib.suppress(NotTestableError):
            claim.look(nothing)
        asked[claim.id] = nothing.name
    claims = claims_of(tables)
    return claims.assign(table=claims["id"].map(asked))


# Choices ---------------------------------------------------------------------------------------------------------------


def way_of(text: str) -> dict[str, Any]:
    """Kind and attention of ``native`` or ``native(eager)``."""
    from kvinterp.common.checks import check_known
    from kvinterp.models import KINDS

    match = re.fullmatch(r"([\w-]+)(?:\((\w+)\))?", text)
    if match is None:
        raise InputError(f"--kind {text!r} cannot be read: expected native, hooked or bridge, or native(eager).")
    check_known("kind", match.group(1), KINDS)
    return {"kind": match.group(1), "attention": match.group(2)}


def read_choice(text: str, default: Any, value: str) -> Any:
    """A value as the field's default has it; several with semicolons."""
    if isinstance(default, tuple):
        return tuple(read_choice(text, default[0] if default else "", each) for each in value.split(";") if each)
    if isinstance(default, bool | int | float):
        words = {"true": True, "false": False} if isinstance(default, bool) else {}
        try:
            return words[value] if words else type(default)(value)
        except (KeyError, ValueError) as error:
            raise InputError(f"--set {text!r} cannot be read: expected a value like {default!r}.") from error
    return value or None
