#!/bin/sh
# Builds the wheels, installs each without extras into a separate environment, and uses it in an empty directory:
# tools/package.sh [PYTHON] [OUT]
#
# pip downloads the newest versions that pyproject.toml allows. With OUT the wheels are kept there; otherwise all files are
# removed at the end. On Linux x86-64 with a C++ compiler there is a second wheel, which contains the compiled kernel.
set -eu

clone=$(cd "$(dirname "$0")/.." && pwd -P)
python=${1:-python3}
out=${2:+$(cd "$2" && pwd -P)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIPEJAX_CACHE="$folder/cache"

mkdir "$folder/source" "$folder/empty" "$folder/wheels"
git -C "$clone" ls-files -z --cached --others --exclude-standard -- pipejax pyproject.toml README.md LICENSE |
    tar -C "$clone" --null --files-from - -cf - | tar -C "$folder/source" -xf - # excludes the files of earlier builds
"$python" -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
python -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$folder/source"
python -m pip install --quiet "$folder"/wheels/pipejax-*.whl
rm -r "$folder/source"
python -m pip list | grep -E '^(flax|jax|jaxlib|numpy|orbax-checkpoint|transformers) '

cd "$folder/empty"
python "$clone/tools/random_t5.py" t5
pipejax --help >/dev/null
pipejax convert from-hf t5 converted
echo '{"id": "a", "source_ids": [5, 6, 7, 1], "gold": ["a"], "pred": ["b"]}' >in.jsonl

# decode NAME: writes NAME-STRATEGY.jsonl
decode() {
    for strategy in pipelined sequential; do
        pipejax decode --checkpoint converted --input in.jsonl --output "$1-$strategy.jsonl" --method $strategy \
            --set grid.time_max=8 --set grid.sub_max=3 --set decode.max_length=8
    done
}
decode pure
cat pure-*.jsonl
code=0
pipejax metrics rouge in.jsonl || code=$? # fails with one line that names the extra
test $code = 2

if [ "$(uname -sm)" = "Linux x86_64" ] && command -v "${CXX:-c++}" >/dev/null; then
    python -m venv "$folder/tools"
    "$folder/tools/bin/python" -m pip install --quiet auditwheel wheel
    tools=$("$folder/tools/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    PYTHONPATH="$tools" python "$clone/tools/ship_kernel.py" "$folder"/wheels/pipejax-*-any.whl "$folder/wheels"
    python -m pip uninstall --quiet --yes pipejax
    python -m pip install --quiet --no-deps "$folder"/wheels/pipejax-*-manylinux*.whl
    # Without a compiler, and without a cache for a compiled kernel.
    (
        unset CXX
        export PATH="$folder/venv/bin" PIPEJAX_CACHE=off
        python -c 'from pipejax.kernels import cpu_kernel; print("shipped:", cpu_kernel.use().name)'
        decode shipped
    )
    for strategy in pipelined sequential; do
        cmp "pure-$strategy.jsonl" "shipped-$strategy.jsonl"
    done
fi
if [ -n "$out" ]; then
    cp "$folder"/wheels/*.whl "$out"
fi
