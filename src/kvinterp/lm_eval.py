"""EleutherAI's lm-evaluation-harness on a path: its ``LM``, so that every task of it runs with any
path and policy.

``python -m kvinterp.lm_eval`` is the harness's own command with one more ``--model``, ``kvinterp``.
Contexts, continuations, windows and truncation are those of the harness's own class for
transformers models, so that a plain path gives its scores.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval._cli import HarnessCLI
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, setup_logging
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.common.console import echo
from kvinterp.common.progress import counting
from kvinterp.data.chat import render
from kvinterp.data.tokenizing import ids_of
from kvinterp.errors import InputError, KvinterpError, shown
from kvinterp.models import load_model, wrap
from kvinterp.models.load import device_named
from kvinterp.papers.behaviour.decoding import Likelihood, likelihoods, prefilled, write
from kvinterp.paths import ExecutionPath, Greedy, Strategy, TopK, TopP, path_named

MOST_TOKENS = 256
"""How many tokens are written where a task does not say: as many as the harness's own class
writes.
"""


class PathLM(TemplateLM):
    """A model on a path, as the harness's tasks ask it.

    Args:
        model: The model: its name, as :func:`kvinterp.load_model` takes it, or what
            :func:`kvinterp.wrap` takes; it must have a tokenizer.
        path: How it runs.
        through: How many of a context's last tokens are fed one by one through the cache where
            likelihoods are asked for or one
            token: with an exact prefill they would otherwise be answered without it.
        batch_size: Most requests in a batch; used where it was checked to keep the bits.
        seed: Seeds the random numbers of requests that sample.
        progress: ``"bar"`` or ``"none"``.
        max_batch_size: The harness hands it over; nothing is read of it.
        loading: What :func:`kvinterp.load_model` takes besides, where a name was given: kind,
            dtype, device, attention.

    Attributes:
        counts: ``requests``, those ``answered_by_prefill`` (with an exact prefill what a policy did
            to the cache played no part in them), those ``truncated`` because they did not fit the
            model's context, and those ``sampled``.
    """

    def __init__(
        self,
        model: Any,
        path: str | ExecutionPath = "cached",
        through: int = 1,
        batch_size: int | str = 1,
        seed: int = 0,
        progress: str = "none",
        max_batch_size: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        adapter = load_model(model, **loading) if isinstance(model, str) else wrap(model)
        check_whole("through", through, 0)
        batch_size = check_whole(
            "batch_size", int(batch_size) if str(batch_size).isdecimal() else batch_size
        )
        if adapter.tokenizer is None:
            raise InputError(
                f"model {adapter.facts.name} has no tokenizer, and evaluators ask in text: load it with one."
            )
        self.adapter, self.tokenizer, self.path = adapter, adapter.tokenizer, path_named(path)
        self.through, self.batch_size, self.seed, self._progress = (
            through,
            batch_size,
            seed,
            progress,
        )
        self._device = adapter.device
        self.counts: collections.Counter[str] = collections.Counter(
            requests=0, answered_by_prefill=0, truncated=0, sampled=0
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> PathLM:
        """Makes one as the harness does; what ``--model_args`` gives goes before its own options,
        as for the device.
        """
        given = {
            name: value for name, value in (additional_config or {}).items() if value is not None
        }
        return cls(**{**given, **arg_dict})

    # Text and tokens ------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special("eos_token_id")

    @property
    def prefix_token_id(self) -> int:
        """The token that an empty context stands for."""
        return self._special("bos_token_id", "eos_token_id")

    @property
    def max_length(self) -> int:
        """Most positions."""
        return self.adapter.facts.context

    @property
    def tokenizer_name(self) -> str:
        """Its name."""
        return self.adapter.facts.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, with the special tokens that the tokenizer puts in front unless the text has
        them already.
        """
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode([self.prefix_token_id])
        ):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return ids_of(self.tokenizer, string, self.adapter.facts.name, **given)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that the model was trained on."""
        return render(
            self.tokenizer, chat_history, self.adapter.facts.name, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes about the model, into ``config`` of its results."""
        return {"path": str(self.path), "through": self.through, "counts": dict(self.counts)}

    def _special(self, *names: str) -> int:
        for name in names:
            if (token := getattr(self.tokenizer, name, None)) is not None:
                return int(token)
        raise InputError(
            f"the tokenizer of {self.adapter.facts.name} has no {' and no '.join(names)}: give it one."
        )

    # What tasks ask -------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """How likely each continuation is after its context."""
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """How likely each text is, window after window; every token of a window but its first is
        fed through the cache.
        """
        windows: list[Any] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            split = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(number, *make_disjoint_window(pair)) for pair in split]
        scored = self._loglikelihood_tokens(windows)
        sums = [0.0] * len(requests)
        for (number, *_), (log_probability, _) in zip(windows, scored, strict=True):
            sums[number] += log_probability
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string."""
        alike = collections.defaultdict[str, dict[int, str]](dict)
        for number, request in enumerate(requests):
            context, options = request.args
            alike[json.dumps(options, sort_keys=True)][number] = context
        texts: dict[int, str] = {}
        with counting(len(requests), "writing", "request", self._progress) as bar:
            for options, contexts in alike.items():
                how = dict(normalize_gen_kwargs(json.loads(options), MOST_TOKENS))
                texts |= self._texts(contexts, how, bar.update)
        return [texts[number] for number in range(len(requests))]

    def _texts(
        self, contexts: Mapping[int, str], how: dict[str, Any], done: Callable[[int], object]
    ) -> dict[int, str]:
        most = int(how["max_gen_toks"])
        max_prompt = self.max_length - most
        if max_prompt < 1:
            raise InputError(
                f"a task asks for {most} new tokens, and the context of {self.adapter.facts.name} has {self.max_length} "
                "positions: take a task that asks for fewer."
            )
        encoded = [self.tok_encode(text) for text in contexts.values()]
        self.counts["truncated"] += sum(len(tokens) > max_prompt for tokens in encoded)
        prompts = [tokens[-max_prompt:] for tokens in encoded]
        through = self.through if most == 1 else 0
        self._count(
            [(len(prompt), prefilled(self.path, len(prompt), through), most) for prompt in prompts]
        )
        strategy = strategy_of(how)
        self.counts["sampled"] += len(contexts) * (strategy != Greedy())
        made = write(
            self.adapter, self.path, prompts, most, strategy=strategy, seed=self.seed, examples=list(contexts),
            stops=how["until"], through=through, batch_size=self.batch_size, done=done,
        )  # fmt: skip
        return {number: each.text for number, each in zip(contexts, made, strict=True)}

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        asked = [self._fitting(context, continuation) for _, context, continuation in requests]
        wanted = {number: pair for number, pair in enumerate(asked) if pair[1]}
        self._count(
            [
                (len(c), prefilled(self.path, len(c), self.through), len(t))
                for c, t in wanted.values()
            ]
        )
        with counting(len(wanted), "scoring", "request", self._progress) as bar:
            made = likelihoods(
                self.adapter, self.path, list(wanted.values()), through=self.through, batch_size=self.batch_size,
                done=bar.update,
            )  # fmt: skip
        # Nothing is certain to follow.
        found = dict.fromkeys(range(len(asked)), Likelihood(0.0, True)) | dict(
            zip(wanted, made, strict=True)
        )
        return [*found.values()]

    def _fitting(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Both, cut from the left where they are longer than the model's context; the last token is
        not fed.
        """
        if len(continuation) > self.max_length:
            raise InputError(
                f"a continuation has {len(continuation)} tokens, and the context of {self.adapter.facts.name} has "
                f"{self.max_length} positions: it cannot be scored."
            )
        max_context = self.max_length + 1 - len(continuation)
        self.counts["truncated"] += len(context) > max_context
        return list(context)[-max_context:], list(continuation)

    def _count(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Counts requests, given of each the context's tokens, those prefilled, and the tokens of
        the answer.
        """
        self.counts["requests"] += len(shapes)
        alone = self.path.form == "cached" and self.path.prefill == "exact"
        self.counts["answered_by_prefill"] += sum(
            alone and length == head and answer == 1 for length, head, answer in shapes
        )


def strategy_of(how: Mapping[str, Any]) -> Strategy:
    """The strategy that a task's generation arguments mean.

    Args:
        how: As the harness normalises them: without ``do_sample`` the temperature is 0.

    Raises:
        InputError: They ask for what a strategy cannot do.
    """
    known = {
        "until",
        "max_gen_toks",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "num_beams",
        "num_return_sequences",
    }
    beyond = {name: value for name, value in how.items() if name not in known and value is not None}
    beyond |= {
        name: how[name] for name in ("num_beams", "num_return_sequences") if how.get(name, 1) != 1
    }
    if beyond:
        raise InputError(
            f"a task generates with {shown(beyond)}: expected one sequence, by temperature, top_k and top_p; take another task."
        )
    temperature = float(how.get("temperature", 1.0))
    if not how.get("do_sample") or temperature == 0:
        return Greedy()
    k, p = int(how.get("top_k") or 0), float(how.get("top_p") or 1.0)
    if k > 0 and p < 1:
        return _TopKTopP(k, p, temperature)
    return TopK(k, temperature) if k > 0 else TopP(p, temperature)


@dataclasses.dataclass(frozen=True)
class _TopKTopP(Strategy):
    """The nucleus of the k largest."""

    k: int
    p: float
    temperature: float

    def distribution(self, logits: Tensor) -> Tensor:
        candidates = TopK(self.k, self.temperature).distribution(logits)
        return TopP(self.p, 1.0).distribution(candidates.log())


def main() -> None:
    """The harness's own command line; an error of kvinterp's, or a package that a task needs, is
    one sentence and exit code 2.
    """
    setup_logging()
    harness = HarnessCLI()
    try:
        harness.execute(_with_device(harness.parse_args()))
    except KvinterpError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("kvinterp", "lm_eval"):
            raise
        _refuse(
            f"the package {error.name} is missing, which a task that was asked for imports: install it; "
            "pip install 'kvinterp[eval]' brings IFEval's."
        )


def _refuse(said: str) -> None:
    echo(f"error: {said}", err=True)
    sys.exit(2)


def _with_device(given: argparse.Namespace) -> argparse.Namespace:
    """Arguments that name the device that every command of kvinterp takes, where neither they nor
    their file name one.

    The harness would take ``cuda:0``, whether or not there is one.
    """
    if "device" not in given:
        return given  # The command runs no model.
    configured = EvaluatorConfig.load_yaml_config(given.config) if given.config else {}
    if (given.model or configured.get("model")) == "kvinterp" and not (
        given.device or configured.get("device")
    ):
        given.device = str(device_named(None))
    return given


# By its import name: run as a program this file is another module than the one that is imported.
if "kvinterp" not in model_registry:
    model_registry.register("kvinterp", target="kvinterp.lm_eval:PathLM")


if __name__ == "__main__":
    main()
