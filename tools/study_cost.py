"""What the FP16 paper's whole protocol costs: forwards counted, seconds from what was measured, hours on several devices.

    python tools/study_cost.py count                       # forwards and tokens: no machine is needed
    python tools/study_cost.py measure MODEL ...           # the cost of a forward, where the study will run; writes a JSON
    python tools/study_cost.py hours JSON --devices 1,8,64 # what was measured, times what was counted

The formulas stand in docs/study_cost.md. A JSON of benchmarks/gpu.py will do for ``hours`` too: it holds one total, which gives a
range.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PROMPT, STEPS, LENGTHS = 64, 32, (32, 64, 128, 256, 448)
"""What a prediction is held against, and the lengths at which forwards are timed, in tokens."""


# Counted -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The decodes of the behaviour experiment, on each model."""

    examples: int = field(default=700, metadata={"help": "problems"})
    steps: int = field(default=128, metadata={"help": "tokens decoded of each"})
    prompt: int = field(default=900, metadata={"help": "tokens of a prompt, a mean; count them with the model's tokenizer"})
    strategies: int = field(default=3, metadata={"help": "greedy and the sampled ones"})
    seeds: int = field(default=5, metadata={"help": "of each sampled strategy; greedy has no use for them"})
    flipped: float = field(
        default=1.0, metadata={"help": "share of decodes that flip, which alone are run free; 1 is the most"}
    )
    block: int = field(default=20, metadata={"help": "problems of a cell"})
    attentions: int = field(default=1, metadata={"help": "attention implementations: 2 for sdpa and eager"})

    def __post_init__(self) -> None:
        for each in fields(self):
            given, least = getattr(self, each.name), 0 if each.name == "flipped" else 1
            if not least <= given or (each.name == "flipped" and given > 1):
                raise ValueError(f"--{each.name} {given}: expected {'a share from 0 to 1' if least == 0 else 'at least 1'}")

    @property
    def decodes(self) -> int:
        """Different decodes of a pair of paths, of one model: greedy once."""
        return self.attentions * self.examples * (1 + (self.strategies - 1) * self.seeds)

    @property
    def reported(self) -> int:
        """Those a column reports that counts greedy once a seed, as the paper's does."""
        return self.attentions * self.examples * self.strategies * self.seeds


@dataclass(frozen=True)
class Forwards:
    """Forwards of some kind and the tokens in them."""

    count: float
    tokens: float


def counted(plan: Plan) -> dict[str, Forwards]:
    """The forwards of one decode, by kind: both paths, matched, and what running it free adds.

    Free, the leading path is fed what it was fed before and gives what it gave; so a free run is the other path's alone.
    """
    prompt, steps = plan.prompt, plan.steps
    whole = sum(prompt + step for step in range(steps))
    return {
        "prefill": Forwards(1, prompt),
        "cached steps": Forwards(steps - 1, steps - 1),
        "recompute, matched": Forwards(steps, whole),
        "recompute, free": Forwards(plan.flipped * (steps - 1), plan.flipped * (whole - prompt)),
    }


# Seconds -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What forwards of one model take where it was measured, in seconds.

    Attributes:
        cached: Of a cached step at a length L: these numbers times 1, L.
        recompute: Of a forward of L tokens: these times 1, L, L squared.
        around: A comparison's time over that of its forwards.
        load: Of loading the model.
    """

    cached: Sequence[float]
    recompute: Sequence[float]
    around: float = 1.0
    load: float = 0.0

    def matched(self, prompt: int, steps: int) -> float:
        """Both paths on the same tokens: the prefill, a step a token, and a forward of the whole prefix a token."""
        return self.around * (
            _at(self.recompute, prompt)
            + sum(_at(self.cached, prompt + step) for step in range(1, steps))
            + sum(_at(self.recompute, prompt + step) for step in range(steps))
        )

    def free(self, prompt: int, steps: int) -> float:
        """What the free protocol adds to that: the recompute path once more, from step 1 on."""
        return self.around * sum(_at(self.recompute, prompt + step) for step in range(1, steps))

    def decode(self, plan: Plan) -> float:
        """Both paths and both protocols."""
        return self.matched(plan.prompt, plan.steps) + plan.flipped * self.free(plan.prompt, plan.steps)


def _at(numbers: Sequence[float], length: int) -> float:
    return sum(number * length**power for power, number in enumerate(numbers))


def scaled(seconds: float, prompt: int, steps: int, plan: Plan) -> tuple[float, float]:
    """The least and the most that a decode of the plan takes, by the time of one matched decode of another size.

    Where a forward takes ``a + b * tokens`` with no part below 0, one total leaves open how it divides: all in ``a`` and all in
    ``b`` are the two ends. What attention takes more at greater lengths is in neither.

    Args:
        seconds: Of both paths, matched.
        prompt: Tokens of the prompt it was measured with.
        steps: Tokens decoded there.
        plan: What is wanted.
    """
    there, wanted = counted(Plan(prompt=prompt, steps=steps, flipped=0.0)), counted(plan)
    ratios = [
        sum(getattr(f, of) for f in wanted.values()) / sum(getattr(f, of) for f in there.values())
        for of in ("count", "tokens")
    ]
    return seconds * min(ratios), seconds * max(ratios)


def makespan(seconds: Sequence[float], loads: Sequence[float], plan: Plan, devices: int) -> float:
    """When the last of several devices is done: each takes the next cell as soon as it is free, and loads a model when it changes.

    Args:
        seconds: Of a decode, for each model.
        loads: Of loading each model.
        plan: What is run.
        devices: How many there are; each runs one model at a time.
    """
    blocks = [min(plan.block, plan.examples - start) for start in range(0, plan.examples, plan.block)]
    runs = plan.decodes // plan.examples
    cells = [(model, size * each) for model, each in enumerate(seconds) for size in blocks for _ in range(runs)]
    free: list[tuple[float, int, int]] = [(0.0, device, -1) for device in range(min(devices, len(cells)))]
    for model, cell in cells:
        at, device, held = heapq.heappop(free)
        heapq.heappush(free, (at + cell + (loads[model] if held != model else 0.0), device, model))
    return max(at for at, _, _ in free)


# Measured ----------------------------------------------------------------------------------------------------------------


def fitted(lengths: Sequence[int], seconds: Sequence[float], powers: int) -> list[float]:
    """The numbers of no sign below 0 whose sum times 1, L, L squared, ... is nearest to what was measured, relatively."""
    import numpy as np
    from scipy.optimize import nnls

    weights = 1 / np.asarray(seconds)
    columns = np.stack([np.asarray(lengths, float) ** power for power in range(powers)], axis=1)
    scale = columns.max(0)
    found, _ = nnls(columns / scale * weights[:, None], np.ones(len(lengths)))
    return [float(number) for number in found / scale]


def measured(
    name: str, device: str, kind: str, dtype: str, attention: str | None, lengths: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Times the forwards of one model, fits the cost of each to its length, and holds the fit against a whole comparison."""
    import torch

    import kvinterp as kv
    from kvinterp.models.provenance import provenance
    from kvinterp.paths import Runner

    def now() -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        # Of one thread: what else the machine does is not counted.
        return time.process_time()

    how: dict[str, Any] = {"kind": kind, "dtype": dtype, "device": device, "attention": attention}
    kv.load_model(name, **how)  # What is loaded once for all, the libraries, is no cost of a model.
    began = now()
    adapter = kv.load_model(name, **how)
    load = now() - began
    draw = torch.Generator().manual_seed(0)

    def prompt_of(length: int) -> list[int]:
        return torch.randint(3, adapter.facts.vocabulary, (length,), generator=draw).tolist()

    def steps_of(path: str, prompt: list[int], steps: int) -> list[float]:
        tokens, each = torch.tensor([prompt], device=adapter.device), []
        with Runner(adapter, kv.path_named(path), tokens, steps) as runner:
            for step in range(steps):
                began = now()
                runner.advance(None if step == 0 else tokens[:, step])
                each.append(now() - began)
        return each

    def compared(prompt: list[int], steps: int) -> float:
        began = now()
        kv.compare(adapter, prompt, max_new_tokens=steps, stop="length", record="", progress="none")
        return now() - began

    points = []
    for length in lengths:
        prompt, few = prompt_of(length), 4
        steps_of("cached", prompt, few), steps_of("recompute", prompt, 1)
        cached = [t for _ in range(rounds) for t in steps_of("cached", prompt, few)[1:]]
        whole = [t for _ in range(rounds) for t in steps_of("recompute", prompt, 1)]
        points.append({"length": length, "cached": statistics.median(cached), "recompute": statistics.median(whole)})
    at = [point["length"] for point in points]
    costs = Costs(
        fitted([length + 2 for length in at], [point["cached"] for point in points], 2),
        fitted(at, [point["recompute"] for point in points], 3),
    )
    prompt = prompt_of(PROMPT)
    compared(prompt, STEPS)
    ratios = []
    for _ in range(rounds):
        forwards = sum(steps_of("cached", prompt, STEPS)) + sum(steps_of("recompute", prompt, STEPS))
        ratios.append((compared(prompt, STEPS), forwards))
    taken = statistics.median(c for c, _ in ratios)
    return {
        "load": load,
        "points": points,
        "cached": costs.cached,
        "recompute": costs.recompute,
        "around": statistics.median(c / f for c, f in ratios),
        "check": {
            "prompt": PROMPT, "steps": STEPS, "forwards": statistics.median(f for _, f in ratios), "compared": taken,
            "forwards by the fit": costs.matched(PROMPT, STEPS),
        },
        "provenance": provenance(adapter),
    }  # fmt: skip


# Printed -----------------------------------------------------------------------------------------------------------------


def costs_of(content: dict[str, Any], plan: Plan) -> dict[str, tuple[list[float], float]]:
    """By model: the seconds of a decode (one number, or the ends of a range) and of loading.

    Args:
        content: Of this tool's ``measure`` or of benchmarks/gpu.py.
        plan: What is wanted.

    Raises:
        ValueError: It is neither.
    """
    found: dict[str, tuple[list[float], float]] = {}
    for name, entry in content.get("models", {}).items():
        if isinstance(entry, dict) and "recompute" in entry:
            costs = Costs(entry["cached"], entry["recompute"], entry["around"], entry["load"])
            found[name] = [costs.decode(plan)], entry["load"]
        elif isinstance(entry, dict) and "seconds" in entry.get("native", {}):
            seconds = entry["native"]["seconds"]["compared"]
            found[name] = list(scaled(seconds, content["prompt"], content["steps"], plan)), 0.0
    if not found:
        raise ValueError("it holds no costs of models: give what `measure` or benchmarks/gpu.py wrote")
    return found


def tell_counts(plan: Plan, models: int) -> None:
    """Prints the forwards."""
    print(
        f"{models} models, {plan.decodes:,} different decodes each ({models * plan.decodes:,}; reported as {models * plan.reported:,})"
    )
    print(f"a prompt of {plan.prompt} tokens, {plan.steps} steps, {plan.flipped:.0%} of decodes run free too\n")
    print(f"{'':22}{'forwards':>14}{'tokens':>20}")
    total = [0.0, 0.0]
    for name, forwards in counted(plan).items():
        numbers = [models * plan.decodes * number for number in (forwards.count, forwards.tokens)]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        print(f"{name:22}{numbers[0]:>14,.0f}{numbers[1]:>20,.0f}")
    print(f"{'all':22}{total[0]:>14,.0f}{total[1]:>20,.0f}")


def tell_hours(content: dict[str, Any], plan: Plan, devices: Sequence[int]) -> None:
    """Prints the hours."""
    found = costs_of(content, plan)
    print(
        f"{plan.decodes:,} decodes a model, a prompt of {plan.prompt} tokens, {plan.steps} steps, both paths, both protocols"
    )
    print(f"({plan.flipped:.0%} of decodes run free too)\n")
    for name, (seconds, load) in found.items():
        each = " to ".join(f"{second:.3g}" for second in seconds)
        hours = " to ".join(f"{second * plan.decodes / 3600:,.3g}" for second in seconds)
        print(f"{name}: {each} s a decode, {hours} device hours; loading takes {load:.3g} s")
        if check := content["models"][name].get("check"):
            off = check["forwards by the fit"] / check["forwards"] - 1
            print(f"    the fit is off by {off:+.0%} at a prompt of {check['prompt']} tokens and {check['steps']} steps")
    print()
    longest = max(len(seconds) for seconds, _ in found.values())
    for number in devices:
        ends = [
            makespan(
                [s[min(end, len(s) - 1)] for s, _ in found.values()], [load for _, load in found.values()], plan, number
            )
            / 3600
            for end in range(longest)
        ]
        print(f"on {number} device{'s' if number > 1 else ''}: {' to '.join(f'{end:,.3g}' for end in ends)} hours")


def main() -> int:
    """Counts, measures or tells."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = given.add_subparsers(dest="verb", required=True)
    count, measure, hours = (verbs.add_parser(verb) for verb in ("count", "measure", "hours"))
    for parser in (count, hours):
        for each in fields(Plan):
            parser.add_argument(
                f"--{each.name}",
                type=type(each.default),
                default=each.default,
                help=f"{each.metadata['help']} [{each.default}]",
            )
    count.add_argument("--models", type=int, default=3)
    measure.add_argument("models", nargs="+")
    measure.add_argument("--device", default="cpu")
    measure.add_argument("--kind", default="native")
    measure.add_argument("--dtype", default="float16")
    measure.add_argument("--attention", default=None)
    measure.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="at which forwards are timed; reach the study's"
    )
    measure.add_argument("--rounds", type=int, default=5)
    measure.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    hours.add_argument("file", type=Path)
    hours.add_argument("--devices", default="1,8,64")
    options = given.parse_args()
    try:
        if options.verb == "measure":
            write(options)
            return 0
        plan = Plan(**{each.name: getattr(options, each.name) for each in fields(Plan)})
        if options.verb == "count":
            tell_counts(plan, options.models)
        else:
            content = json.loads(options.file.read_text(encoding="utf-8"))
            tell_hours(content, plan, [int(number) for number in options.devices.split(",")])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write(options: argparse.Namespace) -> None:
    """Measures and keeps what was measured."""
    lengths = [int(length) for length in options.lengths.split(",")]
    how = (options.device, options.kind, options.dtype, options.attention, lengths, options.rounds)
    models = {name: measured(name, *how) for name in options.models}
    about = next(iter(models.values()))["provenance"]
    label = "-".join(about["device"].lower().replace("(", " ").replace(")", " ").split())
    target = options.out / f"study_cost-{label}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"device": about["device"], "models": models}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {target}")


if __name__ == "__main__":
    sys.exit(main())
