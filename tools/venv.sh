#!/bin/sh
# Brings an environment up to date with a requirements file: tools/venv.sh requirements/test.txt [PYTHON [DIR]]
#
# DIR is the directory of the environment (default: .venv). Without PYTHON, python3 creates a missing environment. With
# PYTHON, an environment of another Python version is created again.
# DIR/.made holds the path of the environment, each requirements file as it was installed, and a file "unfinished" while
# pip runs: an environment that was moved, damaged or interrupted is created again.
set -eu

cd "$(dirname "$0")/.."
requirements=$1
asked=${2:-}
python=${asked:-python3}
venv=${3:-.venv}
made=$venv/.made
record=$made/$(basename "$requirements")
here=$(pwd -P)

fail() {
    echo "error: $*" >&2
    exit 2
}

version_of() { # prints the version of a Python, such as 3.12
    ("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') 2>/dev/null
}

contents() { # prints a requirements file, and the file that it includes
    cat "$1"
    included=$(sed -n 's/^-r //p' "$1")
    test -z "$included" || contents "$(dirname "$1")/$included"
}

usable() {
    test ! -e "$made/unfinished" || return 1
    test ! -d "$made" || test "$(cat "$made/path")" = "$here" || return 1
    "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || return 1
    test -z "$asked" || test "$(version_of "$asked")" = "$(version_of "$venv/bin/python")"
}

begin() {
    mkdir -p "$made"
    printf '%s\n' "$here" >"$made/path"
    touch "$made/unfinished"
}

make_venv() {
    test ! -e "$venv" || test -d "$made" || fail "$venv is no Python 3.11 or newer with pip; remove it"
    version=$(version_of "$python") || fail "$python does not run; name a Python 3.11 or newer: make PYTHON=..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is Python $version; expected 3.11 or newer: make PYTHON=..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv; install it (Debian, Ubuntu: apt install python$version-venv)"
    rm -rf "$venv"
    begin
    echo "making $venv with Python $version" >&2
    "$python" -m venv "$venv"
    rm "$made/unfinished"
}

install() {
    echo "installing $requirements into $venv (the first time takes minutes)" >&2
    begin
    rm -f "$record"
    set -- --no-input --disable-pip-version-check -r "$requirements"
    test -t 2 || set -- --progress-bar off "$@" # prints a line for each package to show progress
    # Compilers for absent devices are installed outside of .venv's packages, so that JAX does not use them as devices.
    test "$requirements" != requirements/programs.txt || set -- --no-deps --upgrade --target "$venv/programs" "$@"
    PIP_USER=0 "$venv/bin/python" -m pip install "$@" >&2 || {
        code=$?
        test $code -gt 128 || rm "$made/unfinished" # pip cleans up after its own errors, but not if it is killed
        exit $code
    }
    contents "$requirements" >"$record"
    rm "$made/unfinished"
}

exec 9<"$0" # two calls of make take turns if flock exists
if command -v flock >/dev/null; then flock 9 2>/dev/null || true; fi

usable || make_venv
test "$(contents "$requirements")" = "$(cat "$record" 2>/dev/null)" || install
