"""The processes of one trainer, as torchrun starts them: the first leads, the others follow.

Two process groups: one for gradients, on the device, whose calls all ranks make at about the same
time, and weights where they are sharded; one through gloo for everything else, on which followers
wait for as long as episodes take.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from harness_sdk.errors import ConfigError, EngineError
from trainer_service.launch import place

_STEP_TIMEOUT = timedelta(minutes=30)
"""Longest that one rank waits for the slowest in a step."""

_PATIENCE = timedelta(days=30)
"""A follower waits for the next step; a leader that dies closes the connection at once."""

_ANSWER_S = 3.0
"""After a lost connection, what each of the others has to say that it is still there. torchrun
kills them all a little later."""

T = TypeVar("T")


class Ranks:
    """One process of `size`; alone, every call is trivial.

    Attributes:
        rank: Of this process, from 0, which leads.
        size: How many there are.
        device: Where this process computes.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: str = "cpu", store: Store | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store
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
        rank, size = place()
        if size == 1:
            return cls(device=device)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cpu":
            return cls(rank, size, store=_meet("gloo"))
        if ":" in device or local >= torch.cuda.device_count():
            raise ConfigError(
                "several processes take a device each",
                value=f"{device}, process {local} of this machine, "
                f"{torch.cuda.device_count()} devices",
                limit="model.device cuda, and as many processes as devices",
                remedy="correct --nproc-per-node or --model.device",
            )
        torch.cuda.set_device(local)
        # By number: the current device is one of this thread alone.
        return cls(rank, size, f"cuda:{local}", _meet("cpu:gloo,cuda:nccl"))

    def mesh(self, sharding: str) -> DeviceMesh | None:
        """What base weights are divided among; None with `sharding` none. All ranks call it.

        Raises:
            ConfigError: There is one rank alone to divide them among.
        """
        if sharding == "none":
            return None
        if self.size == 1:
            raise ConfigError(
                f"ranks.sharding {sharding} does not go with a single process",
                remedy="start several with torchrun, or set ranks.sharding none",
            )
        return init_device_mesh(self.device.partition(":")[0], (self.size,))

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
        with self.told(always=True):
            dist.scatter_object_list(found, sent, src=0, group=self._control)
        return found[0]

    def broadcast(self, value: T) -> T:
        """The leader's `value`."""
        if self.size == 1:
            return value
        held = [value]
        with self.told(always=True):
            dist.broadcast_object_list(held, src=0, group=self._control)
        return held[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank; at followers nothing."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with self.told(always=True):
            dist.gather_object(value, found, dst=0, group=self._control)
        return found or []

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits everywhere."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        with self.told(always=True):
            dist.all_reduce(sums, group=self._control)
        return sums.tolist()

    def most(self, *values: int) -> list[int]:
        """The largest of all ranks' values, place by place."""
        if self.size == 1:
            return list(values)
        held = torch.tensor(values)
        with self.told(always=True):
            dist.all_reduce(held, dist.ReduceOp.MAX, group=self._control)
        return held.tolist()

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by the sum over all ranks, in float32 at least; none counts as 0.

        One transfer for all of them: an adapter's are many and small.
        """
        if self.size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        flat = torch.cat([grad.flatten().to(dtype) for grad in grads])
        with self.told(always=True):
            dist.all_reduce(flat)
        sizes = [grad.numel() for grad in grads]
        for parameter, grad in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)

    def leave(self) -> None:
        """Close the connections."""
        if self.size > 1:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def told(self, *, always: bool = False) -> Iterator[None]:
        """Name the ranks that are gone where a connection to one of them breaks.

        Args:
            always: Whether the block does nothing else that could fail.

        Raises:
            EngineError: With the ranks that do not answer.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (always or _is_of_connection(error)):
                raise
            gone = " and ".join(map(str, self._silent())) or "one"
            raise EngineError(
                "another process of this trainer is gone",
                value=f"process {gone} of {self.size}: {str(error).partition(chr(10))[0]}",
                remedy="see the log of the one that ended first; started again, with as many"
                " processes or others, the trainer resumes from its checkpoint",
            ) from error

    def _silent(self) -> list[int]:
        """Ranks that do not say within a moment that they noticed it as well."""
        if self._store is None:
            return []
        silent: list[int] = []
        deadline_s = time.monotonic() + _ANSWER_S
        try:
            self._store.set(_answer_key(self.rank), "")
            for other in (rank for rank in range(self.size) if rank != self.rank):
                left_s = max(deadline_s - time.monotonic(), 0.01)
                try:
                    self._store.wait([_answer_key(other)], timedelta(seconds=left_s))
                except dist.DistStoreError:
                    silent.append(other)
        except RuntimeError:
            # The store went with the machine that held it.
            return silent or [0]
        return silent


def _meet(backend: str) -> Store:
    """Join the group of all ranks; the store through which they found each other."""
    store, rank, size = next(rendezvous("env://", timeout=_STEP_TIMEOUT))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_STEP_TIMEOUT)
    return store


def _answer_key(rank: int) -> str:
    return f"octopus/answer/{rank}"


def _is_of_connection(error: RuntimeError) -> bool:
    # Gloo's are plain RuntimeErrors, which begin with the place in its source.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
