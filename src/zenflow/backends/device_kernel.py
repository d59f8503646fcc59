"""The device kernel: what one step does to whole tensors on the device."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from zenflow.backends.host_kernel import HostKernel, NativeKernel
from zenflow.core.selection import channel_energy
from zenflow.kernels import selective
from zenflow.kernels.native.selective import NativeSelective
from zenflow.kernels.selective import DeviceSide, Look, Preview, Share, Update


class DeviceKernel(Protocol):
    """One method for each part of a step, so that each is one call and one pass over memory however
    many tensors there are; and one that prepares what all of them are given.

    All but :meth:`prepared` are device work and go through ``Device.run``. Where the device's memory is
    the host's, ``kernels.native.selective.NativeSelective`` serves: compiled, with the same bits.
    """

    def prepared(self, side: DeviceSide) -> DeviceSide:
        """The side with a record of what the other methods need of it."""
        ...

    def observe(self, look: Look, out: Tensor) -> None:
        """See :func:`zenflow.kernels.selective.observe`."""
        ...

    def gather(self, shares: Sequence[Share]) -> None:
        """See :func:`zenflow.kernels.selective.gather`."""
        ...

    def update(self, updates: Sequence[Update]) -> None:
        """See :func:`zenflow.kernels.selective.update`."""
        ...

    def publish(self, shares: Sequence[Share]) -> None:
        """See :func:`zenflow.kernels.selective.publish`."""
        ...

    def preview(self, shown: Sequence[Preview]) -> None:
        """See :func:`zenflow.kernels.selective.preview`."""
        ...

    def energy(self, grad: Tensor) -> Tensor:
        """See :func:`zenflow.core.selection.channel_energy`."""
        ...


class TorchDeviceKernel:
    """Plain torch operations: any device."""

    def prepared(self, side: DeviceSide) -> DeviceSide:
        return side

    def observe(self, look: Look, out: Tensor) -> None:
        selective.observe(look, out)

    def gather(self, shares: Sequence[Share]) -> None:
        selective.gather(shares)

    def update(self, updates: Sequence[Update]) -> None:
        selective.update(updates)

    def publish(self, shares: Sequence[Share]) -> None:
        selective.publish(shares)

    def preview(self, shown: Sequence[Preview]) -> None:
        selective.preview(shown)

    def energy(self, grad: Tensor) -> Tensor:
        return channel_energy(grad)


def device_kernel(
    host_kernel: HostKernel,
    *,
    shares_memory: bool,
    invite: Callable[[Callable[[], None]], None] | None = None,
) -> DeviceKernel:
    """The kernel for a device, with the instruction set of the host's kernel where it is the host.

    Args:
        invite: gives a job to each host thread that may help where the device is the host.
    """
    if shares_memory and isinstance(host_kernel, NativeKernel):
        return NativeSelective(host_kernel.library, host_kernel.name, invite)
    return TorchDeviceKernel()
