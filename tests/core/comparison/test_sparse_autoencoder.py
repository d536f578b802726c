"""Sparse autoencoders in SAELens's form: what is saved is read, features are counted by hand, what is not read is said."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import small_sae

ROOT = Path(__file__).parents[3]
ROWS = torch.randn(20, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_features_are_those_of_the_definition(architecture: str, tmp_path: Path) -> None:
    sae = kv.load_sae(small_sae(architecture))
    assert sae.hook_point == ("resid_post", 2)
    before, features = (ROWS - sae.b_dec) @ sae.W_enc + sae.b_enc, sae.encode(ROWS)
    kept = before > (sae.threshold if architecture == "jumprelu" else 0)
    if architecture == "topk":
        kept &= before >= before.sort(1).values[:, -8:-7]
    assert torch.equal(features, before * kept)
    assert torch.allclose(sae(ROWS), (before * kept) @ sae.W_dec + sae.b_dec)
    again = kv.load_sae(sae.save(tmp_path))
    assert torch.equal(again.encode(ROWS), features)
    assert again.metadata == sae.metadata


def test_a_digest_is_of_the_content(tmp_path: Path) -> None:
    """A run is taken up again by what an autoencoder holds: one that was trained anew into the same folder is another."""
    sae = kv.load_sae(small_sae())
    digests = {sae.digest, kv.load_sae(sae.save(tmp_path)).digest}
    assert len(digests) == 1
    sae.b_enc[3] += 1.0
    digests.add(kv.load_sae(sae.save(tmp_path)).digest)
    sae.k += 1
    assert len({*digests, sae.digest}) == 3


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"normalize_activations": "layer_norm"},
            kv.UnsupportedError,
            "normalize_activations='layer_norm', which is not read",
        ),
        ({"architecture": "gated"}, kv.UnsupportedError, "architecture 'gated', which is not read here"),
        ({"architecture": "jumprelu"}, kv.InputError, "no readable autoencoder"),
        ({"architecture": None}, kv.UnsupportedError, "architecture None"),
    ],
)
def test_what_is_not_read_is_said(change: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    kv.load_sae(small_sae()).save(tmp_path)
    about = json.loads((tmp_path / "cfg.json").read_text())
    (tmp_path / "cfg.json").write_text(json.dumps(about | change))
    with pytest.raises(error, match=said):
        kv.load_sae(tmp_path)
    with pytest.raises(kv.InputError, match="holds no cfg"):
        kv.load_sae(tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["topk", "jumprelu"])
def test_a_trained_one_is_read_and_its_features_are_held_against_each_other(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What tools/sae/train.py writes explains held-out rows, is sparse, and is what which-run takes; JumpReLU's thresholds moved."""
    script = runpy.run_path(str(ROOT / "tools" / "sae" / "train.py"))
    options = f"zoo:mistral-mini --layer 2 --prompts arithmetic:10 --tokens 16 --steps 300 --dtype float32 --k 16 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["train.py", *options.split(), "--architecture", architecture])
    script["main"]()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["held out"]
    assert found["explained_variance"] > 0.5
    sae = kv.load_sae(tmp_path)
    model = kv.load_model("zoo:mistral-mini", dtype="float32")
    (text,) = kv.generated(model, "12 + 30 =", "resid_post", [2])
    fires = (sae.encode(text["resid_post", 2][2:]) > 0).sum(1)
    assert fires.max() < 512 / 4
    if architecture == "topk":
        assert fires.max() <= 16
    else:
        assert sae.threshold is not None
        assert sae.threshold.std() > 1e-3
    runs = kv.which_run(model, "12 + 30 =", run="cached+int4", features={sae.hook_point: sae}, max_new_tokens=6)
    row = runs.readouts.query("readout == 'feature that fires' and part == 'generated'")
    assert 0 < row["changed"].mean() < 1
