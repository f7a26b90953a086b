"""``python -m santa_torch COMMAND``: each command is a module with ``main(argv) -> exit code``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

# Command: module, one line of help. A module is imported only when its command runs.
COMMANDS = {
    "info": ("santa_torch.info", "what this build is and what it runs on"),
    "bench": ("santa_torch.bench", "decode steps against their rivals and the bandwidth"),
    "plan": ("santa_torch.plan", "how a decode step is cut on a GPU, known or present"),
    "demo": ("santa_torch.demo", "a language model with exact and with sampled attention"),
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a command; its options are its own (``COMMAND --help``)."""
    argv = sys.argv[1:] if argv is None else argv
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        "python -m santa_torch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()),
        usage="%(prog)s COMMAND [options]",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    command = parser.parse_args(argv[:1]).command
    return int(import_module(COMMANDS[command][0]).main(argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
