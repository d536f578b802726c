"""Attribution patching beside true patches: its error at every place, and how much less time it takes.

    python benchmarks/attribution.py [--models zoo:gqa2-mini zoo:mistral-mini zoo:llama64-mini real:smollm2-135m]

Of each model and site the whole map is made twice in one run, by patches and by attribution: the error is the L2 distance of the
two maps over that of the true one. The pairs are problems of arithmetic that differ in a digit, or for the model of real size two capitals. One thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from kept import keep

import kvinterp as kv
from kvinterp.errors import InputError
from kvinterp.models.provenance import machine

SITES = (("resid_pre", "positions"), ("attn_out", "positions"), ("mlp_out", "positions"), ("z", "heads"))
PROBLEM = "Question: Nora has {} boxes and Jack has 53. How many more boxes does Nora have than Jack?\nAnswer: "
"""The zoo's models begin by copying the first number."""
SUMS = (PROBLEM.format(78), PROBLEM.format(88), ("7", "8"))
CAPITALS = ("The capital of France is", "The capital of Italy is", (" Paris", " Rome"))


def main() -> None:
    """Measures every model and site."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", default=["zoo:gqa2-mini", "zoo:mistral-mini", "zoo:llama64-mini", "real:smollm2-135m"]
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.models:
        try:
            model = kv.load_model(name, kind="native", dtype="float32", attention="eager")
        except InputError as error:
            print(f"{name} is left out: {error}")
            continue
        clean, corrupted, answers = SUMS if name.startswith("zoo:") else CAPITALS
        how = {"distance": "logit_difference", "answers": answers, "progress": "none"}
        kv.activation_patching(model, clean, corrupted, layers=0, **how)  # What the first run loads is in no time.
        for site, over in SITES:
            found, took = {}, {}
            for method in ("patches", "attribution"):
                begun = time.process_time()
                found[method] = kv.activation_patching(
                    model,
                    clean,
                    corrupted,
                    site,
                    over,
                    method=method,
                    **how,
                    **({} if method == "patches" else {"check": 0}),
                )
                took[method] = time.process_time() - begun
            true, linear = (found[method].values - found[method].corrupted for method in ("patches", "attribution"))
            rows.append(
                {
                    "model": name,
                    "layers": model.facts.layers,
                    "site": site,
                    "over": over,
                    "places": true.numel(),
                    "error": float((linear - true).norm() / true.norm()),
                    "rank_correlation": float(torch.corrcoef(torch.stack([_ranks(linear), _ranks(true)]))[0, 1]),
                    "patches_seconds": round(took["patches"], 2),
                    "attribution_seconds": round(took["attribution"], 2),
                    "ratio": round(took["attribution"] / took["patches"], 4),
                }
            )
            print(rows[-1], flush=True)
    keep(Path(__file__).parent / "results", "attribution", {"provenance": machine(), "rows": rows})


def _ranks(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().argsort().argsort().double()


if __name__ == "__main__":
    main()
