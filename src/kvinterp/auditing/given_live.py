"""A live server's log-probs, judged: cold and warm, each against our own, and one against the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvinterp.auditing.bench import Check
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, Verdict
from kvinterp.comparison.given import asked
from kvinterp.models import Adapter
from kvinterp.recording.endpoint import Fetched
from kvinterp.recording.given import GivenPath

ORDER = ("equal", "rounding", "kernel")


def audit_endpoint(
    adapter: Adapter,
    url: str,
    prompts: Any,
    keep: str | Path | None,
    read: Callable[[Path], list[GivenPath]],
    judge: Callable[[Sequence[GivenPath]], Verdict],
    tell: Callable[[str], None],
) -> Verdict:
    """Asks a server, and judges what it gave with nothing cached and with everything cached.

    Args:
        adapter: The model that the server is said to run.
        url: The server's address.
        prompts: What it goes on from; four of ours for None.
        keep: The folder of its answers; one of its own for None.
        read: Reads a file of answers.
        judge: Judges paths.
        tell: Told what is done next.

    Returns:
        The verdict of the worse side.

    Raises:
        InputError: The server does not answer as one does.
    """
    fetched = asked(adapter, url, prompts, keep, tell)
    sides = {name: read(getattr(fetched, name)) for name in ("cold", "warm")}
    witness = fetched.cached[1] is not None and fetched.cached[1] > (fetched.cached[0] or 0)
    verdicts = {name: judge(paths) for name, paths in sides.items() if name == "cold" or witness}
    worse = max(verdicts, key=lambda name: _badness(verdicts[name]))
    found = verdicts[worse]
    checks = [_witness(fetched, sides, witness)]
    for name, each in verdicts.items():
        checks += [dataclasses.replace(check, name=f"{name}, {check.name}") for check in each.checks]
    head, why = found.reading.splitlines()[:2]
    head = head.replace("another engine's log-probs", f"{url}, {worse}")
    lines = [head, f"  {worse}: {why.strip()}", *(f"  {check.name}: {check.detail}" for check in checks)]
    about = {
        "cached_tokens": fetched.cached,
        "prompt_tokens": fetched.asked,
        "model": fetched.model,
        "answers": str(fetched.cold.parent),
    }
    return dataclasses.replace(
        found, checks=tuple(checks), reading="\n".join(lines), given={**found.given, "server": {"url": url, **about}}
    )


def _badness(verdict: Verdict) -> tuple[int, int]:
    fails = 2 if verdict.exit_code == 1 else 1 if verdict.verdict == CANNOT_TELL else 0
    return fails, ORDER.index(verdict.verdict) if verdict.verdict in GOOD else 0


def _witness(fetched: Fetched, sides: dict[str, list[GivenPath]], witness: bool) -> Check:
    """How far warm is from cold, and the server's own word that it was warm."""
    cold, warm = fetched.cached
    if not witness:
        said = "does not say how many tokens it took from its cache"
        if warm is not None:
            said = f"took {warm:,} of {fetched.asked:,} prompt tokens from its cache the second time, and {cold or 0:,} the first"
        why = f"the server {said}: nothing shows that the second time was warm, and only the first is judged."
        return Check("cold against warm", "cannot tell", why, None)
    first = {path.prompt: path.chosen for path in sides["cold"]}
    gaps = [np.abs(path.chosen - first[path.prompt]) for path in sides["warm"] if path.prompt in first]
    gap = np.concatenate(gaps) if gaps else np.array([])
    gap = gap[np.isfinite(gap)]
    if not len(gap):
        return Check("cold against warm", "cannot tell", "no token has a log-prob both times: ask for more.", None)
    how = "bitwise equal" if not gap.any() else f"apart by {gap.mean():.3g} nats on average, {gap.max():.3g} at most"
    why = (
        f"{how} (n = {len(gap):,}); of {fetched.asked:,} prompt tokens {warm:,} came from the server's cache the second time, "
        f"{cold or 0:,} the first."
    )
    return Check("cold against warm", "passed", why, float(gap.mean()))
