"""What a verb loads: a run reads no problem, records no generation, and a sweep splits no difference unless it is asked to."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import kvinterp as kv
from kvinterp.common.source import source
from kvinterp.data import forms, sources, tasks

LOADED = """
import json, sys
import kvinterp as kv
model = kv.load_model("zoo:gqa2-mini")
for call in sys.argv[1:]:
    eval(call)
    print(json.dumps([name for name in sys.modules if name.startswith("kvinterp.")]))
"""
GENERATIONS = ("recording.around", "recording.generation", "recording.parts", "models.passes")
PLUGINS = ("policies.noise", "policies.gguf", "paths.kernels.split_k", "paths.kernels.fixed_order", "metrics.rollouts")
PROBLEMS = ("data.tasks", "data.sources", "data.prompts")
CALLS = {
    "run": (
        'kv.run(model, [3, 4, 5], max_new_tokens=2, record="resid_post")',
        (*GENERATIONS, *PROBLEMS, *PLUGINS, "comparison", "patching"),
    ),
    "compare": (
        'kv.compare(model, [[3, 4, 5]], max_new_tokens=2, progress="none")',
        (*GENERATIONS, *PROBLEMS, *PLUGINS, "patching"),
    ),
    "sweep": (
        'kv.sweep(model, [3, 4, 5], "resid_post", max_new_tokens=2, progress="none")',
        (
            *GENERATIONS,
            *PROBLEMS,
            *PLUGINS,
            "patching.bench",
            "patching.steering",
            "patching.splitting",
            "patching.localising",
        ),
    ),
}


def test_a_verb_loads_nothing_that_it_does_not_need() -> None:
    """One process runs them in turn: what a verb may not load, those before it may not either."""
    command = [sys.executable, "-W", "ignore", "-c", LOADED, *(call for call, _ in CALLS.values())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for (verb, (_, without)), line in zip(CALLS.items(), ran.stdout.splitlines()[-len(CALLS) :], strict=True):
        loaded = json.loads(line)
        assert "kvinterp.paths.runner" in loaded
        assert [name for name in without if f"kvinterp.{name}" in loaded] == [], verb


@pytest.mark.parametrize("package", ["data", "metrics", "models", "paths", "paths.kernels", "patching", "recording"])
def test_what_a_package_offers_is_there_and_no_file_hides_it(package: str) -> None:
    offering = importlib.import_module(f"kvinterp.{package}")
    for name in source(offering.__name__).nodes.keys() - {"on_demand"}:
        assert not isinstance(getattr(offering, name), type(kv)), f"a file of {package} is called {name}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = offering.nothing


def test_the_forms_of_prompts_are_those_that_can_be_made() -> None:
    assert tuple(tasks.TASKS) == forms.GENERATORS
    assert tuple(sources.SOURCES) == forms.SOURCES
