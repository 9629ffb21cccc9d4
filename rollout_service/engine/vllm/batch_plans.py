"""Worker side: the plans of a batch's requests, as numbers for its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout_service.engine.vllm.ahead import on_device
from rollout_service.engine.vllm.plan import AttachPlan, plan_from_wire


class BatchPlans:
    """Plans by request, and what they say of the batch as it stands.

    Most steps have the batch of the step before them: then nothing is read or copied anew.
    """

    def __init__(self, device: torch.device) -> None:
        """Know no request yet."""
        self._device = device
        self._plans: dict[str, AttachPlan | None] = {}
        self._ids: list[str] = []
        self._offsets = self._num_mounted = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._per_token: torch.Tensor | None = None

    def forget(self, request_ids: Any) -> None:
        """Requests have ended; another of the same name may come."""
        for request_id in request_ids:
            self._plans.pop(request_id, None)
            self._ids = []

    def plan(self, request_id: str, requests: Any) -> AttachPlan | None:
        """A request's plan."""
        if request_id not in self._plans:
            params = requests[request_id].sampling_params
            self._plans[request_id] = params and plan_from_wire(params.extra_args)
        return self._plans[request_id]

    def take(self, request_ids: list[str], requests: Any) -> None:
        """Look at a batch.

        Args:
            request_ids: Its requests in order.
            requests: vLLM's states by request.
        """
        if request_ids == self._ids:
            return
        plans = [self.plan(request_id, requests) for request_id in request_ids]
        numbers = [(0, 0) if p is None else (p.offset, p.num_mounted) for p in plans]
        table = np.array(numbers, dtype=np.int64).reshape(-1, 2)
        self._ids, self._counts = list(request_ids), np.zeros(0, dtype=np.int64)
        self._offsets, self._num_mounted = table.T

    @property
    def num_mounted(self) -> np.ndarray:
        """Mounted rows of each request, `[N]`."""
        return self._num_mounted

    @property
    def offsets(self) -> np.ndarray:
        """Position minus row index of each request, `[N]`."""
        return self._offsets

    def token_offsets(self, counts: np.ndarray) -> torch.Tensor | None:
        """The same of each token, `[T]` on the device; None where all are 0.

        Args:
            counts: Tokens of each request in this step, `[N]`.
        """
        if not np.array_equal(counts, self._counts):
            self._counts, self._per_token = counts.copy(), None
            if self._offsets.any():
                per_token = torch.from_numpy(np.repeat(self._offsets, counts))
                self._per_token = on_device(per_token, self._device)
        return self._per_token
