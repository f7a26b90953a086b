#!/usr/bin/env bash
# Set up what is missing, then run the demo. Arguments go to it: bash scripts/demo.sh --help
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/environment.sh"
bash "$here/setup.sh" demo
exec "$python" -m santa_torch demo "$@"
