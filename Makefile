# Everything is installed into .venv, and only when a requirements file has changed.
# Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
RUN := .venv/bin/python

# Huge pages for the buffers that XLA asks for and gives back at every step: fewer page faults, a tenth less time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# A ROS or Conda shell may point Python at packages of its own.
unexport PYTHONPATH
unexport PYTHONHOME

.PHONY: help demo test check docs docs-run venv venv-bench venv-docs venv-programs venv-run clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: venv-run  ## train a small model on the CPU and decode with it
	@$(RUN) -m experiments.demo $(ARGS)

test: venv  ## the test suite, on two cores; make test ARGS="-k grid" for a part of it
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: venv  ## lint, format and types: ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

docs: venv-docs  ## the site, into docs/_build/html; a warning is an error
	@$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

docs-run: venv-docs  ## run the shell blocks of README.md and docs/, in minutes; make docs-run ARGS=decoding for a page
	@$(RUN) docs/blocks.py $(ARGS)

venv: venv-run  ## only .venv, with what the tests need
	@sh -c "$$PIPEJAX_INSTALL" install requirements-test.txt requirements.txt

venv-bench: venv-run  ## what benchmarks compare with, into .venv: PyTorch, CTranslate2; and matplotlib
	@sh -c "$$PIPEJAX_INSTALL" install requirements-bench.txt requirements.txt

venv-docs: venv-run  ## what builds the site, into .venv: Sphinx
	@sh -c "$$PIPEJAX_INSTALL" install requirements-docs.txt requirements.txt

venv-programs: venv-run  ## the compilers for GPUs and TPUs that benchmarks.programs asks, beside .venv's packages
	@sh -c "$$PIPEJAX_INSTALL" install requirements-programs.txt

venv-run:
	@sh -c "$$PIPEJAX_INSTALL" install requirements.txt

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Brings .venv up to date with requirements file $1; $2 ... are the files that it includes.
# .venv/.made holds the path that .venv was made for, a copy of every requirements file as it was installed, and
# "unfinished" while pip runs: a .venv that moved, broke or was interrupted is made anew.
define PIPEJAX_INSTALL
set -eu
fail() { echo "error: $$*" >&2; exit 2; }
version_of() { ("$$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') 2>/dev/null; }
made=.venv/.made
here=$$(pwd -P)
asked=$(if $(filter file default,$(origin PYTHON)),,yes)

exec 9<Makefile  # two makes take turns, where flock exists
if command -v flock >/dev/null; then flock 9 2>/dev/null || true; fi

usable() {
	test ! -e $$made/unfinished && { test ! -d $$made || test "$$(cat $$made/path)" = "$$here"; } &&
	.venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
	{ test -z "$$asked" || test "$$(version_of "$(PYTHON)")" = "$$(version_of .venv/bin/python)"; }
}

begin() { mkdir -p $$made; printf '%s\n' "$$here" >$$made/path; touch $$made/unfinished; }

if ! usable; then
	test ! -e .venv || test -d $$made || fail ".venv is no Python 3.11 or newer with pip; remove it"
	version=$$(version_of "$(PYTHON)") || fail "$(PYTHON) does not run; name a Python 3.11 or newer: make PYTHON=..."
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
		fail "$(PYTHON) is Python $$version; expected 3.11 or newer: make PYTHON=..."
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null ||
		fail "$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python$$version-venv)"
	rm -rf .venv
	begin
	echo "making .venv with Python $$version" >&2
	"$(PYTHON)" -m venv .venv
	rm $$made/unfinished
fi

wanted=$$(cat "$$@")
if test "$$wanted" != "$$(cat $$made/$$1 2>/dev/null)"; then
	echo "installing $$1 into .venv (the first time takes minutes)" >&2
	begin
	rm -f $$made/$$1
	test -t 2 && quiet= || quiet=--quiet
	apart=
	case $$1 in requirements-programs.txt) apart="--no-deps --upgrade --target .venv/programs" ;; esac
	PIP_USER=0 .venv/bin/python -m pip install $$apart $$quiet --no-input --disable-pip-version-check -r $$1 >&2 || {
		code=$$?
		test $$code -gt 128 || rm $$made/unfinished  # pip cleans up behind its own errors, not when it is killed
		exit $$code
	}
	printf '%s\n' "$$wanted" >$$made/$$1
	rm $$made/unfinished
fi
endef
export PIPEJAX_INSTALL
