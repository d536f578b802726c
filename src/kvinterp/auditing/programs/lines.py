"""A program as lines of plain Python, written while it runs: what is done, what is judged, and the
same without a cache.

Tokens that ``generate()`` makes are read from what it returns, never copied into the lines: on a
model that makes other tokens the lines compare these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

FED = ("logits[{row}, {column}]", "")
GENERATED = ("out.logits[{column}][{row}]", "out.sequences")
BEAMS = ("out.logits[{column}][out.beam_indices[{row}, {column}]]", "out.sequences")
SEEN = ("seen[{column}][{row}, -1]", "tokens")
"""How lines read the logits of a row and a column, and where the tokens stand that were generated
before it, if any were.
"""


class Lines(list[str]):
    """The lines of a program.

    Attributes:
        named: Whether ``ids`` stands in them for all columns on the cache, which it does once some
            were generated.
        before: How many lines stand before those that make the logits that are judged.
        control: What makes these logits without a cache; empty where that is what was run.
        all_columns: All columns on the cache then, as an expression.
        beams: How many rows of logits there are for one of these columns.
        ends: A line that says what is wrong where that is no error of logits, and what it prints.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named, self.before, self.control, self._reads = False, 0, "", FED
        self.all_columns, self.beams, self.ends = "", 1, ("", "")

    def note(self, line: str) -> None:
        """Adds a line that keeps ``ids`` true, where it stands for the columns."""
        if self.named:
            self.append(line)

    def columns(self, known: Tensor, new: Tensor) -> str:
        """All columns as an expression: those that were known, ``[row, column]``, and new ones
        behind them.
        """
        if self.named:
            return f"torch.cat([ids, torch.tensor({new.tolist()})], 1)" if new.shape[1] else "ids"
        return f"torch.tensor({torch.cat([known, new], 1).tolist()})"

    def judged(
        self, reads: tuple[str, str], all_columns: str, control: str, line: str, beams: int = 1
    ) -> None:
        """Adds the line whose logits are judged; see the attributes."""
        self.before, self.control, self._reads = len(self), control, reads
        self.all_columns, self.beams = all_columns, beams
        self.append(line)

    def got(self, row: int, column: int) -> str:
        """The logits of a row and a column of these, or of a new token."""
        return self._reads[0].format(row=row, column=column)

    def text(self, row: int, ids: Tensor, real: Sequence[int], generated: tuple[int, int]) -> str:
        """A row's own tokens, ``[1, position]``.

        Args:
            row: The row.
            ids: All columns, ``[row, column]``.
            real: Which of them hold its tokens, but for generated ones.
            generated: How many generated tokens stand behind these, of how many.
        """
        text = f"torch.tensor([{ids[row, list(real)].tolist()}])"
        if self.named:
            first = row // self.beams
            text = f"{self.all_columns}[{first}:{first + 1}, {_index(real)}]"
        count, of = generated
        made = f"{self._reads[1]}[{row}:{row + 1}, -{of}:{count - of}]"
        return f"torch.cat([{text}, {made}], 1)" if count else text


def arguments(
    ids: Tensor | str, model_kwargs: Mapping[str, Tensor] = MappingProxyType({}), **more: object
) -> str:
    """What a forward is called with, as it is written; an expression stands as it is."""
    first = ids if isinstance(ids, str) else f"torch.tensor({ids.tolist()})"
    tensors = [f"{name}=torch.tensor({given.tolist()})" for name, given in model_kwargs.items()]
    return ", ".join([first, *tensors, *(f"{name}={value}" for name, value in more.items())])


def _index(numbers: Sequence[int]) -> str:
    first, end = numbers[0], numbers[-1] + 1
    return f"{first}:{end}" if [*numbers] == [*range(first, end)] else str([*numbers])
