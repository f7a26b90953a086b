"""csrc/simt, which runs CUDA kernels on the CPU, and csrc/cuda/device.cuh, all they use of CUDA."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nvcc import NEWEST, OLDEST, archs, nvcc
from test_sanitizers import compile_to

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("test_simt", "test_simt_misuse", "test_simt_faults")
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-DSANTA_SIMT=1", "-Icsrc"]
FLAGS += ["-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += ["-fno-optimize-sibling-calls"]  # so that errors know the line of a last call
# Nothing tells a plain build of these: in the emulator a shuffle waits for the lanes of its mask,
# there are no caches whose contents a fence would order, local memory is no memory apart, and
# neither two increments nor two grids run at once.
UNSEEN_BY_PLAIN = {
    *(
        "kShuffleForSyncwarp",
        "kLocalMemory",
        "kNoRelease",
        "kNoAcquire",
        "kPlainCounter",
        "kReadOnlyPath",
    ),
    *("kReadBeforeGridWait", "kWriteBeforeGridWait"),
}


def build(folder: Path, flags: list[str], races: bool = False) -> Path:
    """Build both programs into ``folder``; ``flags`` go to every file."""
    engine = sorted((ROOT / "csrc/simt").glob("*.cpp"))
    tests = [ROOT / f"tests/cpp/{name}.cpp" for name in PROGRAMS]
    flags = [*FLAGS, *flags, *(["-DSANTA_SIMT_RACES=1"] if races else [])]
    # Kernels announce their accesses. Linked without the sanitizer: hooks.cpp takes its calls.
    announced = ["-fsanitize=thread"] if races else []

    def compile_one(path: Path) -> None:
        extra = announced if path in tests else []
        compile_to(folder / f"{path.stem}.o", [*flags, *extra, "-c", str(path)], ROOT)

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, [*tests, *engine]))
    objects = [str(folder / f"{path.stem}.o") for path in engine]
    for name in PROGRAMS:
        compile_to(folder / name, [str(folder / f"{name}.o"), *objects], ROOT)
    return folder


def run_checks(program: Path, at_least: int) -> None:
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    done, checks = result.stdout.split()
    assert done == "ok"
    assert int(checks) >= at_least


def run_features(folder: Path) -> None:
    run_checks(folder / "test_simt", 500_000)
    run_checks(folder / "test_simt_misuse", 500)


def faults_found(folder: Path) -> set[str]:
    result = subprocess.run([folder / "test_simt_faults"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return {line.split("\t")[0] for line in result.stdout.splitlines()}


def planted_faults() -> set[str]:
    source = (ROOT / "tests/cpp/test_simt_faults.cuh").read_text()
    (body,) = re.findall(r"enum class Fault \{(.*?)\};", source, re.DOTALL)
    return set(re.findall(r"\bk\w+", body)) - {"kNone"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), [])


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("races"), [], races=True)


def test_features(plain: Path) -> None:
    run_features(plain)


def test_features_under_the_race_checker(races: Path) -> None:
    run_features(races)


def test_planted_faults(plain: Path) -> None:
    assert len(planted_faults()) >= 40
    assert faults_found(plain) == planted_faults() - UNSEEN_BY_PLAIN


def test_planted_faults_under_the_race_checker(races: Path) -> None:
    assert faults_found(races) == planted_faults()


@pytest.mark.long
def test_without_the_assembly(tmp_path: Path) -> None:
    """The context switch of other processors than x86-64."""
    run_features(build(tmp_path, ["-DSANTA_SIMT_UCONTEXT"]))


@pytest.mark.long
def test_optimised(tmp_path: Path) -> None:
    # An optimiser sees some of the faults itself.
    folder = build(tmp_path, ["-O3", "-Wno-array-bounds"], races=True)
    run_features(folder)
    assert faults_found(folder) == planted_faults()


# --- The same sources under nvcc


KERNELS = ROOT / "tests/cpp/test_simt.cu"


@pytest.mark.parametrize("arch", archs(everyday=(OLDEST, NEWEST)))
def test_nvcc_compiles_the_kernels(arch: str, toolkit: Path, tmp_path: Path) -> None:
    output = nvcc(toolkit, arch, KERNELS, "-Xptxas=-v", "-c", "-o", tmp_path / "kernels.o")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", output)
    assert len(frames) >= 25
    assert set(frames) == {("0", "0")}


@pytest.mark.parametrize("arch", ["80", "90"])
def test_instructions(arch: str, toolkit: Path, tmp_path: Path) -> None:
    nvcc(toolkit, arch, KERNELS, "-ptx", "-o", tmp_path / "kernels.ptx")
    ptx = (tmp_path / "kernels.ptx").read_text()
    for instruction in (
        *("cp.async.cg.shared.global", "cp.async.ca.shared.global", "cp.async.commit_group"),
        *("cp.async.wait_group 2", "ld.global.nc.L1::no_allocate.v4.u32", "cvt.f32.f16"),
        *("ld.shared.v4", "st.shared", "shfl.sync.bfly", "cvt.rn.bf16.f32", "atom.global.inc.u32"),
    ):
        assert instruction in ptx, instruction
    # Objects of shared memory come by reference, and the compiler still knows what they are.
    kernel = re.search(r"\.entry \w*reverse\w*\(.*?^}", ptx, re.DOTALL | re.MULTILINE)
    assert kernel is not None
    assert not re.search(r"\b(ld|st)\.[^gsp]", kernel[0])
    for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        assert (instruction in ptx) == (arch == "90")


def test_ptx_is_in_one_file() -> None:
    """Kernels include device.cuh and nothing of CUDA's, or the emulator could not run them."""
    for path in sorted((ROOT / "csrc/cuda").glob("*.cu*")):
        if path.name in ("device.cuh", "info.cu"):
            continue
        source = path.read_text()
        assert not re.search(r"\basm\b|#include <cuda|__cvta|<<<", source), path
