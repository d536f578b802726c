"""The sentences of a verdict; each is written from the numbers that make it true, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvinterp.reading.vocabulary import EMBEDDING, ONE_BY_ONE

if TYPE_CHECKING:
    from kvinterp.auditing.accounting import Account
    from kvinterp.auditing.bench import Check
    from kvinterp.auditing.judging import Judged
    from kvinterp.auditing.ladder import PrecisionRun
    from kvinterp.auditing.verdict import Evidence, Verdict

HINTS = {
    "Q": "Q alone is wrong: the new token's position, or RoPE",
    "attention mask": "other keys are seen than should be: the window, the padding, or the mask's length",
    "attention scores": "the scale, the soft cap, or a bias of the attention scores",
    "attention output": "the attention itself: its scale, its soft cap, its kernel",
    "V": "what the cache keeps or gives back for V",
    "embedding": "what enters the first block: the position, or a scale of the embedding",
    "residual sum": "what is added up between the block's modules",
    "block input": "what stands between the two blocks",
    "logits": "what stands after the last block: a norm, the head, a cap of the logits",
    "recurrent state": "a state that is stale, or updated otherwise in a cached step",
    "convolution state": "a state that is stale, or shifted otherwise in a cached step",
    "expert choice": "the router chooses other experts in a cached step, though the scores do not differ by enough for that",
    "router scores": "the router computes otherwise in a cached step",
}


def first_line(seen: Evidence, word: str, passes: bool, allowed: str) -> str:
    """PASS, FAIL or CANNOT TELL, the word, the model, its precision and how many of its uses were tried."""
    tried = sum(check.status in ("passed", "failed") for check in seen.checks)
    uses = f"{tried} of {len(seen.checks)} uses" if seen.checks else "decoding token by token alone"
    told = "PASS" if passes else "CANNOT TELL" if word == "cannot-tell" else "FAIL"
    return f"{told}  {word}{' (allowed)' if allowed == 'yes' else ''}  {seen.model} in {seen.own}, {uses}"


def _times(value: float) -> str:
    return f"{value:.2g}" if value else "0"


def place(judged: Judged) -> str:
    """A finding's layer, tensor and module."""
    found = judged.finding
    where = "the embedding" if found.layer == EMBEDDING else f"layer {found.layer}"
    return f"{found.tensor} of {where}" + (f" ({found.module})" if found.module else "")


def bug(judged: Judged, sizes: Mapping[str, float], seen: Evidence, looked: Sequence[str]) -> str:
    """What is wrong, from where on, by how much, and in which precisions it was and was not seen."""
    found = judged.finding
    at = f"at step {found.step}" if judged.fed == ONE_BY_ONE else f"in {judged.fed}, in the row of position {found.step}"
    said = f"Given equal inputs, {place(judged)} is wrong from position {found.position} on (seen {at}): "
    parts = []
    for name, size in sizes.items():
        how = "one side sees what the other does not" if size == float("inf") else f"a relative error of {size:.1e}"
        parts.append(f"{name} {how}")
    said += ", ".join(parts)
    clean = [name for name in looked if name not in sizes and name in seen.judged]
    if clean:
        said += f"; not in {', '.join(clean)}"
    return f"{said}. {_tried(judged)}"


def _tried(judged: Judged) -> str:
    cause = judged.cause
    if cause.detail.startswith("gone with a fixed order"):
        return f"It is {cause.detail}: the kernel's own result is wrong."
    said = {
        "fixed order": "With a fixed order of additions it is there all the same.",
        "native": "A fixed order of additions does not take it away.",
    }.get(judged.kernels, "No fixed order of additions could be run.")
    return f"{said} It is {cause.detail}." if cause.detail else said


def hint(judged: Judged, seen: Evidence) -> list[str]:
    """The likely cause."""
    found = judged.finding
    if judged.numbered:
        return [
            "hint: told the positions of its tokens, as generate() tells them, the model is right: called without "
            "position_ids it numbers cached tokens wrongly"
        ]
    if found.tensor == "K":
        every = seen.rungs[seen.own].every_error
        length = int(every["prefill"].min()) if len(every) else 0
        first = "new keys as they are written" if found.position >= length else "old keys: a stale, lost or shifted cache"
        return [f"hint: {first}"]
    known = HINTS.get(found.tensor)
    return [f"hint: {known}"] if known else []


def failed(check: Check) -> str:
    """An exercise that failed."""
    where = "" if check.layer is None else f" First wrong: {check.tensor or 'the output'} of layer {check.layer}."
    return f"{check.name} failed: {check.detail}{where}"


def overflow(own: PrecisionRun, others: Sequence[str]) -> list[str]:
    """Where NaN or Inf first appears, and what to do."""
    where = own.nonfinite
    said = f"{where['value']} first appears on the {where['path']} path in {where['module'] or 'the logits'} in {own.name}"
    if where["position"] is not None:
        said += f" at position {where['position']}"
    said += f"; also in {', '.join(others)}." if others else "."
    if where.get("weights"):
        return [said, f"hint: the weights themselves hold NaN or Inf ({where['weights']}): load another checkpoint"]
    if where["path"] == "cached":
        return [
            said,
            "hint: the recomputation is finite there: look at what the cache gives back, and at rows that see no key",
        ]
    if own.name == "float16":
        return [said, "hint: a dtype with a wider range (bfloat16, float32) may hold it"]
    return [said, "hint: the recomputation itself is not finite in this precision"]


def overflowed(names: Sequence[str]) -> list[str]:
    """Other precisions that overflow."""
    return [f"in {', '.join(names)} it overflows"] if names else []


def refused(why: Mapping[str, str]) -> list[str]:
    """Precisions that torch cannot run the model in."""
    return [f"in {name} the model as it is cannot be run ({text})" for name, text in why.items()]


def grid(rung: PrecisionRun, module: str) -> str:
    """Logits on a narrower grid."""
    return (
        f"Every logit is exactly a {rung.grid} number though the model is in {rung.name}: from module {module or 'unknown'} "
        "on, values were rounded to 16 bits."
    )


def cast(name: str, judged: Judged, rung: PrecisionRun) -> str:
    """A cast to a narrower dtype than the one that serves."""
    found, cause = judged.finding, judged.cause
    return (
        f"In {name}, given equal inputs, {place(judged)} is off by {found.error:.1e}, {_times(found.error / rung.unit)} unit "
        f"roundoffs; {cause.module or 'the block'} casts to {cause.dtype}, and without that cast "
        + ("nothing differs." if cause.left == 0 else f"{cause.left:.1e} is left.")
    )


def inside(dtype: str, name: str, found: Sequence[Judged]) -> str:
    """A cast that matters only above the precision that serves."""
    modules = dict.fromkeys(j.cause.module for j in found if j.cause.module)
    shown = ", ".join(list(modules)[:2]) + (f" and {len(modules) - 2} more" if len(modules) > 2 else "")
    return f"{dtype} inside ({shown or 'the blocks'}): no better than {dtype} in {name}"


def unexplained(name: str, short: Account, blocks: int) -> str:
    """The parts do not account for the whole."""
    by = "with a fixed order of additions" if short.kernels == "fixed order" else "with the machine's kernels"
    if short.explained == 0:
        parts = "given equal inputs no part differs by a bit"
    else:
        room = f"{short.room:.0f} times what was simulated"
        parts = f"errors of the parts' sizes change them by at most {short.explained:.1e} ({room})"
    where = "the head" if short.layer is None or short.layer >= blocks else f"the output of layer {short.layer}"
    return (
        f"In {name}, {by}, the logits differ by {short.found:.1e} relative, but {parts}: something between the parts is wrong, "
        f"first seen in {where}" + (f" at position {short.position}." if short.position is not None else ".")
    )


def not_judged(name: str, worst: Mapping[str, Any], unit: float) -> list[str]:
    """An error that is there in the finest precision, and that nothing was shown to take away."""
    off = f"off by {_times(worst['error'] / unit)} unit roundoffs at position {int(worst['position'])}"
    return [
        f"In {name}, given equal inputs, layer {int(worst['layer'])} is {off}, and nothing was shown to take that away."
    ]


def unknown(name: str, judged: Judged) -> str:
    """A difference whose cause could not be tried."""
    return (
        f"In {name}, given equal inputs, {place(judged)} differs by {judged.finding.error:.1e}; whether that is rounding could "
        f"not be tried: {judged.cause.detail}."
    )


def random(size: float) -> str:
    """A model that computes something else each time."""
    return (
        f"The same forward run twice differs by {size:.1e} relative: the model computes something else each time (dropout, "
        "sampling or noise inside), so its cached path has nothing to be compared with."
    )


def equal(rungs: Sequence[PrecisionRun]) -> str:
    """Nothing differs."""
    steps = sum(len(r.steps) for r in rungs)
    return f"Every logit of all {steps} steps is bitwise the same in {', '.join(r.name for r in rungs)}."


def benign(rung: PrecisionRun, seen: Evidence) -> str:
    """What one precision showed: the machine's kernels, the null control, and a fixed order."""
    found = rung.summary()
    steps, equal_steps = found["steps"], found["bitwise_equal_steps"]
    said = f"{rung.name}: "
    if equal_steps == steps and rung.largest_error == 0:
        said += f"bitwise equal at all {steps} steps"
    else:
        said += (
            f"a block is off by at most {_times(rung.largest_error / rung.unit)} unit roundoffs given equal inputs, the logits "
            f"by {_times(found['max_abs_logit'])} (bitwise equal at {equal_steps} of {steps} steps; merely among more rows they "
            f"change by {_times(found['null_max_abs_logit'] or 0.0)})"
        )
    fixed = rung.fixed
    if fixed is None:
        return f"{said}."
    checks = len(fixed.every_error)
    if fixed.largest_error == 0 and not len(fixed.differing_steps):
        return (
            f"{said}; with a fixed order of additions all {checks} checks and {len(fixed.steps)} steps are bitwise equal."
        )
    words = dict.fromkeys(j.cause.word for j in seen.judged.get(rung.name, ()) if j.kernels == "fixed order")
    why = {"cast": "a cast", "rounding": "rounding"}
    reasons = " and ".join(why[word] for word in words if word in why)
    left = fixed.largest_error / rung.unit
    return f"{said}; with a fixed order {_times(left)} unit roundoffs are left" + (f", by {reasons}." if reasons else ".")


def choices(seen: Evidence) -> list[str]:
    """Expert choices that rounding tips."""
    found = [(n, j.finding.layer) for n, judged in seen.judged.items() for j in judged if j.cause.word == "choice"]
    if not found:
        return []
    shown = ", ".join(f"{name} (layer {layer})" for name, layer in dict.fromkeys(found))
    return [
        f"Rounding tips the choice between nearly equal experts in {shown}; with a fixed order the same ones are chosen."
    ]


def kernel(name: str, judged: Judged) -> str:
    """An error that a kernel makes."""
    found = judged.finding
    return (
        f"Given equal inputs, {place(judged)} is off by {found.error:.1e} in {name}, first at position {found.position}, and "
        "bitwise right once every sum has a fixed order: a kernel is coarse there, not the model's cache."
    )


def onset(name: str, layer: int, position: int, tensor: str) -> str:
    """A kernel that changes its order at a position."""
    return (
        f"In {name} a difference appears or jumps at position {position}, in every prompt, first in layer {layer} ({tensor}); "
        "with a fixed order it is gone: a kernel changes its order there."
    )


def unfixed(rungs: Iterable[PrecisionRun]) -> list[str]:
    """Precisions in which a fixed order could not be run."""
    why: dict[str, list[str]] = {}
    for rung in rungs:
        if rung.unfixed:
            why.setdefault(rung.unfixed, []).append(rung.name)
    return [f"no fixed order in {', '.join(names)}: {text}" for text, names in why.items()]


def checks(seen: Evidence) -> list[str]:
    """What was exercised, and what not."""
    by: dict[str, list[str]] = {}
    for check in seen.checks:
        by.setdefault("not reached" if check.status == "not run" and check.hint else check.status, []).append(check.name)
    lines = [f"exercised: {seen.exercised}"]
    if by.get("passed"):
        lines.append(f"passed too: {'; '.join(by['passed'])}")
    options = sorted({check.hint for check in seen.checks if check.status == "not run" and check.hint})
    for status, goes in (("cannot tell", ""), ("not reached", f" ({', '.join(options)} goes there)"), ("not run", "")):
        if by.get(status):
            lines.append(f"{status}: {'; '.join(by[status])}{goes}")
    return lines


# The page of an audit --------------------------------------------------------------------------------------------------

LADDER = (
    "Free-running: the logits of tokens fed one by one against those of the same prefix recomputed. The null "
    "control is the same row recomputed among more rows. Given equal inputs: every block was handed the rows that the "
    "recomputation handed it, so that its error is its own. With a fixed order of additions what is left has another reason "
    "than the order of additions."
)
FIRST_TENSORS = (
    "Of each precision the first tensor that nothing takes away, or else the first that differs. Errors in "
    "unit roundoffs; left is what remains once the cause is taken away."
)
BLOCKS = (
    "The largest error of each block in any row that was checked, in unit roundoffs of each precision. A "
    "large one is no verdict by itself: what takes it away is."
)
BLOCKS_ELSEWHERE = (
    "This page was made of the verdict alone. What every block showed is on the page of kvinterp audit, and in "
    "kv.audit(model, detail='everything')."
)
CHECKS = (
    "Error: the largest difference of the logits, cached against recomputed, relative to the largest logit. "
    "Beside it the same between two recomputations without a cache."
)
NO_CHECKS = "Nothing else was asked for: the audit was made without further checks."
NO_LOGIT = "No logit differs at this position."
NO_TENSOR = "Given equal inputs no tensor differs in any precision."


def reading_parts(verdict: Verdict) -> tuple[str, list[str], str]:
    """The reading's first line, those that say why, and the one on what was run; notes and checks have tables on the page."""
    first, *rest = verdict.reading.splitlines()
    cut = next((i for i, line in enumerate(rest) if line.startswith("exercised: ")), len(rest))
    return first, rest[:cut], "".join(rest[cut : cut + 1]).removeprefix("exercised: ")


def layer_name(layer: int | None) -> str | None:
    """What a layer is called, the embedding too."""
    return "embedding" if layer == EMBEDDING else None if layer is None else str(layer)


def taken_away(found: Mapping[str, Any]) -> str:
    """What takes the error of a first tensor away, see :class:`kvinterp.auditing.verdict.Verdict`."""
    word, detail = found["taken_away_by"], found["detail"]
    plain = {
        "order": "a fixed order of additions",
        "kernel": "a fixed order of additions, but it is larger than rounding: a kernel is coarse there",
        "choice": "a fixed order of additions: rounding tips the choice between nearly equal experts",
        "cast": f"leaving out the cast to {found['cast_to']}",
        "rounding": f"it is {detail}",
        "form": f"it is {detail}",
        "unknown": f"that could not be tried: {detail}",
    }
    return plain.get(word) or ("nothing" + (f": it is {detail}" if detail else ""))


def same_everywhere(rung: PrecisionRun, where: str) -> str:
    """Of a token at which nothing differs."""
    every = not bool((rung.steps["max_abs"] != 0).any())
    also = f" So is every logit of all {len(rung.steps)} steps." if every else ""
    return f"At {where}, every layer's output and every logit is the same on both paths.{also}"


def one_token(where: str) -> str:
    """What the layers of the table about one token are."""
    return f"At {where}. Layer n is hidden_states[n], what block n - 1 returned; of the last block before the final norm."
