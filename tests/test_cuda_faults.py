"""Faults planted in the real CUDA kernels: each has to be found by the battery of its list.

A fault is a change of the text of one file. What includes that file is compiled again, with the
emulator, and linked with the unchanged rest; a child process runs the battery on the result.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import simt_library
from cuda_faults import FAULTS, Fault
from cuda_more_faults import MORE_FAULTS
from cuda_sketch_faults import SKETCH_FAULTS
from simt_library import CSRC, ROOT

CUDA = CSRC / "cuda"
# Programs that run a battery, and the faults that it has to find.
BATTERIES = {
    "cuda_faults.py": [*FAULTS, *MORE_FAULTS],
    "cuda_sketch_faults.py": SKETCH_FAULTS,
}
ALL_FAULTS = [(program, fault) for program, faults in BATTERIES.items() for fault in faults]


def compile_to(target: Path, arguments: list[str]) -> None:
    command = [simt_library.find_compiler(), *arguments, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def includers(name: str) -> list[str]:
    """Kernels whose translation unit holds a file of csrc/cuda."""
    found, files = {name}, sorted(CUDA.glob("*.cu*"))
    while True:
        more = {
            path.name
            for path in files
            if found & set(re.findall(r'#include "(\S+)"', path.read_text()))
        }
        if more <= found:
            return sorted(file for file in found if file.endswith(".cu"))
        found |= more


def test_who_includes_what() -> None:
    assert includers("score.cu") == ["score.cu"]
    assert includers("score.cuh") == ["dense.cu", "score.cu"]
    assert includers("blocks.cuh") == ["dense.cu", "score.cu"]
    assert includers("device.cuh") == sorted(path.name for path in simt_library.kernels())


def plant(fault: Fault, folder: Path) -> Path:
    """Build the library with one fault; its place among unchanged neighbours."""
    source = (CUDA / fault.file).read_text()
    assert source.count(fault.old) == 1, f"{fault.name}: its text is not in {fault.file} just once"
    tree = folder / "csrc"
    tree.mkdir(parents=True)
    for path in CSRC.iterdir():
        if path.name != "cuda":
            (tree / path.name).symlink_to(path)
    shutil.copytree(CUDA, tree / "cuda")
    (tree / "cuda" / fault.file).write_text(source.replace(fault.old, fault.new))

    name = simt_library.name_of(fault.races)
    flags = [flag for flag in simt_library.flags_of(fault.races) if flag not in ("-O2", "-Werror")]
    objects = {path.name: path for path in (simt_library.FOLDER / name).glob("*.o")}
    for kernel in includers(fault.file):
        objects[f"{kernel}.o"] = target = folder / f"{kernel}.o"
        extra = ["-O1", *simt_library.kernel_flags(fault.races), "-c", str(tree / "cuda" / kernel)]
        compile_to(target, [f"-I{tree}", *flags, *extra])
    library = folder / f"{name}.so"
    compile_to(
        library, ["-shared", *map(str, sorted(objects.values())), *simt_library.link_flags()]
    )
    return library


class Battery:
    """The program that runs the checks; asked library by library."""

    def __init__(self, program: str) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests" / program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def run(self, library: Path) -> str:
        """``ok``, or what was found."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(library, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        assert answer, "the battery ended"
        return answer


@pytest.fixture(scope="module")
def batteries() -> dict[str, Battery]:
    """By their program."""
    return {program: Battery(program) for program in BATTERIES}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """A library for each fault, by its name; compiled while others are run."""
    for races in (False, True):
        simt_library.build(races)
    folder = tmp_path_factory.mktemp("planted")
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        yield {
            fault.name: pool.submit(plant, fault, folder / str(at))
            for at, (_, fault) in enumerate(ALL_FAULTS)
        }


@pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
@pytest.mark.parametrize("program", BATTERIES)
def test_the_battery_passes_the_kernels_as_they_are(
    program: str, races: bool, batteries: dict[str, Battery]
) -> None:
    assert batteries[program].run(simt_library.build(races)) == "ok"


@pytest.mark.parametrize(
    ("program", "fault"),
    ALL_FAULTS,
    ids=[fault.name.replace(" ", "-") for _, fault in ALL_FAULTS],
)
def test_a_planted_fault_is_found(
    program: str, fault: Fault, batteries: dict[str, Battery], planted: dict[str, Future[Path]]
) -> None:
    answer = batteries[program].run(planted[fault.name].result())
    assert answer != "ok"
    print(answer)
    if fault.races:  # by the checker itself, not by luck
        assert "kernel '" in answer
