"""ZenFlow for PyTorch: AdamW whose state lives in host memory and whose training loop does not wait
for it.

>>> optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-5)

See :class:`ZenFlowAdamW`.
"""

from zenflow.config import ZenFlowConfig
from zenflow.optimizer import ZenFlowAdamW
from zenflow.runtime.stats import StepStats

__version__ = "0.1.0"

__all__ = ["StepStats", "ZenFlowAdamW", "ZenFlowConfig", "__version__"]
