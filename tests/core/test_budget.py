"""Bytes of host and device memory."""

from zenflow.core.budget import Split, device_need


def of_a_model(**arguments: int | None) -> float:
    """Device bytes for each parameter of a bf16 model of 100 M at k = 10%."""
    split = [Split(1000, 1000, 1, 100)] * 100
    interval = arguments.pop("update_interval", 4)
    assert interval is not None
    return device_need(split, [1000], 2, interval, **arguments).peak / 1e8


def test_streaming_leaves_little_more_than_weights_and_selected_state() -> None:
    # 2 weights, 1.2 state, 0.2 selected gradients, 1.6 in the update; 64 MiB and indices
    assert 5.0 <= of_a_model(streaming_bytes=1 << 20) < 5.1


def test_captured_at_step_what_is_gathered_takes_the_place_of_gradients() -> None:
    # + 2 gradients
    assert 7.0 <= of_a_model() < 7.1


def test_a_shorter_interval_needs_more_staging() -> None:
    parts = [device_need([Split(1000, 1000, 1, 0)] * 64, [], 2, s) for s in (1, 2, 4)]
    assert [round(part.staging / 64e6, 1) for part in parts] == [2.0, 1.0, 0.5]


def test_an_fp32_resident_is_its_own_master() -> None:
    assert device_need([], [100], 4, 4).state == 800
    assert device_need([], [100], 2, 4).state == 1200
