"""The sites at which a model can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.hook_names import hook_of, hook_points_of, listed_names
from kvinterp.models.sites import CACHE_SITES, VECTOR_SITES, expand_sites
from kvinterp.recording import SiteHook

DEFAULT_RECORD = ("resid_post", "pattern", "kv")
COMPARED = (*VECTOR_SITES, "pattern", *CACHE_SITES)
"""All sites that can be compared."""


def recordable(
    adapter: Adapter, record: str | Sequence[str] | None, layers: Sequence[int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The sites to record and, where the choice is the default, those that this model cannot give.

    Args:
        adapter: The model.
        record: Sites, which must all exist, or None for those of :data:`DEFAULT_RECORD` that the
            model can give.
        layers: The layers they are recorded at.

    Returns:
        The sites (hooks by their own names), and for each default site that is left out the reason.

    Raises:
        UnsupportedError: ``record`` names a site that this model does not have.
    """
    if record is not None:
        names = listed_names(record)
        _check(adapter, names, layers)
        return expand_sites(names) if all(hook_of(name) is None for name in names) else tuple(
            names
        ), {}
    available: list[str] = []
    left_out: dict[str, str] = {}
    for name in DEFAULT_RECORD:
        try:
            _check(adapter, expand_sites(name), layers)
            available += expand_sites(name)
        except UnsupportedError as error:
            left_out[name] = str(error)
    return tuple(available), left_out


def _check(adapter: Adapter, sites: Sequence[str], layers: Sequence[int]) -> None:
    SiteHook(adapter, hook_points_of(adapter, sites, layers)[1])
