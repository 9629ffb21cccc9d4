"""Side streams of tree attention: what comes before what, with streams that only keep account."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tree_kernels.attention import streams
from tree_kernels.attention.streams import SideStreams


class Stream:
    """Knows which work is done before the work that it is given next."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.done = device, set[str]()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Cuda:
    """`torch.cuda` with a current stream for each device."""

    Stream = Stream

    def __init__(self) -> None:
        self.current: dict[torch.device, Stream] = {}
        self.capturing = False

    def current_stream(self, device: torch.device) -> Stream:
        return self.current.setdefault(device, Stream(device))

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before

    def work(self, name: str, device: torch.device) -> tuple[Stream, set[str]]:
        """The stream that the work is given to, and what is done before it."""
        stream = self.current_stream(device)
        before = set(stream.done)
        stream.done.add(name)
        return stream, before


DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=found))
    streams._side_streams.cache_clear()
    yield found
    streams._side_streams.cache_clear()


def one_pass(cuda: Cuda, device: torch.device, prefix: str, num_calls: int = 7) -> set[Stream]:
    """Inputs, calls and what reads their results, as a pass gives them; the calls' streams."""
    main = cuda.current_stream(device)
    cuda.work(f"{prefix} inputs", device)
    calls = [f"{prefix} call {number}" for number in range(num_calls)]
    with SideStreams(device, num_calls) as side:
        found = [side.run(lambda name=name: cuda.work(name, device)) for name in calls]
        side.join()
        stream, before = cuda.work(f"{prefix} reader", device)
    assert stream is main and {f"{prefix} inputs", *calls} <= before
    assert all(f"{prefix} inputs" in done for _, done in found)
    return {stream for stream, _ in found}


def test_calls_follow_their_inputs_and_precede_their_readers(cuda: Cuda) -> None:
    used = one_pass(cuda, DEVICE, "first")
    assert len(used) == 3 and cuda.current_stream(DEVICE) not in used
    assert one_pass(cuda, DEVICE, "second") == used


def test_memory_of_results_is_taken_only_behind_their_readers(cuda: Cuda) -> None:
    # The second pass has another main stream, which knows nothing of the first's.
    used = one_pass(cuda, DEVICE, "first")
    with cuda.stream(Stream(DEVICE)):
        assert all("first reader" in stream.done for stream in used)
        assert one_pass(cuda, DEVICE, "second") == used


def test_a_pass_that_fails_leaves_no_call_behind_the_current_stream(cuda: Cuda) -> None:
    with pytest.raises(RuntimeError, match="refused"), SideStreams(DEVICE, 2) as side:
        side.run(lambda: cuda.work("call", DEVICE))
        raise RuntimeError("refused")
    assert cuda.work("later", DEVICE)[1] >= {"call"}


def test_each_device_has_streams_of_its_own(cuda: Cuda) -> None:
    one, other = one_pass(cuda, DEVICE, "one"), one_pass(cuda, OTHER, "other")
    assert len(one) == len(other) == 3
    assert {stream.device for stream in one} == {DEVICE}
    assert {stream.device for stream in other} == {OTHER}


@pytest.mark.parametrize(("num_calls", "capturing"), [(1, False), (7, True)])
def test_one_call_and_captured_ones_stay_where_they_are(
    cuda: Cuda, num_calls: int, capturing: bool
) -> None:
    cuda.capturing = capturing
    assert one_pass(cuda, DEVICE, "only", num_calls) == {cuda.current_stream(DEVICE)}


def test_the_cpu_has_no_streams(cuda: Cuda) -> None:
    device = torch.device("cpu")
    assert one_pass(cuda, device, "only") == {cuda.current_stream(device)}
