#!/bin/sh
# Tests with the newest JAX of the requirements: tools/test_newest.sh [PYTHON [PYTEST'S ARGUMENTS]].
#
# PYTHON is 3.12 or newer (default: python3.13); the newest JAX does not support the oldest Python of pipejax. The script
# uses a separate environment, build/newest. It compiles training steps for absent GPUs (also by `pipejax plan --target`)
# and decoding (`lab.benchmarks.programs`, which counts instructions as well), and runs the quick tests of parts that a new
# JAX may break: memory plans, attention in blocks, kernels for GPUs and CPUs, decoding steps and training steps. This
# takes about seven minutes on two cores.
set -eu

cd "$(dirname "$0")/.."
python=${1:-python3.13}
test $# -eq 0 || shift
venv=build/newest

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || {
    echo "error: $python is not a Python 3.12 or newer; name one: make test-newest PYTHON=..." >&2
    exit 2
}
mkdir -p build
tools/venv.sh requirements/pytest.txt "$python" "$venv"
tools/venv.sh requirements/programs.txt "$python" "$venv"
run="$venv/bin/python"
"$run" -c 'import jax, sys; print("Python", sys.version.split()[0], "with jax", jax.__version__)'

export PIPEJAX_TEST_NEWEST=1 # missing compilers are failures
"$run" -m pytest -n 2 -m "not long" tests/test_targets.py lab/tests/test_benchmark_programs.py "$@"
"$run" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not long" \
    tests/test_plan.py tests/test_block_attention.py tests/test_gpu.py lab/tests/test_launch.py tests/test_decoding.py \
    tests/test_step_decoder.py tests/test_training_step.py tests/test_trainer.py \
    tests/test_kernels.py::test_decodes_equal_decodes_without_the_kernel "$@"
"$run" -m pipejax plan --config configs/jsonl.py --model base --target rtx4090 --memory 80 \
    --set train.batch_size=8 --set data.max_source=256 --set data.max_target=64
"$run" -m lab.benchmarks.programs --targets h100,rtx4090 --model tiny --source 64 --batches 1
