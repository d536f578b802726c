"""Path patching beside the plain loop of hooks that a user would write: on the three kinds, across prompts and across paths."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import PROMPT, Case, assert_bitwise, assert_close, cases, plain_forward

ZOO = [
    Case("zoo:gqa2-mini", "hooked"),
    Case("zoo:llama-mini", "native", "eager"),
    Case("zoo:mqa-mini", "bridge"),
    Case("zoo:gemma2-mini", "native", "eager"),
    Case("zoo:moe-mini", "native", "sdpa"),
]
HOOKED = ZOO[0]
CLEAN = tuple(70 if at in (3, 4) else token for at, token in enumerate(PROMPT))
PAIR = (11, 23)
HOW: dict[str, Any] = {"distance": "logit_difference", "answers": PAIR, "progress": "none"}


def rows(*prompts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(prompts)


def difference(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, PAIR[0]].double() - logits[:, -1, PAIR[1]].double()).mean()


# The loop of a user of TransformerLens ----------------------------------------------------------------------------------------


def by_hooks(
    model: Any, clean: torch.Tensor, corrupted: torch.Tensor, sender: tuple[str, Any], ends: dict[str, Any]
) -> Any:
    """Logits of the corrupted prompt, where the ends alone get what a sender's clean value brings along the stream.

    Args:
        sender: The name of a hook and where in its tensor the clean value goes in.
        ends: For each hook that receives, which of its tensor.
    """
    with torch.no_grad():
        _, giving = model.run_with_cache(clean)
        _, taking = model.run_with_cache(corrupted)
        kept: dict[str, torch.Tensor] = {}

        def send(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            tensor[sender[1]] = giving[hook.name][sender[1]]
            return tensor

        def hold(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            return taking[hook.name]

        def keep(tensor: torch.Tensor, hook: Any) -> None:
            kept[hook.name] = tensor.clone()

        def receive(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            tensor[ends[hook.name]] = kept[hook.name][ends[hook.name]]
            return tensor

        layer = int(sender[0].split(".")[1])
        between = [
            f"blocks.{at}.hook_{part}_out"
            for at in range(layer, model.cfg.n_layers)
            for part in ("attn", "mlp")
            if (at, part) != (layer, "attn" if ".attn." in sender[0] else "mlp")
        ]
        first = [(sender[0], send), *((name, keep) for name in ends), *((name, hold) for name in between)]
        model.run_with_hooks(corrupted, fwd_hooks=first)
        return model.run_with_hooks(corrupted, fwd_hooks=[(name, receive) for name in ends])


@pytest.mark.hooked
def test_every_head_to_a_head_s_queries_is_the_loop_s_to_the_bit(load: Any) -> None:
    """And keys and values of a KV head, as in the paper: the receivers of layer 3."""
    adapter, (clean, corrupted) = load(HOOKED), (rows(CLEAN), rows(PROMPT))
    for end, heads in (("q", (1,)), ("v", (0,))):
        receiver = kv.Patch(end, layers=3, heads=heads, positions="all")
        found = kv.activation_patching(adapter, CLEAN, PROMPT, "z", "heads", receiver=receiver, **HOW)
        assert found.layers == (0, 1, 2)
        assert found.receiver == f"{end} of layer 3, head {heads[0]}"
        index = (slice(None), slice(None), heads[0])
        expected = [
            [
                difference(
                    by_hooks(
                        adapter.model,
                        clean,
                        corrupted,
                        (f"blocks.{layer}.attn.hook_z", (slice(None), slice(None), head)),
                        {f"blocks.3.attn.hook_{end}": index},
                    )
                )
                for head in range(adapter.facts.query_heads)
            ]
            for layer in range(3)
        ]
        assert_bitwise(found.values, torch.tensor(expected, dtype=torch.float64), end, ("layer", "head"))
        assert float((found.values - found.corrupted).abs().max()) > 0


@pytest.mark.hooked
def test_an_mlp_to_a_layer_s_input_by_positions_of_several_pairs(load: Any) -> None:
    adapter = load(HOOKED)
    clean, corrupted = rows(CLEAN, CLEAN[::-1]), rows(PROMPT, PROMPT[::-1])
    end, name = "blocks.2.hook_resid_pre", "blocks.0.hook_mlp_out"
    found = kv.activation_patching(
        adapter, clean, corrupted, name, block=6, distance=difference, receiver=end, progress="none"
    )
    expected = [
        difference(by_hooks(adapter.model, clean, corrupted, (name, (slice(None), spot)), {end: slice(None)}))
        for spot in (slice(0, 6), slice(6, 12))
    ]
    assert_bitwise(found.values[0], torch.stack(expected), "positions")


# The loop of a user of torch --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def put(changes: list[tuple[Any, str, Callable[[torch.Tensor], torch.Tensor | None]]]) -> Iterator[None]:
    """Torch's hooks on inputs and outputs of modules."""

    def on_output(change: Any) -> Any:
        def hook(_: Any, __: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            new = change(first)
            return None if new is None else (new, *out[1:]) if isinstance(out, tuple) else new

        return hook

    def on_input(change: Any) -> Any:
        def hook(_: Any, given: Any) -> Any:
            new = change(given[0])
            return None if new is None else (new, *given[1:])

        return hook

    handles = [
        module.register_forward_pre_hook(on_input(change))
        if side == "input"
        else module.register_forward_hook(on_output(change))
        for module, side, change in changes
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Loop:
    """Path patching of a native Llama by hand: head of one layer to the queries of another."""

    def __init__(self, model: Any, layer: int, head: int, end: int) -> None:
        self.model, self.layer, self.head, self.end = model, layer, head, end
        self.layers = model.model.layers
        self.width = model.config.hidden_size // model.config.num_attention_heads
        self.span = slice(head * self.width, (head + 1) * self.width)
        self.z = self.layers[layer].self_attn.o_proj
        self.q = self.layers[end].self_attn.q_proj

    def seen(self, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[Any, torch.Tensor], torch.Tensor]:
        """Logits, what attention and MLPs add, and z of the sender's layer."""
        kept: dict[Any, torch.Tensor] = {}
        parts = [part for at in range(self.layer, self.end) for part in self._parts(at)]
        changes = [(part, "output", lambda x, part=part: kept.__setitem__(part, x.clone())) for part in parts]
        with put([*changes, (self.z, "input", lambda x: kept.__setitem__("z", x.clone()))]):
            logits = forward()
        return logits, kept, kept["z"]

    def _parts(self, at: int) -> list[Any]:
        return [self.layers[at].self_attn, self.layers[at].mlp]

    def sent(self, forward: Callable[[], torch.Tensor], z: torch.Tensor, held: dict[Any, torch.Tensor]) -> torch.Tensor:
        """The queries of the end, where the stream has the sender's part alone besides."""
        kept = []

        def send(x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[..., self.span] = z[..., self.span]
            return x

        own = self.layers[self.layer].self_attn
        holds = [(part, "output", lambda _, part=part: held[part]) for part in held if part not in ("z", own)]
        with put([(self.z, "input", send), *holds, (self.q, "output", lambda x: kept.append(x.clone()))]):
            forward()
        return kept[0]

    def received(self, forward: Callable[[], torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
        with put([(self.q, "output", lambda _: queries)]):
            return forward()


def test_a_native_model_s_paths_are_the_loop_s_to_the_bit(load: Any) -> None:
    adapter = load(ZOO[1])
    found = kv.activation_patching(
        adapter, CLEAN, PROMPT, "z", "heads", layers=1, receiver="model.layers.3.self_attn.q_proj", **HOW
    )
    for head in range(adapter.facts.query_heads):
        loop = Loop(adapter.model, 1, head, 3)
        clean, corrupted = (lambda given=given: plain_forward(adapter.model, rows(given)) for given in (CLEAN, PROMPT))
        _, _, z = loop.seen(clean)
        _, held, _ = loop.seen(corrupted)
        logits = loop.received(corrupted, loop.sent(corrupted, z, held))
        assert_bitwise(found.values[0, head], difference(logits), f"head {head}")


def decoded(model: Any, fed: list[int], steps: int) -> list[Callable[[], torch.Tensor]]:
    """The forwards of a cached path, each to be called once: the prompt, then a token each."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    pieces = [rows(PROMPT), *(rows((token,)) for token in fed[:steps])]

    def forward(piece: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(piece, past_key_values=cache, use_cache=True).logits

    return [lambda piece=piece: forward(piece) for piece in pieces]


@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
def test_between_the_paths_it_is_the_loop_s(load: Any, direction: str) -> None:
    """Step by step: one path's head at the newest position to the other's queries, with all between as the other has it."""
    adapter, layer, end, steps = load(ZOO[1]), 1, 3, 3
    model = adapter.model
    found = kv.sweep(
        adapter, PROMPT, "z", "heads", layers=layer, direction=direction, receiver=f"blocks.{end}.attn.hook_q",
        max_new_tokens=steps + 1, stop="length", logits="keep", controls="none", progress="none", distance="l2",
    )  # fmt: skip
    trace = kv.run(adapter, PROMPT, max_new_tokens=steps + 1, stop="length")
    fed = list(trace.tokens[:steps])
    whole = [lambda step=step: plain_forward(model, rows((*PROMPT, *fed[:step])))[:, -1:] for step in range(steps + 1)]
    assert found.provenance["receiver"] == "q of layer 3"
    for head in range(adapter.facts.query_heads):
        loop = Loop(model, layer, head, end)
        # A lane each: the cache of one is none of the other's.
        cached = [decoded(model, fed, steps) for _ in range(3)]
        for step in range(steps + 1):
            taking, giving = (whole, cached[0]) if direction == "into-recompute" else (cached[0], whole)
            _, held, own = loop.seen(taking[step])
            _, _, z = loop.seen(giving[step])
            if step == 0:
                if direction == "into-cached":
                    for lane in cached[1:]:
                        lane[0]()
                continue
            new = own.clone()
            new[:, -1] = z[:, -1]
            first, second = (whole, whole) if direction == "into-recompute" else cached[1:]
            queries = loop.sent(first[step], new, held)
            logits = loop.received(second[step], queries)[0, -1]
            assert_bitwise(found.logits[0][step, 2 + head], logits, f"head {head}, step {step}")


# What it must keep --------------------------------------------------------------------------------------------------------


@cases(ZOO)
def test_the_parts_of_a_stream_are_the_stream(load: Any, case: Case) -> None:
    """To the last stream a path is what the sender adds: all of them together are what the stream has more, in float64."""
    adapter = load(case, "float64")
    layers = adapter.facts.layers
    with kv.record(adapter.model, "attn_out,mlp_out,resid_pre,resid_post", positions="all") as seen:
        for prompt in (CLEAN, PROMPT):
            plain_forward(adapter.model, rows(prompt))
    last = ("resid_post", layers - 1)
    streams: dict[Any, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def keep(logits: torch.Tensor) -> torch.Tensor:
        kept.append(logits)
        return logits.sum()

    for site in ("attn_out", "mlp_out"):
        for layer in range(layers):
            found = kv.activation_patching(
                adapter, CLEAN, PROMPT, site, layers=layer, block=len(PROMPT), receiver=f"blocks.{layers - 1}.hook_resid_post",
                distance=keep, progress="none",
            )  # fmt: skip
            assert found.values.shape == (1, 1)
            streams[site, layer] = kept[-1]
            clean, corrupted = seen.kept[site, layer]
            with kv.patched(adapter.model, kv.Patch(*last, positions="all", donor=seen.kept[last][1] + clean - corrupted)):
                expected = plain_forward(adapter.model, rows(PROMPT))
            assert_close(kept[-1], expected, f"{site} of layer {layer}", relative=1e-6)
    assert len({float(each.sum()) for each in streams.values()}) == 2 * layers


@cases([case for case in ZOO if case.kind == "native"])
def test_with_neurons_results_and_embeddings_too(load: Any, case: Case) -> None:
    adapter = load(case, "float64")
    end = {"receiver": kv.Patch("resid_mid", layers=2, positions="all"), **HOW}
    by_z, by_result = (kv.activation_patching(adapter, CLEAN, PROMPT, site, "heads", **end) for site in ("z", "result"))
    assert by_z.layers == (0, 1, 2), "the last one's attention writes before its own MLP reads"
    assert_close(by_result.values, by_z.values, "heads", relative=1e-6)
    embed, stream = (
        kv.activation_patching(adapter, CLEAN, PROMPT, site, layers=0, block=4, **end) for site in ("embed", "resid_pre")
    )
    assert_close(embed.values, stream.values, "embeddings", relative=1e-6)
    if case.model != "zoo:moe-mini":
        neurons, mlp = (
            kv.activation_patching(adapter, CLEAN, PROMPT, site, block=4, **end) for site in ("post", "mlp_out")
        )
        assert neurons.layers == (0, 1)
        assert_close(neurons.values, mlp.values, "neurons", relative=1e-6)


@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
def test_a_sender_that_others_hold_is_patched(load: Any, direction: str) -> None:
    """What attention adds at a layer is held on the paths of earlier layers, and is what goes along its own."""
    adapter = load(Case("zoo:gqa2-mini", "native", "sdpa"))
    how: dict[str, Any] = {"direction": direction, "receiver": "blocks.3.hook_resid_post", "max_new_tokens": 3, **HOW}
    how |= {"cached": "cached[kernels=split_k(4,float16)]", "controls": "none"}
    together = kv.sweep(adapter, PROMPT, "attn_out", **how)
    for layer, row in enumerate(together.recovery.to_dict("records")):
        (alone,) = kv.sweep(adapter, PROMPT, "attn_out", layers=layer, **how).recovery.to_dict("records")
        assert not row["unchanged"]
        assert row == alone


@cases(ZOO)
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
def test_a_sweep_in_batches_has_the_same_paths(load: Any, case: Case, direction: str) -> None:
    adapter = load(case, "float64")
    how: dict[str, Any] = {"direction": direction, "receiver": "blocks.3.hook_resid_pre", "max_new_tokens": 3, **HOW}
    alone, several = (
        kv.sweep(adapter, PROMPT, "z", "heads", cached="cached+int4", controls="quick", batch_size=size, **how)
        for size in (1, 4)
    )
    assert alone.recovery.equals(several.recovery)
    assert set(alone.recovery["layer"]) == {0, 1, 2}
    assert "together" not in set(alone.controls["control"])
    assert not alone.recovery["unchanged"].all()
    assert "along the residual stream to resid_pre of layer 3" in alone.sentences()[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"receiver": "q"}, "receiver 'q' cannot end a path"),
        ({"receiver": "kv"}, "receiver 'kv' cannot end a path"),
        ({"receiver": kv.Patch("q", 3, donor="zero")}, "cannot end a path"),
        ({"receiver": 3}, "receiver=3"),
        ({"receiver": "blocks.9.attn.hook_q"}, "layer 9 does not exist"),
        (
            {"receiver": "blocks.1.attn.hook_q", "layers": 1},
            "nothing goes along the stream from z of layer 1 to q of layer 1",
        ),
        ({"receiver": "blocks.1.attn.hook_q", "method": "attribution"}, "has no paths"),
        (
            {"receiver": "blocks.1.attn.hook_q", "site": "kv"},
            "a path begins outside of the cache, and 'kv' was given: take k",
        ),
        ({"receiver": "blocks.0.attn.hook_q", "layers": 0}, "reads it before: name a later receiver."),
        ({"receiver": "blocks.2.attn.hook_q", "layers": 3}, "name a later receiver or an earlier layer."),
    ],
)
def test_what_is_no_path_is_one_sentence(load: Any, given: dict[str, Any], said: str) -> None:
    adapter = load(ZOO[1])
    with pytest.raises(kv.InputError, match=re.escape(said)) as error:
        kv.activation_patching(adapter, CLEAN, PROMPT, **{"site": "z", **HOW, **given})
    assert "\n" not in str(error.value)
    if "method" not in given:
        with pytest.raises(kv.InputError, match=re.escape(said)):
            kv.sweep(adapter, PROMPT, **{"site": "z", "max_new_tokens": 3, "progress": "none", **given})


def test_what_no_sweep_of_paths_is(load: Any) -> None:
    adapter, end = load(ZOO[1]), "blocks.3.attn.hook_q"
    for given, said in (
        ({"over": "cumulative"}, "a path begins at one layer"),
        ({"over": "blocks"}, "a path begins at one layer"),
        ({"protocol": "free"}, "use 'matched'"),
    ):
        with pytest.raises(kv.InputError, match=re.escape(said)):
            kv.sweep(adapter, PROMPT, "z", receiver=end, max_new_tokens=3, progress="none", **given)  # type: ignore[arg-type]


# A patch that writes what was there ---------------------------------------------------------------------------------------


@cases([Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager")])
def test_a_patch_of_what_was_there_is_said(load: Any, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    adapter, tokens = load(case), rows(PROMPT)
    with kv.record(adapter.model, "resid_post", positions="all") as seen:
        plain_forward(adapter.model, tokens)
    own = seen["resid_post", 1]
    caplog.clear()
    with kv.patched(adapter.model, [kv.Patch("resid_post", 1, positions="all", donor=own)]):
        plain_forward(adapter.model, tokens)
    (said,) = caplog.messages
    assert said.startswith("kv.patched: the patch of 'resid_post' changed nothing")
    caplog.clear()
    with kv.patched(adapter.model, [kv.Patch("resid_post", 1, positions="all", donor=own + 1)]):
        plain_forward(adapter.model, tokens)
    assert not caplog.messages
    how: dict[str, Any] = {**HOW, "layers": 1}
    for method in ("patches", "attribution"):
        caplog.clear()
        found = kv.activation_patching(adapter, CLEAN, PROMPT, method=method, **how)
        assert found.unchanged.tolist() == [[at < 3 for at in range(len(PROMPT))]]
        assert not caplog.messages
        assert "3 of 12 patches (layer 1) changed nothing" in " ".join(found.sentences())
        kv.activation_patching(adapter, CLEAN, PROMPT, method=method, positions=(0, 3), **how)
        assert "every patch of 'resid_pre' changed nothing" in caplog.text


@cases(ZOO[:2])
def test_a_sweep_says_where_both_paths_have_the_same(load: Any, case: Case) -> None:
    """Both paths embed the same tokens; and with what attention reads wider apart, K and V are not."""
    adapter = load(case)
    how: dict[str, Any] = {"max_new_tokens": 4, "progress": "none", "controls": "quick", "cached": "cached+int4"}
    same = kv.sweep(adapter, PROMPT, "embed", **how)
    assert same.recovery["unchanged"].tolist() == [True]
    assert same.recovery["recovery"].tolist() == [0.0]
    assert "1 of 1 patches (layer 0) changed nothing" in " ".join(same.sentences())
    controls = same.controls.set_index("control")["unchanged"]
    assert controls["self"]
    assert not controls["other-prompt"]
    other = kv.sweep(adapter, PROMPT, "kv", direction="into-cached", **how)
    assert not other.recovery["unchanged"].any()
    assert "changed nothing" not in " ".join(other.sentences())


def test_the_panel_s_bench_says_it(load: Any) -> None:
    bench = kv.PatchBench(load(ZOO[1]), 4)
    answer = bench.ask(PROMPT, "embed", donor="path")
    assert answer.unchanged
    assert not bench.ask(PROMPT, "resid_post", 1, donor="zero").unchanged
    from kvinterp.study.report.panel_shown import recovery_said

    assert "The patch changed nothing" in recovery_said(answer)[1]
