"""The native kernels through ``ctypes``, which releases the GIL while they run: the sweep is here, the
selective path in ``native.selective``.

Bitwise equal to ``kernels.reference``, whatever the instruction set; only which NaN a NaN is may
differ.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow.core.rules import Coefficients
from zenflow.kernels.native import build

INSTRUCTION_SETS = tuple(build.ISA_FLAGS)
"""All that the sources can be compiled for."""

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeUnavailable(Exception):
    """Why the native kernel cannot serve."""


class _SweepArgs(ctypes.Structure):
    """``SweepArgs`` of ``api.h``."""

    _fields_ = [
        ("numel", ctypes.c_size_t),
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grads", ctypes.POINTER(ctypes.c_void_p)),
        ("coefficients", ctypes.POINTER(ctypes.c_float)),
        ("num_slots", ctypes.c_size_t),
        ("mean", ctypes.c_int),
        ("inv_num_slots", ctypes.c_float),
        ("delay", ctypes.c_float),
    ]


class Library:
    """The loaded shared library.

    Attributes:
        dll: its functions.
        index: the number of each instruction set in it.
        compiled: those instruction sets, best first.
        usable: those of them that this CPU runs.
    """

    def __init__(self) -> None:
        if not build.LIBRARY.exists():
            raise NativeUnavailable(
                f"it was not built: {build.LIBRARY} does not exist. With a C++ compiler, install "
                f"again or run `python {build.__file__}`"
            )
        try:
            self.dll = ctypes.CDLL(str(build.LIBRARY))
            self.dll.zenflow_build_id.restype = ctypes.c_char_p
            self.dll.zenflow_isa_name.restype = ctypes.c_char_p
            built_from = self.dll.zenflow_build_id().decode()
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{build.LIBRARY} could not be loaded: {error}") from error
        if built_from != build.build_id():
            raise NativeUnavailable(
                f"{build.LIBRARY} was built from other sources. Install again or run "
                f"`python {build.__file__}`"
            )
        names = iter(map(self.dll.zenflow_isa_name, itertools.count()).__next__, None)
        self.index = {name.decode(): index for index, name in enumerate(names)}
        self.compiled = tuple(self.index)
        self.usable = tuple(
            name for name in self.compiled if self.dll.zenflow_isa_runs_here(self.index[name])
        )

    def sweep(
        self,
        isa: str,
        state: Sequence[Tensor],
        grads: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
        *,
        mean: bool,
        delay: float,
        out: Tensor,
    ) -> None:
        """``kernels.reference.sweep``, and with no ``grads`` ``kernels.reference.write``.

        Args:
            isa: one of ``usable``.
            state: master and both moments.
        """
        if len({grad.dtype for grad in grads}) > 1:
            grads = [grad.float() for grad in grads]
        numel = out.numel()
        for tensor in (*state, *grads, out):
            assert tensor.is_cpu and tensor.is_contiguous() and tensor.numel() == numel
        assert all(tensor.dtype == torch.float32 for tensor in state)
        assert len(coefficients) == max(1, len(grads))
        args = _SweepArgs(
            numel,
            *(tensor.data_ptr() for tensor in state),
            out.data_ptr(),
            (ctypes.c_void_p * len(grads))(*(grad.data_ptr() for grad in grads)),
            (ctypes.c_float * (len(Coefficients._fields) * len(coefficients)))(
                *itertools.chain.from_iterable(coefficients)
            ),
            len(grads),
            mean,
            1.0 / max(1, len(grads)),
            delay,
        )
        grad_type = ELEMENT_TYPES[grads[0].dtype] if grads else 0
        self.dll.zenflow_sweep(
            self.index[isa], grad_type, ELEMENT_TYPES[out.dtype], ctypes.byref(args)
        )


@functools.cache
def load() -> Library:
    """The library of this installation.

    Raises:
        NativeUnavailable: with the reason.
    """
    return Library()
