"""The user's parameter groups: what they may hold, and what a step reads from them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow.core.rules import SubStep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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


def names(groups: Sequence[Group]) -> dict[Tensor, str]:
    """What messages call each parameter: its own name, or its place in the groups."""
    return {
        param: _name(group, number, position)
        for number, group in enumerate(groups)
        for position, param in enumerate(group["params"])
    }


def _name(group: Group, number: int, position: int) -> str:
    names = group.get("param_names")
    if names is not None:
        return str(names[position])
    shape = tuple(group["params"][position].shape)
    return f"param_groups[{number}]['params'][{position}] of shape {shape}"


def check_group(group: Group, number: int) -> None:
    """Refuse hyperparameters out of range and weights of a dtype that is not trained.

    Raises:
        ValueError: naming the value, the group and the legal range.
    """
    where = f"in param_groups[{number}]"
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
    for position, param in enumerate(group["params"]):
        if param.dtype not in _DTYPES:
            raise ValueError(
                f"{_name(group, number, position)} is {param.dtype}; "
                "ZenFlowAdamW trains float32, bfloat16 and float16 weights"
            )


def _check_range(name: str, value: float, low: float, high: float, where: str) -> None:
    if not low <= value < high:
        raise ValueError(
            f"{name}={value!r} {where} is not legal; it takes {low} <= {name} < {high}"
        )
