"""Hooks on the user's model, so that weights that lag are not saved or evaluated unnoticed."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Lagging(Protocol):
    """What the hooks need of an optimizer."""

    def before_read(self, *, asked: bool) -> None:
        """The model's weights are about to be saved or evaluated.

        Args:
            asked: the user gave the model, so that its weights be current then.
        """
        ...


def _nobody() -> None:
    return None


class _Hook:
    """Tells an optimizer that still lives. A copied or pickled model's has none."""

    def __init__(self, optimizer: Callable[[], Lagging | None], asked: bool) -> None:
        self._optimizer = optimizer
        self._asked = asked

    def __reduce__(self) -> Any:
        return type(self), (_nobody, self._asked)

    def _tell(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.before_read(asked=self._asked)


class _BeforeSave(_Hook):
    """For ``register_state_dict_pre_hook``."""

    def __call__(self, *_: Any) -> None:
        self._tell()


class _BeforeForward(_Hook):
    """For ``register_forward_pre_hook``: a forward pass in evaluation mode.

    Where nobody asked, only one without gradients, since some train in evaluation mode, and none that
    is being compiled, which could not be whole then.
    """

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not module.training and (self._asked or not _leaves_alone()):
            self._tell()


def _leaves_alone() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


class ModelHooks:
    """The hooks of one optimizer. They hold it weakly."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.asked = False
        """The user gave the model."""

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self, modules: Iterable[nn.Module], optimizer: Lagging, *, asked: bool) -> None:
        """Tell the optimizer before ``state_dict()`` and before a forward pass in evaluation mode.

        Args:
            asked: the user gave these modules; else they were found.
        """
        self.asked = self.asked or asked
        reference = weakref.ref(optimizer)
        for module in modules:
            before_save = _BeforeSave(reference, asked)
            before_forward = _BeforeForward(reference, asked)
            self._handles.append(module.register_state_dict_pre_hook(before_save))
            self._handles.append(module.register_forward_pre_hook(before_forward))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def modules_over(params: Sequence[Tensor]) -> list[nn.Module]:
    """The modules through which all of ``params`` are used: those alive that hold them all, outermost
    first, and the parts of the innermost.

    A parameter does not know its module, so the interpreter's objects are looked through, once. Where
    no module holds them all, there are none.
    """
    wanted = {id(p) for p in params if isinstance(p, nn.Parameter)}
    if not wanted or len(wanted) < len(params):
        return []
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    held: dict[int, set[int]] = {}
    whole = [module for module in modules if len(_held(module, wanted, held)) == len(wanted)]
    if not whole:
        return []
    whole.sort(key=lambda module: -sum(1 for _ in module.modules()))
    return whole + [child for child in whole[-1].children() if _held(child, wanted, held)]


def _held(module: nn.Module, wanted: set[int], known: dict[int, set[int]]) -> set[int]:
    """Which of the wanted parameters lie in a module or below it."""
    found = known.get(id(module))
    if found is None:
        found = known[id(module)] = set()  # before the children: a module may hold its parent
        state = module.__dict__  # one that is half made lacks its attributes
        found.update(wanted.intersection(map(id, state.get("_parameters", {}).values())))
        for child in state.get("_modules", {}).values():
            if child is not None:
                found |= _held(child, wanted, known)
    return found


def has_trainer(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them belongs to Lightning, whose saves and evaluations are the trainer's."""
    bases = (base.__module__ for module in modules for base in type(module).__mro__)
    return any(base.partition(".")[0] in ("lightning", "pytorch_lightning") for base in bases)


def names_in(modules: Sequence[nn.Module], params: Iterable[Tensor]) -> dict[Tensor, str]:
    """What the innermost module that knows all of ``params`` calls them; nothing if none does."""
    for module in reversed(modules):
        names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
        if all(param in names for param in params):
            return {param: names[param] for param in params}
    return {}
