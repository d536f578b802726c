"""The error that a policy makes: what is no number is said, and bits are those of the layers in which it acts."""

import pytest

import kvinterp as kv
from kvinterp.papers.studies.equivalent_noise import EquivalentNoise


@pytest.mark.parametrize("policy", ["fp8(e4m3,scale=0.0001,overflow=nonfinite)", "normal(0,1e30)"])
def test_what_makes_nan_or_infinity_has_no_size(tmp_path, policy: str) -> None:
    """A cache of NaN was said to have "exactly no error", and an infinite one ended in a traceback."""
    with pytest.raises(kv.KvinterpError, match="makes NaN or infinity of K in layer 0"):
        EquivalentNoise("zoo:llama64-mini", (policy,), "arithmetic:1", max_new_tokens=2).run(
            tmp_path / "out", progress="none"
        )


def test_bits_are_those_of_the_layers_in_which_a_policy_acts() -> None:
    asked = EquivalentNoise("zoo:llama64-mini", ("q4_0(on=k,layers=0+1)",), "arithmetic:1", max_new_tokens=2)
    outcome = asked.run(None, progress="none")
    bits = outcome.tables["equivalent_noise"].groupby(["tensor", "layer"])["bits"].first()
    assert bits["K"].tolist() == [4.5, 4.5, 16, 16]
    assert bits["V"].tolist() == [16] * 4
    whole = {row["tensor"]: row["bits"] for row in outcome.summary["policies"]}
    assert whole == pytest.approx({"K": 10.25, "V": 16})
