"""The stages of a step under the names that profilers show."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._profiler import _RecordFunctionFast

P = ParamSpec("P")
R = TypeVar("R")


def staged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show each call as a range: in ``torch.profiler``, and as an NVTX range in ``emit_nvtx``.

    Without a profiler it costs a few hundred nanoseconds, as ``torch.profiler.record_function``, at several
    microseconds, does not. Workers show with ``_ExperimentalConfig(profile_all_threads=True)``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with _RecordFunctionFast(name):
                return function(*args, **kwargs)

        return call

    return decorate
