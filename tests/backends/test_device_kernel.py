"""Which device kernel serves, and that it changes no bit of a run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from zenflow.backends.device_kernel import TorchDeviceKernel, device_kernel
from zenflow.backends.host_kernel import KERNEL_VARIABLE, NativeKernel, TorchKernel
from zenflow.kernels import native
from zenflow.kernels.native.selective import NativeSelective

pytestmark = pytest.mark.usefixtures("one_thread")

try:
    LIBRARY = native.load()
except native.NativeUnavailable:
    LIBRARY = None
NAMES = native.INSTRUCTION_SETS if LIBRARY is None else LIBRARY.usable

needs_library = pytest.mark.skipif(LIBRARY is None, reason="native kernel: unavailable")
each_isa = pytest.mark.parametrize("isa", NAMES)


def test_torch_serves_across_a_link_and_beside_the_torch_kernel():
    assert isinstance(device_kernel(TorchKernel(), shares_memory=True), TorchDeviceKernel)
    if LIBRARY is not None:
        host = NativeKernel(LIBRARY, LIBRARY.usable[0])
        assert isinstance(device_kernel(host, shares_memory=False), TorchDeviceKernel)
        assert isinstance(device_kernel(host, shares_memory=True), NativeSelective)


class Net(nn.Module):
    """A convolution, an odd width, residents, and a weight that takes turns at having no gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(7, 12, 3, padding=1)
        self.first = nn.Linear(12, 51)
        self.norm = nn.LayerNorm(51)
        self.second = nn.Linear(51, 40)
        self.sometimes = nn.Linear(40, 40)
        self.to(dtype)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.convolution(x).mean((2, 3))
        x = self.second(self.norm(self.first(x)))
        return self.sometimes(x) if step % 3 else x


def run(kernel: str, config: dict[str, Any], dtype: torch.dtype, mp: pytest.MonkeyPatch) -> Any:
    """Weights after each of some steps, among them skipped ones and edits through ``.data``."""
    mp.setenv(KERNEL_VARIABLE, kernel)
    model, seen = Net(dtype), []
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    for step in range(30):
        x = torch.randn(4, 7, 5, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(x, step).square().mean()
        if step in (5, 12):  # the gradients stay in .grad, also where they are streamed
            with optimizer.accumulate():
                (loss * (torch.inf if step == 12 else 1)).backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            for param in model.parameters():
                param.data.mul_(0.5)
        if step == 24:
            model.first.weight.data = model.first.weight.detach().clone()
        seen.append([param.detach().clone() for param in model.parameters()])
    name = type(optimizer._running_engine().platform.device_kernel).__name__
    optimizer.close()
    return name, seen


CONFIGS = {
    "overlapped": {"update_interval": 3, "topk_ratio": 0.2},
    "synchronous": {"update_interval": 1, "overlap_step": False},
    "clipped": {"update_interval": 2, "max_grad_norm": 0.1},
    "streaming": {"update_interval": 2, "stream_gradients": True, "topk_ratio": 0.3},
    "nothing selected": {"update_interval": 2, "topk_ratio": 0},
}


@needs_library
@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_it_changes_no_bit_of_a_run(
    isa: str, config: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CONFIGS[config] | {"select_interval": 4}
    ours, plain = (run(kernel, settings, dtype, monkeypatch) for kernel in (isa, "torch"))
    assert ours[0] == "NativeSelective"
    assert plain[0] == "TorchDeviceKernel"
    for step, (one, other) in enumerate(zip(ours[1], plain[1], strict=True)):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert torch.equal(a, b), (step, number)


@needs_library
def test_a_backward_pass_through_a_weight_written_since_is_refused() -> None:
    """As after any in-place write of torch's own."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config={"update_interval": 2})
    for _ in range(2):
        loss = model(torch.randn(3, 40)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()
