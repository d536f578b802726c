"""Everything on a device that is not the CPU: the results are the CPU's to the bit, and what the host waits for is bounded.

The device is that of ``pretended.py``. What it refuses is what a GPU refuses: before, a mask made on the CPU was found by whoever
had one. All of it is one group of xdist, since the device is told to torch once a process.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.models.cache_kinds import CACHE_KINDS
from kvinterp.paths.kernels.registry import KERNELS
from kvinterp.policies import POLICIES
from pretended import Device, Pretended, pretended
from support import PROMPT, assert_bitwise

pytestmark = pytest.mark.xdist_group("pretended")

STEPS = 3
OTHER = [token + 1 for token in PROMPT]
KINDS = ["native", pytest.param("hooked", marks=[pytest.mark.hooked, pytest.mark.slow]), pytest.param("bridge", marks=pytest.mark.slow)]  # fmt: skip
GIVEN: dict[str, Any] = {"max_new_tokens": STEPS, "stop": "length", "progress": "none"}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with pretended() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first two blocks of a trained model: one for each device, and half of the operations."""
    whole = kv.load_model("zoo:gqa2-mini", dtype="float32", device="cpu")
    whole.model.model.layers = whole.model.model.layers[:2]
    whole.model.config.num_hidden_layers = 2
    place = str(tmp_path_factory.mktemp("models") / "two-blocks")
    whole.model.save_pretrained(place)
    whole.tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def models(device: Device, folder: str) -> Callable[[str], tuple[kv.Adapter, kv.Adapter]]:
    """Gives a model of a kind on the CPU, and on the device."""
    made: dict[str, tuple[kv.Adapter, kv.Adapter]] = {}

    def get(kind: str) -> tuple[kv.Adapter, kv.Adapter]:
        if kind not in made:
            places = ("cpu", "pretend:0")
            one, two = (kv.load_model(folder, kind=kind, dtype="float32", device=place) for place in places)
            made[kind] = one, two
        return made[kind]

    return get


def spread(adapter: kv.Adapter) -> kv.Adapter:
    """A model of transformers with half its layers on each device, as ``device_map`` puts it there."""
    from accelerate import dispatch_model

    model, layers = adapter.model, adapter.facts.layers
    # Tied weights are on one device; apart they show what is done behind the last layer.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    places = {f"model.layers.{layer}": f"pretend:{2 * layer // layers}" for layer in range(layers)}
    places |= {"model.embed_tokens": "pretend:0", "model.rotary_emb": "pretend:0"}
    places |= {"model.norm": "pretend:1", "lm_head": "pretend:1"}
    model = dispatch_model(model, places, main_device="pretend:0", force_hooks=True)
    return kv.wrap(model, tokenizer=adapter.tokenizer, name=adapter.facts.name)


@pytest.fixture(scope="module")
def on_two(device: Device, folder: str) -> kv.Adapter:
    made = spread(kv.load_model(folder, kind="native", dtype="float32", device="cpu"))
    assert {str(p.device) for p in made.model.parameters()} == {"pretend:0", "pretend:1"}
    return made


# The device itself -----------------------------------------------------------------------------------------------------


def test_tensors_say_where_they_are_and_have_the_bits_of_the_cpu(device: Device) -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    here, there = a.to("pretend:0"), b.to("pretend:0")
    assert here.device == torch.device("pretend:0")
    assert isinstance(here @ there, Pretended)
    assert_bitwise((here @ there).cpu(), a @ b)
    query = torch.randn(1, 4, 5, 8)
    for causal, mask in ((True, None), (False, torch.rand(5, 5) > 0.3), (False, None)):
        wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask, is_causal=causal)
        moved = [None if each is None else each.to("pretend:0") for each in (query, mask)]
        found = torch.nn.functional.scaled_dot_product_attention(moved[0], moved[0], moved[0], moved[1], is_causal=causal)
        assert_bitwise(found.cpu(), wanted)


MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "added": lambda x: x + torch.ones(3),
    "joined": lambda x: torch.cat([x, torch.ones(3)]),
    "in place": lambda x: x.add_(torch.ones(3)),
    "the other device": lambda x: x + torch.ones(3, device="pretend:1"),
    "the CPU's, indexed": lambda x: torch.ones(3)[x.long()],
}


@pytest.mark.parametrize("operation", MIXED)
def test_an_operation_that_mixes_devices_fails(device: Device, operation: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device"):
        MIXED[operation](torch.zeros(3, device="pretend:0"))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "a copy": lambda x: x.cpu(),
    "a boolean index": lambda x: x[x > 0],
}


@pytest.mark.parametrize("way", READS)
def test_a_read_by_the_host_is_counted_with_its_line(device: Device, way: str) -> None:
    x = torch.arange(3.0, device="pretend:0")
    with device.counting() as counts:
        READS[way](x)
    assert counts.reads == 1
    assert counts.writes == 0
    assert all(line.startswith("tests/test_pretended.py:") for line in counts.lines)


# What it is for: an error of devices is found on any machine -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Asks(kv.Policy):
    """A policy of someone's own that reads a number of every layer at every step."""

    def write(self, keys: Any, values: Any, place: Any) -> Any:
        return (keys, values) if keys.abs().max().item() > 0 else (keys + 1, values)


def reads_a_step(device: Device, work: Callable[[int], Any]) -> tuple[int, Any]:
    """How often the host reads at a step more, and the lines."""
    found = []
    for steps in (2, 3):
        work(steps)
        with device.counting() as counts:
            work(steps)
        found.append(counts)
    few, many = found
    lines = many.lines - few.lines
    # What transformers' own forward reads is read by whoever calls it.
    ours = sum(count for line, count in lines.items() if not line.startswith("transformers/"))
    return ours, lines


def test_an_item_in_the_loop_is_found(device: Device, models: Callable[..., Any]) -> None:
    adapter = models("native")[1]
    path = kv.Cached(policy=Asks())
    reads, lines = reads_a_step(device, lambda steps: kv.run(adapter, PROMPT, path, max_new_tokens=steps))
    assert reads == 1 + adapter.facts.layers
    assert [count for line, count in lines.items() if line.startswith("tests/test_pretended.py")] == [adapter.facts.layers]


# What the host waits for -------------------------------------------------------------------------------------------------


WAITS = {
    "run, cached": (1, lambda adapter, steps: kv.run(adapter, PROMPT, "cached", max_new_tokens=steps)),
    "run, recompute": (1, lambda adapter, steps: kv.run(adapter, PROMPT, "recompute", max_new_tokens=steps)),
    "run, to the length": (0, lambda adapter, steps: kv.run(adapter, PROMPT, max_new_tokens=steps, stop="length")),
    "recorded": (1, lambda adapter, steps: kv.run(adapter, PROMPT, max_new_tokens=steps, record="resid_post,kv")),
    "compared": (1, lambda adapter, steps: kv.compare(adapter, PROMPT, max_new_tokens=steps, record="", progress="none")),
    "all sites": (4, lambda adapter, steps: kv.compare(adapter, PROMPT, max_new_tokens=steps, progress="none")),
    "sampled": (
        1,
        lambda adapter, steps: kv.run(adapter, PROMPT, strategy="top_p(0.9,1.0)", max_new_tokens=steps),
    ),
    "evicting": (2, lambda adapter, steps: kv.run(adapter, PROMPT, "cached+h2o", max_new_tokens=steps)),
    "decomposed": (2, lambda adapter, steps: kv.decompose(adapter, PROMPT, max_new_tokens=steps, progress="none")),
    # A path a layer, each with patches at three sites; each with its own tokens.
    "swept": (2, lambda adapter, steps: swept(adapter, "resid_mid", steps)),
    "swept, free": (2, lambda adapter, steps: swept(adapter, "resid_post", steps, protocol="free")),
    "swept, cached": (1, lambda adapter, steps: swept(adapter, "kv", steps, direction="into-cached")),
}
"""Most reads a step, however many layers and paths there are."""


def swept(adapter: kv.Adapter, site: str, steps: int, **options: Any) -> kv.Sweep:
    return kv.sweep(adapter, PROMPT, site, controls="none", max_new_tokens=steps, progress="none", **options)


@pytest.mark.parametrize("verb", WAITS)
def test_how_often_the_host_reads_at_a_step(device: Device, models: Callable[..., Any], verb: str) -> None:
    most, work = WAITS[verb]
    adapter = models("native")[1]
    reads, lines = reads_a_step(device, lambda steps: work(adapter, steps))
    assert reads <= most, lines


# Every verb gives what it gives on the CPU -------------------------------------------------------------------------------


def parts_of(found: Any) -> dict[str, Any]:
    """The tables, tensors and texts of a result, brought to the CPU."""
    if isinstance(found, kv.Trace):
        kept = {f"{site}.{layer}": torch.stack([*steps]).cpu() for (site, layer), steps in found.records.items()}
        return {"tokens": found.tokens, "logits": None if found.logits is None else found.logits.cpu(), **kept}
    if isinstance(found, torch.Tensor):
        return {"tensor": found.cpu()}
    if isinstance(found, pd.DataFrame):
        return {"table": found}
    if dataclasses.is_dataclass(found):
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return {name: value for name, value in fields.items() if isinstance(value, pd.DataFrame)} or {"text": str(found)}
    return {"value": found}


def assert_same(cpu: Any, there: Any) -> None:
    ours, theirs = parts_of(cpu), parts_of(there)
    assert ours
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        if isinstance(mine, pd.DataFrame):
            pd.testing.assert_frame_equal(theirs[name], mine, check_exact=True, obj=name)
        elif isinstance(mine, torch.Tensor):
            assert_bitwise(theirs[name], mine, name)
        else:
            assert theirs[name] == mine, name


def recorded(adapter: kv.Adapter) -> torch.Tensor:
    """The recorder alone, around a forward of the user's own."""
    with kv.record(adapter.model, "resid_post", positions="all") as seen, torch.no_grad():
        adapter.model(torch.tensor([PROMPT], device=adapter.device))
    return torch.stack([seen.kept["resid_post", layer][0].clone() for layer in range(adapter.facts.layers)])


def patched_alone(adapter: kv.Adapter) -> torch.Tensor:
    """The patch alone, around a forward of the user's own."""
    tokens = torch.tensor([PROMPT], device=adapter.device)
    trace = kv.run(adapter, OTHER, "recompute", record="resid_post", max_new_tokens=1)
    with kv.patched(adapter.model, kv.Patch("resid_post", layers=(1,), donor=trace)), torch.no_grad():
        made = adapter.model(tokens)
    return getattr(made, "logits", made)


def ablated(adapter: kv.Adapter, donor: Any) -> torch.Tensor:
    """The logits where two layers' heads are ablated."""
    tokens = torch.tensor([PROMPT], device=adapter.device)
    with kv.patched(adapter.model, kv.Patch("z", layers=(0, 1), positions="all", donor=donor)), torch.no_grad():
        made = adapter.model(tokens)
    return getattr(made, "logits", made)


def audited(adapter: kv.Adapter) -> tuple[Any, ...]:
    """What a small audit finds."""
    rungs = ("float64", "float32")
    found = kv.audit(adapter, [PROMPT], rungs=rungs, lengths=(5,), steps=1, checks="none", sweep="no", programs=2)
    return found.verdict, found.first_layer, found.tensor


KEPT: dict[str, Any] = {"max_new_tokens": STEPS, "stop": "length", "record": "resid_post,kv", "logits": "keep"}
VERBS: dict[str, Callable[[kv.Adapter], Any]] = {
    "run": lambda m: kv.run(m, PROMPT, max_new_tokens=STEPS, record="resid_post,kv", logits="keep"),
    "compare": lambda m: kv.compare(m, PROMPT, **GIVEN),
    "recompute": lambda m: kv.run(m, PROMPT, "recompute[chunk=4]", max_new_tokens=STEPS, logits="keep"),
    "batched": lambda m: kv.compare(m, [PROMPT, OTHER], batch_size=2, record="", **GIVEN),
    "sampled": lambda m: kv.compare(m, PROMPT, strategy="top_p(0.9,1.0)", protocol="free", record="resid_post", **GIVEN),
    "ladder": lambda m: kv.compare(m, PROMPT, "cached@float16", "recompute@float64", record="resid_post,kv", **GIVEN),
    "record": recorded,
    "patched": patched_alone,
    "sweep": lambda m: kv.sweep(m, PROMPT, "resid_post", over="single", max_new_tokens=3, progress="none"),
    "sweep of kv": lambda m: kv.sweep(
        m,
        PROMPT,
        "kv",
        over="cumulative",
        direction="into-cached",
        distance="l2",
        controls="none",
        max_new_tokens=3,
        progress="none",
    ),
    "sweep in batches": lambda m: kv.sweep(
        m, PROMPT, "z", over="heads", layers=[1], batch_size=4, controls="none", max_new_tokens=3, progress="none"
    ),
    "decompose": lambda m: kv.decompose(m, PROMPT, max_new_tokens=3, progress="none"),
    "localise": lambda m: kv.localise(m, PROMPT),
    "traces": lambda m: kv.compare_traces(*(kv.run(m, PROMPT, path, **KEPT) for path in ("cached", "cached+int4"))),
    "attention": lambda m: kv.attention_comparison(m, PROMPT, step=2).heads,
    "activation patching": lambda m: kv.activation_patching(m, PROMPT, OTHER, "resid_pre", progress="none"),
    "zeros": lambda m: ablated(m, "zero"),
    "audit": lambda m: audited(m),
    "save and load": lambda m: kv.Trace.load(kv.run(m, PROMPT, **KEPT).save(tempfile.mkdtemp())),
}
CHEAP = ("run", "compare", "batched")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", [verb if verb in CHEAP else pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS])
def test_a_verb_gives_what_it_gives_on_the_cpu(models: Callable[..., Any], kind: str, verb: str) -> None:
    cpu, there = models(kind)
    assert_same(VERBS[verb](cpu), VERBS[verb](there))


def all_but(names: Any, cheap: str) -> list[Any]:
    return [name if name == cheap else pytest.param(name, marks=pytest.mark.slow) for name in names]


PATHS = [
    *(f"cached+{name}" for name in POLICIES),
    *(f"cached[kernels={name}]" for name in KERNELS),
    *(f"cached[cache={name}]" for name in CACHE_KINDS if name not in ("offloaded", "made_by")),
    "cached[chunk=4]", "cached[refresh=2]", "cached[smooth=0.5]", "cached[prefill=stored]+q8_0", "cached+hadamard+q4_0(on=k)",
]  # fmt: skip


@pytest.mark.parametrize("path", all_but(PATHS, "cached+q8_0"))
def test_a_path_gives_what_it_gives_on_the_cpu(models: Callable[..., Any], on_two: kv.Adapter, path: str) -> None:
    """Every policy, every kernel mode, every cache; on one device and with the weights on two."""

    def tried(adapter: kv.Adapter) -> Any:
        try:
            return kv.run(adapter, PROMPT, path, max_new_tokens=4, logits="keep")
        except kv.KvinterpError as error:
            return str(error).replace("pretend:0", "cpu")

    cpu, there = models("native")
    wanted = tried(cpu)
    for adapter in (there, on_two):
        assert_same(wanted, tried(adapter))


# Weights on two devices ---------------------------------------------------------------------------------------------------


SPREAD: dict[str, Callable[[kv.Adapter], Any]] = {
    **VERBS,
    "eviction": lambda m: kv.compare(m, PROMPT, "cached+h2o", "cached", record="pattern,kv", **GIVEN),
    "policy": lambda m: kv.run(m, PROMPT, "cached+int4", max_new_tokens=4, logits="keep"),
    "kernels": lambda m: kv.run(m, PROMPT, "cached[kernels=split_k(2,float32)]", max_new_tokens=4, logits="keep"),
    "chunks": lambda m: kv.run(m, PROMPT, "cached[chunk=4,smooth=0.5]", max_new_tokens=4, logits="keep"),
    "patching between the layers": lambda m: swept(m, "resid_mid", 3),
    "keys before RoPE": lambda m: kv.compare(m, PROMPT, "cached+sinks(2,6)", record="cache_k_pre,pattern", **GIVEN),
}


SHORT = ("compare", "patching between the layers", "audit")


@pytest.mark.parametrize("verb", [v if v in SHORT else pytest.param(v, marks=pytest.mark.slow) for v in SPREAD])
def test_weights_on_two_devices(models: Callable[..., Any], on_two: kv.Adapter, verb: str) -> None:
    assert_same(SPREAD[verb](models("native")[0]), SPREAD[verb](on_two))


# Whole commands' work ------------------------------------------------------------------------------------------------------
