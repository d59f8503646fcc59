"""The edges of selection: thresholds, overflow, ties at infinity, energy taken block by block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core import selection


@pytest.mark.parametrize(
    ("interval", "changed", "expected"),
    [
        (8, 0.0, 16),
        (8, 0.0999, 16),
        (8, 0.1, 8),
        (8, 0.3, 8),
        (8, 0.3001, 4),
        (8, 1.0, 4),
        (40, 0.0, 64),
        (64, 0.0999, 64),
        (64, 0.3001, 32),
        (4, 0.3001, 4),
        (5, 1.0, 4),
    ],
)
def test_thresholds_of_the_automatic_interval(interval: int, changed: float, expected: int) -> None:
    assert selection.next_interval(interval, changed) == expected


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.4e38, float("inf")]), min_size=1, max_size=60),
    st.data(),
)
def test_ties_at_the_ends_of_the_range(energy: list[float], data: st.DataObject) -> None:
    """Energies may overflow where no gradient element does."""
    num = data.draw(st.integers(0, len(energy)))
    best = sorted(range(len(energy)), key=lambda c: (-energy[c], c))[:num]
    assert selection.select_channels(torch.tensor(energy), num).tolist() == sorted(best)


def test_energy_is_taken_in_fp32() -> None:
    """300 squared is past fp16's largest number; bf16 would stop counting ones at 256."""
    assert selection.channel_energy(torch.full((4, 2), 300.0).half()).tolist() == [360_000.0] * 2
    assert selection.channel_energy(torch.ones(1000, 1).bfloat16()).tolist() == [1000.0]
    small = torch.full((4, 2), 1e-4).half()
    assert (selection.channel_energy(small) > 0).all()  # squared in fp16 it would vanish


@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (64, 1), (6, 5, 4)])
@pytest.mark.parametrize("block_numel", [1, 11, 1 << 22])
def test_energy_does_not_depend_on_the_size_of_blocks(
    shape: tuple[int, ...], block_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(selection, "ENERGY_BLOCK_NUMEL", block_numel)
    expected = grad.double().square().transpose(0, 1).reshape(shape[1], -1).sum(1)
    torch.testing.assert_close(selection.channel_energy(grad).double(), expected, rtol=1e-6, atol=0)
