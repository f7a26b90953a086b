#!/usr/bin/env bash
# ruff, mypy, clang-format and clang-tidy. --long lets clang-tidy read the torch-side files too.
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/environment.sh"
# With the tests' packages there too, since mypy reads the types of what is installed.
bash "$here/setup.sh" test lint
cd "$root"
tools=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

# Every check runs, so that one run shows everything there is to mend.
failed=()
check() {
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
}

mapfile -t native < <(find csrc tests \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) | sort)
# Headers are read through the files that include them. A torch header costs seconds in each.
mapfile -t units < <(find csrc -name '*.cpp' -not -path 'csrc/cuda/*' | sort)
if [ "${1:-}" != --long ]; then
    mapfile -t units < <(grep -LE '#include (<torch/|"(\.\./)?check\.h")' "${units[@]}")
fi

check "ruff" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
check "clang-format" "$tools/clang-format" --dry-run --Werror "${native[@]}"
check "clang-tidy" "$tools/clang-tidy" --quiet -p build "${units[@]}"
# Kernels are read as the emulator's compiler reads them; device.cuh through its tests, where sizes are small.
emulated=(-- -x c++ -std=c++20 -Icsrc -DSANTA_SIMT=1)
mapfile -t kernels < <(grep -l '#include "device.cuh"' csrc/cuda/*.cu)
if [ ${#kernels[@]} != 0 ]; then
    check "clang-tidy: kernels" "$tools/clang-tidy" --quiet "${kernels[@]}" "${emulated[@]}"
fi
small=--checks=-bugprone-implicit-widening-of-multiplication-result
check "clang-tidy: emulator" "$tools/clang-tidy" --quiet "$small" tests/cpp/test_simt*.cpp "${emulated[@]}"

if [ ${#failed[@]} != 0 ]; then
    printf '\nerror: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
