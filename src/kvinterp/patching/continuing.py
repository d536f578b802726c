"""Patches a text while it is generated, and shows the continuation beside the clean one.

A residual stream, or keys and values, of one run at one token are put into another run at a
position that it has yet to write (Patchscopes, arXiv 2401.06102, where the position is in the
prompt). Both runs are the model's own ``generate``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch

from kvinterp import metrics
from kvinterp.common import words
from kvinterp.common.checks import check_seed
from kvinterp.common.numbers import counted, number
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import encode
from kvinterp.patching.around import patched
from kvinterp.patching.patch import Patch
from kvinterp.recording import Generation, generated


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PatchedGeneration:
    """A text that was patched while it was generated, beside the clean one.

    Attributes:
        clean: The text and activations of the clean run.
        patched: Those of the patched run.
        patches: The patches.
        adapter: The model.
    """

    clean: Generation
    patched: Generation
    patches: tuple[Patch, ...]
    adapter: Adapter

    @property
    def first_change(self) -> int | None:
        """The position of the first token that differs; None where the texts are the same."""
        ours, theirs = self.clean.tokens, self.patched.tokens
        length = min(len(ours), len(theirs))
        at = next(
            (at for at in range(length) if ours[at] != theirs[at]),
            None if len(ours) == len(theirs) else length,
        )
        return None if at is None else len(self.clean.prompt) + at

    @property
    def frame(self) -> pd.DataFrame:
        """One row a generated token: position, clean, patched (token ids), clean_text,
        patched_text, same_context, kl.

        ``kl`` is KL(clean || patched) in nats of the distributions that decided the token. Where
        ``same_context`` is false the two runs had been fed different tokens by then, so that it
        compares two texts.
        """
        start, first = len(self.clean.prompt), self.first_change
        rows = []
        for at in range(max(len(self.clean.tokens), len(self.patched.tokens))):
            same = first is None or start + at <= first
            row: dict[str, Any] = {"position": start + at, "same_context": same}
            for name, text in (("clean", self.clean), ("patched", self.patched)):
                token = text.tokens[at] if at < len(text.tokens) else None
                row |= {
                    name: token,
                    f"{name}_text": None if token is None else self.adapter.decode([token]),
                }
            if at < min(len(self.clean.tokens), len(self.patched.tokens)):
                pair: Any = self.clean.logits, self.patched.logits
                row["kl"] = float(metrics.kl_divergence(*(logits[at] for logits in pair)))
            rows.append(row)
        frame = pd.DataFrame(rows)
        return frame.astype({"clean": "Int64", "patched": "Int64"})

    def __str__(self) -> str:
        """Both continuations, and where the patched one parts."""
        frame, first = self.frame, self.first_change
        sites = ", ".join(dict.fromkeys(patch.site for patch in self.patches))
        before = frame.loc[frame["same_context"], "kl"].max()
        if first is None:
            count = counted(len(frame), "token")
            said = f"The patch of {sites} changed none of {count}; the largest KL is {number(before)} nats."
        else:
            changed = int((frame["clean"] != frame["patched"]).fillna(True).sum())
            said = (
                f"The patch of {sites} changed {changed} of {counted(len(frame), 'token')}, the first at position {first}, where "
                f"KL is {number(frame.loc[frame['position'] == first, 'kl'].max())} nats."
            )
        lines = [
            f"{name:8}{self.adapter.decode(text.tokens)!r}"
            for name, text in (("clean", self.clean), ("patched", self.patched))
        ]
        return "\n".join([said, *lines])

    def __repr__(self) -> str:
        """Says it in brackets."""
        return f"<PatchedGeneration: {str(self).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        return f"<p>{str(self).splitlines()[0]}</p>{self.frame.to_html(index=False)}"


def patched_generation(
    model: Any,
    prompt: Any,
    patches: Patch | Iterable[Patch],
    *,
    max_new_tokens: int = 20,
    record: words.Site | str = "resid_post",
    seed: int = 0,
    **options: Any,
) -> PatchedGeneration:
    """Generates a text twice, clean and patched, and shows the patched continuation beside the
    clean one.

    A patch may name a position that is yet to be written: it is applied when that position is
    computed, and what follows reads it from the cache.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        prompt: A text, a :class:`Prompt`, or token ids.
        patches: Patches with donors, as for :func:`patched`. A row of another run is a donor:
            ``text["resid_post", 3][17]``, of :func:`kvinterp.generated`; for keys and values patch
            ``k`` and ``v``, which go into the cache.
        max_new_tokens: The most tokens to generate.
        record: The sites to keep of both runs.
        seed: Seeds torch's generator before each run, for sampling; what it was before is put back.
        options: Of the model's own ``generate()``.

    Raises:
        InputError: A patch does not fit the model or its donor, or moved nothing until the end.
        UnsupportedError: The model cannot be patched there, or has no ``generate()``.

    Example:
        >>> (other,) = kvinterp.generated(model, "The capital of Italy is", "resid_post")  # doctest: +SKIP
        >>> patch = kvinterp.Patch("resid_post", (3,), positions=9, donor=other["resid_post", 3][7])  # doctest: +SKIP
        >>> print(kvinterp.patched_generation(model, "The capital of France is", patch))  # doctest: +SKIP
    """
    adapter, seed = wrap(model), check_seed(seed)
    patches = (patches,) if isinstance(patches, Patch) else tuple(patches)
    ids = encode(adapter, prompt, max_new_tokens)

    def run() -> Generation:
        torch.manual_seed(seed)
        (text,) = generated(
            adapter, [ids], record, max_new_tokens=max_new_tokens, logits="keep", **options
        )
        return text

    with torch.random.fork_rng(), adapter.one_call():
        clean = run()
        with patched(adapter, patches):
            changed = run()
    return PatchedGeneration(clean, changed, patches, adapter)
