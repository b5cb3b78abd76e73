# Everything runs in .venv, which is made on first use. Needs Python 3.11 or newer, as the versions in constraints.txt do
# (the package itself: setup.py), pip, gcc and make.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# Where `make evaluate` and `make evaluate-quick` leave JSON files and pictures.
RESULTS ?= evaluation

# With bytecode in files, or each process that a test starts would compile all modules again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: venv demo demo-deepspeed test tests modules coverage kernels lint lint-in-one-piece docs campaign bench evaluate evaluate-quick clean

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard dsq_ckpt/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torchtitan spmd_types
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py --json demo.json

demo-deepspeed: $(STAMP)
	$(BIN)/python scripts/demo_deepspeed.py --json demo-deepspeed.json

# At once: lint takes what tests leave of two cores while they wait for processes, and is done before them.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 3 lint-in-one-piece tests

# As soon as it is known, and not between the lines of pytest.
lint-in-one-piece: $(STAMP)
	@found=$$(nice -n 19 $(MAKE) --no-print-directory lint 2>&1); status=$$?; echo "$$found"; exit $$status

tests: kernels modules
	$(PYTEST)

# Modules of tests are compiled once, while kernels are, and not by each worker. Workers show what cannot be imported.
modules: $(STAMP)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only --quiet >/dev/null || true

coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

# By Numba's path, which tests take too: beside the C library few kernels would be compiled.
kernels: $(STAMP)
	DSQ_CODER=numba $(BIN)/dsq warmup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs docs/_build
	@echo "open docs/_build/index.html"

campaign: $(STAMP)
	$(PYTEST) -m campaign
	$(BIN)/python scripts/campaign.py all --json benchmarks/results

bench: $(STAMP)
	$(BIN)/dsq bench --json bench.json

evaluate: $(STAMP)
	$(BIN)/python scripts/evaluate_all.py --directory "$(RESULTS)"

evaluate-quick: $(STAMP)
	$(BIN)/python scripts/evaluate_all.py --quick --directory "$(RESULTS)"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .coverage .hypothesis
	rm -rf docs/_build
	rm -f demo.json demo-deepspeed.json bench.json docs/cli_options.md
	rm -f dsq_ckpt/native/*.so
	find dsq_ckpt scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
