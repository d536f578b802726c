"""What every option of every verb does: a value that changes the result, and what else must be given with it.

A new experiment is one entry of :data:`VERBS`, a new option one word of its line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from support import small_sae

SMALL, OTHER = "zoo:gqa2-mini", "zoo:mqa-mini"
SPLIT = "split_k(2,float16)"


@dataclasses.dataclass(frozen=True)
class Changes:
    """A value under which a table or the summary holds something else.

    Attributes:
        value: The value.
        beside: Other choices that it is given with, and without it as well.
    """

    value: Any
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Loads(Changes):
    """A value that says how the model is loaded: what made the result is another thing, its numbers may be the same."""


@dataclasses.dataclass(frozen=True)
class Keeps(Changes):
    """A value that changes nothing of the result, as its help says: how the work is cut, or where it is done."""


@dataclasses.dataclass(frozen=True)
class Writes(Changes):
    """The name of a file that is written besides."""


_ONE = {"prompts": "arithmetic:1"}
_LOADED = {"kind": Loads("bridge"), "device": Keeps("cpu"), "attention": Loads("eager")}
_MODEL = {"model": Changes(OTHER), **_LOADED, "dtype": Changes("float32")}
_MODELS = {"models": Changes((OTHER,)), "prompts": Changes("arithmetic:1:1"), **_LOADED}
_PROMPTS = {"prompts": Changes("arithmetic:1:1")}
_SAMPLED = {"strategy": "top_p(1.0,2.0)"}
_DECODES = {
    **_MODELS,
    "dtype": Changes("float32"),
    "strategies": Changes(("top_k(50,50.0)",)),
    "seeds": Changes(3, {"strategies": ("top_p(1.0,2.0)",)}),
    "max_new_tokens": Changes(4),
    "stop": Changes("length", {"max_new_tokens": 96, "kernels": "native"}),
    "kernels": Changes(SPLIT),
    "block": Keeps(1),
    "batch_size": Keeps(2),
}

VERBS: dict[str, tuple[dict[str, Any], dict[str, Changes]]] = {
    "audit": (
        {"model": SMALL, "lengths": (5,), "rungs": "float32", "checks": "none", "steps": 1},
        {
            **_MODEL,
            "model": Changes(OTHER),
            "random_init": Changes(True),
            "prompts": Changes("arithmetic:2"),
            "dtype": Changes("bfloat16"),
            "rungs": Changes("float64"),
            "lengths": Changes((6,)),
            "steps": Changes(2),
            "checks": Changes("default"),
            "thorough": Changes(True, {"checks": "default"}),
            "programs": Changes(3, {"checks": "default"}),
            "seconds": Changes(1.0, {"checks": "default"}),
            "reach": Changes(True, {"checks": "default"}),
            "calls": Changes("forked(2)", {"checks": "default"}),
            "cache": Changes("static", {"checks": "default", "programs": 3}),
            "allow": Keeps(("hidden-cast",)),
            "seed": Changes(1),
            "remote_code": Keeps(True),
        },
    ),
    "behaviour": (
        {"models": (SMALL,), **_ONE, "strategies": ("greedy",), "max_new_tokens": 3, "controls": 0},
        {**_DECODES, "controls": Changes(1)},
    ),
    "chain": (
        {
            "models": (SMALL,),
            "policies": ("int4",),
            "on": "kv",
            "texts": "restate:1",
            "hops": 2,
            "temperatures": "0.7",
            "seeds": 2,
            "max_new_tokens": 4,
        },
        {
            "models": Changes((OTHER,)),
            "policies": Changes(("truncate(2)",)),
            "on": Changes("k"),
            "texts": Changes("restate:1:1"),
            "text": Changes("The box holds 3 apples.", {"texts": "restate:6"}),
            "template": Changes("{text} Again:"),
            "system": Changes("Be brief."),
            "hops": Changes(3),
            "temperatures": Changes("0.7,0"),
            "seeds": Changes(3),
            "max_new_tokens": Changes(6),
            "embedder": Changes("model"),
            "chat": Changes("template", {"models": ("templated",)}),
            "batch_size": Keeps(2),
            **_LOADED,
            "dtype": Loads("float32"),
        },
    ),
    "compare": (
        {"model": SMALL, **_ONE, "max_new_tokens": 3, "b": f"recompute[kernels={SPLIT}]"},
        {
            **_MODEL,
            **_PROMPTS,
            "a": Changes("cached+int4"),
            "b": Changes("recompute@float64"),
            "protocol": Changes("free", {"b": "cached+truncate(1)", "max_new_tokens": 8}),
            "strategy": Changes("top_p(1.0,2.0)"),
            "max_new_tokens": Changes(4),
            "record": Changes("resid_post"),
            "layers": Changes((1,)),
            "seed": Changes(3, {**_SAMPLED, "max_new_tokens": 6}),
            "batch_size": Keeps(2),
            "stop": Changes("length", {"max_new_tokens": 96, "record": "", "b": "recompute"}),
            "cache_errors": Changes("whole"),
        },
    ),
    "attention": (
        {"model": SMALL, **_ONE, "a": "cached+int8", "step": 2},
        {
            **_MODEL,
            **_PROMPTS,
            "a": Changes("cached+int4"),
            "b": Changes("recompute@float64"),
            "step": Changes(3),
            "layers": Changes((1,)),
            "most": Changes(1),
        },
    ),
    "decompose": (
        {"model": SMALL, **_ONE, "max_new_tokens": 3},
        {
            **_MODEL,
            **_PROMPTS,
            "a": Changes("cached+int4"),
            "b": Changes(f"recompute[kernels={SPLIT}]"),
            "max_new_tokens": Changes(4),
        },
    ),
    "which-run": (
        {"model": SMALL, **_ONE, "max_new_tokens": 3},
        {
            **_MODEL,
            **_PROMPTS,
            "run_by": Changes("cached+int4"),
            "layers": Changes((0, 1)),
            "max_new_tokens": Changes(4),
            "top": Changes(2),
            "sae": Changes((small_sae(),)),
        },
    ),
    "equivalent-noise": (
        {"model": SMALL, **_ONE, "policies": ("int4",), "max_new_tokens": 2},
        {**_MODEL, **_PROMPTS, "policies": Changes(("int8",)), "max_new_tokens": Changes(3)},
    ),
    "flip-law": (
        {"model": SMALL, **_ONE, "path": ("cached",), "max_new_tokens": 4},
        {
            **_MODEL,
            **_PROMPTS,
            "path": Changes(("cached+int4",)),
            "max_new_tokens": Changes(5),
            "strategy": Changes("top_k(50,4)"),
            "seed": Changes(1, {"strategy": "top_k(50,4)"}),
        },
    ),
    "kernels": (
        {"model": SMALL, "sizes": (1, 2)},
        {
            **_MODEL,
            "kernels": Changes("split_k(2,float16)"),
            # What varies is a yes or no, which on some processors no weights change.
            "random_init": Loads(True),
            "sizes": Changes((1, 3)),
            "remote_code": Keeps(True),
        },
    ),
    "kv-error": (
        {
            "model": SMALL,
            "design": "none",
            "policies": ("int4",),
            "readings": "stored",
            "repeats": 1,
            "max_new_tokens": 3,
            "instructions": "instructions:1",
            "problems": "arithmetic:1",
            "texts": "restate:1",
            "strings": "instructions:2",
        },
        {
            **_MODEL,
            "design": Changes("layers"),
            "policies": Changes(("int8",)),
            "base": Changes("int8", {"design": "tensors"}),
            "rms": Changes(0.3, {"design": "factorial"}),
            "readings": Changes("exact"),
            "repeats": Changes(2),
            "instructions": Changes("instructions:1:1"),
            "problems": Changes("arithmetic:1:1"),
            "texts": Changes("restate:1:1"),
            "strings": Changes("instructions:3"),
            "strategy": Changes("greedy", {"repeats": 5}),
            "max_new_tokens": Changes(4),
            "dtype": Changes("float16"),
        },
    ),
    "layer-drift": (
        {"models": (SMALL,), "prompts": "arithmetic:2", "max_new_tokens": 4},
        {
            **_MODELS,
            "prompts": Changes("arithmetic:2:1"),
            "dtype": Changes("float32"),
            "strategy": Changes("top_p(1.0,50.0)"),
            "seed": Changes(3, {"strategy": "top_p(1.0,50.0)"}),
            "kernels": Changes(SPLIT),
            "max_new_tokens": Changes(5),
            "step": Changes(3, {"kernels": SPLIT}),
            "divergent": Changes(1),
            "contrast": Changes(("layer 0",)),
            "suffix": Changes(3, {"kernels": SPLIT}),
        },
    ),
    "localisation": (
        {"models": (SMALL,), "prompts": "arithmetic:2", "count": 1, "max_new_tokens": 3, "part": ("v-into-cached",)},
        {
            **_MODELS,
            "prompts": Changes("arithmetic:2:1"),
            "dtype": Changes("float32"),
            "count": Changes(2),
            "max_new_tokens": Changes(4),
            "kernels": Changes(SPLIT),
            "part": Changes(("k-into-cached",)),
        },
    ),
    "mitigate": (
        {"model": SMALL, **_ONE, "path": ("cached",), "policy": ("int8",), "max_new_tokens": 3},
        {
            **_MODEL,
            **_PROMPTS,
            "path": Changes(("cached[refresh=1]",)),
            "policy": Changes(("int4",)),
            "max_new_tokens": Changes(4),
        },
    ),
    "paper": (
        {"models": (SMALL,), **_ONE, "strategies": ("greedy",), "max_new_tokens": 4},
        {
            **_MODELS,
            "preset": Changes("real"),
            "strategies": Changes(("top_k(50,50.0)",)),
            "seeds": Changes(3, {"strategies": ("top_p(1.0,2.0)",)}),
            "max_new_tokens": Changes(5),
            "kernels": Changes(SPLIT),
        },
    ),
    "patch": (
        {"model": SMALL, "prompts": "arithmetic:2", "examples": 1, "max_new_tokens": 3, "controls": "none"},
        {
            **_MODEL,
            "prompts": Changes("arithmetic:2:1"),
            "a": Changes("cached+int4"),
            "b": Changes(f"recompute[kernels={SPLIT}]"),
            "site": Changes("cache_k"),
            "sweep": Changes("single"),
            "direction": Changes("into-recompute"),
            "steps": Changes("first"),
            "protocol": Changes("free"),
            "distance": Changes("margin"),
            "answers": Changes(("4", "5"), {"distance": "logit_difference", "answers": ("1", "2")}),
            "examples": Changes(2),
            "preset": Changes("paper"),
            "max_new_tokens": Changes(4),
            "layers": Changes((1,)),
            "batch_size": Keeps(2),
            "controls": Changes("quick"),
        },
    ),
    "root-cause": (
        {
            "models": (SMALL,),
            "prompts": "arithmetic:2",
            "few_prompts": 1,
            "ladder_prompts": 1,
            "ladder_steps": 2,
        },
        {
            **_MODELS,
            "prompts": Changes("arithmetic:2:1"),
            "part": Changes(("propagation", "gqa")),
            "few_prompts": Changes(2),
            "ladder_prompts": Changes(2),
            "ladder_steps": Changes(3),
            "seeds": Changes(2),
        },
    ),
    "susceptibility": (
        {"model": SMALL, **_ONE, "sizes": "0.1,1,4", "seeds": 2, "max_new_tokens": 3},
        {
            **_MODEL,
            **_PROMPTS,
            "noise": Changes("uniform"),
            "sizes": Changes("0.2,1,4"),
            "bins": Changes(1),
            "seeds": Changes(3),
            "max_new_tokens": Changes(4),
        },
    ),
}
"""By verb its smallest choices, and for every option what it does to the result of these."""

ELSEWHERE = {
    ("compare-traces", "first"): "two dumps, in tests/engines/test_compare_traces.py",
    ("compare-traces", "second"): "two dumps, in tests/engines/test_compare_traces.py",
    **{
        ("turns", name): "conversations, in tests/engines/test_turns_command.py"
        for name in ("file", "cost", "model", "dtype", "kind", "device", "attention")
    },
    ("attention", "generated"): "a whole generation, in tests/core/report/test_attention.py",
    ("chain", "prefill"): "policies under both readings, in tests/papers/test_chains.py and tests/core/policies",
    ("kernels", "seed"): "the prompt that is fed, in tests/auditing/test_shape_dependence.py",
    ("audit", "own_class"): "code of one's own, in tests/auditing/test_product.py",
    ("audit", "lossy"): "what is right of a cache that loses, in tests/auditing/test_given_caches.py",
    ("audit", "against"): "another engine's log-probs, in tests/engines/test_judge.py",
    ("audit", "older"): "weights of another time for them, in tests/engines/test_judge.py",
    ("audit", "format"): "how they are written, in tests/engines/test_readers.py",
    ("audit", "config"): "the config of code of one's own, in tests/auditing/test_product.py",
}
"""Options that are shown to be used by another test, and which."""

REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("compare", {"seed": 3}, "seed=3 was given, and nothing reads it: greedy decoding draws nothing"),
    ("compare", {"record": "", "layers": (0,)}, "layers=(0,) was given, and nothing reads it: no site is recorded"),
    ("compare", {"kind": "bridge", "attention": "eager"}, "attention='eager' was given for kind 'bridge'"),
    ("patch", {"answers": (" 4", " 5")}, "and nothing reads it: no distance that was asked for is of answers"),
    ("behaviour", {"strategies": ("greedy",), "seeds": 3}, "seeds=3 was given, and nothing reads it: greedy decoding"),
    ("root-cause", {"seeds": 2, "prompts": "2 + 2 ="}, "seeds was given with prompts '2 + 2 =', of which there is one set"),
    ("chain", {"text": "A text.", "texts": "restate:3"}, "texts='restate:3' was given, and nothing reads it: one text"),
    ("kv-error", {"base": "int8"}, "base='int8' was given, and nothing reads it: no design that was asked for uses it"),
    (
        "kv-error",
        {"design": "none", "policies": ("q8_0",), "strategy": "greedy", "repeats": 3},
        "repeats=3 was given, and nothing reads it: greedy decoding draws nothing",
    ),
    (
        "audit",
        {"prompts": "arithmetic:1", "seed": 3},
        "seed=3 was given, and nothing reads it: prompts and weights are given",
    ),
    ("audit", {"thorough": True, "checks": "none"}, "--thorough was given with --checks 'none'"),
)
"""Choices that are refused before a model is loaded, since nothing would read them."""

FREE = {
    "model", "models", "prompts", "text", "texts", "template", "system", "own_class", "config",
    "instructions", "problems", "strings", "embedder",
}  # fmt: skip
"""Options whose value may be any text: what they name is looked for where it is used."""
