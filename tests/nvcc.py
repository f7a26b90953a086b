"""nvcc as the build calls it, for tests of what it makes of a file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_tools import environment
from build_tools.build_ext import NVCC

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = [arch.removesuffix("+PTX") for arch in environment.DEFAULT_ARCHS.split(";")]
OLDEST, NEWEST = NUMBERS[0], NUMBERS[-1]


def archs(everyday: tuple[str, ...]) -> list[object]:
    """Architectures of the default build, as "8.0"; those not in ``everyday`` with --long."""
    return [
        arch if arch in everyday else pytest.param(arch, marks=pytest.mark.long) for arch in NUMBERS
    ]


def nvcc(toolkit: Path, arch: str, path: Path, *arguments: str | Path) -> str:
    """Compile ``path`` for ``arch``, "8.0" or "80"; return what was said. A warning fails."""
    options = [option for option in NVCC if not option.startswith("--threads")]
    command = [toolkit / "bin/nvcc", *options, "-Werror=all-warnings"]
    command += [f"-arch=sm_{arch.replace('.', '')}", *arguments, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "warning" not in output, output[-4000:]
    return output
