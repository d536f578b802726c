"""The types that an editor offers are the tables that decide.

``python tests/test_words.py`` writes those that grow with the sites and the experiments anew.
"""

from __future__ import annotations

import re
import textwrap
import typing
from pathlib import Path

import pytest

from kvinterp.commands.registry import experiment_named, experiments
from kvinterp.commands.results import EXISTING
from kvinterp.common import words
from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.models import KINDS, SITES, dtype_named
from kvinterp.models.adapter import DTYPES
from kvinterp.models.answers import LOGIT_DIFFERENCE
from kvinterp.models.load import ATTENTION
from kvinterp.models.sites import GROUPS
from kvinterp.patching import DIRECTIONS, DISTANCES, PATCH_SITES, SWEEPS
from kvinterp.paths import STRATEGIES, path_named

TABLES = {
    words.Kind: KINDS,
    words.Dtype: [name for name in DTYPES if name.startswith(("float", "bfloat"))],
    words.Attention: ATTENTION,
    words.Protocol: PROTOCOLS,
    words.Strategy: STRATEGIES,
    words.Existing: EXISTING,
    words.Site: [*SITES, *GROUPS],
    words.PatchSite: PATCH_SITES,
    words.Over: SWEEPS,
    words.Direction: DIRECTIONS,
    words.Distance: [*DISTANCES, LOGIT_DIFFERENCE],
    words.ExperimentName: experiments(),
}


GROWING = {"Site": words.Site, "PatchSite": words.PatchSite, "ExperimentName": words.ExperimentName}


@pytest.mark.parametrize("word", TABLES, ids=lambda word: str(typing.get_args(word)[0]))
def test_a_type_offers_what_there_is(word):
    """Stale after a new site or experiment: `python tests/test_words.py` writes it anew."""
    assert sorted(typing.get_args(word)) == sorted(TABLES[word])


def test_short_names_of_dtypes_are_taken_and_said_in_full():
    assert dtype_named("bf16") is dtype_named("torch.bfloat16") is DTYPES["bfloat16"]
    assert str(path_named("cached[cache=bf16,kernels=split_k(4,fp16)]@fp32")) == str(
        path_named("cached[cache=bfloat16,kernels=split_k(4,float16)]@float32")
    )
    assert experiment_named("flip-law")(model="zoo:gqa2-mini", dtype="fp16").dtype == "float16"


if __name__ == "__main__":
    file = Path(words.__file__)
    text = file.read_text(encoding="utf-8")
    for name, word in GROWING.items():
        lines = textwrap.wrap(", ".join(f'"{each}"' for each in TABLES[word]) + ",", 122, break_on_hyphens=False)
        listed = "".join(f"    {line}\n" for line in lines)
        text = re.sub(rf"(?m)^{name} = Literal\[\n(.*\n)*?\]", lambda _, n=name, of=listed: f"{n} = Literal[\n{of}]", text)
    file.write_text(text, encoding="utf-8")
