"""Tensors of a long run: packed in memory, written to disk in parts while the model runs, and read
back one at a time.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvinterp.common.files import write_whole
from kvinterp.errors import InputError
from kvinterp.models.attaching import HookPoint

PART = 32 * 2**20
"""The bytes that are held in memory before a part is written."""
BLOCK = 4 * 2**20
"""The bytes of a block that small tensors are packed into."""


class Packing:
    """Moves small tensors into blocks of memory, one behind the other.

    A decode step leaves some small tensors and frees buffers that the next step needs a little
    larger, such as the keys and values of its cache. With small tensors of their own between them
    the freed places cannot be joined, and the process grows by several times what is recorded (4
    times at 2,048 tokens: ``benchmarks/generated.py``).
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of one step: views of a block where they are small, and themselves where
        they are not, or have a graph.
        """
        packed = list(tensors)
        alike: dict[Any, list[int]] = {}
        for number, tensor in enumerate(packed):
            small = tensor.numel() * tensor.element_size() <= BLOCK // 16
            if small and not tensor.requires_grad:
                kind = tensor.dtype, tensor.device, tensor.shape
                alike.setdefault(kind, []).append(number)
        for (dtype, device, shape), numbers in alike.items():
            count = math.prod(shape)
            fit = max(BLOCK // max(count * dtype.itemsize, 1), 1)
            # One call for all layers of a site, which are alike: a call each costs more than the
            # copy.
            for some in (numbers[at : at + fit] for at in range(0, len(numbers), fit)):
                block = self._block(dtype, device, len(some) * count).view(len(some), *shape)
                torch.stack([packed[number] for number in some], out=block)
                for number, view in zip(some, block.unbind(), strict=True):
                    packed[number] = view
        return packed

    def _block(self, dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
        """The next so many numbers of a block; it is let go of with the last tensor in it."""
        block, at = self._blocks.get((dtype, device), (None, 0))
        if block is None or at + count > len(block):
            block, at = torch.empty(BLOCK // dtype.itemsize, dtype=dtype, device=device), 0
        self._blocks[dtype, device] = block, at + count
        return block[at : at + count]


class Parts:
    """The parts in a folder.

    Args:
        folder: An empty folder, or one that is made.

    Raises:
        InputError: The folder holds something.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(
                f"into={str(folder)!r} is not empty: give a folder that is empty or does not exist yet."
            )
        self._files: list[Path] = []
        self._part_of: dict[int, int] = {}
        self._open: tuple[int, Any] = (-1, None)

    def write(self, pieces: Mapping[HookPoint, Sequence[Tensor]], numbers: Sequence[int]) -> None:
        """Writes what some passes showed, ``pieces[hook_point][number]`` for each of their numbers, as
        one part.
        """
        file = self.folder / f"part-{len(self._files):05d}.safetensors"
        tensors = {
            f"{site}.{layer}.{number}": held[number].detach().cpu().contiguous()
            for (site, layer), held in pieces.items()
            for number in numbers
        }
        # Written from the tensors themselves: their bytes as one string would be as much memory
        #     again.
        write_whole(file, lambda opened: save_file(tensors, opened.name))
        self._part_of |= dict.fromkeys(numbers, len(self._files))
        self._files.append(file)

    def __contains__(self, number: object) -> bool:
        return number in self._part_of

    def read(self, hook_point: HookPoint, number: int) -> Tensor:
        """What one pass showed."""
        part = self._part_of[number]
        if self._open[0] != part:
            self._open = part, safe_open(self._files[part], framework="pt")
        return self._open[1].get_tensor(f"{hook_point[0]}.{hook_point[1]}.{number}")  # type: ignore[no-any-return]


class Unread(Mapping[HookPoint, Tensor]):
    """Tensors by site and layer, each of which is made when it is asked for.

    Args:
        hook_points: The sites and layers.
    """

    def __init__(self, hook_points: Sequence[HookPoint]) -> None:
        self._hook_points = tuple(hook_points)

    @abc.abstractmethod
    def read(self, hook_point: HookPoint) -> Tensor:
        """The tensor of one that there is."""

    def __iter__(self) -> Iterator[HookPoint]:
        return iter(self._hook_points)

    def __len__(self) -> int:
        return len(self._hook_points)

    def __contains__(self, hook_point: object) -> bool:
        return hook_point in self._hook_points

    def __getitem__(self, hook_point: HookPoint) -> Tensor:
        if hook_point not in self._hook_points:
            raise KeyError(hook_point)
        return self.read(hook_point)


class Saved(Unread):
    """The tensors that a generation saved, a file each.

    Args:
        folder: The folder.
        hook_points: The sites and layers in it.
    """

    def __init__(self, folder: Path, hook_points: Sequence[HookPoint]) -> None:
        super().__init__(hook_points)
        self._folder = folder

    def read(self, hook_point: HookPoint) -> Tensor:
        """Reads its file."""
        with safe_open(self.file(self._folder, hook_point), framework="pt") as file:
            return file.get_tensor("rows")  # type: ignore[no-any-return]

    @staticmethod
    def file(folder: Path, hook_point: HookPoint) -> Path:
        """The file of a site at a layer."""
        return folder / f"{hook_point[0]}.{hook_point[1]}.safetensors"
