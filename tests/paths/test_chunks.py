"""Where a prompt is cut."""

import pytest
import torch

from kvinterp.paths.chunks import in_chunks


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(None, [7]), (1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (9, [7])], ids=lambda value: str(value)
)
def test_every_piece_but_the_last_is_a_chunk(chunk, sizes):
    tokens = torch.arange(14).reshape(2, 7)
    pieces = in_chunks(tokens, chunk)
    assert [piece.shape[1] for piece in pieces] == sizes
    assert torch.equal(torch.cat(pieces, 1), tokens)
