"""What the files are for each thread: a branch begins with its parent's, a rewind restores them."""

from __future__ import annotations

from harness_sdk import LoopEvent, Thread


class Workspaces:
    """The module under repair as each thread of an episode has it.

    Args:
        root: The episode's first thread.
        source: What it begins with.

    Example:
        With `on_event=workspaces.observe` in a `ToolLoop`, a branch that is forked after
        `write("root", "x = 1")` reads `x = 1` whatever the root writes later.
    """

    def __init__(self, root: Thread, source: str) -> None:
        self._threads = {root.thread_id: root}
        self._sources = {root.thread_id: source}
        self._before_turn: dict[tuple[str, int], str] = {}

    def read(self, thread_id: str) -> str:
        """The module as that thread has it.

        Raises:
            KeyError: No such thread.
        """
        return self._sources[thread_id]

    def write(self, thread_id: str, source: str) -> None:
        """Replace the module of that thread alone."""
        self._sources[thread_id] = source

    def observe(self, event: LoopEvent) -> None:
        """Follow the thread's turns, forks and rewinds; hears of each before the next."""
        thread = self._threads[event.thread_id]
        source = self._sources[event.thread_id]
        if event.turn is not None:
            self._before_turn[event.thread_id, event.turn.step] = source
        if event.call is None or event.failed:
            return
        if event.call.name == "rewind":
            # After a step is before the turn of the next.
            self._sources[event.thread_id] = self._before_turn[event.thread_id, thread.step + 1]
        for child in thread.children.values():
            if child.thread_id not in self._threads:
                self._threads[child.thread_id] = child
                self._sources[child.thread_id] = source
