"""``zenflow doctor`` in environments that are made up: each problem is named with its remedy."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from zenflow.cli.doctor import command, software
from zenflow.cli.doctor.checks import problems
from zenflow.cli.doctor.machine import Machine, read_machine
from zenflow.cli.doctor.measure import Speed, measure_host
from zenflow.cli.doctor.software import Software, read_software
from zenflow.cli.main import main
from zenflow.kernels import native

GIB = 1 << 30

MACHINE = Machine(
    system="Linux",
    cpu="a processor",
    online_cores=8,
    allowed_cores=8,
    physical_cores=8,
    numa_nodes=1,
    cpu_quota=None,
    worker_cores=8,
    available_bytes=64 * GIB,
    memory_limit="MemAvailable of the machine",
)
SOFTWARE = Software(
    zenflow="0.1.0",
    torch="2.13.0+cpu",
    devices=["cpu"],
    shares_memory=True,
    kernel="avx512",
    kernel_reason="the best for this CPU",
    kernel_is_native=True,
    kernel_forced=None,
    compiler="g++",
    torch_threads=8,
    omp_num_threads=None,
    overlap_threads=2,
    synchronous_threads=8,
)
PLAIN = {"kernel": "torch", "kernel_is_native": False, "kernel_reason": "it was not built"}

PROBLEMS = {
    "nothing": ({}, {}, None, None),
    "old torch": ({}, {"torch": "2.9.1"}, "2.9.1 is too old", "install torch 2.11"),
    "no compiler": ({}, {**PLAIN, "compiler": None}, "no C++ compiler", "apt install g++"),
    "not built": ({}, PLAIN, "plain torch", "build.py"),
    "forced kernel": ({}, {"kernel": "portable", "kernel_forced": "portable"}, "forces", "unset"),
    "bad kernel": (
        {},
        {"kernel": None, "kernel_forced": "sse", "kernel_reason": "ZENFLOW_KERNEL='sse' is wrong"},
        "no optimizer can be made: ZENFLOW_KERNEL='sse'",
        "unset ZENFLOW_KERNEL",
    ),
    "one core": ({"allowed_cores": 1}, {"torch_threads": 1}, "one core", "allow two"),
    "quota": ({"cpu_quota": 2.5}, {"torch_threads": 2}, "2.5 cores' worth", "raise the quota"),
    "two nodes": ({"numa_nodes": 2}, {}, "2 memory nodes", "numactl"),
    "too many threads": ({}, {"torch_threads": 16}, "16 threads on 8", "OMP_NUM_THREADS=8"),
    "torchrun": ({}, {"torch_threads": 1}, "with one thread", "OMP_NUM_THREADS"),
    "little memory": (
        {"available_bytes": GIB // 2, "memory_limit": "control group limit"},
        {},
        "0.5 GiB of host memory are left (control group limit)",
        "memory limit",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_named_with_its_remedy(name):
    machine_changes, software_changes, what, remedy = PROBLEMS[name]
    found = problems(
        dataclasses.replace(MACHINE, **machine_changes),
        dataclasses.replace(SOFTWARE, **software_changes),
        [],
        None,
    )
    if what is None:
        assert found == []
    else:
        assert len(found) == 1
        assert what in found[0].what
        assert remedy in found[0].remedy


def test_a_refused_pin_and_a_slow_sweep_are_problems():
    speeds = [
        Speed(name="copy fp32", threads=2, gb_per_s=40),
        Speed(name="sweep, avx512, S=1", threads=2, gb_per_s=10),
    ]
    found = problems(MACHINE, SOFTWARE, speeds, "out of locked memory")
    assert [("pinned" in p.what, "10.0 GB/s" in p.what) for p in found] == [
        (True, False),
        (False, True),
    ]


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def topology(packages_and_cores: list[tuple[int, int]]) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{i}/topology/{name}": f"{value}\n"
        for i, pair in enumerate(packages_and_cores)
        for name, value in zip(("physical_package_id", "core_id"), pair, strict=True)
    }


ROOTS = {
    "nothing is there": ({}, {"threads_per_core": 1.0, "numa_nodes": None, "cpu_quota": None}),
    "SMT": (
        topology([(0, 0), (0, 1), (0, 0), (0, 1)]),
        {"physical_cores": 2, "threads_per_core": 2.0, "allowed_cores": 4},
    ),
    "two sockets": (
        topology([(0, 0), (0, 1), (1, 0), (1, 1)])
        | {
            "sys/devices/system/node/node0/cpulist": "0-1\n",
            "sys/devices/system/node/node1/cpulist": "2,3\n",
            "sys/devices/system/node/node2/cpulist": "4-7\n",
        },
        {"physical_cores": 4, "threads_per_core": 1.0, "numa_nodes": 2},
    ),
    "version 2 quota of an outer group": (
        {
            "proc/self/cgroup": "0::/job/task\n",
            "sys/fs/cgroup/job/task/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
        },
        {"cpu_quota": 1.5, "usable_cores": 1.5},
    ),
    "version 1 quota": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/job\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
        {"cpu_quota": 0.5},
    ),
    "version 1 without a quota": (
        {
            "proc/self/cgroup": "4:cpu:/job\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
        {"cpu_quota": None, "usable_cores": 4},
    ),
    "memory limit": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/meminfo": "MemAvailable: 64000000 kB\n",
            "sys/fs/cgroup/job/memory.max": "3000\n",
            "sys/fs/cgroup/job/memory.current": "1000\n",
        },
        {"available_bytes": 2000},
    ),
}


@pytest.mark.parametrize("name", ROOTS)
def test_what_the_system_says(name, tmp_path):
    contents, expected = ROOTS[name]
    machine = read_machine(files(tmp_path, contents), allowed={0, 1, 2, 3})
    assert {key: getattr(machine, key) for key in expected} == expected


@pytest.fixture
def few_measurements(monkeypatch):
    """The report without seconds of timing."""
    speeds = [Speed(name="copy fp32", threads=1, gb_per_s=12.5)]
    monkeypatch.setattr(command, "measure_host", lambda kernel, threads: speeds)


def doctor(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


@pytest.fixture
def no_library(monkeypatch):
    def load():
        raise native.NativeUnavailable("it was not built")

    monkeypatch.setattr(native, "load", load)
    monkeypatch.delenv("ZENFLOW_KERNEL", raising=False)


@pytest.mark.usefixtures("few_measurements", "no_library")
def test_without_a_compiler_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    code, text = doctor(capsys)
    assert code == 0
    assert "torch: the native kernel is unavailable: it was not built" in text
    assert "C++ compiler" in text and "none found" in text
    assert "apt install g++" in text


@pytest.mark.usefixtures("no_library")
def test_a_compiler_that_is_set_and_not_there_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert software.find_compiler() is None


@pytest.mark.covers("fast on the host")
@pytest.mark.usefixtures("few_measurements")
@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ("torch", ["torch: ZENFLOW_KERNEL says so", "unset ZENFLOW_KERNEL"]),
        ("sse", ["must be one of", "unset ZENFLOW_KERNEL, or set it to one"]),
    ],
)
def test_a_forced_kernel(capsys, monkeypatch, forced, words):
    monkeypatch.setenv("ZENFLOW_KERNEL", forced)
    code, text = doctor(capsys)
    assert code == 0
    assert all(word in text for word in words)


@pytest.mark.usefixtures("few_measurements")
def test_json_has_everything(capsys):
    code, text = doctor(capsys, "--json")
    content = json.loads(text)
    assert code == 0
    assert set(content) == {"verdict", "problems", "machine", "software", "speeds"}
    assert content["machine"]["allowed_cores"] == len(os.sched_getaffinity(0))
    assert content["speeds"][0]["gb_per_s"] == 12.5


def test_the_report_names_no_host_and_no_user(capsys, few_measurements):
    _, text = doctor(capsys, "--json")
    assert os.uname().nodename not in text


def test_one_core(monkeypatch):
    found = read_software(cores=1)
    assert (found.overlap_threads, found.synchronous_threads) == (1, 1)


@pytest.mark.parametrize("threads", [[1], [1, 2]])
def test_measured_rates_are_positive_and_threads_are_given_back(threads):
    from zenflow.backends.host_kernel import choose_kernel

    before = torch.get_num_threads()
    speeds = measure_host(choose_kernel(), threads, numel=1 << 16)
    assert len(speeds) == 3 * len(threads)
    assert all(speed.gb_per_s > 0 for speed in speeds)
    assert torch.get_num_threads() == before
