#!/bin/sh
# Brings an environment up to date with a requirements file: tools/venv.sh requirements/test.txt [PYTHON [DIR]]
#
# DIR is the environment's directory, .venv unless it is given. Without PYTHON, python3 makes it if there is none. With it,
# an environment of another Python is made anew.
# DIR/.made holds the path that it was made for, each requirements file as it was installed, and "unfinished" while pip
# runs: an environment that moved, broke or was interrupted is made anew.
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

version_of() { # 3.12
    ("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') 2>/dev/null
}

contents() { # a requirements file, and the one that it includes
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
    test -t 2 || set -- --progress-bar off "$@" # a line for each package, so that nobody waits in silence
    # Compilers for devices that are not here lie beside .venv's packages, where no JAX looks for devices.
    test "$requirements" != requirements/programs.txt || set -- --no-deps --upgrade --target "$venv/programs" "$@"
    PIP_USER=0 "$venv/bin/python" -m pip install "$@" >&2 || {
        code=$?
        test $code -gt 128 || rm "$made/unfinished" # pip cleans up behind its own errors, not when it is killed
        exit $code
    }
    contents "$requirements" >"$record"
    rm "$made/unfinished"
}

exec 9<"$0" # two makes take turns, where flock exists
if command -v flock >/dev/null; then flock 9 2>/dev/null || true; fi

usable || make_venv
test "$(contents "$requirements")" = "$(cat "$record" 2>/dev/null)" || install
