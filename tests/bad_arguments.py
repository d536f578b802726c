"""Arguments that are bad, one at a time and by a seed, of every function of the API; those of commands are in ``bad_commands``.

Run by itself, ``python bad_arguments.py FIRST:END ...``, it prints a JSON line for every case that was not handled as it should
be: refused with one sentence that names a remedy and nothing written, or run. It is a process of its own because the tests'
own checks of types would answer first.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REMEDIES = (
    *("expected", "mend", "give", "use", "copy", "install", "save", "leave", "remove", "choose", "known are", "ask for"),
    *("convert", "shorten", "record", "decode", "name ", "write", "call ", " has ", "are numbered", "unset"),
)
CASES = 1600
LONGEST = 2200


def values() -> list[Any]:
    """One or more of every type that somebody might give."""
    import numpy as np
    import torch

    plain = [None, True, 0, 1, -1, 2.5, float("nan"), float("inf"), 10**30, 2**63, 99_999, 1j, "", "a", "0", "\x1b[31m"]
    texts = ["x" * 3000, "a\0b", "\ud800", b"a", "(1", "../x", "1e999", "zoo:", "identity('a')", "cached+identity(99)"]
    lists = [[], [[]], ["a"], [1.5], [10**30], [None], [-1], (), ("a", "b"), (0.5, 2), (0,), (1, (2,)), {}, {"a": 1}, {1}]
    tensors = [torch.tensor([1.0]), torch.tensor(1), torch.zeros(0), torch.zeros(2, 3, 4), torch.zeros(2) * 1j]
    others = [np.array(["a"]), np.int64(1), Path("/dev/null/x"), slice(0, 2), range(3), iter([]), object(), float]
    return [*plain, *texts, *lists, *tensors, *others, torch.nn.Linear(2, 2), torch.int8]


TEXTS = [
    *(
        "",
        "0",
        "-1",
        "1.5",
        "nan",
        "a",
        "\x1b[31m",
        "x" * 3000,
        "99999",
        "1" + "0" * 25,
        "18446744073709551616",
        "a,b",
        "0,,1",
    ),
    *(
        "~no-such-user/x",
        "/proc/1/x",
        "\udcff",
        "[]",
        "zoo:",
        "zoo:nope",
        "nobody/none",
        "instructions:100000",
        "arithmetic:0",
    ),
    *(
        "cached+identity(99)",
        "cached+identity('a')",
        "cached[chunk=0]",
        "recompute@int8",
        "top_k(0)",
        "meta",
        "cuda:9",
        "cpu:7",
    ),
    *("(", "native,", "split_k(0)", "float8", "99999,99998,5", "5," * 3000 + "5", "1e5", "٣"),
]
"""What is given to the options of the commands."""


def api() -> dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any]]]:
    """Every function: how it is called, arguments that are right, and what says its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvinterp as kv
    from kvinterp.auditing.building import random_model
    from kvinterp.patching.planted import Planted
    from kvinterp.patching.sweeping import highest_kl
    from kvinterp.paths import strategy_named

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    m, tokens, short = kv.wrap(model), [1, 2, 3], {"max_new_tokens": 2}
    quiet = {**short, "progress": "none"}
    trace = kv.run(m, tokens, record="resid_post,kv", positions="all", logits="keep", **short)
    with kv.record(model, "resid_post", positions="all") as recorder:
        model(torch.tensor([tokens]))

    def within(context: Callable[..., Any]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            with context(**given):
                model(torch.tensor([tokens]))

        return call

    def patch(**given: Any) -> None:
        whole = {"donor": trace, "steps": (0,), "positions": "all", **given}
        within(kv.patched)(model=model, patches=kv.Patch(**whole))

    def along(build: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda **given: kv.run(m, tokens, **{name: build(**given)}, **short)

    shown = [kv.run(m, tokens, path, record="pattern", positions="all", **short) for path in ("cached", "recompute")]
    donor = kv.Patch("resid_post", donor=trace, steps=(0,), positions="all")
    quick = {"lengths": (5,), "steps": 1, "rungs": ("float32",), "checks": "none", "sweep": "no"}
    calls: dict[str, Any] = {
        "run": (kv.run, {"model": m, "prompt": tokens, **short}),
        "run, recorded": (kv.run, {"model": m, "prompt": tokens, "record": "kv,resid_post", "logits": "keep", **short}),
        "compare": (kv.compare, {"model": m, "prompts": [tokens], **quiet}),
        "compare_traces": (kv.compare_traces, {"a": trace, "b": trace}),
        "Recorder": (kv.Recorder, {"adapter": m, "sites": "resid_post"}),
        "record": (within(kv.record), {"model": m, "sites": "resid_post"}, kv.record),
        "Patch": (patch, {"site": "resid_post"}, kv.Patch),
        "patched": (within(kv.patched), {"model": model, "patches": [donor]}, kv.patched),
        "donor_trace": (kv.donor_trace, {"recorder": recorder, "prompt": tokens}),
        "mean_donor": (kv.mean_donor, {"model": m, "prompts": [tokens], "sites": "k"}),
        "resample_donor": (kv.resample_donor, {"model": m, "prompts": [tokens], "sites": "k"}),
        "activation_patching": (
            kv.activation_patching,
            {"model": m, "clean": tokens, "corrupted": [1, 5, 3], "progress": "none"},
        ),
        "Plant": (lambda **given: kv.localise(m, tokens, kv.Plant(**given)), {"place": "row"}, kv.Plant),
        "localise": (kv.localise, {"model": m, "prompt": tokens}),
        "sweep": (kv.sweep, {"model": m, "prompts": [tokens], "controls": "none", **quiet}),
        "highest_kl": (highest_kl, {"model": m, "prompts": [tokens], "count": 1, **quiet}),
        "decompose": (kv.decompose, {"model": m, "prompts": [tokens], **quiet}),
        "audit": (kv.audit, {"model": model, **quick}),
        "kernels_table": (kv.kernels_table, {"model": model, "sizes": (1, 2), "length": 4}),
        "load_prompts": (kv.load_prompts, {"source": "arithmetic:2"}),
        "path_named": (kv.path_named, {"text": "cached"}),
        "policy_named": (kv.policy_named, {"text": "identity"}),
        "strategy_named": (strategy_named, {"text": "greedy"}),
        "Cached": (along(kv.Cached, "path"), {}, kv.Cached),
        "Recompute": (along(kv.Recompute, "path"), {}, kv.Recompute),
        "ExecutionPath": (along(kv.ExecutionPath, "path"), {}, kv.ExecutionPath),
        "Planted": (lambda **given: along(kv.Cached, "path")(policy=Planted(**given)), {}, Planted),
        "TopK": (along(kv.TopK, "strategy"), {}, kv.TopK),
        "TopP": (along(kv.TopP, "strategy"), {}, kv.TopP),
        "Prompt": (lambda **given: kv.load_prompts([kv.Prompt(**given)]), {"id": "a", "text": "b"}, kv.Prompt),
        "wrap": (kv.wrap, {"model": model}),
        "load_model": (kv.load_model, {"name": "zoo:gqa2-mini", "kind": "native", "dtype": "float32", "device": "cpu"}),
        "random_model": (random_model, {"source": "zoo:gqa2-mini"}),
        "Trace.load": (kv.Trace.load, {"folder": "/nonexistent"}),
        "compare, several": (
            kv.compare,
            {"model": m, "prompts": [tokens], "b": ["recompute", "recompute@float64"], **quiet},
        ),
        "logit_lens": (kv.logit_lens, {"model": m, "prompts": [tokens], **short}),
        "PatchBench": (kv.PatchBench, {"model": m}),
        "PatchBench.ask": (kv.PatchBench(m, 2).ask, {"prompt": tokens}),
        "patch_panel": (kv.patch_panel, {"models": m, "prompt": "2 + 2 ="}),
        "attention_comparison": (kv.attention_comparison, {"source": m, "other": tokens, "step": 1}),
        "attention_comparison, compared": (
            kv.attention_comparison,
            {"source": kv.compare(m, [tokens], **quiet), "step": 1},
        ),
        "attention_comparison, traces": (
            kv.attention_comparison,
            {"source": shown[0], "other": shown[1], "step": 1},
        ),
        "experiment": (kv.experiment, {"name": "decompose", "model": "zoo:gqa2-mini", "prompts": "arithmetic:1", **quiet}),
        "trace[...]": (lambda place: trace[place], {}),
        "recorder[...]": (lambda place: recorder[place], {}),
    }
    return {name: (call[0], call[1], call[-1] if len(call) > 2 else call[0]) for name, call in calls.items()}


class Cases:
    """Draws and runs them."""

    def __init__(self) -> None:
        self.api = api()

    def wrong(self, seed: int) -> str:
        """Runs the case of a seed; says what was wrong with how it was handled, or nothing."""
        from kvinterp.errors import KvinterpError

        chosen = random.Random(seed)
        name = chosen.choice(sorted(self.api))
        call, right, described = self.api[name]
        # What is called later with what this toolkit gives is the caller's own; a function as such is taken.
        parameter = chosen.choice([p for p in inspect.signature(described).parameters if p not in ("self", "progress")])
        number = chosen.randrange(len(values()))
        given = values()[number]
        where = f"{name}({parameter}={str(given)[:60]!r})"
        if parameter == "done" and callable(given):
            return ""
        before = _listed()
        try:
            call(**{**right, parameter: given})
        except KvinterpError as error:
            return _faults(where, str(error), before)
        except Exception as error:
            return f"{where}: {type(error).__name__}: {str(error)[:200]}"
        return ""


class Nothing:
    """What no argument can be: who takes it has not looked at it."""


def unread(cases: dict[str, Any]) -> list[str]:
    """The arguments of functions that are taken whatever they are, and those at which one ends in a traceback."""
    from kvinterp.errors import KvinterpError

    found = []
    for name, (call, right, described) in cases.items():
        for parameter in inspect.signature(described).parameters:
            if parameter in ("self", "place", "choices"):
                continue
            try:
                call(**{**right, parameter: Nothing()})
            except KvinterpError:
                continue
            except Exception as error:
                found.append(f"{name}({parameter}=...): {type(error).__name__}: {str(error)[:200]}")
            else:
                found.append(f"{name}({parameter}=...) is taken and not read")
    return found


def _faults(where: str, said: str, before: list[str]) -> str:
    faults = {
        "more than one line": "\n" in said,
        "control characters": "\x1b" in said,
        "no remedy": not any(word in said for word in REMEDIES),
        f"{len(said)} characters": len(said) > LONGEST,
        "something was written": _listed() != before,
    }
    found = [fault for fault, there in faults.items() if there]
    return f"{where}: {', '.join(found)}: {said[:300]}" if found else ""


def _listed() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def main(seeds: Sequence[int]) -> None:
    """Runs the cases of these seeds and prints the wrong ones."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases, home = Cases(), Path.cwd()
    for seed in seeds:
        # A folder each: what one leaves, as a run that was right, is not the next one's.
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            wrong = cases.wrong(seed)
            os.chdir(home)
        if wrong:
            print(json.dumps({"seed": seed, "wrong": wrong}), flush=True)
    print(json.dumps({"done": len(seeds)}))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if sys.argv[1:] == ["unread"]:
        warnings.simplefilter("ignore")
        for wrong in unread(api()):
            print(json.dumps({"wrong": wrong}))
        print(json.dumps({"done": "unread"}))
        sys.exit()
    main([seed for part in sys.argv[1:] for seed in range(*map(int, part.split(":")))])
