"""ZenFlow learns like AdamW, and this test would notice if it did not.

The figures behind the bounds are means of two seeds at S=4, held-out loss above AdamW's. Sound: 0.025 at
the low and 0.037 at the high learning rate. Broken: at least 0.139 at one of the two.
"""

import functools

import pytest
from broken import BROKEN
from small import HIGH_LR, LOW_LR, gap

import zenflow

BOUND = {LOW_LR: 0.07, HIGH_LR: 0.085}
CONFIG = {"update_interval": 4, "select_interval": 4, "host_threads": 1}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("lr", [LOW_LR, HIGH_LR])
def test_it_learns_like_adamw(lr):
    assert gap(functools.partial(zenflow.ZenFlowAdamW, config=CONFIG), lr) < BOUND[lr]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rule_is_noticed(fault):
    lr, make_optimizer = BROKEN[fault]
    assert gap(functools.partial(make_optimizer, config=CONFIG), lr) > 1.3 * BOUND[lr]
