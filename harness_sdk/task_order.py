"""Tasks by their place in the run, so that a run goes on where it stands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from typing import Any

from harness_sdk.errors import ConfigError

_END = object()


class TaskOrder:
    """The tasks that one runner takes, pass after pass.

    Args:
        tasks: Makes a pass, each time of the same tasks in the same order.
        owner: Whose tasks they are, for errors.
    """

    def __init__(
        self, tasks: Callable[[], Iterable[Any] | AsyncIterable[Any]], owner: object
    ) -> None:
        self._make = tasks
        self._owner = owner
        self._pass = _each(tasks())
        self._ahead: list[Any] = []
        self._next = 0
        """Place in the pass of the task that comes next."""
        self._num_tasks: int | None = None
        """Of a pass; known once one has ended."""
        self._first = 0
        self._num_taken = 0

    async def wants(self, count: int | None, *, repeats: bool = True) -> bool:
        """Whether another task is to be taken.

        Args:
            count: How many in all; 0 has no end, None ends with the pass that the first one is in.
            repeats: False ends with that pass whatever `count` is.

        Raises:
            ConfigError: There are no tasks to repeat.
        """
        if count and self._num_taken >= count:
            return False
        if self._num_tasks is None and not self._ahead:
            found = await self._pop()
            if found is not _END:
                self._ahead.append(found)
                self._next -= 1
        repeats = repeats and count is not None
        if self._num_tasks == 0 and repeats:
            raise self._no_tasks()
        if self._num_tasks is None or repeats:
            return True
        return self._num_taken < self._num_tasks - self._first % max(self._num_tasks, 1)

    async def take(self, place: int) -> Any:
        """The task of the run's `place`-th group, from 0.

        Raises:
            ConfigError: There are no tasks.
        """
        if not self._num_taken:
            self._first = place
        found = _END
        while found is _END:
            wanted = place % self._num_tasks if self._num_tasks else place
            if wanted < self._next:
                await self._begin_pass()
            found = await self._pop()
            while found is not _END and self._next <= wanted:
                found = await self._pop()
            if self._num_tasks == 0:
                raise self._no_tasks()
        self._num_taken += 1
        return found

    async def _pop(self) -> Any:
        found = self._ahead.pop() if self._ahead else await anext(self._pass, _END)
        if found is _END:
            self._num_tasks = self._next
            await self._begin_pass()
        else:
            self._next += 1
        return found

    async def _begin_pass(self) -> None:
        await self._pass.aclose()
        self._pass, self._next = _each(self._make()), 0
        self._ahead.clear()

    def _no_tasks(self) -> ConfigError:
        return ConfigError("the agent has no tasks", value=self._owner)


async def _each(tasks: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
        return
    for task in tasks:
        yield task
