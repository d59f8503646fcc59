"""State out of a running engine and back into a new one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.ticket import FINISHED, Transfer
from zenflow.config import ZenFlowConfig
from zenflow.core.channels import is_split
from zenflow.core.rules import SubStep
from zenflow.core.selection import num_selected
from zenflow.runtime import device_ops
from zenflow.runtime.controller import AutoInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.resident import NOT_SEEN, Resident
from zenflow.runtime.segment import Segment, download, upload
from zenflow.runtime.selection import Selection
from zenflow.runtime.slots import Slot
from zenflow.runtime.stats import StepStats
from zenflow.runtime.weight import Weight

FORMAT_VERSION = 1


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

    def entry(self, numbers: Mapping[Tensor, int]) -> dict[str, Any]:
        """The ``"zenflow"`` entry, parameters named by their number as in ``"state"``."""
        weights = {numbers[param]: extra for param, extra in self.weights.items()}
        return {"version": FORMAT_VERSION, **self.engine, "weights": weights}


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
                "segments": [_export_segment(s) for s in weight.segments],
            }
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
        "step": torch.tensor(float(steps)),
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
    pending = [(scored, transfer) for scored, transfer in selection.pending if scored <= step]
    return {
        "chosen": selection.chosen.clone(),
        "version": selection.version,
        "interval": selection.interval,
        "due": selection.due if len(pending) == len(selection.pending) else step + 1,
        "pending": [[scored, transfer.wait().clone()] for scored, transfer in pending],
    }


def _export_segment(segment: Segment) -> dict[str, Any]:
    channels = segment.channels
    assert channels is not None
    places = channels.deferred_places()
    return {
        "rows": [segment.start, segment.stop],
        "selected": channels.selected.clone(),
        "adopted": segment.adopted,
        "host_steps": segment.host_steps,
        "last": None if segment.last is None else list(segment.last),
        "extrapolated": segment.extrapolated,
        "synchronous_until": segment.synchronous_until,
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked state, to be put into an engine before its next step.

    Attributes:
        states: each parameter's AdamW state.
        weights: what ZenFlow saved for each split parameter; empty for a state of plain AdamW.
        step: applied steps so far; None for a state of plain AdamW.
    """

    states: dict[Tensor, dict[str, Any]]
    weights: dict[Tensor, dict[str, Any]]
    step: int | None
    trace: list[tuple[int, int]]

    @property
    def is_empty(self) -> bool:
        """Of an optimizer that has not stepped: what Accelerate, for one, saves and loads at once."""
        return not self.states and not self.step


def parse(state_dict: Mapping[str, Any], params: Sequence[Tensor], config: ZenFlowConfig) -> Loaded:
    """Check a state dict against the parameters and the config.

    Raises:
        ValueError: naming what does not fit.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(saved) != len(params):
        raise ValueError(
            f"the saved optimizer has {len(saved)} parameters and this one {len(params)}; "
            "build it over the same model and groups"
        )
    by_number = dict(zip(saved, params, strict=True))
    states = {by_number[number]: state for number, state in state_dict["state"].items()}
    for number, state in state_dict["state"].items():
        _check_shapes(number, state, by_number[number])
    entry = state_dict.get("zenflow")
    if entry is None:
        return Loaded({p: _of_plain_adamw(state) for p, state in states.items()}, {}, None, [])
    if entry["version"] != FORMAT_VERSION:
        raise ValueError(
            f"the saved zenflow state has format version {entry['version']!r}; "
            f"this release reads version {FORMAT_VERSION}"
        )
    weights = {by_number[number]: extra for number, extra in entry["weights"].items()}
    kept = {p: extra for p, extra in weights.items() if _fits(p, extra, config)}
    trace = [(first, interval) for first, interval in entry["trace"]]
    return Loaded(states, kept, entry["step"], trace)


def _of_plain_adamw(state: Mapping[str, Any]) -> dict[str, Any]:
    """What plain AdamW keeps current. A "master" that it carried along from us is stale: it trained
    the weights themselves."""
    return {name: value for name, value in state.items() if name != "master"}


def _check_shapes(number: int, state: Mapping[str, Any], param: Tensor) -> None:
    for name in ("exp_avg", "exp_avg_sq", "master"):
        shape = state[name].shape if name in state else param.shape
        if shape != param.shape:
            raise ValueError(
                f"{name} of saved parameter {number} has shape {tuple(shape)}, "
                f"the parameter {tuple(param.shape)}; load it into the model it was saved from"
            )


def _fits(param: Tensor, extra: Mapping[str, Any], config: ZenFlowConfig) -> bool:
    """Whether a weight's saved selection holds under this config; refuse what would lose
    gradients."""
    segments = extra["segments"]
    saved = segments[0]["selected"].numel()
    now = num_selected(param.shape[1], config.topk_ratio)
    if saved == now and is_split(param, config.topk_ratio):
        return True
    if any(s["slots"] or s["unpublished_delay"] is not None for s in segments):
        raise ValueError(
            f"the saved state selects {saved} channels of a weight of shape {tuple(param.shape)}, "
            f"topk_ratio={config.topk_ratio} selects {now}, and gradients are still waiting; "
            "load it with the saved topk_ratio, or call synchronize() before saving"
        )
    return False


def restore(engine: Engine, loaded: Loaded) -> None:
    """Put a loaded state into an engine that has not stepped yet."""
    if loaded.step is not None:
        engine.step_index = loaded.step
    if isinstance(engine.controller, AutoInterval):
        engine.controller.resume(loaded.trace)
    for param, state in loaded.states.items():
        if "exp_avg" not in state:
            continue
        if param in engine.residents:
            _restore_resident(engine, engine.residents[param], state)
        elif param in loaded.weights:
            _restore_weight(engine, engine.weights[param], state, loaded.weights[param])
        else:
            engine.weights[param].inherited = {k: torch.clone(v) for k, v in state.items()}
    engine.stats = StepStats(step=engine.step_index)


def _restore_resident(engine: Engine, resident: Resident, state: Mapping[str, Any]) -> None:
    resident.begin(engine.platform)
    assert resident.state is not None
    engine.count_trained(resident.param, resident.num_selected)
    resident.steps = int(state["step"])
    resident.restored = True
    resident.seen = NOT_SEEN
    targets = [resident.state.exp_avg, resident.state.exp_avg_sq]
    sources = [state["exp_avg"], state["exp_avg_sq"]]
    if "master" in state and resident.has_master:
        targets.append(resident.state.master)
        sources.append(state["master"])
    for target, source in zip(targets, sources, strict=True):
        arrived = upload(engine.platform, source.to("cpu", torch.float32))
        engine.platform.device.run(device_ops.copy, target, arrived)


def _restore_weight(
    engine: Engine, weight: Weight, state: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    platform = engine.platform
    weight.restored_checksum = extra["checksum"]
    weight.selection = _restore_selection(extra["selection"], engine.config)
    weight.substep = SubStep(*extra["substep"])
    saved_rows = [tuple(s["rows"]) for s in extra["segments"]]
    if saved_rows != [(s.start, s.stop) for s in weight.segments]:
        raise ValueError(
            f"a weight of shape {tuple(weight.param.shape)} was saved in row blocks {saved_rows} "
            "and is cut differently now; build the optimizer over the same parameters and groups"
        )
    for segment, saved in zip(weight.segments, extra["segments"], strict=True):
        segment.begin(platform, saved["selected"].clone())
        segment.adopted = saved["adopted"]
        segment.host_steps = saved["host_steps"]
        segment.last = None if saved["last"] is None else SubStep(*saved["last"])
        segment.extrapolated = saved["extrapolated"]
        segment.synchronous_until = saved["synchronous_until"]
    weight.inherit(platform, state)
    engine.count_trained(weight.param, weight.num_selected)
    for segment, saved in zip(weight.segments, extra["segments"], strict=True):
        if saved["unpublished_delay"] is not None:
            engine.pipeline.start_sweep(segment, saved["unpublished_delay"])
        for slot in saved["slots"]:
            engine.pipeline.put_slot(segment, slot["step"], SubStep(*slot["substep"]), slot["grad"])


def _restore_selection(saved: Mapping[str, Any] | None, config: ZenFlowConfig) -> Selection | None:
    if saved is None:
        return None
    auto = config.select_interval == "auto"
    return Selection(
        chosen=saved["chosen"].clone(),
        interval=saved["interval"] if auto else int(config.select_interval),
        auto=auto,
        due=saved["due"],
        version=saved["version"],
        pending=[(step, Transfer(t, t, FINISHED)) for step, t in saved["pending"]],
    )
