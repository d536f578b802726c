"""Records what other engines say of a text's tokens: ``record_engines.py FOLDER TEXTS.json OUT_FOLDER ENGINE [DTYPE]``.

ENGINE is mlx, mlx-decode, openvino, openvino-default, ctranslate2 or ort; FOLDER holds a Llama as transformers keeps it, TEXTS.json a
list of lists of token ids. Each writes our own JSONL, ``ENGINE_DTYPE.jsonl``. Made in an environment of its own with the packages that
the functions import (mlx, mlx-cpu, mlx-lm; openvino; ctranslate2; onnxruntime-genai with onnx, onnx-ir, ml_dtypes), beside torch and
transformers; no test imports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Rows = Callable[[list[int]], np.ndarray]
"""Of a text's ids its logits, ``[position, vocabulary]``."""


def mlx(folder: str, dtype: str, step: int = 0) -> Rows:
    """MLX on the CPU: the whole text at once, or from its cache ``step`` tokens at a time."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    model.update(tree_map(lambda p: p.astype(getattr(mx, dtype)), model.parameters()))

    def rows(ids: list[int]) -> np.ndarray:
        if not step:
            return np.array(model(mx.array([ids]))[0].astype(mx.float32))
        cache, parts, half = make_prompt_cache(model), [], len(ids) // 2
        for piece in [ids[:half], *([token] for token in ids[half:])]:
            parts.append(np.array(model(mx.array([piece]), cache=cache)[0].astype(mx.float32)))
        return np.concatenate(parts)

    return rows


def openvino(folder: str, hint: str) -> Rows:
    """OpenVINO's conversion of the forward; ``hint`` is f32 or empty for what it chooses itself."""
    import openvino as ov
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, use_cache=False).logits

    compiled: dict[int, Any] = {}

    def rows(ids: list[int]) -> np.ndarray:
        if len(ids) not in compiled:
            made = ov.convert_model(torch.export.export(Forward(), (torch.tensor([ids]),), strict=False))
            compiled[len(ids)] = ov.compile_model(made, "CPU", {"INFERENCE_PRECISION_HINT": hint} if hint else {})
        return np.asarray(compiled[len(ids)](np.array([ids]))[0][0], dtype=np.float64)

    return rows


def ctranslate2(folder: str) -> Rows:
    """CTranslate2 in float32, whole texts."""
    import ctranslate2 as ct

    out = tempfile.mkdtemp() + "/model"
    ct.converters.TransformersConverter(folder).convert(out)
    generator = ct.Generator(out, device="cpu", compute_type="float32", intra_threads=1)
    pieces = json.loads(Path(out, "vocabulary.json").read_text())
    return lambda ids: np.array(generator.forward_batch([[pieces[i] for i in ids]], return_log_probs=False))[0]


def ort(folder: str) -> Rows:
    """ONNX Runtime GenAI in fp32: the first half at once, then a token at a time."""
    import onnxruntime_genai as og

    out = tempfile.mkdtemp()
    subprocess.run(
        [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", out, "-p", "fp32", "-e", "cpu"],
        check=True,
    )
    model = og.Model(out)

    def rows(ids: list[int]) -> np.ndarray:
        params, parts = og.GeneratorParams(model), []
        params.set_search_options(max_length=len(ids) + 1)
        generator, half = og.Generator(model, params), len(ids) // 2
        for piece in [ids[:half], *([token] for token in ids[half:])]:
            generator.append_tokens(np.array([piece], dtype=np.int32))
            parts.append(np.asarray(generator.get_output("logits"))[0])
        return np.concatenate(parts)

    return rows


def main(folder: str, texts: str, out: str, engine: str, dtype: str = "float32") -> None:
    """Runs one engine over a file of texts."""
    makers: dict[str, Callable[[], Rows]] = {
        "mlx": lambda: mlx(folder, dtype), "mlx-decode": lambda: mlx(folder, dtype, 1),
        "openvino": lambda: openvino(folder, "f32"), "openvino-default": lambda: openvino(folder, ""),
        "ctranslate2": lambda: ctranslate2(folder), "ort": lambda: ort(folder),
    }  # fmt: skip
    rows = makers[engine]()
    with open(Path(out, f"{engine}_{dtype}.jsonl"), "w") as file:
        for number, ids in enumerate(json.loads(Path(texts).read_text())):
            logits = rows(ids).astype(np.float64)[:-1]
            logits -= logits.max(-1, keepdims=True)
            values = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]
            half = len(ids) // 2
            line = {"id": f"{number}", "prompt": ids[:half], "tokens": ids[half:],
                    "prompt_logprobs": [None, *values[: half - 1].round(9)], "logprobs": [*values[half - 1 :].round(9)],
                    "declared": {"engine": engine, "dtype": dtype}}  # fmt: skip
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
