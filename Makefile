# Shortcuts for the commands in CONTRIBUTING.md. PYTHON=... picks another interpreter.
PYTHON ?= python
CXX_FILES = $(shell find csrc bench -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu')

.PHONY: install cuda test asan ubsan tsan lint format bench sdist wheel release-notes release-check clean

install:  # editable; incremental after the first time
	$(PYTHON) -m pip install --no-build-isolation -C build-dir=build/{wheel_tag} -e ".[test,dev]"

cuda:  # the same, with an error where CUDA cannot be built
	JAXGEMV_CUDA=ON $(MAKE) install

test:
	$(PYTHON) -m pytest

# The tests with a sanitizer in _cpu, each built into an environment of its own that takes all else from this one.
# Python is not instrumented, so the sanitizer's library is loaded before it. Without the stacks that AddressSanitizer of
# gcc 13 would use: vectors of 64 bytes lie askew in them, and the first aligned store ends the program.
SITE = $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")
define sanitized_install
	$(PYTHON) -m venv --without-pip build/$@
	echo $(SITE) > "$$(build/$@/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
	JAXGEMV_CUDA=OFF JAXGEMV_SANITIZE=$(1) build/$@/bin/python -m pip install --no-build-isolation --no-deps \
	-C install.strip=false -C build-dir=build/$@/{wheel_tag} -e .
endef
library = $(shell $(CXX) -print-file-name=$(1))

asan:
	$(call sanitized_install,address)
	LD_PRELOAD="$(call library,libasan.so) $(call library,libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	build/$@/bin/python -m pytest --capture=sys

ubsan:
	$(call sanitized_install,undefined)
	UBSAN_OPTIONS=print_stacktrace=1 build/$@/bin/python -m pytest --capture=sys

tsan:
	$(call sanitized_install,thread)
	LD_PRELOAD="$(call library,libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
	build/$@/bin/python -m pytest --capture=sys tests/test_concurrent.py

lint:
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_FILES)
	pyright

format:
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

# The site, from build/docs/index.html on: pip install what the extra docs names. A warning fails.
.PHONY: docs linkcheck
SPHINX = $(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --fresh-env -c docs
docs:
	$(SPHINX) --builder html . build/docs
	@echo build/docs/index.html

linkcheck:  # of other sites too, for which it needs a network: LINKCHECK=-Dlinkcheck_ignore=https?:// leaves them out
	$(SPHINX) --builder linkcheck $(LINKCHECK) . build/linkcheck

bench:
	$(PYTHON) -m bench

# A release: CONTRIBUTING.md says what each does.
sdist:
	.ci/wheels sdist

wheel:
	.ci/wheels

release-notes:
	.ci/release_notes $(TAG)

release-check:
	.ci/release_check

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
