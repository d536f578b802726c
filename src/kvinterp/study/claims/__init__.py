"""WHAT IS CLAIMED: what the papers and posts say, each claim with the rule by which tables decide it here.

One file holds the claims of one experiment: a claim is data (whose, where, in our words, with which number) and a function that
looks for it in the tables of a study. The verdict is the program's, by the rule the claim names: it holds here, it does not
hold here, or these data cannot tell. Nothing is run here and no model is loaded.
"""

from kvinterp.study.claims.base import FAILS, HOLDS, OPEN, Claim, Found
from kvinterp.study.claims.judge import COLUMNS, claims_of
from kvinterp.study.claims.table import CLAIMS

__all__ = ["CLAIMS", "COLUMNS", "FAILS", "HOLDS", "OPEN", "Claim", "Found", "claims_of"]
