#!/usr/bin/env bash
# Packs what a lent GPU machine lacks into .gpu/ (ignored by git), so that every call fits under the size limit.
# Run in the project's root, without a GPU, before asking for one:  bash tools/gpu/prepare.sh
# Run it again whenever the tree changed; it keeps what is right already.
set -euo pipefail
test -f src/kvinterp/__init__.py && test -f constraints.txt || { echo "run this in the project's root" >&2; exit 2; }
PYTHON=${PYTHON:-.venv/bin/python}
test -x "$PYTHON" || { echo "make env first: $PYTHON is missing" >&2; exit 2; }

mkdir -p .gpu/whl .gpu/run

# 1. Wheels. Exactly what that machine lacks. Not wandb, datasets, transformers-stream-generator: TransformerLens imports wandb
#    only to train, never the third, and of datasets three names, for which on_gpu.py writes a stub.
lens=$(sed -n 's/^transformer-lens==//p' constraints.txt)
gguf=$(sed -n 's/^gguf==//p' constraints.txt)
wanted="transformer-lens==${lens:-3.9.0} gguf==${gguf:-0.19.0} circuitsvis==1.43.3 beartype==0.23.1 better-abc==0.0.3
 fancy-einsum==0.0.3 typeguard==4.6.1 importlib-metadata==10.2.0 lazy-importer==0.1.0"
printf '%s\n' $wanted | sort >.gpu/wanted.new
if ! cmp -s .gpu/wanted.new .gpu/wanted || [ "$(ls .gpu/whl/*.whl 2>/dev/null | wc -l)" != "$(wc -l <.gpu/wanted)" ]; then
  rm -f .gpu/whl/*.whl .gpu/wanted
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d .gpu/whl $wanted 2> >(grep -v 'is ignored: it is neither' >&2)
  mv .gpu/wanted.new .gpu/wanted
fi
rm -f .gpu/wanted.new

# 2. SmolLM2-135M, compressed (which gains 6%) and cut, so that tree, wheels and one part stay below the limit.
"$PYTHON" -m kvinterp.models.real smollm2-135m >/dev/null
"$PYTHON" - "$(git ls-files -co --exclude-standard -z | xargs -0 stat -c %s 2>/dev/null | awk '{s+=$1} END {print s}')" <<'PY'
import gzip, hashlib, json, math, pathlib, shutil, sys

from kvinterp.models import real

LIMIT, HARD = 60 * 2**20, 63 * 2**20  # More than 64 MiB does not travel; three calls shall suffice.
home, tree = pathlib.Path(".gpu"), int(sys.argv[1])
model = real.path("smollm2-135m")
digest = hashlib.sha256(model.read_bytes()).hexdigest()
packed = home / "model.gz"
told = home / "run" / "parts.json"
known = json.loads(told.read_text()) if told.is_file() else {}
fixed = tree + sum(f.stat().st_size for folder in ("whl", "run") for f in (home / folder).iterdir() if f.is_file())


def whole():
    """Whether the parts that are here are those of this model and small enough."""
    try:
        sizes = [p["bytes"] for p in known["parts"]]
        if known.get("sha256") != digest or fixed + max(sizes) > HARD or len(sizes) != parts_for(sum(sizes)):
            return False
        return all(
            hashlib.sha256((home / f"part{n}" / "piece").read_bytes()).hexdigest() == p["sha256"]
            for n, p in enumerate(known["parts"], 1)
        )
    except (OSError, KeyError):
        return False


def parts_for(size):
    """Three calls have one each; more only where the tree is too large for that."""
    return max(3, math.ceil(size / max(HARD - fixed, 1)))


if not whole():
    with model.open("rb") as source, packed.open("wb") as into, gzip.GzipFile("", "wb", 1, into, mtime=0) as zipped:
        shutil.copyfileobj(source, zipped, 1 << 22)
    data = packed.read_bytes()
    if HARD - fixed < 5 << 20:
        sys.exit(f"the tree alone is {tree / 2**20:.1f} MiB: ignore or remove untracked files, then run this again.")
    count = parts_for(len(data))
    size = math.ceil(len(data) / count)
    for old in home.glob("part*"):
        shutil.rmtree(old)
    parts = []
    for number in range(count):
        piece = data[number * size : (number + 1) * size]
        folder = home / f"part{number + 1}"
        folder.mkdir()
        (folder / "piece").write_bytes(piece)
        parts.append({"bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    known = {"name": model.name, "bytes": model.stat().st_size, "sha256": digest, "parts": parts}
    told.write_text(json.dumps(known, indent=1))
    packed.unlink()
    assert whole()

largest = max(p["bytes"] for p in known["parts"])
print(f"tree {tree / 2**20:.1f} MiB, wheels and recipe {(fixed - tree) / 2**20:.1f} MiB, "
      f"{len(known['parts'])} parts of {largest / 2**20:.1f} MiB; a call carries {(fixed + largest) / 2**20:.1f} MiB of 64.")
if fixed + largest > LIMIT:
    print("over 60 MiB: ignore or remove untracked files before it reaches 64.")
if len(known["parts"]) > 3:
    print("MORE THAN 3 PARTS: the third call cannot have the whole model. Remove untracked files, or send a part in a call of its own.")
PY
echo "ready: .gpu/whl, .gpu/run, .gpu/part1, .gpu/part2, ...; next: the rehearsal on the CPU, then the calls (tools/gpu/README.md)."
