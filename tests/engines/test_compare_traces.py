"""Two dumps of tensors: the first that parts, in units of its dtype, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.engines.commands.compare_traces import compared


def dumps(folder: Path) -> tuple[Path, Path]:
    """Twelve layers of a residual stream; from layer 3 and row 2 on one number of the second is the next that float16 holds."""
    torch.manual_seed(0)
    one = {f"blocks.{layer}.hook_resid_post": torch.randn(5, 8).half() for layer in range(12)}
    other = {name: tensor.clone() for name, tensor in one.items()}
    for layer in range(3, 12):
        row = other[f"blocks.{layer}.hook_resid_post"][2].numpy()
        row[4] = np.nextafter(row[4], np.float16(np.inf))
    save_file(one, folder / "one.safetensors")
    save_file({**other, "extra": torch.zeros(2)}, folder / "other.safetensors")
    np.savez(folder / "one.npz", **{name: tensor.numpy() for name, tensor in one.items()})
    return folder / "one.safetensors", folder / "other.safetensors"


def test_the_first_tensor_that_parts_is_named_in_the_order_of_layers(tmp_path: Path) -> None:
    one, other = dumps(tmp_path)
    made = kvinterp("compare-traces", one, other, "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    said = " ".join(made.stdout.split())
    assert "9 of 12 tensors differ, first blocks.3.hook_resid_post from row 2 on" in said
    assert "names 1 tensor: extra" in said
    table = pd.read_parquet(tmp_path / "out" / "tensors.parquet")
    assert list(table["tensor"]) == [f"blocks.{layer}.hook_resid_post" for layer in range(12)]
    parts = table["share_differing"] > 0
    assert list(parts) == [False] * 3 + [True] * 9
    assert set(table.loc[parts, "first_row"]) == {2}
    assert set(table.loc[parts, "share_differing"]) == {1 / 40}
    assert table.loc[parts, "max_ulp"].isin([0.5, 1.0]).all()
    assert (table.loc[~parts, ["max_abs", "max_ulp", "relative_l2"]] == 0).all(axis=None)


def test_equal_dumps_say_so_and_the_form_of_the_file_is_no_matter(tmp_path: Path) -> None:
    one, _ = dumps(tmp_path)
    made = kvinterp("compare-traces", one, one.with_suffix(".npz"), "--out", tmp_path / "out")
    assert "all 12 tensors that both name are equal to the bit" in " ".join(made.stdout.split())


def test_a_trace_that_was_saved_is_a_dump(tmp_path: Path) -> None:
    model = kv.load_model("zoo:gqa2-mini", dtype="float32", device="cpu")
    for path in ("cached", "cached+int4"):
        kv.run(model, [1, 2, 3, 4], path, max_new_tokens=3, record="resid_post", stop="length").save(tmp_path / path)
    tables, about = compared(str(tmp_path / "cached"), str(tmp_path / "cached+int4"))
    assert {f"resid_post.{layer}" for layer in range(model.facts.layers)} <= set(tables["tensors"]["tensor"])
    assert (tables["tensors"]["share_differing"] > 0).any()
    assert about["alone"] == {str(tmp_path / "cached"): [], str(tmp_path / "cached+int4"): []}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: place.write_bytes(b"x"), "cannot be read"),
        (lambda place: np.savez(place, a=np.array([object()])), "cannot be read"),
        (lambda place: np.savez(place, b=np.zeros(2)), "no tensor of the same name"),
        (lambda place: np.savez(place, **{"blocks.0.hook_resid_post": np.zeros((5, 7))}), "expected real ones alike"),
    ],
    ids=["damaged", "pickled", "other names", "other shape"],
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path, make: object, said: str) -> None:
    one, _ = dumps(tmp_path)
    make(tmp_path / "bad.npz")  # type: ignore[operator]
    wrong(said, "compare-traces", one, tmp_path / "bad.npz", "--out", tmp_path / "out")


def test_dumps_without_a_common_name_are_told_by_what_they_hold(tmp_path: Path) -> None:
    """An engine's own names, and its "layer 1" is what we call layer 0."""
    one, _ = dumps(tmp_path)
    tensors = {
        f"engine.layer.{n + 1}": torch.tensor(np.load(one.with_suffix(".npz"))[f"blocks.{n}.hook_resid_post"])
        for n in (0, 1)
    }
    save_file(tensors, tmp_path / "engine.safetensors")
    made = kvinterp("compare-traces", one, tmp_path / "engine.safetensors", "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert "theirs, engine.layer.1, is our resid_post of layer 0 (0 of its length" in " ".join(made.stdout.split())
