"""Files that are bad: those of a model, of a result, and whatever else a command line names."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from forked import forked
from right_commands import MODEL, RIGHT, Case, with_option

# Files of a model ------------------------------------------------------------------------------------------------------


def _write(content: str | bytes) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        place.unlink(missing_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def _linked(to: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        place.unlink(missing_ok=True)
        place.symlink_to(to)

    return make


def _other(build: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        place.unlink(missing_ok=True)
        build(place)

    return make


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(place.parent)
        made.bind(place.name)
        os.chdir(before)


def _half(place: Path) -> None:
    content = place.read_bytes() if place.is_file() else b""
    place.write_bytes(content[: len(content) // 2])


def _hole(place: Path) -> None:
    _write("")(place)
    os.truncate(place, 2**34)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a FIFO": _other(os.mkfifo),
    "a folder": _other(Path.mkdir),
    "a link to /dev/zero": _linked("/dev/zero"),
    "a link to /dev/full": _linked("/dev/full"),
    "a link to /dev/stdin": _linked("/dev/stdin"),
    "a link to /proc/self/mem": _linked("/proc/self/mem"),
    "a link to itself": lambda place: _linked(place.name)(place),
    "a link to nothing": _linked("nowhere"),
    "a socket": _other(_socket),
}
PLAIN: dict[str, Callable[[Path], None]] = {
    "empty": _write(""),
    "5": _write("5"),
    "[]": _write("[]"),
    "null": _write("null"),
    "a text": _write('"x"'),
    "open": _write("{"),
    "no UTF-8": _write(b'{"a": "\xff\xfe"}'),
    "nested": _write("[" * 100_000),
    "a long number": _write('{"a": ' + "9" * 5000 + "}"),
    "zeros": _write(b"\0" * 10_000),
    "half": _half,
    "16 GiB of a hole": _hole,
}


def _json(**changes: Any) -> Callable[[Path], None]:
    """Sets values of a JSON object; one that is ``...`` is taken out."""

    def make(place: Path) -> None:
        read = json.loads(place.read_text()) if place.is_file() else {}
        read = {name: value for name, value in {**read, **changes}.items() if value is not ...}
        place.write_text(json.dumps(read))

    return make


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the header of weights."""

    def make(place: Path) -> None:
        content = place.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        new = json.dumps(header).encode()
        place.unlink()
        place.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])

    return make


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in header.items() if name != "__metadata__")


def _length(number: int) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        content = place.read_bytes()
        place.unlink()
        place.write_bytes(number.to_bytes(8, "little") + content[8:])

    return make


def _sharded(index: str) -> Callable[[Path], None]:
    """Weights by an index, which stands beside them."""

    def make(place: Path) -> None:
        (place.parent / "model.safetensors").rename(place.parent / "model-00001-of-00001.safetensors")
        place.write_text(index)

    return make


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        read = json.loads(place.read_text())
        change(read)
        place.unlink()
        place.write_text(json.dumps(read))

    return make


_REGEX = {"type": "Split", "pattern": {"Regex": "(((a{1000}){1000}){1000}){1000}"}, "behavior": "Isolated", "invert": False}
_DELETES = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": ""}
MUTATED: dict[str, dict[str, tuple[str, Callable[[Path], None]]]] = {
    "generation_config.json": {
        "temperature 'x'": ("same", _json(temperature="x", do_sample=True)),
        "cache_implementation": ("same", _json(cache_implementation="nosuch")),
        "max_length": ("same", _json(max_length=-5)),
    },
    "config.json": {
        "rope_type": ("refused", _json(rope_parameters={"rope_theta": 1e4, "rope_type": "nosuch"})),
        "layers 2": ("refused", _json(num_hidden_layers=2)),
        "layers -1": ("refused", _json(num_hidden_layers=-1)),
        "layers 'x'": ("refused", _json(num_hidden_layers="x")),
        "hidden 0": ("refused", _json(hidden_size=0)),
        "heads 7": ("refused", _json(num_attention_heads=7)),
        "kv heads 3": ("refused", _json(num_key_value_heads=3)),
        "vocabulary 7": ("refused", _json(vocab_size=7)),
        "positions 10**15": ("any", _json(max_position_embeddings=10**15)),
        "positions 'x'": ("refused", _json(max_position_embeddings="x")),
        "activation": ("refused", _json(hidden_act="nosuch")),
        "model_type 5": ("refused", _json(model_type=5)),
        "model_type": ("refused", _json(model_type="nosuch")),
        "model_type a path": ("refused", _json(model_type="../../x")),
        "architectures": ("refused", _json(architectures=["NoSuch"])),
        "architectures 5": ("refused", _json(architectures=5)),
        "dtype": ("any", _json(dtype="int8", torch_dtype="int8")),
        # Code of its own is not run, and said: transformers' own class is.
        "auto_map": ("any", _json(auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})),
        "attention": ("any", _json(_attn_implementation="nosuch", attn_implementation="nosuch")),
        "tie 'x'": ("any", _json(tie_word_embeddings="x")),
        "escapes": ("any", _json(_name_or_path="\x1b[31mred\x1b]0;owned\x07")),
    },
    "tokenizer_config.json": {
        "max length 3": ("any", _json(model_max_length=3)),
        "class 5": ("refused", _json(tokenizer_class=5)),
        "class nosuch": ("any", _json(tokenizer_class="NoSuchTokenizer")),
        "auto_map": ("refused", _json(auto_map={"AutoTokenizer": ["evil.Tok", None]}, tokenizer_class="Tok")),
        "eos of no vocabulary": ("any", _json(eos_token="<nosuch>")),
        "side": ("any", _json(padding_side="middle")),
        "template 5": ("same", _json(chat_template=5)),
    },
    "tokenizer.json": {
        "empty vocabulary": ("refused", _tokenizer(lambda read: read["model"].update(vocab={}, merges=[]))),
        "open regex": (
            "refused",
            _tokenizer(
                lambda read: read["pre_tokenizer"] and read.update(pre_tokenizer={**_REGEX, "pattern": {"Regex": "("}})
            ),
        ),
        "normaliser deletes": ("refused", _tokenizer(lambda read: read.update(normalizer=_DELETES))),
        "type": ("refused", _tokenizer(lambda read: read["model"].update(type="nosuch"))),
        "id 10**9": ("refused", _tokenizer(lambda read: read["model"]["vocab"].update({"e": 10**9}))),
        "id -1": ("refused", _tokenizer(lambda read: read["model"]["vocab"].update({"e": -1}))),
        "merges": ("refused", _tokenizer(lambda read: read["model"].update(merges=[["nosuch", "x"]]))),
    },
    "model.safetensors": {
        "length 2**63": ("refused", _length(2**63)),
        "length 0": ("refused", _length(0)),
        "length 10**8": ("refused", _length(10**8)),
        "no type": ("refused", _header(lambda header: _first(header).update(dtype="F999"))),
        "complex": ("refused", _header(lambda header: _first(header).update(dtype="C64"))),
        "whole numbers": ("refused", _header(lambda header: _first(header).update(dtype="I16"))),
        "shape": (
            "refused",
            _header(lambda header: _first(header)["shape"].reverse() or _first(header)["shape"].append(2)),
        ),
        "shape 2**62": ("refused", _header(lambda header: _first(header).update(shape=[2**62, 4]))),
        "offsets": ("refused", _header(lambda header: _first(header).update(data_offsets=[5, 3]))),
        "offsets 2**62": ("refused", _header(lambda header: _first(header).update(data_offsets=[0, 2**62]))),
        "one missing": ("refused", _header(lambda header: header.pop(max(header)))),
        "one more": ("refused", _header(lambda header: header.update({"model.layers.9.x": header.pop(max(header))}))),
        "name": ("refused", _header(lambda header: header.update({"\x1b[31m": header.pop(max(header))}))),
    },
    "model.safetensors.index.json": {
        "shard missing": ("refused", _sharded('{"weight_map": {"model.norm.weight": "model-00009-of-00009.safetensors"}}')),
        "shard outside": ("refused", _sharded('{"weight_map": {"model.norm.weight": "../../../etc/passwd"}}')),
        "shard 5": ("refused", _sharded('{"weight_map": {"model.norm.weight": 5}}')),
        "map 5": ("refused", _sharded('{"weight_map": 5}')),
        "no map": ("refused", _sharded("{}")),
        "empty map": ("refused", _sharded('{"weight_map": {}}')),
        "list": ("refused", _sharded("[]")),
        "long name": ("refused", _sharded(json.dumps({"weight_map": {"model.norm.weight": "x" * 5000}}))),
    },
    "chat_template.jinja": {
        "5": ("refused", _write("5")),
        "open": ("refused", _write("{% for m in messages %}")),
        "class": ("refused", _write("{{ ''.__class__.__mro__[1].__subclasses__() }}")),
        "raises": ("refused", _write("{{ raise_exception('no') }}")),
        "undefined": ("refused", _write("{{ nosuch.name }}")),
        "includes": ("refused", _write("{% include '/etc/passwd' %}")),
    },
}
"""What is wrong within a file of a model, and how it is judged."""
NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}
BESIDE = {
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "training.json"),
    *("pytorch_model.bin", "adapter_config.json", "preprocessor_config.json", "processor_config.json", "README.md"),
}
"""Files that nothing asks for where the others are there."""


def _with_model(file: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        from kvinterp.models import zoo

        shutil.copytree(zoo.folder("gqa2-mini"), folder / "model")
        make(folder / "model" / file)

    return prepare


def of_files(chosen: random.Random) -> Case:
    """One file of a model's folder is bad; the others are right."""
    file = chosen.choice([*MUTATED, *MUTATED, *sorted(BESIDE)])
    if file in MUTATED and chosen.random() < 0.75:
        what = chosen.choice(sorted(MUTATED[file]))
        judged, make = MUTATED[file][what]
    else:
        many = {name: made for name, made in PLAIN.items() if name != "16 GiB of a hole"}
        what = chosen.choice(sorted(many))
        make, judged = many[what], "refused" if file in NEEDED else "any"
    template = file == "chat_template.jinja"
    verb = "compare" if template or judged == "same" else chosen.choice(["compare"] * 3 + ["audit", "patch", "kernels"])
    if verb in ("audit", "kernels") and judged == "refused" and file not in NEEDED - {"tokenizer.json"}:
        # Neither asks for tokens of a text, unless it is given one.
        judged = "any"
    arguments = with_option(RIGHT[verb], "--model" if verb == "kernels" else "", "model")
    if template:
        arguments = with_option(arguments, "--prompts", "arithmetic(1,chat=template)")
    return Case([verb, *arguments], judged, _with_model(file, make), shown=f"model/{file}: {what}")


# Files of a result, and of other things -----------------------------------------------------------------------------------


class Results:
    """Results that are made once, and copied into a case's folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def folder(self, verb: str) -> Path:
        """The folder that holds a command's folder ``out``."""
        place = self.home / verb
        if not place.exists():
            place.mkdir(parents=True)
            right = list(RIGHT[verb])
            if verb == "compare":
                right = with_option(right, "--record", "resid_post,kv")
            ended = forked([verb, *right], place, {})
            assert ended.code == 0, ended.err[-2000:]
        return place

    @cached_property
    def undisturbed(self) -> dict[str, Any]:
        """What ``compare`` finds of the model that is whole."""
        place = self.home / "undisturbed"
        place.mkdir(parents=True)
        ended = forked(["compare", *RIGHT["compare"]], place, {})
        assert ended.code == 0, ended.err[-2000:]
        return found_in(place / "out")


def found_in(folder: Path) -> dict[str, Any]:
    """The numbers of a comparison."""
    import pandas as pd

    steps = pd.read_parquet(folder / "steps.parquet")
    return {name: steps[name].tolist() for name in ("token_a", "token_b", "kl", "max_abs_logit") if name in steps}


def of_results(chosen: random.Random, results: Results) -> Case:
    """One file of a result is bad, and the result is read."""
    verb = chosen.choice(["compare", "compare", "patch", "audit", "root-cause"])
    source = results.folder(verb) / "out"
    files = sorted(
        path.name for path in source.iterdir() if path.is_file() and path.suffix in (".parquet", ".json", ".jsonl")
    )
    first = "verdict.json" if verb == "audit" else "summary.json"
    file = chosen.choice([*files, first, first])
    changes = {
        "files taken out": _json(files=...),
        "files []": _json(files=[]),
        "files 5": _json(files=5),
        "settings 5": _json(settings=5),
        "settings {}": _json(settings={}),
        "provenance 5": _json(provenance=5),
        "verb": _json(verb="nosuch"),
        "a path that runs": _json(settings={"a": "cached[cache=evilmod:Evil]"}),
        "version": _json(version="99"),
    }
    many = {
        **SPECIAL,
        **PLAIN,
        **(changes if file == "summary.json" else {}),
    }
    what = chosen.choice(sorted(many))
    how = chosen.choice(
        [["show", "out", "--rewrite", "--no-open"], ["report", "out"], ["show", "out", "--no-open"], ["again"]]
    )
    rewrites = how[0] == "report" or "--rewrite" in how
    judged = "refused" if rewrites else "any"
    if file == "prompts.jsonl" or what == "version":
        judged = "any"
    arguments = [verb, *RIGHT[verb]] if how == ["again"] else how

    def prepare(folder: Path) -> None:
        shutil.copytree(source, folder / "out")
        many[what](folder / "out" / file)

    return Case(arguments, judged, prepare, {"BROWSER": "true"}, shown=f"{verb}'s {file}: {what}")


def _long(place: Path) -> None:
    pass


PATHS = {
    "prompts": ["compare", "decompose", "behaviour", "patch", "root-cause"],
    "out": ["compare", "audit", "kernels", "behaviour"],
    "config": ["audit"],
    "texts": ["chain"],
    "instructions": ["kv-error"],
    "examples": ["patch"],
    "model": ["compare", "audit", "patch"],
    "against": ["audit"],
    "gsm8k": ["compare"],
    "train": ["compare"],
    "show": ["show", "report"],
}
NAMES = [
    "x" * 5000,
    "x/" * 2500,
    "/dev/zero",
    "/dev/full",
    "/dev/null",
    "/proc/self/mem",
    "/proc/self/fd/0",
    "/dev/stdin",
    "/sys",
    "\udcff",
    "~nobody-such/x",
]


def of_special(chosen: random.Random) -> Case:
    """Where the name of a file or folder is given, something else is there."""
    option = chosen.choice(sorted(PATHS))
    verb = chosen.choice(PATHS[option])
    make: Callable[[Path], None] = _long
    if chosen.random() < 0.35:
        what = name = chosen.choice(NAMES)
    else:
        what, name = (
            chosen.choice(sorted(SPECIAL)),
            chosen.choice(["special", "special.jsonl", "special.txt", "special/x.jsonl"]),
        )
        make = SPECIAL[what]
    arguments = list(RIGHT.get(verb, []))
    judged = "any" if (option in ("out", "show") and what in ("a folder", "~nobody-such/x", "\udcff")) else "refused"
    if option in ("prompts", "texts", "instructions") and name in ("special", "\udcff"):
        # Without an ending it is a generator that is not known, or a text.
        judged = "refused" if name == "special" else "any"
    match option:
        case "model":
            arguments = with_option(arguments, "", name)
        case "against":
            arguments = [MODEL, "--against", name, "--out", "out"]
        case "gsm8k":
            arguments = with_option(arguments, "--prompts", f"gsm8k({name},shots=0)")
        case "train":
            arguments = with_option(arguments, "--prompts", f"jsonl(good.jsonl,shots=1,count=1,train={name})")
        case "show":
            arguments = [name, *(["--no-open"] if verb == "show" else [])]
        case "include":
            arguments = [MODEL, "--tasks", "mine", "--include", name, "--out", "out", "--limit", "1"]
        case "config":
            arguments = ["--config", name, "--random-init", "--out", "out"]
        case _:
            arguments = with_option(arguments, f"--{option}", name)
    if option == "out" and what in ("a link to nothing", "a link to /dev/full"):
        judged = "any"

    def prepare(folder: Path) -> None:
        (folder / "good.jsonl").write_text('{"prompt": "a b c", "answer": "5"}\n{"prompt": "b c d", "answer": "6"}\n')
        make(folder / name.partition("/")[0]) if make is not _long else None

    return Case([verb, *arguments], judged, prepare, {"BROWSER": "true"}, shown=f"{option} is {what[:40]}")


# Log-probs of another engine ---------------------------------------------------------------------------------------------


def _given(**changes: Any) -> str:
    ids = list(range(5, 60))
    right = {"prompt": ids[:12], "tokens": ids[12:], "logprobs": [-2.0] * 43}
    return json.dumps({**right, **changes})


GIVEN: dict[str, tuple[str, str | bytes]] = {
    **{name: ("refused", content) for name, content in {"empty": "", "5": "5", "null": "null", "{}": "{}"}.items()},
    **{f"{value} for a log-prob": ("any", _given(logprobs=[value] * 43)) for value in (0.5, 1e29, 1e-6, 0.0, -1e9)},
    **{
        f"{value!r} for a log-prob": ("refused", _given(logprobs=[value] * 43))
        for value in ("-1", True, [], 1e999, 10**400)
    },
    **{f"{value!r} for a token": ("refused", _given(tokens=[value] * 43)) for value in (-1, 10**12, 1.0, True, "a", None)},
    "fewer": ("refused", _given(logprobs=[-1.0])),
    "more than the context": ("refused", _given(tokens=[5] * 100_000, logprobs=[-1.0] * 100_000)),
    "another dtype": ("refused", _given(declared={"dtype": "\x1b[31m"})),
    "a name that commands": ("any", _given(id="\x1b]0;owned\x07")),
    "a name that is none": ("any", _given(id="\ud800")),
    "tokens beside": ("refused", _given(top=[[[1.5, -1.0]]] * 99)),
    "cut": ("refused", _given()[:100]),
    "nested": ("refused", '{"a":' * 50_000),
    "another file's": ("refused", b"SQLite format 3\0" + bytes(100)),
    "an archive": ("refused", b"PK\x03\x04" + bytes(50)),
    "a base that is cut": ("refused", b"_logits_" + b"\xff" * 12),
    "a base of 2**31": ("refused", b"_logits_" + (2**31 - 1).to_bytes(4, "little") * 3),
    "a dump without tokens": ("refused", '{"token_ids": [], "generation_logprobs": []}'),
    "a dump of 99 of 3": ("any", '{"token_ids": [1, 2, 3], "generation_logprobs": [0, -1, -1], "input_lengths": 99}'),
    "an answer of nobody": ("refused", '{"choices": [{"logprobs": null}]}'),
    "an answer without a prompt": ("refused", '{"meta_info": {"output_token_logprobs": [[-1, 5, null]]}}'),
}
"""What is wrong with a file of log-probs, and how it is judged."""


def of_given(number: int) -> Case:
    """A file of another engine's log-probs is bad."""
    what = sorted(GIVEN)[number % len(GIVEN)]
    judged, content = GIVEN[what]

    def prepare(folder: Path) -> None:
        (folder / "given.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())

    return Case(["audit", MODEL, "--against", "given.jsonl", "--out", "out"], judged, prepare, shown=f"given: {what}")
