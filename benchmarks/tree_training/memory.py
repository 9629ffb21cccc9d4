"""The most memory that tensors hold at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made while it was active and that are still held."""

    def __init__(self) -> None:
        """Nothing is held yet."""
        super().__init__()
        self.held = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it made: a view of a weight is no new memory."""
        self._count((args, kwargs), are_new=False)
        found = func(*args, **(kwargs or {}))
        self._count(found, are_new=True)
        return found

    def _count(self, values: Any, *, are_new: bool) -> None:
        for each in tree_leaves(values):
            if isinstance(each, torch.Tensor):
                self._count_storage(each.untyped_storage(), are_new=are_new)

    def _count_storage(self, storage: torch.UntypedStorage, *, are_new: bool) -> None:
        place, size = storage._cdata, storage.nbytes() if are_new else 0
        if place in self._seen:
            return
        self._seen.add(place)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.held -= size


@contextmanager
def peak_gib(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that holds the peak of what ran inside, in GiB; on the CPU new tensors alone.

    On the CPU every operator is counted in Python: do not measure time inside.
    """
    found: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) / 2**30)
        return
    with LiveBytes() as meter:
        yield found
    found.append(meter.peak / 2**30)
