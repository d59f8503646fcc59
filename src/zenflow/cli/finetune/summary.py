"""The figures of a finished run: ``summary.json`` and the table at the end."""

import importlib.metadata
import math
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What ``summary.json`` holds, besides the settings and versions of the run."""

    loss_first: float
    """Training loss of the first step, nats a token."""
    loss_last: float
    """Mean training loss of the last logged steps, nats a token."""
    heldout_loss: float
    """Loss of the saved model on ``heldout.jsonl``, nats a token (see ``heldout``)."""
    heldout_loss_before: float | None
    """The same before training."""
    tokens_per_s: float
    """Training tokens a second of the loop, evaluation and saving left out."""
    stall_fraction: float
    """Share of the loop's time spent waiting for host work or the link."""
    traffic_model_sizes: float
    """Bytes across the link in a step, in model sizes, mean over the steps."""
    staleness_max: int
    """Most steps that a weight lagged behind AdamW."""
    peak_host_bytes: int
    """Largest resident memory of the process up to the end of training."""
    steps: int
    skipped_steps: int
    """Steps in which nothing was changed, because a gradient was not finite."""
    tokens: int
    loop_s: float
    drain_s: float
    """Seconds spent applying what waited, before evaluations and saves; part of the stall."""
    update_interval_last: int | None
    optimizer: str
    parameters: int
    dtype: str
    device: str
    resumed_from_step: int | None
    prompt: str
    sample_before: str | None
    sample_after: str

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return {**asdict(self), "settings": settings, "versions": _versions(), "host": _host()}

    def table(self, where: str) -> str:
        """The table for the terminal."""
        before = "" if self.heldout_loss_before is None else f"{self.heldout_loss_before:.3f} -> "
        rows = [
            ("loss, first to last", f"{self.loss_first:.3f} -> {self.loss_last:.3f}"),
            ("held-out loss", f"{before}{self.heldout_loss:.3f}"),
            ("tokens/s", f"{self.tokens_per_s:,.0f}"),
            ("stall", f"{self.stall_fraction:.1%} of the time"),
            ("traffic per step", f"{self.traffic_model_sizes:.2f} model sizes"),
            ("largest staleness", f"{self.staleness_max} steps"),
            ("skipped steps", str(self.skipped_steps)),
            ("peak host memory", f"{self.peak_host_bytes / 1e9:.2f} GB"),
            ("prompt", _shown(self.prompt)),
            ("sample before", _shown(self.sample_before)),
            ("sample after", _shown(self.sample_after)),
            ("model", f'AutoModelForCausalLM.from_pretrained("{where}")'),
            ("figures", os.path.join(where, "summary.json")),
        ]
        title = f"{self.steps} steps of {self.optimizer} in {self.loop_s:.0f} s"
        return "\n".join([title, *(f"  {name:<20} {value}" for name, value in rows)])


def losses(log_history: list[dict[str, Any]]) -> tuple[float, float]:
    """The first and the last training loss that the trainer logged; NaN if none."""
    found = [entry["loss"] for entry in log_history if "loss" in entry]
    return (found[0], found[-1]) if found else (math.nan, math.nan)


def peak_host_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _shown(text: str | None) -> str:
    return "-" if text is None else ascii_safe(repr(text))


def ascii_safe(text: str) -> str:
    """Text that any terminal can show: what its encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _versions() -> dict[str, str]:
    names = ("torch-zenflow", "torch", "transformers", "trl", "accelerate", "datasets")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            import zenflow

            versions[name] = zenflow.__version__
    return versions


def _host() -> dict[str, Any]:
    return {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
