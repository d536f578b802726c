"""Models whose rows read something besides their tokens: an encoder-decoder's sources, prompts with
images.

Each row has a source of its own. Its text begins with tokens that no other source's begins with, so
that the text alone says what
is right: one forward without a cache over that source and these tokens. Where rows move, their
sources go with them.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.programs.lines import arguments
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.program import Rows
from kvinterp.auditing.programs.subject import NARROW, TEXTS, casts_lifted
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.native import NativeAdapter
from kvinterp.models.transformers_cache import returned_cache

SOURCES = (24, 17, 11)
"""Tokens that an encoder reads for each row: unequal, so that they are padded; more than a window
where it has one.
"""
LONGEST = 256
AUDIO, SECOND = 64, 4000
"""Frames and samples of sound, where the encoder's config does not say how many it takes."""
REVERSED = ((-1,), (0, -1))
"""Along which axes the numbers of an image are turned round to make others of it."""
FORWARD_KEYWORDS = ("input_ids", "attention_mask", "position_ids")
"""What a processor gives that programs say themselves."""
CACHES = ("past_key_values", "cache")
"""What transformers calls the argument that takes a cache."""


class SourcedSubject(ModelSubject):
    """A model whose rows each have a source."""

    against = "one forward without a cache over a row's own source and tokens"
    choices = MappingProxyType({})  # type: ignore[assignment]

    def reads(self, begins: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """The sources of rows whose texts begin so."""
        return {"source": torch.tensor([self.begins.index(begin) for begin in begins])}

    def hook_point_of(self, row: Sequence[int]) -> tuple[int, int] | None:
        """The source whose beginning a row has, and its first column; None where it has none."""
        return next(
            (
                (number, column)
                for column in range(len(row))
                for number, begin in enumerate(self.begins)
                if begin and tuple(row[column : column + len(begin)]) == begin
            ),
            None,
        )

    def sources(self, ids: Tensor, model_kwargs: Mapping[str, Tensor]) -> list[int]:
        """The source of each row; the first where nothing tells."""
        if "source" in model_kwargs:
            return [int(one) for one in model_kwargs["source"]]
        return [(self.hook_point_of(row) or (0, 0))[0] for row in ids.tolist()]

    @abc.abstractmethod
    def called(
        self, ids: Tensor, model_kwargs: Mapping[str, Tensor], filled: str
    ) -> dict[str, Any]:
        """What a forward is called with, but for its cache; ``filled``: ``"yes"`` where that holds
        the beginnings.
        """

    @abc.abstractmethod
    def written(
        self,
        ids: str,
        rows: Sequence[int],
        model_kwargs: Mapping[str, Tensor],
        filled: str,
        **more: object,
    ) -> str:
        """The same as it is written, of rows with these sources."""

    def plain(self, ids: Tensor, **model_kwargs: Tensor) -> Tensor:
        """The forward that users call with ``use_cache=False``."""
        with self.adapter.own_state([]), self.uncompiled():
            return self.model(**self.called(ids, model_kwargs, "no"), use_cache=False).logits  # type: ignore[no-any-return]

    def feed(self, ids: Tensor, cache: Any, **model_kwargs: Tensor) -> tuple[Tensor, Any]:
        """The forward that users call with the cache of the call before."""
        held = {} if cache is None else {self.cache_name: cache}
        out = self.model(**self.called(ids, model_kwargs, _filled(cache)), **held, use_cache=True)
        return out.logits, returned_cache(out, self.adapter.takes)[1]

    def generate(
        self,
        prompt: Tensor,
        count: int,
        mask: Tensor | None,
        cache: Any = None,
        begins: Sequence[tuple[int, ...]] = (),
        **more: Any,
    ) -> Any:
        """Transformers' own ``generate()``: greedy, so many tokens, none of them an end."""
        model_kwargs = {} if mask is None else self.numbered({"attention_mask": mask})
        known = self.called(prompt, {**model_kwargs, **self.reads(begins)}, _filled(cache))
        known |= {} if cache is None else {self.cache_name: cache}
        known |= {name: more.pop(name) for name in ("assistant_model",) if name in more}
        chosen = self._greedy(count, **self.begun(prompt, begins, known), **more)
        return self.model.generate(generation_config=chosen, **known)

    def begun(
        self, prompt: Tensor, begins: Sequence[tuple[int, ...]], known: dict[str, Any]
    ) -> dict[str, Any]:
        """What ``generate()`` is told of a prompt besides; ``known`` is what it is given, and may
        be changed.
        """
        return {}

    def numbered(self, model_kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mask that ``generate()`` is told, and positions where it does not number a row's own
        tokens by itself.
        """
        return dict(model_kwargs)

    def feed_line(self, ids: Tensor, cached: str, **model_kwargs: Tensor) -> str:
        """As its users call it."""
        held = {} if cached == "no" else {self.cache_name: "cache"}
        rows, given = self.sources(ids, model_kwargs), f"torch.tensor({ids.tolist()})"
        line = self.written(given, rows, model_kwargs, cached, **held, use_cache=True)
        return f"out = model({line}); logits, cache = out.logits, out.{self.cache_name}"

    def plain_line(self, ids: Tensor | str, **model_kwargs: Tensor) -> str:
        """As its users call it."""
        given = ids if isinstance(ids, str) else f"torch.tensor({ids.tolist()})"
        rows = self.sources(torch.empty(0, 0), model_kwargs)
        return f"model({self.written(given, rows, model_kwargs, 'no', use_cache=False)}).logits"

    control_line = plain_line

    def generate_line(
        self,
        prompt: str,
        begins: Sequence[tuple[int, ...]],
        model_kwargs: Mapping[str, Tensor],
        **more: object,
    ) -> str:
        """As its users call it."""
        reads = self.reads(begins)
        model_kwargs = {**self.numbered(model_kwargs), **reads}
        # A cache that an earlier step filled holds the images already.
        filled = "yes" if more.get(self.cache_name) == "cache" else "no"
        given = self.written(prompt, reads["source"].tolist(), model_kwargs, filled, **more)
        return f"model.generate({given})"


def _filled(cache: Any) -> str:
    return "yes" if cache is not None and int(cache.get_seq_length()) else "no"


class EncoderDecoderSubject(SourcedSubject):
    """The decoder of an encoder-decoder; its encoder has read a source a row, all of them padded to
    one length.

    Args:
        model: The model.
        inputs: What the encoder reads, by name, of one source or of several; made at random unless
            given.
        lifted: As of :class:`ModelSubject`.

    Raises:
        InputError: The encoder takes what cannot be made here.
    """

    # transformers cuts no decoder's prompt, and its assistant reads the source's tokens again.
    no_generate = frozenset({"chunks", "assistant", "sampled_assistant", "embeds", "beside"})

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any] | None = None,
        lifted: Sequence[torch.dtype] = NARROW,
    ) -> None:
        from transformers import GenerationMixin

        given = NativeAdapter(model)
        self.lifted = lifted
        self._encode(given.cast(torch.float64) if lifted else given, inputs)
        super().__init__(given, lifted)
        self.known, self.stateful = given.facts.vocabulary, False
        self.plainly = getattr(type(model), "generate", None) is GenerationMixin.generate
        if not self.plainly:
            # A generate() of its own, as Whisper's, says otherwise which logits are a beam's, and
            # raises for several rows.
            self.no_generate |= {"beams", "sampled"}
        # Some decoders count positions by the pad, and cannot be told others.
        self.controls = tuple(token for token in self.controls if token != self.pad)
        # No pad is taken for a beginning.
        marks = [token for token in self.tokens if token not in (self.pad, 4, 5)]
        self.begins = tuple((token,) for token in marks[: len(self.states)])
        self.name += f" behind {' + '.join(str(one.shape[1]) for one in self._alone_states)} encoded positions"

    @property
    def cache_name(self) -> str:
        """The argument by which its forward takes its cache: what finds it for a decoder runs no
        encoder.
        """
        return next((name for name in CACHES if name in self.adapter.takes), CACHES[0])

    def _encode(self, adapter: Adapter, inputs: Mapping[str, Any] | None) -> None:
        """What the encoder makes of each source alone; side by side, with pads on either side."""
        name, made, lines = _encoded_inputs(adapter, inputs)
        if inputs is not None:
            self.names = {"inputs": dict(inputs)}
        encoder: Any = adapter.source.get_encoder()  # type: ignore[operator]
        with torch.no_grad(), casts_lifted(self.lifted):
            read = [encoder(**{name: one}) for one in made]
        # A decoder may ask its encoder's own class for more than states, such as router logits.
        self.encoded, alone = type(read[0]), [one.last_hidden_state for one in read]
        widths = [one.shape[1] for one in alone]
        self.seen = torch.zeros(len(made), max(widths), dtype=torch.long, device=adapter.device)
        for row, width in enumerate(widths):
            # Some of the shorter ones are padded on the left, others on the right.
            end = max(widths) if row % 2 else width
            self.seen[row, end - width : end] = 1
        self.states = torch.zeros(
            *self.seen.shape, alone[0].shape[-1], dtype=alone[0].dtype, device=adapter.device
        )
        for row, one in enumerate(alone):
            self.states[row, self.seen[row].bool()] = one[0]
        self._alone_states, self.padded = alone, len({*widths}) > 1
        self.reads_as, self.read = name, made
        mask = "attention_mask=seen[[*rows]], " * self.padded
        self.prelude = (
            *lines,
            "read = model.get_encoder()",
            f"outputs = [read({name}=one) for one in sources]",
            "states = [one.last_hidden_state for one in outputs]",
            f"seen = torch.tensor({self.seen.tolist()})",
            "encoded = torch.zeros(*seen.shape, states[0].shape[-1], dtype=states[0].dtype)",
            "for row, one in enumerate(states):",
            "    encoded[row, seen[row].bool()] = one[0]",
            "def source(*rows):",
            f"    return dict({mask}encoder_outputs=type(outputs[0])(last_hidden_state=encoded[[*rows]]))",
        )

    def _takes(self) -> frozenset[str]:
        return frozenset(
            name
            for name in ("attention_mask", "position_ids")
            if f"decoder_{name}" in self.adapter.takes
        )

    def _caches(self) -> tuple[str, ...]:
        made = self.feed(self.tensor([self.tokens[:4]]), None)[1]
        if made is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} returned no cache though use_cache was true: there is none to try."
            )
        if type(made).__name__ != "EncoderDecoderCache":
            return ("own",)
        layers = {type(layer).__name__ for layer in made.self_attention_cache.layers}
        # A window of the decoder's config would cut the source too: generate() makes such a cache
        # itself.
        plain = layers == {"DynamicLayer"}
        return "own", *["bare"] * plain, *["static"] * (plain and self.adapter.takes_static)

    def cache(self, kind: str, columns: int) -> Any:
        """Two caches, one of the decoder's own keys and one of the source's."""
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        if kind == "bare":
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        config, width = self.model.config.get_text_config(decoder=True), self.seen.shape[1]
        return EncoderDecoderCache(
            StaticCache(config=config, max_cache_len=columns),
            StaticCache(config=config, max_cache_len=width),
        )

    def cache_line(self, kind: str, columns: int) -> str:
        """As its users make it."""
        if kind == "bare":
            return "cache = EncoderDecoderCache(DynamicCache(), DynamicCache())"
        own, other = (
            f"StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len={length})"
            for length in (columns, self.seen.shape[1])
        )
        return f"cache = EncoderDecoderCache({own}, {other})"

    def begun(
        self, prompt: Tensor, begins: Sequence[tuple[int, ...]], known: dict[str, Any]
    ) -> dict[str, Any]:
        """It puts a start token in front of a text that does not begin with it; what no pads touch
        the encoder reads itself.
        """
        if not self.padded:
            del known["encoder_outputs"]
            known[self.reads_as] = torch.cat(
                [self.read[row] for row in self.reads(begins)["source"].tolist()]
            )
        return {"decoder_start_token_id": int(prompt[0, 0])}

    def numbered(self, model_kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For a decoder generate() numbers the columns, where the forwards beside it are told the
        numbers of a row's tokens.
        """
        if self.offset is None or not self.plainly or "attention_mask" not in model_kwargs:
            return dict(model_kwargs)
        return {
            **model_kwargs,
            "position_ids": (model_kwargs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            + self.offset,
        }

    def called(
        self, ids: Tensor, model_kwargs: Mapping[str, Tensor], filled: str
    ) -> dict[str, Any]:
        """The decoder's tokens, mask and positions, and what the encoder made of the rows'
        sources.
        """
        given = {"decoder_input_ids": ids, **_of_decoder(model_kwargs)}
        rows = self.sources(ids, model_kwargs)
        if len(rows) == 1 and "source" not in model_kwargs:
            return {
                **given,
                "encoder_outputs": self.encoded(last_hidden_state=self._alone_states[rows[0]]),
            }
        mask = {"attention_mask": self.seen[rows]} if self.padded else {}
        return {
            **given,
            **mask,
            "encoder_outputs": self.encoded(last_hidden_state=self.states[rows]),
        }

    def written(
        self,
        ids: str,
        rows: Sequence[int],
        model_kwargs: Mapping[str, Tensor],
        filled: str,
        **more: object,
    ) -> str:
        """As its users call it."""
        given = arguments(f"decoder_input_ids={ids}", _of_decoder(model_kwargs), **more)
        if len(rows) == 1 and "source" not in model_kwargs:
            return f"{given}, encoder_outputs=type(outputs[0])(last_hidden_state=states[{rows[0]}])"
        return f"{given}, **source({', '.join(map(str, rows))})"

    def generate_line(
        self,
        prompt: str,
        begins: Sequence[tuple[int, ...]],
        model_kwargs: Mapping[str, Tensor],
        **more: object,
    ) -> str:
        """As its users call it."""
        more = {**more, "decoder_start_token_id": f"int({prompt}[0, 0])"}
        if self.padded:
            return super().generate_line(prompt, begins, model_kwargs, **more)
        rows = self.reads(begins)["source"].tolist()
        read = f"torch.cat([sources[row] for row in {rows}])"
        return (
            f"model.generate({self.reads_as}={read}, "
            f"{arguments(f'decoder_input_ids={prompt}', _of_decoder(self.numbered(model_kwargs)), **more)})"
        )


class PromptSubject(SourcedSubject):
    """A decoder whose rows each begin with a prompt that holds more than text: an image, sound.

    Args:
        adapter: The model.
        prompts: Prompts as token ids, one or several.
        inputs: For each, tensors by name, as the model's own forward takes them beside its tokens.
            From a single prompt others are made, with the same tokens and the numbers of its
            floating-point inputs in reverse.
        lifted: As of :class:`ModelSubject`.
    """

    # transformers cuts no prompt that holds images, and reads no ids beside embeddings.
    no_generate = frozenset(
        {"chunks", "embeds", "beside", "assistant", "sampled_assistant", "lookup"}
    )
    whole = "yes"

    def __init__(
        self,
        adapter: Adapter,
        prompts: Sequence[Sequence[int]],
        inputs: Sequence[Mapping[str, Any]],
        lifted: Sequence[torch.dtype] = NARROW,
    ) -> None:
        self.prompts, self.inputs = (
            [tuple(map(int, one)) for one in prompts],
            [dict(one) for one in inputs],
        )
        self.names = {"inputs": [dict(one) for one in inputs]}
        others = [] if len(prompts) > 1 else REVERSED
        for axes in others:
            self.prompts.append(self.prompts[0])
            self.inputs.append(
                {name: _flipped(value, axes) for name, value in self.inputs[0].items()}
            )
        super().__init__(adapter, lifted)
        self.inputs = [
            {name: self._cast(value) for name, value in one.items() if name not in FORWARD_KEYWORDS}
            for one in self.inputs
        ]
        self.known = adapter.facts.vocabulary
        if any(hasattr(module, "rope_deltas") for module in self.model.modules()):
            self.moves = "no"
            self.notes.append(
                "it keeps rope_deltas of its batch on itself, so rows of its cache were not moved"
            )
        tokens = [token for token in self.tokens if token not in (self.pad, 4, 5)]
        self.begins = tuple(
            (*prompt, token) for prompt, token in zip(self.prompts, tokens, strict=False)
        )
        self.max_columns = min(self.context, self.max_columns + max(map(len, self.begins)))
        if self.offset is not None:
            # Where an image's tokens have positions in three dimensions those that are told take
            # their place.
            text = [*self.begins[0], *self.tokens[:4]]
            self.offset = self._offset(text, self.alone(text))
        self.name += f" behind {', '.join(self.inputs[0])}"
        turned = "{{n: t.flip({}) if t.is_floating_point() else t for n, t in inputs[0].items()}}"
        flips = [f"inputs = [*inputs, {turned.format(axes)}]" for axes in others]
        self.prelude = (
            *flips,
            f"begins = {[list(begin) for begin in self.begins]}",
            "def source(ids, *rows):",
            "    more = {}",
            f"    for name in {[*self.inputs[0]]}:",
            "        values = [inputs[row][name] for row in rows]",
            "        values = [value.to(model.dtype) if value.is_floating_point() else value for value in values]",
            "        if values[0].shape != (1, len(begins[rows[0]]) - 1):",
            "            more[name] = torch.cat(values)",
            "            continue",
            "        more[name] = torch.zeros_like(ids)  # one number a token",
            "        for row, (ids_of, begin) in enumerate(zip(ids.tolist(), [begins[row] for row in rows])):",
            "            first = next(n for n in range(len(ids_of)) if ids_of[n : n + len(begin)] == begin)",
            "            more[name][row, first : first + len(begin) - 1] = values[row][0]",
            "    return dict(input_ids=ids, **more)",
        )

    def _takes(self) -> frozenset[str]:
        # transformers hooks what reads images at the first of them, and what is hooked later is
        # taken off with a program's state.
        given = {
            name: self._cast(value)
            for name, value in self.inputs[0].items()
            if name not in FORWARD_KEYWORDS
        }
        with torch.no_grad(), casts_lifted(self.lifted):
            self.model(
                input_ids=torch.tensor([self.prompts[0]], device=self.device),
                use_cache=False,
                **given,
            )
        return super()._takes()

    def offers(self, rows: Rows) -> bool:
        """A mask without positions tells a decoder nothing of where an image's tokens stand."""
        return rows.told not in ("mask", "mask_alone") and super().offers(rows)

    def _cast(self, value: Any) -> Any:
        value = torch.as_tensor(value).to(self.device)
        return value.to(self.adapter.dtype) if value.is_floating_point() else value

    def called(
        self, ids: Tensor, model_kwargs: Mapping[str, Tensor], filled: str
    ) -> dict[str, Any]:
        """The tokens, and what the prompts among them hold besides."""
        given = {
            "input_ids": ids,
            **{name: value for name, value in model_kwargs.items() if name != "source"},
        }
        found = [] if filled == "yes" else [self.hook_point_of(row) for row in ids.tolist()]
        at = [(row, *found_at) for row, found_at in enumerate(found) if found_at is not None]
        for name in self.inputs[0] if at else ():
            values = [self.inputs[number][name] for _, number, _ in at]
            if values[0].shape != (1, len(self.prompts[at[0][1]])):
                given[name] = torch.cat(values)
                continue
            given[name] = torch.zeros_like(ids, dtype=values[0].dtype)
            for value, (row, _, column) in zip(values, at, strict=True):
                given[name][row, column : column + value.shape[1]] = value[0]
        return given

    def written(
        self,
        ids: str,
        rows: Sequence[int],
        model_kwargs: Mapping[str, Tensor],
        filled: str,
        **more: object,
    ) -> str:
        """As its users call it."""
        model_kwargs = {name: value for name, value in model_kwargs.items() if name != "source"}
        if filled == "yes":
            return arguments(ids, model_kwargs, **more)
        return arguments(f"**source({ids}, {', '.join(map(str, rows))})", model_kwargs, **more)


def _flipped(value: Any, axes: tuple[int, ...]) -> Any:
    value = torch.as_tensor(value)
    return value.flip(axes) if value.is_floating_point() else value


def _of_decoder(model_kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"decoder_{name}": value for name, value in model_kwargs.items() if name != "source"}


def _encoded_inputs(
    adapter: Adapter, inputs: Mapping[str, Any] | None
) -> tuple[str, list[Tensor], list[str]]:
    """What the encoder reads: the argument's name, a tensor a source, and the lines of Python that
    make them.
    """
    model: Any = adapter.source
    name, config = str(model.main_input_name), model.config
    part = getattr(config, "encoder", None)
    if inputs is not None:
        if name not in inputs:
            raise InputError(
                f"inputs has no {name}, which the encoder of {type(model).__name__} reads: give it by that name."
            )
        given = torch.as_tensor(inputs[name]).to(adapter.device)
        given = given.to(adapter.dtype) if given.is_floating_point() else given
        lines = [f"sources = torch.as_tensor(inputs[{name!r}]).split(1)"]
        if given.is_floating_point():
            lines = [f"sources = torch.as_tensor(inputs[{name!r}]).to(model.dtype).split(1)"]
        made = [*given.split(1)]
        if len(made) == 1 and given.is_floating_point():
            made, lines = (
                [given, given.flip(-1)],
                [*lines, "sources = [sources[0], sources[0].flip(-1)]"],
            )
        return name, made, lines
    if name == "input_ids":
        texts = model.config.get_text_config(encoder=True)
        windows = [
            n
            for n in (getattr(texts, "sliding_window", 0), getattr(part, "sliding_window", 0))
            if isinstance(n, int)
        ]
        decoder = model.config.get_text_config(decoder=True)
        windows += [n] if isinstance(n := getattr(decoder, "sliding_window", 0), int) else []
        longest = max([SOURCES[0], *(n + 4 for n in windows if n + 4 <= LONGEST)])
        draw = torch.Generator().manual_seed(0)
        most = min(texts.vocab_size, decoder.vocab_size, 120)
        made = [
            torch.randint(6, most, (1, length), generator=draw)
            for length in (longest, *SOURCES[1:])
        ]
        lines = [f"sources = [{', '.join(f'torch.tensor({one.tolist()})' for one in made)}]"]
        return name, [one.to(adapter.device) for one in made], lines
    shape = _shape_of_inputs(name, config)
    if shape is None:
        raise InputError(
            f"the encoder of {type(model).__name__} reads {name}, of which no random one can be made here: give one, as in "
            f"kv.audit(model, inputs={{{name!r}: tensor}})."
        )
    made = [
        torch.randn(1, *shape, generator=torch.Generator().manual_seed(row)).to(
            adapter.device, adapter.dtype
        )
        for row in range(TEXTS)
    ]
    drawn = f"torch.randn(1, {', '.join(map(str, shape))}, generator=torch.Generator().manual_seed(row)).to(model.dtype)"
    return name, made, [f"sources = [{drawn} for row in range({TEXTS})]"]


def _shape_of_inputs(name: str, config: Any) -> tuple[int, ...] | None:
    """The shape of sound or of an image that an encoder reads, as its config says it."""
    whole = {
        **config.to_dict(),
        **(
            config.encoder.to_dict() if hasattr(getattr(config, "encoder", None), "to_dict") else {}
        ),
    }
    if name == "input_features" and "num_mel_bins" in whole:
        return int(whole["num_mel_bins"]), 2 * int(whole["max_source_positions"])
    if name == "input_features" and "input_feat_per_channel" in whole:
        return AUDIO, int(whole["input_feat_per_channel"]) * int(whole["input_channels"])
    if name == "input_values":
        return (SECOND,)
    size = whole.get("image_size")
    if name == "pixel_values" and size:
        return int(whole.get("num_channels", 3)), *(
            (size, size) if isinstance(size, int) else tuple(size)
        )
    return None
