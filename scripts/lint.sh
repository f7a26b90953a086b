#!/usr/bin/env bash
# ruff, mypy, clang-format and clang-tidy. --long lets clang-tidy read the torch-side files too.
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/environment.sh"
bash "$here/setup.sh" lint
cd "$root"
tools=$(dirname "$python")

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy

mapfile -t native < <(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | sort)
"$tools/clang-format" --dry-run --Werror "${native[@]}"

# Headers are read through the files that include them. A torch header costs seconds in each.
mapfile -t units < <(find csrc -name '*.cpp' -not -path 'csrc/cuda/*' | sort)
if [ "${1:-}" != --long ]; then
    mapfile -t units < <(grep -L '<torch/' "${units[@]}" | xargs grep -L '"check.h"')
fi
"$tools/clang-tidy" --quiet -p build "${units[@]}"
