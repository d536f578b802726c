"""Low rank: the truncated singular value decomposition of the prompt's keys and values, beside numpy's."""

import functools

import numpy as np
import pytest
import torch

import kvinterp as kv
from kvinterp.policies.low_rank import truncated
from plain import FED, forced_run
from support import PROMPT, Case, assert_bitwise, assert_close

STEPS = len(FED) + 1
CASE = Case("llama-gqa", "native", "sdpa")
KINDS = [CASE, Case("llama-mha", "bridge"), pytest.param(Case("llama3-rope", "hooked"), marks=pytest.mark.hooked)]


run = functools.partial(forced_run, record="kv", positions="all")


def matrices(trace, site, layers):
    """The prompt's rows that attention reads in the first cached step, side by side: ``[token, layer x head x head_dim]``."""
    rows = [trace.records[site, layer][1][:, : len(PROMPT)].transpose(0, 1).flatten(1) for layer in layers]
    return torch.cat(rows, 1).numpy()


def best(matrix, rank):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_at_full_rank_it_is_the_identity_to_rounding(load, case):
    model = load(case).at(torch.float64)
    for path in ("cached+low_rank(12)", "cached[chunk=5]+low_rank(64)"):
        found, plain = run(model, path), run(model, "cached")
        assert_close(found.logits, plain.logits, path, ("step", "vocab"), relative=1e-5)
        for site in ("cache_k", "cache_v"):
            read, kept = (trace.records[site, 0][-1] for trace in (found, plain))
            assert_close(read, kept, f"{site}, {path}", relative=1e-12)
            assert not torch.equal(read, kept), "the decomposition was not asked"


@pytest.mark.parametrize(("text", "groups"), [("low_rank(3)", [[0], [1]]), ("low_rank(3,2)", [[0, 1]])])
@pytest.mark.parametrize("chunk", [None, 5])
def test_what_is_read_is_the_best_of_its_rank(load, text, groups, chunk):
    """Of the prompt alone, decomposed once: every later row stays, at every step."""
    model = load(CASE).at(torch.float64)
    found, plain = run(model, kv.Cached(text, chunk=chunk)), run(model, kv.Cached(chunk=chunk))
    for layers in groups:
        for site in ("cache_k", "cache_v"):
            wanted = best(matrices(plain, site, layers), 3)
            np.testing.assert_allclose(matrices(found, site, layers), wanted, atol=1e-12)
            assert np.linalg.matrix_rank(matrices(found, site, layers), tol=1e-9) == 3
    for step in range(2, STEPS):
        for layer in range(2):
            now, first = found.records["cache_v", layer][step], found.records["cache_v", layer][1]
            assert_bitwise(now[:, : len(PROMPT)], first[:, : len(PROMPT)], f"prompt, step {step}")
    assert_bitwise(
        found.records["cache_v", 0][-1][:, len(PROMPT) :], plain.records["cache_v", 0][-1][:, len(PROMPT) :], "answer"
    )


def test_layers_of_one_token_factor_share_it():
    """Two layers of rank 2 over the same tokens are together of rank 2, and apart from one another of rank 4."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(9, 2, dtype=torch.float64, generator=generator) for _ in range(2)]

    def layer(factor):
        return (factor @ torch.randn(2, 8, dtype=torch.float64, generator=generator)).view(1, 9, 2, 4).transpose(1, 2)

    alike, apart = [layer(tokens[0]), layer(tokens[0])], [layer(tokens[0]), layer(tokens[1])]
    for given, rank, kept in ((alike, 2, True), (apart, 2, False), (apart, 4, True)):
        made = truncated(given, rank)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(made, given, strict=True)) == kept


def test_rows_that_are_let_go_of_take_nothing_from_it(load):
    """The decomposition is the prompt's; a chain that lets go of rows reads those that are left of it."""
    model = load(CASE).at(torch.float64)
    whole, thin = run(model, "cached+low_rank(3)"), run(model, "cached+low_rank(3)+sinks(2,4)")
    for step in range(1, STEPS):
        rows = thin.records["cache_positions", 0][step][0]
        assert_bitwise(thin.records["cache_v", 0][step], whole.records["cache_v", 0][step][:, rows], f"V, step {step}")
