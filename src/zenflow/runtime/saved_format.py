"""What a saved state has to look like, before any of it is believed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FORMAT_VERSION = 1
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_SUBSTEP_FIELDS = 7
_NUMBER = (int, float)


def check_format(state_dict: Any) -> None:
    """Refuse a state dict that lacks what is read of it later, or has something else in its place.

    Raises:
        ValueError: naming what is missing or of the wrong kind.
    """
    _need(isinstance(state_dict, Mapping), "the optimizer's state is not a mapping", state_dict)
    groups = _get(state_dict, "param_groups", Sequence, "the optimizer's state")
    for i, group in enumerate(groups):
        where = f"param_groups[{i}] of the saved state"
        _need(isinstance(group, Mapping), f"{where} is not a mapping", group)
        _get(group, "params", Sequence, where)
        for name in _HYPERPARAMETERS:
            _get(group, name, object, where)
    states = _get(state_dict, "state", Mapping, "the optimizer's state")
    for number, state in states.items():
        _check_adamw_state(state, f"the saved state of parameter {number!r}")
    if state_dict.get("zenflow") is not None:
        _check_entry(state_dict["zenflow"])


def _check_adamw_state(state: Any, where: str) -> None:
    _need(isinstance(state, Mapping), f"{where} is not a mapping", state)
    if not state:
        return
    step = _get(state, "step", (*_NUMBER, Tensor), where)
    _need(not isinstance(step, Tensor) or step.numel() == 1, f"{where}: 'step' is no number", step)
    _need(float(step) >= 0, f"{where}: 'step' is negative or NaN", step)
    for name in ("exp_avg", "exp_avg_sq", *(["master"] if "master" in state else [])):
        tensor = _get(state, name, Tensor, where)
        _need(tensor.is_floating_point(), f"{where}: {name!r} is not of floating point", tensor)


def _check_entry(entry: Any) -> None:
    where = "the 'zenflow' entry of the saved state"
    _need(isinstance(entry, Mapping), f"{where} is not a mapping", entry)
    version = _get(entry, "version", object, where)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the saved zenflow state has format version {version!r}; "
            f"this release reads version {FORMAT_VERSION}"
        )
    _get(entry, "step", int, where)
    for pair in _get(entry, "trace", Sequence, where):
        _check_numbers(pair, 2, f"{where}: trace")
    for name in entry.get("names", []):
        _need(name is None or isinstance(name, str), f"{where}: a parameter's name is none", name)
    for key, weight in _get(entry, "weights", Mapping, where).items():
        within = f"{where}: weight {key!r}"
        _need(str(key).isdecimal(), f"{where}: a weight's number is none", key)
        _need(isinstance(weight, Mapping), f"{within} is not a mapping", weight)
        _check_weight(weight, within)


def _check_weight(weight: Mapping[str, Any], where: str) -> None:
    _get(weight, "checksum", int, where)
    _check_numbers(_get(weight, "substep", Sequence, where), _SUBSTEP_FIELDS, f"{where}: substep")
    selection = _get(weight, "selection", (Mapping, type(None)), where)
    if selection is not None:
        _check_channels(_get(selection, "chosen", Tensor, where), where)
        for name in ("version", "interval", "due"):
            _get(selection, name, int, where)
        for pending in _get(selection, "pending", Sequence, where):
            _need(len(pending) == 2, f"{where}: a pending selection is no pair", pending)
            _need(isinstance(pending[0], int), f"{where}: a pending selection has no step", pending)
            _check_channels(pending[1], where)
    segments = _get(weight, "segments", Sequence, where)
    _need(len(segments) > 0, f"{where} has no segments", segments)
    for segment in segments:
        _need(isinstance(segment, Mapping), f"{where}: a segment is not a mapping", segment)
        _check_segment(segment, f"{where}: a segment")


def _check_segment(segment: Mapping[str, Any], where: str) -> None:
    _check_numbers(_get(segment, "rows", Sequence, where), 2, f"{where}: rows")
    _check_channels(_get(segment, "selected", Tensor, where), where)
    for name in ("adopted", "host_steps", "synchronous_until"):
        _get(segment, name, int, where)
    _get(segment, "extrapolated", bool, where)
    _get(segment, "factors_at", int, where)
    factors = _get(segment, "factors", (Tensor, type(None)), where)
    if factors is not None:
        legal = factors.dtype == torch.float32 and factors.dim() == 1
        _need(legal, f"{where}: factors are no fp32 list", factors)
    _get(segment, "unpublished_delay", (*_NUMBER, type(None)), where)
    last = _get(segment, "last", (Sequence, type(None)), where)
    if last is not None:
        _check_numbers(last, _SUBSTEP_FIELDS, f"{where}: last")
    for slot in _get(segment, "slots", Sequence, where):
        _need(isinstance(slot, Mapping), f"{where}: a slot is not a mapping", slot)
        _get(slot, "step", int, where)
        _check_numbers(_get(slot, "substep", Sequence, where), _SUBSTEP_FIELDS, f"{where}: substep")
        grad = _get(slot, "grad", Tensor, where)
        legal = grad.is_floating_point() and grad.dim() >= 2
        _need(legal, f"{where}: a waiting gradient is none", grad)


def _check_channels(channels: Any, where: str) -> None:
    legal = isinstance(channels, Tensor) and channels.dtype == torch.int64 and channels.dim() == 1
    _need(legal, f"{where}: channels are no int64 list", channels)


def _check_numbers(values: Any, num: int, where: str) -> None:
    legal = isinstance(values, Sequence) and len(values) == num
    _need(
        legal and all(isinstance(v, _NUMBER) for v in values),
        f"{where} are no {num} numbers",
        values,
    )


def _get(mapping: Mapping[str, Any], name: str, kinds: Any, where: str) -> Any:
    if name not in mapping:
        raise ValueError(
            f"{where} has no {name!r}; it is damaged, or of another optimizer than ZenFlowAdamW "
            "and torch.optim.AdamW"
        )
    value = mapping[name]
    _need(isinstance(value, kinds), f"{name!r} of {where} is of the wrong kind", value)
    return value


def _need(legal: bool, complaint: str, value: Any) -> None:
    if not legal:
        seen = (
            f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else None
        )
        raise ValueError(f"{complaint}: {seen or repr(value)[:80]}; the file is damaged")
