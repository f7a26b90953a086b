"""What nvcc makes of the kernels of csrc/cuda: evidence that needs no GPU.

Every kernel is compiled for the architectures of the default build; ptxas says what it takes of a
multiprocessor, and its machine code shows whether loads and copies are as wide as they are meant
to be. The everyday run takes the oldest, the newest and one in the middle; ``--long`` all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from nvcc import NEWEST, OLDEST, archs, nvcc
from simt_library import CSRC, kernels

ARCHS = archs(everyday=(OLDEST, "9.0", NEWEST))
STATIC_LIMIT = 48 << 10  # shared memory of a block that need not ask for it
REGISTERS = 64 << 10  # of a multiprocessor, on all of these architectures
DTYPES = ("f", "Half", "BFloat")  # as names of instances are mangled

# Which instances there must be; a kernel that is missing here, or that has one more, fails.
INSTANCES = {
    **dict.fromkeys(("score_kernel", "dense_kernel"), 6),  # with a sketch and without
    **dict.fromkeys(("merge_kernel", "weigh_kernel", "pack_kernel"), 3),
    **dict.fromkeys(("finish_maxima_kernel", "include_kernel", "draw_kernel", "count_kernel"), 1),
    "bernoulli_kernel": 2,  # a draw for each head, and one for all
    "gather_kernel": 5,  # into the dtype of V, and into fp32
}


class Usage(NamedTuple):
    """What ptxas says of one instance of a kernel."""

    kernel: str
    mangled: str
    stack: int  # bytes of local memory
    spills: int  # bytes
    registers: int  # of a thread
    shared: int  # bytes, static


class Compiled(NamedTuple):
    """One file for one architecture."""

    path: Path
    object: Path
    usages: list[Usage]


def geometry() -> dict[str, int]:
    """Constants of csrc/cuda/geometry.h that are plain numbers."""
    text = (CSRC / "cuda/geometry.h").read_text()
    return {name: int(value) for name, value in re.findall(r"int (k\w+) = (\d+);", text)}


def parse(output: str) -> list[Usage]:
    """Resources of every kernel, from ``-Xptxas=-v``."""
    usages = []
    for part in output.split("Compiling entry function ")[1:]:
        mangled = part.split("'")[1]
        kernel = re.search(r"\d+([a-z_]+_kernel)", mangled)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert kernel is not None
        assert frame is not None
        assert registers is not None
        shared = re.search(r"(\d+) bytes smem", part)
        spills = int(frame[2]) + int(frame[3])
        numbers = int(frame[1]), spills, int(registers[1]), int(shared[1]) if shared else 0
        usages.append(Usage(kernel[1], mangled, *numbers))
    return usages


@pytest.fixture(scope="module", params=ARCHS)
def compiled(
    request: pytest.FixtureRequest, toolkit: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Compiled]:
    """Every file of kernels for one architecture."""
    arch = request.param
    folder = tmp_path_factory.mktemp(f"sm_{arch}")

    def one(path: Path) -> Compiled:
        target = folder / f"{path.stem}.o"
        output = nvcc(toolkit, arch, path, "-Xptxas=-v", "-c", "-o", target)
        return Compiled(path, target, parse(output))

    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, kernels()))


def all_usages(compiled: list[Compiled]) -> list[Usage]:
    return [usage for file in compiled for usage in file.usages]


# ---- resources -----------------------------------------------------------------------------------


def test_every_kernel_is_looked_at(compiled: list[Compiled]) -> None:
    """As many instances as there must be, and all that the sources declare."""
    found = [usage.kernel for usage in all_usages(compiled)]
    assert {name: found.count(name) for name in set(found)} == INSTANCES
    declared = set()
    for path in kernels():
        declared |= set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", path.read_text()))
    assert declared == set(INSTANCES)


def test_nothing_spills(compiled: list[Compiled]) -> None:
    for usage in all_usages(compiled):
        assert (usage.stack, usage.spills) == (0, 0), usage


def test_registers_let_as_many_blocks_run_as_are_planned(compiled: list[Compiled]) -> None:
    sizes = geometry()
    for usage in all_usages(compiled):
        threads = sizes["kDrawThreads"] if usage.kernel == "draw_kernel" else sizes["kThreads"]
        blocks = REGISTERS // (usage.registers * threads)
        # Those that stream K are planned for; the others only want more than one at a time.
        wanted = sizes["kScoreBlocks"] if usage.kernel in ("score_kernel", "dense_kernel") else 2
        assert blocks >= wanted, usage


def test_static_shared_memory(compiled: list[Compiled]) -> None:
    """Nobody has to ask for it, and what gathers holds its stages and no more."""
    sizes = geometry()
    for usage in all_usages(compiled):
        assert usage.shared <= STATIC_LIMIT, usage
        if usage.kernel != "gather_kernel":
            limit = {
                **dict.fromkeys(("score_kernel", "dense_kernel"), sizes["kStaticBytes"]),
                "include_kernel": 4 * sizes["kIncludeHeads"] + 64,
                "pack_kernel": 64 * (sizes["kPackBytes"] + sizes["kVectorBytes"]),
            }
            assert usage.shared <= limit.get(usage.kernel, 2048), usage
            continue
        element = 4 if "IffE" in usage.mangled else 2
        rows, heads = sizes["kGatherRows"], 4 * sizes["kHeadTile"]
        stage = rows * sizes["kSliceFeatures"] * element + 4 * heads * rows + rows
        stages = {2: 5, 4: 3}[element]
        assert stages * stage <= usage.shared <= stages * (stage + 16) + 256, usage


# ---- machine code --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuobjdump(toolkit: Path) -> Path:
    """The toolkit's, the path's, or that of the PyPI package."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    on_path = shutil.which("cuobjdump")
    places = [toolkit / "bin/cuobjdump", *([Path(on_path)] if on_path else [])]
    places += sorted(packages.glob("*/bin/cuobjdump"))
    for place in places:
        if place.is_file() and (place.parent / "nvdisasm").is_file():
            return place
    pytest.skip("no cuobjdump with nvdisasm beside it: the machine code is not read here")


def machine_code(cuobjdump: Path, file: Compiled) -> dict[str, str]:
    """Instructions of every instance in a file, by its mangled name."""
    environment = {**os.environ, "PATH": f"{cuobjdump.parent}:{os.environ['PATH']}"}
    command = [cuobjdump, "-sass", file.object]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"Function : (\S+)", done.stdout)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_machine_code(cuobjdump: Path, compiled: list[Compiled]) -> None:
    seen = set()
    for file in compiled:
        for mangled, code in machine_code(cuobjdump, file).items():
            usage = next(usage for usage in file.usages if usage.mangled == mangled)
            seen.add(usage.kernel)
            # Local memory would be a detour through global memory.
            assert not re.search(r"\b(LDL|STL)\b", code), mangled
            # Sums of floats by atomics would depend on the order in which blocks come.
            assert not re.search(r"\b(RED|ATOM)\w*\.\S*F(16|32|64)", code), mangled
            if usage.kernel in ("score_kernel", "dense_kernel", "gather_kernel", "pack_kernel"):
                # Rows are copied in the background, 16 bytes at once and past the L1 cache.
                assert re.search(r"LDGSTS\.E\.BYPASS(\.\w+)*\.128", code), mangled
                assert "LDGDEPBAR" in code, mangled
            if usage.kernel in ("score_kernel", "dense_kernel"):
                assert re.search(r"\bLDS\.128\b", code), mangled
                # Runs of a block are read straight into registers, 16 bytes at once.
                sketch = "Lb1E" in mangled
                assert bool(re.search(r"\bLDG\.E\.128\b", code)) == sketch, mangled
            if usage.kernel in ("merge_kernel", "gather_kernel"):
                assert "DADD" in code, mangled
    assert seen == set(INSTANCES)


def ptx_of(toolkit: Path, arch: str, name: str, tmp_path: Path) -> dict[str, str]:
    """PTX of every instance in a file, by its mangled name."""
    target = tmp_path / f"{name}.ptx"
    nvcc(toolkit, arch, CSRC / f"cuda/{name}.cu", "-ptx", "-o", target)
    return {
        match[1]: match[0]
        for match in re.finditer(r"\.entry (\S+?)\(.*?^}", target.read_text(), re.DOTALL | re.M)
    }


@pytest.mark.parametrize("arch", ["80", "90"])
def test_launches_overlap_from_90_on(toolkit: Path, arch: str, tmp_path: Path) -> None:
    for mangled, code in ptx_of(toolkit, arch, "weigh", tmp_path).items():
        for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
            assert (instruction in code) == (arch == "90"), mangled


def test_products_are_rounded_before_they_are_added(toolkit: Path, tmp_path: Path) -> None:
    """Inclusion probabilities decide draws, which must be those of the CPU: no fma in there."""
    (include,) = (
        code
        for mangled, code in ptx_of(toolkit, "80", "weigh", tmp_path).items()
        if "include_kernel" in mangled
    )
    # What remains is fp64, in the functions of the log-sum-exp.
    assert not re.search(r"\bfma\.rn(\.ftz)?\.f32", include)
    assert re.search(r"\bsqrt\.rn\.f32", include)
    assert not re.search(r"\.approx", include.replace("rcp.approx.ftz.f64", ""))
    # So do stochastic queries, which have to be those of the CPU too.
    for mangled, code in ptx_of(toolkit, "80", "bernoulli", tmp_path).items():
        assert not re.search(r"\bfma\.rn(\.ftz)?\.f32", code), mangled
    # Partial outputs are merged as the CPU does: a product, then a sum.
    for mangled, code in ptx_of(toolkit, "80", "dense", tmp_path).items():
        if "merge_kernel" in mangled:
            assert "mul.rn.f64" in code
            assert "add.rn.f64" in code
