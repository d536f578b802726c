"""Predict how many tokens flip, from logit margins, errors and the rounding of the logits, and
count how many do.

One recompute path chooses the tokens, and every other path is fed them; a flip is a step at which
the other path's largest logit belongs to another token. Sampling at a high temperature gives a text
with more steps where two logits are close. The last residual stream of each path is kept: it gives
the two largest logits without rounding, and the difference between paths there is the error. The
flips of a prompt are predicted from its own margins and from the errors of the other prompts at
steps with a similar margin. This is done twice: for logits rounded to the model's 16 bits, as they
are, and for a float32 unembedding on the same residual streams.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from kvinterp.commands.kit import (
    DRAWN,
    SHARED,
    Cell,
    CellResults,
    Chart,
    Charts,
    InputError,
    OfModel,
    Panel,
    Result,
    Rows,
    Tables,
    counted,
    finding,
    finding_from,
    joined,
    metrics,
    option,
    shared,
    tried,
)
from kvinterp.models.unembedding import Unembedding
from kvinterp.paths import path_named, run

LEADER = "recompute"
WIDE = "float32 unembedding"


class FlipLaw(OfModel):
    """Do as many tokens flip as margins, errors and the grid of the logits foretell?"""

    SUMMED = ("law",)
    NOTED = ("max_new_tokens", "strategy", "seed")

    prompts: str = option(
        "arithmetic:12", SHARED["prompts"][1] + " natural:48 has chat, stories and word problems."
    )
    path: tuple[str, ...] = option(
        ("cached", "cached+int8", "cached+int4", "cached+normal(0,0.03)"),
        "A path to compare with recompute; may be given several times.",
        empty="refused",
    )
    dtype: str = shared("dtype", "bfloat16")
    max_new_tokens: int = shared("max_new_tokens", 48, min=2)
    strategy: str = option(
        "greedy", "How the recompute path chooses the tokens: greedy, top_k(50,2), top_p(0.95,0.8)."
    )
    seed: int = shared("seed", only=DRAWN)

    def cells(self) -> list[Cell]:
        """A cell a prompt, of all paths: the recompute path, which takes longest, is run once."""
        paths = list(dict.fromkeys(str(path_named(text)) for text in self.path))
        other = next((text for text in paths if path_named(text).dtype), None)
        if other is not None:
            raise InputError(
                f"path {other!r} has a dtype of its own, and streams are compared in that of the model: use --dtype for all."
            )
        tried(self.adapter(), paths)
        return [
            Cell(f"prompt-{number}", self.measured, {"number": number, "paths": paths})
            for number in range(len(self.prompt_list))
        ]

    def measured(self, number: int, paths: list[str]) -> pd.DataFrame:
        """One prompt along all paths."""
        prompt, choices = (
            self.prompt_list[number],
            self.choices("max_new_tokens", "strategy", "seed"),
        )
        return steps_of(self.adapter(), prompt, paths, **choices).assign(example=number)

    def tables(self, results: CellResults) -> Tables:
        """What was foretold of each path, and what came."""
        steps = joined(results)["table"]
        return {
            "steps": steps,
            "law": law_of(steps, str(self.adapter().dtype).removeprefix("torch.")),
        }

    def summary(self, tables: Tables) -> dict[str, Any]:
        """The law, and at how many steps it is of the model's own logits."""
        alike = tables["steps"]["as_rounded"]
        return super().summary(tables) | {
            "as_rounded": {"steps": len(alike), "alike": int(alike.sum())}
        }

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """At how many counts the flips came as foretold."""
        law, alike = result.tables["law"], result.summary["as_rounded"]
        holds, fails, open_counts = (
            int((law["verdict"] == word).sum()) for word in ("holds", "fails", "open")
        )
        counts = f"({counted(int(law['prompts'].iloc[0]), 'prompt')}, {law['steps'].iloc[0]} decode steps)"
        lines = [
            f"Too few flips are expected, or too few prompts were given, to tell whether they come as foretold {counts}."
        ]
        if decided := holds + fails:
            came = f"Flips come as foretold at {holds} of {decided} counts that could tell"
            lines = [f"{came}; {open_counts} are open {counts}."]
        if alike["alike"] < alike["steps"]:
            lines.append(
                f"The exact logits, rounded, choose another token than the model at {alike['steps'] - alike['alike']} of "
                f"{alike['steps']} steps: there the law is of other logits than the model's."
            )
        return lines

    def rows(self, result: Result) -> Rows:
        """The flips that came at each path and unembedding, beside those foretold."""
        for row in result.tables["law"].to_dict("records"):
            labels = {"unit": "steps", "path": row["path"], "unembedding": row["unembedding"]}
            third = (
                f"{row['third']} to or from a third token, which are not foretold"
                if row["third"]
                else ""
            )
            yield finding_from(
                row, "flips foretold", "foretold", n=row["steps"], verdict=row["verdict"], **labels
            )
            yield finding("flips that came", row["flips"], n=row["steps"], note=third, **labels)

    def charts(self, result: Result) -> Charts:
        """Foretold flips with the interval of such counts, and those that came."""
        law = result.tables["law"]
        came = law.drop(columns=["low", "high"]).assign(
            line="came, " + law["unembedding"], count=law["flips"]
        )
        both = pd.concat(
            [law.assign(line="foretold, " + law["unembedding"], count=law["foretold"]), came]
        )
        label = f"flips of {int(law['steps'].iloc[0])} steps"
        panel = Panel(both, "count", "path", "dots", color="line", label=label)
        return {
            "flip_law": Chart(
                "Flips foretold from margins, errors and the grid, and those that came", [panel]
            )
        }


def steps_of(adapter: Any, prompt: Any, paths: list[str], **choices: Any) -> pd.DataFrame:
    """The two top logits at every step from 1 on, without rounding, and what each path makes of
    them.

    Args:
        adapter: The model.
        prompt: One prompt.
        paths: Text forms.
        choices: ``max_new_tokens``, and ``strategy`` and ``seed`` by which the leader writes its
            text.

    Returns:
        One row a path and step: first, second (the leader's two top logits in float32; float64 of
        wider models), first_token, second_token, first_error, second_error (this path's less the
        leader's), largest (change of any logit), flip (of the model's own logits), wide_flip (of a
        wide unembedding), third (it flips, but not between these two tokens), as_rounded (the wide
        logits, rounded, choose what the model chose, on both paths).
    """
    options: dict[str, Any] = {
        "record": "resid_post",
        "layers": [adapter.facts.layers - 1],
        "logits": "keep",
    }
    head = Unembedding(adapter, torch.float32 if adapter.dtype.itemsize < 4 else torch.float64)

    def logits_of(trace: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The logits without rounding, what the model chose, and what it would choose of these,
        rounded.
        """
        (stream,) = (trace[hook_point] for hook_point in trace.records)
        logits = head.logits(stream.reshape(len(trace.tokens), -1)).cpu()
        return logits, trace.logits.argmax(-1).cpu(), logits.to(adapter.dtype).argmax(-1)

    leader = run(adapter, prompt, LEADER, **choices, **options)
    leader_logits, chosen, rounded = logits_of(leader)
    (first, second), (one, two) = (pair.T for pair in leader_logits.topk(2, -1))
    options |= {
        "max_new_tokens": len(chosen),
        "stop": "length",
        "continuation": list(leader.tokens),
    }
    tables = []
    for path in paths:
        logits, took, rounded_here = logits_of(run(adapter, prompt, path, **options))
        flip = took != chosen
        columns = {
            "step": torch.arange(len(chosen)),
            "first": first,
            "second": second,
            "first_token": one,
            "second_token": two,
            "first_error": logits.gather(1, one[:, None])[:, 0] - first,
            "second_error": logits.gather(1, two[:, None])[:, 0] - second,
            "largest": (logits - leader_logits).abs().amax(-1),
            "flip": flip,
            "wide_flip": logits.argmax(-1) != one,
            "third": flip & ((took != one) & (took != two) | (chosen != one) & (chosen != two)),
            "as_rounded": (rounded == chosen) & (rounded_here == took),
        }
        tables.append(
            pd.DataFrame({name: column.numpy() for name, column in columns.items()}).assign(
                path=path
            )
        )
    table = pd.concat(tables, ignore_index=True)
    # Step 0 is the prefill's, which paths have in common.
    return table[table["step"] > 0]


def law_of(steps: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """What was foretold and what came.

    Args:
        steps: As :func:`steps_of` gives them, with example.
        dtype: The dtype of the model's own logits.

    Returns:
        Two rows a path, of the model's own unembedding and of a wide one: path, unembedding,
        prompts, steps, foretold flips with the interval of 95% of such counts (low, high),
        first_order (NaN on a grid), flips, verdict, error (mean of either logit's), shared
        (correlation of the two errors), certified (steps whose margin exceeds twice the largest
        change), third.
    """
    rows = []
    for path, group in steps.groupby("path", sort=False):
        errors = group[["first_error", "second_error"]]
        extra = {
            "error": errors.abs().to_numpy(float).mean(),
            "shared": errors.corr().iloc[0, 1],
            "certified": (group["first"] - group["second"] > 2 * group["largest"]).sum(),
            "third": group["third"].sum(),
        }
        for unembedding, grid, flips in (
            (dtype, dtype, "flip"),
            (WIDE, metrics.EXACT, "wide_flip"),
        ):
            rows.append(
                {
                    "path": path,
                    "unembedding": unembedding,
                    **metrics.counted(group, grid, flips),
                    **extra,
                }
            )
    return pd.DataFrame(rows)
