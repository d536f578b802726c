"""Cells done by Ray's workers, on this machine or on a cluster.

An engine is called with cells and with what they are offered: ``keep``, ``tell``, ``progress``.
Wherever a cell is done, it is this process that keeps what it gave, as it arrives, so that a run
goes on from its cells under either engine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvinterp.commands.cells import Cell, alone, groups
from kvinterp.common.files import differences
from kvinterp.common.store import CellResult
from kvinterp.errors import InputError, KvinterpError, reason

_ADVICE = (
    "look at its logs and at RAY_ADDRESS, then give the same command again, which goes on from what is finished, or leave "
    "--engine out."
)
_SHARES = 4
"""Into how many pieces at least a worker's share of the cells is cut, so that none waits long for
the last.
"""


@dataclasses.dataclass(frozen=True)
class Ray:
    """Tasks of Ray: on the cluster that ``RAY_ADDRESS`` names, or on workers of this machine.

    A task is a cell, or a few that share a call; Ray gives it to another worker where one ends. A
    worker on a machine that is not like this one is refused, since its bits may be others.

    Attributes:
        workers: How many workers are started on this machine; unless given the cluster's, or one
            for as many of its cores as this process has threads.
    """

    workers: int | None = None

    def __call__(self, cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
        """Does the cells.

        Raises:
            InputError: Ray is not installed; a worker's machine is not like this one.
            KvinterpError: Ray cannot be reached, or gave a task up; or what a cell raised.
        """
        self.check()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        import torch

        from kvinterp.models.provenance import machine

        here, ours = machine(), not ray.is_initialized()
        on_this = (
            {}
            if self.workers is None
            else {"address": "local", "num_cpus": self.workers * here["threads"]}
        )
        try:
            ray.init(
                include_dashboard=False,
                logging_level=logging.ERROR,
                ignore_reinit_error=True,
                **on_this,
            )
        # Whatever it says: of a cluster that does not answer or of another version, a port that is
        #     taken, memory that is wanting.
        except Exception as error:
            raise KvinterpError(
                f"Ray cannot be reached or started ({reason(error)}): {_ADVICE}"
            ) from error
        try:
            gpus = int(torch.cuda.is_available() and ray.cluster_resources().get("GPU", 0) > 0)
            work = ray.remote(num_cpus=here["threads"], num_gpus=gpus)(_work)
            waiting = [
                work.remote(piece, here) for piece in _pieces(cells, self.workers or _SHARES)
            ]
            while waiting:
                (done,), waiting = ray.wait(waiting)
                for key, made in ray.get(done).items():
                    offered["keep"](key, *made)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except ray.exceptions.RayError as error:
            raise KvinterpError(
                f"Ray gave up a piece of work ({reason(error)}): {_ADVICE}"
            ) from error
        finally:
            if ours:
                ray.shutdown()

    def check(self) -> None:
        """Raises where it cannot work.

        Raises:
            InputError: Ray is not installed, or no number of workers was given.
        """
        if self.workers is not None and not (
            isinstance(self.workers, int) and 1 <= self.workers <= 100_000
        ):
            raise InputError(
                f"engine ray({self.workers}) was given: expected a whole number of workers, as in ray(4)."
            )
        if importlib.util.find_spec("ray") is None:
            raise InputError(
                "engine 'ray' needs Ray, which is not installed: pip install 'kvinterp[ray]', or use 'local'."
            )


def _pieces(cells: Sequence[Cell], workers: int) -> Iterator[list[Cell]]:
    """Cells that share a call stay together, as far as every worker gets some pieces."""
    most = math.ceil(len(cells) / (_SHARES * workers))
    for group in groups(cells):
        size = most if "keep" in inspect.signature(group[0].function).parameters else 1
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _work(cells: Sequence[Cell], here: Mapping[str, Any]) -> dict[str, CellResult]:
    """Does cells in a worker, and gives what they made by their keys.

    Args:
        cells: Cells of one model.
        here: The machine that gives the work.
    """
    import torch

    from kvinterp.models.provenance import machine

    torch.set_num_threads(here["threads"])
    torch.use_deterministic_algorithms(here["kernel_flags"]["deterministic_algorithms"])
    if unlike := differences(here, machine()):
        raise InputError(
            f"a worker of Ray runs on a machine unlike this one ({unlike}), so that its bits may be others: start the study on a "
            "machine like the workers, with the same versions and environment."
        )
    return dict(alone(cells))
