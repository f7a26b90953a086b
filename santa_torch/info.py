"""What this build is and what it runs on: `build_info`, and ``python -m santa_torch info``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import torch

from santa_torch import _load


@dataclass(frozen=True)
class BuildInfo(Mapping[str, object]):
    """Facts about an installation, readable as attributes or as a mapping.

    Attributes
    ----------
    version : str
        Version of santa_torch.
    torch_built, torch_running : str
        Version of torch whose headers compiled the libraries, and of the one in use.
    compiler : str
        C++ compiler.
    cuda : str or None
        Version of the CUDA toolkit that compiled the CUDA operators; None for a CPU build.
    cuda_archs : tuple of str
        Compute capabilities compiled for; one with ``+PTX`` also serves later ones.
    cuda_module : str
        "loaded", or why there are no CUDA operators.
    cpu_level : str
        Instruction-set level in use; `SANTA_CPU_LEVEL` forces one.
    cpu_levels : tuple of str
        Levels that this processor supports, slowest first.
    """

    version: str
    torch_built: str
    torch_running: str
    compiler: str
    cuda: str | None
    cuda_archs: tuple[str, ...]
    cuda_module: str
    cpu_level: str
    cpu_levels: tuple[str, ...]

    def __getitem__(self, key: str) -> object:
        if key not in set(self):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __str__(self) -> str:
        archs = f" for {', '.join(self.cuda_archs)}" if self.cuda_archs else ""
        lines = {
            "santa_torch": self.version,
            "torch": f"{self.torch_running} (built with {self.torch_built})",
            "compiler": self.compiler,
            "CUDA toolkit": f"{self.cuda}{archs}" if self.cuda else "none",
            "CUDA operators": self.cuda_module,
            "CPU level": f"{self.cpu_level} (supported: {', '.join(self.cpu_levels)})",
        }
        return "\n".join(f"{name + ':':<16}{value}" for name, value in lines.items())


def build_info() -> BuildInfo:
    """Collect the facts about this installation.

    Returns
    -------
    BuildInfo
        Prints as a short table.

    Raises
    ------
    ValueError
        When ``SANTA_CPU_LEVEL`` names a level that is unknown or that this processor lacks.
    """
    built = _load.C.build_info()
    return BuildInfo(
        version=built["version"],
        torch_built=built["torch"],
        torch_running=str(torch.__version__),
        compiler=built["compiler"],
        cuda=built["cuda"] or None,
        cuda_archs=tuple(built["cuda_archs"].split()),
        cuda_module=_load.CUDA_MODULE,
        cpu_level=torch.ops.santa.cpu_level(),
        cpu_levels=tuple(built["cpu_levels"]),
    )


def main(argv: list[str]) -> int:
    """Run ``python -m santa_torch info``."""
    parser = argparse.ArgumentParser("python -m santa_torch info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    info = build_info()
    print(json.dumps(asdict(info), indent=2) if arguments.json else info)
    return 0
