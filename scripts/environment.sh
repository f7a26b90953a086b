# Sourced by the other scripts: $root, $python, and santa_torch importable from any folder.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
if [ -n "${SANTA_PYTHON:-}" ]; then
    python=$(command -v "$SANTA_PYTHON") || {
        echo "error: SANTA_PYTHON=$SANTA_PYTHON is not a command" >&2
        exit 1
    }
    # Absolute, but not resolved: the link itself is what makes an interpreter a virtual environment's.
    python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
