"""Simulate a load: the real scheduler and cache with a clock instead of a model."""

from foreword.simulation.cost import CostModel
from foreword.simulation.recording import Measured, Recording, read_recording
from foreword.simulation.replica import MAX_REPLICAS, Fleet
from foreword.simulation.report import SimulationReport
from foreword.simulation.simulator import MAX_PROCESSES, simulate
from foreword.simulation.statistics import Durations, LatencyHistogram, TimeSeries
from foreword.simulation.trace import MAX_COPIES, Arrival, Load, Trace, read_trace

__all__ = [
    "MAX_COPIES", "MAX_PROCESSES", "MAX_REPLICAS", "Arrival", "CostModel", "Durations", "Fleet", "LatencyHistogram",
    "Load", "Measured", "Recording", "SimulationReport", "TimeSeries", "Trace", "read_recording", "read_trace",
    "simulate",
]  # fmt: skip
