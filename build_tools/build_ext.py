"""The ``build_ext`` command: three shared libraries, each with what it may depend on.

============  ============================================  =========================
``_C``        pybind11; neither includes nor links torch    imported by Python
``_ops``      LibTorch's stable ABI; no Python symbols      torch.ops.load_library
``_cuda``     stable ABI and the CUDA runtime               the same, where it exists
============  ============================================  =========================
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

from build_tools import ninja_file
from build_tools.environment import (
    MINIMUM_TORCH,
    BuildError,
    Cuda,
    Torch,
    find_compiler,
    find_cuda,
    find_pybind11,
    python_includes,
    require_torch,
)

PACKAGE = "santa_torch"
EXTENSIONS = [Extension(f"{PACKAGE}.{name}", sources=[]) for name in ("_C", "_ops", "_cuda")]

# Contraction is off because draws must not depend on where a compiler fuses a product and a sum.
# No -march: the instruction set is chosen when the library runs.
CXX = ["-std=c++20", "-O3", "-g0", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
CXX += ["-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-Icsrc"]
# GCC's own AVX-512 headers trip its uninitialized warnings (GCC bug 105593); clang knows only one.
CXX += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
NVCC = ["-std=c++20", "-O3", "--fmad=false", "--threads=2", "-Icsrc"]
NVCC += ["-Xcompiler=-fPIC,-ffp-contract=off,-fvisibility=hidden,-Wall"]
# An undefined symbol is an error at link time, not at import; it also keeps Python out of _ops.
COMPLETE = ["-Wl,-z,defs", "-Wl,--as-needed"]


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in Path("csrc").glob(pattern))


def stable_abi_flags(torch_root: Path) -> list[str]:
    """Flags of what includes LibTorch's stable ABI, for every torch in range."""
    target = MINIMUM_TORCH[0] << 56 | MINIMUM_TORCH[1] << 48
    return [f"-isystem{torch_root}/include", f"-DTORCH_TARGET_VERSION={target:#018x}"]


def _environment_flags(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


class BuildExt(build_ext):
    """Build with ninja and record what was built in ``santa_torch/_build.py``."""

    extensions: list[Extension]
    torch: Torch
    cuda: Cuda | None
    cuda_reason: str
    cxx: str
    record: dict[str, str | None]

    def run(self) -> None:
        """Look at the machine, choose the libraries, build them."""
        try:
            self.torch = require_torch()
            self.cxx = find_compiler()
            self.cuda, self.cuda_reason = find_cuda(self.torch)
            if self.cuda is None:
                print(f"santa_torch: no CUDA module: {self.cuda_reason}")
                self.extensions = [e for e in self.extensions if not e.name.endswith("._cuda")]
            super().run()
            if self.inplace:
                self._finish(Path(self.get_finalized_command("build_py").get_package_dir(PACKAGE)))
        except BuildError as error:
            raise PlatformError(f"\n\n{error}\n") from error

    def build_extensions(self) -> None:
        """Build every library under ``build_lib``; setuptools copies from there."""
        self.record = {
            "VERSION": self.distribution.get_version(),
            "TORCH": self.torch.version,
            "TORCH_MINIMUM": ".".join(map(str, MINIMUM_TORCH)),
            "CUDA": self.cuda.version if self.cuda else None,
            "CUDA_ARCHS": " ".join(self.cuda.archs) if self.cuda else "",
            "CUDA_REASON": self.cuda_reason,
        }
        try:
            ninja_file.build(
                [self._library(extension.name) for extension in self.extensions],
                Path(self.build_temp),
                self.cxx,
                str(self.cuda.home / "bin/nvcc") if self.cuda else "nvcc",
            )
        except subprocess.CalledProcessError as error:
            raise CompileError("a compiler failed; its messages are above") from error
        self._finish(Path(self.build_lib) / PACKAGE)

    def get_ext_filename(self, fullname: str) -> str:
        """File of an extension: only ``_C`` is bound to a Python version and named after it."""
        name = fullname.rpartition(".")[2]
        if name == "_C":
            return str(super().get_ext_filename(fullname))
        return fullname.replace(".", os.sep) + ".so"

    def _library(self, fullname: str) -> ninja_file.Library:
        name = fullname.rpartition(".")[2]
        output = Path(self.build_lib) / self.get_ext_filename(fullname)
        make = {"_C": self._python_module, "_ops": self._operators, "_cuda": self._cuda_operators}
        library = make[name](output)
        library.cxx_flags = CXX + library.cxx_flags + _environment_flags("CXXFLAGS")
        library.link_flags = library.link_flags + _environment_flags("LDFLAGS")
        return library

    def _python_module(self, output: Path) -> ninja_file.Library:
        flags = [f"-isystem{folder}" for folder in (find_pybind11(), *python_includes())]
        for name in ("VERSION", "TORCH", "CUDA", "CUDA_ARCHS"):
            flags.append(f'-DSANTA_{name}="{self.record[name] or ""}"')
        sources = _sources("module.cpp", "planner*.cpp", "cpu/level.cpp")
        return ninja_file.Library(output, sources, flags)

    def _operators(self, output: Path) -> ninja_file.Library:
        sources = _sources("library.cpp", "check*.cpp", "planner*.cpp", "cpu/*.cpp")
        return self._stable(output, sources, ["-ltorch_cpu", "-lc10"])

    def _cuda_operators(self, output: Path) -> ninja_file.Library:
        cuda = self.cuda
        assert cuda is not None  # run() drops this extension otherwise
        sources = _sources("check*.cpp", "planner*.cpp", "cuda/*.cpp", "cuda/*.cu")
        library = self._stable(output, sources, ["-ltorch_cuda", "-ltorch_cpu", "-lc10"])
        library.cxx_flags += ["-DUSE_CUDA", f"-isystem{cuda.home}/include"]
        # CXX may hold a launcher and options ("ccache g++ -m64"); nvcc wants the program alone.
        host = next(word for word in reversed(self.cxx.split()) if word[0] != "-")
        library.nvcc_flags = [*NVCC, *cuda.gencode, f"-ccbin={host}"]
        library.nvcc_flags += _environment_flags("NVCC_FLAGS")
        folders = [cuda.home / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
        library.link_flags += [f"-L{folder}" for folder in folders if folder.is_dir()]
        library.link_flags.append("-lcudart")
        return library

    def _stable(self, output: Path, sources: list[Path], links: list[str]) -> ninja_file.Library:
        """A library against LibTorch's stable ABI: one build loads in this torch and later ones."""
        root = self.torch.root
        flags = stable_abi_flags(root)
        return ninja_file.Library(
            output, sources, flags, link_flags=[*COMPLETE, f"-L{root}/lib", *links]
        )

    def _finish(self, folder: Path) -> None:
        """Write the build's record into ``folder`` and drop libraries that are not its own."""
        lines = ['"""What this build was made with. Generated by setup.py; do not edit."""', ""]
        lines += [f"{name} = {value!r}" for name, value in self.record.items()]
        target = folder / "_build.py"
        text = "\n".join(lines) + "\n"
        if not target.is_file() or target.read_text() != text:
            target.write_text(text)
        built = {Path(self.get_ext_filename(extension.name)).name for extension in self.extensions}
        for stale in set(folder.glob("_ops*.so")) | set(folder.glob("_cuda*.so")):
            if stale.name not in built:
                stale.unlink()
