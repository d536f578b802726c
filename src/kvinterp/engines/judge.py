"""Another engine's log-probs, judged: rounding, or something else, and what; each step is said with
its n.

No limit here is fitted. What rounding may do is measured in the same run, on the same tokens: our
own path in the engine's precision beside float64, from a cache, among more rows, and with every
result of it rounded once more (the nulls). What is further off than all of them is not within
rounding; what is surely further off than with every result rounded to a bit fewer is no rounding;
between the two it cannot be told. A cause is named where our own float64 with it gives what the
side gave: it is surely nearer on tokens that it was not chosen by, and what it leaves is within the
nulls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, Verdict, allowed
from kvinterp.common.checks import check_callable, check_seed
from kvinterp.common.numbers import listed
from kvinterp.common.words import dtype_word
from kvinterp.engines.arrays import path_of_trace
from kvinterp.engines.hidden import with_hidden_states
from kvinterp.engines.ours import TRUTH, Ours, Row
from kvinterp.engines.readers import read_engine
from kvinterp.engines.side import Side
from kvinterp.engines.ways import PRECISIONS
from kvinterp.errors import InputError, KvinterpError
from kvinterp.metrics.rollouts import CLAMP
from kvinterp.models import Adapter, load_model, wrap
from kvinterp.models.naming import local_folder
from kvinterp.models.provenance import provenance
from kvinterp.recording import Trace
from kvinterp.recording.engine_path import EnginePath

log = logging.getLogger("kvinterp")


def audit_engine(
    model: Any,
    source: str | Path | Trace | Sequence[EnginePath],
    declared: str | None = None,
    format: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda doing: None,
    older: Any = None,
) -> Verdict:
    """Judges log-probs that another engine gave of a model, and those of a trainer where they stand
    beside them.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        source: The file that it wrote, see docs/engines.md; what :meth:`kvinterp.Trace.from_arrays`
            made; or what was read.
        declared: The dtype that the engine was said to compute in; what the file says unless given,
            or none.
        format: The file's format; known by the content unless given.
        allow: Words that shall not fail.
        seed: Seeds the resampling.
        tell: Told what is done next.
        older: The model with weights of an earlier time, or without an adapter, which an engine or
            its cache may still have.

    Returns:
        The verdict, that of the worse side; its ``given`` has the distances, what was tried, and
        the statistics of reinforcement learning, its ``tokens`` both sides' log-probs. Where there
        are two sides, ``given["sides"]`` has the word and reason of each.

    Raises:
        InputError: The file cannot be read, or a text cannot be one of this model's.
    """
    adapter = unrounded(wrap(model))
    check_seed(seed)
    check_callable("tell", tell)
    allow = allowed(allow)
    # Copies, since zeros that stand for nothing are taken out of them.
    paths = [
        dataclasses.replace(
            path,
            chosen=path.chosen.copy(),
            trainer=None if path.trainer is None else path.trainer.copy(),
        )
        for path in _read(adapter, source, format)
    ]
    dtype = _declared(paths, declared)
    ours = Ours(adapter, paths, tell)
    earlier = None if older is None else _older(adapter, older)
    with contextlib.ExitStack() as stack:
        for each in (adapter, *([] if earlier is None else [earlier])):
            stack.enter_context(each.one_call())
        stack.enter_context(torch.no_grad())
        sides = [Side(ours, "the engine", paths, dtype, seed, earlier)]
        if any(path.trainer is not None for path in paths):
            # What is declared is the engine's; no declared dtype is known for a trainer.
            none: dict[str, Any] = {"top": {}, "missing": Counter(), "step": None}
            rows = [
                np.full(len(path.ids), np.nan) if path.trainer is None else path.trainer
                for path in paths
            ]
            turned = [
                dataclasses.replace(path, chosen=row, **none)
                for path, row in zip(paths, rows, strict=True)
            ]
            sides.append(Side(ours, "the trainer", turned, None, seed, earlier))
        for side in sides:
            side.judge()
        verdict = _verdict(adapter, paths, sides, ours, allow)
        return (
            with_hidden_states(adapter, source, verdict, allow)
            if isinstance(source, Trace)
            else verdict
        )


def _older(adapter: Adapter, older: Any) -> Adapter:
    """Wraps the model with weights of an earlier time.

    Raises:
        InputError: It is another model.
    """
    earlier = unrounded(wrap(older))
    shapes = [
        {name: tuple(value.shape) for name, value in each.model.named_parameters()}
        for each in (adapter, earlier)
    ]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"older is {earlier.facts.name}, whose weights have other names or shapes than those of {adapter.facts.name}: give "
            "the same model with weights of an earlier time."
        )
    return earlier


def unrounded(adapter: Adapter) -> Adapter:
    """Loads a model's weights again in float32 where they were rounded as they were loaded, as the
    command line does.

    Only if the checkpoint's own weights, rounded, are the model's: what was changed since is judged
    as it is.
    """
    if adapter.dtype not in (torch.bfloat16, torch.float16):
        return adapter
    try:
        if (folder := local_folder(adapter.facts.name)) is None:
            return adapter
        again = load_model(adapter.facts.name, adapter.kind, "float32", adapter.device)
    except KvinterpError:
        return adapter
    own, read = adapter.model.state_dict(), again.model.state_dict()
    log.info(
        "%s was loaded in %s: its weights are read from %s again",
        adapter.facts.name,
        adapter.dtype,
        folder,
    )
    same = own.keys() == read.keys() and all(
        torch.equal(own[name], read[name].to(own[name].dtype)) for name in own
    )
    return again if same else adapter


# What is read -------------------------------------------------------------------------------------


def _read(adapter: Adapter, source: Any, format: str | None) -> Sequence[EnginePath]:
    """The paths of a file, with the model's own ids of texts and its own beginning, or of what was
    read already.

    Raises:
        InputError: A text has a token outside the model's vocabulary, or is longer than its
            context.
    """
    facts, texts = adapter.facts, dict[str, int | None]()

    def token(text: str) -> int | None:
        if not texts and adapter.tokenizer is not None:
            for number, piece in enumerate(adapter.pieces(range(facts.vocabulary))):
                texts[piece] = None if piece in texts else number
        return texts.get(text)

    if isinstance(source, Trace):
        paths: Sequence[EnginePath] = [path_of_trace(source)]
    elif isinstance(source, list):
        paths = source
    else:
        bos = getattr(adapter.tokenizer, "bos_token_id", None)
        paths = read_engine(
            source,
            format,
            token,
            bos if bos is not None and adapter.encode("a")[0] == bos else None,
        )
    for path in paths:
        ids = [*path.ids, *(max(0, int(top.max())) for top, _ in path.top.values() if len(top))]
        if wrong := [token for token in ids if not 0 <= token < facts.vocabulary]:
            raise InputError(
                f"{path.id} has the token {max(wrong)}, and {facts.name} has {facts.vocabulary:,}: it is of another one; "
                "give the model that the engine ran."
            )
        if len(path.ids) > facts.context:
            raise InputError(
                f"{path.id} has {len(path.ids):,} tokens, and the context of {facts.name} {facts.context:,}: leave it out."
            )
    return paths


def _declared(paths: Sequence[EnginePath], declared: str | None) -> str | None:
    if declared is None:
        dtypes = sorted(
            {dtype_word(path.declared["dtype"]) for path in paths if "dtype" in path.declared}
        )
        if len(dtypes) > 1:
            raise InputError(
                f"the sequences declare {listed(dtypes)}: expected one dtype; give it, or judge them apart."
            )
        declared = next(iter(dtypes), None)
    declared = None if declared is None else dtype_word(declared)
    if declared not in (None, "float64", *(precision.name for precision in PRECISIONS)):
        raise InputError(
            f"dtype={declared!r} was declared: expected float64, float32, float16 or bfloat16; leave it out."
        )
    return "float32" if declared == "float64" else declared


# What is said -------------------------------------------------------------------------------------


def _verdict(
    adapter: Adapter,
    paths: Sequence[EnginePath],
    sides: Sequence[Side],
    ours: Ours,
    allow: Sequence[str],
) -> Verdict:
    """Makes the verdict of the side that is worse; with two sides, every sentence names its
    side.
    """

    def code(side: Side) -> int:
        return (
            0 if side.word in GOOD or side.word in allow else 1 if side.word == CANNOT_TELL else 2
        )

    worst, two, dtype = max(sides, key=code), len(sides) > 1, sides[0].declared
    whose = f"{worst.name}'s" if two else "another engine's"
    if two and not code(worst):
        whose = "both the engine's and the trainer's"
    head = f"{('PASS', 'CANNOT TELL', 'FAIL')[code(worst)]}  {worst.word}  {whose} log-probs against {adapter.facts.name}"
    checks = [
        dataclasses.replace(check, name=f"{side.name}: {check.name}") if two else check
        for side in sides
        for check in side.distance.checks
    ]
    why = [
        f"  {side.name}: {side.word}: {side.why}" for side in sorted(sides, key=code, reverse=True)
    ]
    tokens = f": {worst.distance.where}" if worst.distance.where and code(worst) else ""
    lines = [
        f"{head}, declared {dtype or 'no dtype'}{tokens}",
        *(why if two else [f"  {worst.why}"]),
    ]
    lines += [f"  {check.name}: {check.detail}" for check in checks]
    table = {**worst.distance.table, "begins": worst.distance.begins}
    if (statistics := sides[0].statistics()) is not None:
        lines.append(_said_of_ratios(statistics))
        lines += _said_of_training(statistics)
        table["statistics"] = statistics
    if two:
        words = [{"side": side.name, "verdict": side.word, "why": side.why} for side in sides]
        table |= {"side": worst.name, "sides": words}
    rows: list[Any] = (
        [ours.row(TRUTH, number) for number in range(len(paths))]
        if "truth" in vars(worst.distance)
        else []
    )
    return Verdict(
        worst.word, None, None if worst.word in GOOD else worst.distance.begins, "", "", {}, tuple(checks), (), "\n".join(lines),
        "yes" if not code(worst) and worst.word not in GOOD else "no",
        {**provenance(adapter), "dtype": dtype or "not given"}, given=table,
        tokens=_token_table(adapter, paths, rows) if rows else None,
    )  # fmt: skip


def _said_of_ratios(statistics: dict[str, Any]) -> str:
    """Says the importance ratios of sequences, and where they are held."""
    every, count = statistics["all"], len(statistics["by_sequence"])
    ratios = [every[f"rollout_is_seq_{name}"] for name in ("min", "max", "mean")]
    ends = np.exp([-CLAMP, CLAMP])
    held = (
        f"; held between {ends[0]:.2g} and {ends[1]:.2g}, as verl does"
        if {*ratios} & {*ends}
        else ""
    )
    low, high, mean = (f"{ratio:.3g}" for ratio in ratios)
    return (
        f"  importance ratio by sequence, {statistics['trainer']} over the engine: {low} to {high}, mean {mean}{held} "
        f"(n = {count:,} sequences)."
    )


def _said_of_training(statistics: dict[str, Any]) -> list[str]:
    """Says k3 beside that of rounding, and which clips lie below what rounding alone moves; nothing
    without a null.
    """
    if "null" not in statistics:
        return []
    every, null, floor = (statistics[name] for name in ("all", "null", "floor"))
    low, high = statistics["intervals"]["k3"]
    interval = f" ({low:.2g} to {high:.2g})" if np.isfinite(low) else ""
    count = len(statistics["by_sequence"])
    shares = "; ".join(
        f"{what} {every[name]:.2%} ({null[name]:.2%} by rounding)"
        for what, name in {
            "outside a clip of 0.2 lie of the tokens": "ratio_clipfrac",
            "above a cap of 2": "tis_clipfrac",
            "outside GSPO's clip of the sequences": "gspo_clipfrac",
        }.items()
    )
    return [
        f"  training: k3 {every['k3']:.2g}{interval}, of rounding in {floor['precision']} alone {null['k3']:.2g}; {shares}. "
        f"Rounding alone moves a token's ratio by {floor['token']:.2g} and a sequence's mean ratio by {floor['sequence']:.2g} "
        f"(medians): a narrower clip cuts rounding (n = {every['tokens']:,.0f} tokens, {count:,} sequences)."
    ]


def _token_table(
    adapter: Adapter, paths: Sequence[EnginePath], rows: Sequence[Row]
) -> pd.DataFrame:
    """Puts every token beside our log-prob of it, a row each; NaN where one of the two has none."""
    frames = []
    for path, ours in zip(paths, rows, strict=True):
        index = np.arange(len(path.ids))
        frame = {
            "sequence": path.id,
            "position": index,
            "part": np.where(index < len(path.prompt), "prompt", "tokens"),
            "token": path.ids,
            "engine": path.chosen,
            "ours": ours,
        }
        frames.append(
            pd.DataFrame(frame | ({} if path.trainer is None else {"trainer": path.trainer}))
        )
    table = pd.concat(frames, ignore_index=True)
    seen = table["token"].unique()
    table.insert(
        4, "text", table["token"].map(dict(zip(seen, adapter.pieces(seen.tolist()), strict=True)))
    )
    table.insert(7, "difference", table["engine"] - table["ours"])
    if "trainer" in table:
        table["trainer_difference"] = table["trainer"] - table["ours"]
    return table.astype({"sequence": "category", "part": "category", "text": "category"})
