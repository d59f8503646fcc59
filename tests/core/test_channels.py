"""How a parameter is seen, which are split, and that a handover moves no more than it must."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.channels import ChannelMap, channel_view, is_split


@given(st.data(), st.integers(2, 24), st.booleans())
def test_only_what_changes_sides_moves(
    data: st.DataObject, num_channels: int, compact: bool
) -> None:
    k = data.draw(st.integers(1, num_channels - 1))
    subsets = st.permutations(range(num_channels)).map(lambda p: set(p[:k]))
    before, after = data.draw(subsets), data.draw(subsets)
    channels = ChannelMap.create(num_channels, torch.tensor(sorted(before)), compact=compact)
    handover = channels.handover_to(torch.tensor(sorted(after)))
    assert (handover is None) == (before == after)
    if handover is not None:
        assert set(handover.incoming.tolist()) == after - before
        assert set(handover.outgoing.tolist()) == before - after


@pytest.mark.parametrize(
    ("shape", "ratio", "split"),
    [
        ((), 0, False),
        ((0,), 0, False),
        ((4096,), 0, False),
        ((0, 64), 0, False),
        ((64, 0), 0.5, False),
        ((7, 9), 0, False),
        ((8, 8), 0, True),
        ((8, 8), 1, False),
        ((8, 8), 0.95, False),
        ((64, 1), 0.01, False),
        ((64, 1), 0, True),
        ((1, 64), 0.5, True),
        ((6, 12, 3, 3), 0.1, True),
        ((5, 9, 4), 0.1, True),
    ],
)
def test_kinds(shape: tuple[int, ...], ratio: float, split: bool) -> None:
    assert is_split(torch.zeros(shape), ratio) == split


def test_strides_without_a_view_are_not_split() -> None:
    conv = torch.zeros(8, 12, 3, 5)
    assert is_split(conv.to(memory_format=torch.channels_last), 0.1)
    assert not is_split(conv.transpose(2, 3), 0.1)
    assert is_split(conv.transpose(0, 1), 0.1)
    assert is_split(torch.zeros(40, 24).t(), 0.1)


def test_a_conv_channel_is_its_input_channel() -> None:
    conv = torch.arange(8 * 12 * 3 * 3).reshape(8, 12, 3, 3)
    view = channel_view(conv)
    assert view.shape == (8, 12, 9)
    assert torch.equal(view[:, 5].reshape(8, 3, 3), conv[:, 5])
    assert view.data_ptr() == conv.data_ptr()
