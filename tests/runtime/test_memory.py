"""Host memory is compared with the need before anything is taken."""

from pathlib import Path

import pytest
import torch

import zenflow
from zenflow.core.budget import host_need
from zenflow.runtime import memory
from zenflow.runtime.memory import Available, available_memory

MIB = 1 << 20


def machine(root: Path, cgroup: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.covers("host memory")
@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 2 * MIB),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "5\n",
                "a/memory.max": "1000000\n",
                "a/memory.current": "900000\n",
                "a/memory.stat": "anon 1\ninactive_file 50000\n",
            },
            150_000,
        ),
        (
            "4:cpu,memory:/x\n3:cpuset:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "700000\n",
                "memory/x/memory.usage_in_bytes": "600000\n",
            },
            100_000,
        ),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/x/memory.usage_in_bytes": "600000\n",
            },
            2 * MIB,
        ),
    ],
    ids=["machine", "version 2, limit of a parent", "version 1", "version 1 without a limit"],
)
def test_available_is_the_tightest_limit(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    machine(tmp_path, cgroup, files)
    available = available_memory(tmp_path)
    assert available is not None
    assert available.num_bytes == expected


def test_unknown_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_need_at_interval_4_in_bf16() -> None:
    need = host_need([(1000, 2)], 4)
    assert need == (12_000, 5_000, 500)
    assert need.total == 17_500


@pytest.mark.covers("host memory")
def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: Available(10 * MIB, "a test"))
    fits = torch.nn.Parameter(torch.zeros(512, 512))
    too_large = torch.nn.Parameter(torch.zeros(1024, 1024))
    with pytest.raises(MemoryError, match=r"needs 0\.02 GiB .* 0\.01 GiB are available \(a test\)"):
        zenflow.ZenFlowAdamW([too_large])
    optimizer = zenflow.ZenFlowAdamW([fits])
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": [too_large]})
    assert len(optimizer.param_groups) == 1
    zenflow.ZenFlowAdamW([too_large], config={"topk_ratio": 1}).close()
    zenflow.ZenFlowAdamW([too_large.requires_grad_(False)]).close()
    optimizer.close()
