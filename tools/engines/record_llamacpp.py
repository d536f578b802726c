"""Records what llama.cpp answers of a GGUF file, a request a position: ``record_llamacpp.py GGUF TEXTS.json OUT.jsonl CACHE``.

Made with xllamacpp (``pip install 'kvinterp[llamacpp]'``), in an environment of its own; CACHE is f32, f16, q8_0 or q4_0. Of each
position five tokens and the text's own are kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp


def main(model: str, texts: str, out: str, cache: str) -> None:
    """Asks the server for each position of each text."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.cache_type_k = params.cache_type_v = kind
    flash = "ENABLED" if cache.startswith("q") else "DISABLED"
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    params.warmup = False
    server = xllamacpp.Server(params)
    with open(out, "w") as file:
        for ids in json.loads(Path(texts).read_text()):
            for at in range(1, len(ids)):
                asked = {"prompt": ids[:at], "max_tokens": 1, "n_predict": 1, "n_probs": 512, "cache_prompt": False,
                         "temperature": 0.0, "return_tokens": True}  # fmt: skip
                answer: Any = server.handle_completions(asked)
                answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
                entries = answer.get("completion_probabilities") or answer["choices"][0]["logprobs"]["content"]
                entry = entries[0]
                top = entry["top_logprobs"]
                kept = [t for n, t in enumerate(top) if n < 5 or t["id"] == ids[at]]
                entry["top_logprobs"] = [{"id": t["id"], "logprob": t["logprob"]} for t in kept]
                held = {"completion_probabilities": [{k: entry[k] for k in ("id", "logprob", "top_logprobs")}]}
                file.write(json.dumps({"request": {"prompt": ids[:at]}, "response": held}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:5])
