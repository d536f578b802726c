"""localise and decompose agree, on generated cases whose difference is made by construction and not by this machine.

Under ``batch_invariant`` kernels both paths are equal to the bit whatever the processor, so what is planted is all there is
and each part is known: 0 to the bit, or all of it. The other cases run the machine's own kernels, or split one-row products,
and know no truth; there the two must agree with each other all the same.
"""

import collections
import dataclasses
import random

import pytest

import kvinterp as kv
from kvinterp.patching import PARTS, PLACES
from kvinterp.patching.localising import PLACES_OF
from kvinterp.patching.planted import nudged
from kvinterp.policies import Policy
from support import Case

pytestmark = pytest.mark.slow

COUNT, TURN, SAMPLED = 200, 8, 16
MODELS = [
    Case("llama-mha", "hooked"),
    Case("gemma2", "hooked"),
    Case("standard", "hooked"),
    Case("rotary", "hooked"),
    Case("llama-gqa", "native", "sdpa"),
    Case("llama-mha", "native", "eager"),
    Case("mistral-window", "native", "eager"),
    Case("gpt2", "native", "sdpa"),
]
DTYPES = ("float16", "bfloat16", "float32", "float64")
EXACT = ("nothing", "prompt made anew", "kept K and V", "narrower cache", "row", "row at step 1", "unembedding")
OTHER = ("own kernels", "split-K", "split-K and kept", "own kernels and row")
MODES = tuple(
    f"split_k({k},{a},{o})" for k in (2, 4) for a in ("float16", "float32") for o in ("linear", "values", "unembed")
)


@dataclasses.dataclass(frozen=True)
class MadeAnew(Policy):
    """For a recompute path: K and V of the prompt at one layer are other ones as soon as a row stands behind the prompt."""

    layer: int = 0
    prompt: int = 1
    bits: int = 11

    def write(self, keys, values, place):
        if place.layer != self.layer or place.stop <= self.prompt:
            return keys, values
        moved = []
        for tensor in (keys, values):
            new = tensor.clone()
            new[:, :, : self.prompt] = nudged(tensor[:, :, : self.prompt], 4.0, self.bits)
            moved.append(new)
        return tuple(moved)


@dataclasses.dataclass(frozen=True)
class Generated:
    number: int

    def __post_init__(self):
        draw = random.Random(self.number)
        causes = [*EXACT, *OTHER]
        # By turns, so that the sample too holds every cause.
        self.__dict__["cause"] = causes[(self.number // TURN + self.number) % len(causes)]
        self.__dict__["case"] = draw.choice(MODELS)
        self.__dict__["dtype"] = draw.choice(DTYPES)
        self.__dict__["steps"] = draw.randint(2, 3)
        self.__dict__["prompt"] = [draw.randrange(3, 90) for _ in range(draw.randint(3, 8))]
        self.__dict__["layer"] = draw.randrange(2)
        self.__dict__["site"] = draw.choice(("mlp_out", "attn_out", "resid_post"))
        self.__dict__["kernels"] = draw.choice(MODES)

    def __str__(self):
        return f"{self.number}-{self.case}-{self.dtype}-{self.cause}".replace(" ", "-")

    def paths(self):
        bits, length = 8 if self.dtype == "bfloat16" else 11, len(self.prompt)
        kernels = "batch_invariant" if self.cause in EXACT else "native"
        cached, recompute = (make(dtype=self.dtype, kernels=kernels) for make in (kv.Cached, kv.Recompute))
        plant = None
        if self.cause == "prompt made anew":
            recompute = dataclasses.replace(recompute, policy=MadeAnew(self.layer, length, bits))
        if self.cause == "narrower cache":
            cached = dataclasses.replace(cached, cache_dtype="float16" if self.dtype == "bfloat16" else "bfloat16")
        if "split-K" in self.cause:
            cached = kv.Cached(dtype=self.dtype, kernels=self.kernels)
        if "kept" in self.cause:
            plant = kv.Plant("kv", self.layer, bits=bits)
        if self.cause in ("row", "row at step 1", "own kernels and row"):
            steps = "first" if self.cause == "row at step 1" else "every"
            plant = kv.Plant("row", self.layer, bits=bits, site=self.site, steps=steps)
        if self.cause == "unembedding":
            plant = kv.Plant("unembedding", bits=bits)
        return {"cached": cached, "recompute": recompute, "plant": plant}


GENERATED = [
    pytest.param(
        one,
        id=str(one),
        marks=([pytest.mark.long] if number % SAMPLED else [])
        + ([pytest.mark.hooked] if one.case.kind == "hooked" else []),
    )
    for number in range(COUNT)
    for one in [Generated(number)]
]


def test_the_cases_hold_every_cause_kind_and_dtype_and_so_does_the_sample():
    for cases in ([Generated(n) for n in range(COUNT)], [Generated(n) for n in range(0, COUNT, SAMPLED)]):
        counts = collections.Counter(one.cause for one in cases)
        assert min(counts[cause] for cause in (*EXACT, *OTHER)) >= len(cases) // 16
        assert {one.case.kind for one in cases} == {"hooked", "native"}
        assert {one.dtype for one in cases} == set(DTYPES)


@pytest.mark.parametrize("one", GENERATED)
def test_localise_and_decompose_agree(load, one):
    model, paths = load(one.case), one.paths()
    steps = kv.decompose(model, one.prompt, max_new_tokens=one.steps, suffix=3, progress="none", **paths).steps
    cause = kv.localise(model, one.prompt, suffix=3, **paths)
    later = steps[steps["step"] > 0]
    if later.empty:
        # The first token ended the text: decompose has no decode step, and localise takes it all the same.
        later = steps.iloc[:0]
    else:
        row = later.iloc[0]
        assert cause.part == row["most"]
        assert {name: row[name] for name in cause.split} == dict(cause.split)
    _is_consistent(cause)
    _is_no_row_where_nothing_is_fresh(cause)
    if one.cause in EXACT:
        _is_what_was_planted(one, later, cause)
        if one.cause != "narrower cache":
            _is_what_a_sweep_finds(model, one, paths, cause)


def _is_consistent(cause):
    lengths = {part: cause.split[f"{part}_l2"] for part in PARTS}
    assert cause.split["alone_l2"] == cause.split["remade_l2"] == 0, "no row was decoded before step 1"
    if cause.part == "none":
        assert cause.split["total_l2"] == 0
        assert cause.table.empty
        return
    assert cause.table["share"].sum() == pytest.approx(1)
    for part, places in PLACES_OF.items():
        here = cause.table[cause.table["place"].isin(places)]
        assert here["share"].sum() == pytest.approx(lengths[part] / sum(lengths.values()), abs=1e-12)
        # Followed lane by lane from end to end, the way is at least as long as the part.
        assert here["l2"].sum() >= lengths[part] * (1 - 1e-9)
    if cause.part == "spread":
        assert max(lengths.values()) <= sum(lengths.values()) / 2
        return
    assert 2 * lengths[cause.part] > sum(lengths.values())
    assert cause.place in PLACES_OF[cause.part]
    assert cause.place in PLACES
    named = cause.table[cause.table["place"] == cause.place]
    if cause.layer >= 0:
        named = named[named["layer"] == cause.layer]
    assert cause.share == pytest.approx(named["share"].sum())


def _is_no_row_where_nothing_is_fresh(cause):
    """The one-row step on the recompute path's own K and V gives that path's very bits: it cannot be blamed."""
    if cause.split["fresh_l2"] == 0:
        assert cause.place not in ("row", "unembedding")
        assert cause.table[cause.table["place"].isin(("row", "unembedding"))].empty
    if cause.split["state_l2"] == 0:
        assert cause.place not in ("kv", "prompt")


def _is_what_was_planted(one, later, cause):
    only = {
        "nothing": (),
        "prompt made anew": ("anew",),
        "kept K and V": ("kept",),
        "narrower cache": ("kept",),
        "row": ("fresh", "alone"),
        "row at step 1": ("fresh", "alone"),
        "unembedding": ("fresh",),
    }[one.cause]
    for part in PARTS:
        assert (later[f"{part}_l2"] == 0).all() or part in only, f"{part} is not 0"
    nulls = [name for name in later if name.startswith("null") and name.endswith("_l2")]
    if one.cause != "prompt made anew":
        assert (later[nulls] == 0).all(axis=None)
    if one.cause == "row at step 1":
        assert (later["fresh_l2"].iloc[1:] == 0).all()
        assert later["alone_l2"].iloc[1:].tolist() == later["total_l2"].iloc[1:].tolist()
    if cause.part == "none":
        return  # What was planted did not reach the logits, as one unit of bfloat16 may not.
    assert cause.part == {"prompt made anew": "anew", "row": "fresh", "row at step 1": "fresh"}.get(one.cause, only[0])
    if one.cause == "row":
        assert (cause.place, cause.layer) == ("row", one.layer)
    if one.cause == "unembedding":
        assert (cause.place, cause.layer) == ("unembedding", -1)
    if one.cause == "kept K and V":
        assert (cause.place, cause.layer) == ("kv", one.layer)


def _is_what_a_sweep_finds(model, one, paths, cause):
    """The recompute path's K and V of all layers put into the cached path leave what is fresh, by another way."""
    if paths["plant"] is not None and paths["plant"].place != "kv":
        return
    cached = paths["cached"] if paths["plant"] is None else paths["plant"].written(paths["cached"], len(one.prompt))
    swept = kv.sweep(
        model, one.prompt, "kv", "cumulative", direction="into-cached", positions="earlier", steps="first", max_new_tokens=2,
        controls="none", progress="none", stop="length", cached=cached, recompute=paths["recompute"],
    ).recovery  # fmt: skip
    assert swept["d_before"].iloc[-1] == cause.split["total_l2"]
    assert swept["d_after"].iloc[-1] == cause.split["fresh_l2"] == 0


# Sentences -------------------------------------------------------------------------------------------------------------
