"""What would happen under this load: the real scheduler and cache with a clock instead of a model."""

from foreword.scheduler.simulation.cost import CostModel
from foreword.scheduler.simulation.simulator import SimulationReport, simulate
from foreword.scheduler.simulation.statistics import LatencyHistogram, TimeSeries
from foreword.scheduler.simulation.trace import Arrival, Trace, read_trace

__all__ = [
    "Arrival",
    "CostModel",
    "LatencyHistogram",
    "SimulationReport",
    "TimeSeries",
    "Trace",
    "read_trace",
    "simulate",
]
