"""The engine: carries out one step in the order that docs/design.md states."""

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.auto import Sample
from zenflow.core.channels import channel_view, is_split
from zenflow.core.rules import SubStep
from zenflow.core.selection import num_selected
from zenflow.runtime import device_ops
from zenflow.runtime.controller import Controller, make_controller
from zenflow.runtime.device_ops import DeviceUpdate
from zenflow.runtime.edits import Edits
from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.platform import Platform
from zenflow.runtime.resident import Resident
from zenflow.runtime.stages import staged
from zenflow.runtime.stats import Meter, StepStats
from zenflow.runtime.weight import Weight
from zenflow.runtime.workers import in_worker

_log = logging.getLogger("zenflow")

_NOTICEABLE_STALL = 0.02
"""Share of the time beside compute under which a stall is the cost of looking, not of waiting."""


class Gradient(NamedTuple):
    """One parameter's gradient, owned by the runtime.

    Attributes:
        name: for messages.
    """

    param: Tensor
    grad: Tensor
    name: str


class Engine:
    """Owns everything below the optimizer.

    Args:
        platform: what it runs on; the engine closes it.
        config: the user's choices.
    """

    def __init__(self, platform: Platform, config: ZenFlowConfig) -> None:
        self.platform = platform
        self.config = config
        self.controller: Controller = make_controller(config)
        self.meter = Meter(platform.clock)
        self.pipeline = HostPipeline(platform, config, self.meter)
        self.residents: dict[Tensor, Resident] = {}
        self.weights: dict[Tensor, Weight] = {}
        self.edits = Edits(platform, self.pipeline, self.residents, self.weights)
        self.stats = StepStats()
        self.step_index = 0
        self._absorbed: dict[Tensor, tuple[str, Tensor | None]] = {}
        self._model_bytes = 0
        self._selected_channels = 0
        self._sweeps_begun_s: float | None = None
        self._closed = False
        self._pid = os.getpid()

    def add_parameters(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """Register parameters, once each. State is created with a parameter's first gradient."""
        weights = []
        for param, name in zip(params, names, strict=True):
            if is_split(param, self.config.topk_ratio):
                view = channel_view(param.detach())
                k = num_selected(view.shape[1], self.config.topk_ratio)
                weight = self.weights[param] = Weight(param, name, view, len(self.weights), k)
                weights.append(weight)
            else:
                self.residents[param] = Resident(param, name)
        if weights:
            self.pipeline.add(weights)

    def step(self, gradients: list[Gradient], hypers: Mapping[Tensor, SubStep]) -> None:
        """Apply one step's gradients; see docs/design.md, "Exact semantics".

        Args:
            gradients: those that were not absorbed since the last step; taken out of the list one by one.
            hypers: for each parameter its group's present hyperparameters, as a sub-step whose
                count is not set yet; its scale is what others have scaled the gradient by.

        Raises:
            HostWorkError: if a sweep failed or a worker died, now or earlier.
        """
        self._check_process()
        self.pipeline.raise_if_failed()
        self._wait_for_compute()
        self.meter.begin_step()
        if not gradients and not self._absorbed:
            self.stats = self.stats.of_no_work()
            return
        norms, changed = self._observe(gradients)
        if self._skips(gradients, norms):
            return
        self.edits.take(self.step_index, suspicious=changed)
        try:
            self._apply(gradients, hypers, self._clip_scale(norms))
        except BaseException as error:
            self.pipeline.fail(error)
            raise

    @staged("zenflow.wait")
    def _wait_for_compute(self) -> None:
        self.platform.device.mark().wait()

    @staged("zenflow.apply")
    def _apply(
        self, gradients: list[Gradient], hypers: Mapping[Tensor, SubStep], scale: float
    ) -> None:
        self.step_index += 1
        self.pipeline.release_copied()
        warm_up = self.step_index <= self.config.full_warm_up_rounds
        overlap = self.config.overlap_step and not warm_up
        self.pipeline.publish_in_flight()
        self._measure_window()
        interval = 1 if warm_up else self.controller.interval(self.step_index)
        self._adopt_selections()
        self._most_urgent_first(gradients, interval)
        self._capture(gradients)
        self._commit(hypers, scale)
        if overlap:
            self._sweeps_begun_s = self.platform.clock()
        self.pipeline.sweep_due(self.step_index, interval, overlap=overlap)
        if not overlap:
            self.pipeline.publish_in_flight()
        self.edits.mark_seen()
        self._set_stats(interval)

    @staged("zenflow.capture")
    def _capture(self, gradients: list[Gradient]) -> None:
        """Take each gradient and drop it, so that what is gathered of the next finds its memory free."""
        gradients.reverse()
        while gradients:
            self.absorb(gradients.pop(), self.step_index)

    def _most_urgent_first(self, gradients: list[Gradient], interval: int) -> None:
        """What is swept at the end of this step crosses the link, if there is one, first."""
        if self.platform.link.shared:
            return
        due = set(self.pipeline.due(self.step_index, interval))
        urgent = {p for p, weight in self.weights.items() if not due.isdisjoint(weight.segments)}
        gradients.sort(key=lambda gradient: gradient.param not in urgent)

    def absorb(self, gradient: Gradient, step: int, norm: Tensor | None = None) -> None:
        """Take a gradient: its deferred part into slots, its selected part aside until the step.

        In :meth:`step`, or while the backward pass still runs (streaming capture).

        Args:
            step: the applied step that it belongs to.
            norm: of the gradient, on the device; streaming capture brings it along.
        """
        resident = self.residents.get(gradient.param)
        if resident is not None:
            if resident.state is None:
                resident.begin(self.platform)
            resident.grad = gradient.grad
        else:
            weight = self.weights[gradient.param]
            grad = channel_view(gradient.grad)
            self._select(weight, grad, step)
            self.pipeline.capture(weight, grad)
        self._absorbed[gradient.param] = (gradient.name, norm)

    @property
    def absorbed(self) -> Collection[Tensor]:
        """Parameters whose gradient was taken since the last step."""
        return self._absorbed.keys()

    def forget(self, param: Tensor) -> None:
        """Drop an absorbed gradient, as if the parameter had none."""
        self._absorbed.pop(param)
        resident = self.residents.get(param)
        if resident is not None:
            resident.grad = None
        else:
            weight = self.weights[param]
            self.pipeline.forget_captured(weight)
            weight.forget(self.step_index + 1)

    @staged("zenflow.synchronize")
    def synchronize(self) -> None:
        """Apply and publish every gradient so far; device weights then are their masters,
        rounded."""
        self._check_process()
        self.pipeline.raise_if_failed()
        self.take_edits()
        self.pipeline.drain()
        self.edits.mark_seen()
        self.meter.reset()
        self._sweeps_begun_s = None
        self.stats = self.stats.replaced(staleness_steps=0)

    def take_edits(self, *, restored: bool = True) -> None:
        """Between steps: see :meth:`Edits.take`."""
        self.edits.take(self.step_index, suspicious=self._observe([])[1], restored=restored)

    def close(self, *, drain: bool = True) -> None:
        """End the workers, after draining if that is asked for and possible. Idempotent.

        A worker in which the garbage collector finds the optimizer cannot wait for its own job, so
        there it happens in a thread of its own, soon.
        """
        if self._closed:
            return
        if in_worker():
            close = threading.Thread(target=self.close, kwargs={"drain": drain}, daemon=True)
            close.start()
            return
        self._closed = True
        if os.getpid() != self._pid:  # a fork: threads and pending work are the parent's
            return
        try:
            if drain:
                self.synchronize()
        except Exception:
            _log.warning("closed without the pending deferred updates", exc_info=True)
        finally:
            self.platform.workers.close()
            self.platform.release()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this optimizer belongs to process {self._pid}, and its workers did not follow into "
                f"the forked process {os.getpid()}; create a new optimizer there"
            )

    @staged("zenflow.check")
    def _observe(self, gradients: Sequence[Gradient]) -> tuple[Tensor, bool]:
        """Look at the device once: every gradient's norm, and whether others have written weights.

        Returns:
            The norms, those absorbed earlier first; and whether weights have changed unseen by version.
        """
        absorbed = [norm for _, norm in self._absorbed.values() if norm is not None]
        num_norms = len(absorbed) + len(gradients)
        out = self.platform.device.empty((num_norms + 2,), torch.float32)
        self.platform.device.run(
            device_ops.observe,
            absorbed,
            [gradient.grad for gradient in gradients],
            self.config.max_grad_norm is not None,
            self.edits.watches(),
            self.edits.rounded(),
            out,
        )
        seen = self.platform.device.read(out)
        return seen[:num_norms], bool(seen[num_norms:].any())

    def _skips(self, gradients: Sequence[Gradient], norms: Tensor) -> bool:
        bad = self._nonfinite(gradients, norms)
        if not bad:
            return False
        _log.warning(
            "step skipped, nothing was changed: the gradient is not finite of %s", ", ".join(bad)
        )
        for param in list(self._absorbed):
            self.forget(param)
        self.stats = self.stats.of_no_work(skipped=True)
        return True

    def _nonfinite(self, gradients: Sequence[Gradient], norms: Tensor) -> list[str]:
        device = self.platform.device
        suspects = (~torch.isfinite(norms)).nonzero().flatten().tolist()
        absorbed = [name for name, _ in self._absorbed.values()]
        names = []
        for i in suspects:
            if i < len(absorbed):
                names.append(absorbed[i])
                continue
            gradient = gradients[i - len(absorbed)]
            count = device.empty((), torch.int64)
            device.run(device_ops.count_nonfinite, gradient.grad, count)
            if device.read(count).item():
                names.append(gradient.name)
        return names

    def _clip_scale(self, norms: Tensor) -> float:
        """The factor that bounds the global norm, as ``torch.nn.utils.clip_grad_norm_`` has it."""
        bound = self.config.max_grad_norm
        if bound is None:
            return 1.0
        total = float(torch.linalg.vector_norm(norms.double()).item())
        return min(1.0, bound / (total + 1e-6))

    def _measure_window(self) -> None:
        """Tell the controller how the previous step's sweeps fitted beside compute."""
        if self._sweeps_begun_s is None or not self.meter.host_finished_s:
            return
        window_s = self.meter.begin_s - self._sweeps_begun_s
        host_s = self.meter.host_finished_s - self._sweeps_begun_s
        stall_s = self.meter.stall_in_step_s
        # The link was late, or the worker is slow to wake.
        if stall_s > _NOTICEABLE_STALL * window_s:
            host_s = max(host_s, window_s + stall_s)
        self.controller.observe(Sample(window_s, host_s))

    @staged("zenflow.adopt")
    def _adopt_selections(self) -> None:
        for weight in self.weights.values():
            selection = weight.selection
            if selection is None:
                continue
            with self.meter.stall():
                selection.arrive(self.step_index)
            for segment in weight.segments:
                if segment.adopted == selection.version or segment.oldest is not None:
                    continue
                assert weight.substep is not None
                with nullcontext() if self.platform.link.shared else self.meter.stall():
                    moved = segment.adopt(self.platform, selection.chosen, weight.substep)
                segment.adopted = selection.version
                if segment.start == 0:
                    self.meter.reselected_channels += moved

    @staged("zenflow.update")
    def _commit(self, hypers: Mapping[Tensor, SubStep], scale: float) -> None:
        """Make the absorbed gradients this step's: update on the device, let the slots wait."""
        updates: list[DeviceUpdate] = []
        for param in self._absorbed:
            hyper = hypers[param]._replace(scale=hypers[param].scale * scale)
            owner = self.residents.get(param) or self.weights[param]
            updates.extend(owner.updates(hyper, self.step_index))
            if owner.steps == 1:
                self.count_trained(param, owner.num_selected)
        self._absorbed.clear()
        if updates:
            self.platform.device.run(device_ops.update, updates)

    def _select(self, weight: Weight, grad: Tensor, step: int) -> None:
        if not weight.begun:
            weight.begin(self.platform, grad, self.config.select_interval, step)
        elif weight.selection is not None and step >= weight.selection.due:
            weight.selection.score(self.platform, grad, step)

    def count_trained(self, param: Tensor, num_selected: int) -> None:
        """Count a parameter that has begun to train, in the figures."""
        self._model_bytes += param.numel() * param.element_size()
        self._selected_channels += num_selected

    def _set_stats(self, interval: int) -> None:
        meter = self.meter
        elapsed_s = self.platform.clock() - meter.begin_s
        self.stats = StepStats(
            step=self.step_index,
            stall_s=meter.stall_s,
            step_overhead_s=elapsed_s - meter.stall_in_step_s,
            host_busy_s=meter.host_busy_s,
            d2h_bytes=meter.d2h_bytes,
            h2d_bytes=meter.h2d_bytes,
            traffic_model_sizes=(meter.d2h_bytes + meter.h2d_bytes) / max(1, self._model_bytes),
            update_interval=interval,
            staleness_steps=self.pipeline.staleness(self.step_index),
            selected_channels=self._selected_channels,
            reselected_channels=meter.reselected_channels,
        )
        meter.reset()
