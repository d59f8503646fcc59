"""ZenFlow learns like AdamW, and this test would notice if it did not.

The figures behind the bounds are means of two seeds at S=4, held-out loss above AdamW's, on two makes of
CPU. They differ by CPU, as rounding does, so each fault is looked for where it stands out most.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from broken import BROKEN
from small import gap

import zenflow

CONFIG = {"update_interval": 4, "select_interval": 4, "host_threads": 1}


class Setting(NamedTuple):
    lr: float
    topk_ratio: float
    bound: float
    """Of a sound optimizer's loss above AdamW's; a broken one's is at least 1.3 times as large."""


SETTINGS = {
    # Too few or too small updates show.
    "low lr": Setting(5e-4, 0.1, bound=0.07),
    # Too large or too late updates show.
    "high lr": Setting(3e-3, 0.1, bound=0.085),
    # What is lost when channels change sides shows.
    "many handovers": Setting(3e-3, 0.3, bound=0.06),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def gap_in(setting: Setting, make_optimizer: Callable[..., Any]) -> float:
    config = CONFIG | {"topk_ratio": setting.topk_ratio}
    return gap(functools.partial(make_optimizer, config=config), setting.lr)


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_learns_like_adamw(setting: str) -> None:
    assert gap_in(SETTINGS[setting], zenflow.ZenFlowAdamW) < SETTINGS[setting].bound


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rule_is_noticed(fault: str) -> None:
    setting, make_optimizer = BROKEN[fault]
    assert gap_in(SETTINGS[setting], make_optimizer) > 1.3 * SETTINGS[setting].bound
