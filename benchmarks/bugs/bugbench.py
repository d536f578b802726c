"""Score detectors of cache bugs on planted bugs and clean models (KVBugBench): ``python benchmarks/bugs/bugbench.py --help``.

Every detector is given models with one bug planted in their cached path, and clean models. The score counts the bugs it
finds, its false alarms on clean models, the places it names correctly, and seconds. The seed draws the models and the
kinds of bug that are held out: tune a detector on the kinds that are shown, and judge it by the others.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from bank.detector import Found
from bank.detectors import DETECTORS
from bank.subjects import Patches, subjects
from scipy import stats

from kvinterp.models.provenance import machine

SHOWN, HELD_OUT, CLEAN = "shown", "held out", "clean"


def held_out(seed: int) -> set[str]:
    """The kinds of bug that a seed holds out: half of all that there are."""
    kinds = sorted({one.kind for one in subjects().values()} - {CLEAN})
    return set(random.Random(f"kinds {seed}").sample(kinds, len(kinds) // 2))


def drawn(only: Sequence[str], most: int, seed: int) -> list[str]:
    """The names of the bugs and of the clean models that are looked at, as the seed draws them."""
    found = list(subjects().values())
    bugs = [
        one.name for one in found if one.kind != CLEAN and (not only or any(t in one.name or t in one.kind for t in only))
    ]
    clean = [one.name for one in found if one.kind == CLEAN]
    draw = random.Random(seed)
    return [name for group in (bugs, clean) for name in draw.sample(group, min(most, len(group)))]


def tried(detector: str, subject: str) -> dict[str, Any]:
    """What a detector says of one model."""
    one = subjects()[subject]
    with Patches() as patches, torch.random.fork_rng():
        torch.manual_seed(0)
        model = one.make(patches)
        began = time.process_time()
        try:
            found = DETECTORS[detector].detect(one, model)
        # A bug may break a model: that is seen by whoever runs it.
        except Exception as error:
            found = Found("yes", f"it raised {type(error).__name__}: {str(error)[:120]}")
        seconds = time.process_time() - began
    placed = "" if not one.layers else "yes" if one.placed(found.layer, found.tensor) else "no"
    row = {"detector": detector, "subject": subject, "kind": one.kind, "alarm": found.alarm, "layer": found.layer}
    return row | {"tensor": found.tensor, "placed": placed, "seconds": seconds, "said": found.said}


def run(detectors: Sequence[str], only: Sequence[str] = (), most: int = 20, seed: int = 0) -> pd.DataFrame:
    """What every detector says of every model, a row each."""
    held = held_out(seed)
    rows = [tried(detector, subject) for subject in drawn(only, most, seed) for detector in detectors]
    for row in rows:
        row["split"] = CLEAN if row["kind"] == CLEAN else HELD_OUT if row["kind"] in held else SHOWN
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def scores_of(cases: pd.DataFrame) -> pd.DataFrame:
    """What each detector found, by split and in all, each share with its exact interval.

    Returns:
        One row a detector and split: bugs, found, clean, false_alarms, placeable (bugs found whose place is known), placed,
        names_places (whether the detector names any), cannot_tell.
    """
    rows = []
    for detector, whole in cases.groupby("detector", sort=False):
        for split in ("all", SHOWN, HELD_OUT):
            part = whole if split == "all" else whole[whole["split"] == split]
            bugs, clean = part[part["kind"] != CLEAN], part[part["kind"] == CLEAN]
            found = bugs[bugs["alarm"] == "yes"]
            counts = {
                "bugs": len(bugs), "found": len(found), "clean": len(clean), "false_alarms": int((clean["alarm"] == "yes").sum()),
                "placeable": int((found["placed"] != "").sum()), "placed": int((found["placed"] == "yes").sum()),
                "names_places": bool((whole["tensor"] != "").any() or whole["layer"].notna().any()),
                "cannot_tell": int((part["alarm"] == "cannot tell").sum()),
            }  # fmt: skip
            if len(part):
                rows.append({"detector": detector, "split": split, **counts})
    return pd.DataFrame(rows)


def share(count: int, of: int) -> str:
    """A share with Clopper and Pearson's 95% interval."""
    if not of:
        return "–"
    found = stats.binomtest(int(count), int(of)).proportion_ci()
    return f"{count} of {of} ({found.low:.1%} to {found.high:.1%})"


def main() -> None:
    """Runs the detectors, prints the scores and the split, and keeps every verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*DETECTORS, "all"]
    parser.add_argument("--detector", action="append", choices=known, help="may be given several times; all but the audits")
    parser.add_argument("--only", action="append", default=[], help="only bugs with this text in their name or kind")
    parser.add_argument("--most", type=int, default=20, help="the most bugs, and the most clean models")
    parser.add_argument("--seed", type=int, default=0, help="draws the models and the kinds that are held out")
    parser.add_argument("--out", type=Path, help="a folder for cases.csv, scores.csv and provenance.json")
    given = parser.parse_args()
    chosen = given.detector or ["transformers-tests", "allclose-assert", "top1"]
    if given.most < 1 or not any(subjects()[name].kind != CLEAN for name in drawn(given.only, given.most, given.seed)):
        parser.error("no planted bug is left: give --most at least 1, and --only a text that is in a bug's name or kind.")
    cases = run(list(DETECTORS) if "all" in chosen else chosen, given.only, given.most, given.seed)
    scores = scores_of(cases)
    for row in scores.to_dict("records"):
        print(f"{row['detector']}, {row['split']}: found {share(row['found'], row['bugs'])}, false alarms "
              f"{share(row['false_alarms'], row['clean'])}, cannot tell {row['cannot_tell']}, places right "
              f"{share(row['placed'], row['placeable']) if row['names_places'] else 'none named'}")  # fmt: skip
    for split in (SHOWN, HELD_OUT):
        print(f"Kinds {split}: {', '.join(sorted(set(cases.loc[cases['split'] == split, 'kind']))) or 'none'}.")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        cases.to_csv(given.out / "cases.csv", index=False)
        scores.to_csv(given.out / "scores.csv", index=False)
        (given.out / "provenance.json").write_text(json.dumps(machine() | {"seed": given.seed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
