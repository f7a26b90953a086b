"""Progress on standard error: a bar on a terminal, one line per stage anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WIDTH = 28
_LABEL = 36


@contextmanager
def bar(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how much of ``total`` is done; yields the function to call with that number."""
    start = time.perf_counter()
    live = sys.stderr.isatty()
    reached = 0

    def show(done: int) -> None:
        nonlocal reached
        reached = done
        if live:
            filled = _WIDTH * done // total
            drawn = "█" * filled + "░" * (_WIDTH - filled)
            _write(f"\r{label:<{_LABEL}} {drawn} {done}/{total} {unit}")

    show(0)
    yield show
    seconds = time.perf_counter() - start
    _write(f"{_clear(live)}{label:<{_LABEL}} {reached} {unit} in {seconds:.1f} s\n")


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """Say what is going on where its length is unknown; yields a function for details of it."""
    start = time.perf_counter()
    live = sys.stderr.isatty()

    def show(detail: str) -> None:
        if live:
            _write(f"{_clear(live)}{label} {detail} ...")

    show("")
    yield show
    _write(f"{_clear(live)}{label:<{_LABEL}} {time.perf_counter() - start:.1f} s\n")


def _clear(live: bool) -> str:
    return "\r\x1b[2K" if live else ""


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
