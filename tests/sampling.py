"""Which tests of a family run by default: those that meet every pair of what can matter, instead of the full product.

A law that is held over every model, kind, dtype and direction is one test function with a hundred cases and more, and most
of them say again what others said: what breaks a law is nearly always one thing (a window, a kind's hooks) or two that meet
(a window under SDPA). So by default a function that takes a ``case``, or is marked ``pairs``, runs so many of its cases that

* every feature of a model (``support.FEATURES``: MHA, GQA, MQA, sliding window, soft cap, learned positions, ...) meets every
  kind and attention implementation that can run it,
* each of those meets every value of every other parameter (dtype, path, direction, ...), and those meet each other,
* one case is a model of the zoo, where there is one: those are trained, the others are random.

A function marked ``each`` runs so many that every value of every parameter occurs once: for what stands in one place and
has nothing to do with, say, the kind of model.

They are chosen greedily, the one that meets most new pairs first; among equals a checksum of the test's name decides. So the
choice is the same on every machine and in every worker, and differs from law to law: together the laws meet far more than
pairs. ``pytest --everything`` runs the full product. A case marked ``long`` is never chosen; one marked ``always`` always is.

What is marked ``slow`` (a whole command, audit or notebook) is for ``pytest --slow``. Without, as the project's CI runs it, a
function that is marked and has several cases runs one of those that were chosen; a test that stands alone, or a module that is
marked, none.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from support import FEATURES, Case

Aspect = tuple[str, object]
"""A parameter, or what it says of the model, and its value."""


def left_out(items: Iterable[pytest.Item], slow: bool = False) -> set[pytest.Item]:
    """Those of the tests that are not run: without ``--everything``, and unless ``slow`` without ``--slow``."""
    left, families = set(), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("long"):
            left.add(item)
        else:
            families[item.nodeid.split("[")[0]].append(item)
    for family in families.values():
        taken = chosen(family) if _is_of_a_family(family[0]) else set(family)
        if not slow:
            taken -= slow_ones(taken)
        left |= set(family) - taken
    return left


def slow_ones(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of a function's cases that are marked ``slow``, but for one where it is the function that is marked."""
    found = {item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("always")}
    cases = [item for item in found if hasattr(item, "callspec") and any(m.name == "slow" for m in item.own_markers)]
    return found - {max(cases, key=_by_name)} if cases else found


def chosen(family: list[pytest.Item]) -> set[pytest.Item]:
    """So many cases of one test function that every pair of aspects (marked ``each``: every aspect) that occurs is met."""
    pairs = {item: set(_pairs(item)) for item in family}
    taken = {item for item in family if item.get_closest_marker("always")}
    wanted = set().union(*pairs.values()) - set().union(*(pairs[item] for item in taken))
    while wanted:
        best = max(family, key=lambda item: (len(pairs[item] & wanted), _by_name(item)))
        taken.add(best)
        wanted -= pairs[best]
    return taken


def _by_name(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _is_of_a_family(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return isinstance(parameters.get("case"), Case) or bool(
        parameters and (item.get_closest_marker("pairs") or item.get_closest_marker("each"))
    )


def _pairs(item: pytest.Item) -> Iterator[frozenset[Aspect]]:
    """All pairs of aspects of different groups; of a test with one group, or marked ``each``, its aspects alone."""
    groups: list[list[Aspect]] = []
    for name, value in item.callspec.params.items():  # type: ignore[attr-defined]  # a family has parameters
        if name == "case" and isinstance(value, Case):
            if value.model.startswith("zoo:"):
                yield frozenset([("trained", True)])
            groups += [
                [("feature", feature) for feature in FEATURES[value.model]],
                [("way", (value.kind, value.attention))],
            ]
        else:
            groups.append([(name, repr(value))])
    if len(groups) == 1 or item.get_closest_marker("each"):
        yield from (frozenset([aspect]) for group in groups for aspect in group)
        return
    for one, other in itertools.combinations(groups, 2):
        yield from (frozenset(pair) for pair in itertools.product(one, other))
