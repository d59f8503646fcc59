"""The native kernel equals the reference bit for bit, for each instruction set of this CPU."""

import itertools
import threading

import pytest
import torch

from zenflow.core.rules import SubStep
from zenflow.kernels import native, reference

try:
    LIBRARY, WHY_NOT = native.load(), ""
except native.NativeUnavailable as error:
    LIBRARY, WHY_NOT = None, str(error)
NAMES = native.INSTRUCTION_SETS if LIBRARY is None else LIBRARY.usable

needs_library = pytest.mark.skipif(LIBRARY is None, reason=f"native kernel: {WHY_NOT}")
each_isa = pytest.mark.parametrize("isa", NAMES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CANARY = 7.0


def substeps(count, **changes):
    """Coefficients that differ in every field; some gradients are scaled and some are not."""
    steps = [
        SubStep(1e-3 * (1 + i), 0.9 - 0.01 * i, 0.99 + 0.001 * i, 1e-8, 0.1 * i, i + 3, scale)
        for i, scale in zip(range(count), itertools.cycle([1.0, 0.37, 1.0, 1024.0]))
    ]
    return [step._replace(**changes).coefficients() for step in steps]


def random_bits(numel):
    """Every fp32 pattern is as likely: all exponents, denormals, infinities, NaN, both signs."""
    return (
        torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


def scaled(scale):
    def values(numel):
        return torch.randn(numel) * scale, torch.randn(numel) * scale, torch.rand(numel) * scale**2

    return values


STATES = {
    "ordinary": lambda n: (torch.randn(n), torch.randn(n) * 1e-3, torch.rand(n) * 1e-6),
    "tiny": scaled(1e-17),
    "huge": scaled(1e18),
    "denormal": lambda n: tuple(torch.rand(n) * 1e-39 for _ in range(3)),
    "zero": lambda n: (torch.randn(n).sign() * 0.0, torch.randn(n).sign() * 0.0, torch.zeros(n)),
    "any bits": lambda n: tuple(random_bits(n) for _ in range(3)),
}
GRADS = {
    "ordinary": lambda n: torch.randn(n) * 1e-2,
    "tiny": lambda n: torch.randn(n) * 1e-17,
    "huge": lambda n: torch.randn(n) * 1e18,
    "denormal": lambda n: torch.randn(n) * 1e-39,
    "zero": lambda n: torch.randn(n).sign() * 0.0,
    "any bits": random_bits,
}


def placed(values, offset=0, dtype=None):
    """A copy ``offset`` elements into a buffer that is full of canaries."""
    whole = torch.full((offset + values.numel() + 40,), CANARY, dtype=dtype or values.dtype)
    whole[offset : offset + values.numel()] = values
    return whole, whole[offset : offset + values.numel()]


def assert_same_bits(actual, expected):
    """Equal bits; any NaN equals any other."""
    integers = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    same = actual.view(integers) == expected.view(integers)
    assert bool((same | (actual.isnan() & expected.isnan())).all())


def check(isa, state, grads, coefficients, *, mean=False, delay=0.0, dtype=torch.float32, offset=0):
    """One sweep by both kernels."""
    wholes, ours = zip(*(placed(t, offset) for t in state), strict=True)
    whole_out, out = placed(torch.zeros(state[0].numel()), offset, dtype)
    theirs = [t.clone() for t in state]
    expected = torch.empty_like(out)
    placed_grads = [placed(grad, offset)[1] for grad in grads]
    if grads:
        reference.sweep(*theirs, grads, coefficients, mean=mean, delay=delay, out=expected)
    else:
        reference.write(*theirs, coefficients[0], delay, expected)
    LIBRARY.sweep(isa, ours, placed_grads, coefficients, mean=mean, delay=delay, out=out)
    for actual, wanted in zip((*ours, out), (*theirs, expected), strict=True):
        assert_same_bits(actual, wanted)
    for whole in (*wholes, whole_out):
        assert bool((whole[:offset] == CANARY).all())
        assert bool((whole[offset + out.numel() :] == CANARY).all())


@pytest.mark.covers("fast on the host")
@needs_library
@each_isa
@pytest.mark.parametrize(("grad_dtype", "dtype"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize("mean", [False, True], ids=["replay", "accumulate"])
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_equals_the_reference(isa, grad_dtype, dtype, mean, num_slots):
    torch.manual_seed(num_slots)
    for delay in (0.0, 2.5):
        grads = [GRADS["ordinary"](211).to(grad_dtype) for _ in range(num_slots)]
        state = STATES["ordinary"](211)
        check(isa, state, grads, substeps(num_slots), mean=mean, delay=delay, dtype=dtype)


@needs_library
@each_isa
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("grad", GRADS)
def test_equals_the_reference_for_extreme_values(isa, state, grad):
    torch.manual_seed(0)
    for mean, delay, dtype in itertools.product((False, True), (0.0, 2.5), DTYPES):
        grads = [GRADS[grad](20_011).to(dtype) for _ in range(3)]
        check(isa, STATES[state](20_011), grads, substeps(3), mean=mean, delay=delay, dtype=dtype)


@needs_library
@each_isa
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1.0])
def test_equals_the_reference_for_any_eps(isa, eps):
    for name in STATES:
        check(isa, STATES[name](5000), [GRADS[name](5000)] * 2, substeps(2, eps=eps), delay=1.0)


CHUNK = reference.CHUNK_NUMEL


@needs_library
@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference_at_any_length_and_alignment(isa, dtype):
    torch.manual_seed(0)
    lengths = [*range(1, 70), 511, 512, 513, 527, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17]
    for numel, offset in itertools.product(lengths, (0, 1, 5, 16)):
        grads = [GRADS["ordinary"](numel).to(dtype) for _ in range(2)]
        state = STATES["ordinary"](numel)
        check(isa, state, grads, substeps(2), delay=1.5, dtype=dtype, offset=offset)


@needs_library
@each_isa
def test_an_empty_segment(isa):
    check(isa, [torch.zeros(0)] * 3, [torch.zeros(0)], substeps(1))


@needs_library
@each_isa
def test_a_matrix_and_slots_of_different_dtypes(isa):
    state = [t.view(30, 7) for t in STATES["ordinary"](210)]
    grads = [GRADS["ordinary"](210).view(30, 7).to(dtype) for dtype in DTYPES]
    ours, theirs = [t.clone() for t in state], [t.clone() for t in state]
    out, expected = torch.empty(30, 7), torch.empty(30, 7)
    LIBRARY.sweep(isa, ours, grads, substeps(3), mean=False, delay=0, out=out)
    reference.sweep(*theirs, grads, substeps(3), mean=False, delay=0, out=expected)
    for actual, wanted in zip((*ours, out), (*theirs, expected), strict=True):
        assert_same_bits(actual, wanted)


@needs_library
@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state", STATES)
def test_only_writing_equals_the_reference_and_leaves_the_state(isa, dtype, state):
    torch.manual_seed(0)
    for delay in (0.0, 2.5):
        check(isa, STATES[state](20_011), [], substeps(1), delay=delay, dtype=dtype)


@needs_library
@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(isa, dtype):
    grads = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    takes_it = substeps(1)[0]._replace(beta1=0.0, one_minus_beta1=1.0)
    state = [torch.zeros(1 << 16) for _ in range(3)]
    out = torch.empty(1 << 16)
    LIBRARY.sweep(isa, state, [grads], [takes_it], mean=False, delay=0, out=out)
    expected = grads.float()
    assert_same_bits(state[1], torch.where(expected == 0, 0.0, expected))


@needs_library
@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_as_torch_rounds_them(isa, dtype):
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    middles = (halves.double() + halves.double().roll(1)) / 2  # of neighbours, among others
    points = torch.cat([halves, middles.float(), random_bits(1 << 18)]).view(torch.int32)
    for shift in (-1, 0, 1):
        weights = (points + shift).view(torch.float32)
        check(isa, [weights, weights, weights], [], substeps(1), dtype=dtype)


@needs_library
@each_isa
def test_threads_on_disjoint_segments_do_not_disturb_each_other(isa):
    torch.manual_seed(0)
    numel, num_threads = 50_021, 4
    state = [t.repeat(num_threads) for t in STATES["ordinary"](numel)]
    grads = [GRADS["ordinary"](numel).bfloat16().repeat(num_threads) for _ in range(4)]
    out = torch.empty(numel * num_threads, dtype=torch.bfloat16)

    def sweep(segment):
        part = slice(segment * numel, (segment + 1) * numel)
        for _ in range(10):
            LIBRARY.sweep(
                isa,
                [t[part] for t in state],
                [grad[part] for grad in grads],
                substeps(4),
                mean=False,
                delay=2.5,
                out=out[part],
            )

    threads = [threading.Thread(target=sweep, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for whole in (*state, out):
        first, *others = whole.split(numel)
        for other in others:
            assert_same_bits(other, first)
