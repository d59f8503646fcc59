"""The native twin of ``kernels.selective``: the same bits in host memory, in one pass over it.

A side's pointers are packed once, as ``Side`` of ``api.h``; a call joins the records of its batch. So a
tensor costs about a microsecond of Python in each call.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zenflow.core.selection import channel_sums, energy_block_rows
from zenflow.kernels import selective
from zenflow.kernels.native import ELEMENT_TYPES, Library
from zenflow.kernels.selective import DeviceSide, Look, Preview, Share, Update

_SIDE = struct.Struct("=QQQQQQQQQQQQQQQQiiii")
"""``Side`` of ``api.h``."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH = [_POINTER, _SIZE]
"""How far it is, where several threads share it, and how many items it has."""
_SIGNATURES = {
    "zenflow_take": [*_BATCH, *[ctypes.c_char_p] * 2, _POINTER],
    "zenflow_all_finite": [*_BATCH, *[ctypes.c_char_p] * 3, _POINTER],
    "zenflow_update": [*_BATCH, *[ctypes.c_char_p] * 4],
    "zenflow_publish": [*_BATCH, *[ctypes.c_char_p] * 2],
    "zenflow_preview": [*_BATCH, *[ctypes.c_char_p] * 4],
    "zenflow_num_changed": [*_BATCH, ctypes.c_char_p, _POINTER],
    "zenflow_num_different": [*_BATCH, ctypes.c_char_p, _POINTER],
    "zenflow_energy": [ctypes.c_int, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER],
}
"""What each function takes behind the number of its instruction set."""
_LEAST_SHARED = 8
"""Items of a batch; fewer are done before a helper has woken up."""
_NOT_FINITE = torch.nan
_T = TypeVar("_T")


class NativeSelective:
    """The functions of one instruction set.

    Rows of gradients and of new weights are contiguous. A side without a record, and a resident's
    gradient that is strided or of another dtype than its parameter, are left to torch.

    Args:
        library: where the code is.
        isa: one of its ``usable``.
        invite: gives a job to each thread that may help. A job that begins late finds nothing to do.
    """

    def __init__(
        self, library: Library, isa: str, invite: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self._dll = library.dll
        self._isa = library.index[isa]
        self._invite = invite
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = None, [ctypes.c_int, *arguments]

    def prepared(self, side: DeviceSide) -> DeviceSide:
        """The side with its record; empty if these functions cannot serve it."""
        record = _record_of_resident if side.fingerprint is None else _record_of_rows
        return side._replace(record=record(side))

    def observe(self, look: Look, out: Tensor) -> None:
        """See :func:`zenflow.kernels.selective.observe`."""
        first = len(look.norms)
        if look.norms:
            torch.stack(list(look.norms), out=out[:first])
        if look.grads and look.exact:
            found = selective.norms(look.grads, exact=True)
            torch.stack([norm.float() for norm in found], out=out[first:-2])
        else:
            out[first:-2] = 0
        for number in self._take(look):
            out[first + number] = _NOT_FINITE
        out[-2] = self._num_changed(look.watched)
        out[-1] = self._num_different(look.rounded)

    def gather(self, shares: Sequence[Share]) -> None:
        """See :func:`zenflow.kernels.selective.gather`."""
        ours, others = _split(shares, _serves)
        self._gather(ours)
        selective.gather(others)

    def update(self, updates: Sequence[Update]) -> None:
        """See :func:`zenflow.kernels.selective.update`."""
        ours, others = _split(updates, _serves_update)
        if others:
            selective.update(others)
        numbers: dict[int, int] = {}  # of coefficients, which many updates share
        which = [numbers.setdefault(id(u.coefficients), len(numbers)) for u in ours]
        table = {id(u.coefficients): u.coefficients for u in ours}
        values = [value for coefficients in table.values() for value in coefficients]
        self._do(
            self._dll.zenflow_update,
            len(ours),
            _records(ours),
            _pointers([u.grad for u in ours]),
            array("i", which).tobytes(),
            array("f", values).tobytes(),
        )
        _written(ours)

    def publish(self, shares: Sequence[Share]) -> None:
        """See :func:`zenflow.kernels.selective.publish`."""
        ours, others = _split(shares, _serves)
        selective.publish(others)
        rows = _pointers([share.rows for share in ours])
        self._do(self._dll.zenflow_publish, len(ours), _records(ours), rows)
        _written(ours)

    def preview(self, shown: Sequence[Preview]) -> None:
        """See :func:`zenflow.kernels.selective.preview`."""
        ours, others = _split(shown, _serves_preview)
        selective.preview(others)
        self._do(
            self._dll.zenflow_preview,
            len(ours),
            _records(ours),
            _pointers([each.rows for each in ours]),
            array("f", [each.scale for each in ours]).tobytes(),
            array("f", [each.size for each in ours]).tobytes(),
        )
        _written(ours)

    def energy(self, grad: Tensor) -> Tensor:
        """See :func:`zenflow.core.selection.channel_energy`."""
        grad = grad.contiguous()
        row_numel = grad[0].numel()
        energy_CK = torch.empty(row_numel, dtype=torch.float32, device="cpu")
        self._dll.zenflow_energy(
            self._isa,
            ELEMENT_TYPES[grad.dtype],
            grad.data_ptr(),
            len(grad),
            row_numel,
            energy_block_rows(row_numel),
            energy_CK.data_ptr(),
        )
        return channel_sums(energy_CK, grad.shape[1])

    def _take(self, look: Look) -> set[int]:
        """Gather the shares; the numbers of the gradients that are not finite."""
        ours, others = _split(look.shares, _serves)
        selective.gather(others)
        finite = self._gather(ours)
        bad = {share.number for share, ok in zip(ours, finite, strict=True) if not ok}
        if look.exact:
            return bad
        seen = {share.number for share in ours}
        rest = [i for i in range(len(look.grads)) if i not in seen]
        finite = self._all_finite([look.grads[i] for i in rest])
        return bad.union(i for i, ok in zip(rest, finite, strict=True) if not ok)

    def _gather(self, shares: Sequence[Share]) -> "array[int]":
        finite = array("B", bytes(len(shares)))
        rows = _pointers([share.rows for share in shares])
        self._do(self._dll.zenflow_take, len(shares), _records(shares), rows, finite)
        return finite

    def _all_finite(self, grads: list[Tensor]) -> "array[int]":
        grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        finite = array("B", bytes(len(grads)))
        self._do(
            self._dll.zenflow_all_finite,
            len(grads),
            _pointers(grads),
            array("Q", [grad.numel() for grad in grads]).tobytes(),
            array("i", [ELEMENT_TYPES[grad.dtype] for grad in grads]).tobytes(),
            finite,
        )
        return finite

    def _num_changed(self, watched: Sequence[DeviceSide]) -> int:
        ours = [side.record for side in watched if side.record]
        others = [side for side in watched if not side.record]
        found = int(selective.num_changed(others)) if others else 0
        return self._count(self._dll.zenflow_num_changed, ours) + found

    def _num_different(self, rounded: Sequence[DeviceSide]) -> int:
        ours = [side.record for side in rounded if side.record]
        others = [side for side in rounded if not side.record]
        found = bool(others and selective.difference(others) != 0)
        return self._count(self._dll.zenflow_num_different, ours) + found

    def _count(self, function: Callable[..., None], records: Sequence[bytes]) -> int:
        count = array("Q", [0])
        self._do(function, len(records), b"".join(records), count)
        return count[0]

    def _do(
        self, function: Callable[..., None], num: int, *arguments: "bytes | array[int]"
    ) -> None:
        """Carry out a batch, together with whoever is free. An array is written to."""
        given = [_address_of(a) if isinstance(a, array) else a for a in arguments]
        if self._invite is None or num < _LEAST_SHARED:
            function(self._isa, None, num, *given)
            return
        turns = array("Q", [0, 0])

        def take_part(_alive: object = (turns, arguments)) -> None:
            function(self._isa, _address_of(turns), num, *given)

        self._invite(take_part)
        take_part()


def _record_of_rows(side: DeviceSide) -> bytes:
    weight, state = side.weight, side.state
    num_rows, num_channels, *kernel = weight.shape
    kernel_numel = kernel[0] if kernel else 1
    if weight[0].numel() == 0 or not weight[0].is_contiguous():
        return b""
    lanes = selective.lanes(weight)
    return _SIDE.pack(
        weight.data_ptr(),
        weight.stride(0) * weight.element_size(),
        num_rows,
        num_channels * kernel_numel,
        kernel_numel,
        _address(side.channels),
        0 if side.channels is None else side.channels.numel(),
        *(_address(tensor) for tensor in state or (None, None, None)),
        _address(side.selected_grad),
        _address(side.is_selected),
        _address(side.fingerprint),
        _address(side.deferred_lanes),
        _address(side.factors),
        lanes.shape[1],
        lanes.element_size(),
        ELEMENT_TYPES[weight.dtype],
        ELEMENT_TYPES[weight.dtype if side.selected_grad is None else side.selected_grad.dtype],
        0,
    )


def _record_of_resident(side: DeviceSide) -> bytes:
    weight, state = side.weight, side.state
    if state is None or not all(t.is_contiguous() for t in (weight, *state)):
        return b""
    kind = ELEMENT_TYPES[weight.dtype]
    pointers = [tensor.data_ptr() for tensor in state]
    numel = weight.numel()
    return _SIDE.pack(
        weight.data_ptr(), 0, 1, numel, 1, 0, 0, *pointers, 0, 0, 0, 0, 0, 0, 0, kind, kind, 0
    )


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _serves(share: Share) -> bool:
    return bool(share.side.record)


def _serves_update(u: Update) -> bool:
    side, grad = u.side, u.grad
    if grad is side.selected_grad:
        return bool(side.record)
    return bool(side.record) and grad.dtype is side.weight.dtype and grad.is_contiguous()


def _serves_preview(shown: Preview) -> bool:
    same = shown.rows.dtype is shown.side.weight.dtype
    return bool(shown.side.record) and same and shown.rows.is_contiguous()


def _split(items: Sequence[_T], serves: Callable[[_T], bool]) -> tuple[list[_T], list[_T]]:
    """Those that the native functions serve, and the others."""
    ours = [item for item in items if serves(item)]
    if len(ours) == len(items):
        return ours, []
    return ours, [item for item in items if not serves(item)]


def _records(items: Sequence[Share] | Sequence[Update] | Sequence[Preview]) -> bytes:
    return b"".join([item.side.record for item in items])


def _pointers(tensors: Sequence[Tensor]) -> bytes:
    return array("Q", [tensor.data_ptr() for tensor in tensors]).tobytes()


def _address_of(flags: "array[int]") -> int:
    return flags.buffer_info()[0]


def _written(items: Sequence[Share] | Sequence[Update] | Sequence[Preview]) -> None:
    """Count the weights' versions, as torch does for its own writes: autograd refuses a backward pass
    through a weight that has changed since, and users' edits are told from ours."""
    torch.autograd.graph.increment_version([item.side.weight for item in items])
