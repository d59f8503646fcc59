"""The native selective path equals torch's bit for bit, for each instruction set of this CPU."""

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from test_native import (
    DTYPES,
    GRADS,
    LIBRARY,
    STATES,
    assert_same_bits,
    each_isa,
    needs_library,
    substeps,
)
from torch import Tensor

from zenflow.core.channels import ChannelMap
from zenflow.core.selection import channel_energy
from zenflow.kernels import selective
from zenflow.kernels.native.selective import NativeSelective
from zenflow.kernels.selective import DeviceSide, Look, Preview, SelectedState, Share, Update

pytestmark = [needs_library, pytest.mark.usefixtures("one_thread")]

SHAPES = [
    *[(5, columns) for columns in (2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129)],
    (1, 64),
    (300, 20),
    (3, 4500),  # more lanes than are summed at a time
    (70, 260),
    (4, 6, 9),
    (3, 8, 4),
    (2, 70, 5),
    (1, 700, 3),
]
COUNTS = ("none", "one", "some", "all but one")
CANARY = 7.0


def random_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def strided(values: Tensor, gap: int) -> Tensor:
    """The same values in rows with ``gap`` canaries behind each."""
    rows = values.flatten(1)
    wide = torch.full((len(rows), rows.shape[1] + gap), CANARY, dtype=values.dtype)
    wide[:, : rows.shape[1]] = rows
    view = wide[:, : rows.shape[1]]
    return view if values.dim() == 2 else view.unflatten(1, values.shape[1:])


def canaries_live(weight: Tensor) -> bool:
    numel = weight[0].numel()
    whole = weight.as_strided((len(weight), weight.stride(0)), (weight.stride(0), 1))
    return bool((whole[:, numel:] == CANARY).all())


def make_side(shape: tuple[int, ...], dtype: torch.dtype, count: str, gap: int = 0) -> DeviceSide:
    """A segment's side with a weight that is its masters, rounded."""
    num = {"none": 0, "one": 1, "some": max(1, shape[1] // 5), "all but one": shape[1] - 1}[count]
    selected = torch.randperm(shape[1])[:num].sort().values
    weight = strided(random_of(shape, dtype), gap)
    channels = ChannelMap.create(shape[1], selected, compact=False)
    num_lanes = selective.lanes(weight).shape[1]
    side = DeviceSide(
        weight,
        fingerprint=torch.empty(num_lanes, dtype=torch.int64),
        deferred_lanes=channels.deferred_lanes(shape[2] if len(shape) > 2 else 1, num_lanes),
        factors=torch.rand(shape[0] + weight[0].numel()) * 2,
    )
    selective.fingerprint(weight, side.fingerprint)
    if not num:
        return side
    room = (shape[0], num, *shape[2:])
    numel = torch.Size(room).numel()
    return side._replace(
        channels=selected,
        state=SelectedState(*(values.view(room) for values in STATES["ordinary"](numel))),
        selected_grad=torch.full(room, CANARY, dtype=dtype),
        is_selected=channels.is_selected(torch.Size(shape[2:])),
    )


def copy_of(side: DeviceSide) -> DeviceSide:
    """The same values in other memory, the weight with the same strides."""
    weight = side.weight.as_strided((side.weight.stride(0) * len(side.weight),), (1,)).clone()
    return DeviceSide(
        weight.as_strided(side.weight.shape, side.weight.stride()),
        *(None if t is None else t.clone() for t in (side.channels,)),
        None if side.state is None else SelectedState(*(t.clone() for t in side.state)),
        *(None if t is None else t.clone() for t in side[3:-1]),
    )


def assert_same_sides(actual: DeviceSide, expected: DeviceSide) -> None:
    assert_same_bits(actual.weight, expected.weight)
    assert torch.equal(actual.fingerprint, expected.fingerprint)
    if expected.state is not None:
        assert_same_bits(actual.selected_grad, expected.selected_grad)
        for one, other in zip(actual.state, expected.state, strict=True):
            assert_same_bits(one, other)


def for_each_case(check: Callable[[DeviceSide, DeviceSide], None], isa: str) -> None:
    """A side of every shape, dtype, number of selected channels and stride, and its twin for torch."""
    torch.manual_seed(0)
    kernel = NativeSelective(LIBRARY, isa)
    for shape, dtype, count, gap in itertools.product(SHAPES, DTYPES, COUNTS, (0, 3, 8)):
        side = make_side(shape, dtype, count, gap)
        ours, theirs = kernel.prepared(copy_of(side)), copy_of(side)
        assert ours.record
        check(ours, theirs)
        assert_same_sides(ours, theirs)
        assert canaries_live(ours.weight)


@each_isa
def test_gathering(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)

    def check(ours: DeviceSide, theirs: DeviceSide) -> None:
        if ours.channels is not None:
            grad = random_of(ours.weight.shape, ours.weight.dtype)
            kernel.gather([Share(ours, grad)])
            selective.gather([Share(theirs, grad)])

    for_each_case(check, isa)


@each_isa
def test_updating(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)

    def check(ours: DeviceSide, theirs: DeviceSide) -> None:
        if ours.channels is not None:
            for coefficients in substeps(2):
                grad = random_of(ours.selected_grad.shape, ours.weight.dtype)
                version = ours.weight._version
                kernel.update([Update(ours, grad, coefficients)])
                selective.update([Update(theirs, grad, coefficients)])
                assert ours.weight._version > version

    for_each_case(check, isa)


@each_isa
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("values", GRADS)
def test_updating_with_extreme_values(isa: str, state: str, values: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)
    for dtype in DTYPES:
        side = make_side((40, 77), dtype, "some")
        numel = side.selected_grad.numel()
        given = (t.view_as(side.state.master) for t in STATES[state](numel))
        side = side._replace(state=SelectedState(*given))
        grad = GRADS[values](numel).view_as(side.state.master).to(dtype)
        ours, theirs = kernel.prepared(copy_of(side)), copy_of(side)
        kernel.update([Update(ours, grad, substeps(1)[0])])
        selective.update([Update(theirs, grad, substeps(1)[0])])
        assert_same_sides(ours, theirs)


@each_isa
def test_publishing(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)

    def check(ours: DeviceSide, theirs: DeviceSide) -> None:
        staged = random_of(ours.weight.shape, ours.weight.dtype)
        before = ours.weight.clone()
        version = ours.weight._version
        kernel.publish([Share(ours, staged)])
        selective.publish([Share(theirs, staged)])
        assert ours.weight._version > version
        expected = staged
        if ours.is_selected is not None:
            expected = torch.where(ours.is_selected, before, staged)
        assert_same_bits(ours.weight, expected)

    for_each_case(check, isa)


GRADIENTS = {
    "ordinary": lambda shape: torch.randn(shape),
    "huge": lambda shape: torch.randn(shape) * 3e38,
    "tiny": lambda shape: torch.randn(shape) * 1e-40,
}


@pytest.mark.parametrize("values", GRADIENTS)
@each_isa
def test_previewing(isa: str, values: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)

    def check(ours: DeviceSide, theirs: DeviceSide) -> None:
        grad = GRADIENTS[values](ours.weight.shape).to(ours.weight.dtype)
        grad = grad.nan_to_num()  # a step with others is skipped
        if ours.is_selected is not None:
            for side in (ours, theirs):
                selective.hide_selected(side)
        before = ours.weight.clone()
        kernel.preview([Preview(ours, grad, 0.37, 0.01)])
        selective.preview([Preview(theirs, grad, 0.37, 0.01)])
        assert (ours.weight - before).abs().max() <= 0.0301 + before.abs().max() / 64
        if ours.is_selected is not None:
            hidden = ours.is_selected.expand(ours.weight.shape)
            assert torch.equal(ours.weight[hidden], before[hidden])

    for_each_case(check, isa)


def look(**changes: object) -> Look:
    nothing = Look(norms=[], grads=[], exact=False, shares=[], watched=[], rounded=[])
    return nothing._replace(**changes)


def seen(kernel: object, what: Look) -> list[float]:
    out = torch.empty(len(what.norms) + len(what.grads) + 2)
    kernel.observe(what, out)
    return out.tolist()


@each_isa
def test_a_write_to_any_deferred_lane_is_found(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)

    def check(ours: DeviceSide, theirs: DeviceSide) -> None:
        assert seen(kernel, look(watched=[ours])) == [0.0, 0.0]
        places = selective.lanes(ours.weight)
        for lane in {0, places.shape[1] // 2, places.shape[1] - 1}:
            for row in {0, len(ours.weight) - 1}:
                places[row, lane] ^= 1
                found = seen(kernel, look(watched=[ours]))
                assert found == [float(ours.deferred_lanes[lane]), 0.0]
                assert found[0] == selective.num_changed([ours]).item()
                places[row, lane] ^= 1

    for_each_case(check, isa)


@each_isa
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_found_at_any_place(
    isa: str, exact: bool, dtype: torch.dtype, bad: float
) -> None:
    kernel = NativeSelective(LIBRARY, isa)
    for shape in SHAPES:
        side = kernel.prepared(make_side(shape, dtype, "some"))
        largest = torch.finfo(dtype).max
        grads = [random_of(shape, dtype), random_of(shape, dtype), random_of((7,), dtype)]
        if not exact:  # finite, although the norm is not
            grads[0][:] = largest
        shares = [Share(side, grads[1], 1)]
        numbers = seen(kernel, look(grads=grads, exact=exact, shares=shares))
        assert numbers[3:] == [0.0, 0.0]
        assert all(torch.tensor(numbers).isfinite())
        assert_same_bits(side.selected_grad, grads[1].index_select(1, side.channels))
        for number in range(3):
            flat = grads[number].view(-1)
            for place in {0, flat.numel() // 2, flat.numel() - 1}:
                kept = flat[place].clone()
                flat[place] = bad
                numbers = seen(kernel, look(grads=grads, exact=exact, shares=shares))
                finite = torch.tensor(numbers[:3]).isfinite().tolist()
                assert finite == [i != number for i in range(3)]
                flat[place] = kept


@each_isa
def test_exact_norms_are_torchs(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)
    grads = [random_of((40, 30), dtype) for dtype in DTYPES]
    norms = [torch.tensor(3.0), torch.tensor(torch.inf)]
    what = look(norms=norms, grads=grads, exact=True)
    expected = torch.empty(7)
    selective.observe(what, expected)
    assert seen(kernel, what) == expected.tolist()


@each_isa
@pytest.mark.parametrize("shape", [(), (1,), (17,), (33, 5), (4, 3, 3, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residents(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel = NativeSelective(LIBRARY, isa)
    numel = torch.Size(shape).numel()
    sides = []
    for _ in range(2):
        torch.manual_seed(1)
        state = SelectedState(*(t.view(shape) for t in STATES["ordinary"](numel)))
        weight = state.master if dtype == torch.float32 else state.master.to(dtype)
        sides.append(DeviceSide(weight, state=state))
    ours, theirs = kernel.prepared(sides[0]), sides[1]
    assert ours.record
    for coefficients in substeps(3):
        grad = random_of(shape, dtype)
        kernel.update([Update(ours, grad, coefficients)])
        selective.update([Update(theirs, grad, coefficients)])
        assert_same_bits(ours.weight, theirs.weight)
        for one, other in zip(ours.state, theirs.state, strict=True):
            assert_same_bits(one, other)
    if dtype != torch.float32:
        assert seen(kernel, look(rounded=[ours, ours])) == [0.0, 0.0]
        ours.weight.view(-1)[-1] += 1
        assert seen(kernel, look(rounded=[ours])) == [0.0, 1.0]


@each_isa
def test_what_it_cannot_serve_is_left_to_torch(isa: str) -> None:
    """Columns that are not adjacent, and gradients of another dtype than their weight."""
    kernel = NativeSelective(LIBRARY, isa)
    for transposed, grad_dtype in [(True, torch.bfloat16), (False, torch.float32)]:
        side = make_side((24, 40), torch.bfloat16, "some")
        if transposed:
            side = side._replace(weight=side.weight.t().contiguous().t())
            num_lanes = selective.lanes(side.weight).shape[1]
            side = side._replace(
                fingerprint=torch.zeros(num_lanes, dtype=torch.int64),
                deferred_lanes=~side.is_selected,
            )
            selective.fingerprint(side.weight, side.fingerprint)
        side = side._replace(selected_grad=side.selected_grad.to(grad_dtype))
        theirs = side._replace(
            weight=side.weight.clone(),
            state=SelectedState(*(t.clone() for t in side.state)),
            fingerprint=side.fingerprint.clone(),
        )
        ours = kernel.prepared(side)
        assert bool(ours.record) != transposed
        grad, staged = random_of((24, 40), grad_dtype), random_of((24, 40), torch.bfloat16)
        assert (
            seen(kernel, look(grads=[grad], watched=[ours], shares=[Share(ours, grad)]))
            == [0.0] * 3
        )
        assert_same_bits(ours.selected_grad, grad.index_select(1, ours.channels))
        for one, functions in ((ours, kernel), (theirs, selective)):
            functions.publish([Share(one, staged)])
            functions.update([Update(one, ours.selected_grad, substeps(1)[0])])
        assert_same_bits(ours.weight, theirs.weight)
        assert torch.equal(ours.fingerprint, theirs.fingerprint)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1), (4097, 1024), (257, 40, 9)])
def test_energies(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    grad = random_of(shape, dtype)
    energy = NativeSelective(LIBRARY, isa).energy(grad)
    assert_same_bits(energy, channel_energy(grad))


@each_isa
def test_an_empty_batch(isa: str) -> None:
    kernel = NativeSelective(LIBRARY, isa)
    assert seen(kernel, look()) == [0.0, 0.0]
    kernel.gather([])
    kernel.update([])
    kernel.publish([])


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_a_batch_is_shared_with_those_who_are_free(num_helpers: int) -> None:
    """Every item once, whoever comes; one who comes late finds nothing to do."""
    torch.manual_seed(0)
    isa = LIBRARY.usable[0]
    alone = NativeSelective(LIBRARY, isa)
    jobs: list[Callable[[], None]] = []
    threads: list[threading.Thread] = []

    def invite(job: Callable[[], None]) -> None:
        jobs.append(job)
        for _ in range(num_helpers):
            threads.append(threading.Thread(target=job))
            threads[-1].start()

    together = NativeSelective(LIBRARY, isa, invite)
    sides = [make_side((64, 96), torch.bfloat16, "some") for _ in range(40)]
    ours = [together.prepared(copy_of(side)) for side in sides]
    theirs = [alone.prepared(copy_of(side)) for side in sides]
    rows = [random_of(side.weight.shape, torch.bfloat16) for side in sides]
    (coefficients,) = substeps(1)
    for kernel, own in ((together, ours), (alone, theirs)):
        kernel.publish([Share(side, new) for side, new in zip(own, rows, strict=True)])
        kernel.gather([Share(side, grad) for side, grad in zip(own, rows, strict=True)])
        kernel.update([Update(side, side.selected_grad, coefficients) for side in own])
        changed = own[3].weight[:, ~own[3].is_selected]
        own[3].weight[:, ~own[3].is_selected] = changed + 1
    watched = seen(together, look(watched=ours))
    assert watched == seen(alone, look(watched=theirs))
    assert watched[0] > 0
    for job in jobs:
        job()
    for thread in threads:
        thread.join()
    for one, other in zip(ours, theirs, strict=True):
        assert_same_sides(one, other)
    assert len(jobs) == 4


def test_nobody_is_called_for_a_few_items() -> None:
    def invite(job: Callable[[], None]) -> None:
        raise AssertionError("called")

    kernel = NativeSelective(LIBRARY, LIBRARY.usable[0], invite)
    side = kernel.prepared(make_side((24, 40), torch.bfloat16, "some"))
    kernel.publish([Share(side, random_of((24, 40), torch.bfloat16))])
