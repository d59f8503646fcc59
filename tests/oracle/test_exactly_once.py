"""Each gradient element is applied exactly once, in order, with its own step's sub-step.

Gradient elements carry their step and their place as a number, and both sides log what they apply.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from links import use_platform
from torch import Tensor, nn

import zenflow
from zenflow.backends.device_kernel import TorchDeviceKernel
from zenflow.backends.host_kernel import HostKernel, HostState
from zenflow.core.rules import Coefficients, SubStep
from zenflow.kernels.native.selective import NativeSelective
from zenflow.kernels.selective import Update
from zenflow.runtime import device_ops
from zenflow.runtime.controller import RecordedInterval
from zenflow.runtime.pipeline import HostPipeline
from zenflow.runtime.slots import BufferPool

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((9, 8), (24,), (5, 6, 2, 2), (40, 12))
PLACES = 2**11
"""More than any parameter has elements; step * PLACES + place is exact in fp32."""
BOUND = 4
Applied = tuple[int, Coefficients | None]


class Log:
    """For each element, as (parameter, place): the steps whose gradient was applied to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.elements: dict[tuple[int, int], list[Applied]] = defaultdict(list)

    def add(self, grad: Tensor, coefficients: Coefficients | None) -> None:
        for number in grad.flatten().tolist():
            step, place = divmod(int(number), PLACES)
            param, place = divmod(place, PLACES // len(SHAPES))
            self.elements[param, place].append((step, coefficients))


LOG = Log()


class LoggingKernel:
    """Logs what each sweep applies. A window's mean cannot be told apart: there the slots count."""

    name = "logging"

    def __init__(self, kernel: HostKernel) -> None:
        self._kernel = kernel

    def sweep(
        self,
        state: HostState,
        grads: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
        *,
        mean: bool,
        delay: float,
        out: Tensor,
    ) -> None:
        with LOG.lock:
            for grad, c in zip(grads, coefficients, strict=True):
                LOG.add(grad, None if mean else c)
        self._kernel.sweep(state, grads, coefficients, mean=mean, delay=delay, out=out)

    def write(self, state: HostState, last: Coefficients, delay: float, out: Tensor) -> None:
        self._kernel.write(state, last, delay, out)


def log_device_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (TorchDeviceKernel, NativeSelective):
        monkeypatch.setattr(kernel, "update", _logged(kernel.update))


def _logged(update: Callable[..., None]) -> Callable[..., None]:
    def logged(self: Any, updates: Sequence[Update]) -> None:
        with LOG.lock:
            for u in updates:
                LOG.add(u.grad, u.coefficients)
        update(self, updates)

    return logged


def train(seed: int, num_steps: int, trace: list[int], config: dict[str, Any]) -> None:
    """Train, and compare the log with the gradients that were given."""
    LOG.elements.clear()
    choose = random.Random(seed)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = zenflow.ZenFlowAdamW(params, weight_decay=0.1, config=config)
    optimizer._running_engine().controller = RecordedInterval(list(enumerate(trace, 1)))
    counts = [0] * len(params)
    expected: dict[tuple[int, int], list[Applied]] = defaultdict(list)
    for step in range(1, num_steps + 1):
        lr = optimizer.param_groups[0]["lr"] = step * 1e-3
        given_grads = [index for index in range(len(params)) if choose.random() < 0.8]
        for index in given_grads:
            counts[index] += 1
            params[index].grad = numbered(params[index], index, step)
            c = SubStep(lr, 0.9, 0.999, 1e-8, 0.1, counts[index]).coefficients()
            for place in range(params[index].numel()):
                expected[index, place].append((step, c))
        if choose.random() < 0.15:
            for index in given_grads:  # a skipped step: its gradients are never applied
                params[index].grad.view(-1)[0] = float("nan")
                counts[index] -= 1
                for place in range(params[index].numel()):
                    expected[index, place].pop()
        optimizer.step()
        if choose.random() < 0.1:
            optimizer.synchronize()
    optimizer.close()
    # A parameter's steps are counted by applied steps, the log by the loop's: only the order matters.
    for element, applied in expected.items():
        logged = LOG.elements[element]
        assert [step for step, _ in logged] == [step for step, _ in applied], element
        assert all(c in (None, e) for (_, c), (_, e) in zip(logged, applied, strict=True)), element
    assert sum(map(len, LOG.elements.values())) == sum(map(len, expected.values()))


def numbered(param: Tensor, index: int, step: int) -> Tensor:
    """Each element's number. Energy must change sides, so which channels are largest alternates."""
    places = torch.arange(param.numel(), dtype=torch.float32)
    return (step * PLACES + index * (PLACES // len(SHAPES)) + places).reshape(param.shape)


def alternate_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbered gradients have a fixed order of energy; choose at random instead."""

    def score(grad: Tensor, kernel: Any, reduce: Any, chosen: Tensor, energies: None) -> None:
        generator = torch.Generator().manual_seed(int(grad.flatten()[0].item()))
        order = torch.randperm(grad.shape[1], generator=generator)
        chosen.copy_(order[: chosen.numel()].sort().values)

    monkeypatch.setattr(device_ops, "score", score)


runs = st.fixed_dictionaries(
    {
        "update_rule": st.sampled_from(["replay", "accumulate"]),
        "topk_ratio": st.sampled_from([0, 0.2, 0.5]),
        "select_interval": st.sampled_from([1, 2, 3]),
        "overlap_step": st.booleans(),
        "lookahead": st.booleans(),
        "host_threads": st.sampled_from([1, 3]),
        "full_warm_up_rounds": st.sampled_from([0, 0, 2]),
    }
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**20),
    trace=st.lists(st.integers(1, BOUND), min_size=1, max_size=24),
    config=runs,
)
def test_every_element_once_and_in_order(
    seed: int, trace: list[int], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        use_platform(patch, link=True, kernel=LoggingKernel)
        log_device_updates(patch)
        alternate_selection(patch)
        base = {"update_interval": "auto", "max_update_interval": BOUND}
        train(seed, len(trace), trace, base | config)


def drop_a_slot(patch: pytest.MonkeyPatch) -> None:
    start = HostPipeline.start_sweep

    def sweep(self: HostPipeline, segment: Any, delay: float) -> None:
        segment.waiting = segment.waiting[-2:]
        start(self, segment, delay)

    patch.setattr(HostPipeline, "start_sweep", sweep)


def repeat_a_slot(patch: pytest.MonkeyPatch) -> None:
    start = HostPipeline.start_sweep

    def sweep(self: HostPipeline, segment: Any, delay: float) -> None:
        twice = segment.waiting[:1]
        start(self, segment, delay)
        if len(segment.sweep.slots) > 2:
            segment.waiting = twice

    patch.setattr(HostPipeline, "start_sweep", sweep)
    patch.setattr(BufferPool, "release", lambda *_: None)


def newest_first(patch: pytest.MonkeyPatch) -> None:
    start = HostPipeline.start_sweep

    def sweep(self: HostPipeline, segment: Any, delay: float) -> None:
        segment.waiting.reverse()
        start(self, segment, delay)

    patch.setattr(HostPipeline, "start_sweep", sweep)


def the_last_rate_for_all(patch: pytest.MonkeyPatch) -> None:
    start = HostPipeline.start_sweep

    def sweep(self: HostPipeline, segment: Any, delay: float) -> None:
        segment.waiting = [s._replace(substep=segment.waiting[-1].substep) for s in segment.waiting]
        start(self, segment, delay)

    patch.setattr(HostPipeline, "start_sweep", sweep)


@pytest.mark.parametrize(
    "broken", [drop_a_slot, repeat_a_slot, newest_first, the_last_rate_for_all]
)
def test_the_log_notices(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_platform(monkeypatch, link=True, kernel=LoggingKernel)
    log_device_updates(monkeypatch)
    alternate_selection(monkeypatch)
    broken(monkeypatch)
    config = {"update_interval": "auto", "max_update_interval": BOUND, "topk_ratio": 0.2}
    with pytest.raises(AssertionError):
        train(0, 16, [BOUND] * 16, config)


@given(st.lists(st.integers(0, 9), max_size=80))
def test_the_pool_hands_out_each_buffer_to_one_at_a_time(actions: list[int]) -> None:
    """And holds no more than was once in use together."""
    pool = BufferPool(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    held: list[Tensor] = []
    most: dict[tuple[int, torch.dtype], int] = defaultdict(int)
    for action in actions:
        if action < 6 or not held:
            shape = torch.Size([(4, 6), (24,), (6, 4), (5, 5)][action % 4])
            dtype = (torch.float32, torch.bfloat16)[action % 2]
            held.append(pool.acquire(shape, dtype))
            assert held[-1].shape == shape and held[-1].dtype == dtype
            kinds = [(buffer.numel(), buffer.dtype) for buffer in held]
            most[kinds[-1]] = max(most[kinds[-1]], kinds.count(kinds[-1]))
        else:
            pool.release(held.pop(action % len(held)))
        assert len({buffer.data_ptr() for buffer in held}) == len(held)
    needed = sum(numel * dtype.itemsize * count for (numel, dtype), count in most.items())
    assert pool.allocated_bytes == needed
