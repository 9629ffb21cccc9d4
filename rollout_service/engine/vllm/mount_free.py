"""Groups of layers that never see a mount: shorter tables under one count of tokens.

vLLM counts a request's tokens once, mounted rows among them, and mounted rows stand in front. A
mount-free group has none of them: its tables, sequence lengths and slots are shorter by that
number, which stays the same as long as the request lives. So a row's index is vLLM's less the
hidden ones, and attention computes what it would compute without any mount; no kernel knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_service.engine.vllm.seams import (
    AttentionGroup,
    BlockTable,
    CpuGpuBuffer,
    FullAttentionManager,
)


class MountFreeManager(FullAttentionManager):
    """Core side: blocks for the rows that a mount-free group has."""

    def start(self) -> None:
        """Know no request; called once vLLM's manager was adopted."""
        self._num_hidden: dict[str, int] = {}

    def hide(self, request_id: str, num_rows: int) -> None:
        """Leave out that many of a request's rows, until its blocks are popped."""
        self._num_hidden[request_id] = num_rows

    def num_rows(self, request_id: str, num_tokens: int) -> int:
        """Rows here of a request that has `num_tokens`."""
        return num_tokens - self._num_hidden.get(request_id, 0)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Blocks that are missing for `num_tokens`."""
        num_rows = self.num_rows(request_id, num_tokens)
        return super().get_num_blocks_to_allocate(request_id, num_rows, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Take the blocks that are missing for `num_tokens`."""
        num_rows = self.num_rows(request_id, num_tokens)
        return super().allocate_new_blocks(request_id, num_rows, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """A request's blocks, forgotten here."""
        self._num_hidden.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


class HiddenRows:
    """Worker side: for each request of the batch the rows that mount-free groups lack.

    On the device, in buffers that stay where they are: a captured CUDA graph reads them.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        """Hide nothing, for batches of up to `max_num_reqs`."""
        self._counts = CpuGpuBuffer(max_num_reqs, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._indices: Tensor | None = None

    def set(self, counts: np.ndarray) -> None:
        """Take over the step's batch, before its inputs are prepared.

        Args:
            counts: Hidden rows of each request, `[N]`; empty hides nothing.
        """
        self._indices = None
        known = self._counts.np
        if not (np.array_equal(known[: len(counts)], counts) and not known[len(counts) :].any()):
            known[: len(counts)] = counts
            known[len(counts) :] = 0
            self._counts.copy_to_gpu()

    def row_indices(self, num_reqs: int, query_start_loc: Tensor, indices: Tensor) -> Tensor:
        """Row in a mount-free table of each token to compute.

        Args:
            num_reqs: N.
            query_start_loc: Where each request's tokens begin, `[N + 1]`.
            indices: vLLM's row of each token, `[T]`.

        Returns:
            `[T]`, computed once a step.
        """
        if not self._counts.np.any():
            return indices
        if self._indices is None:
            lengths = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
            # With the size given, nothing waits for the device.
            self._indices = indices - torch.repeat_interleave(
                self._counts.gpu[:num_reqs], lengths, output_size=len(indices)
            )
        return self._indices

    def shorten(self, metadata: Any) -> Any:
        """vLLM's common attention metadata with a mount-free group's lengths."""
        num_reqs = metadata.num_reqs
        seq_lens = self._seq_lens[:num_reqs]
        torch.sub(metadata.seq_lens, self._counts.gpu[:num_reqs], out=seq_lens)
        if not self._counts.np.any():
            return metadata.replace(seq_lens=seq_lens)
        upper = metadata.seq_lens_cpu_upper_bound - self._counts.cpu[:num_reqs]
        return metadata.replace(
            seq_lens=seq_lens, seq_lens_cpu_upper_bound=upper, max_seq_len=int(upper.max())
        )


class MountFreeTable(BlockTable):
    """A group's block tables on the worker."""

    hidden: HiddenRows

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: Tensor, positions: Tensor
    ) -> None:
        """Where each token's row is written; vLLM calls rows positions."""
        rows = self.hidden.row_indices(num_reqs, query_start_loc, positions)
        super().compute_slot_mapping(num_reqs, query_start_loc, rows)


class MountFreeGroup(AttentionGroup):
    """A group's layers of one backend, whose metadata each step builds."""

    hidden: HiddenRows

    def build_metadata(self, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """A step's metadata."""
        shorter = self.hidden.shorten(common_attn_metadata)
        return super().build_metadata(shorter, *args, **kwargs)

    def build_metadata_for_cudagraph_capture(
        self, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """What a captured graph reads, in the same buffers."""
        shorter = self.hidden.shorten(common_attn_metadata)
        return super().build_metadata_for_cudagraph_capture(shorter, *args, **kwargs)
