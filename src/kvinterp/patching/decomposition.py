"""Splits the difference between the paths into parts of one cause each, every part beside its null.

At every matched step runs lead from the recompute path to the cached one, each of which changes
one thing (see the table in :mod:`kvinterp.patching.splitting`). The parts between them:

- **newest_row**: the newest row, computed alone;
- **decoded_kv**: K and V of the decoded rows, each computed alone at its own step instead of among
  the prefix that it ended;
- **prefix_kv**: K and V of earlier rows, which the recompute path computes again at every step
  among another number of rows, while
  the cache keeps them as they were written: the **prompt**'s rows, and the decoded ones
  (**decoded_again**, with what they inherit from the prompt's). No cache causes this part: the
  recompute path differs from itself;
- **cache_format**: what the cached path stores in another form (a policy, a narrower cache, a
  prefill in chunks); 0 without these.

As logits and as residual streams total = newest_row + decoded_kv + prefix_kv + cache_format and
prefix_kv = prompt + decoded_again; their norms and KL divergences need not add up. **state** is all
but newest_row, carried by earlier rows; **decoded** is decoded_again + decoded_kv, carried by the
decoded rows. **cache** = newest_row + decoded_kv is the contribution of a cache as such: rows
computed alone. Each part's **null** is a difference of the same kind that no cache can explain: the
recompute path computes the same rows among more rows (a longer suffix, which a causal model must
not see).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch

from kvinterp import metrics
from kvinterp.common import words
from kvinterp.common.checks import among, check_choice, check_instance, check_whole
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.progress import each
from kvinterp.common.result import Contents, Result, Row, signed
from kvinterp.common.vocabulary import PARTS, PREFIX_KV
from kvinterp.errors import UnsupportedError, located
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import chosen_layers, encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.distances import check_finite
from kvinterp.patching.findings import (
    charts_of_decomposition,
    headline_of_decomposition,
    rows_of_decomposition,
)
from kvinterp.patching.planted import Plant
from kvinterp.patching.side_by_side import two_paths
from kvinterp.patching.splitting import DIFFERENCES, Outputs, Split, leading_part
from kvinterp.paths import ExecutionPath


@dataclasses.dataclass(repr=False)
class Decomposition(Result):
    """The split at every step, in nats, and layer by layer.

    Attributes:
        steps: One row an example and step: the KL in nats of total, of the parts newest_row,
            decoded_kv, prefix_kv (prompt and decoded_again) and cache_format, of decoded and state,
            and of the nulls (null, the whole recompute path among more rows, null_newest_row,
            null_decoded_kv, null_prefix_kv, null_prompt, null_decoded_again); the same as the L2
            distance of the logits (total_l2, ...), and cache_l2 with null_cache_l2; ``most``, the
            part longer than all others together in L2, ``"spread"`` where there is none, ``"none"``
            where the logits are bitwise equal; and ``share``, its share of the lengths.
        layers: One row an example, step and layer: the L2 distance of resid_post for the same,
            relative to the recompute path's norm.
        provenance: Paths, suffix, model and machine.
    """

    VERB: ClassVar = "decompose"
    headline, rows, charts = (
        headline_of_decomposition,
        rows_of_decomposition,
        charts_of_decomposition,
    )

    steps: pd.DataFrame
    layers: pd.DataFrame
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """Names the model, the paths and the size in one line."""
        paths, examples = self.provenance["paths"], self.steps["example"].nunique()
        size = f"{counted(len(self.steps), 'step')} of {counted(examples, 'prompt')}"
        return f"<Decomposition of {models_of([self.provenance])}: {paths['cached']} against {paths['recompute']}, {size}>"

    def written(self) -> Contents:
        """Returns the tables, each with the provenance, and the summary."""
        return signed(
            {"decomposition": self.steps, "layers": self.layers}, self.provenance
        ), self.summary()

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Decomposition:
        """Makes a decomposition of its tables."""
        return cls(tables["decomposition"], tables["layers"], tables["decomposition"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a part and one for the whole: mean KL and L2 over the decode steps, and the L2 of
        its null.
        """
        means, rows = self.summary(), []
        for part in ("total", *PARTS, *PREFIX_KV):
            row = {
                "part": part,
                "kl": means[part],
                "l2": means[f"{part}_l2"],
                "null_l2": means.get(f"null_{part}_l2"),
            }
            rows.append(
                {**row, "most_of_steps": means["most"].get(part, 0) if part in PARTS else None}
            )
        return pd.DataFrame(rows).astype({"null_l2": float, "most_of_steps": "Int64"})

    def summary(self) -> dict[str, Any]:
        """Means over the decode steps of every example (step 0 is the same computation on both
        paths), and counts.

        ``most`` counts the decode steps by the part that makes most of their difference;
        ``without_cache`` those that differ although a cache as such contributes nothing;
        ``within_null`` those where its contribution is no longer than its null.
        """
        later = self.steps[self.steps["step"] > 0]
        means = later.drop(columns=["example", "step", "most", "share"]).mean()
        differ = later[later["total_l2"] > 0]
        parts = differ[["newest_row_l2", "decoded_kv_l2"]].max(axis=1)
        return {
            **{name: None if pd.isna(value) else float(value) for name, value in means.items()},
            "most": {str(name): int(count) for name, count in later["most"].value_counts().items()},
            "differ": len(differ),
            "without_cache": int((parts == 0).sum()),
            "within_null": int(
                ((parts > 0) & (differ["cache_l2"] <= differ["null_cache_l2"])).sum()
            ),
            "examples": int(self.steps["example"].nunique()),
            "steps": len(later),
            **{name: self.provenance[name] for name in ("paths", "suffix")},
            "provenance": self.provenance,
        }


def decompose(
    model: Any,
    prompts: Any,
    *,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    max_new_tokens: int = 32,
    suffix: int = 8,
    only: Sequence[int] | None = None,
    plant: Plant | None = None,
    progress: str = "bar",
) -> Decomposition:
    """Splits the difference between cached decoding and recomputation at every matched step.

    A step takes one forward of each path, five more over the whole context and eight more of one
    row.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        cached: Path A, which decodes from a cache, such as cached+int8; it chooses the tokens.

            It does so greedily. Its policy on K and V, its cache's dtype and its chunks are the
            part ``cache_format``: the other runs compute one row without them.
        recompute: Path B, which computes the whole prefix again.
        max_new_tokens: The most tokens to decode per prompt.
        suffix: Tokens put after the prefix in the nulls.
        only: The numbers of the prompts to split, in a resumed or sharded run.
        plant: A difference to plant in the cached path first, to check that the split names its
            part.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not fit.
        NonFiniteError: NaN or Inf appeared in the logits of an example.
        UnsupportedError: The model keeps more than keys and values (Mamba, Gated DeltaNet).
    """
    adapter = wrap(model)
    check_splittable(adapter, suffix, plant)
    check_choice("progress", progress, words.Progress)
    paths = two_paths(cached, recompute, "a decomposition")
    check_whole("max_new_tokens", max_new_tokens)
    tokens = encode_all(adapter, prompts, max_new_tokens + suffix)
    steps: list[Row] = []
    layers: list[Row] = []
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        examples = range(len(tokens)) if only is None else among("only", only, range(len(tokens)))
        for example in each(examples, "decomposing", "prompt", progress):
            for step, outputs in Split(
                adapter, paths, tokens[example], max_new_tokens, suffix, plant
            ).steps():
                labels = {"example": example, "step": step}
                row, by_layer = step_rows(outputs, f"example {example}, step {step}")
                steps.append(labels | row)
                layers += [labels | row for row in by_layer]
    sides = {"cached": str(paths[0]), "recompute": str(paths[1])}
    about = provenance(adapter, paths=sides, suffix=suffix, max_new_tokens=max_new_tokens)
    return Decomposition(pd.DataFrame(steps), pd.DataFrame(layers), about)


def check_splittable(adapter: Adapter, suffix: int, plant: Plant | None = None) -> None:
    """Raises UnsupportedError for a model whose state cannot be split, and InputError for a wrong
    suffix or plant.
    """
    if not adapter.attention_only:
        raise UnsupportedError(
            f"{adapter.facts.architecture} keeps other state than keys and values, which cannot be split this way: "
            "use audit()."
        )
    check_whole("suffix", suffix)
    if plant is not None:
        check_instance("plant", plant, Plant, "a Plant, such as kv.Plant('kv', layer=1), or None")
        chosen_layers(adapter, plant.layer)


def step_rows(outputs: dict[str, Outputs], where: str) -> tuple[Row, list[Row]]:
    """The differences of a step, and of each layer at the step.

    A step has KL in nats and L2 of the logits, the part that makes most of it, and its share. A
    layer has the L2 distance of resid_post, relative to the recompute path's norm.

    Raises:
        NonFiniteError: A difference is not finite.
    """
    pairs = {name: (outputs[a].logits, outputs[b].logits) for name, (a, b) in DIFFERENCES.items()}
    distances = {name: metrics.kl_divergence(a, b) for name, (a, b) in pairs.items()}
    distances |= {f"{name}_l2": (a.double() - b.double()).norm() for name, (a, b) in pairs.items()}
    for prefix in ("", "null_"):
        newest, decoded = (
            a.double() - b.double()
            for a, b in (pairs[f"{prefix}newest_row"], pairs[f"{prefix}decoded_kv"])
        )
        distances[f"{prefix}cache_l2"] = (newest + decoded).norm()
    streams = {name: output.stream.double() for name, output in outputs.items()}
    norms = streams["recompute"].norm(dim=-1)
    of_layers = [(streams[a] - streams[b]).norm(dim=-1) / norms for a, b in DIFFERENCES.values()]
    # Read at once, because each read waits for the device.
    of_step = torch.stack([distance.reshape(()).double() for distance in distances.values()])
    numbers = torch.cat([of_step, *(values.to(of_step.device) for values in of_layers)]).cpu()
    check_finite(numbers[: len(distances)], where)
    row = dict(zip(distances, numbers.tolist(), strict=False))
    most, share = leading_part({part: row[f"{part}_l2"] for part in PARTS}, row["total_l2"])
    by_layer = numbers[len(distances) :].view(len(DIFFERENCES), -1).T.tolist()
    layers = [
        {"layer": layer, **dict(zip(DIFFERENCES, values, strict=True))}
        for layer, values in enumerate(by_layer)
    ]
    return {**row, "most": most, "share": share}, layers
