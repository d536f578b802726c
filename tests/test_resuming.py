"""What was made under other circumstances is never joined with what is made now."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from cutting import same
from kvinterp.commands.base import Experiment
from kvinterp.commands.cells import Cell, joined
from kvinterp.commands.circumstances import circumstances
from kvinterp.commands.compare import Compare
from kvinterp.common.result import Result
from kvinterp.common.store import CellResult, CellStore
from kvinterp.models import load_model, zoo


def edit_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in place:
            place["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))


def edit_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["3"], words["4"] = words["4"], words["3"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def nothing(folder: Path) -> None:
    pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.folder("gqa2-mini"), tmp_path / "model"))


@pytest.mark.parametrize("edit", [edit_rope, pytest.param(edit_tokenizer, marks=pytest.mark.long)])
def test_a_checkpoint_edited_between_gives_the_table_of_the_edited_one(
    tmp_path: Path, model: Path, edit: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare` was killed, rope_theta or the tokenizer edited, and it went on: old and new rows in one table."""
    asked = Compare(str(model), "arithmetic:2", max_new_tokens=3, stop="length", device="cpu", record="")
    keep = CellStore.keep

    def cut(self: CellStore, *part: Any) -> None:
        keep(self, *part)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellStore, "keep", cut)
        with pytest.raises(KeyboardInterrupt):
            asked.run(tmp_path / "cut" / "out", progress="none", figures="none")
    edit(model)
    asked.run(tmp_path / "cut" / "out", progress="none", figures="none")
    asked.run(tmp_path / "whole" / "out", progress="none", figures="none")
    same(tmp_path / "cut" / "out", tmp_path / "whole" / "out")


def test_every_circumstance_is_in_the_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now(edit: Callable[[Path], None] = nothing) -> str:
        edit(model)
        return json.dumps(circumstances(load_model(str(model), kind="native", dtype="float16", device="cpu")))

    before = now()
    assert now() == before
    found = {before}
    with monkeypatch.context() as patch:
        patch.setenv("KVINTERP_THREADS", "2")
        found.add(now())
    for name in ("flash", "mem_efficient"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        switch = getattr(torch.backends.cuda, f"enable_{name}_sdp")
        switch(not enabled)
        try:
            found.add(now())
        finally:
            switch(enabled)
    with torch.backends.mkldnn.flags(enabled=False):
        found.add(now())
    with monkeypatch.context() as patch:
        patch.setattr("kvinterp.models.provenance._version", lambda package: "another")
        found.add(now())
    adapter = load_model(str(model), kind="native", dtype="float16", device="cpu")
    name, buffer = next(iter(adapter.model.named_buffers()))
    buffer.mul_(2)
    found.add(json.dumps(circumstances(adapter)))
    found |= {now(edit_rope), now(edit_tokenizer)}
    assert len(found) == 9, name


# Two stages ------------------------------------------------------------------------------------------------------------

CALLED: list[str] = []


def valued(name: str, value: int) -> pd.DataFrame:
    """A cell's function."""
    CALLED.append(name)
    return pd.DataFrame({"name": [name], "value": [value]})


class Twice(Experiment):
    """The largest of some values are looked at again."""

    values: tuple[int, ...] = (3, 9, 4, 7)

    def cells(self) -> list[Cell]:
        return [Cell(f"one-{n}", valued, {"name": f"one-{n}", "value": v}) for n, v in enumerate(self.values)]

    def second_stage(self, made: Mapping[str, CellResult]) -> list[Cell]:
        largest = joined(made)["table"].nlargest(2, "value")["name"]
        return [Cell(f"two-{name}", valued, {"name": f"two-{name}", "value": 0}) for name in largest]

    def reduce(self, made: Mapping[str, CellResult]) -> Result:
        return Result(joined(made), {})


class Shown(Twice):
    """Writes what it has when it is interrupted; what it says of itself does not say that it was."""

    PARTIAL = "yes"


@pytest.mark.parametrize("study", [Twice, Shown])
@pytest.mark.parametrize("cut", range(1, 6))
def test_a_second_stage_is_known_from_the_first_and_taken_up_again(
    tmp_path: Path, cut: int, study: type[Twice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`study paper`, interrupted, was stuck: "already holds a result"."""
    whole = study().run(None).tables["table"]
    assert list(whole["name"])[4:] == ["two-one-1", "two-one-3"]
    keep = CellStore.keep
    CALLED.clear()

    def stopping(self: CellStore, *part: Any) -> None:
        keep(self, *part)
        if len(CALLED) == cut:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellStore, "keep", stopping)
        with pytest.raises(KeyboardInterrupt):
            study().run(tmp_path / "out")
    again = study().run(tmp_path / "out")
    assert sorted(CALLED) == sorted(whole["name"])
    pd.testing.assert_frame_equal(again.tables["table"], whole)
