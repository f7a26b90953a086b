"""Folders that commands write to."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_directory(path: Path, error: type[Exception]) -> None:
    """Make a folder and see that it can be written to: said now rather than after the runs.

    Parameters
    ----------
    path : Path
        What ``--out`` names; folders above it are made too.
    error : type
        What to raise, with a line for the user.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as reason:
        raise error(f"argument --out: {str(path)!r}: {reason.strerror}") from None
