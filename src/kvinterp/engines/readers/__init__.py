"""WHAT OTHER ENGINES WRITE: one reader a file, found as policies are. No reader runs or unpickles
what it reads.
"""

from kvinterp.engines.readers.registry import READERS, read_engine
