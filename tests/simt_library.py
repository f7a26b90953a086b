"""The CUDA backend built for the CPU: its kernels on the emulator, as operators of two libraries.

``torch.ops.santa_simt`` has the schemas of ``torch.ops.santa`` for tensors of the CPU, and
``torch.ops.santa_simt_races`` has them once more with the race checker. Both are built by ninja
under ``build/simt`` when they are first asked for; what has not changed is not built again.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from build_tools.build_ext import stable_abi_flags
from build_tools.environment import find_compiler, find_ninja, jobs

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "simt"
TORCH_SIDE = (
    "library.cpp",
    "check.cpp",
    "check_sketch.cpp",
    "check_stages.cpp",
    "cuda/ops.cpp",
    "cuda/torch_side.cpp",
)
TORCH_FREE = ("planner.cpp", "planner_cuda.cpp", "cuda/step.cpp")
FLAGS = ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-DSANTA_SIMT=1"]
FLAGS += ["-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += ["-fno-optimize-sibling-calls", "-fPIC", "-fvisibility=hidden"]
MEMORY_PER_JOB = 2**30

RULES = """\
ninja_required_version = 1.8
rule compile
  command = {cxx} $flags -MMD -MF $out.d -c $in -o $out
  description = C++  $in
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared $in -o $out $flags
  description = LINK $out
"""


class Source(NamedTuple):
    """One file to compile, with the flags that only it has."""

    path: Path
    flags: list[str]


def kernels() -> list[Path]:
    """The kernels of csrc/cuda: all but what only asks the toolkit for its version."""
    return sorted(path for path in (CSRC / "cuda").glob("*.cu") if path.name != "info.cu")


def name_of(races: bool) -> str:
    """Namespace of the operators."""
    return "santa_simt_races" if races else "santa_simt"


def flags_of(races: bool) -> list[str]:
    """Flags of every file."""
    return [*FLAGS, f"-DSANTA_LIBRARY={name_of(races)}", f"-DSANTA_SIMT_RACES={int(races)}"]


def kernel_flags(races: bool) -> list[str]:
    """Flags of a kernel besides; never given to the linker, see csrc/simt/simt.h."""
    return [*(["-fsanitize=thread"] if races else []), "-x", "c++"]


def torch_root() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def link_flags() -> list[str]:
    return [f"-L{torch_root()}/lib", "-ltorch_cpu", "-lc10", "-Wl,-z,defs", "-Wl,--as-needed"]


def sources(races: bool) -> list[Source]:
    """Everything in the library."""
    stable = stable_abi_flags(torch_root())
    return [
        *(Source(CSRC / name, stable) for name in TORCH_SIDE),
        Source(ROOT / "tests/cpp/simt_ops.cpp", stable),
        *(Source(CSRC / name, []) for name in TORCH_FREE),
        *(Source(path, []) for path in sorted((CSRC / "simt").glob("*.cpp"))),
        *(Source(path, kernel_flags(races)) for path in kernels()),
    ]


def render(races: bool) -> str:
    """The ninja file."""

    def words(options: list[str]) -> str:
        return " ".join(quote(option) for option in options).replace("$", "$$")

    lines = [RULES.format(cxx=find_compiler())]
    objects = []
    for source in sources(races):
        objects.append(f"{source.path.name}.o")
        lines.append(f"build {objects[-1]}: compile {source.path}")
        lines.append(f"  flags = {words([*flags_of(races), *source.flags])}")
    lines.append(f"build {name_of(races)}.so: link {' '.join(objects)}")
    lines.append(f"  flags = {words(link_flags())}")
    return "\n".join(lines) + "\n"


def build(races: bool) -> Path:
    """Bring the library up to date; return its file.

    Raises
    ------
    RuntimeError
        A compiler failed; the message holds what it said.
    """
    folder = FOLDER / name_of(races)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(render(races))
    command = [find_ninja(), "-C", str(folder), "-j", str(jobs(MEMORY_PER_JOB))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated kernels do not compile:\n{done.stdout[-4000:]}")
    return folder / f"{name_of(races)}.so"


@functools.cache
def load(races: bool = False) -> Any:
    """The operators, ``torch.ops.santa_simt`` or ``torch.ops.santa_simt_races``."""
    torch.ops.load_library(build(races))
    return getattr(torch.ops, name_of(races))


class Setting(NamedTuple):
    """How kernels run and for which device they are planned; no bit may depend on it."""

    order: int = 0  # forward, reverse, shuffled, starving: csrc/simt/engine.h
    seed: int = 1
    resident_blocks: int = 1
    multiprocessors: int = 108
    shared_bytes: int = 99 << 10
    overlap: bool = False

    def use(self, races: bool = False) -> None:
        load(races).configure(*self)
