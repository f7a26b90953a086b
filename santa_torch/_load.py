"""Load the compiled parts, or say which torch they were built with and how to rebuild them.

Importing this module registers ``torch.ops.santa.*``. It does not initialise CUDA.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib import import_module, metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse

import torch

FOLDER = Path(__file__).parent
# Bytes of e_shoff, e_shentsize and e_shnum in the header of a 64-bit ELF file (System V gABI).
_SECTION_TABLE = ((40, 48), (58, 60), (60, 62))


def _record() -> ModuleType | None:
    """What the build wrote beside its libraries; None where nothing was ever built."""
    try:
        return import_module("santa_torch._build")
    except ImportError:
        return None


def rebuild_command() -> str:
    """The command that rebuilds this installation, for the interpreter that is running."""
    if (FOLDER.parent / "setup.py").is_file():
        return f"cd {FOLDER.parent} && {sys.executable} setup.py build_ext --inplace"
    source = "santa-torch"
    try:
        # pip notes where a package that came from a folder or an archive was.
        origin = json.loads(metadata.distribution(source).read_text("direct_url.json") or "{}")
        url = urlparse(origin.get("url", ""))
        source = unquote(url.path) if url.scheme == "file" else url.geturl() or source
    except (metadata.PackageNotFoundError, json.JSONDecodeError):
        pass
    return (
        f"{sys.executable} -m pip install --force-reinstall --no-deps --no-build-isolation "
        f"--no-binary santa-torch {source}"
    )


def _explain(library: str, cause: Exception) -> str:
    record = _record()
    built = record.TORCH if record else "unknown: there is no record of a build here"
    minimum = f" (needs >= {record.TORCH_MINIMUM})" if record else ""
    source = (
        ""
        if record or not (FOLDER.parent / "setup.py").is_file()
        else f"\n  installed already: leave {FOLDER.parent}, whose source folder hides it"
    )
    return (
        f"santa_torch cannot load its compiled part {library}: {cause}\n"
        f"  built with torch: {built}\n"
        f"  torch found:      {torch.__version__}{minimum}\n"
        f"  to rebuild:       {rebuild_command()}{source}"
    )


def _check_whole(path: Path) -> None:
    """Refuse an ELF file that is shorter than its header says: loading it would be a SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:
        return  # No 64-bit little-endian ELF file: the loader's own message will do.
    table, size, count = (int.from_bytes(header[a:b], "little") for a, b in _SECTION_TABLE)
    found, needed = path.stat().st_size, table + size * count
    if found < needed:
        raise OSError(f"{path} is cut off: {found} bytes instead of at least {needed}")


def _load_module() -> ModuleType:
    try:
        for suffix in EXTENSION_SUFFIXES:
            path = FOLDER / f"_C{suffix}"
            if path.is_file():
                _check_whole(path)
        return import_module("santa_torch._C")
    except (ImportError, OSError) as error:
        others = ", ".join(path.name for path in sorted(FOLDER.glob("_C.*.so")))
        raise ImportError(_explain(f"_C (files here: {others or 'none'})", error)) from error


def _load_operators(path: Path) -> None:
    try:
        _check_whole(path)
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(_explain(path.name, error)) from error


def _load_cuda(path: Path) -> str:
    """Load the CUDA operators where there are any; return "loaded" or why they are absent."""
    if not path.is_file():
        record = _record()
        return f"not built: {record.CUDA_REASON}" if record else "not built"
    if torch.version.cuda is None:
        return f"not loaded: torch {torch.__version__} is a build without CUDA"
    try:
        _load_operators(path)
    except ImportError as error:
        # The CPU operators still work; on CUDA tensors the dispatcher will refuse.
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return f"not loaded: {error.__cause__}"
    return "loaded"


C = _load_module()
_load_operators(FOLDER / "_ops.so")
CUDA_MODULE = _load_cuda(FOLDER / "_cuda.so")
