"""``compile``: every forward from here on goes through ``torch.compile``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.common.checks import check_known
from kvinterp.models.hooks import wrapping_methods


@dataclasses.dataclass(frozen=True)
class Compile(Operation):
    """The model's forward under ``torch.compile``, compiled anew; not drawn, since that takes
    seconds.

    What looks into a block or changes it breaks the graph there, and what stands between is
    compiled all the same.

    Attributes:
        backend: As torch knows it: ``inductor`` needs a C++ compiler on a CPU; ``aot_eager`` and
            ``eager`` need none.
    """

    backend: str = "inductor"
    weight = 0

    def __post_init__(self) -> None:
        # Imported where it is used: with sympy it is a third of what importing kvinterp takes.
        from torch import _dynamo

        check_known(
            "backend of torch.compile", self.backend, _dynamo.list_backends(exclude_tags=())
        )

    def offered(self, run: Run) -> bool:
        """Where the subject is a transformers model itself."""
        return bool(run.subject.native)

    def smaller(self) -> list[Operation]:
        """None: no backend is plainer than another."""
        return []

    def do(self, run: Run) -> None:
        """Compiles until the program is over."""
        run.tries(
            "compiled",
            f"own, model.forward = model.forward, torch.compile(model.forward, backend={self.backend!r})",
        )
        own = run.model.forward
        run.held.enter_context(compiled(run.model, self.backend))
        # What is right is computed by the model's own forward.
        vars(run.subject)["uncompiled"] = lambda: _replaced(run.model, own)
        run.held.callback(vars(run.subject).pop, "uncompiled")


@contextlib.contextmanager
def compiled(model: Any, backend: str) -> Iterator[None]:
    """Puts the compiled forward in the model's place."""
    from torch import _dynamo

    _dynamo.reset()
    try:
        with _replaced(model, torch.compile(model.forward, backend=backend)):
            yield
    finally:
        _dynamo.reset()


def _replaced(model: Any, forward: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    return wrapping_methods(
        [model], "forward", lambda _, __, *given, **more: forward(*given, **more)
    )
