"""Selection equals a brute-force top-k, and equal scores choose equally."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.channels import ChannelMap
from zenflow.core.selection import channel_energy, next_interval, num_selected, select_channels


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data())
def test_top_k_with_ties_by_the_lower_index(scores: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(0, len(scores)))
    order = sorted(range(len(scores)), key=lambda c: (-scores[c], c))
    chosen = select_channels(torch.tensor(scores, dtype=torch.float32), num)
    assert chosen.tolist() == sorted(order[:num])


@given(st.integers(1, 5000), st.floats(0, 1))
def test_number_of_channels(num_channels: int, ratio: float) -> None:
    num = num_selected(num_channels, ratio)
    assert 0 <= num <= num_channels
    assert (num == 0) == (ratio == 0)
    assert num == 1 or abs(num - ratio * num_channels) <= 0.5


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0, 0), (1e-9, 1), (0.29, 29), (0.07, 7), (0.5, 50), (1, 100)]
)
def test_no_channel_is_lost_to_binary_fractions(ratio: float, expected: int) -> None:
    assert num_selected(100, ratio) == expected


@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4), (9000, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_energy_is_the_squared_norm_of_each_channel(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = grad.double().square().transpose(0, 1).flatten(1).sum(1)
    torch.testing.assert_close(channel_energy(grad).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("interval", "changed", "expected"),
    [(4, 0.0, 8), (64, 0.05, 64), (16, 0.2, 16), (16, 0.5, 8), (4, 1.0, 4), (4, 0.1, 4)],
)
def test_the_automatic_interval(interval: int, changed: float, expected: int) -> None:
    assert next_interval(interval, changed) == expected


@given(st.data(), st.integers(2, 40), st.booleans())
def test_a_handover_keeps_every_channel_on_exactly_one_side(
    data: st.DataObject, num_channels: int, compact: bool
) -> None:
    """Through many reselections, where each channel's state lies is never lost or doubled."""
    num = data.draw(st.integers(1, num_channels - 1))
    subsets = st.permutations(range(num_channels)).map(lambda p: torch.tensor(sorted(p[:num])))
    channels = ChannelMap.create(num_channels, data.draw(subsets), compact=compact)
    selected = channels.selected.clone()  # what each place of the two states holds
    hosted = channels.hosted.clone()
    for _ in range(4):
        chosen = data.draw(subsets)
        handover = channels.handover_to(chosen)
        if handover is None:
            assert set(chosen.tolist()) == set(channels.selected.tolist())
            continue
        incoming, outgoing = hosted[handover.host_from], selected[handover.places]
        assert incoming.tolist() == handover.incoming.tolist()
        assert outgoing.tolist() == handover.outgoing.tolist()
        hosted[handover.host_to], selected[handover.places] = outgoing, incoming
        channels = channels.after(handover)
        assert set(channels.selected.tolist()) == set(chosen.tolist())
        assert selected.tolist() == channels.selected.tolist()
        assert hosted.tolist() == channels.hosted.tolist()
        deferred = channels.hosted[channels.deferred_places()].tolist()
        assert deferred == sorted(set(range(num_channels)) - set(chosen.tolist()))
