"""``generate``: the library's own loop, on the cache that the program has filled, or on one of its
own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.lines import BEAMS, GENERATED, SEEN, arguments
from kvinterp.auditing.programs.program import MASKS, Operation
from kvinterp.auditing.programs.running import PADDED, Run
from kvinterp.auditing.programs.subject import Subject, apart
from kvinterp.common.checks import check_known
from kvinterp.models.transformer_lens_api import generate, unequal

ON_THE_CACHE = {
    "whole": "given the whole text",
    "new": "given the new tokens alone",
    "chunks": "prefilled in chunks",
}
APART = {
    "beams": "beam search",
    "assistant": "assisted decoding",
    "lookup": "prompt lookup",
    "static": "StaticCache of generate()",
    "uncached": "generate() without a cache",
    "embeds": "generate() from embeddings",
    "beside": "generate() from embeddings beside other ids",
    "sampled": "sampling",
    "sampled_assistant": "sampled assisted decoding",
    "ends": "generate(), rows that end before others",
}
UNEQUAL = {"texts": "generate() of texts", "padded": "generate() of padded tokens without a mask"}
"""How users of TransformerLens give prompts of several lengths to its ``generate()``, which finds
the pads or does not.
"""
HOW = (*ON_THE_CACHE, *APART, *UNEQUAL)
CHUNK, DRAFTS, WEAKER = 2, 3, 0.2
"""Tokens of a chunk; drafts that are looked up; how far an assistant's head is from the model's."""
ASSISTANT = (
    "assistant = copy.deepcopy(model)",
    "head = assistant.get_output_embeddings().weight",
    "noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))",
    f"head.add_({WEAKER} * head.std() * noise.to(head))",
)
"""How the assistant is made, in lines of Python: as :meth:`Generate._assistant` does."""
DRAFTING, EMBEDDED = ("assistant", "lookup", "sampled_assistant"), ("embeds", "beside")
SPARE = 8
"""Columns that drafts may need behind the last."""


@dataclasses.dataclass(frozen=True)
class Generate(Operation):
    """``generate()`` goes on with new columns.

    Attributes:
        width: New columns of the prompt.
        count: Tokens that are generated.
        how: One of :data:`HOW`: on the program's cache, given the whole text, the new tokens alone,
            or prefilled in chunks; or
            with the whole text on a cache of its own: beams, an assistant model, drafts looked up
            in the prompt, a static cache, none; from the embeddings of the whole text, or those
            beside other ids, which are not to be read; with tokens that are sampled, two texts of
            each row, or of drafts; with a token that ends some rows before others; or of
            TransformerLens's own models unequal prompts as texts, or padded and without a mask.
        drafts: How many are looked up at a time.
    """

    width: int
    count: int
    how: str = "whole"
    drafts: int = dataclasses.field(default=DRAFTS, kw_only=True)
    weight = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("how of generate", self.how, HOW)

    @classmethod
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Generate:
        """The program's cache more often."""
        drafting = [] if rows > 1 else ["assistant", "lookup"]
        others = ["beams", "static", "sampled", *drafting, *["ends"] * (rows > 1)]
        how = draw.choice(["whole", "whole", "new", "chunks", draw.choice(others)])
        return cls(draw.randint(1, 4), draw.randint(2, 4) + 2 * (how in APART), how)

    def offered(self, run: Run) -> bool:
        """Where ``generate()`` takes it and there is room."""
        subject, width = run.subject, max(self.width, max(run.pads, default=0) + 1)
        if not subject.generates or self.how in subject.no_generate:
            return False
        if run.program.rows.told == "mask_alone" and any(run.program.rows.pads):
            return False  # generate() counts positions, which a forward given the mask alone does not go on from.
        rows = run.program.rows
        if rows.told in MASKS or rows.fed == "types" or rows.kept(1) is not None:
            return False  # It makes masks and types itself, and asks for the last logits.
        if rows.fed == "embeds" and (self.how in ("new", "chunks") or self.how in DRAFTING):
            return False  # Drafts are looked up among ids, and transformers cuts ids alone into chunks.
        if run.ids.shape[1] + width + self.count + SPARE > run.max_columns:
            return False
        if not subject.native:
            takes = inspect.signature(run.model.generate).parameters
            whole = self.how == "whole" and (
                "attention_mask" in takes or not any(run.program.rows.pads)
            )
            texts = self.how == "texts" and getattr(run.model, "tokenizer", None) is not None
            return (whole or texts or self.how == "padded") and not run.filled
        if subject.kind is not None and self.how in ("static", "uncached"):
            return False
        # What drafts and chunks leave of a cache that loses is another's by its own right.
        if subject.lossy and (self.how == "chunks" or self.how in DRAFTING):
            return False
        if self.how in UNEQUAL:
            return False
        if self.how == "static":
            return subject.adapter.takes_static
        if self.how in EMBEDDED or rows.fed == "embeds":
            return (
                "inputs_embeds"
                in inspect.signature(subject.model.prepare_inputs_for_generation).parameters
            )
        if self.how == "ends":
            return len(run.texts) > 1
        if self.how in DRAFTING:
            return len(run.texts) == 1 and not subject.stateful
        return self.how != "new" or super().offered(run)

    @property
    def columns(self) -> int:
        """What it is given, and what it generates but the last."""
        return self.width + self.count - 1

    def do(self, run: Run) -> None:
        """Generates, and judges the logits of every new token."""
        name = (APART | UNEQUAL).get(self.how, "generate()")
        if self.how in ON_THE_CACHE and super().offered(run):
            name = f"generate() on a filled cache, {ON_THE_CACHE[self.how]}"
        elif self.how in ON_THE_CACHE and self.how != "whole":
            name = f"generate(), {ON_THE_CACHE[self.how]}"
        back = run.aside()
        ids, mask = run.columns(max(self.width, max(run.pads, default=0) + 1))
        texts: list[str] | None = None
        if self.how in UNEQUAL:
            texts, run.texts, pad = unequal(run.model, run.texts, self.how)
            ids, mask = map(run.subject.tensor, padded_left(run.texts, pad))
        full, prompt = torch.cat([run.mask, mask], 1), torch.cat([run.ids, ids], 1)
        padded = bool((full == 0).any())
        name = f"{name}, {run.program.rows.ways}".removesuffix(", ")
        needed = padded or run.program.rows.told != "needed" or self.how == "new"
        # Without a mask generate() takes a pad token in the text, or one that it generated before,
        # for a pad.
        needed = needed or run.lines.named or run.program.rows.tokens != "plain"
        # An encoder-decoder's generate() makes no mask of its own, by which it tells old columns
        # from new ones.
        needed = needed or (run.filled and "source" in run.subject.reads(run.begins))
        attention_mask = full if needed and "attention_mask" in run.subject.takes else None
        name = f"{name}{PADDED}" if padded else name
        end = None
        if self.how == "ends":
            # What the model raises it raises below too, where its lines are written.
            with contextlib.suppress(Exception):
                end = self._end(run, prompt, attention_mask)
                if end is None:
                    back()  # No token ends one row before another.
                    return
        if self.count > 1:
            run.tries("decode step")
        run.tries(name)
        lengths = [len(text) for text in run.texts]
        given: Any = prompt if texts is None else texts
        run.pending, run.without = (
            (ids, mask),
            lambda: self._uncached(run, given, attention_mask, lengths),
        )
        if run.subject.native and self.how in ON_THE_CACHE:
            self._on_the_cache(run, ids, mask, ids if self.how == "new" else prompt, attention_mask)
            return
        if run.subject.native:
            self._apart(run, ids, mask, prompt, attention_mask, end)
        else:
            self._by_transformer_lens(run, ids, mask, attention_mask if padded else None, given)
        back()

    def _end(self, run: Run, prompt: Tensor, attention_mask: Tensor | None) -> int | None:
        """A token with which one row ends two tokens or more before another does; None where all go
        on alike.
        """
        new = (
            run.subject.generate(prompt, self.count, attention_mask, begins=run.begins)
            .sequences[:, -self.count :]
            .tolist()
        )
        first = {token: [[*row, token].index(token) for row in new] for row in new for token in row}
        apart = (token for token, ends in first.items() if max(ends) - min(ends) > 1)
        return next(apart, None)

    @staticmethod
    def _took(
        run: Run, ids: Tensor, mask: Tensor, new: Tensor, logits: Tensor, end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Judges new tokens, of each row up to its end, and gives the columns that were fed: all
        but the last.
        """
        ends = [
            min([*row, end].index(end) + 1, len(row)) if end is not None else len(row)
            for row in new.tolist()
        ]
        for text, row, n in zip(run.texts, new.tolist(), ends, strict=True):
            text += row[: n - 1]
        real = (
            torch.arange(new.shape[1] - 1, device=new.device)
            < torch.tensor(ends, device=new.device)[:, None] - 1
        )
        fed = torch.cat([ids, new[:, :-1]], 1), torch.cat([mask, real.to(mask)], 1)
        run.judge(logits[:, : new.shape[1]], *fed, last=True, ends=ends)
        return fed

    def _on_the_cache(
        self, run: Run, ids: Tensor, mask: Tensor, prompt: Tensor, attention_mask: Tensor | None
    ) -> None:
        run.turn()
        run.turns_next = self.count > 1
        run.reaches(at_once=ids.shape[1] if run.filled and self.how != "chunks" else 0)
        more = {"prefill_chunk_size": CHUNK} if self.how == "chunks" else {}
        whole = run.lines.columns(run.ids, ids)
        self._write(
            run,
            whole,
            f"torch.tensor({ids.tolist()})" if self.how == "new" else whole,
            attention_mask,
            more,
        )
        out = run.subject.generate(
            prompt, self.count, attention_mask, run.cache, begins=run.begins, **more
        )
        fed = self._took(
            run, ids, mask, out.sequences[:, -self.count :], torch.stack(out.logits, 1)
        )
        from kvinterp.models.transformers_cache import returned_cache

        name, made = returned_cache(out, run.subject.adapter.takes)
        run.lines += [f"cache = out.{name}"] if run.cache is None and made is not None else []
        if self is not run.program.steps[-1]:
            new = f"torch.cat([{whole}, out.sequences[:, -{self.count}:-1]], 1)"
            parted = self.how == "new" or self._embeds(run)
            run.lines.append(f"ids = {new if parted else 'out.sequences[:, :-1]'}")
            run.lines.named = True
        run.took(*fed, run.cache if run.cache is not None else made)

    def _apart(
        self,
        run: Run,
        ids: Tensor,
        mask: Tensor,
        prompt: Tensor,
        attention_mask: Tensor | None,
        end: int | None,
    ) -> None:
        known: dict[str, dict[str, Any]] = {
            "beams": {"num_beams": 2, "num_return_sequences": 2},
            "lookup": {"prompt_lookup_num_tokens": self.drafts},
            "static": {"cache_implementation": "static"},
            "uncached": {"use_cache": False},
            "sampled": {"do_sample": True, "num_return_sequences": 2},
            "sampled_assistant": {"do_sample": True},
            "ends": {"eos_token_id": end, "pad_token_id": run.subject.pad, "min_new_tokens": 0},
        }
        given = known.get(self.how, {})
        whole = run.lines.columns(run.ids, ids)
        self._write(run, whole, whole, attention_mask, given)
        given |= self._embedded(run, prompt)
        with contextlib.ExitStack() as aside:
            if given.get("do_sample"):
                aside.enter_context(
                    torch.random.fork_rng(
                        [run.subject.device] if run.subject.device.type == "cuda" else []
                    )
                )
                torch.manual_seed(0)
            if self.how in ("assistant", "sampled_assistant"):
                aside.enter_context(run.subject.adapter.own_state([]))
                given["assistant_model"] = self._assistant(run.model)
            out = run.subject.generate(
                prompt, self.count, attention_mask, begins=run.begins, **given
            )
        logits = torch.stack(out.logits, 1)
        new = out.sequences[:, -logits.shape[1] if self.how == "ends" else -self.count :]
        if self.how == "beams":
            beams = out.beam_indices[:, : new.shape[1]].tolist()
            logits = torch.stack(
                [torch.stack([logits[beam, t] for t, beam in enumerate(row)]) for row in beams]
            )
        each = len(new) // len(run.texts)
        run.goes_on_as([row for row in range(len(run.texts)) for _ in range(each)])
        self._took(
            run, ids.repeat_interleave(each, 0), mask.repeat_interleave(each, 0), new, logits, end
        )

    def _by_transformer_lens(
        self, run: Run, ids: Tensor, mask: Tensor, attention_mask: Tensor | None, given: Any
    ) -> None:
        """TransformerLens's own loop, on a cache of its own."""
        self._write_transformer_lens(run, given, attention_mask)
        made, forwards = self._looped(run, given, self.count, "yes", attention_mask)
        logits = torch.stack([forward.logits for forward in forwards], 1)
        self._took(run, ids, mask, made[:, ids.shape[1] :], logits)

    def _looped(
        self, run: Run, given: Any, count: int, cached: str, attention_mask: Tensor | None
    ) -> Any:
        found = self.how in UNEQUAL
        return generate(
            run.model,
            given,
            count,
            cached,
            None if found else attention_mask,
            "yes" if found else "no",
        )

    def _uncached(
        self, run: Run, prompt: Any, attention_mask: Tensor | None, lengths: list[int]
    ) -> float:
        """How far the first logits of ``generate(use_cache=False)`` are from the plain forward."""
        subject = run.subject
        if subject.native:
            with subject.running():
                given = self._embedded(run, prompt)
                begins = run.begins[:: max(1, len(run.texts) // len(prompt))]
                logits = subject.generate(
                    prompt, self.count, attention_mask, begins=begins, use_cache=False, **given
                ).logits[0]
        else:
            logits = self._looped(run, prompt, 1, "no", attention_mask)[1][0].logits
        if self.how == "beside":
            # Where the other ids are what is read, the embeddings are not, and no cache is asked
            # about.
            full = torch.ones_like(prompt) if attention_mask is None else attention_mask
            read = [
                row[kept.bool()].tolist() for row, kept in zip(prompt.roll(1, 1), full, strict=True)
            ]
            if all(
                apart(made, subject.alone(text)[-1]) <= subject.limit
                for made, text in zip(logits, read, strict=True)
            ):
                return 0.0
        each = max(1, len(run.texts) // len(prompt))
        texts = [text[:length] for text, length in zip(run.texts[::each], lengths, strict=True)]
        return max(
            apart(made, subject.alone(text)[-1]) for made, text in zip(logits, texts, strict=True)
        )

    def _embedded(self, run: Run, prompt: Tensor) -> dict[str, Any]:
        if not self._embeds(run):
            return {}
        beside = {"beside": prompt.roll(1, 1)} if self.how == "beside" else {}
        return {"inputs_embeds": run.model.get_input_embeddings()(prompt), **beside}

    def _embeds(self, run: Run) -> bool:
        return self.how in EMBEDDED or bool(run.program.rows.fed == "embeds")

    @staticmethod
    def _assistant(model: Any) -> Any:
        """A copy of the model with a head of its own, which drafts what the model takes in part."""
        helper = copy.deepcopy(model)
        head = helper.get_output_embeddings().weight
        noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
        head.add_(WEAKER * head.std() * noise.to(head))
        return helper

    def _write(
        self,
        run: Run,
        whole: str,
        prompt: str,
        attention_mask: Tensor | None,
        given: dict[str, Any],
    ) -> None:
        """Adds the lines.

        Args:
            run: The program.
            whole: All columns, as they are written.
            prompt: Those that ``generate()`` is given.
            attention_mask: The mask.
            given: What else it is given.
        """
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        more = {name: repr(value) for name, value in given.items()}
        most = {name: str(self.count) for name in ("max_new_tokens", "min_new_tokens")}
        ends = ("eos_token_id", "pad_token_id", "min_new_tokens")
        most |= {name: more.pop(name) for name in ends if name in more}
        most |= {
            "do_sample": "False",
            "disable_compile": "True",
            "output_logits": "True",
            "return_dict_in_generate": "True",
        }
        cached = dict[str, str]()
        if run.cache is not None and self.how in ON_THE_CACHE:
            cached = {run.subject.cache_name: "cache"}
        elif made := run.subject.made(run.max_columns):
            cached = {run.subject.cache_name: made}
        if self.how in ("assistant", "sampled_assistant"):
            run.lines += ASSISTANT
            cached |= {"assistant_model": "assistant"}
        embedded = "inputs_embeds=model.get_input_embeddings()({})" if self._embeds(run) else "{}"
        embedded = f"{{}}.roll(1, 1), {embedded}" if self.how == "beside" else embedded
        # Else the number is that of other tokens.
        seed = "torch.manual_seed(0); " if "do_sample" in more else ""
        most |= {name: str(asked) for name, asked in run.subject.asks_generate().items()}
        several = {
            name: more[name]
            for name in more
            if name in ("num_beams", "num_return_sequences", "do_sample")
        }
        written, begins = run.subject.generate_line, run.begins
        # Without a cache generate() forgets embeddings once it has tokens.
        control = written(whole, begins, mask, **most | several, use_cache="False")
        run.lines.judged(
            BEAMS if "num_beams" in more else GENERATED,
            whole,
            "" if self.how in ("uncached", "beside") else f"{seed}out = {control}",
            f"{seed}out = {written(embedded.format(prompt, prompt), begins, mask, **cached, **most | more)}",
            int(several.get("num_return_sequences", 1)),
        )

    def _write_transformer_lens(self, run: Run, given: Any, attention_mask: Tensor | None) -> None:
        mask = (
            {}
            if attention_mask is None or self.how in UNEQUAL
            else {"attention_mask": attention_mask}
        )
        most = {"max_new_tokens": str(self.count), "do_sample": "False", "stop_at_eos": "False"}
        most |= {"return_type": "'tokens'", "verbose": "False"}
        prompt = f"torch.tensor({given.tolist()})" if isinstance(given, Tensor) else repr(given)
        run.lines.append("seen, own = [], model.forward")
        run.lines.append(
            "model.forward = lambda *ids, **told: seen.append(own(*ids, **told)) or seen[-1]"
        )
        uncached, cached = (
            f"tokens = model.generate({arguments(prompt, mask, **most, use_past_kv_cache=kept)}); del model.forward"
            for kept in ("False", "True")
        )
        run.lines.judged(SEEN, prompt, uncached, cached)


def padded_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of several lengths with pads in front, and their mask."""
    most = max(map(len, rows))
    ids = [[pad] * (most - len(row)) + [*row] for row in rows]
    return ids, [[0] * (most - len(row)) + [1] * len(row) for row in rows]
