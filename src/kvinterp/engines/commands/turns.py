"""Is each turn's prompt the tokens of the turns before it, exactly? The first token that is not,
what did it, and what it costs.

A file holds a conversation a line: {"messages": [{"role": ..., "content": ..., "tokens": [IDS,
where known]}, ...]}, or {"turns": [{"prompt": [IDS], "tokens": [IDS]}, ...]} as an engine had them;
or it is one such list. A prefix cache can be used up to the first token that differs; a trainer
that sees the new prompt scores a reply after other tokens than the engine did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    Experiment,
    InputError,
    Result,
    Rows,
    argument,
    check_known,
    counted,
    finding,
    option,
    shared,
)
from kvinterp.common.files import bytes_of, is_file
from kvinterp.engines.turns import CAUSES, check_turns, sentences
from kvinterp.errors import shown
from kvinterp.findings import share_of

MOST = 2**30
"""The most bytes that are read of a file."""
COSTS = ("measured", "not measured")


class Turns(Experiment):
    """Does each turn of a conversation begin with exactly the tokens of the turns before it?"""

    file: Path = argument(Path(), "JSON, or JSON a line: messages, or the token ids of each turn.")
    model: str = option(
        "zoo:llama64-mini",
        "zoo:NAME, a checkpoint folder or a hub id: whose tokenizer and template made it.",
    )
    cost: str = option(
        "measured",
        "measured: the model also scores what follows, behind the cached tokens and the new ones; or not measured.",
    )
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def check(self) -> None:
        """The file too."""
        super().check()
        check_known("cost", self.cost, COSTS)
        if not is_file(self.file):
            raise InputError(
                f"FILE {shown(str(self.file))} does not exist or is no file: give a file of conversations."
            )

    def cells(self) -> list[Cell]:
        """One cell: a conversation is short."""
        return [Cell("turns", self.measured)]

    def measured(self) -> CellResult:
        """The borders of all conversations."""
        adapter, tables = self.adapter(), []
        scorer = adapter if self.cost == "measured" else None
        for number, turns in enumerate(conversations(self.file), 1):
            tables.append(check_turns(adapter, turns, scorer).table.assign(conversation=number))
        return {"turns": pd.concat(tables, ignore_index=True)}, {
            "provenance": {"model": adapter.facts.name}
        }

    def reduce(self, results: CellResults) -> Result:
        """The table of borders."""
        tables, about = results["turns"]
        return Result(tables, about)

    def headline(self, result: Result) -> list[str]:
        """How many borders are exact, and the first of those that are not."""
        lines = sentences(result.tables["turns"])
        more = len(lines) - 6
        return (
            lines
            if more <= 0
            else [*lines[:6], f"{counted(more, 'more turn')} differ; turns.parquet has all."]
        )

    def rows(self, result: Result) -> Rows:
        """The share that is exact, of tokens that can be used again, and of each cause."""
        table = result.tables["turns"]
        by = table["conversation"].astype(str)
        yield share_of(
            "turns that begin with the cached tokens", table["exact"] == "yes", by, unit="turns"
        )
        yield finding(
            "cached tokens that can be used again", float(table["reusable"].sum() / max(table["cached"].sum(), 1)),
            n=int(table["cached"].sum()), unit="tokens", measure="%",
        )  # fmt: skip
        for cause, rows in table[table["cause"] != ""].groupby("cause"):
            nats = rows.get("nats", pd.Series(dtype=float)).mean()
            note = f"what follows is {nats:.2g} nats off on average" if np.isfinite(nats) else ""
            yield finding(
                f"turns with {CAUSES[str(cause)]}",
                float(len(rows)),
                n=len(table),
                unit="turns",
                note=note,
            )


def conversations(file: Path) -> list[Any]:
    """Reads the conversations of a file, messages or turns each.

    Raises:
        InputError: It is no JSON, or holds something else.
    """
    try:
        text = bytes_of(file, MOST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"file {shown(str(file))} cannot be read as UTF-8 text ({error}): expected JSON."
        ) from error
    try:
        whole = json.loads(text)
        records = [whole] if isinstance(whole, dict) or not _several(whole) else whole
    except ValueError:
        try:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(
                f"file {shown(str(file))} is neither JSON nor JSON a line ({error}): mend it."
            ) from error
    found = []
    for number, record in enumerate(records, 1):
        turns = record.get("messages", record.get("turns")) if isinstance(record, dict) else record
        if not isinstance(turns, list):
            raise InputError(
                f"file {shown(str(file))}, record {number} is {shown(record)}: expected an object with 'messages' or 'turns', or "
                "such a list."
            )
        found.append(turns)
    if not found:
        raise InputError(f"file {shown(str(file))} is empty: expected a conversation a line.")
    return found


def _several(whole: Any) -> bool:
    """Whether a list is of conversations, not of one conversation's messages or turns."""
    first = whole[0] if isinstance(whole, list) and whole else None
    return isinstance(first, dict) and bool({"messages", "turns"} & first.keys())
