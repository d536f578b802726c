"""A model's own log-probs put into each format that engines write, with the format's quirks (docs/engines.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvinterp.engines.readers.kl_base import MAGIC
from kvinterp.recording.engine_path import EnginePath

Ids = Sequence[int]


def all_log_probs(adapter: Any, ids: Ids, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """``[position, vocabulary]``: row t is of the token behind position t."""
    model = adapter.at(dtype)
    with torch.no_grad():
        return model.forward(torch.tensor([list(ids)])).double().log_softmax(-1)[0].numpy()


def lines(records: Sequence[Any], file: Path) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def best(row: np.ndarray, own: int, k: int = 5) -> list[tuple[int, float]]:
    """The k likeliest tokens, and the chosen one where it is not among them."""
    top = [int(t) for t in np.argsort(-row)[:k]]
    return [(t, float(row[t])) for t in [*top, *([] if own in top else [own])]]


def completions(ids: Ids, cut: int, rows: np.ndarray, keys: str = "token_id", infinite: bool = True) -> dict[str, Any]:
    """vLLM's, prompt_logprobs and all; keys are ``token_id:N``, -9999 where the log-prob is minus infinity."""
    own = [float(rows[t - 1][ids[t]]) for t in range(cut, len(ids))]
    if infinite:
        own[0] = -9999.0
    tops = [{f"token_id:{t}": v for t, v in best(rows[at - 1], ids[at])} for at in range(cut, len(ids))]
    if infinite:
        tops[0] = {name: -9999.0 if name == f"token_id:{ids[cut]}" else value for name, value in tops[0].items()}
    before: list[Any] = [None]
    before += [
        {str(t): {"logprob": v, "rank": n, "decoded_token": "x"} for n, (t, v) in enumerate(best(rows[at - 1], ids[at]), 1)}
        for at in range(1, cut)
    ]
    held = {"text_offset": [], "token_logprobs": own, "tokens": [f"token_id:{t}" for t in ids[cut:]], "top_logprobs": tops}
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": held, "prompt_logprobs": before}
    if keys == "token_id":
        choice["prompt_token_ids"] = list(ids[:cut])
    return {"object": "text_completion", "choices": [choice]}


def chat(ids: Ids, cut: int, rows: np.ndarray, texts: Sequence[str] | None = None) -> dict[str, Any]:
    """The chat shape: ids beside each token as llama.cpp has them, or texts alone and token_ids beside."""
    content = []
    for at in range(cut, len(ids)):
        name = (lambda t: {"token": f"<{t}>", "id": t}) if texts is None else (lambda t: {"token": texts[t]})
        top = [{**name(t), "bytes": [], "logprob": v} for t, v in best(rows[at - 1], ids[at])]
        content.append({**name(ids[at]), "bytes": [], "logprob": float(rows[at - 1][ids[at]]), "top_logprobs": top})
    return {"request": {"prompt": list(ids[:cut])}, "response": {"choices": [{"logprobs": {"content": content}}]}}


def llama_positions(ids: Ids, rows: np.ndarray, begin: int = 1) -> list[dict[str, Any]]:
    """llama.cpp's /completion, a request a position with the whole vocabulary; probability 0 is the lowest float32."""
    found = []
    for at in range(begin, len(ids)):
        row = rows[at - 1]
        top = [{"id": t, "token": "x", "logprob": float(row[t])} for t in range(len(row))]
        most = int(row.argmax())
        top[(most + 1) % len(row)]["logprob"] = (
            -3.4028234663852886e38 if (most + 1) % len(row) != ids[at] else float(row[ids[at]])
        )
        entry = {"id": most, "token": "x", "bytes": [], "logprob": float(row[most]), "top_logprobs": top}
        found.append({"request": {"prompt": list(ids[:at])}, "response": {"completion_probabilities": [entry]}})
    return found


def sglang(ids: Ids, cut: int, rows: np.ndarray) -> dict[str, Any]:
    """``meta_info``; the first position of the prompt has no log-prob."""

    def entries(begin: int, end: int) -> list[Any]:
        return [[None if at == 0 else float(rows[at - 1][ids[at]]), ids[at], None] for at in range(begin, end)]

    tops = [[[v, t, None] for t, v in best(rows[at - 1], ids[at])] for at in range(cut, len(ids))]
    held = {
        "input_token_logprobs": entries(0, cut),
        "output_token_logprobs": entries(cut, len(ids)),
        "output_top_logprobs": tops,
        "cached_tokens": 0,
    }
    return {"request": {"sampling_params": {"temperature": 1.0}}, "response": {"text": "", "meta_info": held}}


def nemo(ids: Ids, cut: int, rows: np.ndarray, trainer: np.ndarray) -> dict[str, Any]:
    """Zeros where there is no log-prob, and padding behind the end."""
    pad = 3

    def side(of: np.ndarray) -> list[float]:
        return [0.0] * cut + [float(of[at - 1][ids[at]]) for at in range(cut, len(ids))] + [0.0] * pad

    mask = [0] * cut + [1] * (len(ids) - cut) + [0] * pad
    sides = {"generation_logprobs": side(rows), "prev_logprobs": side(trainer)}
    return {"token_ids": [*ids, *[0] * pad], "token_loss_mask": mask, "input_lengths": len(ids), "rewards": 1.0, **sides}


def prime(ids: Ids, cut: int, rows: np.ndarray, trainer: np.ndarray) -> dict[str, Any]:
    """NaN is null."""

    def side(of: np.ndarray) -> list[float | None]:
        return [None] * cut + [float(of[at - 1][ids[at]]) for at in range(cut, len(ids))]

    sides = {"inference_logprobs": side(rows), "trainer_logprobs": side(trainer)}
    return {"schema_version": 1, "token_ids": list(ids), "loss_mask": [at >= cut for at in range(len(ids))], **sides}


def trl(ids: Ids, cut: int, rows: np.ndarray) -> dict[str, Any]:
    """A server's batch: two replies to one prompt, the likeliest tokens' log-probs beside each token's own."""
    tops = [best(rows[at - 1], ids[at]) for at in range(cut, len(ids))]
    values, names = ([[pair[part] for pair in top] for top in tops] for part in (1, 0))
    replies = {"completion_ids": list(ids[cut:]), "logprobs": values, "logprob_token_ids": names}
    return {"prompt_ids": [list(ids[:cut])], **{name: [row, row] for name, row in replies.items()}}


def verl(ids: Ids, cut: int, rows: np.ndarray, trainer: np.ndarray) -> dict[str, Any]:
    """A batch of one, padded left and right; its fourth token is a tool's."""
    pad, count = [0] * 3, len(ids) - cut
    sides = ([float(of[at - 1][ids[at]]) for at in range(cut, len(ids))] + [0.0] * 3 for of in (rows, trainer))
    batch = {"prompts": [*pad, *ids[:cut]], "responses": [*ids[cut:], *pad], "attention_mask": [*pad, *[1] * len(ids), *pad],
             "response_mask": [*[int(at != 3) for at in range(count)], *pad]}  # fmt: skip
    return {
        name: [row]
        for name, row in {**batch, **dict(zip(("rollout_log_probs", "old_log_probs"), sides, strict=True))}.items()
    }


def own(ids: Ids, cut: int, rows: np.ndarray, **declared: Any) -> dict[str, Any]:
    chosen = [None, *(float(v) if math.isfinite(v := rows[at - 1][ids[at]]) else None for at in range(1, len(ids)))]
    return {"prompt": list(ids[:cut]), "tokens": list(ids[cut:]), "prompt_logprobs": chosen[:cut], "logprobs": chosen[cut:],
            "declared": declared}  # fmt: skip


def write_given(paths: Iterable[EnginePath], file: str | Path) -> Path:
    """Writes paths in our own form.

    Args:
        paths: The paths.
        file: The file.
    """
    lines = []
    for path in paths:
        cut = len(path.prompt)
        rows = {"prompt_logprobs": path.chosen[:cut], "logprobs": path.chosen[cut:]}
        record: dict[str, Any] = {"id": path.id, "prompt": list(path.prompt), "tokens": list(path.tokens)}
        record |= {name: [None if np.isnan(v) else float(v) for v in row] for name, row in rows.items()}
        if path.trainer is not None:
            record["trainer_logprobs"] = [None if np.isnan(v) else float(v) for v in path.trainer[cut:]]
        if path.top:
            pairs = [path.top.get(at) for at in range(len(path.ids))]
            record["top"] = [None if p is None else [list(each) for each in zip(*map(np.ndarray.tolist, p), strict=True)]
                             for p in pairs]  # fmt: skip
        lines.append(json.dumps({**record, "declared": dict(path.declared)}))
    return _file(file, "\n".join(lines) + "\n")


def write_kl_base(tokens: Sequence[Sequence[int]], log_probs: Sequence[np.ndarray], file: str | Path) -> Path:
    """Writes chunks of one length as llama.cpp does.

    Args:
        tokens: The ids of each chunk.
        log_probs: For each chunk ``[rows, vocabulary]``, in nats: of the tokens behind its middle.
        file: The file.
    """
    context, vocabulary = len(tokens[0]), log_probs[0].shape[1]
    parts = [MAGIC, np.array([context, vocabulary, len(tokens)], "<i4").tobytes(), np.array(tokens, "<i4").tobytes()]
    for each in log_probs:
        most = each.max(-1, keepdims=True)
        least = np.maximum(each.min(-1, keepdims=True), most - 16.0)
        scale = ((most - least) / 65535).astype("<f4")
        safe = np.where(scale > 0, scale, 1)
        q = np.where(scale > 0, np.rint((np.maximum(each, least) - least) / safe), 0).clip(0, 65535).astype("<u2")
        head = np.concatenate([scale, least.astype("<f4")], -1).view("<u2")
        odd = np.zeros((len(q), vocabulary % 2), "<u2")
        parts.append(np.ascontiguousarray(np.concatenate([head, q, odd], -1)).tobytes())
    return _file(file, b"".join(parts))


def _file(file: str | Path, content: str | bytes) -> Path:
    Path(file).write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(file)
