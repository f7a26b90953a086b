"""What a build finds on the machine: torch, a CUDA toolkit, a compiler, memory.

torch is located and read, never imported: its headers, libraries and ``version.py`` are all that a
stable-ABI build needs, and a build that imports nothing of torch starts in a fraction of a second.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import site
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MINIMUM_TORCH = (2, 11)
DEFAULT_ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
GIB = 2**30


class BuildError(RuntimeError):
    """A reason why the build cannot start, in words meant for the person who started it."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: folder, version, and the CUDA version it was built for (or None)."""

    root: Path
    version: str
    cuda: str | None

    @property
    def supported(self) -> bool:
        """Whether this torch has the stable ABI that the sources are written for."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2]) >= MINIMUM_TORCH

    @property
    def installed_as(self) -> str:
        """Version that pip knows this torch by, which a constraint must name.

        The wheels of an index carry no local part (2.13.0) where ``version.py`` has one
        (2.13.0+cu130): a constraint on the latter is met by nothing, and pip then goes back to
        releases of other packages so old that they do not ask for torch.
        """
        known = metadata.distributions(name="torch", path=[str(self.root.parent)])
        return next((found.version for found in known), self.version)

    @property
    def kind(self) -> str:
        """The CUDA half of an error message."""
        return f"built for CUDA {self.cuda}" if self.cuda else "a build without CUDA"


@dataclass(frozen=True)
class Cuda:
    """A usable CUDA toolkit and the architectures to compile for."""

    home: Path
    version: str
    archs: tuple[str, ...]

    @property
    def gencode(self) -> list[str]:
        """Nvcc options for ``archs``: machine code for each, PTX too where it ends in +PTX."""
        options = []
        for arch in self.archs:
            number = arch.removesuffix("+PTX").replace(".", "")
            options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return options


def _site_folders() -> list[Path]:
    """Site folders of the running interpreter, those that pip's build isolation hides included."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders)]


def find_torch() -> Torch | None:
    """The torch to build against: an importable one, else the one behind the isolated build.

    pip's isolation takes the target environment off ``sys.path`` but runs the same interpreter, so
    the torch that the extension will run with can still be read. Building against it fetches
    nothing and cannot disagree with it about CUDA.
    """
    spec = importlib.util.find_spec("torch")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    roots += [folder / "torch" for folder in _site_folders()]
    for root in roots:
        if (root / "version.py").is_file() and (root / "include" / "torch").is_dir():
            facts = runpy.run_path(str(root / "version.py"))
            torch = Torch(root, str(facts["__version__"]), facts.get("cuda"))
            if torch.supported:
                return torch
    return None


def require_torch() -> Torch:
    """`find_torch`, or an error that says how to get one."""
    torch = find_torch()
    if torch is None:
        minimum = ".".join(map(str, MINIMUM_TORCH))
        raise BuildError(
            f"building santa_torch needs torch >= {minimum}, and this Python "
            f"({sysconfig.get_path('purelib')}) has none.\n"
            f"Install it first (pip install 'torch>={minimum}'), then repeat this command."
        )
    return torch


def _toolkit_candidates() -> list[Path]:
    """Places where a toolkit may be: the one that the user names, else nvcc's, else the usual."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return [Path(named)]
    nvcc = shutil.which("nvcc")
    # nvcc on PATH can be a wrapper script outside its toolkit; _usable then turns it down.
    return ([Path(nvcc).resolve().parent.parent] if nvcc else []) + [Path("/usr/local/cuda")]


def _usable(home: Path) -> bool:
    return (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime_api.h").is_file()


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _architectures(nvcc: Path) -> tuple[str, ...]:
    """``TORCH_CUDA_ARCH_LIST`` as given, or the part of the default list that nvcc knows."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if given:
        archs = tuple(part for part in re.split(r"[;,\s]+", given) if part)
        for arch in archs:
            if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST={given!r}: {arch!r} is not a number such as 9.0, 9.0a "
                    "or 12.0+PTX"
                )
        return archs
    known = set(re.findall(r"compute_(\d+)", _run(nvcc, "--list-gpu-arch")))
    wanted = [arch.removesuffix("+PTX") for arch in DEFAULT_ARCHS.split(";")]
    archs = tuple(arch for arch in wanted if arch.replace(".", "") in known)
    if not archs:
        raise BuildError(f"{nvcc} compiles for none of {DEFAULT_ARCHS}; set TORCH_CUDA_ARCH_LIST")
    return (*archs[:-1], archs[-1] + "+PTX")


def find_cuda(torch: Torch) -> tuple[Cuda | None, str]:
    """Decide whether the CUDA module is built, and say why not.

    ``FORCE_CUDA=1`` turns every "no" into an error, ``FORCE_CUDA=0`` asks for a CPU build.

    Returns
    -------
    cuda : Cuda or None
        The toolkit to compile with.
    reason : str
        Why there is none; empty where there is one.

    Raises
    ------
    BuildError
        With ``FORCE_CUDA=1`` and no way to build for CUDA. Names torch's and the toolkit's version.
    """
    force = os.environ.get("FORCE_CUDA", "")
    if force == "0":
        return None, "FORCE_CUDA=0"
    candidates = _toolkit_candidates()
    home = next((place for place in candidates if _usable(place)), None)
    version = None
    if home is not None:
        match = re.search(r"release (\d+\.\d+)", _run(home / "bin/nvcc", "--version"))
        version = match[1] if match else "of unknown version"

    looked = ", ".join(map(str, candidates))
    toolkit = f"CUDA toolkit {version} at {home}" if home else f"no CUDA toolkit in {looked}"
    if torch.cuda is None:
        reason = f"torch {torch.version} is {torch.kind} ({toolkit})"
    elif home is None:
        reason = f"{toolkit} (torch {torch.version} is {torch.kind})"
    elif str(version).split(".")[0] != torch.cuda.split(".")[0]:
        # The CUDA runtime is one shared library with torch; its soname holds the major version.
        reason = f"torch {torch.version} is {torch.kind}, another major version than {toolkit}"
    else:
        return Cuda(home, str(version), _architectures(home / "bin/nvcc")), ""
    if force and force.lower() not in {"false", "off", "no"}:
        raise BuildError(f"FORCE_CUDA={force}, but {reason}")
    return None, reason


def find_compiler() -> str:
    """The C++ compiler's command: ``CXX``, else the first usual name on the path."""
    needed = "building santa_torch needs a C++20 compiler (g++ >= 11 or clang++ >= 14)"
    remedy = "Install one (Debian, Ubuntu: apt-get install g++), or name it in CXX."
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next((name for name in names if shutil.which(name.split()[0])), None)
    if found is None:
        raise BuildError(f"{needed}; not on the path: {', '.join(names)}.\n{remedy}")
    probe = subprocess.run(
        [*found.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <version>\nstatic_assert(__cplusplus >= 202002L);",
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        raise BuildError(f"{needed}; {found} is not one:\n{probe.stderr.strip()}\n{remedy}")
    return found


def python_includes() -> list[str]:
    """Include folders of the running Python."""
    folders = list(dict.fromkeys(sysconfig.get_path(n) for n in ("include", "platinclude")))
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        raise BuildError(
            f"building santa_torch needs Python's headers, and {folders[0]} has no Python.h.\n"
            "Install them (Debian, Ubuntu: apt-get install python3-dev)."
        )
    return folders


def find_ninja() -> str:
    """Path of ninja: the PyPI package's program, else the one on the path."""
    if importlib.util.find_spec("ninja"):
        import ninja

        program = Path(ninja.BIN_DIR) / "ninja"
        if program.is_file():
            return str(program)
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("building santa_torch needs ninja: pip install ninja")
    return found


def find_pybind11() -> str:
    """Include folder of pybind11."""
    if importlib.util.find_spec("pybind11") is None:
        raise BuildError("building santa_torch needs pybind11: pip install pybind11")
    import pybind11

    return str(pybind11.get_include())


def _free_memory() -> int | None:
    """Bytes of memory that a build may take, the container's limit respected; None if unknown."""
    free = []
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free += [int(match[1]) * 1024] if match else []
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit():
            free.append(int(limit) - int((group / "memory.current").read_text()))
    except OSError:
        pass  # Not Linux, or no control group: whatever was found so far counts.
    return min(free, default=None)


def jobs(bytes_per_job: int) -> int:
    """Parallel compiler processes: ``MAX_JOBS``, else what the cores and the free memory carry."""
    given = os.environ.get("MAX_JOBS")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise BuildError(f"MAX_JOBS={given!r} is not a positive number")
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _free_memory()
    return max(1, min(cores or 1, memory // bytes_per_job if memory is not None else 1))


def main() -> None:
    """Check what must be there before anything is downloaded; say whether torch is.

    Used by ``scripts/setup.sh``; prints the version that pip knows the torch in range by, or
    nothing.
    """
    try:
        python_includes()
        find_compiler()
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    torch = find_torch()
    print(torch.installed_as if torch else "")


if __name__ == "__main__":
    main()
