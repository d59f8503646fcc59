"""What a user may choose, each field with its unit, default and reason."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZenFlowConfig:
    """Settings of :class:`zenflow.ZenFlowAdamW`. Frozen, keyword-only, refused early.

    Key names are those of the ZenFlow paper (arXiv:2505.12242) and of DeepSpeed's JSON.

    Raises:
        ValueError: for a value outside the range that its field states.
    """

    topk_ratio: float = 0.1
    """Share of each weight's channels (columns) that is updated on the device in every step, 0 to
    1. 0 defers every channel; 1 is plain AdamW on the device. Default 0.1, the paper's: its few
    channels carry most of the gradient's energy at 12 bytes of device memory per selected
    weight."""

    update_interval: int | Auto = "auto"
    """Steps of gradients (>= 1) that a segment gathers before it is swept on the host, or "auto":
    the smallest that does not stall, up to ``max_update_interval``. Default "auto", because the
    smallest staleness that does not stall is the right one and depends on the machine. Synchronous,
    "auto" is 1: there is nothing to hide."""

    max_update_interval: int = 4
    """Upper bound (steps, >= 1) for ``update_interval="auto"``, and so for the staleness. Default
    4, the paper's steady state: with previews it costs nothing that docs/convergence.md could measure,
    and a longer one saves the host little. Without effect for an integer ``update_interval``."""

    select_interval: int | Auto = "auto"
    """Steps (>= 1) between two scorings of a weight's channels, or "auto": 4 to 64, longer while
    the selection is stable. Default "auto": important channels are stable, so scoring can be
    rare."""

    full_warm_up_rounds: int = 0
    """Number of first steps (>= 0) run synchronously, with every gradient applied before ``step()``
    returns. Default 0: with previews, training from random weights needs none (docs/convergence.md);
    without them, raise it there."""

    overlap_step: bool = True
    """True: sweeps run beside the next step and are published in the next ``step()``. False: a due
    sweep is published before ``step()`` returns; with ``update_interval=1`` that is exact AdamW."""

    update_rule: Literal["replay", "accumulate"] = "replay"
    """"replay" applies each gathered gradient as its own AdamW sub-step with its own step's lr.
    "accumulate" is the paper's rule, one update with the window's mean gradient, kept for
    comparison: deferred weights then learn about ``update_interval`` times slower. Default
    "replay": with previews it was nearer to AdamW than the paper's rule on every task of
    docs/convergence.md; without them, not on all."""

    lookahead: bool = True
    """Publish weights extrapolated by their expected delay; the master stays exact. Default True:
    without it, deferred weights lack what momentum has already decided (docs/convergence.md has both).
    Without effect where nothing is stale."""

    preview: bool = True
    """Deferred weights show each gradient in its own step, roughly (moved by a share of ``lr * grad`` over
    the root of a rank-one second moment), until the exact update overwrites it; masters and moments
    never see it. Costs a pass over weights and gradients on the device, and 4 bytes for each row and
    column. Default True: it keeps training near AdamW at every update interval
    (docs/convergence.md). Without effect where nothing waits, with "accumulate", and with
    ``stream_gradients``, where no gradient is left in ``step()``."""

    host_threads: int | Auto = "auto"
    """Host worker threads (>= 1), or "auto": half of the allowed cores beside an accelerator, all of
    them when synchronous or where the CPU is the device; at least 1 and at most 8, since few threads
    fill a memory bus. Overlapped, where the CPU is the device, they run in what compute leaves of
    the cores (on Linux, at the lowest priority)."""

    max_grad_norm: float | None = None
    """Bound of the global gradient norm (> 0), or None: no clipping. The factor is the one of
    ``torch.nn.utils.clip_grad_norm_`` and is applied in fp32. Default None: clipping outside, by
    that function or by a trainer, works unchanged unless gradients are streamed."""

    stream_gradients: bool = False
    """Take each gradient during the backward pass, as soon as it is complete, so that gradients of
    a few layers at a time are on the device instead of the model's. Default False: then gradients
    are read in ``step()`` and every loop works unchanged. When True, accumulate by
    ``optimizer.accumulate()``, and clip by ``clip_grad_norm_`` or ``max_grad_norm``; any other use
    of ``.grad`` is an error."""

    selection_log: str | os.PathLike[str] | None = None
    """File to which each scoring of channels is added (its skew, and which channels it chose; one JSON
    line), and each change of the update interval, for ``zenflow inspect``; or None: no log. One file for
    each optimizer. Default None; it costs a copy of 4 bytes a channel and some 100 microseconds for each
    weight that is scored."""

    def __post_init__(self) -> None:
        _check_number("topk_ratio", self.topk_ratio, 0, 1)
        _check_int("update_interval", self.update_interval, 1, auto=True)
        _check_int("max_update_interval", self.max_update_interval, 1)
        _check_int("select_interval", self.select_interval, 1, auto=True)
        _check_int("full_warm_up_rounds", self.full_warm_up_rounds, 0)
        _check_bool("overlap_step", self.overlap_step)
        _check_choice("update_rule", self.update_rule, ("replay", "accumulate"))
        _check_bool("lookahead", self.lookahead)
        _check_bool("preview", self.preview)
        _check_int("host_threads", self.host_threads, 1, auto=True)
        if self.max_grad_norm is not None:
            _check_positive("max_grad_norm", self.max_grad_norm)
        _check_bool("stream_gradients", self.stream_gradients)
        _check_path("selection_log", self.selection_log)

    @classmethod
    def of(cls, config: "ZenFlowConfig | Mapping[str, Any] | None") -> "ZenFlowConfig":
        """A config from a config, from a mapping with the same keys, or the defaults from None.

        Raises:
            ValueError: for an unknown key or a value out of range.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(
                f"config={config!r} is a {type(config).__name__}; "
                "pass a ZenFlowConfig, a mapping with its keys, or None"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in config if key not in known]
        if unknown:
            raise ValueError(f"unknown ZenFlow config keys {unknown!r}; legal keys: {known}")
        return cls(**config)

    @property
    def shows_previews(self) -> bool:
        """Whether gradients that wait can be shown."""
        return self.preview and self.update_rule == "replay" and not self.stream_gradients

    @property
    def interval_bound(self) -> int:
        """The largest update interval that this config can lead to, in steps."""
        return self.max_update_interval if self.update_interval == "auto" else self.update_interval


def _refuse(name: str, value: object, legal: str) -> None:
    raise ValueError(f"{name}={value!r} is not legal; it takes {legal}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        _refuse(name, value, f"a number from {low} to {high}")


def _check_positive(name: str, value: object) -> None:
    if not _is_number(value) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        _refuse(name, value, "a number > 0, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, *, auto: bool = False) -> None:
    if auto and isinstance(value, str) and value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        _refuse(name, value, f"an int >= {low}" + (' or "auto"' if auto else ""))


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def _check_path(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        _refuse(name, value, "a path, or None")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        _refuse(name, value, " or ".join(repr(choice) for choice in choices))
