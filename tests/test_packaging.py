"""Rules 35, 46, 47 and 48: building, packaging, importing. The slow half: test_installation.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from packaging_tools import ROOT, python, run, sources
from setuptools import Distribution

import santa_torch
from build_tools import backend, build_ext, environment, ninja_file
from build_tools.environment import BuildError, Torch, find_cuda
from santa_torch import _build, _load

GIB = 2**30
CPU_TORCH = Torch(Path("torch"), "2.13.0+cpu", None)
CUDA_TORCH = Torch(Path("torch"), "2.14.1+cu130", "13.0")


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like CUDA 13.0, named by CUDA_HOME."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime_api.h").touch()
    nvcc = home / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"\n'
        'else printf "compute_75\\ncompute_80\\ncompute_90\\ncompute_120\\n"; fi\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return home


# --- rule 47: CUDA or not


def test_rule47_cuda_torch_and_toolkit_give_a_cuda_build(toolkit: Path) -> None:
    cuda, reason = find_cuda(CUDA_TORCH)
    assert cuda is not None
    assert (cuda.home, cuda.version, reason) == (toolkit, "13.0", "")


def test_rule47_cpu_torch_gives_a_cpu_build(toolkit: Path) -> None:
    cuda, reason = find_cuda(CPU_TORCH)
    assert cuda is None
    assert "2.13.0+cpu" in reason
    assert "13.0" in reason


def test_rule47_no_toolkit_gives_a_cpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    cuda, reason = find_cuda(CUDA_TORCH)
    assert cuda is None
    assert str(tmp_path) in reason


@pytest.mark.parametrize(
    ("torch_found", "remove", "named"),
    [
        (CPU_TORCH, "", ["2.13.0+cpu", "toolkit 13.0"]),
        (CUDA_TORCH, "bin/nvcc", ["2.14.1+cu130", "CUDA 13.0", "no CUDA toolkit"]),
        (CUDA_TORCH, "include/cuda_runtime_api.h", ["2.14.1+cu130", "no CUDA toolkit"]),
        (Torch(Path("torch"), "2.11.0+cu126", "12.6"), "", ["CUDA 12.6", "toolkit 13.0"]),
    ],
    ids=["cpu torch", "no nvcc", "no headers", "another major version"],
)
def test_rule47_force_cuda_names_both_versions(
    torch_found: Torch,
    remove: str,
    named: list[str],
    toolkit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if remove:
        (toolkit / remove).unlink()
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(BuildError) as error:
        find_cuda(torch_found)
    for text in ["FORCE_CUDA=1", *named]:
        assert text in str(error.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_rule47_force_cuda_stops_the_build(toolkit: Path, tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "setup.py", "build_ext", "-b", tmp_path, "-t", tmp_path),
        cwd=ROOT,
        check=False,
        FORCE_CUDA="1",
    )
    assert done.returncode != 0
    assert torch.__version__ in done.stdout
    assert "CUDA toolkit 13.0" in done.stdout
    assert "Traceback" not in done.stdout


def test_rule47_force_cuda_0_gives_a_cpu_build(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert find_cuda(CUDA_TORCH) == (None, "FORCE_CUDA=0")


def test_rule47_a_wrapper_of_nvcc_is_not_a_toolkit(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "elsewhere/bin/nvcc"
    wrapper.parent.mkdir(parents=True)
    shutil.copy(toolkit / "bin/nvcc", wrapper)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert environment._toolkit_candidates()[0] == wrapper.parent.parent
    assert not environment._usable(wrapper.parent.parent)
    link = tmp_path / "bin/nvcc"
    link.parent.mkdir()
    link.symlink_to(toolkit / "bin/nvcc")
    monkeypatch.setenv("PATH", str(link.parent), prepend=os.pathsep)
    assert environment._toolkit_candidates()[0] == toolkit
    assert environment._usable(toolkit)


def test_rule47_architectures(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = find_cuda(CUDA_TORCH)
    assert cuda is not None
    # Of the default list, what this nvcc knows; PTX for what comes later.
    assert cuda.archs == ("8.0", "9.0", "12.0+PTX")
    assert cuda.gencode[-1] == "-gencode=arch=compute_120,code=compute_120"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0+PTX")
    cuda, _ = find_cuda(CUDA_TORCH)
    assert cuda is not None
    assert cuda.gencode == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(BuildError, match="Hopper"):
        find_cuda(CUDA_TORCH)


# --- rule 47: what a build needs


def test_rule47_missing_torch_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "_site_folders", list)
    with pytest.raises(BuildError, match=r"pip install 'torch>=2\.11'"):
        environment.require_torch()
    # Only then does an isolated build ask for one.
    assert "torch>=2.11" in backend.get_requires_for_build_wheel()


def test_rule47_isolated_build_uses_the_torch_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    found = environment.find_torch()
    assert found is not None
    assert found.version == torch.__version__
    assert not any("torch" in line for line in backend.get_requires_for_build_wheel())


def test_the_constraint_names_torch_as_pip_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels of an index have no local version, though their version.py may."""
    (tmp_path / "torch/include/torch").mkdir(parents=True)
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "_site_folders", lambda: [tmp_path])
    environment.main()
    assert capsys.readouterr().out == "2.13.0+cu130\n"  # pip does not know it
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    )
    environment.main()
    assert capsys.readouterr().out == "2.13.0\n"


def test_rule47_an_older_torch_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch/include/torch").mkdir(parents=True)
    (tmp_path / "torch/version.py").write_text("__version__ = '2.10.1'\ncuda = None\n")
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "_site_folders", lambda: [tmp_path])
    assert environment.find_torch() is None


@pytest.mark.parametrize(("free", "expected"), [(64 * GIB, 8), (5 * GIB, 2), (GIB, 1), (None, 1)])
def test_rule47_jobs_are_bounded_by_memory(
    free: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(environment, "_free_memory", lambda: free)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: range(8))
    assert environment.jobs(2 * GIB) == expected
    monkeypatch.setenv("MAX_JOBS", "3")
    assert environment.jobs(2 * GIB) == 3
    monkeypatch.setenv("MAX_JOBS", "all")
    with pytest.raises(BuildError, match="MAX_JOBS='all'"):
        environment.jobs(2 * GIB)


def test_rule47_a_compiler_that_is_missing_or_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        environment.find_compiler()
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\necho 'unrecognized option -std=c++20' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(BuildError, match=r"unrecognized option -std=c\+\+20"):
        environment.find_compiler()


# --- rules 46 and 48


def test_rule46_no_upper_pins(root: Path) -> None:
    project = (root / "pyproject.toml").read_text()
    required = re.search(r"^dependencies = (.*)$", project, re.MULTILINE)
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)\n\[", project, re.M | re.S)
    assert required is not None
    assert extras is not None
    lines = [required[1], extras[1]]
    # These are the developers' choices where there is no torch, not requirements.
    choices = ("torch.txt", "torch-cuda.txt")
    files = [path for path in (root / "requirements").glob("*.txt") if path.name not in choices]
    lines += [line for path in files for line in path.read_text().splitlines() if line[:1] != "#"]
    assert not [line for line in lines if re.search(r"<|==|~=|!=", line)]
    minimum = ".".join(map(str, environment.MINIMUM_TORCH))
    assert required[1] == f'["torch>={minimum}"]'


def test_requirement_files_and_extras_agree(root: Path) -> None:
    project = (root / "pyproject.toml").read_text()
    extras = dict(re.findall(r"^(hf|demo|test|dev) = \[(.*)\]$", project, re.MULTILINE))
    for files, names in (("demo", "hf demo"), ("demo test", "hf demo test")):
        lines = [(root / f"requirements/{name}.txt").read_text() for name in files.split()]
        wanted = {line for line in "\n".join(lines).splitlines() if line[:1] not in "-#"}
        listed = {w for name in names.split() for w in re.findall(r'"([^"]+)"', extras[name])}
        assert wanted == {line for line in listed if not line.startswith("santa-torch")}


def test_rule48_no_machine_flags(root: Path) -> None:
    library = ninja_file.Library(Path("out.so"), [Path("a.cpp")], build_ext.CXX)
    text = ninja_file.render([library], Path("build"), "g++", "nvcc")
    assert "-ffp-contract=off" in text
    assert not re.search(r"-m(arch|tune|cpu|avx|fma)|-Ofast|-ffast-math", text)


@pytest.mark.parametrize("level", santa_torch.build_info().cpu_levels)
def test_rule48_every_level_of_one_binary(level: str) -> None:
    code = "import santa_torch; print(santa_torch.build_info().cpu_level)"
    done = run(sys.executable, "-c", code, cwd=ROOT, SANTA_CPU_LEVEL=level)
    assert done.stdout.split()[-1] == level


def test_rule48_unknown_level_is_named() -> None:
    code = "import santa_torch; santa_torch.build_info()"
    done = run(sys.executable, "-c", code, cwd=ROOT, check=False, SANTA_CPU_LEVEL="sse9")
    assert done.returncode == 1
    assert "sse9" in done.stdout


# --- rule 35: loading


@pytest.fixture
def installation(tmp_path: Path, root: Path) -> Path:
    """A copy of the package as it was built, to break."""
    unwanted = shutil.ignore_patterns("__pycache__", "hf", "demo")
    shutil.copytree(root / "santa_torch", tmp_path / "santa_torch", ignore=unwanted)
    return tmp_path


def _break(path: Path, how: str) -> None:
    contents = path.read_bytes()
    path.unlink()
    if how == "corrupt":
        path.write_bytes(contents[: len(contents) // 3])
    elif how == "foreign":
        path.write_bytes(b"not a library")


@pytest.mark.parametrize("how", ["missing", "corrupt", "foreign"])
@pytest.mark.parametrize("library", ["_C", "_ops"])
def test_rule35_unloadable_library(library: str, how: str, installation: Path) -> None:
    (path,) = (installation / "santa_torch").glob(f"{library}*.so")
    _break(path, how)
    done = python("import santa_torch", installation, check=False, cwd=installation)
    assert done.returncode == 1
    last = done.stdout[done.stdout.rindex("ImportError") :]
    assert f"compiled part {library}" in last
    assert f"built with torch: {_build.TORCH}" in last
    assert f"torch found:      {torch.__version__}" in last
    assert f"to rebuild:       {sys.executable} -m pip install" in last
    assert "installed already" not in last


def test_rule35_never_built(installation: Path) -> None:
    for path in [*(installation / "santa_torch").glob("*.so")]:
        path.unlink()
    (installation / "santa_torch/_build.py").unlink()
    (installation / "setup.py").touch()
    done = python("import santa_torch", installation, check=False, cwd=installation)
    assert "no record of a build" in done.stdout
    assert f"cd {installation} && {sys.executable} setup.py build_ext --inplace" in done.stdout
    assert f"installed already: leave {installation}" in done.stdout


def test_rule35_unloadable_cuda_library_leaves_the_cpu(installation: Path) -> None:
    (installation / "santa_torch/_cuda.so").write_bytes(b"not a library")
    code = "import santa_torch; print(santa_torch.build_info())"
    done = python(code, installation, cwd=installation)
    assert "CUDA operators: not loaded" in done.stdout
    if torch.version.cuda:
        assert "RuntimeWarning: santa_torch cannot load its compiled part _cuda" in done.stdout
    else:
        assert f"torch {torch.__version__} is a build without CUDA" in done.stdout


def test_rule35_import_touches_neither_transformers_nor_cuda(tmp_path: Path) -> None:
    code = (
        "import sys, santa_torch, torch; print(santa_torch.__file__);"
        "assert 'transformers' not in sys.modules; assert not torch.cuda.is_initialized()"
    )
    assert str(ROOT) in python(code, cwd=tmp_path).stdout


# --- what is built


def test_version_is_kept_in_one_place(root: Path) -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (root / "pyproject.toml").read_text(), re.M)
    assert version == santa_torch.__version__ == _build.VERSION


def test_record_and_binary_agree() -> None:
    info = _load.C.build_info()
    assert info["torch"] == _build.TORCH
    assert (info["cuda"] or None) == _build.CUDA
    assert info["cuda_archs"] == _build.CUDA_ARCHS


def test_libraries_depend_on_no_more_than_they_may(root: Path) -> None:
    operators = (root / "santa_torch/_ops.so").read_bytes()
    for name in (b"libpython", b"libtorch_python", b"PyInit_", b"PyObject"):
        assert name not in operators
    (module,) = (root / "santa_torch").glob(
        f"_C.cpython-{sys.version_info[0]}{sys.version_info[1]}*"
    )
    for name in (b"libtorch", b"libc10"):
        assert name not in module.read_bytes()


def test_the_emulator_is_in_no_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    command = build_ext.BuildExt(Distribution({"ext_modules": build_ext.EXTENSIONS}))
    command.build_lib, command.cxx = "build", "g++"
    command.torch = environment.require_torch()
    command.cuda = environment.Cuda(Path("cuda"), "13.0", ("8.0",))
    command.record = dict.fromkeys(("VERSION", "TORCH", "CUDA", "CUDA_ARCHS"), "")
    for extension in build_ext.EXTENSIONS:
        library = command._library(extension.name)
        assert library.sources
        assert not [path for path in library.sources if "simt" in path.parts]
        assert not [flag for flag in library.cxx_flags + library.nvcc_flags if "SIMT" in flag]
    for path in (root / "santa_torch").glob("*.so"):
        assert b"5santa4simt" not in path.read_bytes()  # its namespace


def test_no_source_is_installed(root: Path, tmp_path: Path) -> None:
    build = ("setup.py", "--quiet", "build_py", "--build-lib", tmp_path)
    run(sys.executable, *build, cwd=root)
    installed = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(installed) > 20
    assert {path.suffix for path in installed} == {".py"}


def test_build_info_is_a_mapping_and_prints() -> None:
    info = santa_torch.build_info()
    assert info["torch_running"] == info.torch_running == torch.__version__
    assert dict(info).keys() >= {"version", "cuda_module", "cpu_level"}
    with pytest.raises(KeyError):
        info["__class__"]
    for text in (info.version, info.torch_built, info.cpu_level, info.cuda_module):
        assert text in str(info)


def test_command_line(tmp_path: Path) -> None:
    done = python("from santa_torch.__main__ import main; main(['info', '--json'])", cwd=tmp_path)
    assert json.loads(done.stdout)["version"] == santa_torch.__version__
    module = (sys.executable, "-m", "santa_torch")
    assert "info" in run(*module, "--help", cwd=ROOT).stdout
    unknown = run(*module, "dance", cwd=ROOT, check=False)
    assert unknown.returncode == 2
    assert "dance" in unknown.stdout


def test_sdist_is_complete(root: Path, tmp_path: Path) -> None:
    run(
        *(sys.executable, "setup.py", "--quiet"),
        *("egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path),
        cwd=root,
    )
    (archive,) = tmp_path.glob("santa_torch-*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {Path(*Path(name).parts[1:]) for name in tar.getnames()}
    assert not {file for file in sources() if file.name != ".gitignore"} - inside
    # What tests build, whatever a clone would have.
    assert {Path("csrc/simt/engine.cpp"), Path("csrc/cuda/device.cuh")} <= inside
    assert Path("tests/cpp/test_simt_faults.cuh") in inside
    assert not [file for file in inside if file.suffix == ".so" or file.name == "_build.py"]
