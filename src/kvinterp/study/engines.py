"""Where cells are done: in this process, or by Ray's workers on this machine or on a cluster.

An engine is called with cells and with what they are offered: ``keep``, ``tell``, ``progress``. Wherever a cell is done, it is
this process that keeps what it gave, whole and as it arrives, so that a run goes on from its parts under either engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvinterp.common.bounded import within
from kvinterp.common.files import differences
from kvinterp.common.progress import Pace, listening
from kvinterp.common.spec import named, read
from kvinterp.errors import InputError, KvinterpError, shown
from kvinterp.models.checkpoint import reason
from kvinterp.study.cells import Cell, Engine, Local, groups, imported, loading_once

log = logging.getLogger("kvinterp")

_TRIES = 3
"""How often a worker may end under the same cell."""
_SECONDS = 5.0
"""How long a cluster may take to answer at all."""
_SHARES = 4
"""Into how many pieces at least a worker's share of the cells is cut, so that none waits long for the last."""


@dataclasses.dataclass(frozen=True)
class Ray:
    """Ray's workers: of the cluster that ``RAY_ADDRESS`` names or that runs here, else of this machine.

    Each worker has one model at a time, the threads of this process, and one piece of work in hand. Another takes the place of
    one that is killed, and the cell it was at is done again; what arrived before is kept. A worker on a machine that is not
    like this one is refused, since its bits may be others.

    Attributes:
        workers: How many; unless given one a GPU, or as many as have this process's threads on the cores there are.
    """

    workers: int | None = None

    def __call__(self, cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
        """Does the cells.

        Raises:
            InputError: Ray is not installed; a worker's machine is not like this one.
            KvinterpError: A cell ended its worker three times; or what a cell raised.
        """
        if not cells:
            return
        self.check()
        with _cluster() as ray, loading_once():
            # What was loaded here to be described would share the accelerator with the workers.
            count, resources = self._workers(ray, len(cells))
            _Work(ray, offered, count, resources).do(cells)

    def check(self) -> None:
        """Raises where it cannot work.

        Raises:
            InputError: Ray is not installed, no number of workers was given, or nothing answers where ``RAY_ADDRESS`` says.
        """
        if self.workers is not None and not (isinstance(self.workers, int) and 1 <= self.workers <= 100_000):
            raise InputError(f"engine ray({self.workers}) was given: expected a whole number of workers, as in ray(4).")
        if importlib.util.find_spec("ray") is None:
            raise InputError("engine 'ray' needs Ray, which is not installed: pip install 'kvinterp[ray]', or use 'local'.")
        _check_answers(os.environ.get("RAY_ADDRESS", ""))

    def _workers(self, ray: Any, most: int) -> tuple[int, dict[str, Any]]:
        import torch

        threads, there = torch.get_num_threads(), ray.cluster_resources()
        gpus = there.get("GPU", 0) if torch.cuda.is_available() else 0
        cpus = max(1, there.get("CPU", 1))
        count = min(most, self.workers or int(gpus) or max(1, int(cpus // threads)))
        # What was asked for is started, if need be on shares of cores and GPUs.
        shares = {"num_cpus": min(threads, _down(cpus / count)), "num_gpus": min(1, _down(gpus / count)) if gpus else 0}
        return count, shares


ENGINES: dict[str, Any] = named(Local, Ray)
"""The engines by name."""


def engine_named(text: str) -> Any:
    """The engine of a text form: ``local``, ``ray``, ``ray(4)``.

    Raises:
        InputError: There is none of this name, or it cannot work here.
    """
    engine: Any = read("engine", text, ENGINES, "Write it as in local, ray, ray(4).")
    if isinstance(engine, Ray):
        engine.check()
    return engine


@dataclasses.dataclass(frozen=True)
class Remaining:
    """An engine that says how many cells are left, and for about how long: from what cells of each function took so far.

    Attributes:
        engine: The engine that does them.
        unit: What a cell is of, in the plural.
        logged: ``"everything"``, or ``"warnings"`` where lines about each piece of work would be too many.
        clock: Gives seconds.
    """

    engine: Engine
    unit: str = "cells"
    logged: str = "everything"
    clock: Callable[[], float] = time.monotonic

    def __call__(self, cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
        """Does the cells."""
        pace = Pace({cell.key: cell.function for cell in cells}, self.unit, offered["tell"], self.clock)

        def keep(key: str, *made: Any) -> None:
            offered["keep"](key, *made)
            pace.done(key)

        if self.logged == "warnings":
            log.addFilter(_is_warning)
        try:
            with listening(pace.say):
                if len(cells) > 1:
                    pace.say()
                self.engine(cells, {**offered, "keep": keep, "tell": pace.say})
        finally:
            log.removeFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _down(value: float) -> float:
    # Ray counts in ten-thousandths.
    return math.floor(value * 10_000) / 10_000


# Ray: on this side -----------------------------------------------------------------------------------------------------


def _check_answers(address: str) -> None:
    """Raises where no cluster answers: Ray itself asks for minutes, and says nothing meanwhile."""
    place = address.removeprefix("ray://")
    # Those that Ray finds, or starts, by itself; and the schemes of others.
    if place in ("", "auto", "local") or "://" in place:
        return
    try:
        _ask(place)
    # What is no address, no name that can be found, or no machine that answers.
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"RAY_ADDRESS={shown(address)} is set, and no Ray cluster answers there ({reason(error)}): expected the host:port of "
            "a cluster that runs; unset it to use this machine, or leave --engine out."
        ) from error


def _ask(address: str) -> None:
    """Waits, not for long, for how every gRPC server greets whoever greets it: with a frame of its settings."""

    def greeted() -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as opened:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                opened.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                if opened.recv(9)[3:4] != b"\x04":
                    raise OSError("what answers is not Ray")

    within(_SECONDS, greeted)


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected; what was started here is ended."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        # Whatever it says: of a cluster of another version, a port that is taken, memory that is wanting.
        except Exception as error:
            raise KvinterpError(
                f"Ray cannot be reached or started ({reason(error)}): look at the cluster and at RAY_ADDRESS, or leave --engine "
                "out."
            ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


class _ClusterLostError(KvinterpError):
    """Ray is there no more."""


_GO_ON = "look at its logs, then give the same command again, which goes on from what is finished, or leave --engine out."


@dataclasses.dataclass
class _Work:
    """Pieces of work and who has them.

    Attributes:
        ray: Ray.
        offered: What cells are offered here.
        count: How many workers there are at most.
        resources: What each of them takes.
        seen: When the cluster was last seen to be there, on the clock that never goes back.
    """

    ray: Any
    offered: Mapping[str, Any]
    count: int
    resources: Mapping[str, Any]
    seen: float = dataclasses.field(default_factory=time.monotonic)

    def do(self, cells: Sequence[Cell]) -> None:
        """Gives every worker a piece, takes what arrives, and gives it another, until there are none."""
        pending, lost = self._pieces(cells), Counter[str]()
        idle = [self._started() for _ in range(min(self.count, len(pending)))]
        workers, of = list(idle), dict[Any, str]()
        at_work: dict[Any, tuple[Any, list[Cell]]] = {}
        try:
            while pending or at_work:
                while pending and idle:
                    worker = idle.pop()
                    piece = pending.pop(_next(pending, of.get(worker), set(of.values())))
                    of[worker] = _model(piece[0])
                    at_work[worker.run.remote(piece)] = (worker, piece)
                ready = self._ready(list(at_work))
                worker, piece = at_work[ready]
                try:
                    self._heard(piece, self.ray.get(next(ready)))
                    continue
                except StopIteration:
                    pass
                except self.ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from None
                except self.ray.exceptions.RayError as error:
                    lost[piece[0].key] += 1
                    log.warning("a worker ended at part %s, which is done again", piece[0].key)
                    if lost[piece[0].key] == _TRIES:
                        raise KvinterpError(
                            f"part {piece[0].key!r} ended its worker {_TRIES} times, for instance for want of memory: give it "
                            "more, or fewer workers as in --engine 'ray(1)'; the same command goes on from what is finished."
                        ) from error
                    pending.insert(0, piece)
                    workers.remove(worker)
                    worker = self._started()
                    workers.append(worker)
                del at_work[ready]
                idle.append(worker)
        except _ClusterLostError:
            # Of a cluster that is gone nobody takes an order.
            workers.clear()
            raise
        finally:
            for worker in workers:
                self.ray.kill(worker)

    def _ready(self, working: Sequence[Any]) -> Any:
        """One that has something, or that has ended.

        Raises:
            KvinterpError: There is no cluster any more: Ray itself would wait for one without a word, or end this process.
        """
        while True:
            ready = self.ray.wait(working, num_returns=1, timeout=_SECONDS)[0]
            if time.monotonic() > self.seen + _SECONDS:
                self._check_cluster()
                self.seen = time.monotonic()
            if ready:
                return ready[0]

    def _check_cluster(self) -> None:
        head = self.ray.get_runtime_context().gcs_address
        try:
            _ask(head)
        except OSError as error:
            raise _ClusterLostError(f"Ray's head process at {head} ended: {_GO_ON}") from error
        if not any(node["Alive"] for node in self.ray.nodes()):
            raise _ClusterLostError(f"Ray's agent (raylet) ended, so that it has no machine left: {_GO_ON}")

    def _heard(self, piece: list[Cell], heard: tuple[Any, ...]) -> None:
        """Does what a worker asked for; of a piece only what is not kept yet remains."""
        what, *given = heard
        if what == "log":
            log.log(*given)
        elif what == "unlike":
            raise InputError(
                f"a worker of Ray runs on a machine unlike this one ({given[0]}), so that its bits may be others: start the "
                "study on a machine like the workers, with the same versions and environment."
            )
        else:
            self.offered[what](*given)
            if what == "keep":
                piece[:] = [cell for cell in piece if cell.key != given[0]]

    def _pieces(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Cells that share a call stay together, as far as every worker gets some pieces."""
        pieces, most = [], math.ceil(len(cells) / (_SHARES * self.count))
        for group in groups(cells):
            size = most if "keep" in inspect.signature(imported(group[0].function)).parameters else 1
            pieces += [group[start : start + size] for start in range(0, len(group), size)]
        return pieces

    def _started(self) -> Any:
        from kvinterp.models.provenance import ENVIRONMENT, machine
        from kvinterp.models.threads import VARIABLE

        given = {name: os.environ[name] for name in (*ENVIRONMENT, VARIABLE) if name in os.environ}
        more = {"runtime_env": {"env_vars": given}} if given else {}
        actor = self.ray.remote(**self.resources)(_Worker)
        return actor.options(scheduling_strategy="SPREAD", **more).remote(machine())


def _next(pending: Sequence[list[Cell]], own: str | None, taken: set[str]) -> int:
    """Which piece a worker takes: one of the model it has; else one of a model that nobody has; else the first."""
    models = [_model(piece[0]) for piece in pending]
    unclaimed = (place for place, model in enumerate(models) if model not in taken)
    return models.index(own) if own in models else next(unclaimed, 0)


def _model(cell: Cell) -> str:
    return json.dumps(cell.settings.get("model"), sort_keys=True, default=str)


# Ray: on the worker's side ---------------------------------------------------------------------------------------------


class _Worker:
    """Does pieces of work, one at a time, and says what it keeps as it is made.

    Args:
        machine: That of the process which gives the work.
    """

    def __init__(self, machine: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(machine["threads"])
        self._machine, self._model, self._held = machine, "", contextlib.ExitStack()

    def run(self, piece: Sequence[Cell]) -> Iterator[tuple[Any, ...]]:
        """Does cells that have their function and settings in common.

        Yields:
            ``("keep", key, tables, about)``, ``("tell", text)``, ``("log", level, text)`` or ``("unlike", differences)``.
        """
        from kvinterp.models.provenance import machine

        if unlike := differences(self._machine, machine()):
            yield "unlike", unlike
            return
        if _model(piece[0]) != self._model:
            # One model a worker: the last one is let go of.
            self._held.close()
            self._held.enter_context(loading_once())
            self._model = _model(piece[0])
        # Not far ahead of what is heard: what waits takes memory.
        said: queue.Queue[Any] = queue.Queue(2)
        working = threading.Thread(target=self._work, args=(piece, said), daemon=True)
        working.start()
        while (heard := said.get()) is not None:
            if isinstance(heard, BaseException):
                raise heard
            yield heard
        working.join()

    def _work(self, piece: Sequence[Cell], said: queue.Queue[Any]) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: said.put(("log", record.levelno, record.getMessage()))  # type: ignore[method-assign]
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        offered = {"keep": lambda *made: said.put(("keep", *made)), "tell": lambda text: said.put(("tell", text))}
        try:
            Local()(piece, {**offered, "progress": "none"})
        except BaseException as error:
            said.put(error)
        finally:
            log.removeHandler(handler)
            said.put(None)
