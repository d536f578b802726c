"""Writes the scripts of CacheBugs that are public reports, from the same reports rebuilt in benchmarks/bugs/reported:
each with what its model and its loop need and nothing else, so that it runs without kvinterp.

`python benchmarks/cachebugs/make.py` writes them anew; tests/auditing/test_cachebugs.py checks that they are those.
"""

from __future__ import annotations

import ast
import builtins
import json
import pprint
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
BUGS = HERE.parent / "bugs"
sys.path.insert(0, str(BUGS))
MODULES = ("report", "earlier", "positions", "kept", "own_code")
NOT_PUBLIC = ("its twin in attention", "left padding, mask alone")
"""Rebuilt reports that are no bug of the set: one was made up beside a report, one is no fault of a cache."""

CLASSES = {
    "a token's position": """
        gpt2_single drafts dynamic_ntk ntk_stays gemma3n_shared offset offset_twice turned_again angles_by_length relative_from_zero
        counts_heads second_turn longrope from_scratch bamba_positions roberta_embeds position_stays
        """,
    "pads": """
        pads_of_a_later_part left_padding_positions neighbours_pads append_early lone_pad roberta_pads m2m100_pads mamba_mask
        """,
    "the mask": "opt_mask top_left prompt_unmasked square_mask flex_static assistant_window",
    "a window": """
        static_window llama4_offset window_plus_one window_cut_first window_of_its_rows padded_buffer ring cross_window
        window_of_one
        """,
    "a state that does not follow": """
        mamba_beams mamba2_first_of_a_chunk mamba2_from_zero mamba1_chunks select_leaves_state minimax_reorder
        deepseek_v4_repeat conv_rollback time_step_clamp
        """,
    "what is kept, dropped or taken back": "first_not_stored ring_trimmed trim_by_step rejected_drafts hooked_alibi",
    "what outlives its request": "state_left_behind buffers_stay prefix_store",
    "which tokens are fed": "no_cache one_embedding encoder_decoder_second_turn cache_params_second_turn",
    "without a cache": "use_cache_false",
}
"""What each fault gets wrong."""
USES = {
    "decode": """
        gpt2_single dynamic_ntk gemma3n_shared offset_twice turned_again angles_by_length relative_from_zero counts_heads longrope
        from_scratch opt_mask top_left llama4_offset window_plus_one padded_buffer ring cross_window window_of_its_rows
        first_not_stored hooked_alibi bamba_positions time_step_clamp window_of_one use_cache_false
        """,
    "a prompt in chunks": """
        prompt_unmasked square_mask window_cut_first mamba2_first_of_a_chunk mamba2_from_zero mamba1_chunks
        """,
    "left padding": "pads_of_a_later_part left_padding_positions neighbours_pads append_early lone_pad roberta_pads m2m100_pads",
    "a mask of ones": "mamba_mask",
    "a batch": "offset",
    "beams, rows moved": "mamba_beams select_leaves_state minimax_reorder deepseek_v4_repeat",
    "drafts": "drafts rejected_drafts assistant_window",
    "tokens taken back": "ring_trimmed conv_rollback trim_by_step",
    "a static cache": "static_window flex_static",
    "a second turn": "second_turn encoder_decoder_second_turn cache_params_second_turn",
    "another request": "ntk_stays position_stays buffers_stay prefix_store state_left_behind",
    "embeddings": "one_embedding roberta_embeds",
    "generate() without a cache": "no_cache",
}
"""What somebody does who meets it."""
FOUND = {
    "mamba1_chunks": ("mamba_chunks", "not found; Mamba-2's twin is #46741"),
    "select_leaves_state": ("cache_rows", "not found (tracker #40827)"),
    "minimax_reorder": ("cache_rows", "not found (tracker #40827)"),
    "deepseek_v4_repeat": ("cache_rows", "not found (tracker #40827)"),
    "lone_pad": ("lone_pad", "what #47087 left"),
    "window_of_one": ("window_of_one", "not searched"),
    "bamba_positions": ("bamba_positions", "not searched"),
    "roberta_pads": ("roberta_pads", "cause noted in #9183; one class mended in #35044"),
    "roberta_embeds": ("roberta_embeds", "not searched"),
    "m2m100_pads": ("m2m100_pads", "not searched"),
    "mamba_mask": ("mamba_mask", "not found"),
    "time_step_clamp": ("time_step_clamp", "half known: #48989"),
    "flex_static": ("flex_static", "not searched"),
    "encoder_decoder_second_turn": ("encdec_generate_on_cache", "not searched"),
    "cache_params_second_turn": ("generate_on_cache_params", "not found"),
}
"""What kvinterp found in transformers 5.23, written by hand: its page in docs/upstream, and what was public on 2026-11-28."""

SMALL = '''
SIZES = {sizes}


def small(kind: str, **config: Any) -> nn.Module:
    """A small random model of a type, in eval mode; its biases and its norms' weights are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind] | config)).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.is_floating_point() and bool((each == each.reshape(-1)[0]).all()) and ("norm" in name or "bias" in name):
                each.add_(0.1 * torch.randn_like(each))
    return model
'''
IMPORTS = {
    "annotations": "from __future__ import annotations",
    "AutoModelForCausalLM": "from transformers import AutoModelForCausalLM",
    "CONFIG_MAPPING": "from transformers.models.auto.configuration_auto import CONFIG_MAPPING",
}
MAIN = '''
def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
'''


def names_in(node: ast.AST) -> set[str]:
    """The names that a piece of source reads."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


class Source:
    """The pieces at the top of the modules of reports, by name.

    Attributes:
        pieces: By the module and the name, the number of its place and its node.
        imports: By the module and the name, the line that imports it.
    """

    def __init__(self) -> None:
        self.texts = {name: (BUGS / "reported" / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
        self.pieces: dict[tuple[str, str], tuple[int, ast.AST]] = {}
        self.imports: dict[tuple[str, str], str] = {}
        self.reports: dict[str, tuple[str, ast.Call]] = {}
        for module, text in self.texts.items():
            for number, node in enumerate(ast.parse(text).body):
                self._take(module, MODULES.index(module) * 1000 + number, node)

    def _take(self, module: str, place: int, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.pieces[module, node.name] = place, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.pieces[module, node.targets[0].id] = place, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.pieces[module, node.target.id] = place, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                called = f" as {name.asname}" if name.asname else ""
                self.imports[module, name.asname or name.name] = f"{origin}import {name.name}{called}"
        if (found := self.pieces.get((module, "REPORTS"))) and found[1] is node:
            table = node.value  # type: ignore[attr-defined]
            self.reports |= {key.value: (module, call) for key, call in zip(table.keys, table.values, strict=True)}

    def needed(self, module: str, names: set[str]) -> Iterator[tuple[str, str]]:
        """What names of a module stand for: pieces of its own, or of the module that it takes them from."""
        for name in names - set(dir(builtins)):
            if (module, name) in self.pieces:
                yield module, name
            elif (line := self.imports.get((module, name), "")).startswith("from reported.report"):
                yield "report", name
            elif line:
                yield "", line

    def closed(self, module: str, names: set[str]) -> tuple[dict[tuple[str, str], ast.AST], set[str]]:
        """All pieces that names need, and the lines that import the rest."""
        todo, pieces, lines = list(self.needed(module, names)), dict[tuple[str, str], ast.AST](), set[str]()
        while todo:
            where, name = todo.pop()
            if not where:
                lines.add(name)
            elif (where, name) != ("report", "small") and (where, name) not in pieces:
                pieces[where, name] = self.pieces[where, name][1]
                todo += self.needed(where, names_in(pieces[where, name]))
        return pieces, lines

    def text(self, module: str, node: ast.AST) -> str:
        """The lines of a piece, with its decorators."""
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
        return "\n".join(self.texts[module].splitlines()[first - 1 : node.end_lineno])  # type: ignore[attr-defined]


def script(source: Source, name: str) -> str:
    """A report as a script by itself."""
    module, call = source.reports[name]
    link, date, symptom = (one.value for one in call.args[:3])  # type: ignore[attr-defined]
    build, shows = call.args[3:5]
    pieces, lines = source.closed(module, names_in(build) | names_in(shows))
    order = sorted(pieces, key=lambda one: source.pieces[one][0])
    body = [source.text(where, pieces[where, one]) for where, one in order]
    text = "\n\n\n".join(body)
    kinds = sorted({*re.findall(r"(?:small|changed)\(\s*\"(\w+)\"", text)})
    if kinds:
        from bank.small import sizes

        made = {kind: sizes(kind) for kind in kinds}
        text = SMALL.format(sizes=pprint.pformat(made, width=110, sort_dicts=False)) + "\n\n" + text
        lines |= {IMPORTS["AutoModelForCausalLM"], IMPORTS["CONFIG_MAPPING"]}
    lines |= {"import sys", "import torch", "from typing import Any", "from torch import nn", "from torch import Tensor"}
    used = {one.id for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Name)}
    lines = {line for line in lines if line.split()[-1] in used | {"sys", "torch"}}
    ends = f"build = {ast.unparse(build)}\nshows = {ast.unparse(shows)}\n"
    about = f'"""{symptom[:1].upper()}{symptom[1:]}.\n\n{links(link)}, {date}. `--mended` runs it without the fault.\n"""\n'
    head = "\n".join([IMPORTS["annotations"], *sorted(lines)])
    return formatted(f"{about}\n{head}\n\n{text}\n\n\n{ends}\n{MAIN}")


def links(link: str) -> str:
    """The addresses of reports: a number alone is of the repository before it."""
    found, repository = [], ""
    for part in link.split(", "):
        before, number = part.split("#")
        repository = before or repository
        found.append(f"https://github.com/{repository}/issues/{number}")
    return ", ".join(found)


def formatted(text: str) -> str:
    """As ruff leaves it."""
    for arguments in (["check", "--fix", "--quiet", "--exit-zero", "--select", "I,F401"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(HERE / "scripts" / "made.py"), "-"]
        text = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text


def slug(name: str) -> str:
    """The name of a report as that of a file."""
    return re.sub(r"\W+", "_", name.lower().replace("'", "")).strip("_")


def scripts() -> dict[Path, str]:
    """The scripts of all public reports, by file."""
    source = Source()
    return {
        HERE / "scripts" / f"{slug(name)}.py": script(source, name) for name in source.reports if name not in NOT_PUBLIC
    }


def programs() -> dict[str, str]:
    """By bug, the smallest program that kvinterp's quick check made of it, where it found one."""
    said = map(json.loads, (HERE / "results.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["name"]: row["program"] for row in said if "program" in row and row.get("mended") is False}


def bugs() -> str:
    """A line of JSON a bug, the oldest first."""
    source, smallest = Source(), programs()
    rows = []
    for name, (_, call) in source.reports.items():
        if name not in NOT_PUBLIC:
            link, date, symptom = (one.value for one in call.args[:3])  # type: ignore[attr-defined]
            rows.append((slug(name), links(link).split(", "), date, link.split("#")[0], symptom, "reported"))
    for name, (page, public) in FOUND.items():
        said = ast.get_docstring(ast.parse((HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8"))) or ""
        symptom = said.splitlines()[0].rstrip(".")
        rows.append((name, [f"docs/upstream/{page}.md"], "2026-11", "huggingface/transformers", symptom, public))
    lines = []
    for name, addresses, date, library, symptom, public in sorted(rows, key=lambda row: (row[2], row[0])):
        (kind,) = (kind for kind, names in CLASSES.items() if name in names.split())
        (use,) = (use for use, names in USES.items() if name in names.split())
        text = (HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8")
        model = "two functions" if "OwnCode" in text else "a module" if "from transformer" not in text else "transformers"
        fields = {"name": name, "reports": addresses, "date": date, "library": library, "symptom": symptom, "class": kind}
        fields |= {"use": use, "public": public, "model": "TransformerLens" if "transformer_lens" in text else model}
        fields |= {"script": f"scripts/{name}.py", "program": smallest.get(name)}
        lines.append(json.dumps(fields, ensure_ascii=False))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path, text in scripts().items():
        path.write_text(text, encoding="utf-8")
    (HERE / "bugs.jsonl").write_text(bugs(), encoding="utf-8")
