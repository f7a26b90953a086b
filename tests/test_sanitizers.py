"""The torch-free kernels under AddressSanitizer and UndefinedBehaviorSanitizer: tests/cpp."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from build_tools.environment import find_compiler

SANITIZERS = "-fsanitize=address,undefined"
FLAGS = f"-std=c++20 -O1 -g1 -ffp-contract=off -fno-omit-frame-pointer {SANITIZERS}".split()
FLAGS += ["-fno-sanitize-recover=all", "-Icsrc", "-Itests/cpp"]
# What knows torch, and what registers operators, stays out.
TORCH_SIDE = {"machine.cpp", "ops.cpp", "stages.cpp"}


def compile_to(target: Path, arguments: list[str], folder: Path) -> None:
    command = [*shlex.split(find_compiler()), *arguments, "-o", str(target)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr[-4000:]}"


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, built once per state of its sources."""
    root = Path(__file__).resolve().parent.parent
    try:
        probe = tmp_path_factory.mktemp("probe")
        (probe / "empty.cpp").write_text("int main() { return 0; }\n")
        compile_to(probe / "empty", [SANITIZERS, "empty.cpp"], probe)
    except AssertionError as error:
        pytest.skip(f"this compiler has no sanitizers: {error}")

    sources = [*sorted((root / "csrc/cpu").glob("*.cpp")), root / "csrc/planner.cpp"]
    sources = [path for path in sources if path.name not in TORCH_SIDE]
    sources.append(root / "tests/cpp/test_kernels.cpp")
    digest = hashlib.sha256(" ".join([find_compiler(), *FLAGS]).encode())
    headers = [*sorted((root / "csrc").rglob("*.h")), root / "tests/cpp/test_kernels.h"]
    for path in [*sources, *headers]:
        digest.update(path.read_bytes())
    cache = request.config.cache
    assert cache is not None
    built = cache.mkdir("sanitizers") / digest.hexdigest()[:16]
    if built.is_file():
        return built

    objects = tmp_path_factory.mktemp("objects")
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(
            pool.map(
                lambda path: compile_to(
                    objects / f"{path.stem}.o", [*FLAGS, "-c", str(path)], root
                ),
                sources,
            )
        )
    compile_to(objects / "program", [SANITIZERS, *map(str, objects.glob("*.o"))], root)
    for old in built.parent.iterdir():
        old.unlink()
    shutil.move(objects / "program", built)
    return built


def test_kernels_stay_in_bounds(program: Path) -> None:
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-6000:]
    done, steps = result.stdout.split()
    assert done == "ok"
    assert int(steps) > 20_000
