"""PEP 517 backend: setuptools', plus torch as a build requirement only where none is installed.

A fixed ``torch`` in ``build-system.requires`` would make every ``pip install .`` fetch a second
torch of several gigabytes. Build isolation hides the installed one from ``import``, but its files
can be read (see `build_tools.environment.find_torch`), and the stable ABI needs no more. Without
one, torch is fetched for the build as the package's own requirement will fetch it for use; a build
against any torch in range loads in every other.
"""

from __future__ import annotations

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from build_tools.environment import MINIMUM_TORCH, find_torch

Settings = dict[str, str | list[str] | None] | None


def _torch() -> list[str]:
    return [] if find_torch() else ["torch>=" + ".".join(map(str, MINIMUM_TORCH))]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Requirements of a wheel beyond ``build-system.requires``."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Requirements of an editable install beyond ``build-system.requires``."""
    return build_meta.get_requires_for_build_editable(config_settings) + _torch()
