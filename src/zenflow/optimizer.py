"""The optimizer that a user holds."""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.core.rules import SubStep
from zenflow.runtime import checkpoint
from zenflow.runtime.engine import Engine, Gradient
from zenflow.runtime.memory import check_host_memory
from zenflow.runtime.platform import Platform, choose_platform
from zenflow.runtime.stats import StepStats

_log = logging.getLogger("zenflow")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SOLE_REFERENCES = 2  # the caller's name and getrefcount's own argument
_SOLE_STORAGE_REFERENCES = 2  # the tensor and the Python handle made to ask


class ZenFlowAdamW(torch.optim.Optimizer):
    r"""AdamW with most of its state in host memory, updated beside the next steps (ZenFlow).

    The few channels (weight columns) with the largest gradients are updated on the device in every
    step. The others' gradients move to host memory and are applied there by worker threads while
    the training loop goes on; their weights lag by a bounded number of steps. Each gradient is
    applied exactly once, as the AdamW update of its own step.

    ``step()`` takes the gradients: afterwards each ``.grad`` is None.

    Args:
        params: parameters or groups, as for any ``torch.optim`` optimizer. fp32, bf16 or fp16
            weights, all on one device. Each group may carry its own ``lr``, ``betas``, ``eps``,
            ``weight_decay``.
        lr: learning rate.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        config: a :class:`ZenFlowConfig`, a mapping with its keys, or None for the defaults.

    Raises:
        ValueError: for a hyperparameter, config value, dtype or device that is not supported.
        MemoryError: if the deferred state does not fit into host memory (control groups included).

    Example::

        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-5)
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()  # before evaluating or saving

    Reference: ZenFlow, https://arxiv.org/abs/2505.12242; AdamW, https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: ZenFlowConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._config = ZenFlowConfig.of(config)
        self._engine: Engine | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._batches: list[list[Tensor]] = []
        self._closed = False
        self._constructed = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._batches = [[p for group in self.param_groups for p in group["params"]]]
        check_host_memory(self._batches[0], self._config)
        self._constructed = True

    @property
    def config(self) -> ZenFlowConfig:
        """The settings in force."""
        return self._config

    @property
    def stats(self) -> StepStats:
        """Figures of the last ``step()``."""
        return StepStats() if self._engine is None else self._engine.stats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get their state with their first gradient.

        Raises:
            ValueError: as at construction; nothing is added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group, len(self.param_groups) - 1)
            self._one_device()
            if self._constructed:
                check_host_memory(group["params"], self._config)
        except (ValueError, MemoryError):
            self.param_groups.pop()
            raise
        if self._constructed:
            self._batches.append(list(group["params"]))
            if self._engine is not None:
                self._engine.add_parameters(group["params"], self._names(group["params"]))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take every gradient and apply it now (selected, resident) or within the update interval.

        A gradient that is not finite skips the step whole: ``stats.skipped`` is True and a warning
        names the parameter.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: if a host worker failed, with its cause, or after ``close()``.
            ValueError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._running_engine()
        engine.step(self._take_gradients(shared=engine.platform.link.shared))
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Apply and publish every gradient so far; call it before evaluating or saving weights.

        Afterwards each weight is its fp32 master rounded to the weight's dtype.

        Raises:
            RuntimeError: if a host worker failed, with its cause.
        """
        if self._engine is not None and not self._closed:
            self._engine.synchronize()

    @torch.no_grad()
    def close(self) -> None:
        """Synchronize and end the worker threads. Idempotent; also done on garbage collection and
        exit."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """All state, in the layout of ``torch.optim.AdamW`` with fp32 ``master`` weights beside.

        A ``"zenflow"`` entry holds the selections and the gradients that wait, so that a resumed
        run continues bit for bit. Plain AdamW ignores it: call :meth:`synchronize` first if plain
        AdamW is to continue. Nothing is drained or changed by saving.
        """
        if self._engine is None:
            return super().state_dict()
        exported = checkpoint.export(self._engine)
        for param, state in exported.states.items():
            self.state[param] = state
        try:
            packed = super().state_dict()
        finally:
            self.state.clear()
        numbers = {param: i for i, param in enumerate(self._all_params())}
        packed["zenflow"] = exported.entry(numbers)
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this optimizer's own, or one of ``torch.optim.AdamW``.

        Raises:
            ValueError: if it does not fit the parameters or the config; nothing is changed then.
        """
        params = self._all_params()
        loaded = checkpoint.parse(state_dict, params, self._config)
        engine = self._new_engine()
        try:
            checkpoint.restore(engine, loaded)
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        except BaseException:
            engine.close(drain=False)
            raise
        if self._engine is not None:
            self._engine.close(drain=False)
        self._use(engine)

    def _make_platform(self, device: torch.device) -> Platform:
        return choose_platform(device, self._config)

    def _running_engine(self) -> Engine:
        if self._closed:
            raise RuntimeError("this optimizer is closed; create a new one to go on training")
        if self._engine is None:
            self._use(self._new_engine())
        assert self._engine is not None
        return self._engine

    def _new_engine(self) -> Engine:
        engine = Engine(self._make_platform(self._one_device()), self._config)
        for batch in self._batches:
            engine.add_parameters(batch, self._names(batch))
        return engine

    def _use(self, engine: Engine) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._engine = engine
        self._finalizer = weakref.finalize(self, engine.close)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self, params: Iterable[Tensor]) -> list[str]:
        names = {
            param: _name(group, number, position)
            for number, group in enumerate(self.param_groups)
            for position, param in enumerate(group["params"])
        }
        return [names[param] for param in params]

    def _one_device(self) -> torch.device:
        devices = {p.device for p in self._all_params()}
        if len(devices) > 1:
            names = sorted(str(device) for device in devices)
            raise ValueError(
                f"parameters lie on several devices {names}; "
                "use one optimizer for each device, or move the model to one"
            )
        return devices.pop()

    def _take_gradients(self, *, shared: bool) -> list[Gradient]:
        gradients = []
        for number, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            hyper = SubStep(
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=0,
            )
            for position, param in enumerate(group["params"]):
                if param.grad is not None:
                    name = _name(group, number, position)
                    gradients.append(Gradient(param, _take(param, name, shared), hyper, name))
        return gradients


def _name(group: dict[str, Any], number: int, position: int) -> str:
    names = group.get("param_names")
    if names is not None:
        return str(names[position])
    shape = tuple(group["params"][position].shape)
    return f"param_groups[{number}]['params'][{position}] of shape {shape}"


def _take(param: Tensor, name: str, shared: bool) -> Tensor:
    """The parameter's gradient, now the runtime's own.

    Where memory is shared the gradient itself waits in a slot, so nobody else may write to it: it
    is copied if somebody else holds it, or if it is a view of memory that it does not own.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {grad.layout}; ZenFlowAdamW needs dense gradients: "
            "build the embedding with sparse=False"
        )
    param.grad = None
    if not shared:
        return grad
    if sys.getrefcount(grad) <= _SOLE_REFERENCES and _owns_memory(grad) and grad.is_contiguous():
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _owns_memory(tensor: Tensor) -> bool:
    """Whether no other tensor, a view or an alias, reaches this tensor's memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return False
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= _SOLE_STORAGE_REFERENCES


def _check_group(group: dict[str, Any], number: int) -> None:
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
