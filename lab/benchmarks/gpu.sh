#!/usr/bin/env bash
# All that is worth knowing of an NVIDIA GPU, in eight minutes: lab/benchmarks/gpu.sh [--rehearse] [FOLDER]
#
# It needs a Python with JAX, and no network: what `make gpu-wheels` has collected in build/gpu-wheels is brought along.
# PYTHON names the Python; else it is .venv's if that sees a GPU, or python3. With --rehearse everything runs on the CPU
# with .venv, which is made if there is none. lab/benchmarks/gpu.py says what is run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [[ -z $python && " $* " == *" --rehearse "* ]]; then
    [[ -x .venv/bin/python ]] || make --no-print-directory venv
    python=.venv/bin/python
elif [[ -z $python && -x .venv/bin/python ]]; then
    .venv/bin/python -c 'import jax; assert jax.default_backend() == "gpu"' 2>/dev/null && python=.venv/bin/python
fi
exec "${python:-python3}" -m lab.benchmarks.gpu "$@"
