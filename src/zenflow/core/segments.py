"""The segment table: weights cut into row blocks, so that host work can be spread evenly over
steps."""

from collections.abc import Sequence
from typing import NamedTuple

MIN_BLOCK_NUMEL = 1 << 16
BLOCKS_PER_TABLE = 64


class RowBlock(NamedTuple):
    """Rows ``start`` to ``stop`` of the weight at position ``weight`` of the table."""

    weight: int
    start: int
    stop: int
    numel: int


def plan_segments(shapes: Sequence[tuple[int, int]]) -> list[RowBlock]:
    """Row blocks of each weight, in order.

    Blocks are small against the model, so that each step can sweep an equal share, and large
    against what a block costs in overhead.

    Args:
        shapes: rows and elements per row of each weight, both at least 1.
    """
    total = sum(rows * row_numel for rows, row_numel in shapes)
    block_numel = max(MIN_BLOCK_NUMEL, total // BLOCKS_PER_TABLE)
    table = []
    for weight, (rows, row_numel) in enumerate(shapes):
        num_blocks = -(-rows // max(1, block_numel // row_numel))
        block_rows = -(-rows // num_blocks)
        for start in range(0, rows, block_rows):
            stop = min(rows, start + block_rows)
            table.append(RowBlock(weight, start, stop, (stop - start) * row_numel))
    return table
