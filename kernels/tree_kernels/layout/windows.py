"""Windows of a causal convolution: the rows before each row on its path, and who reads a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvTable:
    """Which of R rows a window reads, and for forks which windows read a row.

    Example:
        Trunk of 2 rows, branches of 1 and 1, width 3: `ancestors=[[-1, 0, 1, 1], [-1, -1, 0, 0]]`.
        Row 2 follows its window in the strip, row 3 does not: `fork_rows=[0, 1]`,
        `fork_begins=[0, 1, 2]`, `reader_rows=[3, 3]`, `reader_taps=[2, 1]`.
    """

    ancestors: torch.Tensor
    """Row j + 1 rows before each row on its path, -1 before its beginning, `[W - 1, R]` int64."""
    fork_rows: torch.Tensor
    """Rows that windows of rows elsewhere than right behind them read, ascending, `[F]` int64."""
    fork_begins: torch.Tensor
    """Where each fork row's readers begin, then their number, `[F + 1]` int64."""
    reader_rows: torch.Tensor
    """Rows whose windows read a fork row from elsewhere, by fork row and then ascending, int64."""
    reader_taps: torch.Tensor
    """How many rows before the reader the fork row is on its path, int64."""

    @classmethod
    def of(cls, row_parents: np.ndarray, width: int, device: torch.device) -> ConvTable:
        """The table of rows with these parents, -1 for none, `[R]`."""
        parents = np.append(row_parents, -1)
        ancestors = [parents[:-1]]
        for _ in range(width - 2):
            ancestors.append(parents[ancestors[-1]])
        table = np.stack(ancestors[: width - 1]) if width > 1 else np.empty((0, len(row_parents)))
        plain = np.arange(len(row_parents)) - np.arange(1, width)[:, None]
        taps, readers = np.nonzero((table >= 0) & (table != plain))
        read = table[taps, readers].astype(np.int64)
        order = np.lexsort((taps, readers, read))
        forks, begins = np.unique(read[order], return_index=True)
        given = (table, forks, np.append(begins, len(read)), readers[order], taps[order] + 1)
        names = ("ancestors", "fork_rows", "fork_begins", "reader_rows", "reader_taps")
        return cls(
            **{
                name: torch.from_numpy(np.ascontiguousarray(each, dtype=np.int64)).to(device)
                for name, each in zip(names, given, strict=True)
            }
        )
