"""llama.cpp's server in this process and on 127.0.0.1, by ``xllamacpp``: a second engine for the tests and the bank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parameters(model: Path, cache: str = "f32", flash: str = "disabled", **other: Any) -> Any:
    """What the server is started with.

    Args:
        model: A GGUF file.
        cache: f32, f16, bf16, q8_0 or q4_0.
        flash: enabled or disabled; llama.cpp refuses a quantised cache without.
        other: Other parameters by name, such as ``rope_freq_base``.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.n_threads_http = 512, 1, 1, 1
    params.port, params.warmup, params.ui, params.fit_params = 0, False, False, False
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash.upper()}")
    params.verbosity = -1
    for name, value in other.items():
        setattr(params, name, value)
    return params


@contextlib.contextmanager
def serving(model: Path, cache: str = "f32", flash: str = "disabled", **other: Any) -> Iterator[str]:
    """The URL of a server that runs within, ``http://127.0.0.1:PORT/v1``."""
    import xllamacpp

    server = xllamacpp.Server(parameters(model, cache, flash, **other))
    try:
        yield f"{server.listening_address}/v1"
    finally:
        del server


def walked(url: str, ids: list[int], cached: bool = False, begin: int = 1, **asked: Any) -> Any:
    """``[position]``: the log-prob of each token given those before it, a request a position; NaN for those before ``begin``.

    Args:
        url: The server.
        ids: The text.
        cached: Whether it may use what it has of the text, as it then has all but the newest token.
        begin: The first position asked for.
        asked: What else each request says; with ``post_sampling_probs`` of what the samplers left.
    """
    import http.client
    import json
    import urllib.parse

    import numpy as np

    body = {"max_tokens": 1, "temperature": 0, "logprobs": 512, "cache_prompt": cached, **asked}
    found = np.full(len(ids), np.nan)
    with contextlib.closing(http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)) as connection:
        for at in range(begin, len(ids)):
            connection.request(
                "POST", "/v1/completions", json.dumps({"prompt": ids[:at], **body}), {"content-type": "application/json"}
            )
            entry = json.loads(connection.getresponse().read())["choices"][0]["logprobs"]["content"][0]
            for each in entry.get("top_logprobs") or entry["top_probs"]:
                if each["id"] == ids[at]:
                    found[at] = each["logprob"] if "logprob" in each else np.log(each["prob"])
    return found
