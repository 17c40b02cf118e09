# Everything is installed into .venv, and only when a requirements file has changed.
# Another Python: make demo PYTHON=python3.12

PYTHON ?=
ARGS ?=
OUT ?=
RUN := .venv/bin/python

# Huge pages for the buffers that XLA asks for and gives back at every step: fewer page faults, a tenth less time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# A ROS or Conda shell may point Python at packages of its own.
unexport PYTHONPATH
unexport PYTHONHOME

.PHONY: help demo job test test-all test-long test-newest check docs docs-run package gpu-wheels ladder venv venv-bench venv-docs \
	venv-clients venv-peers venv-programs venv-run clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: venv-run  ## train two small models on the CPU and compare both decoders
	@$(RUN) -m lab.demo $(ARGS)

test: venv  ## the quick tests, on two cores; make test ARGS="-k grid" for a part of them
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not long" $(ARGS)

test-all: venv  ## the whole suite, on two cores
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(ARGS)

test-long: venv  ## what the suite tests, in more settings
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long $(ARGS)

test-newest:  ## what another JAX may break, with the newest one, in build/newest: needs Python 3.12 or newer (PYTHON, else python3.13)
	@tools/test_newest.sh "$(or $(PYTHON),python3.13)" $(ARGS)

job: venv  ## a practitioner's whole job: from a messy CSV to served tags and back, in minutes
	@tests/job/run.sh $(ARGS)

check: venv  ## lint, format, the rules of this repository, and types: ruff, tools.rules, mypy and shellcheck
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m tools.rules
	@$(RUN) -m mypy
	@.venv/bin/shellcheck .ci/run tools/*.sh tests/job/*.sh lab/benchmarks/*.sh

package:  ## build the wheels, install each alone, and decode with it; make package OUT=DIR keeps them
	@tools/package.sh "$(PYTHON)" "$(OUT)"

docs: venv-docs  ## the site, into docs/_build/html, in minutes; a warning is an error
	@$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

docs-run: venv-docs  ## run the shell blocks of README.md and docs/, in minutes; make docs-run ARGS=decoding for a page
	@$(RUN) docs/blocks.py $(ARGS)

gpu-wheels: venv-run  ## libraries that lab/benchmarks/gpu.sh installs on a GPU's machine without a network, into build/gpu-wheels
	@$(RUN) -m lab.benchmarks.wheels build/gpu-wheels

ladder: venv venv-peers  ## T5-Base beside all other systems, into lab/benchmarks/results/ladder_base.json: half an hour
	@$(RUN) -m lab.benchmarks.decode --model base --patterns 8x14,5x4,7x40 --batch 1,8 --weights int8,float32 \
		--peers hf,hf-compiled,ct2-fp32,ct2-int8,openvino-fp32,openvino-int8,onnx-int8,llama-int8 \
		--rounds 7 --enough 4 --keep build/ladder --json lab/benchmarks/results/ladder_base.json $(ARGS)

venv: venv-run  ## only .venv, with what the tests need
	@tools/venv.sh requirements/test.txt "$(PYTHON)"

venv-bench: venv-run  ## what benchmarks compare with, into .venv: PyTorch, CTranslate2; and matplotlib
	@tools/venv.sh requirements/bench.txt "$(PYTHON)"

venv-peers:  ## what the ladder compares with, an environment each, in build/peers: CTranslate2, OpenVINO, ONNX Runtime, llama.cpp
	@for name in ct2 openvino onnx llama; do \
		tools/venv.sh requirements/peers/$$name.txt "$(PYTHON)" build/peers/$$name || exit; done

venv-clients:  ## what a test asks the server with, in an environment of its own, build/peers/clients: LangChain, LiteLLM
	@tools/venv.sh requirements/peers/clients.txt "$(PYTHON)" build/peers/clients

venv-docs: venv-run  ## what builds the site, into .venv: Sphinx
	@tools/venv.sh requirements/docs.txt "$(PYTHON)"

venv-programs: venv-run  ## compilers for GPUs and TPUs that need not be here (pipejax plan --target, lab.benchmarks.programs)
	@tools/venv.sh requirements/programs.txt "$(PYTHON)"

venv-run:
	@tools/venv.sh requirements.txt "$(PYTHON)"

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
