#!/bin/sh
# Builds the wheel, installs it without extras into an environment of its own, and uses it in an empty directory:
# tools/package.sh [PYTHON]
#
# pip downloads the newest versions that pyproject.toml allows. Nothing is left behind.
set -eu

clone=$(cd "$(dirname "$0")/.." && pwd -P)
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIPEJAX_CACHE="$folder/cache"

mkdir "$folder/source" "$folder/empty"
git -C "$clone" ls-files -z --cached --others --exclude-standard -- pipejax pyproject.toml README.md LICENSE |
    tar -C "$clone" --null --files-from - -cf - | tar -C "$folder/source" -xf - # without what earlier builds left
"$python" -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
python -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$folder/source"
python -m pip install --quiet "$folder"/pipejax-*.whl
rm -r "$folder/source"
python -m pip list | grep -E '^(flax|jax|jaxlib|numpy|orbax-checkpoint|transformers) '

cd "$folder/empty"
python "$clone/tools/random_t5.py" t5
pipejax --help >/dev/null
pipejax convert from-hf t5 converted
echo '{"id": "a", "source_ids": [5, 6, 7, 1], "gold": ["a"], "pred": ["b"]}' >in.jsonl
for strategy in pipelined sequential; do
    pipejax decode --checkpoint converted --input in.jsonl --output out.jsonl --strategy $strategy \
        --set grid.time_max=8 --set grid.sub_max=3 --set decode.max_length=8
    cat out.jsonl
done
code=0
pipejax metrics rouge in.jsonl || code=$? # one line that names the extra
test $code = 2
