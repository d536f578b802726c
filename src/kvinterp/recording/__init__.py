"""WHAT IS KEPT: sites, the recorder, and the trace it fills."""

from kvinterp.recording.around import record
from kvinterp.recording.recorder import Recorder
from kvinterp.recording.trace import Trace
from kvinterp.recording.watch import Watch, chosen_heads, chosen_layers, chosen_steps, whole_number

__all__ = [
    "Recorder",
    "Trace",
    "Watch",
    "chosen_heads",
    "chosen_layers",
    "chosen_steps",
    "record",
    "whole_number",
]
