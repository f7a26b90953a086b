"""What the packaging tests share: running Python, copying the checkout, making environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Run in an installation from a foreign folder: the operators, and where they were loaded from.
SMOKE = """
import torch, santa_torch
q, k, v = torch.randn(2, 6, 64), torch.randn(2, 3, 300, 64), torch.randn(2, 3, 300, 64)
out = santa_torch.decode(q, k, v, samples=16)
exact = santa_torch.reference.decode(q, k, v, samples=16)
torch.testing.assert_close(out, exact.to(out.dtype), rtol=1e-4, atol=1e-4)
print("loaded from", santa_torch.__file__)
print(santa_torch.build_info())
"""


def run(
    *command: str | Path, cwd: Path | None = None, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables that would change a build; its output in one text."""
    drop = ("FORCE_CUDA", "PYTHONPATH", "SANTA_PYTHON", "SANTA_CPU_LEVEL", "MAX_JOBS")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # pip cuts its progress bars anywhere
    )
    if check and done.returncode:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout[-8000:]}")
    return done


def python(code: str, *path: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that imports from ``path`` first."""
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path or (ROOT,)))}
    return run(sys.executable, "-W", "default", "-c", code, **environment, **options)


def sources() -> list[Path]:
    """Files of the checkout that belong to the repository, relative to it."""
    listing = run(
        *("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"), check=False
    )
    if listing.returncode == 0:
        files = [Path(line) for line in listing.stdout.splitlines()]
    else:  # An unpacked sdist.
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    unwanted = {".git", ".venv", "build", "__pycache__"}
    return [f for f in files if (ROOT / f).is_file() and not unwanted & set(f.parts)]


def copy_checkout(target: Path) -> Path:
    """Copy what a clone would have, uncommitted changes included."""
    for file in sources():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target / file)
    return target


def make_venv(folder: Path, *requirements: str) -> Path:
    """Make a virtual environment and install into it; return its interpreter."""
    run(sys.executable, "-m", "venv", folder)
    interpreter = folder / "bin/python"
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*pip, "--upgrade", "pip")
    if requirements:
        run(*pip, *requirements)
    return interpreter
