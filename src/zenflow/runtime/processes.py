"""Several processes that train one model: what keeps their weights the same, and what is refused."""

import torch.distributed as dist

from zenflow.config import ZenFlowConfig


def is_first_process() -> bool:
    """Whether this process speaks for its group, if it is in one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def check_processes(config: ZenFlowConfig) -> None:
    """Refuse what would let the processes of one process group drift apart.

    Under DistributedDataParallel each process applies the same averaged gradients, so weights stay the
    same as long as every choice follows from gradients alone.

    Raises:
        ValueError: naming the setting and its remedy.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    processes = f"in a process group of {dist.get_world_size()}"
    if config.stream_gradients:
        raise ValueError(
            f"stream_gradients=True {processes} would take gradients before they are averaged; "
            "set stream_gradients=False"
        )
    if config.overlap_step and config.update_interval == "auto" and config.interval_bound > 1:
        raise ValueError(
            f'update_interval="auto" {processes}: each would choose by its own clock, and their weights '
            f"would drift apart; set an int, for example update_interval={config.interval_bound}"
        )
