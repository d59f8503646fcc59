"""The optimizer that a user holds."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn

from zenflow.config import ZenFlowConfig
from zenflow.core.rules import SubStep
from zenflow.runtime import device_ops, groups, loading, saving
from zenflow.runtime.engine import Engine, Gradient
from zenflow.runtime.gradients import take_gradient
from zenflow.runtime.memory import check_host_memory
from zenflow.runtime.model_hooks import has_trainer, modules_over, names_in
from zenflow.runtime.platform import Platform, choose_platform
from zenflow.runtime.processes import check_processes
from zenflow.runtime.selection_writer import with_selection_log
from zenflow.runtime.session import Session
from zenflow.runtime.stages import staged
from zenflow.runtime.stats import StepStats
from zenflow.runtime.streaming import GradientStream, TakenGradient


def _add_entry(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Before the user's own hooks: the entry that ``state_dict()`` has made ready."""
    assert isinstance(optimizer, ZenFlowAdamW)
    if optimizer._session.entry is not None:
        state_dict["zenflow"] = optimizer._session.entry


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
        model: if given, ``model.state_dict()`` and a forward pass in evaluation mode first
            synchronize, so that what is saved or evaluated is current.

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
        model: nn.Module | None = None,
    ) -> None:
        self._config = with_selection_log(ZenFlowConfig.of(config))
        check_processes(self._config)
        self._session = Session()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        params = self._all_params()
        check_host_memory(params, self._config)
        self._session.batches.append(params)
        if model is not None:
            self._session.hooks.attach([model], self._session, asked=True)
            self._session.known_names = names_in([model], params)
        self._name_parameters()
        self.register_state_dict_post_hook(_add_entry, prepend=True)
        if self._config.stream_gradients:
            self._session.stream = GradientStream(self._absorb)
            self._session.stream.attach(params)

    @property
    def config(self) -> ZenFlowConfig:
        """The settings in force."""
        return self._config

    @property
    def _engine(self) -> Engine | None:
        return self._session.engine

    @property
    def _stream(self) -> GradientStream | None:
        return self._session.stream

    @property
    def _names(self) -> dict[Tensor, str]:
        return self._session.names

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZenFlowAdamW owns threads and host memory and can be neither copied nor pickled; "
            "build a new one and use state_dict() and load_state_dict()"
        )

    @property
    def stats(self) -> StepStats:
        """Figures of the last ``step()``."""
        return self._session.stats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get their state with their first gradient.

        Raises:
            ValueError: as at construction; nothing is added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            groups.check_group(group, len(self.param_groups) - 1)
            self._one_device()
            if self._session.batches:
                check_host_memory(group["params"], self._config)
        except (ValueError, MemoryError):
            self.param_groups.pop()
            raise
        if self._session.batches:  # not in the constructor
            self._name_parameters()
            self._session.batches.append(list(group["params"]))
            if self._stream is not None:
                self._stream.attach(group["params"])
            if self._engine is not None:
                self._add_to(self._engine, group["params"])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

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
        self._take_step()
        return loss

    # A compiled training loop breaks its graph here, as torch's own optimizers make it do.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _take_step(self) -> None:
        with self._session.alone():
            engine = self._running_engine()
            hypers = groups.hyperparameters(self.param_groups)
            groups.check_same_parameters(hypers, self._names)
            if self._stream is not None:
                self._settle_stream(engine, self._stream, hypers)
            engine.step(self._take_gradients(shared=engine.platform.link.shared), hypers)
            if not self.state:
                self._show_state()

    def _show_state(self) -> None:
        """Let ``state``, which others look at, say that there is some: what there is lies elsewhere.

        Distributed checkpoints take a step of their own with an optimizer that has none.
        """
        self.state.clear()
        self.state.update((param, {}) for param in self._names)

    def accumulate(self) -> AbstractContextManager[None]:
        """Around every backward pass of a step but the last, when gradients are streamed.

        Accelerate's own accumulation is noticed without it. Without ``stream_gradients`` it does
        nothing, since gradients are then read in ``step()``.
        """
        return nullcontext() if self._stream is None else self._stream.accumulate()

    def synchronize(self) -> None:
        """Apply and publish every gradient so far; call it before evaluating or saving weights.

        Afterwards each weight is its fp32 master rounded to the weight's dtype.

        Raises:
            RuntimeError: if a host worker failed, with its cause.
        """
        self._session.synchronize()

    def train(self) -> None:
        """For trainers that say when they train and when they evaluate (Hugging Face's, for one).

        From then on, saving the model also makes its weights current, as ``eval()`` does.
        """
        self._session.managed = True

    def eval(self) -> None:
        """The same as :meth:`synchronize`; see :meth:`train`."""
        self._session.managed = True
        self.synchronize()

    def close(self) -> None:
        """Synchronize and end the worker threads. Idempotent; also done on garbage collection and
        exit."""
        self._session.close()

    def state_dict(self) -> dict[str, Any]:
        """All state, in the layout of ``torch.optim.AdamW`` with fp32 ``master`` weights beside.

        A ``"zenflow"`` entry holds the selections and the gradients that wait, so that a resumed
        run continues bit for bit. Plain AdamW ignores it: call :meth:`synchronize` first if plain
        AdamW is to continue. Nothing is drained or changed by saving, unless ``model`` was given, whose
        ``state_dict()`` is current: then so is this one, whichever is saved first.
        """
        with self._session.alone():
            engine = self._engine
            if engine is None:
                return super().state_dict()
            engine.pipeline.raise_if_failed()
            if self._session.hooks.asked:
                engine.synchronize()
            exported = saving.export(engine)
            self.state.clear()
            self.state.update(
                (param, exported.states[param]) for param in self._names if param in exported.states
            )
            self._session.entry = exported.entry(self._all_params(), self._known_names)
            try:
                return super().state_dict()
            finally:
                self._session.entry = None
                self._show_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this optimizer's own, or one of ``torch.optim.AdamW``.

        All of it is checked now. Its tensors are borrowed and moved in when they are first needed, so
        that the state is not in memory twice if the caller drops the state dict.

        Raises:
            ValueError: if it does not fit the parameters or the config; nothing is changed then.
        """
        with self._session.alone():
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        state_dict = self._before_load(state_dict)
        params = self._all_params()
        self._find_model()
        names = [self._known_names.get(param) for param in params]
        loaded = loading.parse(state_dict, params, names, self._config)
        engine = None if loaded.is_empty else self._new_engine()
        try:
            if engine is not None:
                loading.check_engine(engine, loaded)
            self._load_groups(state_dict["param_groups"])
        except BaseException:
            if engine is not None:
                engine.close(drain=False)
            raise
        for param in self._names:
            if isinstance(param.grad, TakenGradient):
                param.grad = None  # it was the old state's
        self._session.use(engine, None if engine is None else loaded)

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch does first: the hooks see, and may replace, the whole state."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def _load_groups(self, param_groups: list[dict[str, Any]]) -> None:
        """torch's own loading, without state and without the hooks that have run."""
        hooks, self._optimizer_load_state_dict_pre_hooks = (
            self._optimizer_load_state_dict_pre_hooks,
            OrderedDict(),
        )
        try:
            super().load_state_dict({"state": {}, "param_groups": param_groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def _make_platform(self, device: torch.device) -> Platform:
        return choose_platform(device, self._config)

    def _find_model(self) -> None:
        """Hook the model that the parameters are of, unless that is done or it cannot be found."""
        session = self._session
        if session.hooks.attached:
            return
        params = self._all_params()
        modules = modules_over(params)
        session.hooks.attach(modules, self._session, asked=False)
        session.managed = session.managed or has_trainer(modules)
        session.known_names = names_in(modules, params)
        self._name_parameters()

    def _name_parameters(self) -> None:
        self._session.names = groups.names(self.param_groups, self._known_names)

    @property
    def _known_names(self) -> Mapping[Tensor, str]:
        return groups.given_names(self.param_groups) or self._session.known_names

    def _running_engine(self) -> Engine:
        if self._session.closed:
            raise RuntimeError("this optimizer is closed; create a new one to go on training")
        if self._engine is None:
            self._find_model()
            self._session.use(self._new_engine())
        assert self._engine is not None
        return self._engine

    def _new_engine(self) -> Engine:
        check_processes(self._config)  # again: the process group may be younger than this optimizer
        engine = Engine(self._make_platform(self._one_device()), self._config)
        for batch in self._session.batches:
            self._add_to(engine, batch)
        return engine

    def _add_to(self, engine: Engine, params: Sequence[Tensor]) -> None:
        engine.add_parameters(params, [self._names[param] for param in params])

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

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
        return [
            Gradient(param, take_gradient(param, name, shared), name)
            for param, name in self._names.items()
            if param.grad is not None
        ]

    @staged("zenflow.capture")
    def _absorb(self, param: Tensor) -> Tensor:
        """Take one gradient in the backward pass; returns its norm."""
        with self._session.lock:
            engine = self._running_engine()
            if param in engine.absorbed:  # and zeroed since, or autograd would have added to it
                engine.forget(param)
            name = self._names[param]
            grad = take_gradient(param, name, engine.platform.link.shared)
            norm = engine.platform.device.empty((), torch.float32)
            try:
                engine.platform.device.run(device_ops.norm, grad, norm)
                engine.absorb(Gradient(param, grad, name), engine.step_index + 1, norm)
            except BaseException as error:  # a part of it has been taken
                engine.pipeline.fail(error)
                raise
            return norm

    def _settle_stream(
        self, engine: Engine, stream: GradientStream, hypers: dict[Tensor, SubStep]
    ) -> None:
        """Drop what the user has dropped by zeroing gradients; scale what was clipped."""
        stream.attach(self._all_params())
        for param in list(engine.absorbed):
            if isinstance(param.grad, TakenGradient):
                hypers[param] = hypers[param]._replace(scale=param.grad.scale())
                param.grad = None
            else:
                engine.forget(param)
