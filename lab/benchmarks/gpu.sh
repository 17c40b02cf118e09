#!/usr/bin/env bash
# Runs all measurements on an NVIDIA GPU in 280 seconds: lab/benchmarks/gpu.sh [--rehearse] [FOLDER]
#
# The script needs a Python with JAX, and no network: it installs the wheels that `make gpu-wheels` has collected in
# build/gpu-wheels. The variable PYTHON names the Python; without it the script uses .venv if JAX for CUDA is installed
# there, and python3 otherwise. With --rehearse everything runs on the CPU with .venv, which is created if it is missing.
# lab/benchmarks/gpu.py lists the measurements.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [[ -z $python && " $* " == *" --rehearse "* ]]; then
    [[ -x .venv/bin/python ]] || make --no-print-directory venv
    python=.venv/bin/python
elif [[ -z $python && -x .venv/bin/python ]]; then
    has_cuda='import importlib.util as u, sys; sys.exit(not any(u.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)))'
    .venv/bin/python -c "$has_cuda" && python=.venv/bin/python
fi
exec "${python:-python3}" -m lab.benchmarks.gpu "$@"
