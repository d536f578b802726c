"""Reports of models and caches that somebody wrote from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reported.report import OwnCode, Report, apart, text

Cache = dict[str, Any]


class Decoder(nn.Module):
    """Two layers of attention with rotary positions; keys and values are appended to a cache of one's own.

    Args:
        fault: Whether the fault that was reported is in it.
        window: How many tokens a query sees, itself included; None for all.
    """

    heads, size = 4, 8

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__()
        self.fault, self.window, width = fault, window, self.heads * self.size
        self.tokens, self.head = nn.Embedding(99, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        start = self.start(cache)
        positions, x = torch.arange(start, start + ids.shape[1]), self.embedded(ids, start)
        saved = []
        for n, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            q, k, v = (part.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            q, (k, v, kept) = (
                self.turned(q, positions),
                self.stored(k, v, positions, None if cache is None else cache["kv"][n]),
            )
            mixed = self.attended(q, k, v, cache, positions)
            x = x + mix(mixed.transpose(1, 2).flatten(2))
            saved.append(kept)
        return self.head(x), {"kv": saved, "length": self.counted(ids, cache)}

    def start(self, cache: Cache | None) -> int:
        """The position of the first new token."""
        return 0 if cache is None else cache["length"]

    def counted(self, ids: Tensor, cache: Cache | None) -> int:
        """The position behind the last new token."""
        return self.start(cache) + ids.shape[1]

    def embedded(self, ids: Tensor, start: int) -> Tensor:
        """What enters the first layer."""
        return self.tokens(ids)

    def angles(self, positions: Tensor) -> Tensor:
        """Rotary angles, `[position, half of a head]`."""
        return positions[:, None] * 0.1 ** torch.arange(self.size // 2)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys `[row, head, position, size]`, rotated."""
        angles, (a, b) = self.angles(positions), x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        """Keys and values for attention, and what the cache keeps of them."""
        k = self.turned(k, positions)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        return k, v, (k, v)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        """Attention."""
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen(q.shape[2], k.shape[2]))

    def seen(self, new: int, columns: int) -> Tensor:
        """Which of the columns each new token sees; the newest column is the newest token's own."""
        before = columns - new
        sees = torch.ones(new, columns, dtype=torch.bool).tril(before)
        return sees if self.window is None else sees.triu(before - self.window + 1)


class TopLeft(Decoder):
    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        if self.fault:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().attended(q, k, v, cache, positions)


class SquareMask(Decoder):
    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) / self.size**0.5
        if q.shape[2] > 1:
            length = q.shape[2]
            mask = torch.full((length, length), -torch.inf).triu(1) if self.fault else None
            sees = self.seen(length, k.shape[2])
            scores = scores + (
                torch.zeros_like(sees, dtype=scores.dtype).masked_fill(~sees, -torch.inf) if mask is None else mask
            )
        return scores.softmax(-1) @ v


class OffsetTwice(Decoder):
    def counted(self, ids: Tensor, cache: Cache | None) -> int:
        length = super().counted(ids, cache)
        return length + ids.shape[1] if self.fault and cache is None else length


class TurnedAgain(Decoder):
    """Keys are normalised and rotated together with those from the cache, which were before."""

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        def normed(x: Tensor) -> Tensor:
            return x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()

        if not self.fault:
            return super().stored(normed(k), normed(v), positions, kept)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        k, v = self.turned(normed(k), torch.arange(k.shape[2])), normed(v)
        return k, v, (k, v)


class FirstNotStored(Decoder):
    """The cached prompt is fed token by token; the first one's keys and values never reach the cache."""

    def step(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        logits = []
        for token in ids.split(1, 1):
            new = cache is None
            out, cache = self(token, cache)
            if new and self.fault:
                cache["kv"] = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache["kv"]]
            logits.append(out)
        assert cache is not None
        return torch.cat(logits, 1), cache


class AnglesByLength(Decoder):
    """Angles are kept under the number of positions, and not under where these begin."""

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__(fault, window)
        self.known: dict[Any, Tensor] = {}

    def angles(self, positions: Tensor) -> Tensor:
        key = len(positions) if self.fault else (len(positions), int(positions[0]))
        return self.known.setdefault(key, super().angles(positions))


class CountsHeads(Decoder):
    def counted(self, ids: Tensor, cache: Cache | None) -> int:
        return self.start(cache) + (self.heads if self.fault else ids.shape[1])


class WindowCutFirst(Decoder):
    """The cache is cut to the window before the new tokens attend."""

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        k, v, _ = super().stored(k, v, positions, kept)
        assert self.window is not None
        left = self.window if self.fault and kept is not None else self.window + len(positions) - 1
        k, v = k[:, :, -left:], v[:, :, -left:]
        return k, v, (k[:, :, -self.window :], v[:, :, -self.window :])

    def seen(self, new: int, columns: int) -> Tensor:
        return (
            super().seen(new, columns) if columns >= new else torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        )


class WindowOfItsOwnRows(Decoder):
    def seen(self, new: int, columns: int) -> Tensor:
        sees = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
        assert self.window is not None
        return sees.triu((0 if self.fault else columns - new) - self.window + 1)


class Chunked(Decoder):
    """Attention within chunks of eight positions; the buffer grows in steps and its front is trimmed."""

    chunk, block = 8, 6

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        k = self.turned(k, positions)
        if kept is None and not self.fault:
            return (
                k,
                v,
                (k[:, :, -self.chunk :], v[:, :, -self.chunk :], len(positions), max(len(positions) - self.chunk, 0)),
            )
        empty = k.new_zeros(*k.shape[:2], 0, k.shape[3])
        keys, values, end, first = kept or (empty, empty, 0, 0)
        held = keys.shape[2] if self.fault else end - first
        if held >= self.chunk:
            first += held - self.chunk
            keys, values = keys[:, :, :held][:, :, -self.chunk :], values[:, :, :held][:, :, -self.chunk :]
        new = end - first + len(positions)
        room = -(-new // self.block) * self.block - keys.shape[2]
        if room > 0:
            more = k.new_zeros(*k.shape[:2], room, k.shape[3])
            keys, values = torch.cat([keys, more], 2), torch.cat([values, more], 2)
        keys, values = keys.clone(), values.clone()
        at = max(end - first, 0)
        keys[:, :, at : at + len(positions)], values[:, :, at : at + len(positions)] = k, v
        end += len(positions)
        return keys[:, :, :new], values[:, :, :new], (keys, values, end, first)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        columns = torch.arange(int(positions[-1]) + 1 - k.shape[2], int(positions[-1]) + 1)
        same = positions[:, None] // self.chunk == columns // self.chunk
        sees = same & (columns <= positions[:, None])
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)


class PositionStays(Decoder):
    """Learned positions; where the last cached call ended is left on the module, and a call without a cache begins there."""

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__(fault, window)
        self.places, self.current = nn.Embedding(512, self.heads * self.size), 0

    def embedded(self, ids: Tensor, start: int) -> Tensor:
        return self.tokens(ids) + self.places((start + torch.arange(ids.shape[1])) % 512)

    def full(self, ids: Tensor) -> Tensor:
        begin = {"length": self.current, "kv": [None, None]} if self.fault else None
        return self(ids, begin)[0]

    def step(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        logits, cache = self(ids, cache)
        self.current = cache["length"]
        return logits, cache


class BuffersStay(Decoder):
    """Buffers of a fixed size; those of the last prompt are taken for the next one, and what they hold is not hidden."""

    room = 512

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__(fault, window)
        self.last: list[Any] = [None, None]
        self.turn, self.cached = 0, False

    def step(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        self.cached = True
        try:
            return self(ids, cache)
        finally:
            self.cached = False

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        if not self.cached:
            return super().stored(k, v, positions, kept)
        k, at = self.turned(k, positions), int(positions[0])
        n, self.turn = self.turn, 1 - self.turn
        if kept is None:
            before = self.last[n] if self.fault and self.last[n] is not None and len(self.last[n][0]) == len(k) else None
            blank = k.new_zeros(*k.shape[:2], self.room, k.shape[3])
            kept = before or (blank, blank, 0)
        keys, values, filled = kept[0].clone(), kept[1].clone(), max(kept[2], at + len(positions))
        keys[:, :, at : at + len(positions)], values[:, :, at : at + len(positions)] = k, v
        self.last[n] = (keys, values, filled)
        return keys[:, :, :filled], values[:, :, :filled], (keys, values, filled)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        columns, end = torch.arange(k.shape[2]), int(positions[-1])
        sees = (columns <= positions[:, None]) | (columns > end)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)


class RelativeFromZero(Decoder):
    """A learned embedding of the distance between query and key; the queries of a cached step are counted from 0."""

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__(fault, window)
        self.distance = nn.Embedding(513, self.size)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        new, columns = q.shape[2], k.shape[2]
        rows = torch.arange(new) + (0 if self.fault else columns - new)
        near = self.distance((rows[:, None] - torch.arange(columns)).clamp(-256, 256) + 256)
        scores = (q @ k.transpose(2, 3) + torch.einsum("bhqd,qkd->bhqk", q, near)) / self.size**0.5
        return scores.masked_fill(~self.seen(new, columns), -torch.inf).softmax(-1) @ v


class PromptUnmasked(Decoder):
    """The causal mask is left out wherever there is a cache, and the prompt is fed with an empty one."""

    def full(self, ids: Tensor) -> Tensor:
        return self(ids)[0]

    def step(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        return self(ids, {"kv": [None, None], "length": 0} if cache is None else cache)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        sees = None if self.fault and cache is not None else self.seen(q.shape[2], k.shape[2])
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)


class Ring(Decoder):
    """A window in a ring of slots, fed token by token; which slots count is asked of the slot, and not of its position."""

    def step(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        assert self.window is not None
        logits = []
        for token in ids.split(1, 1):
            start = self.start(cache)
            row = token.new_zeros(len(token), self.heads, self.window, self.size).to(self.head.weight)
            cache = cache or {"kv": [(row, row)] * 2, "length": 0}
            out, cache = self(token, {"kv": cache["kv"], "length": start})
            logits.append(out)
        assert cache is not None
        return torch.cat(logits, 1), cache

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        if kept is None:
            return super().stored(k, v, positions, kept)
        keys, values, slot = kept[0].clone(), kept[1].clone(), int(positions[0]) % kept[0].shape[2]
        keys[:, :, slot : slot + 1], values[:, :, slot : slot + 1] = self.turned(k, positions), v
        return keys, values, (keys, values)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        if cache is None:
            return super().attended(q, k, v, cache, positions)
        position = int(positions[0])
        last = position % k.shape[2] if self.fault else position
        sees = (torch.arange(k.shape[2]) <= last)[None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)


class PrefixStore(nn.Module):
    """A recurrent model whose states are kept for blocks of four tokens and taken for the next prompt that begins alike.

    A part of a prompt that ends within a block leaves its state for that block, which counts as whole once its tokens are there.
    """

    block = 4

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.tokens, self.inner, self.head = nn.Embedding(99, 32), nn.Linear(32, 32), nn.Linear(32, 99)
        self.store: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def scanned(self, ids: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for x in self.tokens(ids):
            state = (0.8 * state + self.inner(x)).tanh()
            states.append(state)
        return self.head(torch.stack(states)), states

    def full(self, ids: Tensor) -> Tensor:
        return torch.stack([self.scanned(row, self.head.weight.new_zeros(32))[0] for row in ids])

    def step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, rows = [], []
        for n, row in enumerate(ids):
            before, state, partial = ((), self.head.weight.new_zeros(32), None) if cache is None else cache[n]
            known = self.hit(tuple(row.tolist())) if cache is None else ()
            head = [self.store[known[: end + self.block]][1] for end in range(0, len(known), self.block)]
            state = self.store[known][0] if known else state
            out, states = self.scanned(row[len(known) :], state)
            logits.append(torch.cat([*head, out]))
            text = before + tuple(row.tolist())
            partial = self.saved(text, len(before) + len(known), states, torch.cat([*head, out]), partial)
            rows.append((text, states[-1], partial))
        return torch.stack(logits), rows

    def hit(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """The longest run of blocks at the text's beginning that is stored, and leaves a token to compute."""
        end = 0
        while end + self.block < len(text) and text[: end + self.block] in self.store:
            end += self.block
        return text[:end]

    def saved(self, text: tuple[int, ...], start: int, states: list[Tensor], logits: Tensor, partial: Any) -> Any:
        """Stores the blocks that this part completes; returns what it leaves of the block in which it ends."""
        for end in range(self.block, len(text) + 1, self.block):
            if end <= start or text[:end] in self.store:
                continue
            inside = end - self.block >= start
            first = end - self.block - (len(text) - len(logits))
            if inside:
                self.store[text[:end]] = (states[end - start - 1], logits[first : first + self.block])
            elif partial is not None:
                earlier, said = partial
                rest = logits[: self.block - len(said)]
                state = earlier if self.fault else states[end - start - 1]
                self.store[text[:end]] = (state, torch.cat([said, rest]))
        left = len(text) % self.block
        return (states[-1], logits[-left:]) if 0 < left <= len(logits) and left <= len(text) - start else None


def own(kind: type[nn.Module], window: int | None = None) -> Callable[[bool], OwnCode]:
    """Builds a decoder as two functions."""

    def build(fault: bool) -> OwnCode:
        torch.manual_seed(0)
        model = kind(fault, window).eval()
        full = getattr(model, "full", lambda ids: model(ids)[0])
        return OwnCode(full, getattr(model, "step", model))

    return build


def of_steps(*parts: int) -> Callable[[OwnCode], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: OwnCode) -> float:
        ids, cache, got = text(1, sum(parts)), None, []
        for part in ids.split(parts, 1):
            logits, cache = model.step(part, cache)
            got.append(logits)
        return apart(torch.cat(got, 1), model.full(ids))

    return shows


@torch.no_grad()
def shows_in_the_next_request(model: OwnCode) -> float:
    ids = text(1, 9)
    want = model.full(ids)
    _, cache = model.step(text(1, 20, seed=2), None)
    model.step(text(1, 1, seed=3), cache)
    got, _ = model.step(ids, None)
    return max(apart(got, want), apart(model.full(ids), want))


@torch.no_grad()
def shows_raised(model: OwnCode) -> float:
    try:
        return of_steps(7, 3, 1)(model)
    except RuntimeError:
        return 1.0


@torch.no_grad()
def shows_in_a_prompt_that_begins_alike(model: OwnCode) -> float:
    ids = text(1, 9)
    want = model.full(ids)
    _, cache = model.step(ids[:, :3], None)
    model.step(ids[:, 3:], cache)
    got, _ = model.step(ids[:, :7], None)
    return apart(got, want[:, :7])


REPORTS = {
    "top left": Report(
        "lucidrains/x-transformers#187",
        "2023-09",
        "with a cache a single query sees the first key alone: is_causal is aligned to the upper left",
        own(TopLeft),
        of_steps(9, 1, 1),
    ),
    "prompt unmasked": Report(
        "Mikyx-1/TinyLLM#17",
        "2026-07",
        "generation is garbage at a low loss: the prompt is fed with an empty cache, and then without a causal mask",
        own(PromptUnmasked),
        of_steps(9, 1, 1),
    ),
    "square mask": Report(
        "meta-llama/llama#899",
        "2023-11",
        "a second part of a prompt raises: the mask is square, the scores are not",
        own(SquareMask),
        shows_raised,
    ),
    "offset twice": Report(
        "skyzh/tiny-llm#46",
        "2025-08",
        "the first decode step moves the offset on by the prompt's length once more",
        own(OffsetTwice),
        of_steps(9, 1, 1),
    ),
    "turned again": Report(
        "google-deepmind/gemma#368",
        "2025-08",
        "Gemma 3n: a text begins well and turns to gibberish; cached keys are normalised and rotated again at every step",
        own(TurnedAgain),
        of_steps(9, 1, 1),
    ),
    "first not stored": Report(
        "TrenTorch/TrenTorch#192",
        "2026-09",
        "the first token's keys and values stay zero in the cache",
        own(FirstNotStored),
        of_steps(9, 1, 1),
    ),
    "angles by length": Report(
        "lucidrains/rotary-embedding-torch#11",
        "2023-08",
        "rotary angles are memoised by length without their offset",
        own(AnglesByLength),
        of_steps(9, 1, 1),
    ),
    "counts heads": Report(
        "fla-org/flash-linear-attention#126",
        "2025-01",
        "the cache counts heads where it should count tokens",
        own(CountsHeads),
        of_steps(9, 1, 1),
    ),
    "window cut first": Report(
        "rasbt/LLMs-from-scratch#1008",
        "2026-04",
        "sliding window: the first of several new tokens misses a part of its window",
        own(WindowCutFirst, 8),
        of_steps(10, 3, 3),
    ),
    "window of its rows": Report(
        "trymirai/lalamo#200",
        "2026-04",
        "sliding window: the mask counts a chunk's own rows, so single tokens see all of the past",
        own(WindowOfItsOwnRows, 8),
        of_steps(9, *[1] * 6),
    ),
    "padded buffer": Report(
        "ml-explore/mlx-lm#1673, Blaizzy/mlx-vlm#2031",
        "2026-08",
        "Llama 4: the chunked cache is trimmed by the width of its buffer, which is more than it holds",
        own(Chunked),
        of_steps(5, *[1] * 12),
    ),
    "position stays": Report(
        "rasbt/LLMs-from-scratch#1048",
        "2026-07",
        "after a cached call one without a cache goes on from its position",
        own(PositionStays),
        shows_in_the_next_request,
    ),
    "buffers stay": Report(
        "Lightning-AI/litgpt#1595, #1596",
        "2024-07",
        "the second prompt's answer is strange: the cache was not cleared between two",
        own(BuffersStay),
        shows_in_the_next_request,
    ),
    "relative from zero": Report(
        "huggingface/transformers#19045, #20203",
        "2022-11",
        "BERT with relative keys: with a cache the query's distance is counted from 0",
        own(RelativeFromZero),
        of_steps(9, 1, 1),
    ),
    "ring": Report(
        "quic/efficient-transformers#1235",
        "2026-08",
        "Gemma 4: endless repetition behind the window; which slots of the ring count is asked of the wrapped position",
        own(Ring, 8),
        of_steps(5, *[1] * 12),
    ),
    "prefix store": Report(
        "vllm-project/vllm#34587",
        "2026-02",
        "Mamba: a prompt in parts leaves a block's state half-way, and a later prompt that begins alike takes it",
        own(PrefixStore),
        shows_in_a_prompt_that_begins_alike,
    ),
}
