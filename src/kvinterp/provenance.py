"""What a result was made with, so that two results made differently are never averaged together silently."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from kvinterp._version import __version__
from kvinterp.models import Adapter

__all__ = ["provenance"]


def provenance(adapter: Adapter, **more: Any) -> dict[str, Any]:
    """Versions, device, dtype, kernels and the weights' hash, as plain JSON values.

    Args:
        adapter: The model that ran.
        more: Whatever else belongs to the result: paths, protocol, strategy, seed.
    """
    return {
        "kvinterp": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "transformer_lens": _version("transformer-lens"),
        "python": platform.python_version(),
        "device": device_name(adapter.device),
        "threads": torch.get_num_threads(),
        "model": adapter.facts.name,
        "architecture": adapter.facts.architecture,
        "kind": adapter.kind,
        "attention": adapter.facts.attention,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "weights": adapter.fingerprint(),
        "kernel_flags": kernel_flags(),
        **more,
    }


def device_name(device: torch.device) -> str:
    """The hardware's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return f"{found or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def kernel_flags() -> dict[str, Any]:
    """The switches that change which kernels run or how they accumulate."""
    matmul = torch.backends.cuda.matmul
    return {
        "allow_fp16_reduced_precision_reduction": _plain(matmul.allow_fp16_reduced_precision_reduction),
        "allow_bf16_reduced_precision_reduction": _plain(matmul.allow_bf16_reduced_precision_reduction),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32_matmul": torch.get_float32_matmul_precision() != "highest",
        "allow_tf32_cudnn": bool(torch.backends.cudnn.allow_tf32),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str) else str(value)


def _version(package: str) -> str:
    # The imported module wins over the installed distribution: a second copy may stand in front of it on the path.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
