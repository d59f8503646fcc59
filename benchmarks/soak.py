"""Long runs that look for growth: resident memory, threads, file descriptors.

    python benchmarks/soak.py [--output benchmarks/results/soak_NAME_DATE.md]

A byte-level language model trains on source text that ships with Python, with saves, resumes into fresh
objects, evaluations and skipped steps. Each run is a process of its own. After a warm-up of half as many
steps again, what it holds in the last third of the steps is compared with the first third; growth makes the
exit status 1.
"""

import argparse
import datetime
import gc
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zenflow
from zenflow.cli.bench.report import allowed_cores, cpu_name, versions

WINDOW, BATCH, WIDTH, LAYERS = 32, 8, 192, 3
EVALUATIONS = SAVES = 20
RESUME_EVERY = 4
"""Every so many saves, training goes on in fresh objects that have loaded the save."""
SKIP_EVERY = 29
"""Every so many steps, a gradient is infinite."""
OPTIMIZERS = 50
WARM_UP = 0.5
"""Of a run's length, before it: the allocator's pools grow to what they need in the first saves."""
MAX_GROWTH = 0.25
"""Of the optimizer's state: what resident memory may grow by from the first third to the last. The
allocator gives back and takes a few MiB with each resume; a state left behind by one would be four times
this, and a gradient by each step a hundred times."""

RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "overlap, S=4": (torch.float32, {"update_interval": 4}),
    "overlap, S auto, bf16": (torch.bfloat16, {}),
    "overlap, S=4, streaming, bf16": (
        torch.bfloat16,
        {"update_interval": 4, "stream_gradients": True},
    ),
    "synchronous, S=1": (torch.float32, {"overlap_step": False, "update_interval": 1}),
    "synchronous, S=2, streaming, accumulate": (
        torch.float32,
        {
            "overlap_step": False,
            "update_interval": 2,
            "stream_gradients": True,
            "update_rule": "accumulate",
        },
    ),
}
CREATE_AND_CLOSE = f"{OPTIMIZERS} optimizers"


@dataclass
class Samples:
    """What the process held, once for each step."""

    resident_bytes: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def take(self) -> None:
        """Anonymous memory only: pages of libraries come as their code is first used."""
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        self.resident_bytes.append(int(fields["RssAnon"].split()[0]) * 1024)
        self.threads.append(int(fields["Threads"]))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))


@dataclass
class Result:
    """One run's figures; JSON-ready through ``asdict``."""

    samples: Samples
    state_bytes: int
    seconds: float
    counts: dict[str, int]
    losses: tuple[float, float] | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Result":
        return cls(**values | {"samples": Samples(**values["samples"])})

    def failures(self) -> list[str]:
        """What has grown; empty if nothing has."""
        found = []
        for name, values, allowed in (
            ("resident bytes", self.samples.resident_bytes, MAX_GROWTH * self.state_bytes),
            ("threads", self.samples.threads, 0),
            ("file descriptors", self.samples.descriptors, 0),
        ):
            first, last = floors(values)
            if last - first > allowed:
                found.append(f"{name} grew from {first:,} to {last:,}; {allowed:,.0f} are allowed")
        if self.losses is not None and not self.losses[1] < self.losses[0]:
            found.append(f"the held-out loss went from {self.losses[0]} to {self.losses[1]}")
        return found


def floors(values: Sequence[int]) -> tuple[int, int]:
    """The least of the first third and of the last: what is used beside it comes and goes."""
    third = len(values) // 3
    return min(values[:third]), min(values[-third:])


class Model(nn.Module):
    """A causal transformer over bytes, its embedding tied to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(WINDOW, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        causal = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-byte logits ``[B, T, 256]`` of bytes ``[B, T]``."""
        hidden = self.embedding(tokens) + self.position
        hidden = self.norm(self.layers(hidden, mask=self.causal, is_causal=True))
        return hidden @ self.embedding.weight.T


def batch(text: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[B, T]``, the same for the same number."""
    starts = torch.randint(
        len(text) - WINDOW - 1, (BATCH,), generator=torch.Generator().manual_seed(number)
    )
    rows = torch.stack([text[start : start + WINDOW + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


class Training:
    """The loop's objects, so that they can be made anew from a save."""

    def __init__(self, dtype: torch.dtype, config: dict[str, Any], num_steps: int) -> None:
        torch.manual_seed(0)
        text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
        self.text, self.held_out = text.long().tensor_split([len(text) * 9 // 10])
        self.model = Model().to(dtype)
        self.optimizer = zenflow.ZenFlowAdamW(self.model.parameters(), lr=1e-3, config=config)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, num_steps)
        self._again = (dtype, config, num_steps)

    def loss(self, text: Tensor, number: int) -> Tensor:
        inputs, targets = batch(text, number)
        return nn.functional.cross_entropy(
            self.model(inputs).float().flatten(0, 1), targets.flatten()
        )

    def step(self, number: int, *, spoilt: bool) -> None:
        loss = self.loss(self.text, number)
        (loss * math.inf if spoilt else loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> float:
        self.optimizer.synchronize()
        self.model.eval()
        with torch.inference_mode():
            losses = [self.loss(self.held_out, number).item() for number in range(4)]
        self.model.train()
        return statistics.mean(losses)

    def save(self, path: Path) -> None:
        parts = (self.model, self.optimizer, self.schedule)
        torch.save([part.state_dict() for part in parts], path)

    def resumed(self, path: Path) -> "Training":
        """Fresh objects that have loaded a save; these ones are closed."""
        self.optimizer.close()
        fresh = Training(*self._again)
        parts = (fresh.model, fresh.optimizer, fresh.schedule)
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        return fresh


def train(dtype: torch.dtype, config: dict[str, Any], num_steps: int) -> Result:
    """Warm up, then take steps, save, resume, evaluate and skip as often as the constants say."""
    training = Training(dtype, config, num_steps)
    numel = sum(param.numel() for param in training.model.parameters())
    warm_up = int(WARM_UP * num_steps)
    samples, begin_s = Samples(), time.perf_counter()
    counts = dict.fromkeys(("applied", "skipped", "saves", "resumes", "evaluations"), 0)
    first_loss = training.evaluate()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "save.pt"
        for number in range(1 - warm_up, num_steps + 1):
            if number == 1:
                counts = dict.fromkeys(counts, 0)
            spoilt = number % SKIP_EVERY == 0
            training.step(number, spoilt=spoilt)
            counts["skipped"] += training.optimizer.stats.skipped
            counts["applied"] += not training.optimizer.stats.skipped
            if number % (num_steps // SAVES) == 0:
                training.save(path)
                counts["saves"] += 1
                if counts["saves"] % RESUME_EVERY == 0:
                    training = training.resumed(path)
                    counts["resumes"] += 1
                    gc.collect()
            if number % (num_steps // EVALUATIONS) == 1:
                training.evaluate()
                counts["evaluations"] += 1
            if number >= 1:
                samples.take()
    assert counts["skipped"] == num_steps // SKIP_EVERY
    assert counts["applied"] == num_steps - counts["skipped"]
    loss = training.evaluate()
    training.optimizer.close()
    return Result(samples, 12 * numel, time.perf_counter() - begin_s, counts, (first_loss, loss))


def create_and_close(*_: Any) -> Result:
    """Many optimizers over one model, streaming or not; every third is left to the collector."""
    samples, begin_s = Samples(), time.perf_counter()
    training = Training(torch.float32, {}, 1)
    training.optimizer.close()
    numel = sum(param.numel() for param in training.model.parameters())
    for number in range(-int(WARM_UP * OPTIMIZERS), OPTIMIZERS):
        config = {"update_interval": 1 + number % 4, "stream_gradients": number % 2 == 0}
        optimizer = zenflow.ZenFlowAdamW(training.model.parameters(), lr=1e-4, config=config)
        for _ in range(4):
            training.loss(training.text, 0).backward()
            optimizer.step()
        if number % 3:
            optimizer.close()
        del optimizer
        gc.collect()
        if number >= 0:
            samples.take()
    assert not [t for t in threading.enumerate() if t.name.startswith("zenflow")]
    return Result(samples, 12 * numel, time.perf_counter() - begin_s, {"optimizers": OPTIMIZERS})


def run_alone(name: str, num_steps: int) -> Result:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--run", name, "--steps", str(num_steps)]
    one_arena = os.environ | {"MALLOC_ARENA_MAX": "1"}  # or what is held depends on who was first
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=one_arena)
    return Result.of(json.loads(done.stdout))


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def table(results: dict[str, Result]) -> list[str]:
    lines = [
        "| run | steps applied, skipped | saves, resumes, evaluations | held-out loss "
        "| state MiB | resident MiB: first third, last third | highest | growth KiB | threads "
        "| file descriptors | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        samples, counts = result.samples, result.counts
        first, last = floors(samples.resident_bytes)
        loss = "" if result.losses is None else "{:.3f} to {:.3f}".format(*result.losses)
        steps = f"{counts['applied']}, {counts['skipped']}" if "applied" in counts else ""
        rest = [str(counts[key]) for key in ("saves", "resumes", "evaluations") if key in counts]
        held = [" to ".join(map(str, floors(v))) for v in (samples.threads, samples.descriptors)]
        lines.append(
            f"| {name} | {steps} | {', '.join(rest)} | {loss} | {mib(result.state_bytes)} "
            f"| {mib(first)}, {mib(last)} | {mib(max(samples.resident_bytes))} "
            f"| {(last - first) / 1024:+,.0f} | {held[0]} | {held[1]} | {result.seconds:.0f} |"
        )
    return lines


def report(results: dict[str, Result], options: argparse.Namespace) -> str:
    bad = {name: failures for name, r in results.items() if (failures := r.failures())}
    lines = [
        "# Soak",
        "",
        f"- Command: `python {' '.join(sys.argv)}`",
        f"- Date: {datetime.date.today()}",
        f"- Hardware: {cpu_name()}, {allowed_cores()} cores allowed",
        f"- Versions: {', '.join(f'{name} {text}' for name, text in versions().items())}",
        f"- A byte-level transformer of {LAYERS} layers of {WIDTH}, batches of {BATCH} x {WINDOW}, "
        f"{options.steps} steps; each run in a process of its own; one sample a step",
        "- First third, last third: the least of the samples there, of anonymous resident memory, "
        "threads and file descriptors",
        f"- Fails if memory grows by more than {MAX_GROWTH:.0%} of the state's bytes, or the others "
        "at all, or if the held-out loss does not fall",
        f"- Before that, a warm-up of {WARM_UP:.0%} of the length that is not counted; one compute thread, "
        "one malloc arena",
        "",
        *table(results),
        "",
        *(f"- **{name}**: {'; '.join(failures)}" for name, failures in bad.items()),
        "Failed." if bad else "Nothing grew.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of each run (default 300)")
    parser.add_argument("--output", type=Path, help="a file for the report, beside standard output")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work: dict[str, Callable[[], Result]] = {
        name: lambda each=each: train(*each, options.steps) for name, each in RUNS.items()
    }
    work[CREATE_AND_CLOSE] = create_and_close
    if options.run:
        torch.set_num_threads(1)  # more would stand still whenever something else wants a core
        logging.disable()  # every skipped step is a warning
        sys.stdout.write(json.dumps(asdict(work[options.run]())))
        return 0
    results = {}
    for name in work:
        results[name] = run_alone(name, options.steps)
        sys.stderr.write(f"{name}: {results[name].seconds:.0f} s\n")
    text = report(results, options)
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return int(any(result.failures() for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
