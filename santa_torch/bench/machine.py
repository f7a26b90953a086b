"""The machine: facts that explain a time, and whether somebody else is using it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import santa_torch
from santa_torch.bench.options import usable_cores

#: Cores in use by others above which the machine is not quiet.
BUSY_CORES = 0.1

#: Rivals, and what brings them; those that are installed are named with their versions.
_PACKAGES = (
    "onnxruntime",
    "onnx",
    "openvino",
    "transcribe-cpp-native",
    "libggml-python",
    "llama-cpp-python",
    "transformers",
)

_QUIET: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 10}
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_CPU = Path("/sys/devices/system/cpu")


def facts() -> dict[str, Any]:
    """What a reader of the results needs to know about the machine and the software.

    Returns
    -------
    dict
        Plain values, ready for JSON; None where the system does not tell.
    """
    build = santa_torch.build_info()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": _revision(Path(santa_torch.__file__)),
        "processor": _processor(),
        "processor_family": _cpuinfo("cpu family"),
        "processor_model": _cpuinfo("model"),
        "cores": usable_cores(),
        "caches": _caches(),
        "memory_bytes": _meminfo("MemTotal"),
        "transparent_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "santa_torch": build.version,
        "compiler": build.compiler,
        "cpu_level": build.cpu_level,
        "cpu_levels": list(build.cpu_levels),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def last_level_cache() -> int:
    """Bytes of the largest cache that core 0 shares; 32 MiB where the system does not tell."""
    return max((int(size) for _, size in _cache_list()), default=32 * 2**20)


def available_memory() -> int:
    """Bytes that can be allocated without swapping; control groups count where they limit it."""
    available = _meminfo("MemAvailable") or 4 * 2**30
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            available = min(available, int(_read(limit)) - int(_read(used)))
        except ValueError:  # no such file, or "max"
            continue
    return max(available, 0)


@dataclass
class Disturbance:
    """Cores in use by others while something was measured.

    Parameters
    ----------
    cores : float or None
        Mean over the time; None where the system does not tell.
    waited : float
        Seconds waited for a quiet machine before.
    """

    cores: float | None = None
    waited: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether nobody else used the machine, as far as it can be told."""
        return self.cores is None or self.cores <= BUSY_CORES


@dataclass
class Watch:
    """Reads ``/proc`` to tell the CPU time of others from our own.

    Parameters
    ----------
    proc : Path
        Tests pass a folder of their own.
    clock, sleep : callable
        Seconds, and how to wait.
    pause : float
        Seconds over which a look at the machine averages.
    """

    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    pause: float = 0.5
    _started: float = field(default=0.0, init=False)

    def wait(self, patience: float) -> tuple[float, float | None]:
        """Wait until the machine is quiet, at most ``patience`` seconds.

        Returns
        -------
        tuple
            Seconds waited, and cores in use by others at the last look (None: unknown).
        """
        start = self.clock()
        while True:
            before = self._look()
            self.sleep(self.pause)
            cores = self._between(before, self._look())
            waited = self.clock() - start
            if cores is None or cores <= BUSY_CORES or waited >= patience:
                return waited, cores

    @contextmanager
    def over(self, patience: float) -> Iterator[Disturbance]:
        """Wait, then watch what happens inside; the object yielded is filled in at the end."""
        seen = Disturbance(waited=self.wait(patience)[0])
        before = self._look()
        try:
            yield seen
        finally:
            seen.cores = self._between(before, self._look())

    def _look(self) -> tuple[float, float, float] | None:
        """Time, CPU seconds of all processes since boot (stolen ones too), and our own."""
        try:
            total = (self.proc / "stat").read_text().split("\n", 1)[0].split()[1:]
            # The name of the process, in brackets, may itself hold spaces and brackets.
            own = (self.proc / "self/stat").read_text().rpartition(")")[2].split()
            user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in total[:8])
            busy = user + nice + system + irq + softirq + steal
            return self.clock(), busy / _TICKS, (int(own[11]) + int(own[12])) / _TICKS
        except (OSError, ValueError, IndexError):
            return None

    @staticmethod
    def _between(
        before: tuple[float, float, float] | None, after: tuple[float, float, float] | None
    ) -> float | None:
        if before is None or after is None or after[0] <= before[0]:
            return None
        seconds, busy, own = (b - a for a, b in zip(before, after, strict=True))
        return max(0.0, (busy - own) / seconds)


def _processor() -> str | None:
    return _cpuinfo("model name") or platform.processor() or None


def _cpuinfo(key: str) -> str | None:
    """What the first core says of itself."""
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip() or None
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _revision(file: Path) -> str | None:
    """The revision of the checkout that holds this file; None for an installed package.

    An environment may lie in a checkout of something else: the file has to be one of its own.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], **_QUIET)
        commands = (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"])
        revision, changed = (subprocess.run([*git, *c], **_QUIET).stdout for c in commands)
    except (OSError, subprocess.SubprocessError):
        return None
    return str(revision).strip() + ("-changed" if changed else "")


def _cache_list() -> list[tuple[str, int]]:
    """Name and bytes of the data caches of core 0, smallest first."""
    found = []
    for index in sorted((_CPU / "cpu0/cache").glob("index*")):
        size = _read(index / "size").strip()
        if _read(index / "type").strip() == "Instruction" or not size[:-1].isdigit():
            continue
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1], 1)
        found.append((f"L{_read(index / 'level').strip()}", int(size[:-1]) * unit))
    return found


def _caches() -> dict[str, int]:
    return dict(_cache_list())


def _meminfo(name: str) -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _chosen(path: Path) -> str | None:
    """The word in square brackets."""
    return _read(path).partition("[")[2].partition("]")[0] or None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
