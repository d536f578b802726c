"""What runs on a GPU machine that is lent for minutes: jobs in processes of their own, each with a time limit.

    python3 tools/gpu/on_gpu.py look            # the machine, `pytest -m cuda`, the zoo's models, host reads    (call 1)
    python3 tools/gpu/on_gpu.py bench           # benchmarks/gpu.py at the shape of Llama-2-7B, alone            (call 2)
    python3 tools/gpu/on_gpu.py real            # SmolLM2-135M, and the FP16 paper's experiments on it           (call 3)
    ... --only JOB,JOB  --limit SECONDS  --slots N  --device cpu --tiny (the rehearsal)  --list

It is run in the project's root. Results lie in $KVI_GPU_WORK/results (default /tmp/kvi/results) as long as the machine is held, and all
of them so far are packed into $OUT at the end of every call: summary.json, results.tar.gz, log.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import json
import os
import platform
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

BEGAN = time.monotonic()
WORK = Path(os.environ.get("KVI_GPU_WORK", "/tmp/kvi"))
SITE = Path(os.environ.get("KVI_GPU_SITE", "/tmp/site"))
RESULTS, GPU = WORK / "results", Path(".gpu")
BACK = 15 * 2**20  # One file that comes back may have 16 MiB.
STUBS = {
    "__init__.py": "__version__ = '0'\nfrom .arrow_dataset import Dataset\nfrom .iterable_dataset import IterableDataset\n"
    "from .load import load_dataset\n",
    "arrow_dataset.py": "class Dataset:\n    pass\n",
    "iterable_dataset.py": "class IterableDataset:\n    pass\n",
    "load.py": "def load_dataset(*_, **__):\n    raise OSError('no datasets on this machine')\n",
}
GREEDY, TOP_K, TOP_P = STRATEGIES = ("greedy", "top_k(50,0.8)", "top_p(0.95,0.8)")
PYTEST = ["tests/contracts/test_cuda.py", "tests/contracts/test_metrics.py", "tests/core/paths", "-m", "cuda"]
PACKAGES = ("torch", "transformers", "transformer-lens", "numpy", "pandas", "pyarrow", "scipy", "statsmodels", "tokenizers", "gguf",
            "accelerate", "matplotlib", "pytest", "pytest-xdist", "pytest-timeout", "typer", "jaxtyping", "triton")  # fmt: skip


# Before the jobs --------------------------------------------------------------------------------------------------------


def install(said):
    """Installs the carried wheels, and writes the stub of datasets, where that is not done."""
    wheels = sorted((GPU / "whl").glob("*.whl"))
    done, names = SITE / "done.json", [w.name for w in wheels]
    said["wheels"] = len(names)
    if not wheels or (done.is_file() and json.loads(done.read_text()) == names):
        return
    how = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(SITE)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *how, *map(str, wheels)], check=True)
    if not any((Path(p) / "datasets").is_dir() for p in sys.path if p.endswith("-packages")):
        (SITE / "datasets").mkdir(exist_ok=True)
        for name, text in STUBS.items():
            (SITE / "datasets" / name).write_text(text)
    # Or every one of some twenty processes compiles it for itself.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", "0", str(SITE), "src", "tests"], stdout=subprocess.DEVNULL
    )
    done.write_text(json.dumps(names))


def put_together(said):
    """Keeps the parts of the model that came with this call, and puts it together once all are there."""
    listed = GPU / "run" / "parts.json"
    if not listed.is_file():
        said["model"] = "no parts.json: run prepare.sh"
        return
    about = json.loads(listed.read_text())
    target, kept = WORK / "cache" / "kvinterp" / "real" / "smollm2-135m" / about["name"], WORK / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    pieces = [kept / str(number) for number in range(1, len(about["parts"]) + 1)]
    for number, (piece, part) in enumerate(zip(pieces, about["parts"], strict=True), 1):
        came = GPU / f"part{number}" / "piece"
        if came.is_file() and not piece.is_file():
            data = came.read_bytes()
            if hashlib.sha256(data).hexdigest() == part["sha256"]:
                piece.write_bytes(data)
            else:
                said["damaged"] = [*said.get("damaged", []), number]
    missing = [number for number, piece in enumerate(pieces, 1) if not piece.is_file()]
    if not missing and not target.is_file():
        data = gzip.decompress(b"".join(piece.read_bytes() for piece in pieces))
        if hashlib.sha256(data).hexdigest() == about["sha256"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        else:
            said["damaged"] = ["the whole"]
    said["model"] = "here" if target.is_file() else f"parts missing: {missing}"


def environment():
    """What the jobs' processes are given."""
    path = [str(SITE), *(str(Path(p).resolve()) for p in ("src", "tools", "benchmarks/bugs"))]
    own = {
        "PYTHONPATH": ":".join(path), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "XDG_CACHE_HOME": str(WORK / "cache"), "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(WORK / "mpl"), "COLUMNS": "150", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return {**os.environ, **own}


# The jobs ---------------------------------------------------------------------------------------------------------------


class Notes:
    """What a job found so far, on disk after every note."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.found, self.began = folder, {}, time.monotonic()

    def __call__(self, name, value):
        """Adds a note."""
        self.found[name] = value
        self.found["seconds so far"] = round(time.monotonic() - self.began, 1)
        text = json.dumps(self.found, indent=1, default=plain)
        (self.folder / "notes.new").write_text(text)
        (self.folder / "notes.new").replace(self.folder / "notes.json")
        print(f"[{self.found['seconds so far']:6.1f}] {name}: {str(value)[:400]}", flush=True)

    @contextlib.contextmanager
    def part(self, name):
        """What fails inside is noted with its last lines, and the job goes on."""
        began = time.monotonic()
        try:
            yield
        except KeyboardInterrupt:
            self(f"{name}: cut off", "by the time limit")
            raise
        except BaseException as error:
            self(
                f"{name}: FAILED",
                {"error": f"{type(error).__name__}: {error}"[:800], "where": traceback.format_exc()[-2500:]},
            )
        else:
            self(f"{name}: seconds", round(time.monotonic() - began, 2))


def plain(value):
    """Numbers of numpy and the like as JSON has them."""
    for way in ("item", "to_dict"):
        if hasattr(value, way):
            with contextlib.suppress(Exception):
                return getattr(value, way)()
    return str(value)


def called(function, *arguments):
    """The exit code of a command line that runs in this process."""
    before, sys.argv = sys.argv, ["", *arguments]
    try:
        return function() or 0
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = before


def versions(note, ask):
    """The packages, and the machine."""
    import importlib.metadata as metadata

    import torch

    from kvinterp.models.provenance import machine

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "MISSING"
    note("versions", {"python": platform.python_version(), **found})
    note("machine", machine(torch.device(ask.device)))
    if ask.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        note(
            "device", {"name": about.name, "capability": f"{about.major}.{about.minor}", "gib": about.total_memory / 2**30}
        )
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv"]
        note("nvidia-smi", subprocess.run(asked, capture_output=True, text=True).stdout)


def tests(note, ask):
    """`pytest -m cuda` on some workers; the rehearsal only collects them."""
    log = note.folder / "pytest.log"
    how = ["-n", "0", "--collect-only"] if ask.tiny else ["-n", "6", "--dist", "load", "-vv", "-rfEs", "--durations", "25"]
    how += ["-p", "no:cacheprovider", "--timeout", "100", "--tb", "short", f"--junitxml={note.folder}/junit.xml"]
    with log.open("w") as into:
        child = subprocess.Popen([sys.executable, "-m", "pytest", *PYTEST, *how], stdout=into, stderr=subprocess.STDOUT)
        try:
            note("rc", child.wait())
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(14)
            raise
        finally:
            text = log.read_text(errors="replace").splitlines()
            words = ("PASSED", "FAILED", "ERROR", "SKIPPED")
            note("seen", Counter(word for line in text for word in words if f" {word} " in line[:40]))
            note("last", text[-1:])
            note("failed", [line[:300] for line in text if line.startswith(("FAILED", "ERROR"))][:60])
            note("skipped", [line[:200] for line in text if line.startswith("SKIPPED")][:20])
    if child.returncode:
        raise RuntimeError(f"pytest ended with {child.returncode}: {text[-1:]}")


def numbers_of(both):
    """The numbers of a comparison, short."""
    s, later = both.summary(), both.layers[both.layers["step"] > 0] if len(both.layers) else both.layers
    drift = later[later["site"] == "resid_post"].groupby("layer")["relative_l2"].median() if len(later) else {}
    errors = (
        both.kv_steps[both.kv_steps["step"] > 0].groupby("tensor")["relative_error"].median() if len(both.kv_steps) else {}
    )
    return {
        "prompts": len(both.examples), "steps": len(both.steps), "bitwise equal steps": s["bitwise_equal_steps"],
        "step 0 equal": bool((both.steps.loc[both.steps["step"] == 0, "max_abs_logit"] == 0).all()),
        "flipped prompts": int(both.examples["flip_index"].notna().sum()),
        "first flips": [None if f != f else int(f) for f in both.examples["flip_index"]],
        "steps with another token": int(both.steps["flipped"].sum()),
        "median KL": float(both.steps["kl"].median()), "mean KL": s["mean_kl"], "before flip": s["mean_kl_before_flip"],
        "largest logit difference": s["max_abs_logit"],
        "median drift by layer": {int(k): float(v) for k, v in dict(drift).items()},
        "median cache error": {str(k): float(v) for k, v in dict(errors).items()},
        "failures": both.failures["message"].tolist()[:3], "where": both.where().splitlines(),
    }  # fmt: skip


def compared(note, ask, model, dtype, kind, form, steps, strategies=STRATEGIES):
    """Cached against recompute under each strategy, matched; then the texts in the free protocol."""
    import kvinterp as kv

    with note.part(f"{kind} {dtype}"):
        adapter = kv.load_model(model, kind=kind, dtype=dtype, device=ask.device)
        prompts = kv.load_prompts(form)
        # What the first calls of every kernel cost is not counted.
        kv.compare(adapter, prompts[:1], max_new_tokens=3, progress="none")
        options = {"max_new_tokens": steps, "progress": "none"}
        for strategy in strategies:
            name, began = f"{kind} {dtype} {strategy}", time.monotonic()
            with note.part(name):
                both = kv.compare(adapter, prompts, strategy=strategy, record="resid_post,pattern,kv", **options)
                note(name, {**numbers_of(both), "seconds a step": (time.monotonic() - began) / max(1, len(both.steps))})
                both.save(note.folder / f"{kind}-{dtype}-{strategy.split('(')[0]}", existing="overwrite")
            with note.part(f"{name} free"):
                both = kv.compare(adapter, prompts, strategy=strategy, protocol="free", record="", **options)
                note(f"{name} free", numbers_of(both))


def zoo(kind, note, ask):
    """A small trained model in both dtypes of 16 bits."""
    for dtype in ("float16",) if ask.tiny else ("float16", "bfloat16"):
        form, steps, strategies = ("arithmetic:1", 3, [GREEDY, TOP_P]) if ask.tiny else ("arithmetic:10", 64, STRATEGIES)
        compared(note, ask, "zoo:mistral-mini", dtype, kind, form, steps, strategies)


def real_compare(kind, dtype, note, ask):
    """SmolLM2 on natural prompts."""
    if ask.tiny:
        return compared(note, ask, "zoo:gqa2-mini", dtype, kind, "arithmetic:1", 2, [GREEDY])
    return compared(note, ask, "real:smollm2-135m", dtype, kind, "natural:6" if kind == "native" else "natural:4", 64)


def patched(model, kinds, dtype, form, note, ask):
    """Sweeps, localise and decompose."""
    import kvinterp as kv

    model, kinds, form, steps = ("zoo:gqa2-mini", kinds[:1], "arithmetic:1", 2) if ask.tiny else (model, kinds, form, 6)
    sites = [
        ("kv", "cumulative", "into-cached"),
        ("resid_post", "single", "into-recompute"),
        ("resid_mid", "single", "into-recompute"),
    ]
    prompts, options = kv.load_prompts(form), {"max_new_tokens": steps, "progress": "none"}
    for kind in kinds:
        with note.part(f"load {kind} {dtype}"):
            adapter = kv.load_model(model, kind=kind, dtype=dtype, device=ask.device)
        for number, prompt in enumerate(prompts[:2]):
            with note.part(f"localise {kind} {dtype} prompt {number}"):
                note(f"localise {kind} {dtype} prompt {number}", repr(kv.localise(adapter, prompt)))
        for site, over, direction in sites[:1] if ask.tiny else sites:
            name = f"sweep {kind} {dtype} {site} {over} {direction}"
            with note.part(name):
                swept = kv.sweep(
                    adapter, prompts, site, over, direction=direction, distance="l2,kl", controls="quick", **options
                )
                swept.save(note.folder / name.replace(" ", "-"), existing="overwrite")
                table = swept.aggregate()
                columns = [
                    c for c in ("sweep", "layer", "median", "interval_low", "interval_high", "defined") if c in table
                ]
                note(name, {"what": repr(swept), "rows": table[columns].round(4).to_dict("records")[:80],
                            "controls": swept.controls.groupby("control")["recovery"].median().to_dict()})  # fmt: skip
        with note.part(f"decompose {kind} {dtype}"):
            split = kv.decompose(adapter, prompts, **options)
            split.save(note.folder / f"decompose-{kind}-{dtype}", existing="overwrite")
            note(f"decompose {kind} {dtype}", split.summary())


def audited(model, kind, note, ask):
    """The table of kernels, and an audit."""
    import kvinterp as kv

    model = "zoo:gqa2-mini" if ask.tiny else model
    options = (
        {"rungs": ("float64", "float16"), "lengths": (5,), "steps": 1, "checks": "none", "sweep": "no", "programs": 1}
        if ask.tiny
        else {}
    )
    # transformers before 5.23 gives Gemma-2 SDPA by default, which leaves out its soft cap: another function.
    loaded = {"kind": kind, "dtype": "float16", "device": ask.device} | ({"attention": "eager"} if "gemma" in model else {})
    with note.part("kernels"):
        table = kv.kernels_table(kv.load_model(model, **loaded), sizes=(1, 5) if ask.tiny else (1, 2, 17, 64, 257))
        table.save(note.folder / "kernels", existing="overwrite")
        note("kernels", table.summary().to_dict("records")[:40])
    with note.part("audit"):
        verdict = kv.audit(kv.load_model(model, **loaded), **options)
        verdict.save(note.folder / "audit")
        note("audit", {"verdict": repr(verdict), "exit": verdict.exit_code, "seconds": list(verdict.seconds)[:40]})


def reads(note, ask):
    """By kind and verb: host reads at a step with the lines that ask, as torch warns of them, and milliseconds a step."""
    import torch

    import kvinterp as kv

    cuda, prompt, few, many = ask.device == "cuda", list(range(3, 40)), 5, 9
    few, many = (few, many) if cuda else (2, 3)
    works = {
        "run cached": lambda m, n: kv.run(m, prompt, "cached", max_new_tokens=n, stop="length"),
        "run recompute": lambda m, n: kv.run(m, prompt, "recompute", max_new_tokens=n, stop="length"),
        "compare": lambda m, n: kv.compare(m, prompt, max_new_tokens=n, stop="length", progress="none"),
        "sweep": lambda m, n: kv.sweep(
            m, prompt, "resid_mid", stop="length", max_new_tokens=n, controls="none", progress="none"
        ),
        "decompose": lambda m, n: kv.decompose(m, prompt, max_new_tokens=n, progress="none"),
    }
    for kind in ("native",) if ask.tiny else ("native", "hooked"):
        model = kv.load_model("zoo:mistral-mini", kind=kind, dtype="float16", device=ask.device)
        for name, work in works.items():
            with note.part(f"{kind}, {name}"):
                work(model, many)
                lines, seconds = [], []
                for count in (few, many):
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        if cuda:
                            torch.cuda.set_sync_debug_mode("warn")
                        work(model, count)
                    if cuda:
                        torch.cuda.set_sync_debug_mode("default")
                        torch.cuda.synchronize()
                    places = (
                        "/".join(Path(w.filename).parts[-3:]) + f":{w.lineno}"
                        for w in caught
                        if "synchroniz" in str(w.message)
                    )
                    lines.append(Counter(places))
                    began = time.perf_counter()
                    work(model, count)
                    if cuda:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - began)
                more = {k: (lines[1][k] - lines[0][k]) / (many - few) for k in lines[1]}
                note(f"{kind}, {name}", {
                    "milliseconds a step": 1e3 * (seconds[1] - seconds[0]) / (many - few), "reads a step": sum(more.values()),
                    "lines a step": {k: v for k, v in sorted(more.items(), key=lambda i: -i[1]) if v},
                    "lines in all": dict(lines[1].most_common(12)),
                })  # fmt: skip


def bench(note, ask):
    """benchmarks/gpu.py at the shape of Llama-2-7B, both kinds."""
    steps = (
        ["--steps", "2", "--prompt", "8", "--tiny", "--kinds", "native"]
        if ask.tiny
        else ["--steps", "32", "--prompt", "256"]
    )
    main = runpy.run_path("benchmarks/gpu.py")["main"]
    rc = called(main, "--models", "llama2-7b", "--device", ask.device, "--out", str(note.folder), *steps)
    for file in note.folder.glob("gpu-*.json"):
        note(file.name, json.loads(file.read_text())["models"]["llama2-7b"])
    if rc:
        raise RuntimeError(f"benchmarks/gpu.py ended with {rc}")


def study(name, options, tiny, note, ask):
    """One of the FP16 paper's experiments, by the command that users run; for the rehearsal with other options."""
    from kvinterp.cli import app

    model, options = ("zoo:gqa2-mini", tiny) if ask.tiny else ("real:smollm2-135m", options)
    folder = note.folder / "study"
    rc = called(
        functools.partial(
            app, ["study", name, model, *options, "--device", ask.device, "--out", str(folder), "--overwrite"]
        )
    )
    for file in folder.glob("*.html"):
        file.unlink()
    shutil.rmtree(folder / "figures", ignore_errors=True)
    summary = folder / "summary.json"
    note("summary", json.loads(summary.read_text()) if summary.is_file() else None)
    if rc:
        raise RuntimeError(f"kvinterp study {name} ended with {rc}")


FEW = ["--prompts", "arithmetic:1"]
TEXTS = ["--prompts", "arithmetic(12,shots=5)"]
BEHAVIOUR = ["--seeds", "1", "--controls", "3", "--block", "3", "--max-new-tokens", "64", *TEXTS]


def text_study(strategy):
    """The job of `study behaviour` under one strategy."""
    seeds = BEHAVIOUR[2:] if strategy == GREEDY else BEHAVIOUR
    few = [*FEW, "--max-new-tokens", "2", "--controls", "0"]
    return functools.partial(study, "behaviour", [*seeds, "--strategy", strategy], [*few, "--strategy", strategy])


# By call: name: (function, seconds it may take, an upper estimate on an H100 beside the others, whether it needs the model), in
# the order of their value.
PLANS = {
    "look": {
        "versions": (versions, 40, False),
        "tests": (tests, 140, False),
        "zoo-hooked": (functools.partial(zoo, "hooked"), 140, False),
        "zoo-audit-native": (functools.partial(audited, "zoo:mistral-mini", "native"), 140, False),
        "zoo-patch": (functools.partial(patched, "zoo:mistral-mini", ["native", "hooked"], "float16", "arithmetic:6"), 140, False),
        "zoo-native": (functools.partial(zoo, "native"), 140, False),
        "zoo-audit-gemma": (functools.partial(audited, "zoo:gemma2-mini", "native"), 140, False),
        "zoo-audit-hooked": (functools.partial(audited, "zoo:mistral-mini", "hooked"), 140, False),
        "reads": (reads, 100, False),
    },
    "bench": {"bench": (bench, 165, False)},
    "real": {
        "real-native-fp16": (functools.partial(real_compare, "native", "float16"), 185, True),
        "real-hooked-fp16": (functools.partial(real_compare, "hooked", "float16"), 185, True),
        "texts-greedy": (text_study(GREEDY), 185, True),
        "real-patch-fp16": (functools.partial(patched, "real:smollm2-135m", ["native"], "float16", "natural:6"), 185, True),
        "layers": (functools.partial(study, "layer-drift", ["--divergent", "5", *TEXTS], [*FEW, "--divergent", "1", "--max-new-tokens", "3"]), 120, True),
        "where": (functools.partial(study, "localisation", ["--count", "3", "--max-new-tokens", "8", "--prompts", "arithmetic(8,shots=3)"],
                      [*FEW, "--count", "1", "--max-new-tokens", "2", "--part", "paper"]), 185, True),
        # A forward in the fixed order of batch_invariant starts a hundred times as many kernels: as few of these as possible.
        "cause": (functools.partial(study, "root-cause", ["--few-prompts", "6", "--ladder-prompts", "2", "--ladder-steps", "3",
                      "--prompts", "arithmetic(6,shots=1)"],
                      [*FEW, "--few-prompts", "1", "--ladder-prompts", "1", "--ladder-steps", "2"]), 185, True),
        "flips": (functools.partial(study, "flip-law", ["--dtype", "bfloat16", "--prompts", "natural:18"], [*FEW, "--max-new-tokens", "2"]), 185, True),
        "real-native-bf16": (functools.partial(real_compare, "native", "bfloat16"), 185, True),
        "real-audit": (functools.partial(audited, "real:smollm2-135m", "native"), 185, True),
        "texts-top_k": (text_study(TOP_K), 185, True),
        "texts-top_p": (text_study(TOP_P), 185, True),
        "real-hooked-bf16": (functools.partial(real_compare, "hooked", "bfloat16"), 170, True),
        "real-patch-bf16": (functools.partial(patched, "real:smollm2-135m", ["native"], "bfloat16", "natural:6"), 120, True),
    },
}  # fmt: skip
SLOTS = {"look": 9, "bench": 1, "real": 11}
LIMITS = {"look": 150, "bench": 170, "real": 200}


def run_job(name, ask, folder):
    """Runs a job in this process; its notes, in which the name of what failed ends with ``FAILED``."""
    note = Notes(folder)
    note("began", time.strftime("%H:%M:%S"))
    with contextlib.suppress(KeyboardInterrupt), note.part(name):
        PLANS[ask.plan][name][0](note, ask)
    return note.found


# Around the jobs --------------------------------------------------------------------------------------------------------


def run(ask, said, ended, running, out):
    """Runs the plan's jobs beside each other; what runs over its limit is interrupted, then killed."""
    jobs = {n: j for n, j in PLANS[ask.plan].items() if not ask.only or n in ask.only}
    put_together(said)
    install(said)
    if said["model"] != "here" and not ask.tiny:
        left = [name for name, (_, _, needs) in jobs.items() if needs]
        jobs = {name: job for name, job in jobs.items() if name not in left}
        said["left out, for want of the model"] = left
    print(f"set up in {time.monotonic() - BEGAN:.1f} s: {said}", flush=True)
    waiting, end = list(jobs), BEGAN + ask.limit
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < ask.slots and now < end - 5:
            name = waiting.pop(0)
            folder = RESULTS / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "done").unlink(missing_ok=True)
            given = [ask.plan, "--job", name, "--device", ask.device, *["--tiny"] * ask.tiny]
            with (folder / "log.txt").open("w") as log:
                child = subprocess.Popen([sys.executable, __file__, *given], stdout=log, stderr=subprocess.STDOUT, env=environment(),
                                         start_new_session=True)  # fmt: skip
            slow = 1 if ask.device == "cuda" else 6  # A rehearsal on a few shared cores.
            running[name] = [child, now, min(now + slow * jobs[name][1], end), 0]
        for name, state in list(running.items()):
            child, began, limit, asked = state
            if child.poll() is not None:
                ended[name] = {
                    "seconds": round(now - began, 1),
                    "rc": child.returncode,
                    "how": ("ended", "interrupted", "killed")[asked],
                }
                (RESULTS / name / "done").write_text(json.dumps(ended[name]))
                del running[name]
                print(f"[{now - BEGAN:6.1f}] {name}: {ended[name]}", flush=True)
                if running or waiting:
                    with contextlib.suppress(Exception):
                        pack(said, ended, out)  # What is there if this process itself is cut off.
            elif asked < 2 and now > limit:
                # The whole group: a job's own child writes what is finished.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, (signal.SIGINT, signal.SIGKILL)[asked])
                state[2:] = now + 15, asked + 1
        if waiting and not running and time.monotonic() >= end - 5:
            break
        time.sleep(0.1)
    said["not begun"] = waiting


def pack(said, ended, out):
    """Everything so far, of this call and those before it on this machine, into the folder that comes back."""
    out.mkdir(parents=True, exist_ok=True)
    notes = {}
    for folder in sorted(RESULTS.iterdir()) if RESULTS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError):
            notes[folder.name] = json.loads((folder / "notes.json").read_text())
            notes[folder.name]["ended"] = json.loads((folder / "done").read_text())
    summary = {"setup": said, "this call": ended, "seconds": round(time.monotonic() - BEGAN, 1), "jobs": notes}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, default=plain))
    for file in RESULTS.glob("bench/gpu-*.json"):
        shutil.copy(file, out)
    files = [f for f in RESULTS.rglob("*") if f.is_file() and not f.name.endswith((".html", ".png", ".svg", ".pdf"))]
    files.sort(key=lambda f: f.stat().st_size)
    with tarfile.open(out / "results.tar.gz", "w:gz", compresslevel=3) as tar:
        room, left = 3 * BACK, []
        for file in files:
            room -= file.stat().st_size
            if room > 0 and (out / "results.tar.gz").stat().st_size < BACK - 2 * file.stat().st_size:
                tar.add(file, str(file.relative_to(RESULTS)))
            else:
                left.append(str(file.relative_to(RESULTS)))
    with (out / "log.txt").open("w") as log:
        for file in sorted(RESULTS.glob("*/log.txt")):
            log.write(f"===== {file.parent.name}\n{file.read_text(errors='replace')[-20000:]}\n")
    return summary, left


def show(summary, left):
    """The end of the output: a line a job, what failed, and what was found."""
    print("\n" + "=" * 20, "results of all calls on this machine")
    for name, notes in summary["jobs"].items():
        bad = [key for key in notes if "FAILED" in key or "cut off" in key]
        print(f"{name}: {notes.get('ended')}" + (f"; NOT WELL: {bad}" if bad else ""))
        for key in bad[:3]:
            print("    ", str(notes[key]["error"] if isinstance(notes[key], dict) else notes[key])[:300])
    for name, notes in summary["jobs"].items():
        for key, value in notes.items() if name in summary["this call"] else ():
            if isinstance(value, dict) and "flipped prompts" in value:
                print(
                    f"{name} | {key}: {value['flipped prompts']}/{value['prompts']} flip at {value['first flips']}, mean KL {value['mean KL']}"
                )
            elif key in ("last", "failed", "audit") or (key.startswith(("localise", "gpu-")) and "seconds" not in key):
                print(f"{name} | {key}: {str(value.get('verdict', value) if isinstance(value, dict) else value)[:600]}")
    if left:
        print("left out of results.tar.gz for their size:", left[:10])
    print(f"{summary['seconds']} s of {summary['setup']}")


def asked(arguments=None):
    """What the command line asks for."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("plan", choices=[*PLANS])
    given.add_argument("--device", default="cuda")
    given.add_argument("--tiny", action="store_true")
    given.add_argument("--only", type=lambda text: text.split(","), default=[])
    given.add_argument("--limit", type=float)
    given.add_argument("--slots", type=int)
    given.add_argument("--job")
    given.add_argument("--list", action="store_true")
    ask = given.parse_args(arguments)
    ask.limit, ask.slots = ask.limit or LIMITS[ask.plan], ask.slots or SLOTS[ask.plan]
    unknown = [name for name in [*ask.only, *filter(None, [ask.job])] if name not in PLANS[ask.plan]]
    if unknown:
        given.error(f"no job {unknown} in {ask.plan}: there are {', '.join(PLANS[ask.plan])}")
    return ask


def main():
    """A call, one of its jobs, or the list of them."""
    ask = asked()
    if ask.list:
        print(*PLANS[ask.plan], sep="\n")
        return 0
    if ask.job:
        return int(any("FAILED" in key for key in run_job(ask.job, ask, RESULTS / ask.job)))
    said, ended, running, out = {}, {}, {}, Path(os.environ.get("OUT", WORK / "out"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run(ask, said, ended, running, out)
    finally:
        for child, *_ in running.values():
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        show(*pack(said, ended, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
