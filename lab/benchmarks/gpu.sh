#!/usr/bin/env bash
# One measuring run on an NVIDIA GPU, in 280 seconds: lab/benchmarks/gpu.sh [--rehearse] [FOLDER]
#
# It needs a Python with JAX, and no network: what `make gpu-wheels` has collected in build/gpu-wheels is brought along.
# PYTHON names the Python; else it is .venv's if that has JAX for CUDA, or python3. With --rehearse everything runs on the CPU
# with .venv, which is made if there is none. lab/benchmarks/gpu.py says what is run.
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
