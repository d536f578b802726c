"""How often intervals hold the truth and rules judge wrongly, on numbers as they really come: measured tables, resampled.

``python benchmarks/calibration.py --measure`` compares two models of the zoo and, where it was fetched, a real one, over many
prompts, and keeps what it measured a prompt and step. ``python benchmarks/calibration.py`` takes the prompts of each as a whole
population, draws studies of 5, 12 and 40 prompts from it, and counts: how often an interval holds the population's value, and how
often a rule whose bound stands on that value says "holds" or "does not hold", each of which would be false.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.metrics.statistics import mean_error

HERE = Path(__file__).parent
SIZES = (5, 12, 40)
MODELS = {
    "zoo:gqa2-mini": ("float16", "arithmetic:60", 24),
    "zoo:llama64-mini": ("bfloat16", "arithmetic:60", 24),
    "real:smollm2-135m": ("bfloat16", "natural:48", 24),
}
"""Each with its dtype, prompts and steps."""
RESAMPLES = 400
"""Of the intervals that resample on their own."""


def measure(model: str) -> dict[str, list[Any]]:
    """What is measured of a model, a row a prompt and step, as columns."""
    import torch

    from kvinterp.experiments.compare import Compare
    from kvinterp.experiments.patch import Patch

    torch.set_num_threads(1)
    dtype, prompts, steps = MODELS[model]
    told: dict[str, Any] = {"model": model, "dtype": dtype, "prompts": prompts, "device": "cpu", "max_new_tokens": steps}
    recovered = None
    with tempfile.TemporaryDirectory() as folder:
        found = Compare(**told, stop="length").run(Path(folder) / "compare", progress="none", figures="none")
        if model.startswith("zoo:"):  # Thirty layers of a real one take hours.
            patched = Patch(**told | {"max_new_tokens": 6}, sweep="cumulative", direction="into-cached", distance="l2")
            recovered = patched.run(Path(folder) / "patch", progress="none").tables["recovery"]
    rows = found.tables["steps"][["example", "step", "kl", "max_abs_logit", "margin_a", "flipped"]]
    kv, layers = found.tables["kv_steps"], found.tables["layers"]
    for tensor, part in kv.groupby("tensor"):
        error = mean_error(part, ["example", "step"]).rename(f"error_{tensor}")
        rows = rows.merge(error.reset_index(), how="left")
    last = layers[(layers["site"] == "resid_post") & (layers["layer"] == layers["layer"].max())]
    rows = rows.merge(last[["example", "step", "relative_l2"]], how="left")
    if recovered is not None:
        deepest = recovered[recovered["layer"] == recovered["layer"].max()].set_index("example")["recovery"]
        rows["recovery"] = rows["example"].map(deepest.astype(float))
    return {name: [_short(value) for value in column] for name, column in rows.items()}


def _short(value: Any) -> Any:
    return None if pd.isna(value) else int(value) if float(value).is_integer() else float(f"{value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    if given.measure:
        for model in MODELS:
            measured = measure(model)
            place = Path("/tmp/tables") / (model.replace(":", "-") + ".json")
            place.parent.mkdir(exist_ok=True)
            place.write_text(json.dumps(measured))
            print(model, len(measured["kl"]), flush=True)


if __name__ == "__main__":
    main()
