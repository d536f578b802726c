"""``compile``: every forward from here on goes through ``torch.compile``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.program import Operation, Runs
from kvinterp.auditing.programs.running import Run
from kvinterp.common.checks import check_known
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.hooks import wrapping_methods


@dataclasses.dataclass(frozen=True)
class Compile(Operation):
    """The model's forward under ``torch.compile``, compiled anew; not drawn, since that takes seconds.

    What looks into a block or changes it breaks the graph there, and what stands between is compiled all the same.

    Attributes:
        backend: As torch knows it: ``inductor`` needs a C++ compiler on a CPU; ``aot_eager`` and ``eager`` need none.
    """

    backend: str = "inductor"
    weight = 0
    proof = ("compiled graphs run", "torch compiled no graph of this model")

    def __post_init__(self) -> None:
        # Imported where it is used: with sympy it is a third of what importing kvinterp takes.
        from torch import _dynamo

        check_known("backend of torch.compile", self.backend, _dynamo.list_backends(exclude_tags=()))

    def offered(self, run: Run) -> bool:
        """Where the subject is a transformers model itself."""
        return bool(run.subject.native)

    def smaller(self) -> list[Operation]:
        """None: no backend is plainer than another."""
        return []

    def do(self, run: Runs) -> Iterable[Tensor]:
        """Compiles until the program is over."""
        run.tries("compiled", f"own, model.forward = model.forward, torch.compile(model.forward, backend={self.backend!r})")
        own = run.model.forward
        run.held.enter_context(compiled(run.model, self.backend, run.count))
        run.compiled(lambda: _replaced(run.model, own))
        return ()

    def check(self, adapter: Adapter, length: int) -> None:
        """Refuses what is no transformers model itself, and a backend that lacks its compiler."""
        if not adapter.plain:
            raise UnsupportedError(
                f"{self} compiles a transformers model's own forward, and this is a {adapter.kind}: load the model with "
                "kind='native'."
            )
        if self.backend == "inductor" and adapter.device.type == "cpu":
            from torch._inductor import cpp_builder, exc

            try:
                cpp_builder.get_cpp_compiler()
            except exc.InvalidCxxCompiler as error:
                raise UnsupportedError(
                    f"{self} needs a C++ compiler, and none was found: install g++, or give aot_eager."
                ) from error


@contextlib.contextmanager
def compiled(model: Any, name: str, count: Callable[[str, int], None]) -> Iterator[None]:
    """Puts the compiled forward in the model's place, and counts the graphs that are made and run."""
    from torch import _dynamo

    _dynamo.reset()
    before = _dynamo.utils.counters["stats"]["unique_graphs"]

    def backend(graph: Any, inputs: Any) -> Any:
        made = _dynamo.lookup_backend(name)(graph, inputs)

        def ran(*args: Any) -> Any:
            count("compiled graphs run", 1)
            return made(*args)

        # aot_eager and inductor hand over what takes its inputs as a list, and say so.
        ran._boxed_call = getattr(made, "_boxed_call", False)  # type: ignore[attr-defined]
        return ran

    try:
        with _replaced(model, torch.compile(model.forward, backend=backend)):
            yield
    finally:
        count("graphs compiled", _dynamo.utils.counters["stats"]["unique_graphs"] - before)
        _dynamo.reset()


def _replaced(model: Any, forward: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    return wrapping_methods([model], "forward", lambda _, __, *given, **more: forward(*given, **more))
