# Shortcuts for the commands in CONTRIBUTING.md. PYTHON=... picks another interpreter.
PYTHON ?= python
CXX_FILES = $(shell find csrc bench -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu')

.PHONY: install cuda test lint format bench clean

install:  # editable; incremental after the first time
	$(PYTHON) -m pip install --no-build-isolation -C build-dir=build/{wheel_tag} -e ".[test,dev]"

cuda:  # the same, with an error where CUDA cannot be built
	JAXGEMV_CUDA=ON $(MAKE) install

test:
	$(PYTHON) -m pytest

lint:
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_FILES)
	pyright

format:
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

bench:
	$(PYTHON) -m bench

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
