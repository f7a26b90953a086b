#!/usr/bin/env bash
# Set up what is missing, then run the benchmarks. Arguments go to them: bash scripts/bench.sh --help
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/environment.sh"
bash "$here/setup.sh" bench
exec "$python" -m santa_torch bench "$@"
