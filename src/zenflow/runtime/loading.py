"""Saved state into a new engine: checked whole when it is loaded, moved in when it is first needed."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow.backends.ticket import FINISHED, Transfer
from zenflow.config import ZenFlowConfig
from zenflow.core.channels import is_split
from zenflow.core.rules import SubStep
from zenflow.core.selection import num_selected
from zenflow.runtime import device_ops, groups
from zenflow.runtime.controller import AutoInterval
from zenflow.runtime.engine import Engine
from zenflow.runtime.memory import MappedFiles
from zenflow.runtime.platform import Platform
from zenflow.runtime.resident import NOT_SEEN, Resident
from zenflow.runtime.saved_format import check_format
from zenflow.runtime.segment import Segment, upload
from zenflow.runtime.selection import Scored, Selection
from zenflow.runtime.weight import Weight

_log = logging.getLogger("zenflow")


@dataclass(slots=True)
class Loaded:
    """A checked state on its way into an engine. It borrows the tensors that it was loaded as.

    Attributes:
        states: each parameter's AdamW state.
        weights: what ZenFlow saved for each split parameter; empty for a state of plain AdamW.
        step: applied steps so far; None for a state of plain AdamW.
        versions: of the borrowed tensors, to notice that somebody has written them since.
    """

    states: dict[Tensor, dict[str, Any]]
    weights: dict[Tensor, dict[str, Any]]
    step: int | None
    trace: list[tuple[int, int]]
    versions: list[tuple[Tensor, int]]

    @property
    def is_empty(self) -> bool:
        """Of an optimizer that has not stepped: what Accelerate, for one, saves and loads at once."""
        return not self.states and not self.step


def parse(
    state_dict: Mapping[str, Any],
    params: Sequence[Tensor],
    names: Sequence[str | None],
    config: ZenFlowConfig,
) -> Loaded:
    """Check a state dict against the parameters and the config.

    Args:
        names: what the model calls the parameters, where that is known.

    Raises:
        ValueError: naming what does not fit.
    """
    check_format(state_dict)
    for number, group in enumerate(state_dict["param_groups"]):
        groups.check_saved_group(group, number)
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(saved) != len(params):
        raise ValueError(
            f"the saved optimizer has {len(saved)} parameters and this one {len(params)}; "
            "build it over the same model and groups"
        )
    by_number = dict(zip(saved, params, strict=True))
    entry = state_dict.get("zenflow")
    if entry is not None:
        _check_names(entry.get("names", []), names)
    states = {}
    for number, state in state_dict["state"].items():
        _check_fit(number, state, by_number)
        states[by_number[number]] = dict(state)
    if entry is None:
        return Loaded(states, {}, None, [], _versions(states))
    weights = {}
    for key, extra in entry["weights"].items():
        param = by_number.get(int(key))
        if param is None or param not in states:
            raise ValueError(
                f"the saved state has a selection for parameter {key} and no state of it"
            )
        if _fits(int(key), param, extra, config):
            weights[param] = dict(extra)
    trace = [(first, interval) for first, interval in entry["trace"]]
    return Loaded(states, weights, entry["step"], trace, _versions(states, weights))


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings and sequences."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(*value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)


def _versions(*values: Any) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in _tensors(*values) if not t.is_inference()]


def _check_names(saved: Sequence[str | None], now: Sequence[str | None]) -> None:
    """Refuse a model whose parameters are called, or ordered, otherwise than the saved one's."""
    if len(saved) != len(now) or None in saved or None in now:
        return
    ours, theirs = _without_wrappers(now), _without_wrappers(saved)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            reordered = sorted(ours) == sorted(theirs)
            raise ValueError(
                f"parameter {number} was saved as {other!r} and is {mine!r} here; "
                + (
                    "pass the parameters to the optimizer in the order in which they were saved"
                    if reordered
                    else "the state is of another model, or its parameters were renamed: load it "
                    "into the model that it was saved from"
                )
            )


def _without_wrappers(names: Sequence[str | None]) -> list[str]:
    """Names without what torch.compile, DistributedDataParallel or an outer module put before them."""
    parts = [[p for p in (name or "").split(".") if p not in _WRAPPERS] for name in names]
    while all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    return [".".join(p) for p in parts]


_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _check_fit(number: Any, state: Mapping[str, Any], by_number: Mapping[int, Tensor]) -> None:
    param = by_number.get(number)
    if param is None:
        raise ValueError(
            f"the saved state is of parameter {number!r}, which none of its param_groups has"
        )
    for name in ("exp_avg", "exp_avg_sq", "master"):
        shape = state[name].shape if name in state else param.shape
        if shape != param.shape:
            raise ValueError(
                f"{name} of saved parameter {number} has shape {tuple(shape)}, "
                f"the parameter {tuple(param.shape)}; load it into the model it was saved from"
            )


def _fits(number: int, param: Tensor, extra: Mapping[str, Any], config: ZenFlowConfig) -> bool:
    """Whether a weight's saved selection holds under this config; refuse what would lose
    gradients."""
    segments = extra["segments"]
    saved = segments[0]["selected"].numel()
    shape = tuple(param.shape)
    if param.dim() >= 2:
        now = num_selected(param.shape[1], config.topk_ratio)
        if saved == now and is_split(param, config.topk_ratio):
            _check_channels(number, param, extra, now)
            return True
    if any(s["slots"] or s["unpublished_delay"] is not None for s in segments):
        raise ValueError(
            f"the saved state selects {saved} channels of a weight of shape {shape}, and "
            f"topk_ratio={config.topk_ratio} does not, while gradients are still waiting; "
            "load it with the saved topk_ratio, or call synchronize() before saving"
        )
    return False


def _check_channels(number: int, param: Tensor, extra: Mapping[str, Any], num: int) -> None:
    """Refuse channels and waiting gradients that are not a weight's of this shape."""
    rows, num_channels, *kernel = param.shape
    chosen = [] if extra["selection"] is None else [extra["selection"]["chosen"]]
    stop = 0
    for segment in extra["segments"]:
        start, stop = segment["rows"][0], segment["rows"][1]
        chosen.append(segment["selected"])
        expected = (stop - start, num_channels - num, torch.Size(kernel).numel())
        for slot in segment["slots"]:
            grad = slot["grad"]
            if (*grad.shape[:2], grad[0, 0].numel() if grad.numel() else 1) != expected:
                raise ValueError(
                    f"a waiting gradient of saved parameter {number} has shape {tuple(grad.shape)}, "
                    f"which is not its rows {start} to {stop}; the file is damaged"
                )
    for channels in chosen:
        ends = (0, *channels.aminmax(), num_channels - 1) if num else (0,)
        if channels.numel() != num or sorted(map(int, ends)) != list(map(int, ends)):
            raise ValueError(
                f"the saved selection of parameter {number} is not {num} of its {num_channels} "
                "channels; the file is damaged"
            )
    if stop != rows:
        raise ValueError(
            f"saved parameter {number} has {stop} rows in its segments and {rows} in its weight; "
            "the file is damaged"
        )


def check_engine(engine: Engine, loaded: Loaded) -> None:
    """Refuse what does not fit into this engine, which has not stepped, before anything is moved in.

    Raises:
        ValueError: naming what does not fit.
    """
    for param, extra in loaded.weights.items():
        now = [(segment.start, segment.stop) for segment in engine.weights[param].segments]
        saved = [tuple(segment["rows"]) for segment in extra["segments"]]
        if saved != now:
            raise ValueError(
                f"a weight of shape {tuple(param.shape)} was saved in row blocks {saved} and is cut "
                "differently now; build the optimizer over the same parameters and groups"
            )
    _check_order(engine, loaded)


def _check_order(engine: Engine, loaded: Loaded) -> bool:
    """Refuse weights that lie in each other's places: parameters in another order than saved.

    Returns:
        Whether none of the weights is what it was when the state was saved.
    """
    saved = {param: extra["checksum"] for param, extra in loaded.weights.items()}
    now = {param: engine.weights[param].checksum(engine.platform) for param in saved}
    moved = [param for param in saved if saved[param] != now[param]]
    left = {saved[param]: param for param in moved}
    swapped = [param for param in moved if now[param] in left]
    if len(swapped) > 1:
        here, there = swapped[0], left[now[swapped[0]]]
        raise ValueError(
            f"{engine.weights[here].name} holds the weights that the state was saved with for "
            f"{engine.weights[there].name}: pass the parameters to the optimizer in the order in "
            "which they were saved"
        )
    return bool(saved) and len(moved) == len(saved)


def restore(engine: Engine, loaded: Loaded) -> None:
    """Move a loaded state into an engine that has not stepped, parameter by parameter.

    What has been moved is let go, so that the state is never in memory twice where its loader has
    dropped it.

    Raises:
        RuntimeError: if somebody has written the loaded tensors since.
        ValueError: as in :func:`check_engine`, since the model may have been loaded in between.
    """
    changed = sum(tensor._version != version for tensor, version in loaded.versions)
    if changed:
        raise RuntimeError(
            f"{changed} tensors of the state dict were changed after load_state_dict() and before "
            "they were needed; load a copy (copy.deepcopy) of what goes on being changed"
        )
    loaded.versions.clear()
    if _check_order(engine, loaded):
        _log.warning(
            "none of the model's weights is what the optimizer's state was saved with: they are taken "
            "as they are; if that is not meant, load the model that was saved beside this state"
        )
    if loaded.step is not None:
        engine.step_index = loaded.step
    if isinstance(engine.controller, AutoInterval):
        engine.controller.resume(loaded.trace)
    files = MappedFiles()
    for param in list(loaded.states):
        state, extra = loaded.states.pop(param), loaded.weights.pop(param, None)
        if "exp_avg" in state:
            _restore_param(engine, param, state, extra, is_plain=loaded.step is None)
        for tensor in _tensors(state, extra):
            files.release(tensor)


def _restore_param(
    engine: Engine,
    param: Tensor,
    state: dict[str, Any],
    extra: Mapping[str, Any] | None,
    *,
    is_plain: bool,
) -> None:
    if is_plain and not _is_masters(param, state):
        state.pop("master", None)
    if param in engine.residents:
        _restore_resident(engine, engine.residents[param], state)
    elif extra is not None:
        _restore_weight(engine, engine.weights[param], state, extra)
    else:
        engine.weights[param].inherited = {name: _copy(value) for name, value in state.items()}


def _is_masters(param: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a weight is its master, rounded. If plain AdamW carried a master along from us, it has
    trained the weight itself since, and the master is stale."""
    if "master" not in state:
        return False
    rounded = state["master"].to("cpu", param.dtype)
    return torch.equal(rounded, param.detach().to("cpu"))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


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


def _restore_factors(platform: Platform, segment: Segment, saved: Mapping[str, Any]) -> None:
    """Of previews; a run that shows none, or whose weights are cut otherwise, has none."""
    assert segment.side is not None
    factors, room = saved["factors"], segment.side.factors
    if factors is not None and room is not None and factors.shape == room.shape:
        segment.factors_at = saved["factors_at"]
        platform.device.run(device_ops.copy, room, upload(platform, factors))


def _restore_weight(
    engine: Engine, weight: Weight, state: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    platform = engine.platform
    weight.restored_checksum = extra["checksum"]
    weight.selection = _restore_selection(extra["selection"], engine.config)
    weight.substep = SubStep(*extra["substep"])
    for segment, saved in zip(weight.segments, extra["segments"], strict=True):
        segment.begin(platform, saved["selected"].clone())
        segment.adopted = saved["adopted"]
        segment.host_steps = saved["host_steps"]
        segment.last = None if saved["last"] is None else SubStep(*saved["last"])
        segment.extrapolated = saved["extrapolated"]
        segment.synchronous_until = saved["synchronous_until"]
        _restore_factors(platform, segment, saved)
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
        pending=[
            Scored(step, _transferred(chosen.clone()), None) for step, chosen in saved["pending"]
        ],
    )


def _transferred(tensor: Tensor) -> Transfer:
    return Transfer(tensor, tensor, FINISHED)
