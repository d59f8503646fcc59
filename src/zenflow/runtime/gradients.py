"""Taking a gradient: afterwards nobody else writes to its memory."""

import sys

import torch
from torch import Tensor

_SOLE_REFERENCES = 2  # the caller's name and getrefcount's own argument
_SOLE_STORAGE_REFERENCES = 2  # the tensor and the Python handle made to ask
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def take_gradient(param: Tensor, name: str, shared: bool) -> Tensor:
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
    if storage.nbytes() != tensor.nbytes:
        return False
    return _use_count is not None and _use_count(storage._cdata) <= _SOLE_STORAGE_REFERENCES
