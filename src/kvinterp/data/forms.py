"""The forms of texts that stand for prompts, so that such a text is told from a prompt without making
any.
"""

from __future__ import annotations

import re

GENERATORS = ("arithmetic", "restate", "instructions")
"""The names of :data:`kvinterp.data.tasks.TASKS`."""
SOURCES = ("gsm8k", "jsonl", *GENERATORS)
"""The names of :data:`kvinterp.data.sources.SOURCES`."""
_NUMBERED = re.compile(rf"({'|'.join(GENERATORS)}):\d+(:\d+)?")
_CALLED = re.compile(rf"\s*({'|'.join(SOURCES)})\(.*\)\s*", re.DOTALL)


def names_generator(text: str) -> bool:
    """Whether a text has the form of a generator: a name of GENERATORS and numbers."""
    return _NUMBERED.fullmatch(text) is not None


def names_source(text: str) -> bool:
    """Whether a text has the form of a source: a name of SOURCES and brackets."""
    return _CALLED.fullmatch(text) is not None
