"""A profile shows the stages of a step by the names of docs/design.md."""

import re
from pathlib import Path

import pytest
import torch

import zenflow

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
NAMES = {
    "zenflow.wait",
    "zenflow.check",
    "zenflow.apply",
    "zenflow.publish",
    "zenflow.adopt",
    "zenflow.capture",
    "zenflow.select",
    "zenflow.update",
    "zenflow.begin_sweeps",
}


@pytest.mark.parametrize("streaming", [False, True])
def test_stages_show(streaming: bool) -> None:
    param = torch.nn.Parameter(torch.randn(40, 24))
    config = {"update_interval": 2, "select_interval": 2, "stream_gradients": streaming}
    optimizer = zenflow.ZenFlowAdamW([param], config=config)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything
    ) as profile:
        for _ in range(6):
            (param * torch.randn(40, 24)).sum().backward()
            optimizer.step()
        optimizer.close()
    shown = {event.key for event in profile.key_averages() if event.key.startswith("zenflow.")}
    previews = set() if streaming else {"zenflow.preview"}
    assert shown == NAMES | {"zenflow.sweep", "zenflow.synchronize"} | previews


def test_the_design_names_them() -> None:
    named = set(re.findall(r"`(zenflow\.[a-z_]+)`", DESIGN.read_text(encoding="utf-8")))
    assert named >= NAMES | {"zenflow.sweep", "zenflow.preview"}
