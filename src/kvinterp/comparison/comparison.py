"""What a comparison holds: tidy tables, what they were made with, and what they say in a few sentences."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
from torch import nn

from kvinterp import metrics
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.result import Result, signed
from kvinterp.comparison.attention_rows import within
from kvinterp.comparison.findings import where
from kvinterp.comparison.tables import Differences
from kvinterp.data import Prompt
from kvinterp.errors import InputError
from kvinterp.models import Adapter, wrap

TABLES = ("steps", "examples", "layers", "heads", "kv_steps", "kv_positions", "kv", "tokens", "attention_rows", "routing")
PARTS = (*TABLES, "failures")
"""The tables of a comparison, and with them the list of what could not be compared."""
COLUMNS: dict[str, tuple[str, ...]] = {
    **Differences.columns(),
    "examples": ("example", "id", "prompt_tokens", "steps", "flip_index", "token_divergence", "mean_kl"),
    "tokens": ("example", "path", "position", "token", "text"),
    "failures": ("example", "id", "message"),
}
"""The columns without which a table is not one of a comparison."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a comparison was made on, for those who want to run an example again; it keeps no model alive.

    Attributes:
        model: The model, or nothing once the user let go of it.
        name: Its name.
        tokenizer: Its tokenizer.
        prompts: Token ids by example number.
    """

    model: weakref.ref[nn.Module]
    name: str
    tokenizer: Any
    prompts: Mapping[int, Sequence[int]]

    def adapter(self) -> Adapter | None:
        """The model behind kvinterp's face, or None where it is gone."""
        model = self.model()
        return None if model is None else wrap(model, self.tokenizer, self.name)


@dataclasses.dataclass(repr=False)
class Comparison(Result):
    """How far apart two paths are. Every table is tidy: a row a number, named columns; divergences are in nats.

    Attributes:
        steps: One row an example and step: token_a, token_b, kl, js, max_abs_logit, rms_logit, top1_agree, margin_a,
            margin_b (logits), top_probability_difference, flipped, after_flip; probability_a and probability_b, what each path
            gave its own chosen token (softmax of the logits: no temperature, no cut); boundary_a and boundary_b, how far that
            choice was from another one in what the strategy decides by: for ``greedy`` the margin, in logits; for top_k and top_p
            the distance from the number drawn to the nearer end of the token's stretch of cumulative probability, in [0, 1], NaN
            where no other token could be drawn. NaN where nothing is known.
        examples: One row an example: flip_index, token_divergence, mean_kl, mean_kl_before_flip, mean_kl_after_flip.
        layers: One row an example, step, site and layer: l2, relative_l2, cosine, cosine_distance, the same without
            the three largest dimensions (l2_without_top3, ...), after_flip.
        heads: One row an example, step, layer and query head: kl of the attention pattern, after_flip, pattern (``recorded``,
            or ``derived`` beside a kernel that shows none).
        kv_steps: One row an example, step, tensor (K or V), layer and KV head: how many vectors were compared (one a
            position that both paths hold) and how many differ; relative_error and ulp_mean on average, relative_error_max and
            ulp_max at most; let_go_a and let_go_b, how many positions each path's policy let go of.
        kv_positions: The same by absolute position instead of step, over the steps from 1 on, those after the flip apart.
        kv: Only with ``cache_errors="whole"``: one row an example, step, tensor, layer, KV head and absolute position:
            relative_error, ulp_mean, ulp_max, after_flip.
        tokens: One row an example, path (``prompt``, ``a``, ``b``) and absolute position: token, text. A chosen token stands at
            the position that it has if it is fed, so that of a step at prompt_tokens + step.
        attention_rows: What the newest query attended to, at the step of each example's first flip and at its steps of largest KL
            on the same text (three at most, within a budget: :mod:`kvinterp.comparison.attention_rows`): one row an example,
            step, layer, query head and absolute position: a, b (probabilities), after_flip.
        routing: Of a mixture of experts one row an example, step and layer with a router: changed (whether another set of experts
            was chosen), difference (the largest of a router's logit), margin_a and margin_b (the least logit chosen less the
            largest that was not), after_flip.
        failures: Examples left out because NaN or Inf appeared: example, id, message.
        provenance: Paths, protocol, strategy and provenance.
        origin: Model and token ids, where it was made in this process; None where it was read from disk.
        prompts: The prompts, in the order of the example numbers, where they are known.
    """

    VERB: ClassVar = "compare"

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
    routing: pd.DataFrame = dataclasses.field(
        default_factory=lambda: pd.DataFrame(columns=[*COLUMNS["routing"]]).astype({"after_flip": bool})
    )
    origin: Origin | None = dataclasses.field(default=None, repr=False, compare=False)
    prompts: Sequence[Prompt] = dataclasses.field(default=(), repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which is not the comparison's to keep."""
        return {**vars(self), "origin": None}

    @property
    def statistics(self) -> dict[str, float]:
        """What ``llama-perplexity --kl-divergence`` prints, over every step of every example that has a KL."""
        steps = self.steps
        steps = steps[steps["kl"].notna()] if "compared" in steps else steps
        return metrics.kl_statistics(
            steps["kl"].to_numpy(), steps["top1_agree"].to_numpy(), steps["top_probability_difference"].to_numpy()
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
            "divergence_rate": _mean(examples["flip_index"].notna()),
            "bitwise_equal_steps": int((steps["max_abs_logit"] == 0).sum()),
            "mean_kl": _mean(steps["kl"]),
            "mean_kl_before_flip": _mean(before),
            "mean_kl_after_flip": _mean(after),
            "max_abs_logit": None if steps["max_abs_logit"].isna().all() else float(steps["max_abs_logit"].max()),
            "statistics": None if steps["kl"].isna().all() else self.statistics,
            "failures": self.failures.to_dict("records"),
            "provenance": {k: v for k, v in self.provenance.items() if k not in ("paths", "protocol", "strategy")},
        }

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its tables, each with what it was made with, and what ``summary.json`` holds."""
        numbers = self.summary()
        counts = {name: numbers.pop(name) for name in ("examples", "steps", "failed")}
        seen = counts["examples"] + counts["failed"]
        counts["planned"] = len(self.prompts) or seen
        front = {name: numbers.pop(name) for name in ("paths", "protocol", "strategy")}
        reading, interrupted = self.where().splitlines(), seen < counts["planned"]
        summary = {**front, "counts": counts, "interrupted": interrupted, "reading": reading, **numbers}
        return signed({name: getattr(self, name) for name in TABLES}, self.provenance), {
            **summary,
            "provenance": self.provenance,
        }

    @classmethod
    def read(
        cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any], prompts: Sequence[Prompt] = ()
    ) -> Comparison:
        """The comparison of its tables, of the failures that its summary names, and of its prompts."""
        failures = pd.DataFrame(summary["failures"], columns=["example", "id", "message"])
        failures = failures.astype({"example": "int64", "id": str, "message": str})
        return cls(
            **{n: tables[n] for n in TABLES if n in tables},
            failures=failures,
            provenance=summary["provenance"],
            prompts=prompts,
        )

    def overview(self) -> pd.DataFrame:
        """One row a prompt, without its texts."""
        return self.examples.drop(columns=["text_a", "text_b"], errors="ignore")

    def same_text(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of a table at which both paths hold the same text: all but those after a flip in the free protocol.

        Args:
            table: One of the tables, or some rows of one.
        """
        return table[~table["after_flip"].astype(bool)] if self.provenance["protocol"] == "free" else table

    @property
    def derived(self) -> tuple[str, ...]:
        """The sites that were derived beside a kernel that does not show them, and not recorded from it."""
        return tuple(self.provenance.get("derived", ()))

    def where(self) -> str:
        """What was found, a line each: whether the paths differ, when, and in which layer, head and cache position most."""
        return "\n".join(where(self))

    def __repr__(self) -> str:
        """What it is of, in one line; the tables are attributes."""
        about = self.provenance
        paths = f"{about['paths']['a']} against {about['paths']['b']}"
        size = f"{counted(len(self.steps), 'step')} of {counted(len(self.examples), 'prompt')}"
        return f"<Comparison of {models_of([about])}: {paths}, {size}>"

    @classmethod
    def joined(cls, parts: Iterable[Comparison]) -> Comparison:
        """Several comparisons of one model along the same paths as one; each part is asked for once, and then let go of.

        Args:
            parts: The comparisons.

        Raises:
            InputError: They were made differently: averaging them together would mix unlike things.
        """
        abouts: list[dict[str, Any]] = []
        pieces: dict[str, list[pd.DataFrame]] = {name: [] for name in PARTS}
        prompts, origins = list[Prompt](), list[Origin | None]()
        for part in parts:
            abouts.append(part.provenance)
            prompts += part.prompts
            origins.append(part.origin)
            first, own = abouts[0], ("caches", "witness", "prompt_differs")
            unlike = sorted(key for key in first if key not in own and part.provenance.get(key) != first[key])
            if unlike:
                raise InputError(f"comparisons made with different {', '.join(unlike)} cannot be joined: keep them apart.")
            for name, several in pieces.items():
                several.append(getattr(part, name))
            if len(abouts) % _TOGETHER == 0:
                # Many small tables take more memory than one.
                pieces = {name: [_stacked(several)] for name, several in pieces.items()}
                pieces["attention_rows"] = [within(pieces["attention_rows"][0], pieces["steps"][0])]
        if not abouts:
            raise InputError("there is no comparison to join: give at least one.")
        tables = {name: _stacked(several) for name, several in pieces.items()}
        # Of these rows there is room for a number, however many prompts there are.
        tables["attention_rows"] = within(tables["attention_rows"], tables["steps"])
        differs = [{name: about[name]} for about in abouts for name in ("prompt_differs",) if name in about]
        about = {**abouts[0], **_caches(abouts), **_witnesses(abouts), **(differs[0] if differs else {})}
        return cls(**tables, provenance=about, origin=_one(origins), prompts=prompts)


_TOGETHER = 32
"""How many parts are joined at a time."""


def _stacked(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other; one without rows knows nothing of the columns' types, and is left out beside others."""
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


def _one(origins: Sequence[Origin | None]) -> Origin | None:
    known = [each for each in origins if each is not None]
    if len(known) < len(origins):
        return None
    return dataclasses.replace(known[0], prompts={number: ids for each in known for number, ids in each.prompts.items()})


def _caches(abouts: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """What kept keys and values on each side: a preallocated cache may have been left for some shapes and not for others."""
    said = [about["caches"] for about in abouts if "caches" in about]
    return {"caches": {side: "; ".join(sorted({each[side] for each in said})) for side in said[0]}} if said else {}


def _witnesses(abouts: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[int]]]]:
    """What the call plans of each side saw themselves do, from the least of any prompt to the most."""
    joined: dict[str, dict[str, list[int]]] = {}
    for about in abouts:
        for side, seen in about.get("witness", {}).items():
            into = joined.setdefault(side, {})
            for name, (least, most) in seen.items():
                low, high = into.get(name, (least, most))
                into[name] = [min(low, least), max(high, most)]
    return {"witness": joined} if joined else {}


def _mean(values: pd.Series) -> float | None:
    return float(values.mean()) if values.notna().any() else None
