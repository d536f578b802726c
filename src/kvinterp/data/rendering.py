"""A program of its own, which renders a chat template where it can do no harm: in little memory and little time.

A template comes with a checkpoint. The sandbox of Jinja keeps it from files and code, and bounds neither its loops nor its
texts. :func:`kvinterp.data.chat.rendered` runs this program once for each template before transformers renders it.
Standard input has the template and what it is given, as JSON; the exit code says whether it stayed within bounds.
"""

from __future__ import annotations

import sys

MEMORY, SECONDS, LENGTH, UNBOUNDED = 2**29, 2, 10**7, 3


def main() -> int:
    """Renders, and returns 0 or ``UNBOUNDED``; an error of another kind is for transformers to raise again."""
    import json

    _limit()
    given = json.load(sys.stdin)
    try:
        said = rendered(given["template"], given["variables"])
    except MemoryError:
        return UNBOUNDED
    # Whatever is wrong with it besides is said by transformers, which knows more.
    except Exception:
        return 0
    return UNBOUNDED if len(said) > LENGTH else 0


def _limit() -> None:
    """Bounds this process, where the system can."""
    try:
        import resource
    except ImportError:
        return  # Windows: whoever started this waits for a while, and no longer.
    for what, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY)):
        already = resource.getrlimit(what)[1]
        least = most if already == resource.RLIM_INFINITY else min(most, already)
        resource.setrlimit(what, (least, least))


def rendered(template: str, variables: dict[str, object]) -> str:
    """The text, with the names that transformers gives a template."""
    import json
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks what the model wrote and is no part of the text."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja asks for it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, ensure_ascii: bool = False, **how: object) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)  # type: ignore[arg-type]

    inside = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    inside.filters["tojson"] = as_json
    inside.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return inside.from_string(template).render(variables)


if __name__ == "__main__":
    # Beside this file lie others, which no import here means.
    sys.path[:] = sys.path[1:]
    sys.exit(main())
