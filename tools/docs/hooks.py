"""What mkdocs is told beside its own file: figures stand in the repository's ``figures/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FIGURES = Path(__file__).parents[2] / "figures"


def on_files(files: Files, config: Any) -> Files:
    """Adds every figure of the repository to the site."""
    for path in sorted(FIGURES.glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page in the repository links to ``../figures/``, so that it shows them there too; on the site they lie beside it."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+figures/", f"]({up}figures/", markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme asks another server for what its search needs on pages that are opened from a folder; ours is in the site."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.file.dest_uri.count("/") + "worker.js")


def on_post_build(config: Any) -> None:
    """The same in the page for what is not there, which is made of no file."""
    page = Path(config.site_dir) / "404.html"
    page.write_text(page.read_text("utf-8").replace("https://unpkg.com/iframe-worker/shim", "/worker.js"), "utf-8")
