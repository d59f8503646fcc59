"""Which host kernel serves, and why."""

import logging

import pytest

from zenflow.backends import host_kernel
from zenflow.backends.host_kernel import NativeKernel, TorchKernel, choose_kernel, kernel_choice
from zenflow.kernels import native


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("ZENFLOW_KERNEL", raising=False)
    host_kernel._announce.cache_clear()


@pytest.fixture
def library():
    try:
        return native.load()
    except native.NativeUnavailable as error:
        pytest.skip(f"native kernel: {error}")


@pytest.fixture
def no_library(monkeypatch):
    def load():
        raise native.NativeUnavailable("it was not built")

    monkeypatch.setattr(native, "load", load)


@pytest.mark.covers("fast on the host")
def test_the_best_instruction_set_serves(library):
    choice = kernel_choice()
    assert isinstance(choice.kernel, NativeKernel)
    assert choice.kernel.name == library.usable[0]


def test_what_the_cpu_lacks_is_said(library, monkeypatch):
    monkeypatch.setattr(library, "usable", ("portable",))
    choice = kernel_choice()
    assert choice.kernel.name == "portable"
    assert all(name in choice.reason for name in set(library.compiled) - {"portable"})


def test_each_can_be_forced(library, monkeypatch):
    for name in ("torch", *library.usable):
        monkeypatch.setenv("ZENFLOW_KERNEL", name)
        assert choose_kernel().name == name
        assert "ZENFLOW_KERNEL" in kernel_choice().reason


@pytest.mark.parametrize("name", ["AVX512", "cuda"])
def test_an_unknown_one_is_refused(monkeypatch, name):
    monkeypatch.setenv("ZENFLOW_KERNEL", name)
    with pytest.raises(ValueError, match=f"'{name}' must be one of torch, .*possible here: torch"):
        choose_kernel()


def test_one_that_cannot_run_here_is_refused_with_what_can(library, monkeypatch):
    monkeypatch.setattr(library, "usable", ("portable",))
    missing = next(name for name in native.INSTRUCTION_SETS if name != "portable")
    monkeypatch.setenv("ZENFLOW_KERNEL", missing)
    with pytest.raises(ValueError, match="cannot run here; possible here: torch, portable"):
        choose_kernel()


@pytest.mark.covers("no compiler")
def test_without_the_library_torch_serves_and_says_why(no_library, caplog):
    with caplog.at_level(logging.INFO, logger="zenflow"):
        assert isinstance(choose_kernel(), TorchKernel)
        assert isinstance(choose_kernel(), TorchKernel)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "it was not built" in record.getMessage()


def test_without_the_library_none_of_its_kernels_can_be_forced(no_library, monkeypatch):
    monkeypatch.setenv("ZENFLOW_KERNEL", "portable")
    with pytest.raises(ValueError, match=r"possible here: torch \(.*it was not built"):
        choose_kernel()


def test_forcing_torch_is_no_warning(no_library, monkeypatch, caplog):
    monkeypatch.setenv("ZENFLOW_KERNEL", "torch")
    with caplog.at_level(logging.INFO, logger="zenflow"):
        choose_kernel()
    assert [record.levelno for record in caplog.records] == [logging.INFO]
