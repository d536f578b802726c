"""Compares the attention of two paths side by side: each head's pattern on both paths and their
difference, drawn by circuitsvis.

circuitsvis draws one pattern at a time, and loads its code from a network or puts 1.3 MB of it into
every figure. Here one page has its code once and every head three times;
:mod:`kvinterp.report.attention_page` makes the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.checks import (
    among,
    check_choice,
    check_text,
    check_unread,
    check_whole,
    given_list,
)
from kvinterp.common.files import write_whole
from kvinterp.common.numbers import counted, number
from kvinterp.comparison import Comparison
from kvinterp.errors import InputError, NonFiniteError, UnsupportedError, located
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import chosen_heads, encode
from kvinterp.paths import ExecutionPath, path_named, path_read, run
from kvinterp.recording import Generation, Trace
from kvinterp.recording.activation_cache import is_activation_cache, records_of
from kvinterp.report.attention_page import AttentionPage, ShownHead, View, readable
from kvinterp.report.page import Text, fragment

Square = Float[Tensor, "head query key"]

#: What a whole generation is shown beside.
BOTH_RUNS = ("the run that wrote the text", "a forward over the finished text")
#: Positions of a whole generation that are shown unless fewer were asked for.
_WHOLE = 160
#: Cells the browser draws without a wait: 32 heads, three patterns each, 48 positions a side, and a
#      little.
_CELLS = 240_000


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionComparison:
    """The patterns of two paths at one step, as a page.

    A notebook shows the page in a frame that cannot reach the notebook; :meth:`save` writes the
    same page as one file.

    Attributes:
        heads: One row for each head that was compared, the largest KL first: layer, head, kl (of
            the newest row, in nats), largest_row_kl, largest_row (its position), largest_difference
            (of any probability), shown.
        page: The page.
    """

    heads: pd.DataFrame
    page: AttentionPage = dataclasses.field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Writes the page as one self-contained file, whole or not at all.

        Args:
            path: The file, such as ``"attention.html"``; its folder is created.

        Raises:
            InputError: It cannot be written.
        """
        write_whole(Path(path), self.page.html())
        return Path(path)

    def _repr_html_(self) -> str:
        return fragment(Text(self.page.html(), look="frame"))


def attention_comparison(
    source: Any,
    other: Any = None,
    *,
    a: str | ExecutionPath = "cached",
    b: str | ExecutionPath = "recompute",
    step: int | None = None,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    model: Any = None,
    example: int = 0,
    tokens: Sequence[str] | None = None,
    most: int | None = None,
    positions: tuple[int, int] | None = None,
    cells: int = 48,
    fit: str = "crop",
) -> AttentionComparison:
    """Shows the attention of two paths at one step side by side, and their difference, for every
    head.

    A path that recomputes has all its rows at every step. A cached path computes one row per step,
    so its pattern is assembled from the prefill's rows and the row of each later step: each row is
    the one that the path used when it wrote the position. Both paths are fed the same tokens.

    Four ways to call it: ``attention_comparison(model, prompt, step=5)`` runs both paths;
    ``attention_comparison(comparison, step=5)`` runs the paths of a comparison again (a comparison
    that was read from disk also needs the prompt and ``model=``);
    ``attention_comparison(text)`` takes what :func:`kvinterp.generated` returned with
    ``"pattern"``, and shows the attention of the whole generation beside that of one forward over
    the finished text; ``attention_comparison(trace_a, trace_b, step=5)`` takes two traces of
    ``run(..., record="pattern", positions="all")``, or two ``ActivationCache`` of TransformerLens,
    which hold one forward each and have no step.

    Args:
        source: A model or adapter, a comparison in the matched protocol, a generation, or the first
            trace.
        other: The prompt, or the second trace.
        step: The decode step; 0 is the prefill, which is the same on most paths.
        layers: Layers to compare, such as 0,2,-1. Default: all.
        heads: Query heads to compare in every layer (default: all).
        a: Path A; it chooses the tokens for both paths.

            It does so greedily. A comparison brings its own paths and tokens.
        b: Path B.
        model: The model, for a comparison; for traces it gives the text of the tokens.
        example: The example of the comparison.
        tokens: Text of each position, for traces without a model (default: token ids).
        most: The most heads to show, those with the largest KL first. Default: as many as fit.

            That is as many as a browser draws without a wait.
        positions: Positions ``(start, stop)`` to show.
        cells: The largest number of rows and columns to show, where positions are not given.
        fit: How a longer context is reduced to ``cells``: ``"crop"`` shows the newest positions;
            ``"pool"`` shows all, in blocks of neighbours (attention to a block summed over its
            keys, averaged over its queries).

    Raises:
        InputError: A step, layer, head or position does not exist, or the two sides have different
            tokens.
        UnsupportedError: The pattern cannot be derived (flash attention), or a path keeps too
            little of it.
    """
    choices: dict[str, tuple[Any, Any]] = {
        "step": (step, None),
        "a": (a, "cached"),
        "b": (b, "recompute"),
        "model": (model, None),
        "example": (example, 0),
    }
    unread: Sequence[str]
    sides = BOTH_RUNS if isinstance(source, Generation) else None
    if is_activation_cache(source):
        unread, why = (
            ("step", "a", "b", "model", "example"),
            "a cache is of one forward, and its text is given as tokens=...",
        )
        source, other, step = _trace_of(source), _trace_of(other), 0
    elif isinstance(source, Generation):
        unread, why = (
            ("step", "a", "b", "model", "example"),
            "a generation is shown whole, beside its recomputation",
        )
        source, other, step, model = _beside_recomputation(source, layers)
        cells = max(cells, min(len(source.prompt) + step, _WHOLE))
    elif isinstance(source, Trace):
        unread, why = ("a", "b", "example"), "traces have paths"
    elif isinstance(source, Comparison):
        unread, why = ("a", "b"), "a comparison has paths"
    else:
        unread, why = ("model", "example"), "the model came first, and its prompt second"
    for name in unread:
        check_unread(name, *choices[name], f"{why}; leave it out")
    if positions is not None:
        check_unread("cells", cells, 48, "positions are given; leave one of the two out")
        check_unread("fit", fit, "crop", "positions are given; leave one of the two out")
    check_choice("fit", fit, ("crop", "pool"))
    if step is None:
        raise InputError(
            "no step was given: give step=..., such as step=5; 0 is the prefill, which is the same on most paths."
        )
    for name, value, least in (
        ("step", step, 0),
        ("cells", cells, 2),
        ("most", most, 1),
        ("example", example, 0),
    ):
        if value is not None:
            check_whole(name, value, least)
    layers, heads = ([value] if isinstance(value, int) else value for value in (layers, heads))
    if isinstance(source, Trace):
        pair, adapter = (source, other), None if model is None else wrap(model)
    else:
        if isinstance(source, Comparison):
            adapter, prompt, paths, fed = _rerun(source, model, other, example, step)
        elif other is None:
            raise InputError(
                "no prompt was given: call attention_comparison(model, prompt, step=...)."
            )
        else:
            adapter, prompt, paths, fed = wrap(source), other, (path_named(a), path_named(b)), None
        # The traces hold the layers that were asked for.
        pair, layers = _run_both(adapter, prompt, paths, fed, step, layers), None
    ids = _tokens_fed(*pair, step)
    if tokens is not None:
        texts = [
            check_text("tokens", text, "['2', ' +']")
            for text in given_list("tokens", tokens, "a list of texts")
        ]
    else:
        texts = [str(text) for text in ids] if adapter is None else adapter.pieces(ids)
    names = [readable(text) for text in texts]
    if len(names) != len(ids):
        raise InputError(
            f"{len(names)} tokens were given for {len(ids)} positions: give the text of each position."
        )
    view = View.choose(len(ids), positions, cells, fit)
    shown_heads: list[ShownHead] = []
    with located(f"step {step}"):
        for layer in _layers_to_compare(pair[0], layers):
            first, second = (assembled_pattern(trace, layer, step) for trace in pair)
            shown_heads += _compare_heads(layer, first, second, heads, view)
    shown_heads.sort(key=lambda head: (-head.row["kl"], head.row["layer"], head.row["head"]))
    most_heads = max(_CELLS // (3 * len(view.starts) ** 2), 1) if most is None else most
    table = pd.DataFrame(
        [{**head.row, "shown": number < most_heads} for number, head in enumerate(shown_heads)]
    )
    sides = sides or (pair[0].path, pair[1].path)
    found, shown = finding_of(table, step, *sides), shown_heads[:most_heads]
    return AttentionComparison(
        table, AttentionPage(pair, sides, step, len(shown_heads), view, names, shown, found)
    )


def finding_of(heads: pd.DataFrame, step: int, a: str, b: str) -> str:
    """Says in a sentence how many heads attend differently, and which most.

    Args:
        heads: As of an :class:`AttentionComparison`.
        step: The decode step.
        a: The first path.
        b: The second path.
    """
    differ = int((heads["largest_row_kl"] > 0).sum())
    if not differ:
        same = "The one head attends" if len(heads) == 1 else f"All {len(heads)} heads attend"
        return f"{same} the same to the bit at step {step}: {a} against {b}."
    most = heads.sort_values("kl", ascending=False, kind="stable").iloc[0]
    return (
        f"{differ} of {counted(len(heads), 'head')} attend differently by step {step}; most in layer {most['layer']}, head "
        f"{most['head']}: KL {number(most['kl'])} nats in the newest row."
    )


# The patterns -------------------------------------------------------------------------------------


def _run_both(
    adapter: Adapter,
    prompt: Any,
    paths: tuple[ExecutionPath, ExecutionPath],
    fed: Sequence[int] | None,
    step: int,
    layers: Sequence[int] | None,
) -> tuple[Trace, Trace]:
    """Runs both paths; the first is fed the given tokens, or those that it chooses."""
    ids = encode(adapter, prompt, step + 1)
    for path in paths:
        if path.refresh or path.policy.evicts:
            raise UnsupportedError(
                f"path {path} makes rows anew or lets go of them, and attention is shown row by row, each computed once: "
                "give a path without."
            )

    def record(path: ExecutionPath, continuation: Sequence[int] | None) -> Trace:
        steps = range(step + 1) if path.form == "cached" else [step]
        stop = "end of sequence" if continuation is None else "length"
        return run(
            adapter, ids, path, max_new_tokens=step + 1, record="pattern", positions="all",
            layers=layers, steps=steps, continuation=continuation, stop=stop,
        )  # fmt: skip

    first = record(paths[0], fed)
    if len(first.fed) < step:
        raise InputError(
            f"step {step} does not exist: path {paths[0]} ends this prompt after step {len(first.tokens) - 1}; "
            "give an earlier step."
        )
    return first, record(paths[1], first.fed)


def _beside_recomputation(
    text: Generation, layers: int | Sequence[int] | None
) -> tuple[Trace, Trace, int, Adapter]:
    """A generation as a trace, one forward over its finished text, the last step of both, and the
    model.
    """
    if text.adapter is None or not any(site == "pattern" for site, _ in text.records):
        raise InputError(
            "this generation has no pattern, or no model: give one of kv.generated(model, prompt, 'pattern'), or load it with "
            "its model."
        )
    written = text.trace()
    last = len(written.steps) - 1
    held = sorted({layer for site, layer in written.records if site == "pattern"})
    other = run(
        text.adapter, list(text.prompt), "recompute", max_new_tokens=last + 1, record="pattern", positions="all",
        layers=held if layers is None else layers, steps=[last], continuation=list(written.fed), stop="length",
    )  # fmt: skip
    return written, other, last, text.adapter


def _rerun(
    comparison: Comparison, model: Any, prompt: Any, example: int, step: int
) -> tuple[Adapter, Any, Any, Any]:
    """The model, the prompt, the paths and the tokens of an example: the user's, or else those that
    the comparison still has.
    """
    origin, provenance = comparison.origin, comparison.provenance
    if model is None and origin is not None:
        model = origin.adapter()
    if prompt is None and origin is not None:
        if example not in origin.prompts:
            raise InputError(
                f"example {example} does not exist: the comparison has {', '.join(map(str, origin.prompts))}."
            )
        prompt = origin.prompts[example]
    if model is None or prompt is None:
        raise InputError(
            "this comparison no longer has its model and prompts: give attention_comparison(comparison, prompt, "
            f"model=model, example={example}, step=...), which runs that example again: of each example its own prompt."
        )
    adapter = wrap(model)
    if provenance["protocol"] != "matched":
        raise InputError(
            "after a flip the free protocol compares two texts: compare with protocol='matched'."
        )
    if (provenance["weights"], provenance["kind"]) != (adapter.fingerprint(), adapter.kind):
        raise InputError(
            f"the comparison was made on {provenance['model']} ({provenance['kind']}) with other weights than this "
            f"{adapter.facts.name} ({adapter.kind}): give the model it was made on."
        )
    steps = comparison.steps[comparison.steps["example"] == example].sort_values("step")
    if step not in steps["step"].tolist():
        have = f"steps 0 to {steps['step'].max()}" if len(steps) else "no steps"
        raise InputError(
            f"step {step} of example {example} does not exist: the comparison has {have} of it."
        )
    row = comparison.examples.set_index("example").loc[example]
    length = len(encode(adapter, prompt, step + 1))
    if length != row["prompt_tokens"]:
        raise InputError(
            f"example {example} of the comparison has {row['prompt_tokens']} tokens and this prompt {length}: give the "
            "prompt it was made on."
        )
    # Paths of a comparison made in this process are the user's own; a file may come from anybody,
    # so it may import nothing.
    read = path_read if origin is None else path_named
    paths = tuple(read(provenance["paths"][side]) for side in "ab")
    return adapter, prompt, paths, steps["token_a"].tolist()[:step]


def _trace_of(cache: Any) -> Trace:
    """Makes a trace of one of TransformerLens's caches, with positions in the place of tokens."""
    if not is_activation_cache(cache):
        raise InputError(
            f"one ActivationCache and a {type(cache).__name__} were given: expected two caches."
        )
    records = {
        hook_point: [tensor]
        for hook_point, tensor in records_of(cache).items()
        if hook_point[0] == "pattern"
    }
    if not records:
        raise InputError("a cache holds no attn.hook_pattern: let run_with_cache keep it.")
    rows, keys = next(iter(records.values()))[0].shape[1:]
    if rows < keys:
        raise InputError(
            f"a cache holds {rows} of {keys} query positions: make it of all of them, as with positions='all'."
        )
    return Trace("cache", tuple(range(rows)), (), (), records, (0,))


def assembled_pattern(trace: Trace, layer: int, step: int) -> Square:
    """Assembles the attention of every query position at a step from the rows that the path
    computed.

    Args:
        trace: A trace of ``run(..., record="pattern", positions="all")``: for a path that
            recomputes with that step, for a cached path with every step up to it.
        layer: The layer.
        step: The decode step.

    Returns:
        Probabilities ``[head, query, key]``, queries and keys by absolute position, in the dtype of
        the path.

    Raises:
        InputError: The trace does not have these rows.
        UnsupportedError: A chunked path with a sliding window showed too few keys to place its
            rows.
    """
    if ("pattern", layer) not in trace.records:
        have = ", ".join(sorted({f"{site} at {at}" for site, at in trace.records})) or "nothing"
        raise InputError(
            f"a trace holds no pattern of layer {layer} (it recorded {have}): run with record='pattern', positions='all'."
        )
    patterns = dict(zip(trace.steps, trace.records["pattern", layer], strict=True))
    length = len(trace.prompt) + step
    if step not in patterns:
        raise InputError(
            f"the {trace.path} trace did not record step {step}: record it, and the steps before it."
        )
    if patterns[step].dim() != 3:
        raise InputError(
            f"the {trace.path} trace holds the newest row only: run with record='pattern', positions='all'."
        )
    needed = [step] if patterns[step].shape[1] == length else list(range(step + 1))
    missing = next((number for number in needed if number not in patterns), None)
    if missing is not None:
        raise InputError(
            f"the {trace.path} trace did not record step {missing}, whose row is needed: record every step."
        )
    square = patterns[step].new_zeros(patterns[step].shape[0], length, length)
    for earlier in needed:
        rows, end = patterns[earlier], len(trace.prompt) + earlier
        if rows.shape[2] < rows.shape[1]:
            raise UnsupportedError(
                f"path {trace.path} shows {rows.shape[2]} keys to {rows.shape[1]} queries at layer {layer}, so its rows "
                "cannot be placed: use a path without chunks."
            )
        # A sliding cache shows the newest keys only: both ends are aligned at the newest position.
        square[:, end - rows.shape[1] : end, end - rows.shape[2] : end] = rows
    return square


def _tokens_fed(a: Trace, b: Any, step: int) -> list[int]:
    """The tokens up to a step, after a check that both sides are traces that were fed the same."""
    if not isinstance(b, Trace):
        raise InputError(
            f"one trace and a {type(b).__name__} were given: expected two traces of the same prompt."
        )
    if a.prompt != b.prompt:
        raise InputError(
            f"the two sides have different prompts ({len(a.prompt)} and {len(b.prompt)} tokens): give the same one."
        )
    for trace in (a, b):
        if len(trace.fed) < step:
            raise InputError(
                f"the {trace.path} trace ends at step {len(trace.fed)}, before step {step}: run more steps."
            )
    if a.fed[:step] != b.fed[:step]:
        raise InputError(
            f"the traces were fed different tokens before step {step}, so their rows belong to different texts: run the "
            "second with continuation=first.fed."
        )
    return [*a.prompt, *a.fed[:step]]


def _layers_to_compare(trace: Trace, layers: Sequence[int] | None) -> Sequence[int]:
    recorded = sorted(layer for site, layer in trace.records if site == "pattern")
    if not recorded:
        raise InputError("a trace holds no pattern: run with record='pattern', positions='all'.")
    end = recorded[-1] + 1
    return (
        recorded
        if layers is None
        else [number % end for number in among("layers", layers, range(-end, end))]
    )


def _compare_heads(
    layer: int, a: Square, b: Square, heads: Sequence[int] | None, view: View
) -> list[ShownHead]:
    if a.shape != b.shape:
        raise InputError(
            f"the patterns of layer {layer} have shapes {tuple(a.shape)} and {tuple(b.shape)}: record alike."
        )
    numbers = chosen_heads(heads, a.shape[0], "query head") or range(a.shape[0])
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise NonFiniteError(
            f"the patterns of layer {layer} hold NaN or Inf: use a dtype with a wider range."
        )
    kl = metrics.pattern_kl(a, b.to(a.device)).cpu()
    first, second = (pattern.double().cpu() for pattern in (a, b))
    apart = (first - second).abs().amax((1, 2))
    shown_heads = []
    for head in numbers:
        row = {
            "layer": layer,
            "head": head,
            "kl": float(kl[head, -1]),
            "largest_row_kl": float(kl[head].max()),
            "largest_row": int(kl[head].argmax()),
            "largest_difference": float(apart[head]),
        }
        shown_heads.append(ShownHead(row, view.crop(first[head]), view.crop(second[head])))
    return shown_heads
