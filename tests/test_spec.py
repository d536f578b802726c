"""Text forms and the plugins of a folder: one reader and one writer for policies, kernel modes, strategies and caches."""

import dataclasses

import pytest

import kvinterp as kv
from kvinterp.common import spec
from kvinterp.models.cache_kinds import CACHE_KINDS, Dynamic, cache_named
from kvinterp.paths import KERNELS, STRATEGIES, kernels_named, strategy_named
from kvinterp.policies import POLICIES, policy_named

REGISTRIES = {
    "policy": (policy_named, POLICIES),
    "kernel mode": (kernels_named, KERNELS),
    "strategy": (strategy_named, STRATEGIES),
    "cache": (cache_named, CACHE_KINDS),
}


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    rows: int = 8
    share: float = 0.5
    site: str | None = None
    layers: tuple[int, ...] = ()


KINDS = spec.by_name(HeavyHitters)


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (HeavyHitters(), "heavy_hitters(8,0.5)"),
        (HeavyHitters(share=1.0), "heavy_hitters(8,1)"),
        (HeavyHitters(share=1 / 3), "heavy_hitters(8,0.3333333333333333)"),
        (HeavyHitters(site="pattern"), "heavy_hitters(8,0.5,pattern)"),
        (HeavyHitters(site="it's, well (1"), 'heavy_hitters(8,0.5,"it\'s, well (1")'),
        (HeavyHitters(site="a\nb='\"\\"), "heavy_hitters(8,0.5,'a\\nb=\\'\"\\\\')"),
        (HeavyHitters(site="a,\\", layers=(1, 2)), "heavy_hitters(8,0.5,'a,\\\\',1+2)"),
        (HeavyHitters(site="3"), "heavy_hitters(8,0.5,'3')"),
        (HeavyHitters(layers=(3,)), "heavy_hitters(8,0.5,None,3)"),
        (HeavyHitters(layers=(0, 2)), "heavy_hitters(8,0.5,None,0+2)"),
    ],
)
def test_a_text_form_reads_as_it_is_written(plugin, text):
    assert spec.text_of(plugin) == text
    found = spec.read("plugin", text, KINDS, "")
    assert found == plugin
    assert type(found.share) is float


def test_capitals_and_hyphens_of_a_name_do_not_matter():
    assert spec.read("plugin", " Heavy-Hitters( 4 ) ", KINDS, "") == HeavyHitters(4)


@pytest.mark.parametrize("what", REGISTRIES)
def test_every_plugin_reads_as_it_is_written(what):
    named, kinds = REGISTRIES[what]
    for name, kind in kinds.items():
        made = kind()
        assert str(made).split("(")[0] == name
        assert named(str(made)) == made


@pytest.mark.parametrize("what", REGISTRIES)
@pytest.mark.parametrize("text", ["nothing_like_it", "(1", "a(1)b", ""])
def test_an_unknown_name_says_which_there_are(what, text):
    named, kinds = REGISTRIES[what]
    with pytest.raises(kv.InputError, match=f"unknown {what}") as error:
        named(text)
    assert all(name in str(error.value) for name in kinds)


@pytest.mark.parametrize("what", REGISTRIES)
def test_values_that_do_not_fit_say_what_is_taken(what):
    named, kinds = REGISTRIES[what]
    for name, kind in kinds.items():
        fields = sorted(dataclasses.fields(kind), key=lambda field: field.kw_only)
        takes = ", ".join(f"{field.name}=[^,]+" if field.kw_only else field.name for field in fields) or "no values"
        with pytest.raises(kv.InputError, match=f"{what} '.*' cannot be read: {name} takes {takes}"):
            named(f"{name}({','.join('123456789' * 3)})")


def test_two_plugins_of_one_name_are_a_mistake():
    with pytest.raises(RuntimeError, match="both have a plugin called 'dynamic'"):
        spec.by_name(Dynamic, type("Dynamic", (), {}))


def test_a_separator_in_brackets_separates_nothing():
    assert spec.split("chunk=4,kernels=split_k(2,float16),x=[1,2]", ",") == [
        "chunk=4",
        "kernels=split_k(2,float16)",
        "x=[1,2]",
    ]
    assert spec.split("a(1e+5)+b", "+") == ["a(1e+5)", "b"]
    assert spec.split(" ", ",") == []
