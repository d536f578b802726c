"""What others assert of a cache, and what kvinterp does, on the bugs of CacheBugs: found, false alarms, seconds.

`python benchmarks/cachebugs/methods.py` asks every method of every bug with its fault, `--mended` of its twin, and appends a JSON line each
to results.jsonl, going on where it stopped. `--types` asks them instead of the causal types of transformers that the full walk calls wrong
or right (docs/board/transformers-5.23.0.json), as the walk makes them. `--table` prints the tables of README.md. Each pair runs in a process
of its own.

The assertions of others are written anew, after what they do:

- `greedy`: transformers' test of pull request #48289 (2026-08-25, in 5.18; tests/generation/test_utils.py, GenerationTesterMixin):
  two rows are generated greedily, three tokens, with a cache and without; the logits of each step are compared, then the tokens,
  up to a step whose two best scores are within 2e-3. Models with `_is_stateful` are skipped. The tolerance of the logits is half of
  that margin here: the merged file was not at hand, and the discussion of the pull request names the margin alone.
- `tokens`: the same 20 tokens, greedily, with a cache and without, of one row.
- `allclose`: the logits of one decode step are those of a forward without a cache, to 1e-4.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from run import BUGS, HERE, loaded, share

RESULTS = HERE / "results.jsonl"
ROOT = HERE.parents[1]
BOARD = ROOT / "docs" / "board" / "transformers-5.23.0.json"
sys.path[:0] = [str(ROOT / "benchmarks" / "bugs"), str(ROOT / "tools")]


class Told(NamedTuple):
    """What a method says.

    Attributes:
        said: `found`, `right`, or `no` with the reason: the method cannot be asked of this model.
        use: The use of the cache that is wrong, where the method names one.
        program: The smallest program of it.
    """

    said: str
    use: str = ""
    program: str = ""


def inputs(model: Any, rows: int, columns: int) -> dict[str, Any]:
    """Random ids, behind a source where the model has an encoder."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (rows, columns), generator=draw)
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    return {"input_ids": torch.randint(3, 97, (rows, 9), generator=draw), "decoder_input_ids": ids}


def generated(model: Any, given: dict[str, Any], new: int, cached: str) -> Any:
    """What generate() gives greedily, with each step's logits and scores."""
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": cached == "yes"}
    asked |= {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    mask = torch.ones_like(given["input_ids"])
    return model.generate(**given, attention_mask=mask, **asked)


def cached_name(model: Any) -> str:
    """What a forward calls its cache."""
    taken = inspect.signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in taken else "past_key_values"


def greedy(model: Any) -> Told:
    """transformers' own test."""
    if getattr(model, "_is_stateful", False):
        return Told("no: stateful models are skipped")
    given = inputs(model, 2, 7)
    with_one, without = (generated(model, given, 3, cached) for cached in ("yes", "no"))
    if any((a - b).abs().max() > 1e-3 for a, b in zip(with_one.logits, without.logits, strict=True)):
        return Told("found")
    for step, scores in enumerate(with_one.scores):
        best = scores.topk(2).values
        if (best[:, 0] - best[:, 1]).min() <= 2e-3:
            break
        place = step - len(with_one.scores)
        if not torch.equal(with_one.sequences[:, place], without.sequences[:, place]):
            return Told("found")
    return Told("right")


def tokens(model: Any) -> Told:
    """The same tokens."""
    given = inputs(model, 1, 9)
    texts = [generated(model, given, 20, cached).sequences for cached in ("yes", "no")]
    return Told("right" if torch.equal(*texts) else "found")


def allclose(model: Any) -> Told:
    """One decode step."""
    given = inputs(model, 1, 9)
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    want = model(**given, use_cache=False).logits[:, -1]
    first = model(**{**given, name: given[name][:, :-1]}, use_cache=True)
    cache = {cached_name(model): first[cached_name(model)]}
    got = model(**{**given, name: given[name][:, -1:]}, **cache, use_cache=True).logits[:, -1]
    return Told("right" if torch.allclose(got, want, rtol=1e-4, atol=1e-4) else "found")


def quick(model: Any) -> Told:
    """kvinterp's assertion in a test: each use once."""
    import kvinterp as kv
    from kvinterp.testing import CacheInconsistency, assert_cache_consistent

    if hasattr(model, "step"):
        verdict = kv.audit(full=model.full, step=model.step, seconds=20)
    else:
        try:
            assert_cache_consistent(model)
            return Told("right")
        except CacheInconsistency as error:
            verdict = error.verdict
    if not verdict.exit_code:
        return Told("right")
    shown = re.search(r"^(.+) is wrong: .* in the program (\S+)", verdict.reading, re.MULTILINE)
    return Told("found", *shown.groups() if shown else ())


METHODS: dict[str, Callable[[Any], Told]] = {"greedy": greedy, "tokens": tokens, "allclose": allclose, "quick": quick}


def asked(name: str, mended: bool, method: str) -> dict[str, Any]:
    """What a method says of a bug, and of which type's model."""
    quiet()
    model = loaded(name).build(not mended)
    theirs = method != "quick"
    if (theirs and not hasattr(model, "generate")) or (BUGS[name]["model"] == "TransformerLens" and theirs):
        row = {"said": "no: it is none of transformers' models", "seconds": 0.0}
    else:
        row = answer(model, method)
        if row["said"].startswith("raises") and not mended:
            row["said"] = "found"  # A test that crashes fails, and its twin does not crash.
    row["said"] = row["said"].replace("raises", "no")
    of_type = {"model_type": model.config.model_type} if BUGS[name]["model"] == "transformers" else {}
    return {"name": name, "mended": mended, "method": method, **row, **of_type}


def asked_of_type(name: str, word: str, method: str) -> dict[str, Any]:
    """What a method says of a type as the walk makes it; a crash says nothing, as there is no twin that does not."""
    from wild import making

    quiet()
    made: dict[str, Any] = {}
    exec(making.written(making.CAUSAL, name, making.known(making.CAUSAL)[name]), made)
    row = answer(made["model"].eval(), method)
    return {"type": name, "walk": word, "method": method, **row, "said": row["said"].replace("raises", "no")}


def quiet() -> None:
    """One thread, and no warnings."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def answer(model: Any, method: str) -> dict[str, Any]:
    """What a method says of a model, or the error that it raises, and its processor seconds."""
    began = time.process_time()
    try:
        with torch.no_grad():
            told = METHODS[method](model)
    except Exception as error:  # Whatever it raises is what it says.
        told = Told(f"raises: {type(error).__name__}")
    named = {"use": told.use, "program": told.program} if told.program else {}
    return {"said": told.said, "seconds": round(time.process_time() - began, 2), **named}


def types() -> dict[str, str]:
    """The causal types that the full walk could try, and whether it calls them wrong in a use that they offer, or right in all."""
    rows = [
        row for row in json.loads(BOARD.read_text())["rows"] if row["auto"] == "AutoModelForCausalLM" and not row["why"]
    ]
    wrong = {row["type"] for row in rows if any(one["beyond"] == "no" for one in row["wrong"])}
    return {
        row["type"]: "wrong" if row["type"] in wrong else "right"
        for row in rows
        if row["type"] in wrong or not row["wrong"]
    }


def known_faults() -> set[tuple[str, str]]:
    """The types and uses that the full walk calls wrong, each with a script of its own on the board."""
    return {(row["type"], one["use"]) for row in json.loads(BOARD.read_text())["rows"] for one in row["wrong"]}


def table(bad: dict[str, list[Any]], good: dict[str, list[Any]], of_all: str) -> str:
    """The table of the bugs, or of the types: of those that a method can be asked of, and of all.

    A twin of which a method says that another use is wrong, and whose type is on the board with it, is no false alarm.

    Args:
        bad: By method, the rows of what is at fault.
        good: Those of what is not.
        of_all: The heading of the share of all that are at fault.
    """
    known = known_faults()
    lines = [f"|method|found|of all {of_all}|false alarms|median processor seconds|", "|---|---|---|---|---|"]
    for method in METHODS:
        could = [row for row in bad[method] if not row["said"].startswith("no")]
        sound = [row for row in good[method] if not row["said"].startswith("no")]
        found = sum(row["said"] == "found" for row in could)
        others = [row for row in sound if (row.get("model_type"), row.get("use")) in known]
        alarms = sum(row["said"] == "found" for row in sound) - len(others)
        seconds = statistics.median([row["seconds"] for row in could]) if could else float("nan")
        more = f", {len(others)} with another fault" if others else ""
        cells = f"{found} of {len(could)}|{found} of {len(bad[method])}|{alarms} of {len(sound)}{more}|{seconds:.2f}"
        lines.append(f"|`{method}`|{cells}|")
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> str:
    """Both tables of README.md."""
    of_bugs, of_types = [row for row in rows if "name" in row], [row for row in rows if "type" in row]
    pick = lambda rows, key, value: {  # noqa: E731
        method: [row for row in rows if row["method"] == method and row[key] == value] for method in METHODS
    }
    return "\n\n".join([
        table(pick(of_bugs, "mended", False), pick(of_bugs, "mended", True), "bugs"),
        table(pick(of_types, "walk", "wrong"), pick(of_types, "walk", "right"), "wrong types"),
    ])  # fmt: skip


def main() -> None:
    """Asks what is not asked yet, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs, or with --types model types; all unless given")
    parser.add_argument("--mended", action="store_true", help="the twins alone; without it the faults alone")
    parser.add_argument("--types", action="store_true", help="types of transformers instead of the bugs")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if given.table:
        print(tables(rows))
        return
    import kvinterp.auditing.audit
    import kvinterp.testing  # noqa: F401  # what the children share

    share()
    if given.types:
        from wild import making  # noqa: F401
    work: Callable[..., dict[str, Any]] = asked_of_type if given.types else asked
    known = {tuple(row.values())[:3] for row in rows}
    of = types() if given.types else dict.fromkeys(BUGS, given.mended)
    todo = [(name, of[name], method) for name in given.names or of for method in given.methods.split(",")]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool, RESULTS.open("a") as file:
        for one in todo:
            if one not in known:
                row = pool.apply(work, one)
                print(json.dumps(row), file=file, flush=True)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
