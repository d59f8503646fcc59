"""Host memory for the link."""

import logging

import pytest
import torch

from zenflow.backends.storage import RamStorage


@pytest.mark.covers("pinned memory")
def test_refused_pinning_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(*arguments: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cudaHostAlloc: out of memory")
        return empty(*arguments, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    storage = RamStorage(pin=True)
    buffers = [storage.buffer((3, 4), torch.bfloat16) for _ in range(3)]
    assert all(buffer.shape == (3, 4) and buffer.dtype == torch.bfloat16 for buffer in buffers)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "out of memory" in record.getMessage()
    assert "do not overlap" in record.getMessage()
