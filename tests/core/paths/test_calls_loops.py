"""Each named program has the bits of the loop that its users write with transformers alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvinterp as kv

PROMPT = list(range(30, 46))
TOKENS = [33, 34, 35, 7, 31, 32, 9, 8]
"""What follows: some of what is drafted from the prompt is right."""
STEPS = len(TOKENS)
pytestmark = pytest.mark.bits


class Loop:
    """A transformers model, a prompt, and the tokens that follow it."""

    def __init__(self, model, trace):
        self.model, self.vocabulary = model.model, model.facts.vocabulary
        self.prompt = torch.tensor([trace.prompt])
        self.fed = [torch.tensor([[token]]) for token in trace.fed]
        self.made = []

    def cache(self):
        return DynamicCache(config=self.model.config)

    def static(self, pads=0):
        return StaticCache(config=self.model.config, max_cache_len=self.prompt.shape[1] + pads + STEPS)

    def forward(self, tokens, cache, row=0, **more):
        logits = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **more).logits
        self.made.append(logits[row, -1])
        return logits

    def others(self, token, rows, row):
        """The path's token in its row, others in the others."""
        return (token + torch.arange(rows)[:, None] - row) % self.vocabulary


def padded(loop, side="left", pads=5, cache=None):
    filler, ones = ((loop.prompt[:, :1] + 1) % loop.vocabulary).expand(1, pads), torch.ones_like(loop.prompt)
    parts = [(filler, torch.zeros_like(filler)), (loop.prompt, ones)][:: 1 if side == "left" else -1]
    tokens, mask = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    cache, at = cache or loop.cache(), -1 if side == "left" else loop.prompt.shape[1] - 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    loop.made = [loop.forward(tokens, cache, attention_mask=mask, position_ids=positions)[0, at]]
    for token in loop.fed:
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        loop.forward(token, cache, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1)


def batched(loop):
    length, row = loop.prompt.shape[1], 2
    pads = torch.tensor([2, 1, 0, 1])
    tokens = torch.cat([loop.prompt.roll(n - row, 1) for n in range(4)])
    mask = (torch.arange(length) >= pads[:, None]).long()
    cache = loop.cache()
    loop.forward(tokens, cache, row, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for step, token in enumerate(loop.fed):
        if step % 4 == 1:
            keep = torch.tensor([n for n in range(len(mask)) if n != row - 1])
            cache.batch_select_indices(keep)
            mask, row = mask[keep], row - 1
        elif step % 4 == 3:
            total, own = mask.shape[1], loop.cache()
            joined = loop.prompt.repeat(1, 2)[:, :total].roll(1, 1)
            loop.model(input_ids=joined, past_key_values=own, use_cache=True)
            for mine, theirs in zip(cache.layers, own.layers, strict=True):
                mine.keys, mine.values = torch.cat([mine.keys, theirs.keys]), torch.cat([mine.values, theirs.values])
            mask = torch.cat([mask, mask.new_ones(1, total)])
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = mask.cumsum(-1)[:, -1:] - 1
        new = loop.others(token, len(mask), row)
        loop.forward(new, cache, row, attention_mask=mask, position_ids=positions)


def forked(loop):
    cache, first = loop.cache(), loop.prompt[:, :1]
    loop.forward(loop.prompt[:, :4], cache)
    for other in (1, 2, 3):
        loop.forward((first + other) % loop.vocabulary, cache)
    cache.crop(-3)
    loop.made = []
    for tokens in (loop.prompt[:, 4:], *loop.fed):
        loop.forward(tokens, cache)


def beams(loop):
    cache, row = loop.cache(), 0
    loop.forward(loop.prompt.expand(3, -1), cache)
    for token in loop.fed:
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        row = (row + 1) % 3
        loop.forward(loop.others(token, 3, row), cache, row)


def verified(loop, count=3, chunk=None):
    cache, text, left = loop.cache(), loop.prompt, list(loop.fed)
    for piece in text.split(chunk or text.shape[1], 1):
        last = loop.forward(piece, cache)[0, -1]
    loop.made = [last]
    while left:
        text = torch.cat([text, left.pop(0)], 1)
        newest, before = int(text[0, -1]), text[0, :-1].tolist()
        found = text[0, len(before) - before[::-1].index(newest) :][:count].tolist() if newest in before else []
        found += [(newest + more) % loop.vocabulary for more in range(1, count - len(found) + 1)]
        drafts = torch.tensor([found])
        logits = loop.forward(torch.cat([text[:, -1:], drafts], 1), cache)
        loop.made[-1:], right = [logits[0, 0]], 0
        while right < count and left and int(left[0]) == found[right]:
            text = torch.cat([text, left.pop(0)], 1)
            right += 1
            loop.made.append(logits[0, right])
        cache.crop(right - count)


def chunked(loop):
    cache = loop.cache()
    for piece in loop.prompt.split(4, 1):
        loop.made = []
        loop.forward(piece, cache)
    for token in loop.fed:
        loop.forward(token, cache)


def static(loop):
    cache = loop.static()
    for tokens in (loop.prompt, *loop.fed):
        loop.forward(tokens, cache)


def generated(loop, **more):
    looking_up = "get_candidates"

    def forced(text, scores):
        at = text.shape[1] - len(PROMPT)
        # What is only looked up is free.
        if at >= STEPS or looking_up in {frame.function for frame in inspect.stack()}:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(TOKENS[at]), 0.0)

    made = loop.model.generate(
        loop.prompt, max_new_tokens=STEPS + 1, logits_processor=[forced], do_sample=False, output_logits=True, return_dict_in_generate=True,
        eos_token_id=loop.vocabulary, pad_token_id=0, attention_mask=torch.ones_like(loop.prompt), **more,
    )  # fmt: skip
    loop.made = [logits[0] for logits in made.logits][:STEPS]


LOOPS = {
    "padded(left,5)": padded,
    "padded(right,5)": lambda loop: padded(loop, "right"),
    "padded(left,5)+static": lambda loop: padded(loop, cache=loop.static(5)),
    "batched(4)": batched,
    "forked(4)": forked,
    "beams(3)": beams,
    "verified(3)": verified,
    "verified(2)+chunked(5)": lambda loop: verified(loop, 2, 5),
    "chunked(4)": chunked,
    "static": static,
    "generate": generated,
    "assisted(3)": lambda loop: generated(loop, prompt_lookup_num_tokens=3),
}


@pytest.mark.parametrize("plan", LOOPS)
def test_a_plan_is_its_plain_loop_to_the_bit(plan):
    model = kv.load_model("zoo:gqa2-mini", dtype="float32", kind="native")
    trace = kv.run(model, PROMPT, f"cached[call={plan}]", continuation=TOKENS, max_new_tokens=STEPS, logits="keep")
    loop = Loop(model, trace)
    with torch.no_grad():
        LOOPS[plan](loop)
    assert torch.equal(torch.stack(loop.made), trace.logits)
    if "verified" in plan or "assisted" in plan:
        assert trace.provenance["witness"]["drafts accepted"] > 0
        assert trace.provenance["witness"]["drafts rejected"] > 0
