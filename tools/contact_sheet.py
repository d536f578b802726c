"""Lays every page in one picture: python tools/contact_sheet.py [VERB ...] [--out build/pages] [--again].

Makes the page of each verb on a small model, where it is not there yet, takes its picture as a desk in light, a desk in the
dark and a phone show it first, counts the words that are seen before anything is unfolded, and tiles all of it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from kvinterp.commands.registry import command_of, experiments

MODEL = "zoo:mistral-mini"
SPLIT = "split_k(8,float16)"
SHORT = ("--prompts", "arithmetic:8", "--max-new-tokens", "16")
PAGES: dict[str, Sequence[str]] = {
    "compare": (MODEL, "--b", f"recompute[kernels={SPLIT}]", "--prompts", "arithmetic:12", "--protocol", "free"),
    "patch": (MODEL, *SHORT),
    "decompose": (MODEL, *SHORT),
    "localisation": (MODEL, "--prompts", "arithmetic:6", "--max-new-tokens", "8", "--kernels", SPLIT),
    "layer-drift": (MODEL, *SHORT),
    "layer-drift-float32": (MODEL, *SHORT, "--dtype", "float32"),
    "root-cause": (MODEL, "--prompts", "arithmetic:4", "--ladder-prompts", "2"),
    "kernels": (MODEL, "--sizes", "16,64,256"),
    "behaviour": (MODEL, "--prompts", "arithmetic:12", "--max-new-tokens", "24", "--controls", "2"),
    "paper": (MODEL, "--prompts", "arithmetic:8", "--max-new-tokens", "16"),
    "mitigate": (MODEL, *SHORT, "--policy", "int8", "--path", "cached", "--path", "cached[kernels=batch_invariant]"),
    "equivalent-noise": ("zoo:llama64-mini", *SHORT),
    "susceptibility": (MODEL, *SHORT, "--seeds", "2"),
    "kv-error": (
        *("zoo:llama64-mini", "--repeats", "2", "--instructions", "instructions:6", "--problems", "arithmetic:6"),
        *("--texts", "restate:6", "--strings", "instructions:6", "--max-new-tokens", "12"),
    ),
    "chain": (MODEL, "--policy", "int4", "--texts", "restate:2", "--hops", "2", "--seeds", "2", "--max-new-tokens", "16"),
    "flip-law": (MODEL, "--prompts", "arithmetic:6", "--max-new-tokens", "24"),
    "audit": (MODEL, "--lengths", "5,64", "--steps", "2", "--rungs", "float16,float32", "--checks", "none"),
    "against": ("zoo:llama64-mini", "--against", "tests/given/recorded/llama64-mini_F16-q8_0.jsonl", "--dtype", "float16"),
}
"""The verbs with a page, and what each is run with."""
LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (420, "light")}
"""Width and ground of each picture."""
TALL, SCALE, GAP = 1400, 3, 12


def main() -> None:
    """Makes what is missing, and the sheet."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("verbs", nargs="*", help="all unless given")
    asked.add_argument("--out", type=Path, default=Path("build/pages"))
    asked.add_argument("--again", action="store_true", help="write the pages anew from their tables")
    given = asked.parse_args()
    verbs = given.verbs or list(PAGES)
    given.out.mkdir(parents=True, exist_ok=True)
    pages = {verb: page for verb in verbs if (page := page_of(verb, given.out, given.again)) is not None}
    if not pages:
        sys.exit("there is no page to show.")
    found = pictured(pages, given.out)
    for verb, words in found.items():
        print(f"{words:6d} words  {pages[verb]}")
    sheet = given.out / "sheet.png"
    tiled([[given.out / f"{verb}-{look}.png" for look in LOOKS] for verb in found], sheet)
    print(sheet)


def page_of(verb: str, out: Path, again: bool) -> Path | None:
    """The page of a verb; None, and why on standard error, where it cannot be made."""
    folder = out / verb
    page = folder / "report.html"
    if page.exists() and again:
        _run("show", str(folder), "--rewrite", "--no-open")
    elif not page.exists():
        name = {"against": "audit", "layer-drift-float32": "layer-drift"}.get(verb, verb)
        _run(*(command_of(name) if name in experiments() else (name,)), *PAGES[verb], "--out", str(folder))
    return page if page.exists() else None


def _run(*arguments: str) -> None:
    call = "from kvinterp.cli import main; main()"
    made = subprocess.run([sys.executable, "-c", call, *arguments], capture_output=True, text=True, check=False)
    if made.returncode not in (0, 1, 3):
        print(f"kvinterp {' '.join(arguments)}: {made.stderr.strip()[-2000:]}", file=sys.stderr)


def pictured(pages: dict[str, Path], out: Path) -> dict[str, int]:
    """Takes the picture of each page in each look; returns how many words each shows unfolded."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed: no picture is taken.")
    from playwright.sync_api import sync_playwright

    words = {}
    with sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=chromium, args=options)
        for verb, path in pages.items():
            for look, (width, scheme) in LOOKS.items():
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
                page = context.new_page()
                page.goto(path.resolve().as_uri())
                page.wait_for_timeout(300)
                page.screenshot(path=out / f"{verb}-{look}.png", full_page=True)
                words[verb] = page.evaluate(_WORDS)
                context.close()
        browser.close()
    return words


_WORDS = """() => {
  for (const drawn of document.querySelectorAll("svg, .kv-strips, .kv-prompt, select")) drawn.style.display = "none";
  return document.querySelector("main").innerText.split(/\\s+/).filter(Boolean).length;
}"""
"""Words that are seen, without those of figures, of the texts that models wrote, and of what is chosen from."""


def tiled(rows: Sequence[Sequence[Path]], sheet: Path, columns: int = 2) -> None:
    """Lays the tops of pictures in one, those of a page beside each other, so many pages in a line."""
    lines = []
    for row in rows:
        shown = [Image.open(path).convert("RGB") for path in row]
        shown = [image.crop((0, 0, image.width, min(TALL, image.height))) for image in shown]
        lines.append([image.resize((image.width // SCALE, image.height // SCALE)) for image in shown])
    wide = max(sum(image.width + GAP for image in line) for line in lines) + GAP
    high = TALL // SCALE + 2 * GAP
    made = Image.new("RGB", (wide * columns, high * -(-len(lines) // columns)), "#808080")
    for number, line in enumerate(lines):
        x, y = wide * (number % columns), high * (number // columns) + 2 * GAP
        ImageDraw.Draw(made).text((x, y - 1.5 * GAP), rows[number][0].stem.rpartition("-")[0], fill="#ffffff")
        for image in line:
            made.paste(image, (x, y))
            x += image.width + GAP
    made.save(sheet, optimize=True)


if __name__ == "__main__":
    main()
