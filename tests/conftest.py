"""Fixtures and options of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Nothing in the suite may reach for a model hub: the models used here come from packages.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from backends import CPU_LEVELS, LEVELS, use

from build_tools import environment

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of this processor in use, then the CUDA kernels, emulated and on a GPU."""
    with use(request.param, request.node.nodeid):
        yield request.param


@pytest.fixture(params=["cpu", *(level for level in LEVELS if level not in CPU_LEVELS)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in use; of the CPU's levels the one that is in use already."""
    level = torch.ops.santa.cpu_level() if request.param == "cpu" else request.param
    with use(level, request.node.nodeid):
        yield request.param


@pytest.fixture(params=["cpu", *(level for level in LEVELS if level == "gpu")])
def fast_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend but the emulator, which is too slow for what uses this."""
    level = torch.ops.santa.cpu_level() if request.param == "cpu" else request.param
    with use(level, request.node.nodeid):
        yield request.param


@pytest.fixture(params=CPU_LEVELS)
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction-set level that this processor supports, in use."""
    with use(request.param, ""):
        yield request.param


@pytest.fixture
def one_thread() -> None:
    """Small tensors gain nothing from threads, and lose much where the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture
def root() -> Path:
    """Folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """Folder of the CUDA toolkit."""
    found = (place for place in environment._toolkit_candidates() if environment._usable(place))
    home = next(found, None)
    if home is None:
        pytest.skip("no CUDA toolkit: nothing is compiled by nvcc here")
    return home


@pytest.fixture(scope="module")
def model() -> Any:
    """The tiny Llama of ``tiny_models``, one for each file; only files that use it need it."""
    from tiny_models import tiny_llama

    return tiny_llama()


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """Every call of the operator, as ``spies.operator_calls`` tells it."""
    from spies import operator_calls

    with operator_calls() as seen:
        yield seen


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Seed torch, and give back what a test changes in the process: threads and CPU level."""
    torch.manual_seed(0)
    threads, level = torch.get_num_threads(), torch.ops.santa.cpu_level()
    yield
    torch.set_num_threads(threads)
    torch.ops.santa.set_cpu_level(level)
