"""Write the ninja file of a build and run it.

ninja keeps the rebuild exact: it tracks headers through the compilers' dependency files, and
rebuilds what a changed flag concerns.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from build_tools.environment import GIB, find_ninja, jobs

# Peak use of one compiler process, measured and rounded up.
CXX_MEMORY = 2 * GIB
NVCC_MEMORY = 4 * GIB

RULES = """\
ninja_required_version = 1.8

pool nvcc
  depth = {nvcc_jobs}

rule cxx
  command = {cxx} $flags -MMD -MF $out.d -c $in -o $out
  description = C++  $in
  depfile = $out.d
  deps = gcc

rule nvcc
  command = {nvcc} $flags -MMD -MF $out.d -c $in -o $out
  description = CUDA $in
  depfile = $out.d
  deps = gcc
  pool = nvcc

rule link
  command = {cxx} -shared $in -o $out $flags
  description = LINK $out
"""


@dataclass
class Library:
    """One shared library: its sources and the flags of each step."""

    output: Path
    sources: list[Path]
    cxx_flags: list[str]
    nvcc_flags: list[str] = field(default_factory=list)
    link_flags: list[str] = field(default_factory=list)


def _escape(text: str) -> str:
    """Text as ninja reads it in a path."""
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _flags(options: list[str]) -> str:
    return " ".join(quote(option) for option in options).replace("$", "$$")


def render(libraries: list[Library], folder: Path, cxx: str, nvcc: str) -> str:
    """Text of a ninja file that builds ``libraries`` with their objects under ``folder``."""
    lines = [
        f"builddir = {_escape(str(folder))}",
        RULES.format(cxx=cxx, nvcc=quote(nvcc), nvcc_jobs=jobs(NVCC_MEMORY)),
    ]
    for library in libraries:
        objects = []
        for source in library.sources:
            rule, flags = "cxx", library.cxx_flags
            if source.suffix == ".cu":
                rule, flags = "nvcc", library.nvcc_flags
            # Each library has objects of its own: they share sources, not flags.
            target = folder / library.output.stem.split(".")[0] / f"{source}.o"
            objects.append(_escape(str(target)))
            lines += [
                f"build {objects[-1]}: {rule} {_escape(str(source))}",
                f"  flags = {_flags(flags)}",
            ]
        lines += [
            f"build {_escape(str(library.output))}: link {' '.join(objects)}",
            f"  flags = {_flags(library.link_flags)}",
        ]
    return "\n".join(lines) + "\n"


def build(libraries: list[Library], folder: Path, cxx: str, nvcc: str = "nvcc") -> None:
    """Bring ``libraries`` up to date; paths are relative to the working folder.

    Raises
    ------
    subprocess.CalledProcessError
        When a compiler fails; its messages are on the standard output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "build.ninja"
    script.write_text(render(libraries, folder, cxx, nvcc))
    ninja = find_ninja()
    subprocess.run([ninja, "-f", str(script), "-j", str(jobs(CXX_MEMORY))], check=True)
    # For clang-tidy and editors: each source once, though libraries share some.
    database = subprocess.run(
        [ninja, "-f", str(script), "-t", "compdb", "cxx"], check=True, capture_output=True
    )
    entries = {entry["file"]: entry for entry in json.loads(database.stdout)}
    target = folder.parent / "compile_commands.json"
    target.write_text(json.dumps(list(entries.values()), indent=1))
