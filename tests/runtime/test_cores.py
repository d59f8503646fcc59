"""Cores: what the system says of them, and where workers run."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from zenflow import ZenFlowConfig
from zenflow.runtime import cores as module
from zenflow.runtime import platform as platforms
from zenflow.runtime.cores import (
    Cores,
    WorkerCores,
    bind_thread,
    device_node,
    let_others_first,
    read_cores,
)
from zenflow.runtime.platform import Platform

T = TypeVar("T")


def machine(root: Path, siblings: list[list[int]], nodes: list[str] | None = None) -> None:
    """A faked system: for each physical core its numbers, for each node its cores."""
    for core, numbers in enumerate(siblings):
        for number in numbers:
            folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{core // 2}\n")
            (folder / "core_id").write_text(f"{core % 2}\n")
    for node, text in enumerate(nodes or []):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")


def quota(root: Path, version: int, text: str, group: str = "/job") -> None:
    proc = root / "proc/self"
    proc.mkdir(parents=True, exist_ok=True)
    if version == 2:
        folder = root / f"sys/fs/cgroup{group}"
        folder.mkdir(parents=True)
        (proc / "cgroup").write_text(f"0::{group}\n")
        (folder / "cpu.max").write_text(text)
    else:
        folder = root / f"sys/fs/cgroup/cpu{group}"
        folder.mkdir(parents=True)
        (proc / "cgroup").write_text(f"4:cpu,cpuacct:{group}\n")
        for name, value in zip(("quota", "period"), text.split(), strict=True):
            (folder / f"cpu.cfs_{name}_us").write_text(value)


def test_siblings_are_one_core(tmp_path: Path) -> None:
    machine(tmp_path, [[0, 4], [1, 5], [2, 6], [3, 7]], ["0-1,4-5", "2-3,6-7"])
    found = read_cores(tmp_path, allowed=[5, 1, 2, 6, 7])
    assert found.allowed == (1, 2, 5, 6, 7)
    assert found.physical == (1, 2, 7)
    assert found.nodes == {1: 0, 5: 0, 2: 1, 6: 1, 7: 1}
    assert (found.quota, found.usable) == (None, 3)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    found = read_cores(tmp_path, allowed=range(3))
    assert found.physical == (0, 1, 2)
    assert (dict(found.nodes), found.quota, found.usable) == ({}, None, 3)


@pytest.mark.parametrize(
    ("version", "text", "usable"),
    [
        (2, "max 100000", 4),
        (2, "250000 100000", 2),
        (2, "50000 100000", 1),
        (2, "900000 100000", 4),
        (1, "-1 100000", 4),
        (1, "300000 100000", 3),
    ],
)
def test_quotas(version: int, text: str, usable: int, tmp_path: Path) -> None:
    quota(tmp_path, version, text)
    assert read_cores(tmp_path, allowed=range(4)).usable == usable


def plain(num: int, allowed: int | None = None) -> Cores:
    numbers = tuple(range(num if allowed is None else allowed))
    return Cores(online=num, allowed=numbers, physical=numbers, nodes={}, quota=None)


@pytest.mark.covers("bound cores")
@pytest.mark.parametrize("size", [1, 2, 3, 8, 11])
def test_processes_of_a_launcher_share_the_machine(size: int) -> None:
    shares = [
        plain(8).share({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}).physical
        for rank in range(size)
    ]
    assert all(shares)
    if size <= 8:
        assert sorted(core for share in shares for core in share) == list(range(8))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "1"},
        {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_without_a_launcher_all_are_ours(environment: dict[str, str]) -> None:
    assert plain(8).share(environment) == plain(8)


def test_a_process_that_was_bound_is_not_cut_again() -> None:
    bound = plain(8, allowed=4)
    assert bound.share({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == bound


@pytest.mark.covers("bound cores")
def test_workers_leave_the_training_thread_a_core_and_each_other_theirs() -> None:
    pool = WorkerCores()
    first, second, third = (pool.take(plain(6), 2) for _ in range(3))
    assert (first, second) == ((4, 5), (2, 3))
    assert 0 not in third
    pool.give_back(first)
    assert pool.take(plain(6), 1) in ((4,), (5,))
    assert pool.take(plain(6), 6) == ()
    assert pool.take(plain(1), 1) == ()


def test_cores_near_the_device_come_first() -> None:
    cores = Cores(
        online=8,
        allowed=tuple(range(8)),
        physical=tuple(range(8)),
        nodes={core: core // 4 for core in range(8)},
        quota=None,
    )
    assert WorkerCores().take(cores, 3, node=0) == (1, 2, 3)
    assert set(WorkerCores().take(cores, 5, node=0)) > {1, 2, 3}
    assert WorkerCores().take(cores, 3, node=1) == (5, 6, 7)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert device_node("0000:3b:00.0", tmp_path) == 1
    assert device_node("0000:3c:00.0", tmp_path) is None
    (folder / "numa_node").write_text("-1\n")
    assert device_node("0000:3b:00.0", tmp_path) is None


@pytest.mark.covers("bound cores", "fast on the host")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
def test_workers_beside_an_accelerator_are_bound_and_the_training_thread_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    allowed = os.sched_getaffinity(0)
    if len(read_cores().physical) < 2:
        pytest.skip("one core: workers are not bound")
    for name in ("AcceleratorDevice", "StreamLink", "RamStorage"):
        monkeypatch.setattr(platforms, name, lambda *_, **__: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    here = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    platform = platforms.choose_platform(here, ZenFlowConfig())
    found = in_worker(platform, lambda: (os.sched_getaffinity(0), priority()))
    assert found[0] < allowed
    assert read_cores().physical[0] not in found[0]
    assert found[1] == priority()
    assert os.sched_getaffinity(0) == allowed
    platform.release()


@pytest.mark.covers("bound cores")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
@pytest.mark.parametrize("overlapped", [True, False])
def test_workers_give_way_to_compute_only_where_they_run_beside_it(overlapped: bool) -> None:
    before = priority(), torch.get_num_threads(), os.sched_getaffinity(0)
    config = ZenFlowConfig(overlap_step=overlapped)
    platform = platforms.choose_platform(torch.device("cpu"), config)
    assert platform.workers.num_threads == min(8, read_cores().share().usable)
    in_a_worker = in_worker(platform, lambda: (priority(), os.sched_getaffinity(0)))
    assert in_a_worker == (19 if overlapped else before[0], before[2])
    assert (priority(), torch.get_num_threads(), os.sched_getaffinity(0)) == before
    platform.release()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_refused_priority_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(module.os, "setpriority", refuse)
    let_others_first()


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_worker(platform: Platform, job: Callable[[], T]) -> T:
    try:
        (task,) = platform.workers.submit([job])
        task.wait()
        return task.result
    finally:
        platform.workers.close()


def test_a_refused_binding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(module.os, "sched_setaffinity", refuse, raising=False)
    thread = threading.Thread(target=bind_thread, args=([0],))
    thread.start()
    thread.join()
    bind_thread([0])
