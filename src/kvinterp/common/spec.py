"""Converts between objects and their text forms, and finds the plugins of a folder; every registry
calls it.

A plugin is a dataclass. Its name is the name of its class in snake case (``SplitK`` is
``split_k``). Its text form is that name
with the values of its fields in brackets: ``split_k(4,float16,all,0+2)``. A number or a Python
literal is read as such, anything else as a text; a text with commas or brackets needs quotes. A
field that is a tuple is written with ``+``, and empty as ``all``. Any field may be named, a
keyword-only one must be: ``name(-1,1,on=k)``; it is written where it differs from its default.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar, get_args

from kvinterp.common import words
from kvinterp.common.checks import check_known
from kvinterp.common.source import file_of, source
from kvinterp.common.words import unwrapped
from kvinterp.errors import InputError, unknown

Plugin = TypeVar("Plugin")

MADE_OF = ("base", "registry")
"""The files of a folder that have no plugin: the base class and the registry."""


def modules_of(folder: ModuleType, defines: str) -> dict[str, list[str]]:
    """The modules of a package that may have a plugin, by what they define, in alphabetical order;
    none is imported.

    Args:
        folder: The package.
        defines: A regular expression for a line that defines something; its group is the name.
    """
    found: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name not in MADE_OF:
            name = f"{folder.__name__}.{module.name}"
            for each in re.findall(f"(?m)^{defines}", file_of(name).read_text(encoding="utf-8")):
                found.setdefault(each, []).append(name)
    return found


class Plugins(Mapping[str, type[Plugin]]):
    """The plugins of a package by name: public classes that derive from a base, not abstract, in the
    file that defines them.

    A file is imported when one of its plugins is asked for by name, and all of them are when the names
    are listed: a path with one policy loads no other.
    """

    def __init__(self, folder: ModuleType, base: type[Plugin]) -> None:
        self.base = base
        self.defined: dict[str, list[tuple[str, str]]] = {}
        for kind, modules in modules_of(folder, r"class ([A-Z]\w*)\(").items():
            self.defined.setdefault(named(kind), []).extend((module, kind) for module in modules)

    def __getitem__(self, name: str) -> type[Plugin]:
        kinds = [
            getattr(importlib.import_module(module), kind) for module, kind in self.defined[name]
        ]
        plugins = (
            kind for kind in kinds if issubclass(kind, self.base) and not inspect.isabstract(kind)
        )
        return by_name(*plugins)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def names(self) -> list[str]:
        """All of them, in alphabetical order of their files."""
        return [name for name in self.defined if name in self]


def plugins_read(base: str, package: str = "") -> dict[str, Any]:
    """What :class:`Plugins` finds, with fields and docstrings, read from the source: no plugin is
    imported, nor torch.

    Args:
        base: The import name of the class that they derive from, as in
            ``kvinterp.policies.base:Policy``.
        package: The import name of the package, or of the one module, that has them. Default: that of
            ``base``.
    """
    module, _, name = base.partition(":")
    package = package or module.removesuffix(".base")
    file = file_of(package)
    folder = [str(file.parent)] if file.name == "__init__.py" else []
    files = [each.name for each in pkgutil.iter_modules(folder) if each.name not in MADE_OF]
    kinds = [
        kind
        for part in ([f"{package}.{file}" for file in files] or [package])
        for kind in source(part).classes()
    ]
    # By its name: what is imported already is another class than what is read.
    kinds = [kind for kind in kinds if name in [parent.__name__ for parent in kind.__mro__[1:]]]
    return {name_of(kind): kind for kind in kinds if not inspect.isabstract(kind)}


def by_name(*kinds: type[Plugin]) -> dict[str, type[Plugin]]:
    """Classes by the names of their text forms.

    Raises:
        RuntimeError: Two have the same name.
    """
    classes: dict[str, type[Plugin]] = {}
    for kind in kinds:
        name = name_of(kind)
        if classes.setdefault(name, kind) is not kind:
            raise RuntimeError(
                f"{kind.__module__} and {classes[name].__module__} both have a plugin called {name!r}."
            )
    return classes


def name_of(kind: type) -> str:
    """The name of a class in text forms."""
    return named(kind.__name__)


def named(kind: str) -> str:
    """A class's name as text forms have it: ``TopK`` is ``top_k``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def text_of(plugin: Any) -> str:
    """The text form of a dataclass, without the empty values at its end."""
    fields = dataclasses.fields(plugin)
    values = [getattr(plugin, field.name) for field in fields if not field.kw_only]
    while values and values[-1] in (None, ()):
        values.pop()
    options = [
        (field.name, getattr(plugin, field.name), field.default)
        for field in fields
        if field.kw_only
    ]
    changed = [f"{name}={_written(value)}" for name, value, default in options if value != default]
    arguments = ",".join([*map(_written, values), *changed])
    return name_of(type(plugin)) + (f"({arguments})" if arguments else "")


def check_name(what: str, text: str, known: Collection[str], hint: str) -> tuple[str, str]:
    """The name that a text form begins with, and what stands in its brackets; see :func:`read`.

    Raises:
        InputError: The name is unknown.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    given = text if match is None else match.group(1)
    name = given.lower().replace("-", "_")
    if match is None or name not in known:
        raise unknown(what, given, known, hint)
    return name, match.group(2) or ""


def read(what: str, text: str, kinds: Mapping[str, type[Plugin]], hint: str) -> Plugin:
    """The object that a text form stands for.

    Args:
        what: The kind of thing, for errors.
        text: ``name`` or ``name(value,field=value)``; capitals and hyphens of the name do not
            matter.
        kinds: The classes, by name.
        hint: What errors add about the form.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    name, inner = check_name(what, text, kinds, hint)
    fields = {field.name: field for field in dataclasses.fields(kinds[name])}  # type: ignore[arg-type]
    in_order: list[str] = []
    named: list[tuple[str, str]] = []
    for part in split(inner, ","):
        word, equals, rest = part.partition("=")
        if equals and word.strip().isidentifier():
            named.append((word.strip(), rest))
        else:
            in_order.append(part)
    try:
        if len(dict(named)) < len(named):
            raise TypeError("a field was given twice")
        given = inspect.signature(kinds[name]).bind(*in_order, **dict(named)).arguments
        return kinds[name](
            **{key: _fitted(value_of(value), fields[key].type) for key, value in given.items()}
        )
    except TypeError as error:
        takes = ", ".join(
            f"{field.name}={_written(field.default)}" if field.kw_only else field.name
            for field in sorted(fields.values(), key=lambda field: bool(field.kw_only))
        )
        raise InputError(
            f"{what} {text!r} cannot be read: {name} takes {takes or f'no values, so give {name!r}'}."
        ) from error


def path_parts(text: str) -> tuple[str, str | None, str | None, str | None]:
    """Splits a path's text form into form, options, policies and dtype, without importing torch.

    Raises:
        InputError: The text has another form, or there is no such dtype.
    """
    match = re.fullmatch(
        r"(cached|recompute)(?:\[([^\]]*)\])?(?:\+(.+?))?(?:@(\w+))?", text.strip()
    )
    if match is None:
        raise InputError(
            f"path {text!r} cannot be read: expected cached or recompute, then if wanted "
            "[chunk=N,refresh=N,smooth=WEIGHT,prefill=stored,cache=KIND,cache_dtype=DTYPE,kernels=MODE], "
            "+POLICY once or more and @DTYPE, as in cached, recompute@float64 or cached[chunk=16]."
        )
    form, options, policy, dtype = match.groups()
    if dtype is not None:
        dtype = words.dtype_word(dtype)
        check_known("dtype", dtype, get_args(words.Dtype))
    return form, options, policy, dtype


def split(text: str, separator: str) -> list[str]:
    """Splits a text at a separator outside of brackets and quotes, and strips the parts; an empty
    text has none.
    """
    parts, depth, begun, quote, escaped = [], 0, 0, "", False
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
            continue
        if character in "\"'" and text[begun:index].rstrip()[-1:] in ("", "=", "(", ","):
            # Only where a value begins: elsewhere it is an apostrophe.
            quote = character
            continue
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append(text[begun:index])
            begun = index + 1
    return [part.strip() for part in (*parts, text[begun:])] if text.strip() else []


def _fitted(value: Any, kind: Any) -> Any:
    """Converts a value for a field of this type."""
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if kind.startswith("tuple") and not isinstance(value, tuple):
        return () if value == "all" else tuple(value_of(part) for part in str(value).split("+"))
    return float(value) if kind == "float" and type(value) is int else value


def value_of(text: str) -> Any:
    """The number or Python literal that a text is, or else the text."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text.strip()


def _written(value: Any) -> str:
    """The shortest text that is read back as the same value."""
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "all"
    if isinstance(value, str) and (
        value != value.strip() or value_of(value) != value or re.search(r"[,()\[\]=\"'\n]", value)
    ):
        return repr(value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


# Lists --------------------------------------------------------------------------------------------


def plugin_rows(kinds: Mapping[str, type]) -> list[dict[str, str]]:
    """A row of text for each plugin, as ``kvinterp list`` shows it."""
    return [
        {"name": name, "values": fields_of(kind), "what it does": first_line(kind)}
        for name, kind in kinds.items()
    ]


def first_line(plugin: object) -> str:
    """What a plugin does, as its docstring's first paragraph says."""
    return unwrapped(plugin.__doc__ or "").partition("\n\n")[0]


def fields_of(kind: Any) -> str:
    """The fields of a plugin and their defaults."""
    return ", ".join(
        field.name
        if field.default is dataclasses.MISSING
        else f"{field.name}={field.default if field.default != () else 'all'}"
        for field in sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))
    )
