"""Records what a result was made with, so that results made differently are never averaged together
silently.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from kvinterp._version import __version__
from kvinterp.models import Adapter
from kvinterp.models.threads import threads_for

ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DYNAMIC",
)
"""Environment variables that choose kernels or the order in which they add; how idle threads wait
changes no bit.
"""


def provenance(adapter: Adapter, **extra: Any) -> dict[str, Any]:
    """Versions, device, dtype, kernels and the hash of the weights, as plain JSON values.

    Args:
        adapter: The model that ran.
        extra: Whatever else belongs to the result: paths, protocol, strategy, seed.
    """
    here = machine(adapter.device)
    flags = here.pop("kernel_flags")
    return {
        **here,
        "threads": threads_for(adapter),
        "model": adapter.facts.name,
        "architecture": adapter.facts.architecture,
        "kind": adapter.kind,
        "attention": adapter.facts.attention,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "autocast": autocast(adapter.device),
        "weights": adapter.fingerprint(),
        **({"stored": adapter.stored} if adapter.stored else {}),
        "kernel_flags": flags,
        **extra,
    }


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What determines bits besides the model: versions, device, threads, kernels, environment.

    Args:
        device: The device (default: CUDA where there is one).
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "kvinterp": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "transformer_lens": _version("transformer-lens"),
        "python": platform.python_version(),
        "device": device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _text("/proc/driver/nvidia/version").partition("\n")[0],
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "kernel_flags": kernel_flags(),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the vector instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = _text("/proc/cpuinfo").splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
    )
    return f"{name or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""


def autocast(device: torch.device) -> str:
    """The dtype of torch's autocast on a device at the moment, such as ``"bfloat16"``, or
    ``"off"``.
    """
    if not torch.is_autocast_enabled(device.type):
        return "off"
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def kernel_flags() -> dict[str, Any]:
    """Torch's switches that change which kernels run or how they accumulate."""
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    backends = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    reductions = {}
    for name in ("fp16", "bf16"):
        reduction = f"allow_{name}_reduced_precision_reduction"
        reductions[reduction] = getattr(matmul, reduction)
        # Older versions of torch have no switch for split-K and always allow it.
        reductions[f"{reduction}_split_k"] = getattr(matmul, f"{reduction}_split_k", True)
    reductions["allow_fp16_accumulation"] = getattr(matmul, "allow_fp16_accumulation", False)
    return {
        **{
            name: value if isinstance(value, bool | int | str) else str(value)
            for name, value in reductions.items()
        },
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32_matmul": torch.get_float32_matmul_precision() != "highest",
        "allow_tf32_cudnn": bool(torch.backends.cudnn.allow_tf32),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "preferred_blas_library": str(cuda.preferred_blas_library()).rpartition(".")[2],
        "sdpa_backends": [name for name, enabled in backends.items() if enabled],
        "sdpa_math_reduced_precision": bool(cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "onednn": bool(torch.backends.mkldnn.enabled),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
