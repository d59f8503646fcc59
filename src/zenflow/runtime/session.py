"""What changes in an optimizer's life."""

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zenflow.runtime import interrupts, loading
from zenflow.runtime.engine import Engine
from zenflow.runtime.model_hooks import ModelHooks
from zenflow.runtime.stats import StepStats
from zenflow.runtime.streaming import GradientStream

_log = logging.getLogger("zenflow")


class Session:
    """Everything that an optimizer assigns after its construction, in one object.

    Wrappers such as Fabric's run an optimizer's methods on an object of their own that has a copy of its
    attributes: what such a method assigns has to be seen by the optimizer, too.

    Attributes:
        batches: the parameters of each construction and ``add_param_group``.
        known_names: what the model calls the parameters, as far as it is known.
        names: what messages call them.
        managed: a trainer says when weights are saved and evaluated.
        entry: for the state dict in the making.
    """

    def __init__(self) -> None:
        self.stream: GradientStream | None = None
        self.hooks = ModelHooks()
        self.batches: list[list[Tensor]] = []
        self.known_names: dict[Tensor, str] = {}
        self.names: dict[Tensor, str] = {}
        self.managed = False
        self._warned_of_lag = False
        self.entry: dict[str, Any] | None = None
        self.closed = False
        self.lock = threading.RLock()
        self._engine: Engine | None = None
        self._loaded: loading.Loaded | None = None
        self._before_any_step: RemovableHandle | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        weakref.finalize(self, self.hooks.detach).atexit = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time, whatever the caller's autograd mode, and not stopped in the middle by
        Ctrl-C."""
        with torch.inference_mode(False), torch.no_grad(), interrupts.whole(), self.lock:
            yield

    @property
    def engine(self) -> Engine | None:
        """With what was loaded moved in; None before the first step."""
        self.move_in()
        return self._engine

    @property
    def stats(self) -> StepStats:
        return StepStats() if self._engine is None else self._engine.stats

    @property
    def _pending_steps(self) -> int:
        """Most steps that visible weights lag behind AdamW; 0 where nobody can bring them nearer."""
        engine = self._engine
        if engine is None or self._loaded is not None or not engine.is_usable:
            return 0
        return engine.pending_steps

    def use(self, engine: Engine | None, loaded: loading.Loaded | None = None) -> None:
        """Put an engine in the place of the last, which is let go as it is.

        Args:
            engine: None lets the next step make one.
            loaded: to be moved into it when it is first needed, or any other optimizer steps: that one
                may share, and then writes, the loaded tensors.
        """
        self.abandon()
        if self._engine is not None:
            self._engine.close(drain=False)
        self._drop_loaded()
        self._engine = engine
        self._finalizer = None if engine is None else weakref.finalize(self, engine.close)
        if loaded is not None:
            assert engine is not None
            self._loaded = loaded
            engine.stats = StepStats(step=loaded.step or 0)
            reference = weakref.ref(self)
            self._before_any_step = register_optimizer_step_pre_hook(
                lambda *_: None if (session := reference()) is None else session.move_in()
            )

    def move_in(self) -> None:
        """Move what was loaded into the engine, if it is not there yet."""
        loaded = self._loaded
        if loaded is None:
            return
        assert self._engine is not None
        with self.alone():
            self._drop_loaded()
            try:
                loading.restore(self._engine, loaded)
            except BaseException as error:
                self._engine.pipeline.fail(error)
                raise

    def synchronize(self) -> None:
        """Apply and publish every gradient so far, if there is an engine that still can."""
        with self.alone():
            if self.engine is not None and not self.closed:
                self.engine.synchronize()

    def before_read(self, *, asked: bool) -> None:
        """Called by the hooks on a model that is about to be saved or evaluated.

        Where the model was given, or a trainer is at work, its weights are made current. Else that would
        change the run (a resumed run is the same bit for bit with lagging weights), so a warning says,
        once, how far they lag.
        """
        pending = self._pending_steps
        if not pending:
            return
        if asked or self.managed:
            self.synchronize()
        elif not self._warned_of_lag:
            self._warned_of_lag = True
            _log.warning(
                "the model's weights are saved or evaluated with %d steps pending: most of their "
                "channels lag that far behind AdamW. Beside the optimizer's state they resume exactly; "
                "for weights to be used by themselves, call optimizer.synchronize() first or pass "
                "model= to ZenFlowAdamW",
                pending,
            )

    def close(self) -> None:
        """Apply what is pending and end the workers."""
        with self.alone():
            self.move_in()
            self.closed = True
            self.hooks.detach()
            if self.stream is not None:
                self.stream.detach()
            if self._finalizer is not None:
                self._finalizer()

    def abandon(self) -> None:
        """Leave the engine as it is, when it goes or at exit."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _drop_loaded(self) -> None:
        self._loaded = None
        if self._before_any_step is not None:
            self._before_any_step.remove()
            self._before_any_step = None
