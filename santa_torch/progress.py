"""Progress on standard error: a bar on a terminal, one line per stage anywhere else."""

from __future__ import annotations

import shutil
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
            count = f"{done}/{total} {unit}"
            width = min(_WIDTH, max(0, _columns() - len(count) - 12))
            filled = width * done // total
            drawn = "█" * filled + "░" * (width - filled)
            _write(f"{_clear(live)}{_fitting(label, f' {drawn} {count}')}")

    show(0)
    with _closing(live):
        yield show
    seconds = time.perf_counter() - start
    _finish(live, label, f" {reached} {unit} in {seconds:.1f} s")


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """Say what is going on where its length is unknown; yields a function for details of it."""
    start = time.perf_counter()
    live = sys.stderr.isatty()

    def show(detail: str) -> None:
        if live:
            _write(f"{_clear(live)}{_fitting(label, f' {detail} ...', pad=False)}")

    show("")
    with _closing(live):
        yield show
    _finish(live, label, f" {time.perf_counter() - start:.1f} s")


@contextmanager
def _closing(live: bool) -> Iterator[None]:
    """End the line that is being drawn, so that what is said next starts one of its own."""
    try:
        yield
    except BaseException:
        if live:
            _write("\n")
        raise


def _finish(live: bool, label: str, rest: str) -> None:
    text = _fitting(label, rest) if live else f"{label:<{_LABEL}}{rest}"
    _write(f"{_clear(live)}{text}\n")


def _fitting(label: str, rest: str, pad: bool = True) -> str:
    """Label and rest within the terminal: a longer line would wrap, and not be cleared."""
    room = max(_columns() - len(rest), 0)
    label = label if len(label) <= room else label[: max(room - 1, 0)] + "…" * (room > 0)
    return (f"{label:<{min(_LABEL, room)}}" if pad else label) + rest[: _columns()]


def _columns() -> int:
    """Characters of a line, less the last, after which some terminals start a new one."""
    return shutil.get_terminal_size().columns - 1


def _clear(live: bool) -> str:
    return "\r\x1b[2K" if live else ""


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
