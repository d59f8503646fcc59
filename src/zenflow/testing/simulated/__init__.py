"""A simulated accelerator, link and host: late effects, early effects, virtual time.

Work goes through exactly the runtime's seams. Its time follows from rates; its effect on memory comes
as early or as late as the order of waits allows. So a wait that the runtime lacks is a wrong number,
and a stall is an exact one.
"""

from zenflow.testing.simulated.clock import Simulation
from zenflow.testing.simulated.policy import Effects, Policy, policies
from zenflow.testing.simulated.training import (
    Rates,
    SimulatedMachine,
    SimulatedTraining,
    SimulatedZenFlowAdamW,
)

__all__ = [
    "Effects",
    "Policy",
    "Rates",
    "SimulatedMachine",
    "SimulatedTraining",
    "SimulatedZenFlowAdamW",
    "Simulation",
    "policies",
]
