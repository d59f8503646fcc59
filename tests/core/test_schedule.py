"""Each gradient is swept once, in time, and each step sweeps its share."""

from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.schedule import is_due, lookahead_steps, max_staleness, phases
from zenflow.core.segments import BLOCKS_PER_TABLE, MIN_BLOCK_NUMEL, plan_segments

numels = st.lists(st.integers(1, 10**6), min_size=1, max_size=80)


@given(numels, st.integers(1, 9))
def test_each_segment_is_due_once_in_an_interval(sizes: list[int], interval: int) -> None:
    for phase in phases(sizes, interval):
        assert 0 <= phase < interval
        due = [t for t in range(100, 100 + interval) if is_due(t, phase, interval, t, interval)]
        assert len(due) == 1 or interval == 1


@given(st.lists(st.integers(900, 1000), min_size=40, max_size=200), st.integers(1, 8))
def test_each_step_sweeps_its_share(sizes: list[int], interval: int) -> None:
    share = sum(sizes) / interval
    for step in range(interval):
        assigned = zip(sizes, phases(sizes, interval), strict=True)
        swept = sum(numel for numel, phase in assigned if phase == step)
        assert abs(swept - share) <= max(sizes)


@given(st.lists(st.integers(1, 6), min_size=30, max_size=120), numels, st.integers(0, 79))
def test_staleness_is_bounded_while_the_interval_changes(
    trace: list[int], sizes: list[int], which: int
) -> None:
    """As an automatic interval does: any trace within the bound."""
    bound, which = 6, which % len(sizes)
    waiting: list[int] = []
    applied: list[int] = []
    for t, interval in enumerate(trace, 1):
        waiting.append(t)
        if is_due(t, phases(sizes, interval)[which], interval, waiting[0], bound):
            applied += waiting
            waiting = []
        visible_lag = t - (waiting[0] if waiting else applied[-1]) + 1
        assert visible_lag <= max_staleness(bound, overlap=True)
    assert applied == list(range(1, len(applied) + 1))


@given(st.integers(1, 12))
def test_lookahead_is_the_mean_of_what_is_missing(interval: int) -> None:
    missing = list(range(1, interval + 1))
    assert lookahead_steps(interval, overlap=True) == sum(missing) / interval
    assert lookahead_steps(interval, overlap=False) == sum(range(interval)) / interval
    assert max_staleness(interval, overlap=True) == max(missing)
    assert max_staleness(interval, overlap=False) == interval - 1


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=12))
def test_row_blocks_cover_each_weight_once_and_in_order(shapes: list[tuple[int, int]]) -> None:
    table = plan_segments(shapes)
    largest = max(MIN_BLOCK_NUMEL, sum(r * n for r, n in shapes) // BLOCKS_PER_TABLE)
    assert [block.weight for block in table] == sorted(block.weight for block in table)
    for weight, (rows, row_numel) in enumerate(shapes):
        blocks = [block for block in table if block.weight == weight]
        covered = [row for block in blocks for row in range(block.start, block.stop)]
        assert covered == list(range(rows))
        for block in blocks:
            assert block.numel == (block.stop - block.start) * row_numel
            assert block.numel <= max(largest, row_numel) or block.stop - block.start == 1
