"""One text and the activations of the run that wrote it, by the text's own positions, stitched from
prefill and decode steps.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from kvinterp.common.files import bytes_of, is_file, strict_json, write_whole
from kvinterp.errors import InputError, UnsupportedError, shown
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import hook_name, hook_point_of
from kvinterp.models.provenance import provenance
from kvinterp.models.sites import CACHE_SITES, LAYOUTS
from kvinterp.recording.activation_cache import cache_of
from kvinterp.recording.parts import Saved, Unread
from kvinterp.recording.trace import Trace

_TEXT, _LOGITS = "generation.json", "logits.safetensors"
_LISTS = ("prompt", "tokens", "positions", "heads", "kv_heads", "derived")
_ABOUT = (*_LISTS, "path", "provenance")


@dataclasses.dataclass(frozen=True)
class Pass:
    """The columns that one forward computed.

    Attributes:
        start: The first column that was new in it.
        stop: The end of what it had seen when it was over.
        first: The first column that is its own: behind ``start`` where it computed earlier columns
            again.
        columns: The columns whose rows were kept; None for all.
    """

    start: int
    stop: int
    first: int
    columns: tuple[int, ...] | None = None

    def rows(self, columns: Sequence[int], count: int) -> range | list[int]:
        """The rows at which some of its columns are, of the ``count`` that it kept."""
        if self.columns is not None:
            return [bisect.bisect_left(self.columns, column) for column in columns]
        # Its last row is of its last column.
        shift = count - self.stop
        if isinstance(columns, range):
            return range(columns.start + shift, columns.stop + shift)
        return [column + shift for column in columns]


@dataclasses.dataclass(repr=False, eq=False)
class Generation:
    """One text with the activations of one run at each of its positions.

    The last token of a generated text was chosen and never fed, so that no run has activations
    there: of P prompt tokens and N generated ones there are P + N - 1 positions. Where ``generate``
    returned text instead of token ids, that token is not known, and ``tokens`` ends before it. Pads
    of a batch are taken out.

    Attributes:
        prompt: Token ids of the prompt.
        tokens: Token ids that were generated.
        records: For each site and layer a tensor ``[position, ...]`` with the axes of the site;
            scores and patterns are ``[query_head, query, key]``, lower-triangular over the whole
            text.
        positions: The positions of the rows; all that were fed, unless a window was asked for.
        path: ``"cached"``, ``"recompute"``, or ``"cached, not read: ..."`` where the model was seen
            to ignore its cache.
        logits: ``[token, vocabulary]``: the logits that decided each generated token; None unless
            asked for.
        heads: The query heads in the records; None for all.
        kv_heads: The KV heads in the records; None for all.
        derived: The sites that were computed beside a kernel that does not show them (SDPA).
        adapter: The model.
        made_with: The provenance, where it was read from a folder; else None.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    records: Mapping[HookPoint, Tensor]
    positions: tuple[int, ...]
    path: str = "cached"
    logits: Float[Tensor, "token vocab"] | None = None
    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    derived: tuple[str, ...] = ()
    adapter: Any = None
    made_with: dict[str, Any] | None = None

    @property
    def provenance(self) -> dict[str, Any]:
        """Model, machine and settings; made when it is asked for, as a hash of all weights takes
        longer than some tokens.
        """
        if self.made_with is None and self.adapter is not None:
            self.made_with = provenance(self.adapter)
        return self.made_with or {}

    @property
    def text(self) -> tuple[int, ...]:
        """Token ids of the whole text."""
        return (*self.prompt, *self.tokens)

    def __repr__(self) -> str:
        """Names the path, the size and the records in one line."""
        sites = dict.fromkeys(
            f"{site} (derived)" if site in self.derived else site for site, _ in self.records
        )
        layers = len({layer for _, layer in self.records})
        return (
            f"<Generation ({self.path}): {len(self.prompt)} prompt tokens, {len(self.tokens)} generated, "
            f"{', '.join(sites) or 'nothing'} of {layers} layers at {len(self.positions)} positions>"
        )

    def __getitem__(self, hook_point: HookPoint | str) -> Tensor:
        """Returns a site at a layer (-1: the last), or a hook by its name: ``[position, ...]``, or
        ``[head, query, key]``.
        """
        found = cast(HookPoint, hook_point_of(hook_point))
        if (
            isinstance(found, tuple)
            and len(found) == 2
            and isinstance(found[1], int)
            and found[1] < 0
        ):
            layers = sorted({layer for site, layer in self.records if site == found[0]})
            found = (found[0], layers[found[1]]) if -found[1] <= len(layers) else found
        if found not in self.records:
            have = ", ".join(dict.fromkeys(site for site, _ in self.records)) or "nothing"
            raise InputError(
                f"this text has no {shown(hook_point)}: it recorded {have}; ask "
                f"for a site and a layer, such as ('resid_post', 0)."
            )
        return self.records[found]

    def cache(self, model: Any = None) -> Any:
        """Returns TransformerLens's ``ActivationCache`` of the whole text, by the names of its
        hooks, with a batch of one.

        Args:
            model: The model that some methods of the cache need; by default the one that was
                recorded.

        Raises:
            InputError: No recorded site has a hook, or a window of the positions was recorded.
        """
        self._check_whole("an ActivationCache has no places for the positions of its rows")
        records = {
            hook_point: tensor[None]
            for hook_point, tensor in self.records.items()
            if hook_point[0] not in CACHE_SITES
        }
        owner = self.adapter if model is None else model
        fed = self.text[: len(self.positions)]
        return cache_of(
            records, owner, {**_looked_up(self.adapter, fed), **_final_scale(owner, records)}
        )

    def trace(self) -> Trace:
        """Returns the same run as a trace, a step a token, which a :class:`Patch` takes as its
        donor.

        Raises:
            InputError: A window of the positions was recorded.
        """
        self._check_whole("a trace has every step")
        cut = len(self.prompt)
        ends = range(cut, len(self.positions) + 1)
        records: dict[HookPoint, list[Tensor]] = {}
        for hook_point, tensor in self.records.items():
            layout = LAYOUTS[hook_point[0]]
            if not layout.gathers and not layout.keys:
                continue
            starts = [0, *ends[:-1]]
            rows = [
                tensor.narrow(layout.row_axis - 1, start, end - start)
                for start, end in zip(starts, ends, strict=True)
            ]
            records[hook_point] = (
                [row[..., :end] for row, end in zip(rows, ends, strict=True)]
                if layout.keys
                else rows
            )
        return Trace(
            path="cached",
            prompt=self.prompt,
            tokens=self.tokens,
            fed=self.text[cut : len(self.positions)],
            records=records,
            steps=tuple(range(len(ends))),
            logits=self.logits,
            provenance=self.provenance,
            heads=self.heads,
            kv_heads=self.kv_heads,
            derived=self.derived,
        )

    def _check_whole(self, why: str) -> None:
        if (
            self.positions != tuple(range(len(self.positions)))
            or len(self.positions) < len(self.text) - 1
        ):
            raise InputError(
                f"{len(self.positions)} of {len(self.text) - 1} positions were recorded, and {why}: record positions='all'."
            )

    def save(self, folder: str | Path) -> Path:
        """Writes the text, and a file for each site and layer, into a folder; at no time is more
        than one of them in memory.

        Returns:
            The folder, which :meth:`load` reads.
        """
        target = Path(folder)
        for hook_point in self.records:
            write_whole(
                Saved.file(target, hook_point),
                save({"rows": self.records[hook_point].cpu().contiguous()}),
            )
        if self.logits is not None:
            write_whole(target / _LOGITS, save({"logits": self.logits.cpu().contiguous()}))
        about = {name: getattr(self, name) for name in _ABOUT} | {
            "places": [list(hook_point) for hook_point in self.records]
        }
        write_whole(target / _TEXT, strict_json(about))
        return target

    @classmethod
    def load(cls, folder: str | Path, adapter: Any = None) -> Generation:
        """Reads what :meth:`save` wrote; a tensor is read when it is asked for.

        Args:
            folder: The folder.
            adapter: The model, which some methods of its ``cache()`` need.

        Raises:
            InputError: The folder holds none.
        """
        source = Path(folder)
        if not is_file(source / _TEXT):
            raise InputError(
                f"folder {str(source)!r} holds no {_TEXT}: give a folder that Generation.save wrote."
            )
        try:
            about = json.loads(bytes_of(source / _TEXT))
            made_with = about.pop("provenance")
            hook_points = [(str(site), int(layer)) for site, layer in about.pop("places")]
            listed = {name: None if about[name] is None else tuple(about[name]) for name in _LISTS}
            logits = (
                load(bytes_of(source / _LOGITS))["logits"] if is_file(source / _LOGITS) else None
            )
            return cls(
                **{**about, **listed},
                records=Saved(source, hook_points),
                logits=logits,
                adapter=adapter,
                made_with=made_with,
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(
                f"folder {str(source)!r} holds no readable generation ({error}): save it again."
            ) from error

    def frame(self, site: str) -> pd.DataFrame:
        """The norm of a site's row at every layer, position and head, one a row, with the token and
        the part of the text.

        Args:
            site: A site with a vector at each position.

        Raises:
            InputError: The site is not recorded, or has no vector at each position.
        """
        layers = sorted(layer for name, layer in self.records if name == site)
        if not layers or not LAYOUTS[site].gathers:
            raise InputError(
                f"site={shown(site)} was given: expected a recorded site with a vector at each position."
            )
        text, pieces = self.text, []
        for layer in layers:
            norms = self.records[site, layer].double().norm(dim=-1)
            index = pd.DataFrame(
                {
                    "position": self.positions,
                    "token": [text[at] for at in self.positions],
                    "part": [
                        "prompt" if at < len(self.prompt) else "generated" for at in self.positions
                    ],
                }
            )
            for head, column in enumerate(norms.T) if norms.dim() == 2 else [(None, norms)]:
                piece = index.assign(site=site, layer=layer, norm=column.numpy())
                pieces.append(piece if head is None else piece.assign(head=head))
        return pd.concat(pieces, ignore_index=True)


class Stitched(Unread):
    """The records of one row of a batch; a tensor is stitched when it is asked for, so that nothing
    is held twice.

    Args:
        pieces: Returns what each pass showed of a hook point, ``[batch, ...]``, in order.
        hook_points: The sites and layers.
        passes: The columns of each pass.
        row: The row.
        span: The columns of the row's text: what is before are pads.
        chosen: The columns of which there are rows, in order; None for all of the span.
    """

    def __init__(
        self,
        pieces: Callable[[HookPoint], Sequence[Tensor]],
        hook_points: Sequence[HookPoint],
        passes: Sequence[Pass],
        row: int,
        span: tuple[int, int],
        chosen: Sequence[int] | None = None,
    ) -> None:
        super().__init__(hook_points)
        self._pieces, self._passes, self._row = pieces, passes, row
        self._span, self._chosen = span, chosen

    def read(self, hook_point: HookPoint) -> Tensor:
        """Stitches the rows of its passes."""
        pieces, layout, (begin, end) = self._pieces(hook_point), LAYOUTS[hook_point[0]], self._span
        if hook_point[0] in CACHE_SITES:
            # A cache holds every row at the last pass.
            return pieces[-1][self._row].narrow(layout.row_axis - 1, begin, end - begin)
        found = [
            self._of_pass(hook_point[0], pieces[number][self._row], self._passes[number], columns)
            for number, first, last in owners(self._passes)
            if len(columns := self._columns(max(first, begin), min(last, end)))
        ]
        return torch.cat(
            found
            or [self._of_pass(hook_point[0], pieces[0][self._row], self._passes[0], range(0))],
            layout.row_axis - 1,
        )

    def _columns(self, first: int, last: int) -> Sequence[int]:
        """The columns from ``first`` to ``last`` of which there are rows."""
        if self._chosen is None:
            return range(first, last)
        return self._chosen[
            bisect.bisect_left(self._chosen, first) : bisect.bisect_left(self._chosen, last)
        ]

    def _of_pass(self, site: str, piece: Tensor, here: Pass, columns: Sequence[int]) -> Tensor:
        """The rows of some columns in what a pass showed."""
        axis = LAYOUTS[site].row_axis - 1
        at = here.rows(columns, piece.shape[axis])
        if isinstance(at, range):
            rows = piece.narrow(axis, at.start if at else 0, len(at))
        else:
            rows = piece.index_select(axis, torch.tensor(at, dtype=torch.long, device=piece.device))
        return self._keys(rows, here.stop, site) if LAYOUTS[site].keys else rows

    def _keys(self, rows: Tensor, stop: int, site: str) -> Tensor:
        """Spreads rows of a pattern over the keys of the row's text, from keys that end at
        ``stop``.
        """
        begin, end = self._span
        # A cache of a fixed size shows places that hold nothing yet; a window lacks the oldest
        # keys.
        rows = rows[..., :stop]
        missing = stop - rows.shape[-1]
        fill = 0.0 if site == "pattern" else -torch.inf
        return nn.functional.pad(rows, (missing - begin, end - stop), value=fill)


def owners(passes: Sequence[Pass]) -> list[tuple[int, int, int]]:
    """The pass that each column is taken from, as runs of pass number, first column and end.

    A later pass on a cache replaces the columns that it computed anew (a draft that was rejected);
    a pass without a cache computes the whole text again, and only its new columns are those of the
    run that wrote the text.
    """
    runs: list[tuple[int, int, int]] = []
    for number, here in enumerate(passes):
        while runs and runs[-1][1] >= here.first:
            runs.pop()
        if runs and runs[-1][2] > here.first:
            runs[-1] = (*runs[-1][:2], here.first)
        runs.append((number, here.first, here.stop))
    return runs


@torch.no_grad()
def _looked_up(adapter: Any, tokens: Sequence[int]) -> dict[str, Tensor]:
    """The token embeddings, which are rows of a table in every run; HookedTransformer looks them up
    outside of its forward.
    """
    embedding = getattr(adapter, "embedding", None)
    if embedding is None:
        return {}
    return {hook_name("embed", 0): embedding(torch.tensor([tokens], device=adapter.device))}


@torch.no_grad()
def _final_scale(model: Any, records: Mapping[HookPoint, Tensor]) -> dict[str, Tensor]:
    """The scale of the final norm, which TransformerLens's attributions divide by, from the last
    residual stream.
    """
    model = getattr(model, "model", model)
    norm = getattr(model, "ln_final", None)
    hook = getattr(norm, "hook_scale", None)
    last = max((layer for site, layer in records if site == "resid_post"), default=-1)
    layers = getattr(getattr(model, "cfg", None), "n_layers", 0)
    if norm is None or not isinstance(hook, nn.Module) or last != layers - 1:
        return {}
    seen: list[Tensor] = []
    handle = hook.register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        norm(records["resid_post", last])
    finally:
        handle.remove()
    return {"ln_final.hook_scale": seen[-1]} if seen else {}


def ended(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """How many of the generated tokens belong to a text: up to its end token, where nothing but one
    filler follows it.
    """
    for count, token in enumerate(tokens, 1):
        if token in ends and len(set(itertools.islice(tokens, count, None))) <= 1:
            return count
    return len(tokens)


def text_end(tokens: Sequence[int], prompt: int, end: int, ends: Sequence[int]) -> int:
    """The end of the columns of a row that are of its text.

    Args:
        tokens: The row's token ids.
        prompt: The columns of the prompts.
        end: The columns that were fed.
        ends: The tokens that end a text.
    """
    count = ended(tokens[prompt:], ends)
    # A row that ended before the others was fed fillers, and its end token, which alone it would
    # not have been.
    return min(prompt + count - 1, end) if count < len(tokens) - prompt else end


def pads_in(mask: Tensor) -> list[int]:
    """How many pads are in front of each row of a mask, ``[batch, column]``.

    Raises:
        UnsupportedError: A row has pads elsewhere.
    """
    pads = (mask == 0).sum(1)
    in_front = (torch.arange(mask.shape[1], device=mask.device)[None] >= pads[:, None]) == (
        mask != 0
    )
    if not bool(in_front.all()):
        raise UnsupportedError(
            "a row is padded at its end or within: pad prompts at the left, as generate() needs it."
        )
    return cast(list[int], pads.tolist())
