"""The one place the version is written; importable without importing the package's parts."""

__version__ = "0.1.0"
