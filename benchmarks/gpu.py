"""Cached against recompute at the shapes of real models, random weights made on the GPU in FP16.

    python benchmarks/gpu.py                          # Llama-2-7B, Mistral-7B-v0.3 and Gemma-2-2B on CUDA
    python benchmarks/gpu.py --tiny --device cpu      # the same code with every size shrunk, in seconds

For each model and kind (hooked, native): a matched comparison of 32 steps after a 256-token prompt, its time against the bare
loops, peak memory, KL, largest logit difference, drift by layer; and for every matrix product of the model whether a row's
result is bitwise the same among more rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kvinterp as kv
from kvinterp.comparison import mean_error
from kvinterp.metrics import units_in_last_place
from kvinterp.models.provenance import machine
from kvinterp.paths import Runner

ROWS = (1, 2, 17, 64, 128, 257)
COMMON = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-7b": (
        "Llama",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, **COMMON},
    ),
    "mistral-7b": (
        "Mistral",
        {"vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None, **COMMON},
    ),
    "gemma2-2b": (
        "Gemma2",
        {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
         "query_pre_attn_scalar": 256, "max_position_embeddings": 8192},
    ),
}  # fmt: skip
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip


def native(name: str, device: torch.device, tiny: bool) -> Any:
    """A transformers model of the shape, its weights drawn on the device in FP16."""
    import transformers

    family, sizes = SHAPES[name]
    sizes = {**sizes, **TINY} if tiny else sizes
    config = getattr(transformers, f"{family}Config")(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    for buffer_name, _buffer in list(model.named_buffers()):
        # RoPE frequencies stay in float32 when a checkpoint is loaded in FP16; so they do here.
        if "inv_freq" in buffer_name:
            owner, _, last = buffer_name.rpartition(".")
            rope = model.get_submodule(owner)
            exact, _ = type(rope).compute_default_rope_parameters(config)
            setattr(rope, last, exact.to(device=device, dtype=torch.float32))
    return model.eval().requires_grad_(False), config


def hooked(source: Any, config: Any, name: str, device: torch.device) -> Any:
    """The same weights as a HookedTransformer, made on the device."""
    from kvinterp.models.convert import hooked_from_transformers

    return hooked_from_transformers(source, config, name, torch.float16, device)


def synchronised(device: torch.device) -> float:
    """The time once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bare(adapter: kv.Adapter, tokens: torch.Tensor, fed: list[int], steps: int) -> None:
    """Both loops without anything recorded."""
    for form in ("cached", "recompute"):
        with Runner(adapter, kv.path_named(form), tokens, steps) as runner:
            for step in range(steps):
                runner.advance(None if step == 0 else tokens.new_tensor([fed[step - 1]]))


def measured(adapter: kv.Adapter, prompt: list[int], steps: int) -> dict[str, Any]:
    """The comparison, its time beside the bare loops, and its memory."""
    device = adapter.device
    tokens = torch.tensor([prompt], device=device)
    options: dict[str, Any] = {"max_new_tokens": steps, "stop": "length", "progress": "none", "record": "resid_post,kv"}
    both = kv.compare(adapter, prompt, **options)
    fed = both.steps["token_a"].tolist()
    bare(adapter, tokens, fed, steps)
    times: dict[str, list[float]] = {"bare": [], "compared": []}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        began = synchronised(device)
        bare(adapter, tokens, fed, steps)
        middle = synchronised(device)
        kv.compare(adapter, prompt, **options)
        times["bare"].append(middle - began)
        times["compared"].append(synchronised(device) - middle)
    ratios = sorted(c / b for b, c in zip(times["bare"], times["compared"], strict=True))
    drift = both.layers[both.layers["step"] > 0].groupby("layer")["relative_l2"].mean()
    cache = mean_error(both.kv_positions, ("tensor", "layer"))
    summary = both.summary()
    return {
        "seconds": {way: sorted(values)[1] for way, values in times.items()},
        "compared / bare": {"min": ratios[0], "median": ratios[1], "max": ratios[2]},
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "mean_kl": summary["mean_kl"],
        "max_kl": float(both.steps["kl"].max()),
        "max_abs_logit": summary["max_abs_logit"],
        "step_0_bitwise_equal": bool(both.steps.loc[0, "max_abs_logit"] == 0),
        "bitwise_equal_steps": summary["bitwise_equal_steps"],
        "flipped_steps": int(both.steps["flipped"].sum()),
        "relative_l2_by_layer": {int(layer): float(value) for layer, value in drift.items()},
        "cache_relative_error": {f"{t} {layer}": float(v) for (t, layer), v in cache.items()},
        "failures": both.failures["message"].tolist(),
    }


@torch.no_grad()
def row_invariance(model: Any) -> list[dict[str, Any]]:
    """For each distinct linear shape: is row 0's product the same among more rows, and how many units apart."""
    seen: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            seen.setdefault(tuple(module.weight.shape), (name, module.weight))  # type: ignore[arg-type]
    rows = []
    for (out, width), (name, weight) in seen.items():
        generator = torch.Generator(weight.device).manual_seed(0)
        inputs = torch.randn(max(ROWS), width, device=weight.device, dtype=weight.dtype, generator=generator)
        alone = torch.nn.functional.linear(inputs[:1], weight)[0].double()
        entry: dict[str, Any] = {"module": name, "out": out, "in": width, "rows": {}}
        for count in ROWS:
            among = torch.nn.functional.linear(inputs[:count], weight)[0].double()
            unit = units_in_last_place(torch.maximum(alone.abs(), among.abs()), weight.dtype)
            apart = ((alone - among).abs() / unit).max()
            entry["rows"][count] = {"bitwise": bool(torch.equal(alone, among)), "max_ulp": float(apart)}
        rows.append(entry)
    return rows


def main() -> int:
    """Measures, prints and writes."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--models", default=",".join(SHAPES))
    given.add_argument("--kinds", default="native,hooked")
    given.add_argument("--steps", type=int, default=32)
    given.add_argument("--prompt", type=int, default=256)
    given.add_argument("--device", default="cuda")
    given.add_argument("--tiny", action="store_true", help="shrink every size")
    given.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = given.parse_args()
    unknown = [m for m in options.models.split(",") if m not in SHAPES]
    if unknown:
        print(f"error: unknown model {unknown[0]!r}: expected one of {', '.join(SHAPES)}.", file=sys.stderr)
        return 2
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: torch sees no CUDA device here: run this on a GPU, or with --tiny --device cpu.", file=sys.stderr)
        return 2
    device, console = torch.device(options.device), Console(width=150)
    results: dict[str, Any] = {**machine(device), "steps": options.steps, "prompt": options.prompt, "tiny": options.tiny}
    results["models"] = {}
    table = Table(
        "model", "kind", "compared / bare", "peak GiB", "mean KL", "max logit difference", "flips", title=results["device"]
    )
    label = re.sub(r"\W+", "-", results["device"]).strip("-").lower() + ("-tiny" if options.tiny else "")
    target = options.out / f"gpu-{label}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        model, config = native(name, device, options.tiny)
        entry: dict[str, Any] = {"row_invariance": row_invariance(model)}
        results["models"][name] = entry
        prompt = torch.randint(3, config.vocab_size, (options.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
        for kind in options.kinds.split(","):
            adapter = kv.wrap(model if kind == "native" else hooked(model, config, name, device), name=f"random {name}")
            entry[kind] = measured(adapter, prompt, options.steps)
            shown = entry[kind]
            peak = "-" if shown["peak_bytes"] is None else f"{shown['peak_bytes'] / 2**30:.1f}"
            ratio = f"{shown['compared / bare']['median']:.2f}"
            numbers = f"{shown['mean_kl']:.2e}", f"{shown['max_abs_logit']:.3g}", str(shown["flipped_steps"])
            table.add_row(name, kind, ratio, peak, *numbers)
            # After each kind: what is cut off keeps what it measured.
            target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            del adapter
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    console.print(table)
    for name, entry in results["models"].items():
        variant = [r["module"] for r in entry["row_invariance"] if not all(x["bitwise"] for x in r["rows"].values())]
        console.print(f"{name}: row-variant products: {', '.join(variant) or 'none'}")
    console.print(f"written to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
