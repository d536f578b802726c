"""Fixtures of every test: models loaded once a session, checked signatures, one thread by default, no network.

Torch and kvinterp are imported where they are used: the process that hands out the tests to pytest-xdist's workers needs neither,
and they wait for it to begin.
"""

from __future__ import annotations

import os
import types
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

# With KVINTERP_SIGNATURES=1 signatures are checked at each call: jaxtyping's shapes and dtypes against each other, the rest by
# beartype. `make test-newest` (the laws over every model, which CI runs too) and `make test-all` set it; it takes half as long
# again, so `make test` does without. The hook must be there before kvinterp is imported. Two modules are left out, models.adapter
# and recording.hook: they define functions within functions for every run they hook, beartype compiles each of those anew in
# about 10 ms. The command line is left out because typer reads signatures.
if os.environ.get("KVINTERP_SIGNATURES") == "1":
    from jaxtyping import install_import_hook

    install_import_hook(
        [
            *(f"kvinterp.{package}" for package in ("comparison", "data", "metrics", "paths", "policies")),
            *(f"kvinterp.models.{module}" for module in ("bridge", "hooked", "load", "native", "transformers_cache")),
            *(f"kvinterp.recording.{module}" for module in ("recorder", "trace")),
        ],
        "beartype.beartype",
    )

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvinterp.models import Adapter
    from support import Case

pytest_plugins = ["pytester", "browser"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """What may be asked of the whole suite."""
    parser.addoption("--everything", action="store_true", help="also run what takes long, and every case of every law")
    parser.addoption("--slow", action="store_true", help="also run whole commands, audits and notebooks")
    parser.addoption("--share", default="1/1", metavar="N/OF", help="run one in OF of the tests: the Nth share of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the sample and the share that were asked for, skips what cannot run here, and says why."""
    import torch

    from kvinterp.errors import InputError
    from kvinterp.models import real
    from sampling import left_out
    from support import has_hooked_transformer

    share, of = map(int, config.getoption("--share").split("/"))
    left = set() if config.getoption("--everything") else left_out(items, config.getoption("--slow"))
    # By name, so that every worker takes the same tests and a new test moves no other.
    left |= {item for item in items if zlib.crc32(item.nodeid.encode()) % of != share - 1}
    # A test that was named on the command line runs whatever it is.
    left -= {item for item in items if "[" in item.nodeid and item.nodeid in config.args}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = len(left)
    reasons = {}
    if any(item.get_closest_marker("hooked") for item in items) and not has_hooked_transformer():
        reasons["hooked"] = "the TransformerLens that is imported has no HookedTransformer (it was removed in 4.0)"
    if not torch.cuda.is_available():
        reasons["cuda"] = "torch sees no CUDA device"
    for item in items:
        if (needed := item.get_closest_marker("real")) is not None:
            try:
                real.path(*needed.args)
            except InputError as error:
                item.add_marker(pytest.mark.skip(reason=str(error)))
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The closing line counts what the workers of pytest-xdist deselected too: all of them the same."""
    left = getattr(node, "workeroutput", {}).get("left", 0)
    node.config.pluginmanager.get_plugin("terminalreporter").stats["deselected"] = [types.SimpleNamespace()] * left


@pytest.fixture(autouse=True, scope="session")
def _threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    # The library's own variable: two threads are tested by setting it.
    torch.set_num_threads(int(os.environ.setdefault("KVINTERP_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a tiny random checkpoint by its name; each is written once a session."""
    from support import write_checkpoint

    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(name, root / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Callable[..., Adapter]:
    """Gives a case's model in a dtype; each is loaded once a session. Do not leave anything changed on it."""
    loaded: dict[tuple[Case, str], Adapter] = {}

    def get(case: Case, dtype: str = "float32") -> Adapter:
        if (case, dtype) not in loaded:
            loaded[case, dtype] = _loaded(case, dtype, checkpoint)
        return loaded[case, dtype]

    return get


def _loaded(case: Case, dtype: str, checkpoint: Callable[[str], Path]) -> Adapter:
    import torch

    from kvinterp.models import load_model, wrap, zoo
    from support import BARE, TINY, bare_hooked_transformer

    if case.model in BARE:
        return wrap(bare_hooked_transformer(case.model, getattr(torch, dtype)))
    name = case.model
    if name in TINY:
        name = str(checkpoint(name))
    elif not (zoo.folder(name.removeprefix("zoo:")) / "model.safetensors").is_file():
        pytest.skip(f"{name} is not in the package yet")
    return load_model(name, kind=case.kind, dtype=dtype, device="cpu", attention=case.attention)
