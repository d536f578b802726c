"""Where a benchmark's numbers are kept: one JSON file a benchmark and machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console


def keep(folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Writes ``NAME-DEVICE.json`` and says so; ``content["provenance"]`` names the device."""
    label = re.sub(r"\W+", "-", content["provenance"]["device"]).strip("-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{label}.json"
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    Console().print(f"written to {target}")
    return target
