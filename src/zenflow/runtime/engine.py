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
from zenflow.core.rules import Coefficients, SubStep
from zenflow.core.selection import num_selected
from zenflow.kernels.selective import Look, Share, Update
from zenflow.runtime import device_ops
from zenflow.runtime.controller import Controller, make_controller
from zenflow.runtime.edits import Edits
from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.platform import Platform
from zenflow.runtime.previews import Previews
from zenflow.runtime.resident import Resident
from zenflow.runtime.selection_writer import SelectionWriter
from zenflow.runtime.stages import staged
from zenflow.runtime.stats import Meter, StepStats
from zenflow.runtime.weight import Weight
from zenflow.runtime.workers import in_worker

_log = logging.getLogger("zenflow")

_NAMED = 8
"""Parameters that a message names; there may be hundreds."""
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


class _Given(NamedTuple):
    """A gradient of this step and whose it is."""

    owner: Resident | Weight
    gradient: Gradient


class _Absorbed(NamedTuple):
    """A gradient that was taken and whose step is not applied yet.

    Attributes:
        norm: of a streamed one, on the device.
    """

    owner: Resident | Weight
    name: str
    norm: Tensor | None


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
        self.previews = Previews(platform, config)
        self.writer = SelectionWriter(config)
        self.stats = StepStats()
        self.step_index = 0
        self._absorbed: dict[Tensor, _Absorbed] = {}
        self._owners: dict[Tensor, Resident | Weight] = {}
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
        self._owners = {**self.residents, **self.weights}
        if weights:
            self.pipeline.add(weights)

    def step(self, gradients: list[Gradient], hypers: Mapping[Tensor, SubStep]) -> None:
        """Apply one step's gradients; see docs/design.md, "Exact semantics".

        Args:
            gradients: those that were not absorbed since the last step. The list is emptied, so that
                each can go early.
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
        given = [_Given(self._owners[gradient.param], gradient) for gradient in gradients]
        gradients.clear()
        norms, changed = self._observe(given)
        if self._skips(given, norms, hypers):
            return
        self.edits.take(self.step_index, suspicious=changed)
        try:
            self._apply(given, hypers, self._clip_scale(norms))
        except BaseException as error:
            self.pipeline.fail(error)
            raise

    @staged("zenflow.wait")
    def _wait_for_compute(self) -> None:
        self.platform.device.mark().wait()

    @staged("zenflow.apply")
    def _apply(self, given: list[_Given], hypers: Mapping[Tensor, SubStep], scale: float) -> None:
        self.step_index += 1
        self.pipeline.release_copied()
        warm_up = self.step_index <= self.config.full_warm_up_rounds
        overlap = self.config.overlap_step and not warm_up
        self.pipeline.publish_in_flight()
        self._measure_window()
        interval = 1 if warm_up else self.controller.interval(self.step_index)
        self._adopt_selections()
        self._most_urgent_first(given, interval)
        self.previews.begin(hypers, scale, waits=overlap or interval > 1)
        self._capture(given)
        self._commit(hypers, scale)
        if overlap:
            self._sweeps_begun_s = self.platform.clock()
        self.pipeline.sweep_due(self.step_index, interval, overlap=overlap)
        if not overlap:
            self.pipeline.publish_in_flight()
        self.edits.mark_seen()
        self.writer.stepped(self.step_index, interval)
        self._set_stats(interval)

    @staged("zenflow.capture")
    def _capture(self, given: list[_Given]) -> None:
        """Take each gradient and drop it, so that what is gathered of the next finds its memory free."""
        given.reverse()
        while given:
            owner, gradient = given.pop()
            self._absorb(owner, gradient, self.step_index, None)
            if isinstance(owner, Weight):
                self.previews.add(owner, gradient.grad)
        self.pipeline.gather()
        self.previews.show()

    def _most_urgent_first(self, given: list[_Given], interval: int) -> None:
        """What is swept at the end of this step crosses the link, if there is one, first."""
        if self.platform.link.shared:
            return
        due = set(self.pipeline.due(self.step_index, interval))
        urgent = {p for p, weight in self.weights.items() if not due.isdisjoint(weight.segments)}
        given.sort(key=lambda each: each.gradient.param not in urgent)

    def absorb(self, gradient: Gradient, step: int, norm: Tensor | None = None) -> None:
        """Take a gradient while the backward pass still runs (streaming capture): its deferred part
        into slots, its selected part aside until the step.

        Args:
            step: the applied step that it belongs to.
            norm: of the gradient, on the device.
        """
        self._absorb(self._owners[gradient.param], gradient, step, norm)
        self.pipeline.gather()

    def _absorb(
        self, owner: Resident | Weight, gradient: Gradient, step: int, norm: Tensor | None
    ) -> None:
        param, grad, name = gradient
        if isinstance(owner, Resident):
            if owner.side is None:
                owner.begin(self.platform)
            owner.grad = grad
        else:
            grad = channel_view(grad)
            self._select(owner, grad, step)
            self.pipeline.capture(owner, grad)
        self._absorbed[param] = _Absorbed(owner, name, norm)

    @property
    def absorbed(self) -> Collection[Tensor]:
        """Parameters whose gradient was taken since the last step."""
        return self._absorbed.keys()

    def forget(self, param: Tensor) -> None:
        """Drop an absorbed gradient, as if the parameter had none."""
        owner = self._absorbed.pop(param).owner
        if isinstance(owner, Resident):
            owner.grad = None
        else:
            self.pipeline.forget_captured(owner)
            owner.forget(self.step_index + 1)
            self.writer.forget(owner.name)

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

    @property
    def is_usable(self) -> bool:
        """Whether it is open, in its own process, and nothing has failed."""
        return not self._closed and os.getpid() == self._pid and not self.pipeline.has_failed

    @property
    def pending_steps(self) -> int:
        """Most steps that visible weights lag behind AdamW; at least 1 if they are extrapolated."""
        extrapolated = any(segment.extrapolated for segment in self.pipeline.segments)
        return max(self.pipeline.staleness(self.step_index), int(extrapolated))

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
            self.writer.close()
            self.platform.workers.close()
            self.platform.release()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this optimizer belongs to process {self._pid}, and its workers did not follow into "
                f"the forked process {os.getpid()}; create a new optimizer there"
            )

    @staged("zenflow.check")
    def _observe(self, given: Sequence[_Given]) -> tuple[Tensor, bool]:
        """Look at the device once: every gradient's norm, and whether others have written weights.
        Selected channels are gathered on the way.

        Returns:
            The norms, those absorbed earlier first; and whether weights have changed unseen by version.
        """
        norms = [a.norm for a in self._absorbed.values() if a.norm is not None]
        exact = self.config.max_grad_norm is not None
        grads = [gradient.grad for _, gradient in given]
        look = Look(norms, grads, exact, self._shares(given), *self.edits.look())
        num_norms = len(norms) + len(grads)
        out = self.platform.device.empty((num_norms + 2,), torch.float32)
        self.platform.device.run(self.platform.device_kernel.observe, look, out)
        seen = self.platform.device.read(out)
        return seen[:num_norms], bool(seen[num_norms:].any())

    def _shares(self, given: Sequence[_Given]) -> list[Share]:
        """What can be gathered before the step is known to be applied."""
        shares: list[Share] = []
        for number, (weight, gradient) in enumerate(given):
            if isinstance(weight, Resident) or weight.selection is None:
                continue
            view = channel_view(gradient.grad)
            for segment in weight.segments:
                share = segment.share(self.platform, segment.rows_of(view), number)
                if share is not None:
                    shares.append(share)
        return shares

    def _skips(
        self, given: Sequence[_Given], norms: Tensor, hypers: Mapping[Tensor, SubStep]
    ) -> bool:
        bad = self._nonfinite(given, norms, hypers)
        if not bad:
            return False
        _log.warning(
            "step skipped, nothing was changed: the gradient is not finite of %s%s",
            ", ".join(bad[:_NAMED]),
            f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "",
        )
        for param in list(self._absorbed):
            self.forget(param)
        for owner, _ in given:
            if isinstance(owner, Weight):
                self.pipeline.forget_captured(owner)
        self.stats = self.stats.of_no_work(skipped=True)
        return True

    def _nonfinite(
        self, given: Sequence[_Given], norms: Tensor, hypers: Mapping[Tensor, SubStep]
    ) -> list[str]:
        """The parameters whose gradient is not finite. (A norm may also overflow by itself.)"""
        suspects = (~torch.isfinite(norms)).nonzero().flatten().tolist()
        absorbed = list(self._absorbed.items())
        names = []
        for i in suspects:
            if i < len(absorbed):
                param, taken = absorbed[i]
                name, parts, scale = taken.name, self._parts(taken.owner), hypers[param].scale
            else:
                gradient = given[i - len(absorbed)].gradient
                name, parts, scale = gradient.name, [gradient.grad], 1.0
            if not self._are_finite(parts, scale):
                names.append(name)
        return names

    def _parts(self, owner: Resident | Weight) -> list[Tensor]:
        """On the device, the parts that an absorbed gradient was taken apart into."""
        if isinstance(owner, Weight):
            return self.pipeline.captured_parts(owner)
        assert owner.grad is not None
        return [owner.grad]

    def _are_finite(self, parts: Sequence[Tensor], scale: float) -> bool:
        device = self.platform.device
        for part in parts:
            count = device.empty((), torch.int64)
            device.run(device_ops.count_nonfinite, part, scale, count)
            if device.read(count).item():
                return False
        return True

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
            if selection is None or (weight.adopted == selection.version and not selection.pending):
                continue
            with self.meter.stall():
                scored = selection.arrive(self.step_index)
                energies = scored and scored.energies and scored.energies.wait()
            if scored is not None and energies is not None:
                self.writer.scored(weight.name, scored.step, energies, selection.chosen)
            for segment in weight.segments:
                if segment.adopted == selection.version or segment.oldest is not None:
                    continue
                assert weight.substep is not None
                with nullcontext() if self.platform.link.shared else self.meter.stall():
                    moved = segment.adopt(self.platform, selection.chosen, weight.substep)
                segment.adopted = selection.version
                if segment.start == 0:
                    self.meter.reselected_channels += moved
            weight.adopted = min(segment.adopted for segment in weight.segments)

    @staged("zenflow.update")
    def _commit(self, hypers: Mapping[Tensor, SubStep], scale: float) -> None:
        """Make the absorbed gradients this step's: update on the device, let the slots wait."""
        updates: list[Update] = []
        formed: dict[tuple[int, int], tuple[SubStep, Coefficients]] = {}
        for param, (owner, _, _) in self._absorbed.items():
            hyper = hypers[param]
            kind = (id(hyper), owner.steps)  # the same for most of a group
            if kind not in formed:
                formed[kind] = _form_substep(hyper, owner.steps, scale)
            owner.commit(self.step_index, *formed[kind], updates)
            if owner.steps == 1:
                self.count_trained(param, owner.num_selected)
        self._absorbed.clear()
        if updates:
            self.platform.device.run(self.platform.device_kernel.update, updates)

    def _select(self, weight: Weight, grad: Tensor, step: int) -> None:
        if not weight.begun:
            weight.begin(self.platform, grad, self.config.select_interval, step, self.writer)
        elif weight.selection is not None and step >= weight.selection.due:
            weight.selection.score(self.platform, grad, step, logged=self.writer.is_on)

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


def _form_substep(hyper: SubStep, steps: int, scale: float) -> tuple[SubStep, Coefficients]:
    """The sub-step behind ``steps`` others."""
    substep = hyper._replace(step=steps + 1, scale=hyper.scale * scale)
    return substep, substep.coefficients()
