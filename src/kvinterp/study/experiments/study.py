"""Run the FP16 paper's experiments as one study: every claim, beside a measurement that separates rounding from different texts.

The paper (arXiv 2604.15409) compares decoding from the KV cache with recomputing the prefix on three 7B-class models, and
each path gets its own tokens. A study runs the paper's experiments on any models, each beside its control, and writes one
page. The claims come first: what the paper's protocol gives here, and what still holds when both paths get the same
tokens.

The work is divided into cells, which are saved as they finish: a study that was killed continues where it stopped, and
cells that two experiments share run once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.common.result import Result
from kvinterp.errors import InputError, unknown
from kvinterp.study.experiments.base import OPTION, Experiment, Parts, Tables
from kvinterp.study.experiments.choices import check_handed, handed
from kvinterp.study.experiments.composed import (
    PRESETS,
    Part,
    cells_table,
    claims_table,
    labelled,
    of_part,
    read_choice,
    tables_of_part,
    united,
    way_of,
)
from kvinterp.study.experiments.options import SHARED, option, shared
from kvinterp.study.experiments.registry import experiment_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvinterp.common.progress import Tell
    from kvinterp.models import Adapter
    from kvinterp.study.cells import Cell

log = logging.getLogger("kvinterp")

EXPERIMENTS = ("behaviour", "boundary", "layer-drift", "root-cause", "localisation")
"""What a study can be made of, in the order of its report."""
_DEFAULTS = {"device": None}
_HANDED = ("prompts", "strategies", "seeds", "max_new_tokens", "dtype", *_DEFAULTS)
"""What is handed on to each experiment that takes it, beside models and kind."""


@dataclasses.dataclass(frozen=True)
class Study(Experiment):
    """What of the paper's claims holds on these models, under its protocol and under the matched one?"""

    FILES: ClassVar = ("study.md", "tables.tex", "prompts.jsonl")
    UNIT: ClassVar = "cells"
    LOGGED: ClassVar = "warnings"
    PARTIAL: ClassVar = "yes"
    INTERRUPTED: ClassVar = (
        "what was finished is on disk, and 'kvinterp show --rewrite' makes the page of what has tables already; the same "
        "command goes on from there"
    )

    preset: str = option("zoo", f"{', '.join(PRESETS)}: settings for whatever you do not give.")
    models: tuple[str, ...] = option(
        (), "zoo:NAME, a checkpoint folder or a hub id; may be given several times.", flag="--model"
    )
    kinds: tuple[str, ...] = option(
        (), "native, hooked, bridge or native(eager); may be given several times.", flag="--kind"
    )
    prompts: str | None = option(None, "A text, a .txt or .jsonl file, arithmetic:N, or any other form that compare takes.")
    strategies: tuple[str, ...] = option(
        (), "How tokens are chosen: greedy, top_k(50,0.8), ...; may be given several times.", flag="--strategy"
    )
    seeds: int | None = option(None, "Seeds for each sampled strategy; greedy runs once.", min=1, times="yes")
    max_new_tokens: int | None = option(None, "The most tokens to decode per prompt.", min=1)
    dtype: str | None = option(None, f"{SHARED['dtype'][1]} Default: the preset's.")
    device: str | None = shared("device")
    only: tuple[str, ...] = option((), f"Run only this experiment: {', '.join(EXPERIMENTS)}; may be given several times.")
    more: tuple[str, ...] = option(
        (), "An option of one experiment, such as root-cause.flip_steps=32; may be given several times.", flag="--set"
    )
    engine: str = option("local", "Where to run: local, ray or ray(WORKERS).", decides="nothing")

    # What it is made of ------------------------------------------------------------------------------------------------

    def settled(self) -> Study:
        """With what its preset sets.

        Raises:
            InputError: A name is unknown, or something was given that none of its experiments takes.
        """
        from kvinterp.common.checks import check_unread

        if self.preset not in PRESETS:
            raise unknown("preset", self.preset, PRESETS)
        preset = {**PRESETS[self.preset], "only": EXPERIMENTS}
        of_one = preset.pop("more")
        given = {name: value for name in preset if (value := getattr(self, name)) not in (None, ())}
        whole = dataclasses.replace(self, **preset | given)
        settled = dataclasses.replace(whole, more=(*self.more, *whole.added(of_one, given)))
        remedy = "leave it out, or set a choice of one experiment with --set"
        own = {part.experiment: settled.chosen_of[part.name] for part in settled.parts}
        check_handed({name: getattr(settled, name) for name in _HANDED}, preset | _DEFAULTS, own, remedy)
        if settled.kinds != preset["kinds"] and all("kind" in chosen for chosen in settled.chosen_of.values()):
            check_unread("kinds", settled.kinds, preset["kinds"], f"each experiment has a kind of its own; {remedy}")
        return settled

    def added(self, of_one: Mapping[str, Mapping[str, Any]], given: Container[str]) -> list[str]:
        """What a preset sets of one experiment alone, as ``more`` has it, where neither that nor what is shared was given."""
        found = []
        for name, choices in of_one.items():
            for field, value in choices.items() if name in self.only else ():
                shared = {"kind": "kinds"}.get(field, field)
                if shared not in given and field not in self.chosen_of[name]:
                    found.append(f"{name}.{field}={value}")
        return found

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its experiments, each on every kind.

        Raises:
            InputError: A name is unknown, or a choice does not fit.
        """
        shared = self.taken("models", *_HANDED)
        parts = []
        for way in self.kinds:
            way_of(way)
        for name in self.only:
            own = dict(self.chosen_of[name])
            for way in [own.pop("kind")] if "kind" in own else self.kinds:
                parts.append(Part(name, way, handed(experiment_named(name), {**shared, **way_of(way)}, own)))
        return tuple(parts)

    @functools.cached_property
    def chosen_of(self) -> dict[str, dict[str, Any]]:
        """What ``more`` says, by experiment."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.only:
            if name not in EXPERIMENTS:
                raise unknown("experiment of a study", name, EXPERIMENTS)
            found[name] = {}
        for text in self.more:
            match = re.fullmatch(r"([\w-]+)\.(\w+)=(.*)", text, re.DOTALL)
            if match is None:
                raise InputError(
                    f"--set {text!r} cannot be read: expected EXPERIMENT.CHOICE=VALUE, as in root-cause.flip_steps=32."
                )
            name, field, value = match.groups()
            if name not in EXPERIMENTS:
                raise unknown("experiment of a study", name, EXPERIMENTS)
            if name not in found:
                raise InputError(f"--set {text!r} was given without {name}: leave it out, or add --only {name}.")
            fields = {each.name: each for each in dataclasses.fields(experiment_named(name)) if each.init}
            if field not in fields or field == "models":
                raise unknown(f"choice of {name}", field, fields.keys() - {"models"})
            chosen = read_choice(text, fields[field].default, value)
            least = fields[field].metadata.get(OPTION, {}).get("min")
            if least is not None and chosen is not None and chosen < least:
                raise InputError(f"--set {text!r} was given: expected at least {least}.")
            if field in found[name]:
                raise InputError(f"--set {text!r} was given, and {name}.{field} was set before: leave one of the two out.")
            found[name][field] = chosen
        return found

    # As an experiment --------------------------------------------------------------------------------------------------

    def answered(
        self, out: Path | None, existing: str, progress: str, figures: str, tell: Tell | None, engine: str
    ) -> Result:
        """As any experiment; a finished study with the same settings is read."""
        existing = "use" if existing == "error" else existing
        return super().answered(out, existing, progress, figures, tell, engine if self.engine == "local" else self.engine)

    def names(self) -> list[str]:
        """The tables of all its experiments, and its own files."""
        tables = dict.fromkeys(
            ["claims", "findings", *(table for part in self.parts for table in part.experiment.TABLES), "cells"]
        )
        figures = [
            f"figures/{way}{name}*"
            for part in self.parts
            for name in part.experiment.drawn()
            for way in ("", f"{part.prefix}-")
        ]
        return [*(f"{table}.parquet" for table in tables), *super().names(), *dict.fromkeys(figures)]

    def asked(self) -> dict[str, Any]:
        """The choices of every experiment, with what its prompts hold."""
        return {
            "verb": self.verb(),
            **self.chosen(),
            "parts": {f"{part.name} {part.kind}": part.experiment.asked() for part in self.parts},
        }

    def adapters(self) -> list[Adapter]:
        """Every model of every kind, loaded."""
        return list({id(one): one for part in self.parts for one in part.experiment.adapters()}.values())

    @functools.cached_property
    def _first(self) -> dict[Part, list[Cell]]:
        return {part: part.experiment.cells() for part in self.parts}

    @functools.cached_property
    def _second(self) -> dict[Part, list[Cell]]:
        """Filled by :meth:`then`."""
        return {}

    def check(self) -> None:
        """What each of its experiments asks."""
        super().check()
        for part in self.parts:
            part.experiment.check()

    def cells(self) -> list[Cell]:
        """Those of all its experiments, one that several of them have once."""
        return united(self._first)

    def then(self, made: Parts) -> list[Cell]:
        """The second stages of its experiments."""
        for part, cells in self._first.items():
            self._second[part] = part.experiment.then(of_part(part, cells, made))
        return [cell for cell in united(self._second) if cell.key not in made]

    def reduce(self, made: Parts) -> Result:
        """Every experiment that is finished, and the claims.

        Where the study was interrupted an experiment is left out that cannot be reduced from some of its cells.
        """
        from kvinterp.data import load_prompts
        from kvinterp.models.provenance import provenance
        from kvinterp.study.results import PROMPTS, prompt_lines

        found: dict[Part, Result] = {}
        known = {part: [*first, *self._second.get(part, ())] for part, first in self._first.items()}
        for part, cells in known.items():
            staged = type(part.experiment).then is not Experiment.then
            own = of_part(part, cells, made)
            whole = len(own) == len({cell.key for cell in cells}) and (part in self._second or not staged)
            if whole or (own and part.experiment.PARTIAL == "yes"):
                one = part.experiment.judged(part.experiment.reduce(own))
                # Kept as they are said now: what is read again has no NaN, which JSON does not know.
                said = {"headline": part.experiment.headline(one), "reading": part.experiment.sentences(one)}
                one.summary |= said
                found[part] = one
        left_out = [part.label for part in known if part not in found]
        listed = cells_table(known, made)
        several = len({part.kind for part in known}) > 1
        about = {
            f"{adapter.facts.name} ({part.kind})" if several else adapter.facts.name: provenance(adapter)
            for part in known
            for adapter in part.experiment.adapters()
        }
        summary = {
            "counts": {"cells": int(listed["key"].nunique()), "finished": len(made)},
            "interrupted": bool(left_out) or not listed["finished"].all(),
            "left_out": left_out,
            "parts": {part.label: dict(result.summary) for part, result in found.items()},
            "provenance": about,
        }
        tables = labelled(found)
        result = self.found(found, {"claims": claims_table(tables), **tables, "cells": listed}, summary)
        # The prompts of all its experiments, those that several have once.
        sources = filter(None, dict.fromkeys(getattr(part.experiment, "prompts", None) for part in self.parts))
        prompts = {(prompt.id, prompt.text): prompt for source in sources for prompt in load_prompts(source)}
        result.others = {PROMPTS: prompt_lines(list(prompts.values()))}
        return result

    def found(self, members: Mapping[Part, Result], tables: Tables, summary: Mapping[str, Any]) -> Result:
        """The claims beside what the experiments found."""
        from kvinterp.study.claims.said import said_of_study

        result = Result(tables, {**summary, "reading": said_of_study(tables, summary)})
        result.members = dict(members)
        return result

    def drawn_by_part(self, result: Result, folder: Path) -> dict[Part, list[Path]]:
        """The files of the figures of each experiment."""
        from kvinterp.study.report.style import save

        return {
            part: [save(figure, folder / f"{name}.png", ("svg", "pdf")) for name, figure in self._drawings(result, part)]
            for part in result.members
        }

    def drawings(self, result: Result) -> dict[str, Figure]:
        """Those of its experiments."""
        return {name: figure for part in result.members for name, figure in self._drawings(result, part)}

    def _drawings(self, result: Result, part: Part) -> Iterator[tuple[str, Figure]]:
        """The figures of an experiment; where there are several kinds, each has the kind before its name."""
        before = f"{part.prefix}-" if len({each.kind for each in result.members}) > 1 else ""
        for name, figure in part.experiment.drawings(result.members[part]).items():
            yield f"{before}{name}", figure

    def drawn_into(self, result: Result, folder: Path) -> list[Path]:
        """The figures of its experiments, the page, and the tables for a paper."""
        from kvinterp.study.report.study import write_study
        from kvinterp.study.report.style import keeping

        with keeping():
            drawn = self.drawn_by_part(result, folder)
            page = write_study(folder.parent, result, drawn, self.chosen())
        return [*(file for files in drawn.values() for file in files), *page]

    # Again, without a model --------------------------------------------------------------------------------------------

    @classmethod
    def held(cls, folder: Path) -> Study:
        """The study whose result is in a folder.

        Raises:
            InputError: There is none, or it was made by another version, whose choices are others.
        """
        from kvinterp.study.results import read_summary

        settings = read_summary(folder).get("settings")
        if not isinstance(settings, dict) or settings.get("verb") != cls.verb():
            raise InputError(
                f"folder {str(folder)!r} holds no study with a readable summary.json: give one that 'kvinterp study' wrote."
            )
        names = [field.name for field in dataclasses.fields(cls) if field.name != "engine"]
        if unlike := set(names) ^ (set(settings) - {"verb", "parts", "made_with"}):
            raise InputError(
                f"the study in {str(folder)!r} was made by another version of kvinterp, which has other choices "
                f"({', '.join(sorted(unlike))}): make its report with that version."
            )
        given: dict[str, Any] = {n: tuple(v) if isinstance(v := settings[n], list) else v for n in names}
        return cls(**given)

    def read(self, folder: Path) -> Result:
        """What is in a folder, with what its experiments found, from the tables alone; the claims are judged anew.

        Raises:
            InputError: A table is missing, or is not the one that the summary was written with.
        """
        from kvinterp.study.claims.said import judged_anew
        from kvinterp.study.results import read_summary, read_tables

        summary = read_summary(folder)
        tables = read_tables(folder, summary)
        kinds = [part.kind for part in self.parts]
        found = {
            part: part.experiment.again(tables_of_part(part, tables, kinds), summary["parts"][part.label])
            for part in self.parts
            if part.label in summary["parts"]
        }
        before = tables.get("claims")
        tables["claims"] = claims_table({name: table for name, table in tables.items() if name != "claims"})
        result = self.judged(self.found(found, tables, summary))
        result.settings, result.choices, result.folder = summary["settings"], self.chosen(), folder
        result.summary["reading"] += [] if before is None else judged_anew(before, tables["claims"])
        return result
