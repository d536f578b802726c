"""Sparse autoencoders in the form that SAELens saves, so that features can be read with no package
but torch and safetensors.

SAELens (https://github.com/decoderesearch/SAELens) writes a folder with ``cfg.json`` and
``sae_weights.safetensors``. The common architectures are read here; of the others its own objects
serve as well, since :func:`kvinterp.which_run` takes anything with ``encode(x)``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from kvinterp.common.checks import check_instance
from kvinterp.common.files import bytes_of, is_file, strict_json, write_whole
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hashing import weights_hash
from kvinterp.models.hook_names import hook_of

ARCHITECTURES = ("standard", "topk", "jumprelu")
_ABOUT, _TENSORS = "cfg.json", "sae_weights.safetensors"
_PLAIN = {
    "normalize_activations": "none",
    "reshape_activations": "none",
    "rescale_acts_by_decoder_norm": False,
}
"""The settings of SAELens that are read at these values only."""


class SparseAutoencoder(nn.Module):
    """Features of one site of a model: ``x`` is about ``decode(encode(x))``, where few features
    fire.

    Args:
        architecture: ``"standard"`` (ReLU), ``"topk"`` (the k largest; arXiv 2406.04093) or
            ``"jumprelu"`` (those above a threshold each; arXiv 2407.14435).
        width: The width of the site.
        features: How many features.
        k: The most features that fire, for ``"topk"``.
        metadata: ``hook_name``, ``model_name`` and whatever else was noted.
        subtracts: Whether the decoder's bias is taken off the input first.
    """

    def __init__(
        self,
        architecture: str,
        width: int,
        features: int,
        k: int = 0,
        metadata: dict[str, Any] | None = None,
        subtracts: bool = True,
    ) -> None:
        super().__init__()
        self.architecture, self.k, self.metadata, self.subtracts = (
            architecture,
            k,
            dict(metadata or {}),
            subtracts,
        )
        self.W_enc, self.b_enc = (
            nn.Parameter(torch.zeros(width, features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.W_dec, self.b_dec = (
            nn.Parameter(torch.zeros(features, width)),
            nn.Parameter(torch.zeros(width)),
        )
        self.threshold = nn.Parameter(torch.zeros(features)) if architecture == "jumprelu" else None

    @property
    def hook_point(self) -> HookPoint | None:
        """The site and layer, by the hook that the metadata name; None where they name none."""
        found = hook_of(self.metadata.get("hook_name"))
        return None if found is None or found[1] is None else (found[0], found[1])

    @property
    def digest(self) -> str:
        """A hash of its weights and of what it does with them, 16 hex digits; two folders with the
        same content have the same.
        """
        identity = [
            self.architecture,
            self.k,
            self.subtracts,
            self.metadata.get("hook_name"),
            weights_hash(self),
        ]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()

    def before(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch feature"]:
        """The features before their activation function."""
        return (x - self.b_dec * self.subtracts) @ self.W_enc + self.b_enc

    def encode(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch feature"]:
        """The activation of each feature; it fires where that is not 0."""
        before = self.before(x.to(self.W_enc))
        if self.architecture == "topk":
            values, at = before.topk(self.k, dim=-1)
            return torch.zeros_like(before).scatter(-1, at, values.relu())
        return (
            before.relu() if self.threshold is None else before.relu() * (before > self.threshold)
        )

    def decode(self, features: Float[Tensor, "*batch feature"]) -> Float[Tensor, "*batch width"]:
        """The rows that features stand for."""
        return features @ self.W_dec + self.b_dec

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """What is left of rows."""
        return self.decode(self.encode(x))

    def save(self, folder: str | Path) -> Path:
        """Writes a folder that SAELens reads too (``SAE.load_from_disk``)."""
        target = Path(folder)
        about = {
            "architecture": self.architecture, "d_in": self.W_enc.shape[0], "d_sae": self.W_enc.shape[1], "dtype": "float32",
            "device": "cpu", "apply_b_dec_to_input": self.subtracts, **_PLAIN, "metadata": self.metadata,
        }  # fmt: skip
        about |= {"k": self.k} if self.architecture == "topk" else {}
        write_whole(
            target / _TENSORS,
            save({name: value.float().contiguous() for name, value in self.state_dict().items()}),
        )
        write_whole(target / _ABOUT, strict_json(about))
        return target


def load_sae(folder: str | Path) -> SparseAutoencoder:
    """Reads a sparse autoencoder that SAELens or :meth:`SparseAutoencoder.save` wrote; weights
    only, no code.

    Args:
        folder: A folder with ``cfg.json`` and ``sae_weights.safetensors``.

    Raises:
        InputError: It holds no such autoencoder.
        UnsupportedError: It is of an architecture that is not read here.
    """
    check_instance("folder", folder, (str, Path), "the name of a folder that SAELens saved")
    source = Path(folder)
    for name in (_ABOUT, _TENSORS):
        if not is_file(source / name):
            raise InputError(
                f"folder {str(source)!r} holds no {name}: give one that SAELens or tools/sae/train.py saved."
            )
    try:
        about, tensors = json.loads(bytes_of(source / _ABOUT)), load(bytes_of(source / _TENSORS))
        architecture = about["architecture"]
        odd = {
            name: value for name, value in about.items() if name in _PLAIN and value != _PLAIN[name]
        }
        if architecture not in ARCHITECTURES or odd:
            what = (
                f"architecture {architecture!r}"
                if not odd
                else ", ".join(f"{k}={v!r}" for k, v in odd.items())
            )
            raise UnsupportedError(
                f"the autoencoder in {str(source)!r} has {what}, which is not read here: load it with "
                "sae_lens.SAE.load_from_disk and give kv.which_run that object, whose encode(x) is called."
            )
        width, features = tensors["W_enc"].shape
        k, subtracts = int(about.get("k") or 0), bool(about.get("apply_b_dec_to_input", True))
        sae = SparseAutoencoder(architecture, width, features, k, about.get("metadata"), subtracts)
        sae.load_state_dict({name: tensors[name] for name in sae.state_dict()})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"folder {str(source)!r} holds no readable autoencoder ({error}): save it again."
        ) from error
    return sae.eval().requires_grad_(False)


def by_hook_point(saes: Sequence[SparseAutoencoder]) -> dict[HookPoint, SparseAutoencoder]:
    """Autoencoders by the site and layer that each names, as :func:`kvinterp.which_run` takes them.

    Raises:
        InputError: One names no hook, or two name the same.
    """
    found: dict[HookPoint, SparseAutoencoder] = {}
    for sae in saes:
        if sae.hook_point is None or sae.hook_point in found:
            why = (
                "names no hook"
                if sae.hook_point is None
                else f"is the second of {sae.metadata['hook_name']}"
            )
            raise InputError(
                f"an autoencoder {why}: give features={{('resid_post', 3): sae}} to kv.which_run, each at another hook point."
            )
        found[sae.hook_point] = sae
    return found
