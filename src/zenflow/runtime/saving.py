"""State out of a running engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow.runtime.controller import AutoInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.resident import Resident
from zenflow.runtime.saved_format import FORMAT_VERSION
from zenflow.runtime.segment import Segment, download
from zenflow.runtime.selection import Selection
from zenflow.runtime.slots import Slot
from zenflow.runtime.weight import Weight


@dataclass(frozen=True, slots=True)
class Exported:
    """Everything that an engine holds.

    Attributes:
        states: each parameter's AdamW state, with its master where the weight is not its own.
        weights: what ZenFlow adds for each split parameter.
        engine: what belongs to none of them.
    """

    states: dict[Tensor, dict[str, Any]]
    weights: dict[Tensor, dict[str, Any]]
    engine: dict[str, Any]

    def entry(self, params: Sequence[Tensor], names: Mapping[Tensor, str]) -> dict[str, Any]:
        """The ``"zenflow"`` entry, parameters named by their number as in ``"state"``.

        Args:
            names: what the model calls them, where that is known.
        """
        weights = {
            i: self.weights[param] for i, param in enumerate(params) if param in self.weights
        }
        known = [names.get(param) for param in params]
        return {"version": FORMAT_VERSION, **self.engine, "names": known, "weights": weights}


def export(engine: Engine) -> Exported:
    """Copy out the state at this point of the schedule. Waits for sweeps, publishes nothing."""
    engine.take_edits(restored=False)
    engine.pipeline.settle()
    states: dict[Tensor, dict[str, Any]] = {}
    for param, resident in engine.residents.items():
        if resident.steps:
            states[param] = _export_resident(engine, resident)
    weights = {}
    for param, weight in engine.weights.items():
        if weight.steps:
            states[param] = _export_weight(engine, weight)
            weights[param] = {
                "selection": _export_selection(weight.selection, engine.step_index),
                "substep": None if weight.substep is None else list(weight.substep),
                "checksum": _checksum(engine, weight),
                "segments": [_export_segment(engine, s) for s in weight.segments],
            }
        elif weight.inherited is not None:
            states[param] = dict(weight.inherited)
    controller = engine.controller
    trace = controller.trace if isinstance(controller, AutoInterval) else []
    return Exported(states, weights, {"step": engine.step_index, "trace": [list(x) for x in trace]})


def _export_resident(engine: Engine, resident: Resident) -> dict[str, Any]:
    assert resident.state is not None
    copies = [download(engine.platform, t).clone() for t in resident.state]
    return _adamw_state(resident.steps, copies, has_master=resident.has_master)


def _export_weight(engine: Engine, weight: Weight) -> dict[str, Any]:
    parts = [segment.assemble(engine.platform) for segment in weight.segments]
    whole = [torch.cat(column).reshape(weight.param.shape) for column in zip(*parts, strict=True)]
    return _adamw_state(weight.steps, whole, has_master=True)


def _adamw_state(steps: int, tensors: Sequence[Tensor], *, has_master: bool) -> dict[str, Any]:
    master, exp_avg, exp_avg_sq = tensors
    state = {
        "step": torch.tensor(float(steps), dtype=torch.float32, device="cpu"),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    if has_master:
        state["master"] = master
    return state


def _checksum(engine: Engine, weight: Weight) -> int:
    if weight.restored_checksum is not None:
        return weight.restored_checksum
    return weight.checksum(engine.platform)


def _export_selection(selection: Selection | None, step: int) -> dict[str, Any] | None:
    """Without what a streamed gradient of the next step has already chosen."""
    if selection is None:
        return None
    pending = [scored for scored in selection.pending if scored.step <= step]
    return {
        "chosen": selection.chosen.clone(),
        "version": selection.version,
        "interval": selection.interval,
        "due": selection.due if len(pending) == len(selection.pending) else step + 1,
        "pending": [[scored.step, scored.chosen.wait().clone()] for scored in pending],
    }


def _export_segment(engine: Engine, segment: Segment) -> dict[str, Any]:
    channels, side = segment.channels, segment.side
    assert channels is not None and side is not None
    factors = None
    if segment.factors_at and side.factors is not None:
        factors = download(engine.platform, side.factors).clone()
    places = channels.deferred_places()
    return {
        "rows": [segment.start, segment.stop],
        "selected": channels.selected.clone(),
        "adopted": segment.adopted,
        "host_steps": segment.host_steps,
        "last": None if segment.last is None else list(segment.last),
        "extrapolated": segment.extrapolated,
        "synchronous_until": segment.synchronous_until,
        "factors_at": segment.factors_at,
        "factors": factors,
        "unpublished_delay": None if segment.sweep is None else segment.sweep.job.delay,
        "slots": [
            {
                "step": slot.step,
                "substep": list(slot.substep),
                "grad": _arrived(slot).index_select(1, places),
            }
            for slot in segment.waiting
        ],
    }


def _arrived(slot: Slot) -> Tensor:
    slot.ticket.wait()
    return slot.grad
