#!/usr/bin/env bash
# Set up what is missing, then run the tests. Arguments go to pytest; --long adds the slow tier.
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/environment.sh"
bash "$here/setup.sh" test
cd "$root"
exec "$python" -m pytest "$@"
