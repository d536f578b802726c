"""A trace: the tokens, records and provenance of one path on one prompt."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvinterp.common.checks import check_instance
from kvinterp.common.files import bytes_of, is_file, strict_json, write_whole
from kvinterp.common.numbers import counted, models_of
from kvinterp.errors import InputError, shown
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import HOOKS, hook_point_of
from kvinterp.models.sites import LAYOUTS
from kvinterp.recording.activation_cache import cache_of

_ABOUT, _TENSORS = "trace.json", "trace.safetensors"


@dataclasses.dataclass(repr=False)
class Trace:
    """The trace of one prompt along one path.

    Attributes:
        path: The path's text form.
        prompt: Token ids of the prompt.
        tokens: The token ids that the path chose, one a step; the prefill decides that of step 0.
        fed: The token ids that the path was fed from step 1 on; ``tokens`` itself unless another
            path led.
        records: For each site and layer one tensor a recorded step, without the batch dimension, on
            the model's device and in its dtype. With ``positions="newest"`` it is one row:
            ``[width]`` of a residual site, ``[query_head, key]`` of ``pattern``,
            ``[kv_head, head_dim]`` of ``cache_k``. With ``"all"`` it has every row of the step's
            forward: those of the prompt at step 0, then one on a cached path and the whole prefix
            on a recompute path; of a cache site always all that attention reads.
        steps: The recorded steps.
        logits: ``[step, vocab]``, with ``logits="keep"``.
        ended: ``"length"`` or ``"end of sequence"``.
        failure: Where NaN or Inf first appeared, or empty.
        provenance: Model, machine and settings.
        heads: The query heads in the records, in their order; None for all.
        kv_heads: The KV heads in the records, in their order; None for all.
        derived: The sites that were computed beside a kernel that does not show them (SDPA).
        ids: For a trace made of arrays ``[column]`` or ``[step, column]``: the tokens whose
            log-probs ``logits`` holds, NaN where none is given. None if ``logits`` holds logits of
            the whole vocabulary.
    """

    path: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    fed: tuple[int, ...]
    records: dict[HookPoint, list[Tensor]]
    steps: tuple[int, ...]
    logits: Float[Tensor, "step vocab"] | None = None
    ended: str = "length"
    failure: str = ""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    derived: tuple[str, ...] = ()
    ids: Int[Tensor, "*step column"] | None = None
    model: ClassVar[Any] = staticmethod(lambda: None)
    """The model that made it, while it lives in this process; none of a trace that was read or made
    of arrays.
    """

    @classmethod
    def from_arrays(
        cls,
        prompt: Any,
        tokens: Any,
        values: Any,
        ids: Any = None,
        path: str = "given",
        hidden: Mapping[Any, Any] | None = None,
        **declared: Any,
    ) -> Trace:
        """Makes a trace of arrays or lists that were computed elsewhere.

        Args:
            prompt: Token ids.
            tokens: Token ids after the prompt, one a step.
            values: ``[step, vocabulary]``, log-probs in nats or logits, or with ``ids``
                ``[step, k]``, log-probs of the k likeliest tokens. NaN and values of at most -9000
                count as not given.
            ids: ``[step, k]``, the token of each value; None for the whole vocabulary.
            path: The name of the path.
            hidden: Activations at the newest position, a row a step: by site and layer,
                ``{("resid_post", 3): [step, width]}``, or by TransformerLens's hook.
            **declared: Provenance, such as ``model="..."`` and ``dtype="float16"``.

        Raises:
            InputError: The shapes do not fit, or the values cannot be log-probs.
        """
        from kvinterp.recording.engine_path import LARGEST, MISSING, positive, token_ids

        try:
            prompt, tokens = np.asarray(prompt).tolist(), np.asarray(tokens).tolist()
            array = _array(values)
            if array.is_complex() or array.dtype == torch.bool:
                raise TypeError("no real numbers")
            rows = array.double()
            columns = torch.arange(rows.shape[-1]) if ids is None else _array(ids).clone()
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                "prompt, tokens, values and ids cannot be made arrays of real numbers: expected such."
            ) from error
        prompt, tokens = token_ids(prompt, "prompt"), token_ids(tokens, "tokens")
        if not prompt or rows.dim() != 2 or len(rows) != len(tokens) or not rows.numel():
            raise InputError(
                f"{len(prompt)} prompt tokens, {len(tokens)} more and values of shape {tuple(rows.shape)} were given: expected "
                "values [step, vocabulary], or [step, k] with ids, a row for each token behind the prompt."
            )
        if ids is not None and (
            columns.shape != rows.shape or columns.is_floating_point() or bool((columns < 0).any())
        ):
            raise InputError(
                f"ids of shape {tuple(columns.shape)} were given: expected a token id for each value."
            )
        if ids is not None and bool((columns.sort(-1).values.diff(dim=-1) == 0).any()):
            raise InputError(
                "ids has a token twice in one row: expected each once, with its own value."
            )
        present = (rows > MISSING) & (rows < LARGEST)
        # Columns that are this low in every row pad the vocabulary.
        pads = (rows <= MISSING) & ((rows <= MISSING).all(0) | (rows == -torch.inf)) & (ids is None)
        if ids is None and bool((present | pads).all()):
            rows, present = rows.masked_fill(pads, -torch.inf).log_softmax(-1), present | pads
        rows = rows.masked_fill(~present, torch.nan)
        if why := positive(rows.numpy()):
            raise InputError(f"{why} Give log-probs, or the logits of the whole vocabulary.")
        records = {
            cast(HookPoint, hook_point_of(hook_point)): [*_array(tensor)]
            for hook_point, tensor in (hidden or {}).items()
        }
        if wrong := [
            hook_point
            for hook_point, record in records.items()
            if len(record) != len(tokens) or not isinstance(hook_point, tuple)
        ]:
            raise InputError(
                f"hidden[{shown(wrong[0])}] does not fit {len(tokens)} tokens: expected a row for each, by site and layer."
            )
        steps = tuple(range(len(tokens))) if records else ()
        return cls(
            path,
            prompt,
            tokens,
            tokens[:-1],
            records,
            steps,
            rows,
            provenance=declared,
            ids=columns,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the model out, which belongs to this process."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    def __repr__(self) -> str:
        """Names the model, the path, the size and the records in one line."""
        names = sorted({site for site, _ in self.records})
        sites = [f"{name} (derived)" if name in self.derived else name for name in names]
        records = (
            f"{', '.join(sites)} of {len({layer for _, layer in self.records})} layers"
            if sites
            else "no records"
        )
        path = ", ".join(filter(None, (models_of([self.provenance]), f"path {self.path}")))
        return f"<Trace of {path}: {len(self.prompt)} prompt tokens, {len(self.tokens)} steps, {records}>"

    def __getitem__(self, hook_point: HookPoint | str) -> Tensor:
        """Returns one site at one layer, stacked over the recorded steps; ragged lengths are padded
        at their end with NaN (positions with -1). The tensor of a step as it was is
        ``records[hook_point][steps.index(step)]``.

        Args:
            hook_point: A site and a layer, ``("pattern", 1)``, or a hook's name,
                ``"blocks.1.attn.hook_pattern"``.
        """
        hook_point = cast(HookPoint, hook_point_of(hook_point))
        if hook_point not in self.records:
            layers = Counter(site for site, _ in self.records)
            have = [
                f"{site} of {counted(count, 'layer')}" for site, count in sorted(layers.items())
            ] or ["nothing"]
            raise InputError(
                f"this trace holds no {shown(hook_point)}: it recorded {', '.join(have)}; ask for a site and a layer, as in "
                "trace['pattern', 1]."
            )
        if not self.records[hook_point]:
            raise InputError(
                f"this trace recorded none of its {len(self.tokens)} steps at {hook_point!r}: record one with steps=..., or all."
            )
        return stacked(self.records[hook_point])

    def to_activation_cache(self, step: int | None = None, model: Any = None) -> Any:
        """Returns one step as TransformerLens's ``ActivationCache``, by the names of its hooks,
        with a batch of one.

        If a cached path recorded ``positions="all"`` at every step, the rows of earlier steps come
        first, so that there is a row for each position; scores and patterns are those of the step's
        own queries. Sites of the KV cache have no hook and are left out.

        Args:
            step: The step; by default the last recorded.
            model: The model, which some methods of the cache need (``stack_head_results``, ...).

        Raises:
            InputError: The step was not recorded, or no recorded site has a hook.
        """
        if step is None:
            step = self.steps[-1] if self.steps else 0
        if isinstance(step, bool) or step not in self.steps:
            raise InputError(
                f"step={step!r} was not recorded: expected one of {', '.join(map(str, self.steps)) or 'none'}."
            )
        until = self.steps.index(step) + 1
        every_step = self.path.startswith("cached") and self.steps[:until] == tuple(range(until))
        tensors = {}
        for hook_point, record in self.records.items():
            if hook_point[0] in HOOKS:
                layout, tensor = LAYOUTS[hook_point[0]], record[until - 1]
                if every_step and layout.gathers and tensor.dim() == layout.dimensions - 1:
                    tensor = torch.cat(record[:until])
                tensors[hook_point] = tensor[None]
        return cache_of(tensors, model)

    @property
    def kept_bytes(self) -> int:
        """Bytes of records and logits."""
        tensors = [t for record in self.records.values() for t in record] + (
            [] if self.logits is None else [self.logits]
        )
        return sum(t.nbytes for t in tensors)

    def save(self, folder: str | Path) -> Path:
        """Writes ``trace.safetensors`` and ``trace.json`` into a folder. A killed run leaves no
        half file.
        """
        target = Path(folder)
        given = {"logits": self.logits, "ids": self.ids}
        tensors = {
            name: tensor.contiguous().cpu() for name, tensor in given.items() if tensor is not None
        }
        for (site, layer), record in self.records.items():
            if len({t.shape for t in record}) == 1:
                tensors[f"{site}.{layer}"] = torch.stack(record).cpu()
            else:
                tensors |= {
                    f"{site}.{layer}.{step}": t.contiguous().cpu() for step, t in enumerate(record)
                }
        about = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("records", "logits", "ids")
        }
        about["places"] = [list(hook_point) for hook_point in self.records]
        write_whole(target / _TENSORS, save(tensors))
        write_whole(target / _ABOUT, strict_json(about))
        return target

    @classmethod
    def load(cls, folder: str | Path) -> Trace:
        """Reads a trace that :meth:`save` wrote.

        Raises:
            InputError: The folder holds no complete trace.
        """
        check_instance("folder", folder, (str, Path), "the name of a folder that Trace.save wrote")
        source = Path(folder)
        for name in (_ABOUT, _TENSORS):
            if not is_file(source / name):
                raise InputError(
                    f"folder {str(source)!r} holds no {name}: give a folder that Trace.save wrote."
                )
        try:
            about, tensors = (
                json.loads(bytes_of(source / _ABOUT)),
                load(bytes_of(source / _TENSORS)),
            )
            about |= {name: tuple(about[name]) for name in ("prompt", "tokens", "fed", "steps")}
            about |= {
                name: tuple(about[name])
                for name in ("heads", "kv_heads", "derived")
                if about.get(name) is not None
            }
            logits, ids = (tensors.pop(name, None) for name in ("logits", "ids"))
            records: dict[HookPoint, dict[int, Tensor]] = {
                (site, layer): {} for site, layer in about.pop("places", ())
            }
            for name, tensor in tensors.items():
                site, layer, *step = name.split(".")
                pieces = {int(step[0]): tensor} if step else dict(enumerate(tensor.unbind(0)))
                records.setdefault((site, int(layer)), {}).update(pieces)
            lists = {
                hook_point: [record[i] for i in sorted(record)]
                for hook_point, record in records.items()
            }
            return cls(**about, records=lists, logits=logits, ids=ids)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(
                f"folder {str(source)!r} holds no readable trace ({error}): save it again."
            ) from error


def _array(values: Any) -> Tensor:
    return torch.as_tensor(values).detach().cpu()


def stacked(tensors: list[Tensor]) -> Tensor:
    """Stacks tensors, padding each axis to the longest with NaN, and positions (whole numbers) with
    -1.
    """
    if len({t.shape for t in tensors}) == 1:
        return torch.stack(tensors)
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    stack = tensors[0].new_full(
        (len(tensors), *shape), torch.nan if tensors[0].is_floating_point() else -1
    )
    for row, tensor in zip(stack, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return stack
