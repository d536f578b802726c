"""Decoders in step: what each is fed, when a text is over, and what is collected. Those here are no models."""

import pytest
import torch

from kvinterp.paths.decode import Collected, fed_to_all, lockstep

VOCABULARY = 12


class Counting:
    """Chooses ``start + step`` in every row, and keeps what it was fed."""

    def __init__(self, *starts):
        self.starts, self.fed = starts, []

    def advance(self, tokens=None):
        self.fed.append(None if tokens is None else tokens.tolist())
        at = torch.tensor(self.starts) + len(self.fed) - 1
        return torch.nn.functional.one_hot(at, VOCABULARY).double()


def test_the_first_decoder_leads_all():
    decoders = [Counting(1), Counting(5)]
    shown = [(now.number, [t.tolist() for t in now.chosen]) for now in lockstep(decoders, 3)]
    assert shown == [(0, [[1], [5]]), (1, [[2], [6]]), (2, [[3], [7]])]
    assert [decoder.fed for decoder in decoders] == [[None, [1], [2]]] * 2


@pytest.mark.parametrize("follows", [(0, 1, 2), (1, 1, 0)])
def test_each_is_fed_what_the_decoder_it_follows_chose(follows):
    decoders = [Counting(1), Counting(4), Counting(7)]
    list(lockstep(decoders, 2, follows=follows))
    assert [decoder.fed for decoder in decoders] == [[None, [(1, 4, 7)[leader]]] for leader in follows]


def test_what_is_given_comes_before_what_is_chosen():
    decoder = Counting(1, 1)
    given = fed_to_all([9, 8], 1, 2, torch.device("cpu"))
    feeds = [now.feeds[0].tolist() for now in lockstep([decoder], 4, given=given)]
    assert feeds == [[9, 9], [8, 8], [3, 3], [4, 4]]
    assert decoder.fed == [None, [9, 9], [8, 8], [3, 3]], "the last is chosen and not fed"
    assert fed_to_all(None, 1, 2, torch.device("cpu")) == []


@pytest.mark.parametrize(("ended_by", "steps"), [(None, 2), ([0], 4), ([1], 2)])
def test_only_what_is_asked_ends_it(ended_by, steps):
    decoders = [Counting(1), Counting(3)]
    ran = list(lockstep(decoders, 9, follows=(0, 1), ends=torch.tensor([4]), ended_by=ended_by))
    assert len(ran) == steps


class Padded(Counting):
    """The last token stands for nothing; at step 2 it is a number, and at step 1 another token is not."""

    def advance(self, tokens=None):
        logits = super().advance(tokens)
        logits[:, -1] = -torch.inf if len(self.fed) != 3 else 0.0
        logits[0, 0] = torch.nan if len(self.fed) == 2 else 0.0
        return logits


def test_collected_by_lane_row_and_step():
    collected = Collected()
    for now in lockstep([Counting(1, 2), Padded(3, 4)], 3, follows=(0, 1)):
        collected.add(now)
    chosen, fed, sound = collected.lists()
    assert chosen[0] == [[1, 2, 3], [2, 3, 4]]
    assert chosen[1][1] == [4, 5, 6]
    assert fed == chosen
    assert sound == [[[True] * 3] * 2, [[False, False, True]] * 2], "one path's padding is no padding"
