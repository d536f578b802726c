"""Patches as data: laws 5 and 7, what they move, what they refuse, and TransformerLens' own patching."""

import pytest
import torch

import kvinterp as kv
from kvinterp.patching import donor_trace
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import Runner
from kvinterp.recording import PathHook
from support import PROMPT, Case, assert_bitwise, cases, hooks_of, plain_forward

pytestmark = pytest.mark.bits

STEPS = 3
OTHER = tuple((token * 7 + 5) % 97 for token in PROMPT)
FED = PROMPT[: STEPS - 1]
KINDS = [
    Case("llama-gqa", "hooked"),
    Case("gemma2", "hooked"),
    Case("standard", "hooked"),
    Case("llama-mha", "bridge"),
    Case("gemma2", "bridge"),
    Case("llama-gqa", "native", "sdpa"),
    Case("mistral-window", "native", "eager"),
    Case("gpt2", "native", "sdpa"),
    Case("zoo:mistral-mini", "hooked"),
    Case("zoo:mistral-mini", "native", "sdpa"),
]
HOOKED, NATIVE, WINDOW = Case("llama-gqa", "hooked"), Case("llama-gqa", "native", "sdpa"), KINDS[6]


def sites_of(case):
    return case.patched


def traced(model, path, prompt=PROMPT, **more):
    settings = {"max_new_tokens": STEPS, "continuation": FED, "stop": "length", "logits": "keep"} | more
    return kv.run(model, prompt, path, **settings)


def decoded(model, path, patches, prompt=PROMPT, hooks=()):
    """Logits ``[step, vocab]`` of a path with patches, through the runner."""
    hook = PatchHook(model, patches, prompt_length=len(prompt))
    found = []
    with Runner(model, kv.path_named(path), torch.tensor([prompt]), STEPS, [hook, *hooks]) as runner:
        found.append(runner.advance()[0].clone())
        found += [runner.advance(torch.tensor([token]))[0].clone() for token in FED]
    return torch.stack(found)


class Reads(PathHook):
    """Keeps what attention reads from the cache, by step and layer."""

    def __init__(self):
        self.step, self.seen = 0, {}

    def begin_step(self, step):
        self.step = step

    def on_read(self, place, keys, values):
        self.seen[self.step, place.layer] = (keys[0].clone(), values[0].clone())


# Law 5 -----------------------------------------------------------------------------------------------------------------


@cases(KINDS)
@pytest.mark.parametrize("path", ["cached", "recompute"])
def test_law_5_patching_a_traces_own_tensors_back_changes_nothing(load, case, path):
    model = load(case, "float16")
    stored = ["cache_v", "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"]
    sites = [site for site in sites_of(case) if not site.startswith("cache")]
    every_step = (0, *range(1, STEPS))
    for positions in ("newest", "all"):
        own = traced(model, path, record=[*sites, *stored], positions=positions)
        for site in [*sites, "cache_k", "cache_v", "kv"]:
            patch = kv.Patch(site, positions=positions, steps=every_step, donor=own)
            assert_bitwise(decoded(model, path, [patch]), own.logits, f"logits with its own {site}", ("step", "vocab"))
        every = [kv.Patch(site, positions=positions, donor=own) for site in [*sites, "kv"]]
        assert_bitwise(decoded(model, path, every), own.logits, "logits with all of its own", ("step", "vocab"))


@cases(KINDS)
@pytest.mark.parametrize("path", ["cached", "recompute"])
def test_law_5_can_fail(load, case, path):
    """The same patches from another prompt change the logits, at every site and every patched step.

    In layer 1: what layer 0 makes of the newest token alone is the same for both prompts, which are fed the same tokens.
    """
    model = load(case)
    stored = ["cache_v", "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"]
    sites = [site for site in sites_of(case) if not site.startswith("cache") and site != "embed"]
    other = traced(model, path, OTHER, record=[*sites, *stored])
    plain = traced(model, path).logits
    for site in [*sites, "cache_k", "cache_v", "kv"]:
        patch = kv.Patch(site, layers=(1,), positions="newest", donor=other)
        changed = (decoded(model, path, [patch]) != plain).any(-1).tolist()
        assert changed == [False, True, True], f"{site}: {changed}"


@cases(KINDS)
def test_law_5_a_users_own_forward_patched_with_its_own_tensors_is_the_same(load, case):
    model = load(case)
    tokens = torch.tensor([PROMPT])
    sites = [site for site in sites_of(case) if not site.startswith("cache")]
    with kv.record(model.model, sites, positions="all") as seen:
        bare = plain_forward(model.model, tokens)
    own = donor_trace(seen, PROMPT)
    for positions in ("newest", "all"):
        patches = [kv.Patch(site, positions=positions, steps=(0,), donor=own) for site in sites]
        with kv.patched(model.model, patches):
            assert_bitwise(plain_forward(model.model, tokens), bare, "logits with its own tensors")
    assert_bitwise(plain_forward(model.model, tokens), bare, "logits afterwards")


# What is moved ---------------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_a_cache_patched_once_stays_patched(load, case):
    """Into the cached path a patch of the first step is still there at the second, which does not patch."""
    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    donor = traced(model, "recompute", OTHER, record=[keys_site, "cache_v"], positions="all")
    bare, reads = Reads(), Reads()
    plain = decoded(model, "cached", [], hooks=[bare])
    patch = kv.Patch("kv", (1,), positions="earlier", steps="first", donor=donor)
    patched = decoded(model, "cached", [patch], hooks=[reads])
    assert_bitwise(patched[0], plain[0], "logits of step 0")
    assert not torch.equal(patched[1], plain[1])
    assert not torch.equal(patched[2], plain[2]), "step 2 read the cache as it was before the patch"
    step = donor.steps.index(1)
    for which, site in enumerate((keys_site, "cache_v")):
        given = donor.records[site, 1][step]
        # At step 2 a sliding cache has moved on by one position.
        held = reads.seen[2, 1][which]
        first = len(PROMPT) + 2 - held.shape[1]
        assert_bitwise(held[:, : len(PROMPT) - first], given[:, first : len(PROMPT)], f"{site} at step 2")
        own = bare.seen[2, 1][which]
        assert not torch.equal(held[:, 0], own[:, 0])


@pytest.mark.parametrize("path", ["cached", "recompute"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("llama-gqa", kind), id=kind, marks=[pytest.mark.hooked] * (kind == "hooked"))
        for kind in ("hooked", "bridge", "native")
    ],
)
def test_cache_patches_change_their_heads_and_positions_only(load, case, path):
    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    donor = traced(model, "recompute", OTHER, record=[keys_site, "cache_v"], positions="all")
    bare = Reads()
    decoded(model, path, [], hooks=[bare])
    for site, moved in (("kv", (0, 1)), ("cache_k", (0,)), ("cache_v", (1,))):
        reads = Reads()
        patch = kv.Patch(site, (0,), heads=(1,), positions=(3, 7), steps="first", donor=donor)
        decoded(model, path, [patch], hooks=[reads])
        for which in (0, 1):
            now, before = reads.seen[1, 0][which], bare.seen[1, 0][which]
            changed = (now != before).any(-1).nonzero().tolist()
            assert changed == ([[1, position] for position in range(3, 7)] if which in moved else []), site
            if which in moved:
                given = donor.records[(keys_site, "cache_v")[which], 0][1]
                assert_bitwise(now[1, 3:7], given[1, 3:7], f"{site} of KV head 1")


@cases([HOOKED, NATIVE, WINDOW])
def test_head_patches_change_their_heads_only(load, case):
    model = load(case)
    sites = [site for site in ("q", "k", "v", "z", "pattern") if site in case.patched]
    donor = traced(model, "recompute", OTHER, record=sites, positions="all")
    tokens = torch.tensor([PROMPT])
    for site in sites:
        with kv.record(model.model, site, positions="all") as bare:
            plain_forward(model.model, tokens)
        # Patched through another face on the same model, whose hooks come first: the recorder sees what was put there.
        with (
            kv.patched(model.model, kv.Patch(site, (0,), heads=(1,), positions=(4, 6), steps=(0,), donor=donor)),
            kv.record(model.model, site, positions="all") as seen,
        ):
            plain_forward(model.model, tokens)
        changed = (seen.kept[site, 0][0][0] != bare.kept[site, 0][0][0]).any(-1)
        changed = changed if site == "pattern" else changed.transpose(0, 1)
        assert changed.nonzero().tolist() == [[1, 4], [1, 5]], site


@cases([HOOKED, NATIVE])
@pytest.mark.parametrize("heads", [None, (1,)])
def test_several_prompts_at_once_are_refused(load, case, heads):
    """A donor trace is of one prompt; it once went into every row, silently."""
    model = load(case)
    donor = traced(model, "recompute", OTHER, record="k", positions="all")
    batch = torch.tensor([PROMPT, PROMPT[::-1]])
    plain = plain_forward(model.model, batch)
    with (
        kv.patched(model.model, kv.Patch("k", (1,), heads, "all", (0,), donor=donor)),
        pytest.raises(kv.InputError, match="2 prompts are run at once and the donor holds 1") as error,
    ):
        plain_forward(model.model, batch)
    one_sentence(error)
    assert_bitwise(plain_forward(model.model, batch), plain, "logits afterwards")


@cases([HOOKED, Case("llama-gqa", "bridge"), NATIVE])
def test_patched_changes_what_a_users_own_cached_forward_reads(load, case):
    """The patched step is the second call; the first, which makes the cache, needs none to be given."""
    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    donor = traced(model, "recompute", OTHER, record=[keys_site, "cache_v"], positions="all")
    patch = kv.Patch("kv", (0,), positions="earlier", steps="first", donor=donor)
    expected = decoded(model, "cached", [patch])
    plain = decoded(model, "cached", [])
    assert_bitwise(users_decode(model)[1], plain[1], "the user's own loop")
    with kv.patched(model.model, patch):
        found = users_decode(model)
    assert_bitwise(found[1], expected[1], "the user's own loop, patched", ("vocab",))
    assert_bitwise(users_decode(model)[1], plain[1], "the user's own loop afterwards")


STATIC = [*(Case(name, "native", "eager") for name in ("llama-gqa", "mistral-window", "gemma2")), Case("gemma2", "bridge")]


def static_cache(model):
    from transformers import StaticCache

    return StaticCache(config=model.source.config, max_cache_len=40)


@cases(STATIC)
def test_patches_and_records_of_a_static_cache_are_those_of_a_growing_one(load, case):
    """It hands over and holds all its room: once a patch went into the empty slots, and the newest slot was recorded."""
    model = load(case)
    donor = traced(model, "recompute", OTHER, record="kv", positions="all")
    patch = kv.Patch("kv", (0, 1), None, (8, 11), (0, 1), donor=donor)
    with kv.patched(model.model, patch):
        growing = users_decode(model)
    with kv.patched(model.model, patch):
        fixed = users_decode(model, static_cache(model))
    assert not torch.equal(growing[1], users_decode(model)[1])
    for one, other in zip(growing, fixed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    newest = []
    for cache in (users_cache(model), static_cache(model)):
        with kv.record(model.model, "cache_k,cache_v") as seen:
            users_decode(model, cache)
        newest.append([tensor for place in seen.kept for tensor in seen.kept[place]])
    for one, other in zip(*newest, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def users_cache(model):
    if model.kind == "hooked":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        return TransformerLensKeyValueCache.init_cache(model.model.cfg, "cpu", 1)
    from transformers import DynamicCache

    return DynamicCache(config=model.source.config)


def users_decode(model, cache=None):
    """Two forwards with a cache, as a user writes them."""
    cache = users_cache(model) if cache is None else cache
    name = "past_kv_cache" if model.kind == "hooked" else "past_key_values"
    found = []
    for tokens in (PROMPT, FED[:1]):
        given = torch.tensor([tokens])
        extra = {"attention_mask": torch.ones_like(given)} if model.kind == "hooked" else {"use_cache": True}
        with torch.no_grad():
            out = model.model(given, **{name: cache}, **extra)
        found.append(getattr(out, "logits", out)[0, -1])
    return found


@cases([HOOKED, NATIVE])
def test_patches_and_recorders_nest_on_one_face(load, case):
    """A recorder opened inside a patch once silenced the patch, where both were given the same adapter."""
    model = load(case)
    donor = traced(model, "recompute", OTHER, record="resid_post,mlp_out", positions="all")
    tokens = torch.tensor([PROMPT])
    outer, inner = (kv.Patch(site, (0,), steps=(0,), donor=donor) for site in ("resid_post", "mlp_out"))
    with kv.patched(model, outer):
        alone = plain_forward(model.model, tokens)
    with kv.patched(model, outer), kv.record(model, "resid_post") as seen:
        assert_bitwise(plain_forward(model.model, tokens), alone, "logits with a recorder inside")
    assert_bitwise(seen.kept["resid_post", 0][0][0], donor.records["resid_post", 0][0][-1], "what the recorder saw")
    with kv.patched(model, [outer, inner]):
        both = plain_forward(model.model, tokens)
    with kv.patched(model, outer), kv.patched(model, inner):
        assert_bitwise(plain_forward(model.model, tokens), both, "logits of nested patches")


# Law 7 -----------------------------------------------------------------------------------------------------------------


class Planned(Exception):
    pass


def state_of(model):
    """Hooks, and forwards that were put on a block."""
    return hooks_of(model.model), [sorted(set(block.__dict__) & {"forward", "update", "append"}) for block in model.blocks]


LAWS_7 = [*KINDS[:4], Case("mistral-window", "bridge"), *KINDS[5:8]]


@cases(LAWS_7)
def test_law_7_nothing_survives_an_error(load, case):
    from kvinterp.patching.recompute import PureRecompute

    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    tokens = torch.tensor([PROMPT])
    # A bridge hangs hooks of its own on its first forward.
    bare = plain_forward(model.model, tokens)
    before = state_of(model)
    donor = traced(model, "recompute", OTHER, record=["resid_post", keys_site, "cache_v"], positions="all")
    misfit = traced(model, "recompute", OTHER, record=["resid_post", "v", "cache_v", keys_site], positions="all")
    misfit.records["resid_post", 1] = [tensor[:, :-1] for tensor in misfit.records["resid_post", 1]]
    misfit.records["cache_v", 1] = [tensor[:, :, :-1] for tensor in misfit.records["cache_v", 1]]
    fits = kv.Patch("resid_post", (0,), positions="all", steps=(0, 1), donor=donor)
    wrong = kv.Patch("resid_post", (1,), positions="all", steps=(0, 1), donor=misfit)
    wrong_kv = kv.Patch("kv", (1,), positions="all", steps=(0, 1), donor=misfit)

    def a_misfit_in_a_users_forward():
        with pytest.raises(kv.InputError, match="cannot be put where"), kv.patched(model.model, [fits, wrong]):
            plain_forward(model.model, tokens)

    def an_error_of_the_users_own():
        def work():
            with kv.patched(model.model, fits), kv.record(model.model, "resid_post"):
                plain_forward(model.model, tokens)
                raise Planned

        with pytest.raises(Planned):
            work()

    def nested_with_the_inner_failing():
        # The forward that fails is no step, of the outer patch neither.
        with (
            kv.patched(model, kv.Patch("resid_post", (0,), positions="all", steps=(0,), donor=donor)),
            kv.record(model, "mlp_out"),
        ):
            with pytest.raises(kv.InputError), kv.patched(model, wrong):
                plain_forward(model.model, tokens)
            inside = plain_forward(model.model, tokens)
        assert not torch.equal(inside, bare), "the outer patch was lost with the inner one"

    def a_misfit_in_a_runner():
        for patch in (wrong, wrong_kv):
            for path in ("cached", "recompute"):
                with pytest.raises(kv.InputError, match="cannot be put where"):
                    decoded(model, path, [patch])

    def a_misfit_in_a_resumed_run():
        pure = PureRecompute(model, kv.Recompute())
        pure.capture(PROMPT)
        for patch in (wrong, wrong_kv):
            with pytest.raises(kv.InputError, match="cannot be put where"):
                pure.patched(PROMPT, 0, PatchHook(model, [patch]))

    def a_misfit_in_a_users_cache():
        cache = users_cache(model)
        with pytest.raises(kv.InputError, match="cannot be put where"), kv.patched(model.model, wrong_kv):
            users_decode(model, cache)
        left = [vars(each) for each in (cache, *getattr(cache, "entries", ()))]
        assert not any({"update", "append"} & set(names) for names in left), "the user's cache was left changed"

    for accident in (
        a_misfit_in_a_users_forward,
        an_error_of_the_users_own,
        nested_with_the_inner_failing,
        a_misfit_in_a_runner,
        a_misfit_in_a_resumed_run,
        a_misfit_in_a_users_cache,
    ):
        accident()
        assert state_of(model) == before, accident.__name__
        assert model._listeners == [{}, {}]
        assert_bitwise(plain_forward(model.model, tokens), bare, f"logits after {accident.__name__}")


@cases([NATIVE, HOOKED])
def test_law_7_a_forward_that_a_library_put_on_a_block_comes_back(load, case):
    """Libraries that spread a model over devices replace a block's forward on the instance; resumed runs removed it."""
    from kvinterp.patching.recompute import PureRecompute

    model = load(case)
    donor = traced(model, "recompute", OTHER, record="mlp_out", positions="all")
    patch = kv.Patch("mlp_out", (1,), steps=(0,), donor=donor)
    # What a model is asked once runs its blocks too.
    PureRecompute(model, kv.Recompute()).patched(PROMPT, 0, PatchHook(model, [patch]))
    block = model.blocks[0]
    own, calls = block.forward, []

    def replaced(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    block.__dict__["forward"] = replaced
    try:
        pure = PureRecompute(model, kv.Recompute())
        pure.capture(PROMPT)
        pure.patched(PROMPT, 0, PatchHook(model, [patch]))
        assert block.__dict__["forward"] is replaced
        assert len(calls) == 1, "the skipped block ran"
    finally:
        del block.__dict__["forward"]


# TransformerLens' own patching -----------------------------------------------------------------------------------------


@pytest.mark.hooked
@pytest.mark.parametrize("name", ["llama-gqa", "standard", "gemma2", "zoo:mistral-mini"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_residual_patches_agree_with_transformer_lens_to_the_bit(load, name, dtype):
    """By layer and position, on the same model, prompts and metric; the donor run by kvinterp or recorded by the user."""
    from transformer_lens import patching

    model = load(Case(name, "hooked"), dtype)
    clean, corrupted = torch.tensor([PROMPT[:6]]), torch.tensor([OTHER[:6]])

    def metric(logits):
        return logits[0, -1, 11].float() - logits[0, -1, 23].float()

    with torch.no_grad():
        _, clean_cache = model.model.run_with_cache(clean)
        with kv.record(model.model, "resid_pre,attn_out,mlp_out", positions="all") as seen:
            model.model(clean)
    recorded = donor_trace(seen, PROMPT[:6])
    run = kv.run(model, PROMPT[:6], "recompute", max_new_tokens=1, record="resid_pre,attn_out,mlp_out", positions="all")
    for site, theirs in (
        ("resid_pre", patching.get_act_patch_resid_pre),
        ("attn_out", patching.get_act_patch_attn_out),
        ("mlp_out", patching.get_act_patch_mlp_out),
    ):
        with torch.no_grad():
            expected = theirs(model.model, corrupted, clean_cache, metric)
        for donor in (recorded, run):
            found = torch.zeros_like(expected)
            for layer in range(model.facts.layers):
                for position in range(6):
                    patch = kv.Patch(site, (layer,), positions=(position, position + 1), steps=(0,), donor=donor)
                    with torch.no_grad(), kv.patched(model.model, patch):
                        found[layer, position] = metric(model.model(corrupted))
            assert_bitwise(found, expected, f"the metric with {site} patched", ("layer", "position"))
        assert len(expected.unique()) > model.facts.layers, "the metric hardly depends on the patch"


# What is refused -------------------------------------------------------------------------------------------------------


def one_sentence(error):
    """The message, which names what was given and what to do, and nothing of torch's own."""
    text = str(error.value)
    assert "\n" not in text
    assert "size of tensor" not in text
    return text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"site": "resid_pots"}, "did you mean 'resid_post'"),
        ({"site": "attn_scores"}, "can be recorded and not patched"),
        ({"site": "resid_post", "positions": "last"}, "expected 'newest', 'all', 'earlier'"),
        ({"site": "resid_post", "positions": (4, 4)}, "holds no position"),
        ({"site": "resid_post", "steps": "second"}, "expected 'every', 'first' or whole numbers"),
        ({"site": "resid_post", "steps": (-1,)}, "names no step"),
    ],
)
def test_a_patch_that_cannot_exist_is_refused(fields, said):
    with pytest.raises(kv.InputError) as error:
        kv.Patch(**fields)
    assert said in one_sentence(error)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (kv.Patch("resid_post", (2,)), "layer 2 does not exist"),
        (kv.Patch("z", heads=(4,)), "query head 4 does not exist"),
        (kv.Patch("kv", heads=(0, 3)), "KV head 3 does not exist"),
        (kv.Patch("resid_post", heads=(0,)), "needs a site with heads"),
        (kv.Patch("resid_post", positions=(90, 97)), "position 96 does not exist"),
    ],
)
@cases([HOOKED, NATIVE])
def test_a_patch_that_this_model_has_no_place_for_is_refused(load, case, patch, said):
    with pytest.raises(kv.InputError) as error:
        PatchHook(load(case), [patch])
    assert said in one_sentence(error)


@cases([HOOKED, NATIVE])
def test_a_donor_that_does_not_fit_is_refused(load, case):
    model = load(case)
    donor = traced(model, "recompute", OTHER, record="resid_post,k", layers=(0,), positions="all")
    newest = traced(model, "cached", OTHER, record="resid_post")
    longer = traced(model, "recompute", (*OTHER, 5), record="resid_post", positions="all")
    of_one_head = traced(model, "recompute", OTHER, record="k,q", kv_heads=(1,), positions="all")
    swapped = traced(model, "recompute", OTHER, record="k,q", positions="all")
    swapped.records["k", 0] = swapped.records["q", 0]
    foreign = traced(model, "recompute", OTHER, record="resid_post")
    foreign.prompt = (*foreign.prompt[:-1], 4000)
    tokens = torch.tensor([PROMPT])
    for patch, said in (
        (kv.Patch("resid_post", (0,)), "has no donor"),
        (kv.Patch("mlp_out", (0,), donor=donor), "holds no 'mlp_out' of layer 0 (it has k, resid_post)"),
        (kv.Patch("resid_post", (1,), donor=donor), "holds no 'resid_post' of layer 1"),
        (kv.Patch("kv", (0,), donor=donor), "holds no 'cache_k"),
        (kv.Patch("resid_post", (0,), steps=(7,), donor=donor), "did not record step 7 (it has 0, 1, 2)"),
        (kv.Patch("resid_post", (0,), steps=(0,), donor=foreign), "token id 4000"),
        (kv.Patch("resid_post", (0,), steps=(0,), donor=longer), "tokenised to the same length"),
        (kv.Patch("resid_post", (0,), positions="all", steps=(0,), donor=newest), "covers positions 11 to 11 at step 0"),
        (kv.Patch("k", (0,), steps=(0,), donor=of_one_head), "has shape (1, 1, 8) and cannot be put where (1, 2, 8) is"),
        (kv.Patch("k", (0,), heads=(1,), steps=(0,), donor=of_one_head), "cannot be put where"),
        (kv.Patch("k", (0,), steps=(0,), donor=swapped), "has shape (1, 4, 8) and cannot be put where (1, 2, 8) is"),
        (kv.Patch("resid_post", (0,), positions=(12, 14), steps=(0,), donor=donor), "position 12 does not exist"),
    ):
        with pytest.raises(kv.InputError) as error, kv.patched(model.model, patch):
            plain_forward(model.model, tokens)
        assert said in one_sentence(error), patch


@cases([HOOKED, NATIVE])
def test_a_cache_patch_of_a_forward_without_a_cache_is_refused(load, case):
    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    donor = traced(model, "recompute", OTHER, record=[keys_site, "cache_v"], positions="all")
    patch = kv.Patch("kv", (0,), steps=(0,), donor=donor)
    with pytest.raises(kv.InputError, match="needs a forward with a cache"), kv.patched(model.model, patch):
        model.model(torch.tensor([PROMPT]), **({} if case.kind == "hooked" else {"use_cache": False}))
    if case.kind == "native":
        # The cache that a forward makes by itself is as good as one that it is given.
        with kv.patched(model.model, patch):
            assert not torch.equal(
                plain_forward(model.model, torch.tensor([PROMPT])), model.forward(torch.tensor([PROMPT]))
            )


@cases([HOOKED, NATIVE])
def test_donor_trace_refuses_what_it_cannot_place(load, case):
    model = load(case)
    with kv.record(model.model, "resid_post", positions="all") as seen:
        plain_forward(model.model, torch.tensor([PROMPT]))
        plain_forward(model.model, torch.tensor([(*PROMPT, FED[0])]))
    with pytest.raises(kv.InputError, match="2 forwards were recorded"):
        donor_trace(seen, PROMPT)
    trace = donor_trace(seen, PROMPT, FED[:1])
    own = traced(model, "recompute", record="resid_post", positions="all", max_new_tokens=2)
    for mine, runs in zip(trace.records["resid_post", 1], own.records["resid_post", 1], strict=True):
        assert_bitwise(mine, runs, "recorded by the user and by run()")
    with kv.record(model.model, "resid_post", positions="all") as seen:
        plain_forward(model.model, torch.tensor([PROMPT, PROMPT]))
    with pytest.raises(kv.InputError, match="several prompts at once"):
        donor_trace(seen, PROMPT)
