"""Quantising policies: against gguf's and quanto's own code, a plain KIVI, and what is known of formats without running one."""

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import kvinterp as kv
from kvinterp.models import wrap
from kvinterp.paths.store import Growing, Store
from kvinterp.policies import CacheRows, policy_named
from support import SEED, Case, assert_bitwise, assert_close, random_model

GGUF = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
PLACE = CacheRows(0, 0, 1, rotated=True)


def rounded(text, tensor, which="k"):
    return policy_named(text).write_rows(tensor, which, PLACE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def wide():
    """A random model with heads of 32 and no window."""
    return wrap(random_model(LlamaForCausalLM, SEED, head_dim=32), name="wide")


# The block formats -----------------------------------------------------------------------------------------------------


def hard_blocks():
    """Ten thousand blocks: ordinary ones of every magnitude, and those at which a format may go wrong."""
    generator = np.random.default_rng(SEED)
    ordinary = generator.normal(size=(9000, 32)) * np.exp2(generator.uniform(-24, 14, (9000, 1)))
    outlier = generator.normal(size=(300, 32))
    outlier[np.arange(300), generator.integers(0, 32, 300)] *= 1e4
    most = float(np.finfo(np.float16).max)
    ties = generator.integers(-254, 255, (200, 32)) / 2  # Halves, where d is 1: ties of q8_0.
    ties[:, 5] = 127
    equal = np.repeat(generator.normal(size=(100, 1)), 32, 1)
    both = generator.normal(size=(100, 32))
    both[:, 3], both[:, 20] = -7.0, 7.0  # The largest magnitude twice, with either sign.
    sparse = np.zeros((100, 32))
    sparse[np.arange(100), generator.integers(0, 32, 100)] = generator.normal(size=100)
    halves = generator.integers(0, 2**10, (100, 32)) * 2.0**-24  # FP16's subnormals.
    largest = generator.choice([-most, 0.0, most], (50, 32))
    nearly = np.full((50, 32), 0.49999997)
    nearly[:, 0] = 127
    parts = [ordinary, outlier, ties, equal, both, sparse, halves, largest, nearly]
    return np.concatenate([*map(np.float32, parts)]).astype(np.float32)


BLOCKS = hard_blocks()


def by_gguf(name, blocks):
    gguf = pytest.importorskip("gguf", reason="the reference of the block formats: pip install kvinterp[dev]")
    kind = gguf.GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(blocks, kind), kind))


@pytest.mark.parametrize("name", GGUF)
def test_a_block_format_is_ggufs_to_the_bit(name):
    assert len(BLOCKS) == 10_000
    assert_bitwise(rounded(name, torch.from_numpy(BLOCKS)), by_gguf(name, BLOCKS), name, ("block", "element"))


@pytest.mark.parametrize("name", GGUF)
def test_blocks_that_no_float16_scale_holds(name):
    """Too small is 0, whatever the sign of the zero; too large is lost, and not read back as a number that looks well."""
    small = np.float32(normal(20, 32)) * np.float32(1e-41)
    assert not rounded(name, torch.from_numpy(small)).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not by_gguf(name, small).any()
    assert not rounded(name, torch.full((1, 32), 3e38)).isfinite().any()
    assert rounded(name, torch.full((1, 32), torch.nan)).isnan().all()


@pytest.mark.parametrize(
    ("text", "block"), [("q8_0", 32), ("q5_1(on=v)", 32), ("hadamard(64)+q8_0", 64), ("kivi", 32), ("int4(64)", 64)]
)
def test_heads_that_blocks_do_not_fill_are_refused_in_one_sentence(load, text, block):
    said = rf"works on blocks of {block} along head_dim, and .* has head_dim 16: .* such as zoo:gemma2-mini\.$"
    with pytest.raises(kv.UnsupportedError, match=said):
        kv.run(load(Case("zoo:gqa2-mini", "native", "sdpa")), [3, 4, 5], f"cached+{text}", max_new_tokens=1)
    with pytest.raises(kv.UnsupportedError, match="what it was given has head_dim 16"):
        rounded("q8_0", normal(2, 16))


# Walsh-Hadamard --------------------------------------------------------------------------------------------------------


def test_hadamard_is_the_matrix_of_scipy_in_blocks_and_its_own_inverse():
    from scipy.linalg import hadamard

    given = normal(2, 2, 5, 96).double()
    for text, size in (("hadamard", 32), ("hadamard(16)", 16)):
        matrix = torch.from_numpy(np.kron(np.eye(96 // size), hadamard(size) / np.sqrt(size)))
        turned = rounded(text, given)
        assert_close(turned, given @ matrix, text, relative=1e-15)
        assert_close(policy_named(text).read_rows(turned, "k", PLACE), given, "turned back", relative=1e-15)


def test_hadamard_alone_changes_nothing_in_float64_but_rounding(wide):
    model = wide.at(torch.float64)
    given = {"max_new_tokens": 6, "stop": "length", "logits": "keep"}
    plain, turned = (kv.run(model, [3, 17, 44, 9], path, **given).logits for path in ("cached", "cached+hadamard"))
    # transformers' norms and softmax compute in float32.
    assert_close(turned, plain, "logits", relative=1e-6)


# Integers --------------------------------------------------------------------------------------------------------------


def test_int4_is_quantos():
    quanto = pytest.importorskip("optimum.quanto", reason="the reference of int4: pip install kvinterp[quanto]")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = (normal(2, 3, 70, 128) * torch.exp2(normal(2, 3, 70, 1, seed=1))).to(dtype)
        scale, shift = quanto.MaxOptimizer()(given, quanto.qint4, 0, 64)
        codes = torch.ops.quanto.quantize_affine(given, 4, 0, 64, scale, shift)
        assert_bitwise(rounded("int4(64)", given), (scale * codes - shift).reshape(given.shape), str(dtype))


def test_int8_is_absmax_of_a_tokens_head():
    given = normal(2, 3, 5, 64)
    scale = np.abs(given.numpy()).max(-1, keepdims=True) / np.float32(127)
    wanted = np.rint(given.numpy() / scale) * scale
    assert_close(rounded("int8", given), torch.from_numpy(wanted), "int8", relative=1e-6)
    assert_bitwise(rounded("int8", torch.zeros(1, 1, 2, 8)), torch.zeros(1, 1, 2, 8), "zeros")


# KIVI ------------------------------------------------------------------------------------------------------------------


class PlainKivi:
    """Algorithm 1 of the paper with lists, a token at a time."""

    def __init__(self, bits, group, residual):
        self.bits, self.group, self.residual = bits, group, residual
        self.done = {"k": [], "v": []}
        self.window = {"k": [], "v": []}

    def integers(self, numbers):
        numbers = np.asarray(numbers, np.float32)
        step = np.float32((numbers.max() - numbers.min()) / np.float32(2**self.bits - 1))
        return np.rint((numbers - numbers.min()) / step) * step + numbers.min()

    def flush(self):
        keys, size = self.window["k"], self.group
        if len(keys) == self.residual:
            for begun in range(0, len(keys), size):
                block = np.stack(keys[begun : begun + size])
                made = np.stack([self.integers(block[:, channel]) for channel in range(block.shape[1])], 1)
                self.done["k"] += list(made)
            self.window["k"] = []
        while len(self.window["v"]) > self.residual:
            token = self.window["v"].pop(0)
            self.done["v"].append(np.concatenate([self.integers(part) for part in np.split(token, len(token) // size)]))

    def step(self, key, value):
        """What attention reads at this step."""
        self.window["k"].append(key)
        self.window["v"].append(value)
        read = {name: np.stack(self.done[name] + self.window[name]) for name in ("k", "v")}
        self.flush()
        return read["k"], read["v"]


def store(model, text, cache=None, prefill=0):
    return Store(model.facts, policy_named(text), 2, torch.float32, model.device, (), Growing(96), cache, prefill)


@pytest.mark.parametrize("prompt", [1, 5, 8, 9, 16, 21])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_flushes_as_the_papers_algorithm(wide, prompt, bits):
    keys, values = normal(2, 2, 45, 32), normal(2, 2, 45, 32, seed=1)
    running = store(wide, f"kivi({bits},4,8)", prefill=prompt)
    plain = {(b, h): PlainKivi(bits, 4, 8) for b in range(2) for h in range(2)}
    for stop in range(prompt, 46):
        begun = 0 if stop == prompt else stop - 1
        found = running.update(1, keys[:, :, begun:stop], values[:, :, begun:stop])
        for (b, h), cache in plain.items():
            for row in range(begun, stop):
                wanted = cache.step(keys[b, h, row].numpy(), values[b, h, row].numpy())
            if stop == prompt:
                wanted = keys[b, h, :stop].numpy(), values[b, h, :stop].numpy()  # The prefill reads what it computed.
            for name, one, other in zip("kv", found, wanted, strict=True):
                assert_close(one[b, h], torch.from_numpy(other), f"{name} at {stop}", ("row", "channel"), relative=1e-6)


@pytest.mark.parametrize("first", ["hadamard", "fp8(e4m3,scale=prefill)"])
def test_what_is_made_once_is_made_again_where_another_policy_makes_rows_into_others(wide, first, monkeypatch):
    """KIVI reads a row as it is while it is in the window, and rounded later: what was turned back before is not it."""
    path, tokens = f"cached+{first}+kivi(2,8,8)", list(range(3, 20))

    def decoded():
        return kv.run(wide, tokens, path, max_new_tokens=20, stop="length", logits="keep").logits

    remembering = decoded()
    monkeypatch.setattr(
        "kvinterp.policies.blocks.Settled.read",
        lambda self, held, place, upto, make: (
            held
            if upto <= place.start
            else torch.cat([make(held[:, :, : upto - place.start], place.start), held[:, :, upto - place.start :]], 2)
        ),
    )
    assert_bitwise(remembering, decoded(), path)


# fp8 -------------------------------------------------------------------------------------------------------------------


def values_of(exponent_bits, mantissa_bits, largest):
    """Every finite number of the format that is not negative, in order of its code."""
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    numbers = np.where(
        exponent > 0,
        (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias),
        mantissa / 2**mantissa_bits * 2.0 ** (1 - bias),
    )
    return numbers[numbers <= largest]


@pytest.mark.parametrize(("name", "shape"), [("e4m3", (4, 3, 448.0)), ("e5m2", (5, 2, 57344.0))])
def test_fp8_is_the_nearest_number_of_the_format(name, shape):
    numbers = values_of(*shape)
    middles = (numbers[1:] + numbers[:-1]) / 2
    given = np.concatenate([numbers, middles, np.exp2(np.linspace(-20, np.log2(shape[2]), 3000))]).astype(np.float32)
    below = np.searchsorted(numbers, given, side="right") - 1
    above = np.minimum(below + 1, len(numbers) - 1)
    up, down = numbers[above] - given, given - numbers[below]
    wanted = np.where((up < down) | ((up == down) & (below % 2 == 1)), numbers[above], numbers[below]).astype(np.float32)
    for sign in (1, -1):
        found = rounded(f"fp8({name})", torch.from_numpy(sign * given)[None, None])
        assert_close(found[0, 0], torch.from_numpy(sign * wanted), name)


@pytest.mark.parametrize(("name", "largest", "over", "lost"), [("e4m3", 448.0, 464.5, torch.nan), ("e5m2", 57344.0, 61440.0, torch.inf)])  # fmt: skip
def test_an_overflow_saturates_or_is_lost(name, largest, over, lost):
    given = torch.tensor([largest, np.nextafter(np.float32(over), np.float32(0)) if name == "e5m2" else 464.0, over, -over])
    given = given.reshape(1, 1, 1, 4)
    assert rounded(f"fp8({name})", given).flatten().tolist() == [largest, largest, largest, -largest]
    found = rounded(f"fp8({name},overflow=nonfinite)", given).flatten()
    assert torch.equal(found[:2], torch.tensor([largest, largest]))
    assert torch.equal(found[2:].isnan(), torch.tensor([lost != torch.inf] * 2))
    assert torch.equal(found[2:].isinf(), torch.tensor([lost == torch.inf] * 2))


def test_an_overflow_is_reported_where_it_first_appears(wide):
    """Only layer 1 is asked for, and only what is written after the prefill has read."""
    text = "fp8(e4m3,on=v,layers=1,scale=1e-06,overflow=nonfinite)"
    said = (
        rf"path cached\+{text}: NaN first appeared in cached values of layer 1 at step 1 in float32: .* where policy {text} "
        "made it of finite numbers"
    ).replace("(e", r"\(e").replace("te)", r"te\)")  # fmt: skip
    with pytest.raises(kv.NonFiniteError, match=said):
        kv.run(wide, [3, 17, 44, 9], f"cached+{text}", max_new_tokens=3, stop="length")
    kv.run(wide, [3, 17, 44, 9], f"cached+{text.replace('nonfinite', 'saturate')}", max_new_tokens=3, stop="length")


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("chunks", [(12,), (5, 5, 2)])
def test_a_scale_of_the_prefill_is_frozen(wide, per, chunks):
    """A later, larger key is clipped at the prefill's largest; other sequences of the batch have no say."""
    keys, running = normal(2, 2, 14, 32), store(wide, f"fp8(e4m3,scale=prefill,per={per})", prefill=12)
    keys[:, 1] *= 4
    keys[:, :, 12:] *= 100
    begun = 0
    for size in (*chunks, 1, 1):
        read, _ = running.update(0, keys[:, :, begun : begun + size], keys[:, :, begun : begun + size])
        begun += size
        if begun <= 12:
            assert_bitwise(read, keys[:, :, :begun], "what the prefill reads")
    for sequence in range(2):
        most = keys[sequence, :, :12].abs().amax((1, 2) if per == "head" else (0, 1, 2), keepdim=True)
        assert_close(
            read[sequence, :, 12:].abs().amax((1, 2), keepdim=True), most.expand(2, 1, 1), "clipped", relative=1e-6
        )
        wanted = rounded("fp8", (keys[sequence] / (most / 448))[None])[0] * (most / 448)
        assert_close(read[sequence], wanted, "rounded", relative=1e-6)


# Of all ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kivi(3)", "bits=3 was given: expected 2, 4 or 8"),
        ("hadamard(48)", "expected a power of two"),
        ("fp8(e3m4)", "format='e3m4' was given: expected 'e4m3' or 'e5m2'"),
        ("fp8(e4m3,scale=0)", "scale=0 was given: expected a number above 0, or prefill"),
        ("fp8(e4m3,per=head)", "give scale=prefill too"),
    ],
)
def test_what_no_format_has_is_said(text, said):
    with pytest.raises(kv.InputError, match=said):
        policy_named(text)
