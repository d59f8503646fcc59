"""The arithmetic that every other kernel is compared with."""

import subprocess
import sys

import pytest
import torch

from zenflow.core.rules import SubStep
from zenflow.kernels import reference


@pytest.mark.parametrize("first_bits", [0, 0x00800000, 0x3F000000, 0x3F800000, 0x7F000000])
def test_square_roots_are_correctly_rounded(first_bits):
    # torch's own fp32 root of 0x3f000010, among others, is one ulp too low where MKL computes it.
    values = torch.arange(first_bits, first_bits + (1 << 20), dtype=torch.int32).view(torch.float32)
    (roots,) = reference._sqrt([values])
    below = torch.nextafter(roots, torch.tensor(0.0)).double()
    above = torch.nextafter(roots, torch.tensor(torch.inf)).double()
    # Middles of neighbours have 25 bits and their squares 50: exact in fp64.
    assert bool((((roots.double() + below) / 2) ** 2 <= values.double()).all())
    assert bool((((roots.double() + above) / 2) ** 2 >= values.double()).all())


def test_one_element_has_the_bits_that_it_has_among_many():
    torch.manual_seed(0)
    numel = 2 * reference.CHUNK_NUMEL + 3
    coefficients = [SubStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 5).coefficients()]
    state = [torch.randn(numel), torch.randn(numel) * 1e-3, torch.rand(numel) * 1e-6]
    grad, out = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    alone = [
        [t[i : i + 1].clone() for t in (*state, grad, out)] for i in (0, 17, 32_000, numel - 1)
    ]
    reference.sweep(*state, [grad], coefficients, mean=False, delay=1.0, out=out)
    for i, (p, m, v, g, w) in zip((0, 17, 32_000, numel - 1), alone, strict=True):
        reference.sweep(p, m, v, [g], coefficients, mean=False, delay=1.0, out=w)
        assert [t.item() for t in (p, m, v, w)] == [t[i].item() for t in (*state, out)]


WORKER = """
import os, threading, torch
from zenflow.core.rules import SubStep
from zenflow.kernels import reference

torch.set_num_threads(4)
state = [torch.rand(2 * reference.CHUNK_NUMEL) for _ in range(4)]
coefficients = [SubStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 5).coefficients()]
num_threads = []

def work():
    for _ in range(2):
        num_threads.append(len(os.listdir("/proc/self/task")))
        reference.sweep(*state[:3], [state[3]], coefficients, mean=False, delay=1, out=state[3])

worker = threading.Thread(target=work)
worker.start()
worker.join()
assert num_threads[0] == num_threads[1], num_threads
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_sweep_opens_no_thread_pool_in_a_worker():
    subprocess.run([sys.executable, "-c", WORKER], check=True, timeout=120)
