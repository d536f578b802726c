"""What looks for a bug in a model's cache: the detectors of every file here, by name."""

from __future__ import annotations

import importlib
import pkgutil

from bank.detector import Detector

DETECTORS: dict[str, Detector] = {
    detector.name: detector
    for found in pkgutil.iter_modules(__path__)
    for detector in importlib.import_module(f"{__name__}.{found.name}").DETECTORS
}
