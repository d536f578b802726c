"""llama.cpp as a second engine, run here: what is right passes, caches and kernels of its own are named, and so are mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamacpp_server import serving, walked

import kvinterp as kv
from gguf_files import write_gguf
from kvinterp.engines.judge import audit_engine
from kvinterp.recording.engine_path import EnginePath

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install 'kvinterp[llamacpp]'")

ZOO, LENGTH = "zoo:llama64-mini", 88
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model(ZOO, kind="native", dtype="float32")


@pytest.fixture(scope="module")
def files(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gguf")

    def file(kind: str) -> Path:
        made = folder / f"{kind}.gguf"
        return made if made.exists() else write_gguf(model.model, model.tokenizer, made, kind)

    return file


@pytest.fixture(scope="module")
def ids(model: Any) -> list[int]:
    text = [t for prompt in kv.load_prompts("natural:24") for t in model.encode(prompt.text)[1:]]
    return [model.tokenizer.bos_token_id, *text[: LENGTH - 1]]


@pytest.fixture(scope="module")
def long_ids(model: Any) -> list[int]:
    """Of which enough tokens are among the twenty likeliest."""
    text = [t for prompt in kv.load_prompts("natural:24") for t in model.encode(prompt.text)[1:]]
    return [model.tokenizer.bos_token_id, *text[:239]]


def judged(model: Any, ids: list[int], chosen: np.ndarray, kind: str = "F32", prompt: int = 1) -> Any:
    return audit_engine(model, [EnginePath("0", tuple(ids[:prompt]), tuple(ids[prompt:]), chosen)], STORED[kind])


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("F32", "f32"),
        pytest.param("F16", "f16", marks=pytest.mark.slow),
        pytest.param("BF16", "bf16", marks=pytest.mark.slow),
    ],
)
def test_weights_and_cache_in_one_precision_pass_cold_and_warm(
    kind: str, cache: str, model: Any, files: Any, ids: Any
) -> None:
    with serving(files(kind), cache) as url:
        sides = [walked(url, ids, cached) for cached in (False, True)]
    for chosen in sides:
        found = judged(model, ids, chosen, kind)
        assert found.verdict == "rounding", str(found)
    assert (sides[0] != sides[1])[1:].any(), "the second time was not served otherwise"


# On an Intel with AMX llama.cpp computes with q4_0 otherwise than our reference, and no cause is named there.
OTHERWISE = pytest.mark.xfail(reason="llama.cpp's kernels for q4_0 depend on the processor", strict=False)


@pytest.mark.parametrize("cache", [pytest.param("q4_0", marks=OTHERWISE), pytest.param("q8_0", marks=pytest.mark.slow)])
def test_a_quantised_cache_is_named_to_what_it_does_to_queries(cache: str, model: Any, files: Any, ids: Any) -> None:
    """Turned by a Hadamard matrix, the two halves of a pair beside each other, queries in q8_0: then next to nothing is left."""
    with serving(files("F32"), cache, "enabled") as url:
        chosen = walked(url, ids)
    found = judged(model, ids, chosen)
    assert found.verdict == "policy", str(found)
    assert f"{cache} cache as llama.cpp's, turned reproduces it" in found.reading
    left = {row["cause"]: row["left"] for row in found.given["tried"]}
    assert left[f"{cache} cache as llama.cpp's, turned"] < 0.2
    assert left[f"{cache} cache as llama.cpp's, not turned"] > 0.7


@pytest.mark.slow
def test_flash_attention_of_one_row_over_a_float16_cache_is_a_kernel(model: Any, files: Any, ids: Any) -> None:
    """Decoding adds values up in float16: a warm token is further from a cold one than without flash attention."""
    gaps = []
    for flash in ("disabled", "enabled"):
        with serving(files("F32"), "f16", flash) as url:
            cold, warm = (walked(url, ids, cached) for cached in (False, True))
        gaps.append(np.nanmean(np.abs(warm - cold)))
    assert gaps[1] > 1.5 * gaps[0] > 0
    found = judged(model, ids, warm)
    assert found.verdict == "kernel", str(found)
    assert "values added up in float16, a key after another" in found.reading
    assert found.exit_code == 0


@pytest.mark.slow
def test_a_wrong_rope_base_is_named(model: Any, files: Any, ids: Any) -> None:
    with serving(files("F32"), rope_freq_base=5000.0) as url:
        found = judged(model, ids, walked(url, ids))
    assert found.verdict == "bug", str(found)
    assert "RoPE base times 0.5 reproduces it" in found.reading


@pytest.mark.slow
def test_a_wrong_epsilon_is_named(ids: Any, model: Any, tmp_path: Path) -> None:
    wrong = kv.load_model(ZOO, kind="native", dtype="float32")
    wrong.model.config.rms_norm_eps *= 10
    with serving(write_gguf(wrong.model, wrong.tokenizer, tmp_path / "eps.gguf")) as url:
        found = judged(model, ids, walked(url, ids))
    assert found.verdict == "bug", str(found)
    assert "norm eps times 10 reproduces it" in found.reading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "word", "says"),
    [
        ("no BOS", "misaligned", "computed without the first token (BOS)"),
        ("shift", "misaligned", "shifted by -1"),
        ("temperature", "processed", "after temperature 0.9"),
        ("top-k", "processed", "after top_k=20"),
    ],
)
def test_what_was_asked_wrongly_is_named(
    fault: str, word: str, says: str, model: Any, files: Any, ids: Any, long_ids: Any
) -> None:
    ids = long_ids if fault == "top-k" else ids
    samplers = {"temperature": ["temperature"], "top-k": ["top_k"]}.get(fault)
    asked = (
        {} if samplers is None else {"post_sampling_probs": True, "samplers": samplers, "top_p": 1, "min_p": 0, "seed": 1}
    )
    asked |= {"temperature": {"temperature": 0.9}, "top-k": {"temperature": 1.0, "top_k": 20}}.get(fault, {})
    with serving(files("F32")) as url:
        chosen = walked(url, ids[1:] if fault == "no BOS" else ids, **asked)
    if fault == "no BOS":
        chosen = np.concatenate([[np.nan], chosen])
    if fault == "shift":
        chosen = np.concatenate([[np.nan], chosen[:-1]])
    found = judged(model, ids, chosen)
    assert found.verdict == word, str(found)
    assert says in found.reading.splitlines()[1], str(found)
