"""The shape of the segment table: even blocks, and few of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow.core.segments import BLOCKS_PER_TABLE, plan_segments

shapes = st.tuples(st.integers(1, 5000), st.integers(1, 200_000))
tables = st.lists(shapes, max_size=12)


@given(tables)
def test_blocks_of_a_weight_are_equal_but_for_the_last(table: list[tuple[int, int]]) -> None:
    blocks = plan_segments(table)
    for weight in range(len(table)):
        heights = [b.stop - b.start for b in blocks if b.weight == weight]
        assert len(set(heights[:-1])) <= 1
        assert heights[-1] <= heights[0]


@given(tables)
def test_blocks_are_few(table: list[tuple[int, int]]) -> None:
    """Overhead goes with their number: two for a share of the table, and one for each weight."""
    assert len([b for b in plan_segments(table) if b.stop - b.start > 1]) <= (
        2 * BLOCKS_PER_TABLE + len(table)
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([], []),
        ([(1, 1)], [(0, 0, 1)]),
        ([(512, 128)], [(0, 0, 512)]),
        ([(513, 128)], [(0, 0, 257), (0, 257, 513)]),
        ([(3, 100_000)], [(0, 0, 1), (0, 1, 2), (0, 2, 3)]),
        ([(4, 40_000)], [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4)]),  # by rows, not number
        ([(10, 8), (700, 200)], [(0, 0, 10), (1, 0, 234), (1, 234, 468), (1, 468, 700)]),
    ],
)
def test_examples(table: list[tuple[int, int]], expected: list[tuple[int, int, int]]) -> None:
    assert [(b.weight, b.start, b.stop) for b in plan_segments(table)] == expected
