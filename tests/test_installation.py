"""Rules 35 and 47 on real installations: pip with and without isolation, two torches, scripts.

Each environment here takes packages from the package index, torch among them: --long only.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from packaging_tools import ROOT, SMOKE, copy_checkout, make_venv, run

from build_tools.environment import Torch, find_cuda

pytestmark = pytest.mark.long

# The newest torch with CUDA that is tested; the operators are built for 2.11 and later ones.
CUDA_TORCH = (ROOT / "requirements/torch-cuda.txt").read_text().split("==")[-1].strip()

# The tensor that each operator looks at first.
FIRST_TENSORS = {
    "decode": "q",
    "score": "q",
    "weigh": "scores",
    "draw": "weights",
    "gather": "rows",
}

# The CUDA kernels of all operators are registered, and refuse tensors of the CPU before any driver
# is asked for: the dispatcher is told to go to them although nothing is on a GPU.
CUDA_CALLS = """
import torch, santa_torch
has = torch._C._dispatch_has_kernel_for_dispatch_key
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
q, k, one = torch.randn(1, 4, 64), torch.randn(1, 2, 30, 64), torch.zeros(1, dtype=torch.int64)
scores = torch.randn(1, 4, 30)
rows = torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 4, 3)
draws = {"samples": 8, "method": "shared", "seed": one, "position": one}
calls = {
    "decode": ((q, k, k), draws),
    "score": ((q, k), {}),
    "weigh": ((scores, scores[..., 0]), {}),
    "draw": ((scores.int(),), draws | {"kv_heads": 2}),
    "gather": ((*rows, torch.zeros(1, 2, dtype=torch.int32), k), {}),
}
for name, (args, kwargs) in calls.items():
    assert has(f"santa::{name}", "CUDA"), name
    try:
        getattr(torch.ops.santa, name).default.redispatch(cuda, *args, **kwargs)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
assert not torch.cuda.is_initialized()
"""

# The last patch of the oldest minor version that santa_torch.hf accepts.
OLDEST_TRANSFORMERS = "4.57.3"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("clone with space"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with the development torch and nothing to build with."""
    folder = tmp_path_factory.mktemp("plain") / "venv"
    return make_venv(folder, "-r", str(ROOT / "requirements/torch.txt"), "numpy")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with a torch that is built for CUDA, and the build requirements."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    command = ("bash", ROOT / "scripts/cuda_environment.sh", folder)
    output = run(*command, SANTA_PYTHON=sys.executable).stdout
    assert f"torch {CUDA_TORCH}" in output
    _pip(folder / "bin/python", "--no-compile", "-r", ROOT / "requirements/build.txt", "numpy")
    return folder / "bin/python"


def _pip(interpreter: Path, *arguments: str | Path, **environment: str) -> str:
    return run(interpreter, "-m", "pip", "install", *arguments, **environment).stdout


def _smoke(interpreter: Path, folder: Path) -> str:
    """Use an installation from a folder that has nothing to do with it."""
    output = run(interpreter, "-c", SMOKE, cwd=folder).stdout
    assert "site-packages" in re.search(r"loaded from (.*)", output)[1]
    return output


def test_rule47_isolated_install(plain: Path, checkout: Path, tmp_path: Path) -> None:
    output = _pip(plain, "--no-compile", "--verbose", "--force-reinstall", "--no-deps", checkout)
    assert "cp3" in re.search(r"santa_torch-0\S+\.whl", output)[0]
    # One torch is enough: the build read the environment's.
    assert "Installing backend dependencies" not in output
    built = re.search(r"built with (\S+)\)", _smoke(plain, tmp_path))
    assert built is not None


def test_rule47_install_without_isolation(plain: Path, checkout: Path, tmp_path: Path) -> None:
    run(plain, "-m", "pip", "uninstall", "--yes", "santa-torch")
    _pip(plain, "--no-compile", "-r", ROOT / "requirements/build.txt")
    _pip(plain, "--no-compile", "--no-build-isolation", checkout)
    _smoke(plain, tmp_path)


def test_rule47_install_from_the_sdist(plain: Path, checkout: Path, tmp_path: Path) -> None:
    _pip(plain, "--no-compile", "-r", ROOT / "requirements/build.txt")
    run(plain, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    _pip(plain, "--no-compile", "--force-reinstall", "--no-deps", archive)
    _smoke(plain, tmp_path)


def test_rule47_no_torch_at_build_time(tmp_path: Path, checkout: Path) -> None:
    empty = make_venv(tmp_path / "venv", "setuptools>=77", "ninja", "pybind11")
    command = (empty, "-m", "pip", "install", "--no-deps", "--no-build-isolation", checkout)
    done = run(*command, check=False)
    assert done.returncode != 0
    assert "pip install 'torch>=2.11'" in done.stdout


def test_rule47_another_torch_builds_the_cuda_operators(
    other: Path, checkout: Path, tmp_path: Path
) -> None:
    """Built, linked and imported with a CUDA torch; no GPU is needed for that."""
    _pip(other, "--no-compile", "--no-build-isolation", checkout)
    output = _smoke(other, tmp_path)
    cuda, reason = find_cuda(Torch(Path("torch"), CUDA_TORCH, "13.0"))
    if cuda is None:
        assert f"CUDA operators: not built: {reason}"[:40] in output
        pytest.skip(f"no CUDA operators were built here: {reason}")
    assert "CUDA operators: loaded" in output
    code = "import santa_torch, torch; print(torch.ops.santa.cuda_info())"
    code += "; assert not torch.cuda.is_initialized()"
    compiled = run(other, "-c", code, cwd=tmp_path).stdout
    assert f"CUDA {cuda.version}" in compiled
    for arch in cuda.archs:
        assert "sm_" + arch.removesuffix("+PTX").replace(".", "") in compiled
    refused = run(
        other, "-c", CUDA_CALLS, cwd=tmp_path, CUDA_VISIBLE_DEVICES=""
    ).stdout.splitlines()
    for line, (name, first) in zip(refused, FIRST_TENSORS.items(), strict=True):
        assert line.startswith(f"ValueError santa::{name}: {first} must be on a CUDA device, got [")


def test_without_a_driver_torch_says_so(other: Path) -> None:
    code = "import torch; torch.zeros(1).cuda()"
    done = run(other, "-c", code, check=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert re.search("no NVIDIA driver|No CUDA GPUs are available", done.stdout)


def test_the_cuda_environment_is_made_once(other: Path) -> None:
    folder = other.parent.parent
    before = (folder / "pyvenv.cfg").stat().st_mtime_ns
    command = ("bash", ROOT / "scripts/cuda_environment.sh", folder)
    assert str(other) in run(*command, SANTA_PYTHON=sys.executable).stdout
    assert (folder / "pyvenv.cfg").stat().st_mtime_ns == before


def test_rule35_one_build_loads_in_both_torches(
    plain: Path, other: Path, checkout: Path, tmp_path: Path
) -> None:
    """The wheel of one torch runs in the other: that is what the stable ABI is for."""
    for builder, user in ((plain, other), (other, plain)):
        wheels = tmp_path / builder.parent.parent.parent.name
        _pip(builder, "--no-compile", "-r", ROOT / "requirements/build.txt")
        run(
            *(builder, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", wheels, checkout),
        )
        (wheel,) = wheels.glob("*.whl")
        _pip(user, "--no-compile", "--force-reinstall", "--no-deps", wheel)
        output = _smoke(user, tmp_path)
        running, built = re.search(r"torch: +(\S+) \(built with (\S+)\)", output).groups()
        assert running != built


def test_incremental_build(plain: Path, checkout: Path) -> None:
    """One changed header rebuilds what includes it; no change rebuilds nothing."""
    _pip(plain, "--no-compile", "-r", ROOT / "requirements/build.txt")
    build = (plain, "setup.py", "build_ext", "--inplace")
    run(*build, cwd=checkout)
    assert "no work to do" in run(*build, cwd=checkout).stdout
    header = checkout / "csrc/cpu/level.h"
    header.write_text(header.read_text() + "// changed\n")
    output = run(*build, cwd=checkout).stdout
    assert "csrc/cpu/level.cpp" in output
    assert "csrc/library.cpp" not in output


def test_setup_in_a_clean_clone(tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path / "clone")
    output = run("bash", "scripts/setup.sh", "test", cwd=clone).stdout
    assert "santa_torch is ready" in output
    assert "CPU level" in output
    run(clone / ".venv/bin/python", "-c", SMOKE, cwd=tmp_path)

    started = time.monotonic()
    again = run("bash", "scripts/setup.sh", "test", cwd=clone).stdout
    assert time.monotonic() - started < 60  # about 4 s on an idle machine
    assert "no work to do" in again
    assert "Successfully installed" not in again

    # A run that was killed while packages were unpacked: nothing half-installed survives.
    (clone / ".venv/.incomplete").touch()
    (clone / ".venv/half-installed").touch()
    assert "creating .venv" in run("bash", "scripts/setup.sh", "demo", cwd=clone).stdout
    assert not (clone / ".venv/half-installed").exists()


def test_setup_with_santa_python(plain: Path, tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path / "clone")
    code = "import torch; print(torch.__version__)"
    before = run(plain, "-c", code).stdout
    link = os.path.relpath(plain, clone)
    output = run("bash", "scripts/setup.sh", "demo", cwd=clone, SANTA_PYTHON=link).stdout
    assert "installing torch" not in output
    assert run(plain, "-c", code).stdout == before
    assert not (clone / ".venv").exists()
    assert list((clone / "santa_torch").glob("_ops.so"))


def test_rule46_the_oldest_transformers(tmp_path: Path) -> None:
    """The adapter on the oldest version in range; every other test runs on the newest one."""
    torch = (ROOT / "requirements/torch.txt").read_text().split("\n")[-2]
    interpreter = make_venv(
        tmp_path / "venv", torch, "numpy", "pytest", f"transformers=={OLDEST_TRANSFORMERS}"
    )
    files = [ROOT / f"tests/test_{name}.py" for name in ("hf", "hf_switch", "cache", "config")]
    # The operators are those that were built here: what is tested is Python.
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    version = run(interpreter, "-c", "import transformers; print(transformers.__version__)")
    assert version.stdout.strip() == OLDEST_TRANSFORMERS
    output = run(
        *(interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files),
        cwd=ROOT,
        **environment,
    ).stdout
    assert re.search(r"\d{3} passed", output), output[-2000:]
    assert "failed" not in output


@pytest.mark.parametrize(
    ("python", "said"), [("no-such-python", "is not a command"), ("false", "needs Python >= 3.10")]
)
def test_setup_names_an_unusable_python(python: str, said: str) -> None:
    done = run("bash", ROOT / "scripts/setup.sh", check=False, SANTA_PYTHON=python)
    assert done.returncode == 1
    assert said in done.stdout


def test_setup_names_a_missing_compiler(tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path / "clone")
    done = run("bash", "scripts/setup.sh", cwd=clone, check=False, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler" in done.stdout
    assert not (clone / ".venv").exists()
    shutil.rmtree(clone)
