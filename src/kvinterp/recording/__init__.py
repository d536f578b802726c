"""WHAT IS KEPT: hooks on named sites, the recorder, and the trace that it fills."""

from kvinterp.recording.around import record
from kvinterp.recording.generated import generated
from kvinterp.recording.generation import Generation
from kvinterp.recording.hook import LOGITS, PathHook, SiteHook
from kvinterp.recording.recorder import Recorder
from kvinterp.recording.trace import Trace
