"""Runs the tests marked `bits` as other processors would: torch, oneDNN and MKL are told to use fewer instructions.

python tests/processors.py                       every processor, every such test of the default sample
python tests/processors.py --only avx2 --share 4   one of them, a quarter of the tests
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

PROCESSORS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "KVINTERP_THREADS": "1",
    },
    "sse": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "KVINTERP_THREADS": "2",
    },
    "avx2-and-avx512": {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "COMPATIBLE",
        "KVINTERP_THREADS": "2",
    },
    "default-and-avx2": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE",
        "KVINTERP_THREADS": "1",
    },
    "own-two-threads": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "KVINTERP_THREADS": "2"},
}  # fmt: skip
"""Five runs in which every setting occurs: two of torch's levels and its own, three of oneDNN's, four of MKL's, one thread
and two. All 48 combinations would take an hour each way and show no kernel that these do not."""


def main() -> int:
    """Runs pytest once a processor; the exit code is 1 where any run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PROCESSORS, help="a processor; may be given again")
    parser.add_argument("--share", type=int, default=1, help="run one in so many of the tests, others on each processor")
    parser.add_argument("--everything", action="store_true", help="the full product of every law, and what takes long")
    parser.add_argument("--workers", default="2", help="processes that test beside each other")
    parser.add_argument("tests", nargs="*", help="files or folders; all of them unless given")
    given = parser.parse_args()
    failed = []
    for number, name in enumerate(given.only or PROCESSORS):
        settings = PROCESSORS[name]
        print(f"== as {name}: {' '.join(f'{key}={value}' for key, value in settings.items())}", flush=True)
        # Threads that wait for each other spin by default; on few cores that takes most of the time, and changes no bit.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": settings["KVINTERP_THREADS"],
            "OMP_WAIT_POLICY": "PASSIVE",
            **settings,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-m", "bits", "-p", "no:cacheprovider"]
        command += ["-n", given.workers, "--dist", "loadgroup"]
        command += ["--everything"] * given.everything
        if given.share > 1:
            command += ["--share", f"{number % given.share + 1}/{given.share}"]
        began = time.perf_counter()
        if subprocess.run([*command, *given.tests], env=environment, check=False).returncode:
            failed.append(name)
        print(f"== as {name} took {time.perf_counter() - began:.0f} s", flush=True)
    print(f"failed as {', '.join(failed)}" if failed else "passed as every processor")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
