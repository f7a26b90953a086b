#!/usr/bin/env bash
# Make an environment with a torch that is built for CUDA, beside .venv; no GPU is needed.
#
#   bash scripts/cuda_environment.sh [DIR]        default: build/cuda-venv
#
# Then SANTA_PYTHON=DIR/bin/python bash scripts/setup.sh test builds the CUDA operators with it. What is built
# in place serves both torches, but ninja rebuilds whenever the other one had the last turn.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "${1:-}" in
-*)
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [ "$1" = --help ] || [ "$1" = -h ] || exit 2
    exit 0
    ;;
esac
target=${1:-$root/build/cuda-venv}

cuda_of() { "$1" -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null; }

if [ ! -x "$target/bin/python" ]; then
    base=$python
    [ -x "$base" ] || base=$(command -v python3)
    "$base" -m venv --clear "$target"
fi
if [ -z "$(cuda_of "$target/bin/python")" ]; then
    "$target/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
        -r "$root/requirements/torch-cuda.txt" || {
        echo "error: pip could not install requirements/torch-cuda.txt; its message is above" >&2
        exit 1
    }
fi
cuda=$(cuda_of "$target/bin/python") || cuda=
if [ -z "$cuda" ]; then
    echo "error: the torch of $target is a build without CUDA; the package index has no other one" >&2
    exit 1
fi
"$target/bin/python" -c 'import torch; print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")'
echo "$target/bin/python"
