"""The user's parameter groups: what they may hold, and what a step reads from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow.core.rules import SubStep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OTHER_RULES = ("amsgrad", "maximize")
_OTHER_WAYS = ("capturable", "differentiable")
"""Options of ``torch.optim.AdamW``, the latter without another result. ``foreach`` and ``fused`` mean
nothing here."""

Group = dict[str, Any]


def hyperparameters(groups: Iterable[Group]) -> dict[Tensor, SubStep]:
    """Each parameter's present hyperparameters, as a sub-step without a count."""
    hypers = {}
    for group in groups:
        beta1, beta2 = group["betas"]
        hyper = SubStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=0,
        )
        hypers.update(dict.fromkeys(group["params"], hyper))
    return hypers


def check_same_parameters(in_groups: Mapping[Tensor, SubStep], names: Mapping[Tensor, str]) -> None:
    """Refuse groups whose lists of parameters somebody has changed.

    Args:
        names: of the parameters that the optimizer knows.

    Raises:
        ValueError: naming what was added and removed.
    """
    if in_groups.keys() == names.keys():
        return
    added = [tuple(param.shape) for param in in_groups if param not in names]
    removed = [name for param, name in names.items() if param not in in_groups]
    raise ValueError(
        f"param_groups were changed: parameters of shapes {added} were added and {removed} "
        "removed; add parameters by add_param_group(), or build a new optimizer"
    )


def given_names(groups: Sequence[Group]) -> dict[Tensor, str]:
    """What the user calls the parameters of groups made from ``named_parameters()``."""
    return {
        param: str(name)
        for group in groups
        for param, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }


def names(groups: Sequence[Group], known: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """What messages call each parameter: its known name, or its place in the groups."""
    return {
        param: known.get(param) or _place(group, number, position)
        for number, group in enumerate(groups)
        for position, param in enumerate(group["params"])
    }


def _place(group: Group, number: int, position: int) -> str:
    shape = tuple(group["params"][position].shape)
    return f"param_groups[{number}]['params'][{position}] of shape {shape}"


def check_group(group: Group, number: int) -> None:
    """Refuse hyperparameters out of range and weights of a dtype that is not trained.

    Raises:
        ValueError: naming the value, the group and the legal range.
    """
    where = f"in param_groups[{number}]"
    _refuse_options(group, (*_OTHER_RULES, *_OTHER_WAYS), where)
    _check_hyperparameters(group, where)
    for position, param in enumerate(group["params"]):
        problem = _problem_of(param)
        if problem:
            names = group.get("param_names")
            name = str(names[position]) if names else _place(group, number, position)
            raise ValueError(f"{name} is {problem}")


def _problem_of(param: Tensor) -> str:
    if param.dtype not in _DTYPES:
        return f"{param.dtype}; ZenFlowAdamW trains float32, bfloat16 and float16 weights"
    if hasattr(param, "device_mesh"):  # importing the class takes longer than the rest of zenflow
        return (
            "a DTensor, as FSDP and tensor parallelism make it; ZenFlowAdamW trains whole weights: use "
            "DistributedDataParallel, or no wrapper"
        )
    return ""


def check_saved_group(group: Mapping[str, Any], number: int) -> None:
    """Refuse hyperparameters, or an update rule, that a saved state cannot go on with here.

    Raises:
        ValueError: naming the value, the group and the legal range.
    """
    where = f"in param_groups[{number}] of the saved state"
    _refuse_options(group, _OTHER_RULES, where)
    try:
        _check_hyperparameters(group, where)
    except TypeError as error:
        raise ValueError(f"hyperparameters {where} are not numbers ({error})") from error
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise ValueError(
            f"weight_decay={group['weight_decay']!r} {where} is that of torch.optim.Adam, which adds it "
            "to the gradient; ZenFlowAdamW decouples it as AdamW does. Set it to 0 in the saved state "
            "to load it all the same"
        )


def _refuse_options(group: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for name in names:
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r} {where} is not supported by ZenFlowAdamW; leave it out"
            )


def _check_hyperparameters(group: Mapping[str, Any], where: str) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr={lr!r} {where} is not legal; it takes a number or a one-element tensor"
        )
    _check_range("lr", float(lr), 0.0, float("inf"), where)
    beta1, beta2 = group["betas"]
    _check_range("betas[0]", float(beta1), 0.0, 1.0, where)
    _check_range("betas[1]", float(beta2), 0.0, 1.0, where)
    _check_range("eps", float(group["eps"]), 0.0, float("inf"), where)
    _check_range("weight_decay", float(group["weight_decay"]), 0.0, float("inf"), where)


def _check_range(name: str, value: float, low: float, high: float, where: str) -> None:
    if not low <= value < high:
        raise ValueError(
            f"{name}={value!r} {where} is not legal; it takes {low} <= {name} < {high}"
        )
