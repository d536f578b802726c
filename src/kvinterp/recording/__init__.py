"""WHAT IS KEPT: sites, the recorder, and the trace it fills."""

from kvinterp.recording.recorder import Recorder, record
from kvinterp.recording.trace import Trace
from kvinterp.recording.watch import Watch, chosen_layers

__all__ = ["Recorder", "Trace", "Watch", "chosen_layers", "record"]
