"""What the tests share: which models there are, how they are made, and asserts that say where they failed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvinterp.comparison.recordable import COMPARED
from kvinterp.models import SITES, zoo
from kvinterp.policies import Policy

SEED = 20240
PROMPT = (3, 17, 44, 9, 71, 26, 58, 5, 33, 90, 12, 64)
"""Twelve token ids that every model's vocabulary has; longer than the tiny models' window of 8."""

TINY_WINDOW = 8


@functools.cache
def small_sae(architecture: str = "topk", layer: int = 2, width: int = 128) -> str:
    """A folder with a sparse autoencoder of random weights for a zoo model's residual stream."""
    from kvinterp.comparison.sparse_autoencoder import SparseAutoencoder

    sae = SparseAutoencoder(architecture, width, 64, 8, {"hook_name": f"blocks.{layer}.hook_resid_post"})
    generator = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for value in sae.parameters():
            value.copy_(
                torch.randn(value.shape, generator=generator).abs()
                if value.dim() == 1
                else torch.randn(value.shape, generator=generator)
            )
    return str(sae.save(Path(tempfile.mkdtemp()) / architecture))


def has_hooked_transformer() -> bool:
    """Whether the TransformerLens that is imported has HookedTransformer (versions before 4)."""
    import transformer_lens

    return int(transformer_lens.__version__.split(".")[0]) < 4 if hasattr(transformer_lens, "__version__") else _has_class()


def _has_class() -> bool:
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


# Models --------------------------------------------------------------------------------------------------------------


def _shared(**more: Any) -> dict[str, Any]:
    """Sizes of a tiny checkpoint; the weights are large enough that logits are far from equal."""
    return {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _llama_gqa() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_shared(tie_word_embeddings=True))


def _llama_mha() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_shared(num_key_value_heads=4, tie_word_embeddings=False, hidden_size=24, num_hidden_layers=3))


def _llama3_rope() -> Any:
    from transformers import LlamaConfig

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    }
    return LlamaConfig(**_shared(rope_parameters=scaling, head_dim=16, num_key_value_heads=1))


def _mistral_window() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_shared(sliding_window=TINY_WINDOW, head_dim=12, tie_word_embeddings=False))


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **_shared(
            sliding_window=TINY_WINDOW,
            head_dim=16,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=4.0,
        )
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=97,
        n_positions=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )


def random_model(kind: Any, seed: int = 0, **config: Any) -> Any:
    """A tiny random model of one of transformers' classes whose config has Llama's names, or of a class of one's own."""
    torch.manual_seed(seed)
    return kind(kind.config_class(**_shared(**config))).eval()


TINY: dict[str, Callable[[], Any]] = {
    "llama-gqa": _llama_gqa,
    "llama-mha": _llama_mha,
    "llama3-rope": _llama3_rope,
    "mistral-window": _mistral_window,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
}
"""Random checkpoints in transformers' format, by name."""

CONVERTED = ("llama-gqa", "llama-mha", "llama3-rope", "mistral-window", "gemma2")
"""Those of them that kind ``hooked`` converts from a folder."""

BARE = ("standard", "rotary")
"""HookedTransformers made from a HookedTransformerConfig, by their positional embedding."""


def write_checkpoint(name: str, folder: Path) -> Path:
    """Writes a tiny random checkpoint; every norm's weights are random too, so that none can be left out unseen."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(TINY[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def bare_hooked_transformer(positions: str, dtype: torch.dtype = torch.float32) -> Any:
    """A HookedTransformer that was never a checkpoint: ``positions`` is ``standard`` (learned) or ``rotary``."""
    from transformer_lens import HookedTransformer
    from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

    rotary = {"rotary_dim": 8, "positional_embedding_type": "rotary"} if positions == "rotary" else {}
    config = HookedTransformerConfig(
        d_model=32,
        d_head=8,
        n_heads=4,
        d_mlp=48,
        n_layers=2,
        n_ctx=96,
        d_vocab=97,
        act_fn="gelu",
        normalization_type="LN",
        seed=SEED,
        init_weights=True,
        initializer_range=0.15,
        dtype=dtype,
        device="cpu",
        **rotary,
    )
    config.model_name = f"bare-{positions}"
    return HookedTransformer(config).eval().requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model as one kind runs it.

    Attributes:
        model: ``zoo:NAME``, the name of a tiny checkpoint, or of a bare HookedTransformer.
        kind: ``hooked``, ``bridge`` or ``native``.
        attention: For native, ``eager`` or ``sdpa``.
    """

    model: str
    kind: str
    attention: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model.removeprefix("zoo:"), self.kind, self.attention)))

    @property
    def sites(self) -> list[str]:
        """Every site this case must give; beside SDPA scores and patterns are derived."""
        lacking = ("post",) if self.model == "zoo:moe-mini" else ("router",)
        return [site for site in SITES if site not in lacking]

    @property
    def patched(self) -> list[str]:
        """Every site that can be replaced: what is derived cannot, and scores are not offered."""
        derived = ("pattern",) if self.attention == "sdpa" else ()
        return [site for site in self.sites if site not in ("attn_scores", *derived)]

    @property
    def compared(self) -> str:
        """What ``compare`` can compare of it."""
        kept = [site for site in self.sites if site in COMPARED]
        return ",".join(kept)

    @property
    def windows(self) -> bool:
        """Whether some layer slides within the lengths the tests use."""
        return self.model in ("mistral-window", "gemma2")


def _ways(model: str, hooked: bool = True) -> list[Case]:
    ways = [Case(model, "bridge"), Case(model, "native", "eager")]
    if "gemma2" not in model:  # transformers has no SDPA for Gemma 2, whose scores are capped before the softmax.
        ways.append(Case(model, "native", "sdpa"))
    return [Case(model, "hooked"), *ways] if hooked else ways


SUITES_OWN_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KVINTERP_THREADS", "HF_HUB_OFFLINE", "TQDM_DISABLE")
"""Variables that these tests, or a shell they are run from, set, and a new user's does not."""

ZOO_CASES = [case for name in zoo.names() for case in _ways(f"zoo:{name}")]
TINY_CASES = [case for name in TINY for case in _ways(name, name in CONVERTED)] + [Case(name, "hooked") for name in BARE]
CASES = ZOO_CASES + TINY_CASES
FEATURES: dict[str, tuple[str, ...]] = {
    "llama-gqa": ("GQA", "rotary"),
    "llama-mha": ("MHA", "rotary"),
    "llama3-rope": ("MQA", "rotary", "scaled rotary"),
    "mistral-window": ("GQA", "rotary", "window"),
    "gemma2": ("GQA", "rotary", "window", "soft cap"),
    "gpt2": ("MHA", "learned positions"),
    "standard": ("MHA", "learned positions"),
    "rotary": ("MHA", "rotary"),
    "zoo:llama-mini": ("MHA", "rotary"),
    "zoo:gqa2-mini": ("GQA", "rotary"),
    "zoo:mistral-mini": ("GQA", "rotary"),
    "zoo:mqa-mini": ("MQA", "rotary"),
    "zoo:gemma2-mini": ("GQA", "rotary", "soft cap"),
    "zoo:llama64-mini": ("GQA", "rotary"),
    "zoo:moe-mini": ("GQA", "rotary", "experts"),
}
"""What can matter of a model; by default each meets each kind once (``sampling.py``)."""


def cases(chosen: list[Case] = CASES) -> Any:
    """Parametrises a test over cases, of which ``sampling.py`` draws; those that need HookedTransformer carry its mark."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=_marks(c)) for c in chosen])


def _marks(case: Case) -> list[Any]:
    # What llama64-mini has the others have too; its head_dim matters to quantised caches, whose tests name it.
    marks = [pytest.mark.hooked] if case.kind == "hooked" else []
    return [*marks, pytest.mark.long] if case.model == "zoo:llama64-mini" else marks


# Policies --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Louder(Policy):
    """Attention reads twice the values that are kept."""

    def read(self, keys: Tensor, values: Tensor, cache_rows: Any) -> tuple[Tensor, Tensor]:
        return keys, values * 2


@dataclasses.dataclass(frozen=True)
class Rounds(Policy):
    """Keeps eight bits of every number."""

    def write(self, keys: Tensor, values: Tensor, cache_rows: Any) -> tuple[Tensor, Tensor]:
        return keys.bfloat16().to(keys), values.bfloat16().to(values)


# Asserts that explain themselves ---------------------------------------------------------------------------------------


def describe_difference(a: Tensor, b: Tensor, names: tuple[str, ...] = ()) -> str:
    """The largest and the mean difference, and where the largest is, by the names of the dimensions."""
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ"
    if not a.numel():
        return "both are empty"
    difference = (a.double() - b.double()).abs()
    difference = torch.where(a == b, 0.0, difference)  # Inf - Inf is no difference.
    worst = tuple(int(i) for i in np.unravel_index(int(difference.nan_to_num(torch.inf).argmax()), tuple(a.shape) or (1,)))
    labels = names if len(names) == a.dim() else tuple(f"dimension {i}" for i in range(a.dim()))
    place = ", ".join(f"{name} {index}" for name, index in zip(labels, worst, strict=False)) or "the only element"
    first, second = (t.reshape(-1)[int(np.ravel_multi_index(worst, tuple(a.shape) or (1,)))].item() for t in (a, b))
    return (
        f"{int((a != b).sum())} of {a.numel()} elements differ, by at most {difference.max().item():.3e} and on average "
        f"{difference.mean().item():.3e}; the worst at {place}: {first!r} and {second!r}"
    )


def assert_bitwise(a: Tensor, b: Tensor, what: str = "tensors", names: tuple[str, ...] = ()) -> None:
    """Asserts equal shape, dtype and bits; NaN equals NaN where both have it, zeros of other sign are not equal."""
    assert a.dtype == b.dtype, f"{what}: dtypes {a.dtype} and {b.dtype} differ"
    same = a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    assert same, f"{what} are not bitwise equal: {describe_difference(a, b, names)}"


def assert_close(
    a: Tensor,
    b: Tensor,
    what: str = "tensors",
    names: tuple[str, ...] = (),
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> None:
    """Asserts ``|a - b| <= absolute + relative * max|b|``: relative to the largest of all, as rounding of sums is."""
    assert a.shape == b.shape, f"{what}: {describe_difference(a, b, names)}"
    bound = absolute + relative * float(b[b.isfinite()].abs().max()) if b.numel() else 0.0
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    assert bool((difference <= bound).all()), f"{what} differ by more than {bound:.3e}: {describe_difference(a, b, names)}"


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


# Hooks -----------------------------------------------------------------------------------------------------------------

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hooks_of(model: nn.Module) -> dict[tuple[str, str], list[Any]]:
    """Every hook of every module, torch's and TransformerLens' own lists of them; empty ones are left out.

    A module that is reached by two names is listed under both, and the modes that torch keeps on its own stack under
    the name ``torch``.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for kind in _HOOK_DICTS:
            held = getattr(module, kind, None)
            if held:
                found[name, kind] = list(held.items())
        for kind in ("fwd_hooks", "bwd_hooks"):
            held = getattr(module, kind, None)
            if isinstance(held, list) and held:
                found[name, kind] = [id(hook) for hook in held]
    modes = torch.overrides._get_current_function_mode_stack()
    if modes:
        found["torch", "function modes"] = [type(mode).__name__ for mode in modes]
    return found


def plain_forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of a bare model of any kind, as its own users call it."""
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


@contextlib.contextmanager
def nothing_left(model: nn.Module, warm: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hooks, torch's modes and the bits of a plain forward are the same at the end as they were before.

    Args:
        model: A bare model of any kind.
        warm: What is run beforehand: transformers and TransformerLens hang hooks of their own on a model the first time.
    """
    tokens = torch.tensor([PROMPT])
    warm()
    bits = plain_forward(model, tokens)
    before = hooks_of(model)
    yield
    assert hooks_of(model) == before
    assert_bitwise(plain_forward(model, tokens), bits, "logits afterwards")


class SoftmaxInItsOwnDtype(torch.overrides.TorchFunctionMode):
    """Takes away the cast to float32 that transformers' eager attention asks of its softmax, and counts how often."""

    taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
            kwargs.pop("dtype")
            self.taken += 1
        return func(*args, **kwargs)


def steps_of(tokens: list[int]) -> Iterator[Tensor]:
    """Token ids one at a time, each ``[batch=1, position=1]``."""
    for token in tokens:
        yield torch.tensor([[token]])
