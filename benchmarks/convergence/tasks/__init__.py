"""What is learned: each task gives models, batches, a loss and held-out figures."""

from pathlib import Path

from benchmarks.convergence.tasks.base import Task


def make_task(name: str, cache: Path) -> Task:
    """The task of that letter. Slow imports happen here, not with the package."""
    if name == "B":
        from benchmarks.convergence.tasks.reviews import Reviews

        return Reviews(cache)
    from benchmarks.convergence.tasks.language import FineTuning, FromScratch

    return FineTuning(cache) if name == "A" else FromScratch(cache)
