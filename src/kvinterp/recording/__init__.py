"""WHAT IS KEPT: hooks on named sites, the recorder, and the trace that it fills."""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand

if TYPE_CHECKING:
    from kvinterp.recording.around import record
    from kvinterp.recording.generating import generated
    from kvinterp.recording.generation import Generation
    from kvinterp.recording.hook import LOGITS, PathHook, SiteHook
    from kvinterp.recording.recorder import Recorder
    from kvinterp.recording.trace import Trace

__all__ = [
    "LOGITS",
    "Generation",
    "PathHook",
    "Recorder",
    "SiteHook",
    "Trace",
    "generated",
    "record",
]

__getattr__ = on_demand.names_of(__name__)
