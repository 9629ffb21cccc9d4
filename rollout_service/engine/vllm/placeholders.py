"""Rows computed elsewhere, as tokens in front of a request's own: counted, and stored nowhere.

vLLM finds a row's page and position by its index among a request's tokens. What those tokens were
matters to nobody once the rows are there, so the context's length costs nothing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rollout_service.engine.vllm.seams import ConstantList, require_attributes


def own_rows(request: Any, num_rows: int) -> None:
    """Give a request that many placeholder tokens in front of its own.

    Done in the core, so a turn's message carries only its new tokens.
    """
    require_attributes(request, "prompt_token_ids", "num_prompt_tokens", "_all_token_ids")
    own = request.prompt_token_ids
    request.prompt_token_ids = RowsAndTokens(num_rows, own)
    request.num_prompt_tokens = len(request.prompt_token_ids)
    request._all_token_ids = RowsAndTokens(num_rows, own)
    request.all_token_ids = ConstantList(request._all_token_ids)


class RowsAndTokens(list[int]):
    """Tokens behind `num_rows` zeros that are not stored."""

    def __init__(self, num_rows: int, token_ids: Iterable[int]) -> None:
        super().__init__(token_ids)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows + super().__len__()

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        at = at + len(self) if at < 0 else at
        return 0 if at < self._num_rows else super().__getitem__(at - self._num_rows)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(itertools.repeat(0, self._num_rows), super().__iter__())

    def __reduce__(self) -> Any:
        return RowsAndTokens, (self._num_rows, self.own())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of them, zeros included."""
        rows = np.zeros(len(self), dtype=dtype or np.int32)
        rows[self._num_rows :] = self.own()
        return rows

    def copy(self) -> list[int]:
        """All of them, zeros included."""
        return list(iter(self))

    def own(self) -> list[int]:
        """The tokens behind the rows."""
        return list(super().__iter__())


class TokenTable(np.ndarray):
    """vLLM's table of the batch's tokens, which leaves the columns of placeholders as they are."""

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(value, RowsAndTokens):
            row, columns = at
            value = value.own()
            at = row, slice(columns.stop - len(value), columns.stop)
        super().__setitem__(at, value)
