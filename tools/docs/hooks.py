"""What mkdocs needs besides its own file: the figures, the notebooks as pages, and every public name on the page of the API."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    """Adds every figure and every notebook of the repository to the site."""
    for path in sorted(FIGURES.glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = tutorial(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=picture))
    return files


def tutorial(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, with its pictures by name: tables get the site's style, and links lead to the other pages."""
    page, made = MarkdownExporter().from_filename(str(path), resources={"unique_key": path.stem})
    page = re.sub(r"(?s)<style scoped>.*?</style>", "", page).replace('<table border="1" class="dataframe">', "<table>")
    return re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", page.replace("](../docs/", "](../")), dict(made["outputs"])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page in the repository links to ``../figures/``, so that it shows them there too; on the site they lie beside it."""
    if page.file.src_uri == "api.md":
        markdown = completed(markdown)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+figures/", f"]({up}figures/", markdown)


def completed(markdown: str) -> str:
    """The page of the API, with the public names that have no place on it yet at its end."""
    tree = ast.parse((ROOT / "src" / "kvinterp" / "__init__.py").read_text(encoding="utf-8"))
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    placed = set(re.findall(r"(?m)^::: kvinterp\.(\w+)$", markdown))
    rest = [name for name in public if name not in placed and not name.startswith("_")]
    return "\n".join([markdown, *(["## More", ""] if rest else []), *(f"::: kvinterp.{name}" for name in rest)])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme asks another server for what its search needs on pages that are opened from a folder; ours is in the site."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.file.dest_uri.count("/") + "worker.js")


def on_post_build(config: Any) -> None:
    """The same in the page for what is not there, which is made of no file."""
    page = Path(config.site_dir) / "404.html"
    page.write_text(page.read_text("utf-8").replace("https://unpkg.com/iframe-worker/shim", "/worker.js"), "utf-8")
