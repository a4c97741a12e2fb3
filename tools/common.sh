# Sourced by tools/quickstart and tools/test: find a Python, make a virtual environment, install flare.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# The newest supported Python on PATH, or a sentence that says how to get one.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11, 3.12 or 3.13 is needed. Install it: sudo apt-get install python3 python3-venv"
}

# Names every missing system package at once, with the one command that installs them.
# Arguments: package:probe, where the probe is a command, or lib=SONAME, or py=MODULE
preflight() {
    local missing=() entry package probe
    for entry in "$@"; do
        package=${entry%%:*} probe=${entry#*:}
        case $probe in
            lib=*) ldconfig -p 2>/dev/null | grep -qF "${probe#lib=}" || /sbin/ldconfig -p 2>/dev/null | grep -qF "${probe#lib=}" || missing+=("$package") ;;
            py=*) "$PYTHON" -c "import ${probe#py=}" 2>/dev/null || missing+=("$package") ;;
            *) command -v "$probe" >/dev/null || [ -x "/usr/sbin/$probe" ] || [ -x "/sbin/$probe" ] || missing+=("$package") ;;
        esac
    done
    [ ${#missing[@]} -eq 0 ] && return
    if [ "${FLARE_INSTALL_PACKAGES:-}" = 1 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        say "Installing system packages: ${missing[*]}"
        apt-get update -qq >/dev/null 2>&1 || true
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && return
    fi
    die "these system packages are missing; install them, then run this again:
    sudo apt-get install ${missing[*]}"
}

# Prints what building the engine needs, for preflight, where no ready-made one fits and none was built yet: all that
# `flare engine install` would ask for after the downloads (flare/engines/install.py, BUILD_TOOLS and OLDEST_GLIBC).
engine_packages() {
    local libc version
    [ -e .quickstart/data/flare/engines/llama.cpp/engine.json ] && return
    read -r libc version <<<"$(getconf GNU_LIBC_VERSION 2>/dev/null || true)"
    if [ "$(uname -m)" != x86_64 ] || [ "$libc" != glibc ] ||
        ! printf '%s\n' 2.35 "$version" | sort -C -V; then
        printf '%s\n' cmake:cmake ninja-build:ninja g++:c++
    fi
}

# Make (or bring up to date) the virtual environment $1 with flare and its extra $2 (may be empty).
# A stamp of pyproject.toml keeps the second run down to a moment.
prepare_venv() {
    local folder=$1 extra=$2 stamp
    stamp=$( { cat pyproject.toml; pwd; "$PYTHON" -V; printf '%s' "$extra"; } | sha256sum | cut -c1-32)
    if [ "$(cat "$folder/flare-stamp" 2>/dev/null)" != "$stamp" ]; then
        say "Setting up a virtual environment in ${folder#"$PWD"/} ($("$PYTHON" -V)); about half a minute"
        "$folder/bin/python" -c '' 2>/dev/null || rm -rf "$folder"
        local log
        log=$(mktemp)
        exec 3>&2  # the trap may run while standard error goes into the log
        trap 'rm -f "$log"; printf "\n%s: interrupted; run it again to go on.\n" "${0##*/}" >&3; exit 130' INT TERM HUP
        if ! { "$PYTHON" -m venv "$folder" &&
            "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"; } \
            >"$log" 2>&1; then
            tail -n 15 "$log" >&2
            rm -f "$log"
            die "the virtual environment could not be set up; what failed stands above"
        fi
        rm -f "$log"
        trap - INT TERM HUP
        exec 3>&-
        printf '%s' "$stamp" >"$folder/flare-stamp"
    fi
}
