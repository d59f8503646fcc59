"""A child process: one contender with its workload. It answers requests, one JSON line each."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.cli.bench import resident
from zenflow.cli.bench.engines import Engine, OurEngine, make_engine
from zenflow.cli.bench.interpreters import reply_channel
from zenflow.cli.bench.report import allowed_cores
from zenflow.cli.bench.stub import StubModel

_QUIET_S = 0.05
_QUIET_WITHIN_S = 5.0


class Contestant:
    """One model behind one engine.

    Args:
        workload: ``kind`` "stub" with ``numel`` and ``side``, or "llama" with its sizes.
        contender: as ``Contender.to_dict()`` has it.
        link_bytes_per_s: rate of a link in front of this library; None: shared memory.
    """

    def __init__(
        self, workload: dict[str, Any], contender: dict[str, Any], link_bytes_per_s: float | None
    ) -> None:
        threads = contender["threads"] or allowed_cores()
        torch.set_num_threads(threads)
        settings = dict(contender["settings"])
        if contender["engine"] == "zenflow" and settings["host_threads"] is None:
            settings["host_threads"] = threads
        self.model, self._inputs = make_workload(workload)
        self._before = resident.sample()
        self.engine: Engine = make_engine(
            self.model, contender["engine"], settings, link_bytes_per_s
        )

    @property
    def about(self) -> dict[str, Any]:
        """What the parent cannot know."""
        return {
            "numel": sum(p.numel() for p in self.model.parameters()),
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def block(self, steps: int, warm_up: int, compute_s: float | None = None) -> dict[str, Any]:
        """Time steps, each from its begin to the next one's."""
        if compute_s is not None:
            assert isinstance(self.model, StubModel)
            self.model.compute_s = compute_s
        for _ in range(warm_up):
            self.engine.step(self._inputs)
        seconds, figures = [], []
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.engine.step(self._inputs)
            if isinstance(self.engine, OurEngine):
                figures.append(_figures(self.engine))
            end_s = time.perf_counter()
            seconds.append(end_s - begin_s)
            begin_s = end_s
        _be_quiet()
        return {"seconds": seconds, "figures": figures}

    def memory(self, steps: int) -> dict[str, int]:
        """Resident bytes beyond the model and its gradients, the most after any of some steps."""
        most = 0
        for _ in range(steps):
            self.engine.step(self._inputs)
            most = max(most, resident.sample())
        return {"growth": most - self._before, "before": self._before}


def make_workload(workload: dict[str, Any]) -> tuple[nn.Module, Sequence[Tensor]]:
    """A model whose forward gives the loss, and its inputs."""
    sizes = {key: value for key, value in workload.items() if key != "kind"}
    if workload["kind"] == "stub":
        return StubModel(**sizes), (torch.zeros((), requires_grad=True),)
    from zenflow.cli.bench.llama import make_llama

    return make_llama(**sizes)


def _figures(engine: OurEngine) -> dict[str, float]:
    stats = engine.optimizer.stats
    return {
        "wait_s": stats.stall_s,
        "training_thread_s": stats.step_overhead_s,
        "host_busy_s": stats.host_busy_s,
        "update_interval": stats.update_interval,
        "traffic_model_sizes": stats.traffic_model_sizes,
    }


def _be_quiet() -> None:
    """Return when this process and its children use no CPU: the next contender's turn begins."""
    give_up_s = time.monotonic() + _QUIET_WITHIN_S
    used = _cpu_ticks()
    while time.monotonic() < give_up_s:
        time.sleep(_QUIET_S)
        before, used = used, _cpu_ticks()
        if used - before <= 1:
            return


def _cpu_ticks() -> int:
    ticks = 0
    for process in resident.family():
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks


def main() -> None:
    """Answer requests until there are no more."""
    reply = reply_channel()
    contestant: Contestant | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            do = request.pop("do")
            if do == "begin":
                contestant = Contestant(**request)
                reply(contestant.about)
            else:
                assert contestant is not None
                methods: dict[str, Callable[..., Any]] = {
                    "block": contestant.block,
                    "memory": contestant.memory,
                }
                reply(methods[do](**request))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        if contestant is not None:
            contestant.engine.close()
