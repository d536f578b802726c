"""WHAT OTHER ENGINES WRITE: one reader a file, found as policies are. No reader runs or unpickles what it reads."""

from kvinterp.recording.readers.registry import READERS, read_engine
