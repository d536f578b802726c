"""Code of one's own is asked what its user asks: lengths, programs, prompts, and one request at a time where it promises no more."""

from __future__ import annotations

import pytest
import torch

import kvinterp as kv
from kvinterp.auditing.programs.outcome import REFUSED, RIGHT, WRONG
from kvinterp.errors import InputError

WEIGHTS = torch.Generator().manual_seed(3)
EMBED, MIX, HEAD = (torch.randn(*size, generator=WEIGHTS, dtype=torch.float64) for size in ((50, 16), (16, 16), (16, 50)))


def full(ids):
    """A mean over the past."""
    return _logits(EMBED[ids].cumsum(1), 1)


def step(ids, cache):
    total, count = cache or (0, 0)
    sums = EMBED[ids].cumsum(1) + total
    return _logits(sums, count + 1), (sums[:, -1:], count + ids.shape[1])


def _logits(sums, first):
    return (sums / torch.arange(first, first + sums.shape[1])[None, :, None] @ MIX).tanh() @ HEAD


def words(verdict):
    return {check.name: check.status for check in verdict.checks}


def ring(slots):
    """A step whose cache holds so many of the newest rows, where the mean is over all."""

    def one(ids, cache):
        rows, count = (EMBED[ids][:, :0], 0) if cache is None else cache
        rows = torch.cat([rows, EMBED[ids]], 1)
        logits = _logits(rows.cumsum(1)[:, -ids.shape[1] :], count + 1)
        return logits, (rows[:, -slots:], count + ids.shape[1])

    return one


def test_what_its_user_asks_is_asked():
    """A ring of 40 slots: neither calls nor lengths nor prompts were read, so that a fault from token 41 on passed."""
    kept = {"checks": "none", "lengths": (5, 12)}
    assert kv.audit(full=full, step=ring(40), **kept).exit_code == 0
    assert kv.audit(full=full, step=ring(40), **{**kept, "lengths": (5, 39)}).exit_code == 1
    assert kv.audit(full=full, step=ring(40), lengths=(5,), programs=1, calls="rows(0)+feed(38)+feed(6,1)").exit_code == 1
    assert kv.audit(full=full, step=ring(40), programs=30).exit_code == 1  # Its own lengths go further.

    seen = set()

    def noted(ids, cache):
        seen.update(map(tuple, ids.tolist()))
        return step(ids, cache)

    verdict = kv.audit(full=full, step=noted, prompts=[[7, 7, 7, 7, 7]], programs=1, rungs=("float32",))
    assert (7, 7, 7, 7, 7) in seen
    assert [note for note in verdict.notes if note.startswith("rungs: not read")], verdict.notes
    with pytest.raises(InputError, match="expected token ids from 0 to 49"):
        kv.audit(full=full, step=step, prompts=[[7, 99]])


def test_how_far_its_forward_goes_is_found():
    def short(ids):
        if ids.shape[1] > 70:
            raise IndexError("index out of range in self")
        return full(ids)

    verdict = kv.audit(full=short, step=step, programs=16)
    assert verdict.exit_code == 0
    assert "the forward without a cache takes 70 tokens at most" in verdict.notes


def one_row(ids, cache):
    if ids.shape[0] != 1:
        raise ValueError("this decoder takes one row")
    return step(ids, cache)


def one_row_asserted(ids, cache):
    assert ids.shape[0] == 1
    return step(ids, cache)


def one_token(ids, cache):
    if cache is not None and ids.shape[1] != 1:
        raise NotImplementedError("one token a step, please")
    return step(ids, cache)


@pytest.mark.parametrize(
    ("refuses", "use"), [(one_row, "batch"), (one_row_asserted, "batch"), (one_token, "several chunks")]
)
def test_what_it_says_that_it_does_not_take_is_refused(refuses, use):
    verdict = kv.audit(full=full, step=refuses, programs=16)
    assert verdict.exit_code == 0, str(verdict)
    assert words(verdict)[use] == REFUSED
    assert words(verdict)["decode step"] == RIGHT


def test_what_breaks_is_no_refusal():
    def breaks(ids, cache):
        return step(ids if ids.shape[0] == 1 else ids.view(1, -1)[:, :5].view(2, 5), cache)

    def raises(ids, cache):
        if cache is not None and cache[1] >= 10:
            raise RuntimeError("the cache holds 9 keys and should hold 10")
        return step(ids, cache)

    assert words(kv.audit(full=full, step=breaks, programs=16))["batch"] == WRONG
    assert words(kv.audit(full=full, step=raises, programs=16))["decode step"] == WRONG


def test_the_newest_logits_alone_are_judged():
    def newest(ids, cache):
        logits, cache = step(ids, cache)
        return logits[:, -1], cache

    def first(ids, cache):
        logits, cache = step(ids, cache)
        return logits[:, 0 if cache[1] > ids.shape[1] else -1], cache

    verdict = kv.audit(full=full, step=newest, programs=16)
    assert verdict.exit_code == 0, str(verdict)
    assert "step returns the newest logits alone" in str(verdict)
    wrong = kv.audit(full=full, step=first, programs=16)
    assert words(wrong)["several chunks"] == WRONG
    assert "reshape" in str(wrong)  # Its lines were run.


class Holds:
    """Code that holds its cache itself; ``stale``: a new request does not begin anew."""

    def __init__(self, stale=False):
        self.kept, self.stale = None, stale

    def step(self, ids, cache):
        if cache is None and not (self.stale and self.kept is not None):
            self.kept = None
        logits, self.kept = step(ids, self.kept)
        return logits

    def full(self, ids):
        self.kept = None
        return self.step(ids, None)


def test_code_that_holds_its_cache_promises_one_request_at_a_time():
    model = Holds()
    verdict = kv.audit(full=model.full, step=model.step, requests="one", programs=22)
    assert verdict.exit_code == 0, str(verdict)
    assert words(verdict)["fork"] == words(verdict)["another request in between"] == REFUSED
    assert words(verdict)["several chunks"] == RIGHT
    assert kv.audit(full=full, step=Holds(stale=True).step, requests="one", programs=10).exit_code == 1
    with pytest.raises(InputError, match="requests='one'"):
        kv.audit(full=full, step=model.step)
    with pytest.raises(InputError, match="would take for a new one"):
        kv.audit(full=full, step=lambda ids, cache: (model.step(ids, cache), None))

    def shared(ids, cache):
        return model.step(ids, cache), model

    said = kv.audit(full=full, step=shared, programs=22)
    assert said.exit_code == 1
    assert "requests='one'" in str(said)


def test_its_verdict_has_a_page(tmp_path):
    kv.audit(full=full, step=step, checks="none", lengths=(5,), out=tmp_path / "it")
    assert {"report.html", "verdict.json"} <= {place.name for place in (tmp_path / "it").iterdir()}
