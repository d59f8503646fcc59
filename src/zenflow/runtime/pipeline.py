"""The host pipeline: slots in, sweeps beside the next step, publishes at step boundaries."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from zenflow.backends.ticket import FINISHED, Transfer
from zenflow.config import ZenFlowConfig
from zenflow.core import schedule
from zenflow.core.rules import SubStep
from zenflow.core.segments import plan_segments
from zenflow.kernels.selective import DeviceSide, Share
from zenflow.runtime.platform import Platform
from zenflow.runtime.segment import Segment, upload
from zenflow.runtime.slots import BufferPool, Captured, Slot
from zenflow.runtime.stages import staged
from zenflow.runtime.stats import Meter
from zenflow.runtime.sweep import Sweep, SweepJob
from zenflow.runtime.weight import Weight

_MAX_STREAMING_BYTES = 64 << 20
"""Gradients that streaming capture leaves on the device while the link is busy."""
_NUMEL_TOGETHER = 1 << 18
"""Elements that one worker sweeps in one go: a fraction of a millisecond, and some more than it costs to
hand over a job. Larger segments go alone."""
_DRAIN_DEPTH_PER_THREAD = 2
"""Sweeps in flight for each worker while draining: keeps workers busy and staging small."""


class HostWorkError(RuntimeError):
    """A sweep failed or its worker died: deferred state is lost, so training cannot go on."""


class Table:
    """The segments registered together, in order, with their phases for each update interval."""

    def __init__(self, segments: list[Segment], numels: list[int]) -> None:
        self.segments = segments
        self._numels = numels
        self._phases: dict[int, list[int]] = {}

    def phases(self, update_interval: int) -> list[int]:
        if update_interval not in self._phases:
            self._phases[update_interval] = schedule.phases(self._numels, update_interval)
        return self._phases[update_interval]


class HostPipeline:
    """Owns the segment tables, the slot pool and what is in flight.

    Args:
        platform: what it runs on.
        config: the user's choices.
        meter: where waiting and traffic are counted.
    """

    def __init__(self, platform: Platform, config: ZenFlowConfig, meter: Meter) -> None:
        self.platform = platform
        self.config = config
        self.meter = meter
        self.tables: list[Table] = []
        self.pool = BufferPool(platform.storage.buffer)
        self._copies: list[Transfer] = []
        self._to_gather: list[Share] = []
        self._begun: list[Sweep] = []
        self._failure: BaseException | None = None

    @property
    def segments(self) -> Iterator[Segment]:
        return (segment for table in self.tables for segment in table.segments)

    def add(self, weights: Sequence[Weight]) -> None:
        """Cut weights into segments, as one table."""
        blocks = plan_segments([(w.view.shape[0], w.view[0].numel()) for w in weights])
        first_key = sum(len(table.segments) for table in self.tables)
        segments = []
        for key, block in enumerate(blocks, first_key):
            weight = weights[block.weight]
            rows = weight.view[block.start : block.stop]
            is_whole = len(rows) == len(weight.view)
            segment = Segment(key, rows, block.start, block.stop, is_whole)
            segment.shows_previews = self.config.shows_previews
            weight.segments.append(segment)
            segments.append(segment)
        table = Table(segments, [block.numel for block in blocks])
        self.tables.append(table)
        if not self.platform.link.shared:
            hosted = [_hosted(weights[b.weight], b.stop - b.start) for b in blocks]
            self.pool.reserve(self._buffers(table, hosted))

    def _buffers(
        self, table: Table, hosted: Sequence[tuple[int, torch.dtype] | None]
    ) -> dict[tuple[int, torch.dtype], int]:
        """How many buffers of each kind the schedule uses at once, for a table of these segments."""
        counts: dict[tuple[int, torch.dtype], int] = {}
        streaming = self.config.stream_gradients
        bound = self.config.interval_bound
        intervals = range(1, bound + 1) if self.config.update_interval == "auto" else [bound]
        for kind in {kind for kind in hosted if kind is not None}:
            counts[kind] = max(
                schedule.most_buffers(
                    [p for p, of in zip(table.phases(s), hosted, strict=True) if of == kind],
                    s,
                    streaming=streaming,
                )
                for s in intervals
            )
        return counts

    def capture(self, weight: Weight, grad: Tensor) -> None:
        """Take a gradient (the weight's view) apart into its segments' shares. Selected channels that
        are not gathered yet are left to :meth:`gather`. Where memory is shared, a gradient is owned by
        the runtime and contiguous, and is the slot as it is."""
        shared = self.platform.link.shared
        for segment in weight.segments:
            rows = segment.rows_of(grad)
            if not segment.gathered:
                share = segment.share(self.platform, rows)
                if share is not None:
                    self._to_gather.append(share)
            if shared:
                segment.captured = Captured(rows, FINISHED, None)
            else:
                self._hold(segment.send(self.platform, self.pool, rows))
            self.meter.d2h_bytes += segment.deferred_numel * rows.itemsize
        if self.config.stream_gradients:
            self.release_copied(_MAX_STREAMING_BYTES)

    def gather(self) -> None:
        """Gather the selected channels of what was captured."""
        shares, self._to_gather = self._to_gather, []
        if shares:
            self.platform.device.run(self.platform.device_kernel.gather, shares)

    def _hold(self, copy: Transfer) -> None:
        """Keep what is being copied where the link's memory is bounded; else leave it to the link."""
        if not self.config.stream_gradients:
            copy.let_go()
        elif not copy.done():
            self._copies.append(copy)

    def forget_captured(self, weight: Weight) -> None:
        """Give back what holds a gradient whose step is not applied."""
        for segment in weight.segments:
            captured, segment.captured, segment.gathered = segment.captured, None, False
            if captured is not None and captured.buffer is not None:
                captured.ticket.wait()
                self.pool.release(captured.buffer)

    def captured_parts(self, weight: Weight) -> list[Tensor]:
        """On the device, both sides' parts of a gradient whose step is not applied yet."""
        parts = []
        for segment in weight.segments:
            captured = segment.captured
            assert captured is not None
            captured.ticket.wait()
            parts.append(upload(self.platform, captured.grad))
            if segment.side is not None and segment.side.selected_grad is not None:
                parts.append(segment.side.selected_grad)
        return parts

    def put_slot(self, segment: Segment, step: int, substep: SubStep, grad: Tensor) -> None:
        """Put back a saved gradient of the deferred channels, in ascending channel order."""
        assert segment.channels is not None
        buffer = None
        if not self.platform.link.shared:  # else slots are no buffers that return to the pool
            buffer = self.pool.acquire(segment.host_shape, grad.dtype)
        whole = grad.new_zeros(segment.host_shape) if buffer is None else buffer.zero_()
        whole.index_copy_(1, segment.channels.deferred_places(), grad)
        segment.waiting.append(Slot(step, substep, whole, FINISHED, buffer))

    def release_copied(self, max_bytes: int | None = None) -> None:
        """Drop what the link has finished reading; wait until at most ``max_bytes`` are left."""
        self._copies = [copy for copy in self._copies if not copy.done()]
        if max_bytes is None:
            return
        left = sum(copy.source.nbytes for copy in self._copies)
        with self.meter.stall():
            while left > max_bytes:
                oldest = self._copies.pop(0)
                left -= oldest.source.nbytes
                oldest.wait()

    def due(self, step: int, interval: int) -> list[Segment]:
        """Segments that a gradient of ``step`` would make, or leaves, due at its end."""
        auto = self.config.update_interval == "auto"
        max_age = max(interval, self.config.max_update_interval) if auto else interval
        return [
            segment
            for table in self.tables
            for segment, phase in zip(table.segments, table.phases(interval), strict=True)
            if segment.synchronous_until >= step
            or schedule.is_due(step, phase, interval, segment.oldest or step, max_age)
        ]

    @staged("zenflow.begin_sweeps")
    def sweep_due(self, step: int, interval: int, *, overlap: bool) -> None:
        """Start the sweep of every segment that is due at ``step``."""
        delay = schedule.lookahead_steps(interval, overlap) if self.config.lookahead else 0.0
        due = [segment for segment in self.due(step, interval) if segment.waiting]
        for segment in due:
            self.start_sweep(segment, 0.0 if segment.synchronous_until >= step else delay)
        self.submit_begun()
        self._publish([segment for segment in due if segment.synchronous_until >= step])

    def start_sweep(self, segment: Segment, delay: float) -> None:
        """Start the sweep of all waiting slots; without any, only write the weights again.

        :meth:`submit_begun` has to follow, at the latest when it is waited for.
        """
        accumulate = self.config.update_rule == "accumulate"
        slots, segment.waiting = segment.waiting, []
        if slots:
            last = slots[-1].substep
            segment.host_steps = segment.host_steps + 1 if accumulate else last.step
            segment.last = last._replace(step=segment.host_steps) if accumulate else last
        assert segment.last is not None
        link, device = self.platform.link, self.platform.device
        dtype = segment.weight.dtype
        job = SweepJob(
            key=segment.key,
            storage=self.platform.storage,
            kernel=self.platform.kernel,
            link=link,
            clock=self.platform.clock,
            slots=slots,
            last=segment.last,
            mean=accumulate,
            delay=delay,
            out=self.pool.acquire(segment.host_shape, dtype),
            staging=None if link.shared else device.empty(segment.host_shape, dtype),
            after=FINISHED if link.shared else device.mark(),
            refresh=segment.refresh(self.platform) if slots else None,
        )
        segment.extrapolated = delay != 0
        segment.sweep = Sweep(job)
        self._begun.append(segment.sweep)

    def submit_begun(self) -> None:
        """Give the sweeps that were started to the workers, small ones together.

        Not each as soon as it is made: a worker that has begun disputes the interpreter's lock.
        """
        begun, self._begun = self._begun, []
        together: list[Sweep] = []
        numel = 0
        for sweep in begun:
            together.append(sweep)
            numel += sweep.job.out.numel()
            if numel >= _NUMEL_TOGETHER or sweep is begun[-1]:
                tasks = self.platform.workers.submit([each.job for each in together])
                for each, task in zip(together, tasks, strict=True):
                    each.task = task
                together, numel = [], 0

    @staged("zenflow.publish")
    def publish_in_flight(self) -> None:
        """Publish every sweep in flight, waiting for those that are late."""
        self._publish([segment for segment in self.segments if segment.sweep is not None])

    def drain(self) -> None:
        """Apply and publish every slot, and publish exactly what was extrapolated."""
        self.publish_in_flight()
        depth = _DRAIN_DEPTH_PER_THREAD * self.platform.workers.num_threads
        in_flight: deque[Segment] = deque()
        for segment in self.segments:
            if segment.waiting or segment.extrapolated:
                self.start_sweep(segment, 0.0)
                in_flight.append(segment)
            if len(in_flight) >= depth:
                self._publish([in_flight.popleft()])
        self._publish(in_flight)

    def apply_unpublished(self, weight: Weight) -> None:
        """Apply every slot of a weight whose visible values are not to be overwritten."""
        for segment in weight.segments:
            if segment.sweep is not None:
                self._finish(segment, segment.sweep)
        for segment in weight.segments:
            if segment.waiting:
                self.start_sweep(segment, 0.0)
        for segment in weight.segments:
            if segment.sweep is not None:
                self._finish(segment, segment.sweep)

    def settle(self) -> None:
        """Wait until no worker touches host state; publishes nothing."""
        for segment in self.segments:
            if segment.sweep is not None:
                self._await(segment, segment.sweep)

    def staleness(self, step: int) -> int:
        """Most steps that a visible weight lags behind AdamW after ``step``."""
        return _staleness(self.segments, step)

    def staleness_of(self, weight: Weight, step: int) -> int:
        """The same of one weight."""
        return _staleness(weight.segments, step)

    def fail(self, error: BaseException) -> None:
        """State is half changed: every later step raises."""
        if self._failure is None:
            self._failure = error

    @property
    def has_failed(self) -> bool:
        """Whether every later step raises."""
        return self._failure is not None

    def raise_if_failed(self) -> None:
        """Raise what went wrong earlier, or a worker's death now."""
        if self._failure is None:
            try:
                self.platform.workers.check()
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise HostWorkError(
                f"an earlier step failed and deferred updates are lost ({self._failure!r}); "
                "restart from the last checkpoint"
            ) from self._failure

    def _publish(self, segments: Iterable[Segment]) -> None:
        """Publish sweeps in order. Those that have ended are published while later ones still run."""
        ready: list[tuple[Segment, Sweep, Tensor]] = []
        for segment in segments:
            sweep = segment.sweep
            assert sweep is not None
            if ready and not sweep.job.finished_s:
                self._write(ready)
                ready = []
            ready.append((segment, sweep, self._await(segment, sweep)))
        if ready:
            self._write(ready)

    def _write(self, ready: Sequence[tuple[Segment, Sweep, Tensor]]) -> None:
        """Write new weights into the device's and take back what the sweeps held."""
        if self.platform.link.shared:
            shares = [Share(_side(segment), weights) for segment, _, weights in ready]
            self.platform.device.run(self.platform.device_kernel.publish, shares)
        for segment, sweep, weights in ready:
            if not self.platform.link.shared:
                segment.publish(self.platform, weights)
            self.meter.h2d_bytes += segment.deferred_numel * segment.weight.element_size()
            self._take_back(segment, sweep)

    def _finish(self, segment: Segment, sweep: Sweep) -> None:
        """Let a sweep end without publishing it."""
        self._await(segment, sweep)
        self._take_back(segment, sweep)

    def _take_back(self, segment: Segment, sweep: Sweep) -> None:
        """Take back what a sweep that has ended held."""
        segment.sweep = None
        self.pool.release(sweep.job.out)
        for slot in sweep.slots:
            if slot.buffer is not None:
                self.pool.release(slot.buffer)
        self.meter.host_busy_s += sweep.job.busy_s
        self.meter.host_finished_s = max(self.meter.host_finished_s, sweep.job.finished_s)

    def _await(self, segment: Segment, sweep: Sweep) -> Tensor:
        self.submit_begun()
        try:
            with self.meter.stall():
                return sweep.await_weights()
        except Exception as error:
            self._failure = error
            self._raise_failure(segment)

    def _raise_failure(self, segment: Segment) -> NoReturn:
        raise HostWorkError(
            f"the sweep of rows {segment.start} to {segment.stop} of a weight of shape "
            f"{tuple(segment.weight.shape)} failed: {self._failure!r}; "
            "deferred updates are lost, restart from the last checkpoint"
        ) from self._failure


def _hosted(weight: Weight, num_rows: int) -> tuple[int, torch.dtype] | None:
    """Elements on the host and dtype of a segment across a link; None if it is not trained."""
    if not weight.param.requires_grad:
        return None
    _, num_channels, *kernel = weight.view.shape
    num_deferred = num_channels - weight.num_selected
    return num_rows * num_deferred * math.prod(kernel), weight.param.dtype


def _staleness(segments: Iterable[Segment], step: int) -> int:
    oldest = [s.oldest for s in segments if s.oldest is not None]
    return step - min(oldest) + 1 if oldest else 0


def _side(segment: Segment) -> DeviceSide:
    assert segment.side is not None
    return segment.side
