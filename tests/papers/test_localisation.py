"""Localisation: which examples are patched, and why."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvinterp.papers.studies.localisation import chosen_of

pytestmark = pytest.mark.bits


def test_the_highest_of_each_model_are_chosen_and_it_says_why() -> None:
    ranked = pd.DataFrame(
        {
            "number": [0] * 4 + [1] * 2,
            "model": ["m"] * 4 + ["n"] * 2,
            "example": [0, 1, 2, 3, 0, 1],
            "mean_kl": [1.0, 3.0, np.nan, 3.0, 0.0, 2.0],
        }
    )
    chosen = chosen_of(ranked, 2)
    assert chosen["example"].tolist() == [1, 3, 1, 0], "the highest first, of equal ones the earlier"
    assert chosen["rank"].tolist() == [1, 2, 1, 2]
    assert chosen["of"].tolist() == [3, 3, 2, 2]
    assert chosen["why"].iloc[1] == "number 2 of 3 by the mean KL of the steps after the prefill, free protocol"
    assert len(chosen_of(ranked, 9)) == 5
