"""WHAT OTHER ENGINES WRITE, one file a format, found as policies are; nothing that is read is run or unpickled."""

from kvinterp.recording.readers.registry import READERS, read_engine

__all__ = ["READERS", "read_engine"]
