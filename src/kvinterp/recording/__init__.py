"""WHAT IS KEPT: sites, the recorder, and the trace it fills."""

from kvinterp.recording.around import record
from kvinterp.recording.recorder import Recorder
from kvinterp.recording.trace import Trace
from kvinterp.recording.watch import Watch

__all__ = [
    "Recorder",
    "Trace",
    "Watch",
    "record",
]
