#!/bin/sh
# Makes .venv with openjet-jax and its development tools in it; does nothing when it is up to date.
#
#   .ci/setup.sh [EXTRA]   install, with an optional dependency of pyproject.toml such as cuda12
#   .ci/setup.sh --find    print the Python that would be used, and stop
#
# PYTHON=/path/to/python names the interpreter; otherwise PATH, pyenv's versions and uv are searched.
set -eu
cd "$(dirname "$0")/.."

seen=""
note() { seen="$seen  $1
"; }

fail() {
    printf '\n%s\n' "$1" >&2
    exit 1
}

# Prints "VERSION STATUS", STATUS being ok, old or no-venv; nothing where the command is no Python.
probe() {
    "$1" -c '
import sys
status = "ok" if sys.version_info >= (3, 12) else "old"
if status == "ok":
    try:
        import ensurepip, venv
    except ImportError:
        status = "no-venv"
print("%d.%d.%d %s" % (tuple(sys.version_info[:3]) + (status,)))' 2>/dev/null || true
}

# Succeeds, with the path in $python, where the candidate will do; else notes why it will not.
try() {
    answer=$(probe "$1")
    case $answer in
        *" ok") python=$1; return 0 ;;
        *" old") note "$1: Python ${answer% *}, too old" ;;
        *" no-venv")
            lacking="$1"
            lacking_version=${answer% *}
            note "$1: Python $lacking_version, without the venv and ensurepip modules" ;;
        *) note "$1: does not run (a pyenv shim without a selected version?)" ;;
    esac
    return 1
}

find_python() {
    lacking=""
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: there is no such command."
        try "$(command -v "$PYTHON")" && return
        fail "PYTHON=$PYTHON cannot be used:
$seen"
    fi
    for name in python3.12 python3.13 python3.14 python3 python; do
        if path=$(command -v "$name"); then
            try "$path" && return
        else
            note "$name: not on PATH"
        fi
    done
    versions="${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions"
    [ -d "$versions" ] || note "$versions: not there (pyenv)"
    for path in "$versions"/*/bin/python3; do
        [ -x "$path" ] && try "$path" && return
    done
    if command -v uv >/dev/null; then
        echo "No Python 3.12 or newer yet: asking uv for one." >&2
        uv python install --quiet 3.12 >&2 || true
        path=$(uv python find '>=3.12' 2>/dev/null) && try "$path" && return
        note "uv: could not provide Python 3.12"
    else
        note "uv: not on PATH"
    fi
    if [ -n "$lacking" ]; then
        short=$(echo "$lacking_version" | cut -d. -f1,2)
        fail "$lacking is new enough, but cannot make virtual environments. Looked at:
$seen
On Debian and Ubuntu: sudo apt-get install python$short-venv"
    fi
    fail "openjet-jax needs Python 3.12 or newer, and none was found. Looked at:
$seen
Install one: 'sudo apt-get install python3-venv' (Ubuntu 24.04, Debian 13 and newer),
'pyenv install 3.12', or uv (https://docs.astral.sh/uv), which brings its own.
Or name one that stands elsewhere: make demo PYTHON=/path/to/python3.12"
}

# Runs a step of the installation quietly; on failure says what went wrong as far as the log tells.
step() {
    "$@" >>"$log" 2>&1 && return
    if grep -qiE 'name resolution|ConnectionError|NewConnectionError|Network is unreachable|timed out|ProxyError|SSLError' "$log"; then
        fail "The package index cannot be reached: check the network, or pip's proxy and index settings. Then run the same command again."
    elif grep -qi 'No space left' "$log"; then
        fail "The disk is full: the installation needs about 1.5 GB. Then run the same command again."
    fi
    tail -n 15 "$log" >&2
    fail "The installation failed at: $*
The whole log is in $log."
}

if [ "${1:-}" = --find ]; then
    find_python
    echo "$python"
    exit 0
fi

extra=${1:-}
stamp=".venv/ready${extra:+-$extra}"
wanted="$(cat pyproject.toml .ci/setup.sh | cksum) $(pwd)"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

case $(probe .venv/bin/python) in
    *" ok") ;;
    *)
        find_python
        echo "Making a virtual environment in .venv with $python"
        log=$(mktemp)
        step "$python" -m venv --clear .venv
        rm -f "$log" ;;
esac
log=.venv/setup.log
: >"$log"
echo "Installing openjet-jax${extra:+[$extra]} and its development tools (a few minutes the first time)"
# `--group` came with pip 25.1.
step .venv/bin/python -m pip install --upgrade 'pip>=25.1'
step .venv/bin/python -m pip install --editable ".[server${extra:+,$extra}]" --group dev
echo "$wanted" >"$stamp"
