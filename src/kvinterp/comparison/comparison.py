"""The result of comparing two paths: tidy tables, their provenance, and a summary in a few
sentences.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
from torch import nn

from kvinterp import metrics
from kvinterp.common.numbers import against, counted, models_of
from kvinterp.common.result import Contents, Result, signed
from kvinterp.comparison.attention_rows import within
from kvinterp.comparison.findings import (
    charts_of_comparison,
    headline_of,
    rows_of_comparison,
    where,
)
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError
from kvinterp.models import Adapter, wrap

TABLES = (
    "steps",
    "examples",
    "layers",
    "heads",
    "kv_steps",
    "kv_positions",
    "kv",
    "tokens",
    "attention_rows",
)
PARTS = (*TABLES, "failures")
"""The tables of a comparison, and with them the list of what could not be compared."""
COLUMNS: dict[str, tuple[str, ...]] = {
    **Differences.columns(),
    "examples": (
        "example",
        "id",
        "prompt_tokens",
        "steps",
        "flip_index",
        "token_divergence",
        "mean_kl",
    ),
    "tokens": ("example", "path", "position", "token", "text"),
    "failures": ("example", "id", "message"),
}
"""The columns without which a table is not one of a comparison."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model and token ids of a comparison, to run an example again. It keeps no model alive.

    Attributes:
        model: A weak reference to the model.
        name: The model's name.
        tokenizer: The model's tokenizer.
        prompts: Token ids by example number.
    """

    model: weakref.ref[nn.Module]
    name: str
    tokenizer: Any
    prompts: Mapping[int, Sequence[int]]

    def adapter(self) -> Adapter | None:
        """Returns the model's adapter, or None if the model no longer exists."""
        model = self.model()
        return None if model is None else wrap(model, self.tokenizer, self.name)


@dataclasses.dataclass(repr=False)
class Comparison(Result):
    """The distances of two paths. Every table is tidy: a row a number, named columns; divergences
    are in nats.

    Attributes:
        steps: One row an example and step: token_a, token_b, kl, js, max_abs_logit, rms_logit,
            top1_agree, margin_a, margin_b (logits), top_probability_difference, flipped,
            after_flip; probability_a and probability_b, what each path gave its own chosen token
            (softmax of the logits: no temperature, no cut); boundary_a and boundary_b, how far that
            choice was from another one in what the strategy decides by: for ``greedy`` the margin,
            in logits; for top_k and top_p the distance from the number drawn to the nearer end of
            the token's stretch of cumulative probability, in [0, 1], NaN where no other token could
            be drawn. NaN where nothing is known.
        examples: One row an example: flip_index, token_divergence, mean_kl, mean_kl_before_flip,
            mean_kl_after_flip.
        layers: One row an example, step, site and layer: l2, relative_l2, cosine, cosine_distance,
            the same without the three largest dimensions (l2_without_top3, ...), after_flip.
        heads: One row an example, step, layer and query head: kl of the attention pattern,
            after_flip, pattern (``recorded``, or ``derived`` beside a kernel that shows none).
        kv_steps: One row an example, step, tensor (K or V), layer and KV head: how many vectors
            were compared (one a position that both paths hold) and how many differ; relative_error
            and ulp_mean on average, relative_error_max and ulp_max at most; let_go_a and let_go_b,
            how many positions each path's policy let go of.
        kv_positions: The same by absolute position instead of step, over the steps from 1 on, those
            after the flip apart.
        kv: Only with ``cache_errors="whole"``: one row an example, step, tensor, layer, KV head and
            absolute position: relative_error, ulp_mean, ulp_max, after_flip.
        tokens: One row an example, path (``prompt``, ``a``, ``b``) and absolute position: token,
            text. A chosen token stands at the position that it has if it is fed, so that of a step
            at prompt_tokens + step.
        attention_rows: What the newest query attended to, at the step of each example's first flip
            and at its steps of largest KL
            on the same text (three at most, within a budget:
            :mod:`kvinterp.comparison.attention_rows`): one row an example, step, layer, query head
            and absolute position: a, b (probabilities), after_flip.
        failures: Examples left out because NaN or Inf appeared: example, id, message.
        provenance: Paths, protocol, strategy and provenance.
        origin: Model and token ids, where it was made in this process; None where it was read from
            disk.
        prompts: The prompts, in the order of the example numbers, where they are known.
    """

    VERB: ClassVar = "compare"
    headline, rows, charts = headline_of, rows_of_comparison, charts_of_comparison

    steps: pd.DataFrame
    examples: pd.DataFrame
    layers: pd.DataFrame
    heads: pd.DataFrame
    kv_steps: pd.DataFrame
    kv_positions: pd.DataFrame
    kv: pd.DataFrame
    tokens: pd.DataFrame
    attention_rows: pd.DataFrame
    failures: pd.DataFrame
    provenance: dict[str, Any]
    origin: Origin | None = dataclasses.field(default=None, repr=False, compare=False)
    prompts: Sequence[Prompt] = dataclasses.field(default=(), repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the model, which a saved comparison must not hold."""
        return {**vars(self), "origin": None}

    @property
    def statistics(self) -> dict[str, float]:
        """The statistics that ``llama-perplexity --kl-divergence`` prints, over all steps that have
        a KL.
        """
        steps = self.steps
        steps = steps[steps["kl"].notna()] if "compared" in steps else steps
        return metrics.kl_statistics(
            steps["kl"].to_numpy(),
            steps["top1_agree"].to_numpy(),
            steps["top_probability_difference"].to_numpy(),
        )

    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``, as plain values."""
        steps, examples = self.steps, self.examples
        before, after = steps.loc[~steps["after_flip"], "kl"], steps.loc[steps["after_flip"], "kl"]
        return {
            **{key: self.provenance[key] for key in ("paths", "protocol", "strategy")},
            "examples": len(examples),
            "steps": len(steps),
            "failed": len(self.failures),
            "divergence_rate": _number(examples["flip_index"].notna().mean()),
            "bitwise_equal_steps": int((steps["max_abs_logit"] == 0).sum()),
            "mean_kl": _number(steps["kl"].mean()),
            "mean_kl_before_flip": _number(before.mean()),
            "mean_kl_after_flip": _number(after.mean()),
            "max_abs_logit": _number(steps["max_abs_logit"].max()),
            "statistics": None if steps["kl"].isna().all() else self.statistics,
            "failures": self.failures.to_dict("records"),
            "provenance": {
                k: v
                for k, v in self.provenance.items()
                if k not in ("paths", "protocol", "strategy")
            },
        }

    def written(self) -> Contents:
        """Returns the tables, each with the provenance, and the content of ``summary.json``."""
        numbers = self.summary()
        counts = {name: numbers.pop(name) for name in ("examples", "steps", "failed")}
        finished = counts["examples"] + counts["failed"]
        counts["planned"] = len(self.prompts) or finished
        front = {name: numbers.pop(name) for name in ("paths", "protocol", "strategy")}
        summary = {
            **front,
            "counts": counts,
            "interrupted": finished < counts["planned"],
            "reading": where(self),
            **numbers,
            "provenance": self.provenance,
        }
        return signed({name: getattr(self, name) for name in TABLES}, self.provenance), summary

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Comparison:
        """Makes a comparison of its tables, and of the failures and provenance in its summary."""
        failures = pd.DataFrame(summary["failures"], columns=[*COLUMNS["failures"]])
        failures = failures.astype({"example": "int64", "id": str, "message": str})
        return cls(
            **{name: tables[name] for name in TABLES},
            failures=failures,
            provenance=summary["provenance"],
        )

    def overview(self) -> pd.DataFrame:
        """One row a prompt, without its texts."""
        return self.examples.drop(columns=["text_a", "text_b"], errors="ignore")

    def same_text(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of a table at which both paths hold the same text: all but those after a flip in
        the free protocol.

        Args:
            table: One of the tables, or some rows of one.
        """
        return (
            table[~table["after_flip"].astype(bool)]
            if self.provenance["protocol"] == "free"
            else table
        )

    @property
    def derived(self) -> tuple[str, ...]:
        """The sites that were derived beside a kernel that does not show them, and not recorded
        from it.
        """
        return tuple(self.provenance.get("derived", ()))

    def where(self) -> str:
        """Says whether the paths differ, when, and in which layer, head and cache position most; a
        line a finding.
        """
        return "\n".join(where(self))

    def __repr__(self) -> str:
        """Names the model, the paths and the size in one line."""
        size = f"{counted(len(self.steps), 'step')} of {counted(len(self.examples), 'prompt')}"
        return f"<Comparison of {models_of([self.provenance])}: {against(self.provenance)}, {size}>"

    @classmethod
    def joined(cls, parts: Iterable[Comparison]) -> Comparison:
        """Joins comparisons of one model along the same paths. Parts are read one at a time, so
        they need not all be in memory.

        Args:
            parts: The comparisons.

        Raises:
            InputError: Their provenance differs, so that averaging over them would mix unlike
                things.
        """
        abouts: list[dict[str, Any]] = []
        pieces: dict[str, list[pd.DataFrame]] = {name: [] for name in PARTS}
        prompts, origins = list[Prompt](), list[Origin | None]()
        for part in parts:
            abouts.append(part.provenance)
            prompts += part.prompts
            origins.append(part.origin)
            first, of_one_part = abouts[0], ("caches", "prompt_differs", "null", "compressed")
            unlike = sorted(
                key
                for key in first
                if key not in of_one_part and part.provenance.get(key) != first[key]
            )
            if unlike:
                raise InputError(
                    f"comparisons made with different {', '.join(unlike)} cannot be joined: keep them apart."
                )
            for name, piece in pieces.items():
                piece.append(getattr(part, name))
            if len(abouts) % _TOGETHER == 0:
                # Many small tables take more memory than one.
                pieces = {name: [_concatenated(piece)] for name, piece in pieces.items()}
                pieces["attention_rows"] = [within(pieces["attention_rows"][0], pieces["steps"][0])]
        if not abouts:
            raise InputError("there is no comparison to join: give at least one.")
        tables = {name: _concatenated(piece) for name, piece in pieces.items()}
        # This table has the same limit however many prompts there are.
        tables["attention_rows"] = within(tables["attention_rows"], tables["steps"])
        differs = [about["prompt_differs"] for about in abouts if "prompt_differs" in about]
        about = {**abouts[0], **_joined_caches(abouts)}
        if differs:
            about["prompt_differs"] = differs[0]
        if nulls := [about["null"] for about in abouts if "null" in about]:
            most = {name: max(null[name] for null in nulls) for name in ("max_abs_logit", "unit")}
            counts = {name: sum(null[name] for null in nulls) for name in ("positions", "prompts")}
            about["null"] = {**nulls[0], **most, **counts}
        return cls(**tables, provenance=about, origin=_joined_origin(origins), prompts=prompts)


_TOGETHER = 32
"""How many parts are joined at a time."""


def _concatenated(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenates tables without the empty ones, whose columns have no types that would hold for
    the others.
    """
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


def _joined_origin(origins: Sequence[Origin | None]) -> Origin | None:
    present = [origin for origin in origins if origin is not None]
    if len(present) < len(origins):
        return None
    prompts = {number: ids for origin in present for number, ids in origin.prompts.items()}
    return dataclasses.replace(present[0], prompts=prompts)


def _joined_caches(abouts: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The caches that each side used: some shapes may have a preallocated one and others not."""
    caches = [about["caches"] for about in abouts if "caches" in about]
    return (
        {"caches": {side: "; ".join(sorted({cache[side] for cache in caches})) for side in "ab"}}
        if caches
        else {}
    )


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)
