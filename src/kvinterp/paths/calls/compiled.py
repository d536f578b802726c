"""``compiled``: every forward through ``torch.compile``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import _dynamo

from kvinterp.errors import UnsupportedError, unknown
from kvinterp.models import Adapter
from kvinterp.paths.calls.base import Call, Feeder


@dataclasses.dataclass(frozen=True)
class Compiled(Call):
    """The model's forward under ``torch.compile``, compiled again for each path.

    What looks into a block or changes it breaks the graph there, and what stands between is compiled all the same.

    Attributes:
        backend: As torch knows it: ``inductor`` needs a C++ compiler on a CPU; ``aot_eager`` and ``eager`` need none.
    """

    kernels: ClassVar = False
    feeds: ClassVar = False
    audited: ClassVar = "compiled(aot_eager)"

    backend: str = "inductor"

    def __post_init__(self) -> None:
        known = _dynamo.list_backends(exclude_tags=())
        if not isinstance(self.backend, str) or self.backend not in known:
            raise unknown("backend of torch.compile", str(self.backend), known)

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses what is no transformers model itself, and a backend that lacks its compiler."""
        if not adapter.plain:
            raise UnsupportedError(
                f"call={self} compiles a transformers model's own forward, and this is a {adapter.kind}: load the model with "
                "kind='native'."
            )
        if self.backend == "inductor" and adapter.device.type == "cpu":
            from torch._inductor import cpp_builder, exc

            try:
                cpp_builder.get_cpp_compiler()
            except exc.InvalidCxxCompiler as error:
                raise UnsupportedError(
                    f"call={self} needs a C++ compiler, and none was found: install g++, or give compiled(aot_eager)."
                ) from error

    @contextlib.contextmanager
    def running(self, feeder: Feeder) -> Iterator[None]:
        """Puts the compiled forward in the model's place, and counts the graphs that were made and run."""
        model: Any = feeder.adapter.model
        own, graphs = vars(model).get("forward"), 0
        _dynamo.reset()
        before = _dynamo.utils.counters["stats"]["unique_graphs"]

        def backend(graph: Any, inputs: Any) -> Any:
            made = _dynamo.lookup_backend(self.backend)(graph, inputs)

            def ran(*args: Any) -> Any:
                feeder.count("compiled graphs run")
                return made(*args)

            # aot_eager and inductor hand over what takes its inputs as a list, and say so.
            ran._boxed_call = getattr(made, "_boxed_call", False)  # type: ignore[attr-defined]
            return ran

        vars(model)["forward"] = torch.compile(model.forward, backend=backend)
        try:
            yield
        finally:
            graphs = _dynamo.utils.counters["stats"]["unique_graphs"] - before
            feeder.witness["graphs compiled"] = graphs
            vars(model).pop("forward")
            if own is not None:
                vars(model)["forward"] = own
            _dynamo.reset()

    def missing(self, witness: dict[str, int]) -> str:
        """A graph that was compiled and run."""
        return "" if witness.get("compiled graphs run") else "torch compiled no graph of this model"
