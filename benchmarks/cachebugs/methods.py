"""What others assert of a cache, and what kvinterp does, on the bugs of CacheBugs: found, false alarms, seconds.

`python benchmarks/cachebugs/methods.py` asks every method of every bug, with its fault and mended, and appends a JSON line each
to results.jsonl, going on where it stopped; `--table` prints the table of README.md from it. Each pair runs in a process of its own.

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
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from run import BUGS, HERE, loaded, share

RESULTS = HERE / "results.jsonl"
Told = str
"""`found`, `right`, or `no` with the reason: the method cannot be asked of this model."""


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
        return "no: stateful models are skipped"
    given = inputs(model, 2, 7)
    with_one, without = (generated(model, given, 3, cached) for cached in ("yes", "no"))
    if any((a - b).abs().max() > 1e-3 for a, b in zip(with_one.logits, without.logits, strict=True)):
        return "found"
    for step, scores in enumerate(with_one.scores):
        best = scores.topk(2).values
        if (best[:, 0] - best[:, 1]).min() <= 2e-3:
            break
        place = step - len(with_one.scores)
        if not torch.equal(with_one.sequences[:, place], without.sequences[:, place]):
            return "found"
    return "right"


def tokens(model: Any) -> Told:
    """The same tokens."""
    given = inputs(model, 1, 9)
    texts = [generated(model, given, 20, cached).sequences for cached in ("yes", "no")]
    return "right" if torch.equal(*texts) else "found"


def allclose(model: Any) -> Told:
    """One decode step."""
    given = inputs(model, 1, 9)
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    want = model(**given, use_cache=False).logits[:, -1]
    first = model(**{**given, name: given[name][:, :-1]}, use_cache=True)
    cache = {cached_name(model): first[cached_name(model)]}
    got = model(**{**given, name: given[name][:, -1:]}, **cache, use_cache=True).logits[:, -1]
    return "right" if torch.allclose(got, want, rtol=1e-4, atol=1e-4) else "found"


def quick(model: Any) -> Told:
    """kvinterp's assertion in a test: each use once."""
    import kvinterp as kv
    from kvinterp.testing import CacheInconsistency, assert_cache_consistent

    try:
        if hasattr(model, "step"):
            verdict = kv.audit(full=model.full, step=model.step, seconds=20)
            return "found" if verdict.exit_code else "right"
        assert_cache_consistent(model)
    except CacheInconsistency:
        return "found"
    return "right"


METHODS: dict[str, Callable[[Any], Told]] = {"greedy": greedy, "tokens": tokens, "allclose": allclose, "quick": quick}


def asked(name: str, mended: bool, method: str) -> dict[str, Any]:
    """What a method says of a bug."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = loaded(name).build(not mended)
    theirs = method != "quick"
    began = time.process_time()
    if (theirs and not hasattr(model, "generate")) or (BUGS[name]["model"] == "TransformerLens" and theirs):
        said = "no: it is none of transformers' models"
    else:
        try:
            with torch.no_grad():
                said = METHODS[method](model)
        except (RuntimeError, IndexError, AttributeError, TypeError, ValueError, KeyError) as error:
            said = "found" if not mended else f"no: {type(error).__name__}"  # A test that crashes fails.
    seconds = round(time.process_time() - began, 2)
    return {"name": name, "mended": mended, "method": method, "said": said, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """The table: of those that a method can be asked of, and of all."""
    lines = ["|method|found|of all bugs|false alarms|median processor seconds|", "|---|---|---|---|---|"]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        bad, good = ([row for row in mine if row["mended"] is mended] for mended in (False, True))
        could, found = [row for row in bad if not row["said"].startswith("no")], [r for r in bad if r["said"] == "found"]
        alarms, sound = [r for r in good if r["said"] == "found"], [r for r in good if not r["said"].startswith("no")]
        seconds = statistics.median([row["seconds"] for row in could]) if could else float("nan")
        cells = (
            f"{len(found)} of {len(could)}",
            f"{len(found)} of {len(bad)}",
            f"{len(alarms)} of {len(sound)}",
            f"{seconds:.2f}",
        )
        lines.append(f"|`{method}`|" + "|".join(cells) + "|")
    return "\n".join(lines)


def main() -> None:
    """Asks what is not asked yet, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BUGS))
    parser.add_argument("--mended", action="store_true", help="the twins alone; without it the faults alone")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if given.table:
        print(table(rows))
        return
    import kvinterp.auditing.audit
    import kvinterp.testing  # noqa: F401  # what the children share

    share()

    known = {(row["name"], row["mended"], row["method"]) for row in rows}
    methods = given.methods.split(",")
    todo = [(name, given.mended, method) for name in given.names for method in methods]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool, RESULTS.open("a") as file:
        for one in todo:
            if one not in known:
                row = pool.apply(asked, one)
                print(json.dumps(row), file=file, flush=True)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
