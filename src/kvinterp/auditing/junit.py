"""An audit as JUnit XML, which test runners and their pages read: a case for each precision and for each check."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree as Tree

import torch

from kvinterp.auditing.values import narrower
from kvinterp.auditing.verdict import CANNOT_TELL

if TYPE_CHECKING:
    from kvinterp.auditing.ladder import PrecisionRun
    from kvinterp.auditing.verdict import Audit, Verdict

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, whichever way they are written."""


class Case(NamedTuple):
    """A test case: a precision or a check.

    Attributes:
        name: Its name.
        kind: ``"failure"``, ``"error"``, ``"skipped"``, or empty where it passes.
        said: Its sentence.
        seconds: What it took, where that is known.
    """

    name: str
    kind: str
    said: str
    seconds: float = 0.0


def cases_of(audit: Audit) -> list[Case]:
    """The audit as test cases: there are failures or errors among them just where the exit code is not 0.

    What failed in a verdict that is allowed, what could not be told beside one that passes, and what was not run are skipped,
    each with its sentence.
    """
    verdict = audit.verdict
    own = str(audit.provenance["dtype"])
    cases = [Case(f"ladder {rung.name}", *_of_rung(verdict, rung, own), rung.summary()["seconds"]) for rung in audit.rungs]
    kinds = {"failed": "failure", "not run": "skipped", "cannot tell": "skipped"}
    for check in verdict.checks:
        said = check.failure if check.status == "failed" else check.detail
        cases.append(Case(check.name, kinds.get(check.status, ""), said))
    if verdict.exit_code == 0:
        cases = [case._replace(kind="skipped" if case.kind else "") for case in cases]
    elif not any(case.kind in ("failure", "error") for case in cases):
        # What the verdict says of the whole stands with the precision that serves.
        kind = "error" if verdict.verdict == CANNOT_TELL else "failure"
        whole = Case("verdict", kind, verdict.reading)
        cases = [
            whole._replace(name=case.name, seconds=case.seconds) if case.name == f"ladder {own}" else case for case in cases
        ]
        if not audit.rungs:
            cases.append(whole)
    return cases


def junit_xml(audit: Audit) -> str:
    """The audit as JUnit XML, of the cases of :func:`cases_of`."""
    verdict, cases = audit.verdict, cases_of(audit)
    first, reasons, _ = verdict.parts
    why = (reasons or [first])[0]
    name = _clean(f"kvinterp audit of {audit.provenance['model']}")
    suite = Tree.Element("testsuite", name=name, tests=str(len(cases)))
    for case, kind, said, seconds in cases:
        element = Tree.SubElement(suite, "testcase", classname="kvinterp.audit", name=_clean(case), time=f"{seconds:.3f}")
        if kind:
            message = _clean(why if said == verdict.reading else said.splitlines()[0] if said else verdict.verdict)
            inner = Tree.SubElement(element, kind, message=message)
            if kind != "skipped":
                inner.set("type", verdict.verdict)
                inner.text = _clean(said)
    for key, counted in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.kind == counted for case in cases)))
    suite.set("time", f"{sum(case.seconds for case in cases):.3f}")
    Tree.SubElement(suite, "system-out").text = _clean(verdict.reading)
    root = Tree.Element("testsuites")
    root.append(suite)
    Tree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{Tree.tostring(root, encoding="unicode")}\n'


def _clean(text: object) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", str(text))


def _of_rung(verdict: Verdict, rung: PrecisionRun, own: str) -> tuple[str, str]:
    """What a precision's case is, and its sentence."""
    if rung.nonfinite:
        where = rung.nonfinite
        said = f"{where['value']} in {where['module'] or 'the logits'} on the {where['path']} path in {rung.name}"
        return ("failure", f"{said}\n{verdict.reading}") if rung.name == own else ("skipped", said)
    shown: dict[str, Any] = verdict.evidence.get(rung.name, {})
    first, account = shown.get("first_tensor"), shown.get("parts_account_for_the_whole")
    cast = first and first["taken_away_by"] == "cast" and narrower(getattr(torch, first["cast_to"]), getattr(torch, own))
    wrong = {
        "bug": first is not None and first["taken_away_by"] == "",
        "hidden-cast": bool(cast),
        "unexplained": account is not None and account["found"] > account["explained"],
        "wrong-dtype": bool(rung.grid) and rung.unit < 1e-5,
    }
    return ("failure", verdict.reading) if wrong.get(verdict.verdict) else ("", "")
