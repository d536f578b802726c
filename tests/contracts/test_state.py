"""Law 20: every verb leaves a model's attributes and buffers as it found them, and no run reads what another left there."""

from __future__ import annotations

import copy
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import kvinterp as kv
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.errors import KvinterpError, UnsupportedError
from support import random_model

SHORT = {"max_new_tokens": 3, "stop": "length"}
QUIET = SHORT | {"progress": "none"}
IDS = list(range(5, 14))


class Mine:
    """A cache of somebody's own, which is no transformers cache."""

    def __init__(self):
        self.forwards, self.newest = 0, None


class Offset(torch.nn.Module):
    """Keeps state in every way there is: what the last prompt was, as Qwen-VL keeps ``rope_deltas``, and how far it went."""

    def __init__(self, config):
        super().__init__()
        self.offset = None
        self.counted = [0]
        self.seen = {"rows": torch.zeros(2)}
        self.cache = DynamicCache()
        self.config = config
        self.mine, self.space, self.last = Mine(), SimpleNamespace(forwards=0), deque([0], maxlen=3)
        self.within = (self.mine, {"forwards": 0})
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("written", torch.zeros(()), persistent=False)

    def begin(self, rows, positions):
        """What a prompt sets: a row each, an attribute that was not there, a buffer that is another, one that is written into."""
        self.offset = torch.full((rows, 1, 1), 1e-3 * positions)
        self.added = self.config.added = positions
        self.config.rope_parameters["longest"] = positions
        self.scale = torch.full((), 1 + 1e-3 * positions)
        self.register_buffer("late", torch.ones(()), persistent=False)
        self.written.fill_(1e-3 * positions)

    def forward(self, hidden):
        rows, new = hidden.shape[:2]
        if new > 1:
            self.begin(rows, new)
        self.seen["rows"] += rows
        self.seen[new] = rows
        self.counted.append(new)
        self.last.append(new)
        self.mine.newest = hidden.detach()
        for each in (vars(self.mine), vars(self.space), self.within[1]):
            each["forwards"] += 1
        self.cache.update(hidden[:, None], hidden[:, None], len(self.cache.layers))
        # A batch of another number of rows than the prompt had breaks it, as it does Qwen-VL.
        return hidden * self.scale + self.written + self.offset.expand(rows, 1, 1)


def contents(model):
    """Everything in modules: objects by their identity, numbers by value."""
    found = {"config": str(model.config), "own": str(vars(model.config))}
    for name, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if key.startswith("_") or key in ("training", "forward"):
                continue
            found[name, key] = id(value)
            if isinstance(value, torch.Tensor):
                found[name, key, "numbers"] = value.tolist()
            if isinstance(value, list | dict | deque | SimpleNamespace | Mine | tuple):
                found[name, key, "held"] = str([vars(value)] if isinstance(value, Mine) else value)
            if isinstance(value, DynamicCache):
                found[name, key, "layers"] = len(value.layers)
        found[name, "buffers"] = (sorted(module._buffers), sorted(module._non_persistent_buffers_set))
    return found


@pytest.fixture(scope="module")
def model():
    made = random_model(LlamaForCausalLM, initializer_range=0.2)
    keeper = made.model.keeper = Offset(made.config)
    made.model.embed_tokens.register_forward_hook(lambda _, __, embedded: keeper(embedded))
    return made.eval()


VERBS = {
    "run": lambda model: kv.run(model, IDS, "cached", **SHORT),
    "compare": lambda model: kv.compare(model, [IDS], **QUIET),
    "compare, float64": lambda model: kv.compare(model, [IDS], "cached@float64", "recompute@float64", **QUIET),
    "sweep": lambda model: kv.sweep(model, [IDS], "resid_post", controls="none", **QUIET),
    "sweep into the cache": lambda model: kv.sweep(model, [IDS], "kv", direction="into-cached", controls="none", **QUIET),
    "decompose": lambda model: kv.decompose(model, [IDS], max_new_tokens=3, progress="none"),
    "localise": lambda model: kv.localise(model, IDS),
    "kernels": lambda model: kv.kernels_table(model, sizes=(1, 4), length=8),
    "audit": lambda model: kv.audit(model, rungs=("float32",), lengths=(5,), sweep="no", checks="none"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leaves_a_model_as_it_found_it(model, verb):
    with torch.no_grad():
        model(torch.tensor([IDS]))
    before = contents(model)
    VERBS[verb](model)
    assert contents(model) == before


def test_a_verb_that_ends_by_an_error_leaves_a_model_as_it_found_it(model):
    before, calls = contents(model), []

    def fail(_, __, output):
        calls.append(output)
        if len(calls) == 4:
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        kv.compare(model, [IDS], **QUIET)
    handle.remove()
    assert contents(model) == before
    with pytest.raises(KvinterpError):
        kv.run(model, IDS, "cached", record="no_such_site", **SHORT)
    assert contents(model) == before


def test_runs_that_take_turns_go_on_from_their_own_state(model):
    """Each from what its own prompt set, not from what was found, nor from what the other set: the recompute path's prompt grows
    at every step. The fault of a model that minds is found between the paths, and is the same whoever runs beside."""
    fed, rows = IDS, {"cached": [], "recompute": []}
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for _ in range(SHORT["max_new_tokens"]):
            new = fed if fed is IDS else fed[-1:]
            rows["cached"].append(model(torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0, -1])
            fed = [*fed, int(rows["cached"][-1].argmax())]
        for end in range(len(IDS), len(fed)):
            rows["recompute"].append(model(torch.tensor([fed[:end]]), use_cache=False).logits[0, -1])
        cached, recompute = map(torch.stack, rows.values())
        # Another prompt's, so that what is found is what neither path sets.
        model(torch.tensor([IDS[:4]]))
    made = kv.run(model, IDS, "cached", logits="keep", **SHORT)
    torch.testing.assert_close(made.logits, cached, rtol=0, atol=1e-5)
    apart = float((cached - recompute).abs().max())
    assert apart > 1e-3
    assert kv.compare(model, [IDS], **QUIET).steps["max_abs_logit"].max() == pytest.approx(apart, abs=1e-5)


def test_every_check_of_an_audit_starts_from_what_was_found(model):
    """Three rows of one check, left on a Qwen3-VL, made the next one fail. A cache whose rows are selected does not select those
    that a module keeps, which is a fault of its own."""
    sound = copy.deepcopy(model)
    sound.model.keeper.begin = lambda rows, positions: setattr(sound.model.keeper, "offset", torch.zeros(rows, 1, 1))
    sound.model.embed_tokens._forward_hooks.clear()
    sound.model.embed_tokens.register_forward_hook(lambda _, __, embedded: sound.model.keeper(embedded))
    verdict = kv.audit(sound, rungs=("float32",), lengths=(5,), sweep="no")
    moved = ("batch_select_indices", "batch_repeat_interleave")
    failed = [check for check in verdict.checks if check.status == WRONG and "RuntimeError" in check.detail]
    assert not [check for check in failed if check.name not in moved]


class Resuming(LlamaForCausalLM):
    """Keeps an offset of each row from its first prompt on, as the plain forward of a Qwen-VL does."""

    def __init__(self, config):
        super().__init__(config)
        self.model.offset = None

    def forward(self, input_ids=None, **given):
        made = super().forward(input_ids, **given)
        if self.model.offset is None:
            self.model.offset = torch.zeros(len(input_ids), 1, 1)
        made.logits = made.logits + self.model.offset.expand(len(input_ids), 1, 1)
        return made


@pytest.mark.parametrize("verb", ["run", "compare", "compare, float64", "audit"])
def test_what_the_users_own_batch_left_is_put_aside_and_given_back(model, verb):
    """A Qwen2-VL that had generated a batch of three raised a RuntimeError in whatever ran one row afterwards."""
    mine = Resuming(model.config).eval()
    with torch.no_grad():
        mine(torch.tensor([IDS] * 3))
    left = mine.model.offset
    VERBS[verb](mine)
    assert mine.model.offset is left
    assert left.shape == (3, 1, 1)


def test_a_config_that_asks_for_tuples_is_run_with_named_outputs_and_left_as_it_was(model):
    expected = kv.run(model, IDS, **SHORT).tokens
    model.config.return_dict = False
    try:
        assert kv.run(model, IDS, **SHORT).tokens == expected
        assert model.config.return_dict is False
    finally:
        model.config.return_dict = True


class Lazy:
    """A user's own object, which looks its attributes up elsewhere and raises what that raises."""

    def __getattr__(self, name):
        raise AttributeError(name) if name.startswith("__") else RuntimeError(name)


class Detached(torch.nn.Module):
    """A part whose config is a property that cannot be read."""

    @property
    def config(self):
        raise RuntimeError("no config is loaded")

    def forward(self, hidden):
        return hidden


@pytest.mark.parametrize("verb", ["run", "compare, float64"])
def test_an_attribute_that_raises_is_not_read(model, verb):
    """The model gives what it gives without such parts, which no forward uses."""
    odd = copy.deepcopy(model)
    odd.model.detached = Detached()
    odd.model.lazy = Lazy()
    odd.eval()
    with_them, without = (VERBS[verb](one) for one in (odd, model))
    if verb == "run":
        assert with_them.tokens == without.tokens
    else:
        assert with_them.tokens.equals(without.tokens)
        assert with_them.steps["max_abs_logit"].equals(without.steps["max_abs_logit"])


def test_a_model_that_cannot_be_copied_runs_as_it_is_and_says_so_where_it_needs_a_copy(model):
    model.lock = threading.Lock()
    try:
        VERBS["compare"](model)
        with pytest.raises(UnsupportedError, match=r"cannot be copied \(cannot pickle '_thread.lock' object\)"):
            VERBS["compare, float64"](model)
    finally:
        del model.lock
