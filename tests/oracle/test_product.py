"""The runtime equals the oracle, bit for bit, in every configuration."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from runs import AXES, PRODUCT, Run, compare

from zenflow.core import rules, schedule, selection
from zenflow.kernels import reference, selective
from zenflow.kernels.selective import Share

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SAMPLES = 260


def sample() -> list[int]:
    """Points of the product in which every two values of different axes meet."""
    return sorted(random.Random(0).sample(range(len(PRODUCT)), NUM_SAMPLES))


def test_the_sample_has_every_pair_of_values() -> None:
    points = [PRODUCT[number] for number in sample()]
    axes = list(AXES.values())
    for i in range(len(axes)):
        for j in range(i):
            met = {(repr(point[i]), repr(point[j])) for point in points}
            assert len(met) == len(axes[i]) * len(axes[j])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-product")
        metafunc.parametrize("number", range(len(PRODUCT)) if full else sample())


@pytest.mark.covers("hyperparameters of each group", "parameters without a gradient", "shapes")
def test_bits(number: int) -> None:
    compare(Run.at(number))


def test_the_sample_has_skipped_steps() -> None:
    assert compare_all(sample()[:40]) > 5


def compare_all(numbers: list[int]) -> int:
    return sum(compare(Run.at(number)) for number in numbers)


def later_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    is_due = schedule.is_due
    monkeypatch.setattr(schedule, "is_due", lambda t, *rest: is_due(t - 1, *rest))


def shorter_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "lookahead_steps", lambda s, overlap: s / 2)


def other_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewest_first(energy: torch.Tensor, num: int) -> torch.Tensor:
        return torch.sort(energy).indices[:num].sort().values

    monkeypatch.setattr(selection, "select_channels", fewest_first)
    monkeypatch.setattr("zenflow.runtime.device_ops.select_channels", fewest_first)


def newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = reference.sweep

    def reversed_sweep(p, m, v, grads, coefficients, **rest):
        sweep(p, m, v, list(reversed(grads)), coefficients, **rest)

    monkeypatch.setattr(reference, "sweep", reversed_sweep)


def count_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    coefficients = rules.SubStep.coefficients
    monkeypatch.setattr(
        rules.SubStep, "coefficients", lambda s: coefficients(s._replace(step=s.step + 1))
    )


def selection_is_published_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(shares: Sequence[Share]) -> None:
        for side, rows, _ in shares:
            side.weight.copy_(rows)

    monkeypatch.setattr(selective, "publish", publish)


def no_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "preview", lambda shown: None)


def factors_are_never_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenflow.core.preview.refresh_is_due", lambda _, known_at: not known_at)


def selected_channels_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where a channel that was selected is deferred before its factor is taken again."""
    monkeypatch.setattr(selective, "hide_selected", lambda side: None)


MUTATIONS = [
    no_preview,
    factors_are_never_taken_again,
    selected_channels_are_shown,
    later_publish,
    shorter_lookahead,
    other_ties,
    newest_first,
    count_off_by_one,
    selection_is_published_over,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_broken_rule_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENFLOW_KERNEL", "torch")
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        compare_all(sample()[:60])
