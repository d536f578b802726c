"""For pytest: ``pytest --kvinterp-model pkg.mod:Class`` audits a model once and reports a test for each part.

A test for each precision, each other use of the cache, each call plan, and one for the verdict; what was not run is skipped
with its reason. Fixtures: ``kvinterp_model`` and ``kvinterp_verdict``. Nothing heavy is imported unless the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvinterp.auditing import Verdict
    from kvinterp.auditing.junit import Case
    from kvinterp.models import Adapter
    from kvinterp.study.experiments.audit import Audit

SUITE = "kvinterp"
VERDICT = "verdict"
OPTIONS: dict[str, tuple[Any, str]] = {
    "model": (None, "audit this model: zoo:NAME, a checkpoint folder, a hub id, or your own package.module:Class"),
    "config": (None, "the config.json of package.module:Class; its config's defaults unless given"),
    "dtype": (None, "its dtype, as in kvinterp audit"),
    "rungs": ("float32,float64", "precisions to climb beside the model's own, with commas"),
    "lengths": ("5,63,64,65", "prompt lengths after which tokens are fed singly, with commas"),
    "steps": ("3", "tokens fed singly after each"),
    "checks": ("default", "what else is exercised: default, thorough or none"),
    "calls": ("", "call plans besides, as padded(left,5),batched(8); or all"),
    "allow": ("", "words that shall not fail, with commas, such as hidden-cast"),
    "seed": ("0", "seeds random prompts and random weights"),
}
"""Default and help of ``--kvinterp-NAME``; what each takes, ``kvinterp audit`` says."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup(SUITE, "kvinterp: is decoding from a model's cache right?")
    for name, (default, said) in OPTIONS.items():
        shown = f"{said} (default: {default})" if default else said
        group.addoption(f"--kvinterp-{name}", default=None, metavar=name.upper(), help=shown)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Looks at what was given and loads the model, before anything is collected.

    Raises:
        pytest.UsageError: Something given does not fit.
    """
    given = {name: session.config.getoption(f"--kvinterp-{name}") for name in OPTIONS}
    session.config.stash[_SUBJECT] = None
    if given["model"] is None:
        if others := [f"--kvinterp-{name}" for name, value in given.items() if value is not None]:
            raise pytest.UsageError(
                f"{others[0]} was given without a model: give one with --kvinterp-model, or leave it out."
            )
        return
    from kvinterp.errors import KvinterpError

    try:
        session.config.stash[_SUBJECT] = _Subject({n: OPTIONS[n][0] if v is None else v for n, v in given.items()})
    except KvinterpError as error:
        raise pytest.UsageError(f"--kvinterp: {error}") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the parts of the audit to what was collected, so that -k and the rest select among them."""
    if (subject := config.stash[_SUBJECT]) is not None:
        for name in subject.parts():
            part = Part.from_parent(session, name=name, nodeid=f"{SUITE}::{name}")
            part.add_marker(pytest.mark.xdist_group(SUITE))
            items.append(part)


class Part(pytest.Item):
    """A part of the audit as a test: it fails with the sentence of what failed there."""

    def runtest(self) -> None:
        """Makes the audit where this is the first part that runs."""
        cases = _subject(self.config).cases_of(self.name)
        for case in cases:
            if case.kind in ("failure", "error"):
                pytest.fail(case.said, pytrace=False)
        for case in cases:
            if case.kind:
                pytest.skip(case.said)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where it stands among the tests."""
        return SUITE, None, f"{SUITE}::{self.name}"


class _Subject:
    """The model that the options name, and its audit, made once.

    Args:
        given: The options by name.

    Raises:
        KvinterpError: Something given does not fit.
    """

    def __init__(self, given: dict[str, str]) -> None:
        from kvinterp.auditing.audit import checked_lengths, precisions
        from kvinterp.auditing.called import check_plans, plans_of
        from kvinterp.errors import located
        from kvinterp.study.cells import loaded

        self.asked = _asked(given)
        self.asked.check()
        assert self.asked.lengths is not None
        checked_lengths(self.asked.lengths, self.asked.steps)
        self.asked.check_reached()
        with located(f"--kvinterp-model {given['model']}"):
            self.adapter: Adapter = loaded(self.asked.named())
        self.plans = plans_of(self.asked.calls)
        if self.asked.calls != "all":
            check_plans(self.adapter, self.plans)
        self.wanted = [name.strip() for name in self.asked.rungs.split(",")]
        self.rungs = tuple(precisions(self.wanted, self.adapter))
        self.made: tuple[Verdict, list[Case]] | str | None = None

    def parts(self) -> Iterator[str]:
        """The names of the tests, before anything has run."""
        from kvinterp.auditing.called import CALLED
        from kvinterp.auditing.exercises import CHECKS

        yield from (f"ladder {name}" for name in self.rungs)
        if self.asked.checks != "none":
            yield from (*CHECKS, *(f"{CALLED}{plan}" for plan in self.plans))
        yield VERDICT

    def audited(self) -> tuple[Verdict, list[Case]]:
        """The verdict and its cases; what cannot be audited fails with one sentence, each time it is asked for."""
        if self.made is None:
            self.made = self._audit()
        if isinstance(self.made, str):
            pytest.fail(self.made, pytrace=False)
        return self.made

    def _audit(self) -> tuple[Verdict, list[Case]] | str:
        from kvinterp.auditing import audit
        from kvinterp.auditing.junit import cases_of
        from kvinterp.errors import KvinterpError
        from kvinterp.study.experiments.audit import models_own_errors

        asked, names = self.asked, ("lengths", "steps", "seed", "checks", "calls", "allow")
        try:
            with models_own_errors():
                more: dict[str, Any] = {name: getattr(asked, name) for name in names}
                made = audit(self.adapter, rungs=self.wanted, sweep="no", detail="everything", **more)
        except KvinterpError as error:
            return str(error)
        return made.verdict, cases_of(made)

    def cases_of(self, name: str) -> list[Case]:
        """What the audit shows of a part."""
        from kvinterp.auditing.junit import Case

        verdict, cases = self.audited()
        if name == VERDICT:
            return [Case(name, "failure" if verdict.exit_code else "", verdict.reading)]
        # Of the edges of several windows each is a case.
        found = [case for case in cases if case.name == name or case.name.startswith((f"{name} of ", f"{name} ("))]
        return found or [Case(name, "skipped", "the audit says nothing of it: it was not exercised")]


_SUBJECT = pytest.StashKey["_Subject | None"]()


def _asked(given: dict[str, str]) -> Audit:
    """The choices of ``kvinterp audit`` that the options stand for."""
    import re
    from pathlib import Path

    from kvinterp.errors import InputError
    from kvinterp.study.experiments.audit import Audit

    def whole(name: str, most: int = 1) -> tuple[int, ...]:
        parts = given[name].split(",")
        if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", part) for part in parts) or len(parts) > most:
            expected = f"{'one whole number' if most == 1 else 'whole numbers'}, as in {OPTIONS[name][0]}"
            raise InputError(f"--kvinterp-{name} {given[name][:80]!r} was given: expected {expected}.")
        return tuple(map(int, parts))

    words = tuple(filter(None, given["allow"].split(",")))
    texts = {name: given[name] for name in ("model", "dtype", "rungs", "checks", "calls")}
    (steps,), (seed,) = whole("steps"), whole("seed")
    config: Any = given["config"] and Path(given["config"])
    return Audit(**texts, config=config, lengths=whole("lengths", 1000), steps=steps, seed=seed, allow=words)  # type: ignore[arg-type]


# Fixtures --------------------------------------------------------------------------------------------------------------


def _subject(config: pytest.Config) -> _Subject:
    if (subject := config.stash[_SUBJECT]) is None:
        pytest.skip("no model was given; give one with --kvinterp-model")
    return subject


@pytest.fixture(scope="session")
def kvinterp_model(pytestconfig: pytest.Config) -> Adapter:
    """The model of ``--kvinterp-model``, which every verb of kvinterp takes; its module is ``.model``."""
    return _subject(pytestconfig).adapter


@pytest.fixture(scope="session")
def kvinterp_verdict(pytestconfig: pytest.Config) -> Verdict:
    """The verdict of its audit, the one that the other tests report."""
    return _subject(pytestconfig).audited()[0]
