"""The processes of one trainer, as torchrun starts them: the first leads, the others follow.

Two process groups: one for gradients, on the device, whose calls all ranks make at about the same
time; one through gloo for everything else, on which followers wait for as long as episodes take.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness_sdk.errors import ConfigError, EngineError

_STEP_TIMEOUT = timedelta(minutes=30)
"""Longest that one rank waits for the slowest in a step."""

_PATIENCE = timedelta(days=30)
"""A follower waits for the next step; a leader that dies closes the connection at once."""

T = TypeVar("T")


class Ranks:
    """One process of `size`; alone, every call is trivial.

    Attributes:
        rank: Of this process, from 0, which leads.
        size: How many there are.
        device: Where this process computes.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._control: Any = None
        if size > 1:
            self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @classmethod
    def join(cls, device: str) -> Ranks:
        """The rank that torchrun's environment says; alone without it.

        Args:
            device: `cpu` or `cuda`; a number is refused, for each rank takes its own.

        Raises:
            ConfigError: There is a numbered device, or no device for this rank.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=device)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cpu":
            dist.init_process_group("gloo", timeout=_STEP_TIMEOUT)
            return cls(dist.get_rank(), size)
        if ":" in device or local >= torch.cuda.device_count():
            raise ConfigError(
                "several processes take a device each",
                value=f"{device}, process {local} of this machine, "
                f"{torch.cuda.device_count()} devices",
                limit="model.device cuda, and as many processes as devices",
                remedy="correct --nproc-per-node or --model.device",
            )
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_STEP_TIMEOUT)
        # By number: the current device is one of this thread alone.
        return cls(dist.get_rank(), size, f"cuda:{local}")

    @property
    def leads(self) -> bool:
        """Whether this process talks to Redis and the broker, and writes checkpoints."""
        return self.rank == 0

    def scatter(self, objects: Sequence[T] | None) -> T:
        """Each rank's of the leader's `objects`; followers pass None and wait."""
        if self.size == 1:
            assert objects is not None
            return objects[0]
        found: list[Any] = [None]
        sent = list(objects) if objects is not None else None
        with _told():
            dist.scatter_object_list(found, sent, src=0, group=self._control)
        return found[0]

    def broadcast(self, value: T) -> T:
        """The leader's `value`."""
        if self.size == 1:
            return value
        held = [value]
        with _told():
            dist.broadcast_object_list(held, src=0, group=self._control)
        return held[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank; at followers nothing."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with _told():
            dist.gather_object(value, found, dst=0, group=self._control)
        return found or []

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits everywhere."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        with _told():
            dist.all_reduce(sums, group=self._control)
        return sums.tolist()

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by the sum over all ranks, in float32 at least; none counts as 0.

        One transfer for all of them: an adapter's are many and small.
        """
        if self.size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        flat = torch.cat([grad.flatten().to(dtype) for grad in grads])
        with _told():
            dist.all_reduce(flat)
        sizes = [grad.numel() for grad in grads]
        for parameter, grad in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)

    def leave(self) -> None:
        """Close the connections."""
        if self.size > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            "another process of this trainer is gone",
            value=str(error).partition("\n")[0],
            remedy="see the log of the one that ended first; started again, with as many processes"
            " or others, the trainer resumes from its checkpoint",
        ) from error
