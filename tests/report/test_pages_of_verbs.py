"""The page of every verb in a browser, made by the verb itself on a model and on prompts whose names are markup."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page, check_sorting

from kvinterp.models import zoo
from kvinterp.study.experiments.registry import experiment_named

pytestmark = [*IN_A_BROWSER, pytest.mark.long]

NAME = "<img src=x onerror=\"document.title='owned'\">"
"""A folder may have this name; ``EVIL`` holds a slash."""

SPLIT = "recompute[kernels=split_k(4,float16)]"
SHORT: dict[str, Any] = {"max_new_tokens": 4}
VERBS: dict[str, dict[str, Any]] = {
    "compare": {"b": SPLIT, **SHORT},
    "patch": {"site": "kv", "sweep": "kv-heads", "direction": "into-cached", "steps": "first", "controls": "quick", **SHORT},
    "decompose": SHORT,
    "kernels": {"sizes": (16, 24)},
    "root-cause": {"ladder_prompts": 1, "ladder_steps": 1},
    "behaviour": {"strategies": ("greedy", "top_p(1.0,1.5)"), "max_new_tokens": 5, "controls": 1, "stop": "length"},
    "boundary": {"strategies": ("greedy",), "max_new_tokens": 12},
    "layer-drift": {"max_new_tokens": 3},
    "localisation": {
        "kernels": "split_k(8,float16)", "part": ("paper", "k-into-cached", "decomposition"), "max_new_tokens": 2, "count": 1,
    },
    "mitigate": {"path": ("cached", "cached[kernels=batch_invariant]", "cached+int4"), "policy": ("int8",), **SHORT},
    "chain": {"policies": ("int4",), "hops": 1, "seeds": 2, "max_new_tokens": 8, "temperatures": "0.7,0"},
    "kv-error": {
        "design": "tensors", "base": "normal(0,1.5)", "policies": ("uniform(-2,2)",), "repeats": 1, "max_new_tokens": 8,
        "instructions": "instructions:2", "problems": "arithmetic:1", "texts": "restate:2", "strings": "instructions:2",
    },
    "susceptibility": {"sizes": "0.5,2,4", "seeds": 2, "max_new_tokens": 5, "bins": 2},
    "equivalent-noise": {"policies": ("identity", "uniform(-1,1)", "sinks(2,8)"), "max_new_tokens": 2},
}  # fmt: skip
"""The smallest run of each verb that draws all that it can draw."""


def page_of(verb: str, folder: Path) -> Path:
    """Runs a verb on a model and on prompts with hostile names; its page."""
    model, prompts = folder / NAME, folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        model.symlink_to(zoo.folder("gqa2-mini"))
    prompts.write_text("".join(json.dumps({"id": f"p{n} {EVIL}", "text": f"{n} {EVIL} is"}) + "\n" for n in range(2)))
    experiment = experiment_named(verb)
    fields = experiment.__dataclass_fields__
    given: dict[str, Any] = dict(VERBS[verb])
    given["models" if "models" in fields else "model"] = (str(model),) if "models" in fields else str(model)
    for name in ("prompts", "texts"):
        given |= {name: str(prompts)} if name in fields and name not in given else {}
    outcome = experiment(**given).run(folder / verb, progress="none")
    (page,) = [path for path in outcome.files if path.suffix == ".html"]
    return page


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_a_verb(page_opened: Callable[..., Opened], tmp_path: Path, verb: str) -> None:
    page = page_of(verb, tmp_path)
    check_page(page_opened, page)
    opened = page_opened(page)
    check_sorting(opened)
    check_markup(opened, NAME)
    opened.quiet()
    missing = [link for link in opened.page.evaluate(_LINKS) if not (page.parent / unquote(link)).exists()]
    assert not missing, "a link to a file leads nowhere"


_LINKS = "() => [...document.links].map((link) => link.getAttribute('href')).filter((link) => !link.startsWith('#'))"
