"""The accelerator's device and link, with streams that write down what is asked of them."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zenflow.backends import streams as backend
from zenflow.backends.device import AcceleratorDevice, EventTicket
from zenflow.backends.link import StreamLink
from zenflow.backends.streams import AcceleratorStreams, CudaStreams, streams_of
from zenflow.backends.ticket import FINISHED


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name


class Event:
    def __init__(self, log: list[str], stream: Stream) -> None:
        self._log = log
        self._stream = stream
        self.finished = False

    def wait(self, stream: Stream) -> None:
        self._log.append(f"{stream.name} waits for {self._stream.name}")

    def query(self) -> bool:
        return self.finished

    def synchronize(self) -> None:
        self._log.append("host waits")
        self.finished = True


class Streams:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.created: list[Stream] = []
        self._used = threading.local()

    def create(self) -> Stream:
        self.created.append(Stream(f"side{len(self.created)}"))
        return self.created[-1]

    def current(self) -> Stream:
        return Stream("compute")

    def record(self, stream: Stream) -> Event:
        self.log.append(f"event on {stream.name}")
        return Event(self.log, stream)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"use {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")


class DeviceTensor:
    """Stands for device memory."""

    is_cpu = False

    def __init__(self, streams: Streams, number: int = 0) -> None:
        self._streams = streams
        self.number = number

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        self._streams.log.append("copy")

    def record_stream(self, stream: Stream) -> None:
        self._streams.log.append(f"memory kept for {stream.name}")


CPU = torch.device("cpu")


def test_a_copy_waits_on_its_own_stream_and_is_finished_by_an_event_behind_it() -> None:
    streams = Streams()
    device, link = AcceleratorDevice(CPU, streams), StreamLink(CPU, streams)
    source, target = torch.arange(3.0), torch.zeros(3)
    transfer = link.to_host(source, target, device.mark())
    assert streams.log == [
        "event on compute",
        "side0 waits for compute",
        "use side0",
        "leave side0",
        "event on side0",
    ]
    assert transfer.tensor is target and transfer.source is source
    assert not transfer.done()
    assert torch.equal(transfer.wait(), source)
    assert transfer.done()


def test_the_two_directions_have_a_stream_each_created_once() -> None:
    streams = Streams()
    link = StreamLink(CPU, streams)
    for _ in range(3):
        link.to_host(torch.ones(2), torch.zeros(2), FINISHED)
        link.to_device(torch.ones(2), torch.zeros(2), FINISHED)
    assert len(streams.created) == 2
    assert streams.log.count("use side0") == streams.log.count("use side1") == 3


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_memory_of_a_copy_dropped_in_flight_is_kept_from_other_owners(direction: str) -> None:
    streams = Streams()
    link = StreamLink(CPU, streams)
    transfer = getattr(link, direction)(torch.zeros(2), DeviceTensor(streams), FINISHED)
    del transfer
    assert streams.log[-1].startswith("memory kept for side")


def test_a_copy_may_be_left_to_itself() -> None:
    """Its memory is given up at once, and the allocator is told whom to wait for."""
    streams = Streams()
    source: Any = DeviceTensor(streams)
    alive = weakref.ref(source)
    target: Any = torch.zeros(2)
    transfer = StreamLink(CPU, streams).to_device(target, source, FINISHED)
    transfer.let_go()
    assert streams.log[-1] == "memory kept for side1"
    del transfer, source
    assert alive() is None


def test_memory_of_a_finished_copy_is_free_at_once() -> None:
    streams = Streams()
    target: Any = DeviceTensor(streams)
    alive = weakref.ref(target)
    transfer = StreamLink(CPU, streams).to_device(torch.zeros(2), target, FINISHED)
    transfer.wait()
    del transfer, target
    assert not any("kept" in line for line in streams.log)
    assert alive() is None


def test_a_ticket_alone_keeps_no_memory() -> None:
    """A slot holds its copy's ticket until its sweep, and no device memory."""
    streams = Streams()
    source = torch.ones(2)
    transfer = StreamLink(CPU, streams).to_host(source, torch.zeros(2), FINISHED)
    ticket = transfer.ticket
    ticket.wait()
    alive = weakref.ref(source)
    del transfer, source
    assert isinstance(ticket, EventTicket)
    assert alive() is None


def test_workers_may_copy_at_once() -> None:
    """Nothing of an entered stream is kept where another thread enters it."""
    streams = Streams()
    link = StreamLink(CPU, streams)
    inside = threading.Barrier(2, timeout=10)
    problems: list[BaseException] = []

    class Slow(DeviceTensor):
        def copy_(self, source: Any, *, non_blocking: bool) -> None:
            inside.wait()  # both threads are inside of `use` now

    def copy() -> None:
        try:
            link.to_device(torch.zeros(2), Slow(streams), FINISHED).wait()  # type: ignore[arg-type]
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_no_module_enters_a_stream_by_itself() -> None:
    """``with stream:`` keeps its state in the stream, which threads share."""
    sources = Path(backend.__file__).parents[1].rglob("*.py")
    assert not [path for path in sources if "with stream:" in path.read_text(encoding="utf-8")]


def test_streams_are_chosen_by_the_device() -> None:
    assert isinstance(streams_of(torch.device("cuda", 1)), CudaStreams)
    assert isinstance(streams_of(torch.device("xpu", 0)), AcceleratorStreams)


def test_a_cuda_event_sleeps_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, bool]] = []

    class CudaEvent:
        def __init__(self, **arguments: bool) -> None:
            made.append(arguments)

        def record(self, stream: Stream) -> None:
            assert stream.name == "any"

    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    CudaStreams(torch.device("cuda", 0)).record(Stream("any"))  # type: ignore[arg-type]
    assert made == [{"enable_timing": False, "blocking": True}]


def test_capture_into_a_graph_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = AcceleratorDevice(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=r"CUDA graph.*call step\(\) outside"):
        device.mark()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_many_threads_copy_through_one_link() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    link, compute = StreamLink(device), AcceleratorDevice(device)
    results: list[Tensor] = []

    def copy() -> None:
        for i in range(200):
            source = torch.full((1 << 16,), float(i)).pin_memory()
            target = torch.empty(1 << 16, device=device)
            results.append(
                link.to_device(source, target, compute.mark()).wait().sum() / (1 << 16) - i
            )

    threads = [threading.Thread(target=copy) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 1600
    assert not torch.stack(results).any()
