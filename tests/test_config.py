"""Nonsense is refused by name, with the legal range."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import zenflow

NAN, INF = float("nan"), float("inf")
NONSENSE: dict[str, list[Any]] = {
    "topk_ratio": [-0.1, 1.1, 10**400, NAN, INF, -INF, True, "0.1", None, [0.1], 1j],
    "update_interval": [0, -1, 1.0, 2.5, True, "Auto", "", None, NAN, [1]],
    "max_update_interval": [0, -1, 4.0, True, "auto", None, NAN],
    "select_interval": [0, -3, 1.0, False, "never", None, NAN],
    "full_warm_up_rounds": [-1, 0.0, True, "auto", None, NAN],
    "overlap_step": [0, 1, "yes", None, 1.0],
    "update_rule": ["Replay", "", "mean", None, True, 1, ["replay"]],
    "lookahead": [0, 1, "no", None],
    "preview": [0, 1, "no", None],
    "host_threads": [0, -1, 2.0, True, "all", None, NAN],
    "max_grad_norm": [0, -1.0, 10**400, NAN, INF, True, "1.0"],
    "stream_gradients": [0, 1, "yes", None],
    "selection_log": [3, True, b"log", ["log"], 1.0],
}
LEGAL: dict[str, list[Any]] = {
    "topk_ratio": [0, 1, 0.0, 1.0, 0.05],
    "update_interval": [1, 100, "auto"],
    "max_update_interval": [1, 8],
    "select_interval": [1, 1000, "auto"],
    "full_warm_up_rounds": [0, 10],
    "overlap_step": [True, False],
    "update_rule": ["replay", "accumulate"],
    "lookahead": [True, False],
    "preview": [True, False],
    "host_threads": [1, 64, "auto"],
    "max_grad_norm": [None, 1, 0.5],
    "stream_gradients": [True, False],
    "selection_log": [None, "selection.jsonl", Path("runs", "selection.jsonl")],
}
FIELDS = [field.name for field in dataclasses.fields(zenflow.ZenFlowConfig)]


def test_every_field_is_in_the_tables() -> None:
    assert sorted(NONSENSE) == sorted(LEGAL) == sorted(FIELDS)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in NONSENSE for value in NONSENSE[name]]
)
def test_nonsense_is_refused(name: str, value: Any) -> None:
    for build in (
        lambda: zenflow.ZenFlowConfig(**{name: value}),
        lambda: zenflow.ZenFlowConfig.of({name: value}),
    ):
        with pytest.raises(ValueError, match="is not legal; it takes") as refusal:
            build()
        assert f"{name}={value!r}" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in LEGAL for value in LEGAL[name]]
)
def test_the_ends_of_each_range_are_legal(name: str, value: Any) -> None:
    assert getattr(zenflow.ZenFlowConfig(**{name: value}), name) == value


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown ZenFlow config keys \['top_k'\]; legal keys:"):
        zenflow.ZenFlowConfig.of({"top_k": 0.1})


@pytest.mark.parametrize("config", [3, "auto", [("topk_ratio", 0.1)], 0.1])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="pass a ZenFlowConfig, a mapping with its keys, or None"):
        zenflow.ZenFlowConfig.of(config)


def test_a_config_is_frozen_and_keyword_only() -> None:
    config = zenflow.ZenFlowConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.topk_ratio = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        zenflow.ZenFlowConfig(0.1)  # type: ignore[misc]


def test_a_mapping_none_and_a_config_are_taken() -> None:
    assert zenflow.ZenFlowConfig.of(None) == zenflow.ZenFlowConfig()
    assert zenflow.ZenFlowConfig.of({"topk_ratio": 0.2}).topk_ratio == 0.2
    config = zenflow.ZenFlowConfig(lookahead=False)
    assert zenflow.ZenFlowConfig.of(config) is config
