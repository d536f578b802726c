"""Made-up tables of a study, in worlds where what is true is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from kvinterp.study.claims import CLAIMS

MODELS = ("llama-like", "mistral-like", "gemma-like")
STRATEGIES = ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)")
STEPS, LAYERS, HEADS_PER_KV = 64, 4, (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class World:
    """What is true in it; the defaults are a world in which rounding is all there is.

    Attributes:
        n: Examples.
        parts: The share of decodes in which a token flips.
        by_margin: How much the margin decides when and whether it flips: 0 nothing.
        kl: The mean matched KL, and ``spread`` its standard deviation over examples.
        free: The mean KL of free decodes that part.
        bound: The KL that the largest logit difference allows.
        link: How much of KL goes with an early flip beside the margin; ``common`` how much through the margin.
        right: The chance that an answer of the cached path is right, and ``other`` of the other path.
        drift: The drift of each layer; 0 where the paths are equal.
        growth: How much larger the KL of the last steps is than that of the first.
        strategy: By how much greedy decoding multiplies the KL, in so many models as ``sensitive`` says.
        prefill: The drift at the step that the prefill decides.
        fixed_flips: The share of examples that flip in float16 in a fixed order.
        repeated: What errors of repeated heads do, where those of shared heads do 1.5.
        kept: Percent of the control's score that is kept under the errors named as bounds.
        texts: Texts of the chains, each under three seeds; ``own`` how much a text's own effect varies.
        seed: Of all that is drawn.
    """

    n: int = 60
    parts: float = 0.5
    by_margin: float = 0.0
    kl: float = 1e-6
    spread: float = 0.3
    free: float = 3.0
    bound: float = 1e-4
    link: float = 0.0
    common: float = 0.0
    right: float = 0.5
    other: float = 0.5
    drift: tuple[float, ...] = (1e-3, 1.2e-3, 1.4e-3, 1.5e-3)
    absolute: tuple[float, ...] = (1.0, 300.0, 310.0, 320.0)
    cosine: float = 0.999999
    nearer: float = 0.5
    within: float = 0.0
    growth: float = 0.0
    strategy: float = 1.0
    sensitive: int = 1
    prefill: float = 0.0
    fixed_flips: float = 0.0
    kept: float = 90.0
    texts: int = 30
    own: float = 0.02
    early: float = 0.2
    gemma: float = 0.0
    by_seed: float = 1.0
    differing_null: int = 0
    significant: float = 0.0
    half: float = 1e-6
    single: float = 1e-12
    flips_single: int = 0
    fixed: float = 0.0
    grown: float = 2.0
    wider: float = 2.0
    written: float = 1e-4
    compounds: float = 2.0
    broadcast: float = 1.0
    amplifies: float = 0.5
    repeated: float = 1.0
    residual: float = 0.9
    cumulative: float = 0.9
    cache: float = 0.9
    state: float = 0.9
    percent: tuple[float, float, float] = (97.0, 115.0, 80.0)
    factors: float = -0.4
    chains: float = -0.1
    keys: float = -0.1
    disagree: float = 0.0
    seeds: int = 2
    twice: int = 0
    js: int = 1
    at_once: float = 0.0
    seed: int = 0


def equal(n: int = 40, seed: int = 0) -> World:
    """Both paths compute the same, to the bit."""
    return World(
        n=n, parts=0, kl=0, spread=0, free=0, bound=0, drift=(0,) * LAYERS, absolute=(0,) * LAYERS, cosine=1, nearer=np.nan,
        half=0, single=0, written=0, residual=np.nan, cumulative=np.nan, cache=np.nan, state=np.nan, seed=seed,
    )  # fmt: skip


CLAIMED = World(
    parts=1.0, kl=11.0, free=11.0, bound=20.0, spread=0.4, common=0.6, right=0.62, other=0.38,
    drift=(1e-3, 5e-3, 5e-3, 5e-3), cosine=0.3, nearer=0.95, within=0.3, growth=2.0, early=0.9, gemma=1.0, significant=1.0,
    half=1e-3, single=1e-14, grown=1.0, residual=0.0, cumulative=-0.4, fixed_flips=0.3,
)  # fmt: skip
"""Where most of what the paper claims is true."""
OTHERWISE = World(
    differing_null=9, flips_single=4, right=0.25, other=0.75, gemma=-1e-7, residual=0.5, cumulative=0.5, cache=0.1, state=0.1,
    percent=(70.0, 60.0, 99.0), factors=0.2, chains=0.1, keys=0.1, wider=1.0, written=0.0, compounds=0.5, broadcast=0.5,
    amplifies=-0.5, fixed=1e-6, drift=(1e-3, 1e-3, 5e-3, 5e-3), twice=3, js=-1, repeated=1.6, prefill=1e-3, kept=60.0,
)  # fmt: skip
"""Where most of what is claimed is wrong; the paths differ as rounding makes them differ."""
FEW = dataclasses.replace(CLAIMED, n=4, texts=4)
"""As claimed, of too few prompts and texts to tell."""


def tables(world: World, *groups: str) -> dict[str, pd.DataFrame]:
    """Every table of a study, or those of some groups: behaviour, layers, cause, patching, policies."""
    found = {}
    for at, (name, make) in enumerate(_GROUPS.items()):
        if not groups or name in groups:
            found |= make(world, np.random.default_rng([world.seed, at]))
    return found


def _behaviour(world: World, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    return {"decodes": decodes(world, rng), "nulls": _nulls(world), "oracle": _oracle(world, rng)}


# Decodes ---------------------------------------------------------------------------------------------------------------


def decodes(world: World, rng: np.random.Generator) -> pd.DataFrame:
    """Decodes of both protocols."""
    unsure = rng.normal(size=world.n)  # Of an example, whatever decodes it.
    rows = []
    for model in MODELS:
        for strategy in STRATEGIES:
            for seed in range(1 if strategy == "greedy" else world.seeds):
                rows.append(_decoded(world, rng, unsure, model, strategy, seed))
    return pd.concat(rows, ignore_index=True)


def _decoded(world, rng, unsure, model, strategy, seed) -> pd.DataFrame:
    n = world.n
    chance = np.full(n, world.parts)
    if world.by_margin:
        chance = 1 / (1 + np.exp(-4 * world.by_margin * unsure))
    if world.by_seed < 1:
        chance = np.where(rng.random(n) < world.by_seed, chance, chance * 0.5)
    # The same example parts under each seed, or under none, unless the world says that seeds matter.
    luck = np.random.default_rng(world.seed + 99).random(n) if world.by_seed == 1 else rng.random(n)
    parts = luck < chance
    noise = rng.normal(size=n)
    when = (1 - world.by_margin) * noise - world.by_margin * 3 * unsure if world.by_margin else noise
    if world.common:
        when = -world.common * unsure + np.sqrt(1 - world.common**2) * noise
    if world.link:
        when = -world.link * unsure + np.sqrt(1 - world.link**2) * noise
    rank = when.argsort().argsort() / n
    early = rank < world.early
    flip = (
        np.where(early, 1 + rank / max(world.early, 0.01) * 7, 9 + (rank - world.early) * 50).astype(int).clip(1, STEPS - 2)
    )
    if world.at_once:
        flip = np.where(np.random.default_rng(world.seed + 7).random(n) < world.at_once, 1, flip + 1)
    kl = world.kl * np.exp(world.spread * (unsure * bool(world.common or world.link) + rng.normal(size=n) * 0.5))
    if world.kl and not (world.common or world.link):
        kl = world.kl + world.kl * world.spread * rng.normal(size=n) / 3
    if "gemma" in model:
        kl = kl + world.gemma
    if strategy == "greedy" and model in MODELS[: world.sensitive]:
        kl = kl * world.strategy
    margin = np.exp(-unsure) if (world.common or world.by_margin) else np.exp(rng.normal(size=n))
    difficulty = rng.normal(size=n) * 0.1
    shared = {
        "model": model, "strategy": strategy, "seed": seed, "example": np.arange(n), "id": [f"p{k}" for k in range(n)],
        "steps": STEPS, "flip_index": np.where(parts, flip, np.nan), "diverged": parts, "smallest_margin": margin,
        "max_abs_logit": np.sqrt(2 * world.bound), "kl_bound": world.bound,
        "early_kl": kl, "late_kl": kl * (1 + world.growth) * np.exp(0.1 * rng.normal(size=n)),
    }  # fmt: skip
    right = {f"correct_{s}": rng.random(n) < p + difficulty for s, p in (("a", world.right), ("b", world.other))}
    if not world.parts and not world.by_margin:
        right["correct_b"] = right["correct_a"]
    free_kl = np.where(parts, world.free * kl / kl.mean(), kl) if world.kl else kl
    js = kl / 4 if world.js > 0 else 1 / (1 + kl)
    matched = {"protocol": "matched", "mean_kl": kl, "mean_js": js, "correct_a": right["correct_a"], "correct_b": pd.NA}
    free = {"protocol": "free", "mean_kl": free_kl, "mean_js": np.minimum(free_kl / 4, 0.69), **right}
    return pd.concat([pd.DataFrame(shared | own) for own in (matched, free)], ignore_index=True)


def _nulls(world: World) -> pd.DataFrame:
    steps = world.n * STEPS
    rows = [("same path twice", world.twice), ("longer suffix", world.differing_null)]
    of = [(name, model, "greedy", steps, count, world.n) for name, count in rows for model in MODELS]
    return pd.DataFrame(of, columns=["null", "model", "strategy", "steps", "differing_steps", "n"])


def _oracle(world: World, rng: np.random.Generator) -> pd.DataFrame:
    example = np.tile(np.arange(world.n), len(MODELS))
    first = np.array(["equal"] * len(example), dtype=object)
    if world.nearer == world.nearer:
        first = np.where(rng.random(len(example)) < world.nearer, "a", "b")
    return pd.DataFrame(
        {"model": np.repeat(MODELS, world.n), "example": example, "id": example.astype(str), "nearer": first}
    )


# Layers ----------------------------------------------------------------------------------------------------------------


def _layers(world: World, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    index = pd.MultiIndex.from_product(
        [MODELS, ("free", "matched"), range(world.n), (0, 1, 2), range(LAYERS)],
        names=["model", "protocol", "example", "step", "layer"],
    )
    rows = index.to_frame(index=False)
    flat = rows["model"].str.contains("gemma").to_numpy() & (world.cosine < 0.9)  # As claimed: Gemma has no jump.
    scatter = np.exp(0.1 * rng.normal(size=len(rows)))
    at = rows["layer"].to_numpy()
    rows["l2"] = np.where(flat, 1.2, np.array(world.absolute, float)[at]) * scatter
    rows.loc[rows["step"] == 0, "l2"] = world.prefill
    rows["relative_l2_without_top3"] = np.where(flat, 1e-3, np.array(world.drift)[at]) * scatter
    rows["cosine"] = np.where(world.cosine == 1, 1.0, world.cosine - 1e-7 * rng.random(len(rows)))
    removed = pd.DataFrame([(m, "free", world.n * 50, int(world.parts * 40) if world.kl < 1 else 0) for m in MODELS])
    removed.columns = ["model", "protocol", "rows", "removed"]
    tests = pd.DataFrame(
        [
            (m, layer, "previous layer", test, world.n, p, "l2")
            for m in MODELS
            for layer in range(1, LAYERS)
            for test, p in (("Mann-Whitney", 0.2), ("Wilcoxon", 1e-6 if world.significant else 0.4))
        ],
        columns=["model", "layer", "contrast", "test", "n", "p_bh", "measure"],
    )
    heads = pd.DataFrame(
        [
            (m, layer, kind, r, r - 0.05, r + 0.05, world.n)
            for m in MODELS
            for layer in range(LAYERS)
            for kind, r in (("within", 0.4), ("across", 0.4 - world.within), ("within - across", world.within))
        ],
        columns=["model", "layer", "kind", "r", "low", "high", "n"],
    )
    if not any(world.drift):
        tests["p_bh"] = np.nan
        heads[["r", "low", "high"]] = np.nan
    return {"layer_drift": rows, "layer_drift_rows": removed, "layer_tests": tests, "head_correlation": heads}


# Cause -----------------------------------------------------------------------------------------------------------------


def _cause(world: World, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    n = world.n
    ladder = []
    for model in MODELS:
        for dtype, kernels, size, flips in (
            ("float16", "native", world.half, 0.3 if world.half else 0),
            ("float32", "native", world.single, 0),
            ("bfloat16", "native", 64 * world.half, 0.5 if world.half else 0),
            ("float16", "batch_invariant", world.fixed, world.fixed_flips),
        ):
            kl = size * np.exp(0.3 * rng.normal(size=n))
            flipped = rng.random(n) < flips
            if dtype == "float32":
                flipped[: world.flips_single] = True
            ladder.append(
                pd.DataFrame(
                    {
                        "model": model, "id": [f"p{k}" for k in range(n)], "dtype": dtype, "kernels": kernels,
                        "protocol": "matched", "failed": False, "flipped": flipped, "mean_kl": kl,
                        "max_abs_logit": np.sqrt(kl),
                    }
                )
            )  # fmt: skip
    sums = [
        (product, length, width, "float16", seed, error * np.exp(0.03 * rng.normal()))
        for seed in range(16)
        for product, length, width, error in (
            ("values", 16, None, 1.0), ("values", 128, None, world.grown),
            *(("scores", length, width, 1.0 if width == 64 else world.wider) for length in (16, 128) for width in (64, 256)),
        )
    ]  # fmt: skip
    columns = ["product", "length", "head_dim", "accumulate", "seed", "mean_relative"]
    grown = [
        (m, k, 0, layer, 50.0 if layer else 1.0, (world.compounds if layer else 1.0) * np.exp(0.1 * rng.normal()))
        for m in MODELS for k in range(n) for layer in (0, LAYERS - 1)
    ]  # fmt: skip
    gqa = [
        (k, ratio, ratio * world.broadcast, 1e-4 * ratio**world.amplifies * np.exp(0.1 * rng.normal()))
        for k in range(n) for ratio in HEADS_PER_KV
    ]  # fmt: skip
    repeated = [
        ("mistral-like", times, 4 // times, kernels, f"p{k}", size * np.exp(0.05 * rng.normal()))
        for k in range(n) for times in (1, 2, 4) for kernels, size in (
            # What rounding does is the same whichever heads share: repeated weights round alike.
            ("native", world.half**0.5), ("native+normal(0,0.01)", 1.5 if times == 1 else world.repeated)
        )
    ]  # fmt: skip
    columns_of_copies = ["model", "repeated", "query_heads_per_kv_head", "kernels", "id", "rms_logit"]
    return {
        "repeated_heads": pd.DataFrame(repeated, columns=columns_of_copies),
        "ladder": pd.concat(ladder, ignore_index=True),
        "accumulation": pd.DataFrame(sums, columns=columns),
        "propagation": pd.DataFrame(grown, columns=["model", "prompt", "source", "layer", "l2_growth", "relative_growth"]),
        "kv_write": pd.DataFrame({"kernels": "native", "prompt": np.arange(n), "relative_error": world.written}),
        "gqa": pd.DataFrame(gqa, columns=["prompt", "query_heads_per_kv_head", "heads_touched", "attn_out"]),
    }


# Patching and policies ---------------------------------------------------------------------------------------------------


def _patching(world: World, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    rows = []
    for site, sweep, direction, protocol, mean in (
        ("resid_post", "single", "into-recompute", "free", 0.0),
        ("resid_post", "single", "into-recompute", "matched", world.residual),
        ("resid_post", "cumulative", "into-recompute", "free", -0.3),
        ("resid_post", "cumulative", "into-recompute", "matched", world.cumulative),
        ("kv", "cumulative", "into-cached", "matched", world.cache),
    ):
        for model in MODELS:
            plus = 0.05 if "gemma" in model and world.residual == 0 and sweep == "single" else 0.0
            for k in range(world.n):
                for layer in range(LAYERS):
                    value = mean + plus + 0.02 * rng.normal()
                    rows.append((model, k, site, sweep, layer, direction, protocol, value, value == value))
    columns = ["model", "example", "site", "sweep", "layer", "direction", "protocol", "recovery", "defined"]
    steps = pd.MultiIndex.from_product([range(world.n), range(1, 5)], names=["example", "step"]).to_frame(index=False)
    if world.state == world.state:
        steps = steps.assign(
            fresh_l2=(1 - world.state) * (1 + 0.1 * rng.random(len(steps))), state_l2=world.state
        )  # fmt: skip
    else:
        steps = steps.assign(fresh_l2=0.0, state_l2=0.0)
    return {"recovery": pd.DataFrame(rows, columns=columns), "decomposition": steps}


def _policies(world: World, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    scored = zip(
        ("q8_0", "q4_0", "uniform(-1,1)", "uniform(-1.5,1.5)", "normal(0,0.5)"),
        ("instructions", "next_token", "instructions", "instructions", "instructions"),
        (*world.percent, world.kept, world.kept + 4),
        strict=True,
    )
    scores = [(p, "stored", m, v, v - 2, v + 2, world.n, 0.5) for p, m, v in scored]
    columns = ["policy", "reading", "metric", "percent", "percent_low", "percent_high", "prompts", "control"]
    contrasts = [
        (f"{factor}, prefill=stored", "instructions", world.factors, world.factors - 0.05, world.factors + 0.05, world.n)
        for factor in ("flips", "shift", "magnitude")
    ]
    # One arm is judged: what was done to K alone is no other draw of what was done to both.
    arms = {"cached": 0.0, "q8_0": world.chains, "q8_0(on=k)": world.keys, "q8_0(on=v)": 0.0, "int8": -world.chains}
    chains = []
    for model in MODELS[:2]:
        for arm, change in arms.items():
            sign = -1 if world.disagree and model == MODELS[0] else 1
            for text in range(world.texts):
                own = world.own * np.random.default_rng([world.seed, text, *map(ord, arm)]).normal() * (arm != "cached")
                for seed in range(3):
                    for hop in (0, 5):
                        start = np.random.default_rng(1000 * text + seed).random() * 0.2
                        end = 0.6 + start + sign * change + own + 0.01 * rng.normal() * (arm != "cached")
                        chains.append((model, arm, 0.7, text, seed, hop, end if hop else 1.0))
    return {
        "scores": pd.DataFrame(scores, columns=columns),
        "contrasts": pd.DataFrame(contrasts, columns=["contrast", "metric", "difference", "low", "high", "prompts"]),
        "chains": pd.DataFrame(chains, columns=["model", "arm", "temperature", "text", "seed", "hop", "similarity"]),
    }


_GROUPS = {
    "behaviour": _behaviour,
    "layers": _layers,
    "cause": _cause,
    "patching": _patching,
    "policies": _policies,
}


# Every rule has a world for each answer --------------------------------------------------------------------------------


def but(world: World, **changed: object) -> World:
    """The same world with something changed."""
    return dataclasses.replace(world, **changed)


EDGE = World(
    n=40, kl=10.0, drift=(1e-3, 2e-3, 2e-3, 2e-3), early=0.5, residual=0.05, cumulative=0.0, cache=0.5, state=0.5,
    compounds=1.0, amplifies=0.0, wider=1.25, grown=1.25, chains=0.0, keys=0.0, percent=(90.0, 100.0, 95.0), kept=80.0,
    factors=-0.25, seed=6,
)  # fmt: skip
"""Where effects lie exactly on the bounds of their rules, so that whatever is decided is decided by accident: a draw without one."""
AT_THE_EDGE = (
    "kl-large", "layer-1", "gqa-amplifies", "sums-flat", "compounds", "terciles", "flips-at-once", "residual-single",
    "residual-all", "cache-carries", "q8-instructions", "q4-words", "uniform-noise", "flipped-signs", "skewed-errors",
    "kept-within-bounds", "keys-matter",
)  # fmt: skip
LINKED = but(CLAIMED, link=0.9, common=0.0)
LATE = but(OTHERWISE, parts=1.0, link=-0.8, kl=0.5, spread=0.6, early=0.1)
HOLDS_IN = {
    "n-is-3500": but(CLAIMED, seeds=1),
    "mcnemar": but(CLAIMED, n=80, right=0.85, other=0.15),
    "powered": World(n=400, right=1.1, other=1.1),
    "one-strategy-model": World(n=200, strategy=1.5),
    "eight-orders-logits": but(CLAIMED, half=0.5, single=1e-19),
    "float32-as-large": World(single=4e-5),
    "last-layer-jumps": World(drift=(1e-3, 1e-3, 1e-3, 4e-3)),
    "format-causes": but(CLAIMED, fixed=1e-4),
    "restricted": but(LINKED, n=120, at_once=0.6),
    "margin-tells": but(CLAIMED, parts=0.5, by_margin=0.8),
    "margin-delays": but(CLAIMED, n=25, parts=0.5, by_margin=0.5),
    "not-monotone": but(CLAIMED, disagree=1.0),
}
"""Of claims that are wrong where most are right: a world in which they are."""
FAILS_IN = {
    "not-sampling": equal(n=40),
    "seed-independent": but(OTHERWISE, parts=0.6, by_seed=0.0),
    "mcnemar": equal(n=2000),
    "one-strategy-model": World(n=200, strategy=1.5, sensitive=2),
    "direction": but(OTHERWISE, n=250),
    "format-causes": World(),
    "eight-orders": World(),
    "early-more-kl": LATE,
    "restricted": LINKED,
    "terciles": LATE,
    "uncertainty": LINKED,
    "margin-tells": but(OTHERWISE, by_margin=-0.4),
    "margin-delays": but(OTHERWISE, n=25, by_margin=-0.4),
    "gemma-partial": but(OTHERWISE, residual=-0.2),
}  # fmt: skip
"""Of claims that the world where most are wrong does not refute: one that does."""
OPEN_IN = {
    **dict.fromkeys(AT_THE_EDGE, EDGE),
    **dict.fromkeys(("more-accurate", "mcnemar", "gemma-highest", "one-strategy-model"), World()),
    **dict.fromkeys(("early-more-kl", "restricted", "margin-tells", "margin-delays"), World()),
    "direction": World(n=20),
    "layers-significant": World(drift=(1e-3, 1.2e-3, 1.5e-3, 1.8e-3)),
    "not-sampling": equal(n=20),
    "fp32-only-fix": World(n=20),
    "sums-head": World(wider=1.24),
    "powered": World(n=60, right=1.06, other=1.06),
}
"""Of claims that more than few prompts leave open: a world in which they do."""
_NAMED = {
    "as claimed": CLAIMED,
    "otherwise": OTHERWISE,
    "rounding alone": World(),
    "at the edge": EDGE,
    "equal paths": equal(),
    "few": FEW,
}
IF_EQUAL = {
    **dict.fromkeys(("deterministic", "prefill-identical", "drift-is-rounding"), "true"),
    **dict.fromkeys((
        "n-is-3500", "powered", "group-broadcast", "gqa-amplifies", "gqa-self", "sums-flat", "sums-head", "compounds",
        "q8-instructions", "q4-words", "uniform-noise", "flipped-signs", "skewed-errors", "kept-within-bounds", "exact-chains",
        "keys-matter", "not-monotone",
    ), "open"),
}  # fmt: skip
"""Of claims that would be right if both paths computed the same, or are about something else; the others would be wrong."""


def worlds_of(claim) -> tuple[World, World, World]:
    """Where a claim holds, where it does not, and where it is open."""
    # A claim that another source makes too is the same rule.
    same = {one.id for one in CLAIMS if one.look is claim.look}
    return tuple(
        next((found[name] for name in found if name in same), usual)
        for found, usual in ((HOLDS_IN, CLAIMED), (FAILS_IN, OTHERWISE), (OPEN_IN, FEW))
    )


def told(world: World) -> str:
    """A world as the page shows it: the nearest that has a name, and what is other."""
    others = {
        name: [
            f"{field.name}={getattr(world, field.name)}"
            for field in dataclasses.fields(World)
            if field.name != "seed" and repr(getattr(world, field.name)) != repr(getattr(near, field.name))
        ]
        for name, near in _NAMED.items()
    }
    name = min(others, key=lambda each: len(others[each]))
    return ", ".join([name, *others[name]])
