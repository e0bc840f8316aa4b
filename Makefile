PYTHON ?= python3
SOURCES := $(shell find onnxplain -type f -not -name '*.pyc')
# What the tests run in Node and in browsers. Without npm these tests are skipped.
LOCKS := $(if $(shell command -v npm),$(wildcard benchmarks/node/package-lock.json examples/web/package-lock.json))

.PHONY: demo test lint clean

# Explains the bundled model on bundled pictures with the runtime alone: no torch, no onnx.
demo: .venv-demo/installed
	.venv-demo/bin/onnxplain demo -o demo-out

test: .venv-test/installed lint $(LOCKS:package-lock.json=node_modules/installed)
	.venv-test/bin/python -m pytest -n 2 --dist loadfile

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

# The demo installs the package as users get it, so that data missing from the wheel is noticed.
.venv-demo/installed: .venv-demo/created $(SOURCES)
	.venv-demo/bin/python -m pip install --quiet '.[cpu]'
	touch $@

.venv-test/installed: .venv-test/created tests/constraints.txt
	.venv-test/bin/python -m pip install --quiet --constraint tests/constraints.txt \
	    --editable '.[cpu,export,evaluate,test]'
	.venv-test/bin/python -m pip install --quiet --constraint tests/constraints.txt --no-deps quantus
	touch $@

# The install script of onnxruntime-node would download CUDA libraries.
%/node_modules/installed: %/package-lock.json
	npm ci --prefix $* --ignore-scripts --no-audit --no-fund
	touch $@

.venv-%/created: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "onnxplain needs Python 3.10 or newer, $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv-$*
	touch $@

clean:
	rm -rf .venv-demo .venv-test demo-out build benchmarks/node/node_modules examples/web/node_modules
