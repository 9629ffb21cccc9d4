"""Streams on which the calls of one pass over a tree run side by side.

The last blocks of a call leave most of a GPU idle, which the next calls take: 2 to 4 % of forward
in combs and trunks on an H200. PyTorch's allocator knows one stream for each tensor: so what side
streams read must live until `join`, and what they gave is read before the block ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import cycle
from types import TracebackType
from typing import TypeVar

import torch

Result = TypeVar("Result")

_STREAMS = 3


class SideStreams:
    """Side streams of the current stream; none for one call alone, or where a graph is captured.

    Example:
        with SideStreams(device, 2) as side:
            found = [side.run(first), side.run(second)]
            side.join()
            total = found[0] + found[1]
    """

    def __init__(self, device: torch.device, num_calls: int) -> None:
        is_used = num_calls > 1 and device.type == "cuda"
        if is_used and not torch.cuda.is_current_stream_capturing():
            # Backward may run on another stream than forward did, in a thread of its own.
            self._main = torch.cuda.current_stream(device)
            self._streams = _side_streams(device)
        else:
            self._streams = ()
        self._turns = cycle(self._streams)

    def __enter__(self) -> SideStreams:
        """What was given to the current stream comes before what side streams do."""
        self._wait_for_main()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Results may be freed: whoever takes their memory waits for their readers."""
        if kind is not None:
            self.join()
        self._wait_for_main()

    def run(self, call: Callable[[], Result]) -> Result:
        """`call` on the next side stream."""
        if not self._streams:
            return call()
        with torch.cuda.stream(next(self._turns)):
            return call()

    def join(self) -> None:
        """The current stream waits for all calls; the host does not."""
        for stream in self._streams:
            self._main.wait_stream(stream)

    def _wait_for_main(self) -> None:
        for stream in self._streams:
            stream.wait_stream(self._main)


@functools.cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(_STREAMS))
