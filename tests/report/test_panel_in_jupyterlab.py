"""The panel in a real JupyterLab: it starts, its cells run, a click is answered, and its keys are its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import IN_A_BROWSER

pytestmark = [*IN_A_BROWSER, pytest.mark.long]

CELLS = (
    "import kvinterp as kv\n"
    "panel = kv.patch_panel('zoo:gqa2-mini', '3 + 4 =', other='3 + 5 =', kind='native', max_new_tokens=4,\n"
    "                       kernels='split_k(4,float16)')",
    "panel",
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook with the panel, in a JupyterLab of its own; it ends with the test."""
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("jupyterlab is not installed: pip install 'kvinterp[notebook]'")
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'kvinterp[notebook]'")
    cells = [
        {"cell_type": "code", "id": f"cell-{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for n, source in enumerate(CELLS)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}
    work = tmp_path / "work"
    work.mkdir()
    (work / "panel.ipynb").write_text(json.dumps(notebook))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "RUNTIME")}
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={work}"),
        "--LabApp.news_url=",
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **own}, cwd=work, start_new_session=True
        )
        try:
            begun, address = time.monotonic(), f"http://127.0.0.1:{port}"
            while True:
                try:
                    urllib.request.urlopen(f"{address}/api?token={token}", timeout=5).close()
                    break
                except OSError:
                    said = (tmp_path / "log").read_text()
                    assert server.poll() is None, f"JupyterLab ended: {said[-2000:]}"
                    assert time.monotonic() < begun + 120, f"JupyterLab does not answer: {said[-2000:]}"
                    time.sleep(0.3)
            yield f"{address}/lab/tree/panel.ipynb?token={token}"
        finally:
            # With its kernels, which are of its session.
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page of the browser, with a network: the server's."""
    browser, loop = chromium
    asyncio._set_running_loop(loop)
    context = browser.new_context(viewport={"width": 1280, "height": 1600})
    try:
        made = context.new_page()
        made.set_default_timeout(120_000)
        yield made
        context.close()
    finally:
        asyncio._set_running_loop(None)


def test_the_panel_answers_a_click_and_keeps_its_keys(lab: str, page: Any) -> None:
    """Pressing a in the panel made a cell above it: JupyterLab took single letters for its own."""
    page.goto(lab)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    for number in range(len(CELLS)):
        ran = page.locator(".jp-Cell").nth(number).locator(".jp-InputPrompt", has_text=re.compile(r"\[[*\d]"))
        # Until the kernel is there, nothing is run and nothing said.
        for _ in range(60):
            page.locator(".jp-Cell .cm-content").nth(number).click()
            page.keyboard.press("Control+Enter")
            page.wait_for_timeout(1000)
            if ran.count():
                break
    panel = page.locator(".kvinterp-panel")
    panel.locator("[role=grid]").wait_for()
    page.wait_for_function("document.querySelector('.kvinterp-panel [name=filling]').hidden")
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    before = panel.locator(".kv-lead").inner_text()
    layers = panel.locator(".kv-heat tbody tr").count()
    panel.locator(f"[data-at='{layers - 1} 1']").click()
    page.wait_for_function(
        "(before) => document.querySelector('.kvinterp-panel .kv-lead').innerText !== before", arg=before
    )
    page.wait_for_function("document.querySelector('.kvinterp-panel [role=status]').textContent === ''")
    assert f"layer {layers - 1}" in panel.inner_text()
    at = panel.locator(f"[data-at='{layers - 1} 1']")
    at.focus()
    for key in ("a", "j"):
        page.keyboard.press(key)
    page.wait_for_timeout(500)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
    assert at.evaluate("(cell) => document.activeElement === cell"), "and j went nowhere else"
    # The same key without what keeps it: JupyterLab does hear it.
    page.evaluate("document.activeElement.removeAttribute('data-lm-suppress-shortcuts')")
    page.keyboard.press("a")
    page.wait_for_function(f"document.querySelectorAll('.jp-Notebook .jp-Cell').length > {cells}", timeout=10_000)
