"""Hold the run that wrote each text against a clean forward over the finished text, and what is
read off the activations.

Beside both stands the null: the same forward with as many tokens more behind the text.
"""

from __future__ import annotations

from typing import Any

from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    OfModel,
    Result,
    joined,
    option,
    shared,
)
from kvinterp.comparison.sparse_autoencoder import SparseAutoencoder, by_hook_point, load_sae
from kvinterp.comparison.which_run import (
    GENERATE,
    WhichRun,
    which_run,
)
from kvinterp.models.attaching import HookPoint
from kvinterp.paths import path_named
from kvinterp.report.forks import fork_parts


class WhichRunWrote(
    OfModel,
    of="kvinterp.comparison.which_run:which_run",
    without=("probes", "features", "first", "within"),
    run="run_by",
):
    """Which run do your activations come from: the one that wrote the text, or its
    recomputation?
    """

    RESULT = WhichRun

    prompts: str = shared("prompts")
    sae: tuple[str, ...] = option(
        (),
        "A folder with a sparse autoencoder in SAELens's form, whose features are held against each other. Repeatable.",
    )
    layers: Any = option(example="0,2,-1")
    run_by: Any = option(flag="--run")
    max_new_tokens: Any = option(min=2)
    top: Any = option(min=1)

    def check(self) -> None:
        """The path and the autoencoders, too."""
        super().check()
        if self.run_by != GENERATE:
            path_named(self.run_by)
        self.features()

    def features(self) -> dict[HookPoint, SparseAutoencoder]:
        """The autoencoders, by the site and layer that each names."""
        return by_hook_point([load_sae(folder) for folder in self.sae])

    def settings(self) -> dict[str, Any]:
        """With what the autoencoders hold instead of their folders' names: one that was trained
        anew is another.
        """
        return {**super().settings(), "sae": [sae.digest for sae in map(load_sae, self.sae)]}

    def cells(self) -> list[Cell]:
        """A cell a prompt."""
        return [
            Cell(f"example-{n}", self.held, {"number": n}) for n in range(len(self.prompt_list))
        ]

    def held(self, number: int) -> CellResult:
        """One text."""
        prompt = self.prompt_list[number]
        found = which_run(
            self.adapter(),
            [prompt],
            first=number,
            features=self.features(),
            **self.arguments(),
        )
        return found.tables, found.provenance

    def reduce(self, results: CellResults) -> Result:
        """All texts."""
        tables = joined(results)
        about = next(about for _, about in results.values())
        return WhichRun(tables["distances"], tables["readouts"], tables["texts"], about)

    def page_parts(self, result: Any) -> list[Any]:
        """The positions at which the runs part, with the text around."""
        return fork_parts(result)
