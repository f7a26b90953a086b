"""What concerns the machine: the benchmarks' floor, the stages' clock, huge pages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compare import OPS

import santa_torch


def xor_of(x: torch.Tensor) -> int:
    data = x.view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype=np.int64)
    return int(np.bitwise_xor.reduce(words)) if words.size else 0


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 4096, 1_000_003])
def test_returns_the_xor_of_all_words(cpu_level, size):
    x = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert OPS.read_through(x) == xor_of(x)


def test_one_changed_bit_anywhere_shows(cpu_level):
    x = torch.randint(-(2**62), 2**62, (5000,))
    before = OPS.read_through(x)
    for at in (0, 1, 2500, 4999):
        x[at] ^= 1
        assert OPS.read_through(x) == before ^ 1
        x[at] ^= 1


def test_refuses_what_it_cannot_read_in_one_go():
    with pytest.raises(
        ValueError, match=r"x must be a contiguous tensor on the CPU, got float32 \[4, 4\]"
    ):
        OPS.read_through(torch.zeros(4, 8)[:, :4])


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def test_huge_pages_are_given_where_they_are_asked_for():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this system gives huge pages always or never")
    before = huge_kilobytes()
    x = torch.empty(64 << 20, dtype=torch.uint8)
    OPS.prefer_huge_pages(x)
    x.zero_()
    assert huge_kilobytes() - before >= 32 << 10


@pytest.mark.parametrize("size", [0, 1, 4096, (4 << 20) + 1])
def test_huge_pages_leave_what_is_written(size):
    x = torch.arange(size, dtype=torch.int64)
    OPS.prefer_huge_pages(x)
    assert torch.equal(x, torch.arange(size, dtype=torch.int64))


def test_stages_are_timed_only_while_asked():
    q, k = torch.randn(1, 4, 64), torch.randn(1, 2, 4096, 64)
    times = {}
    for on in (False, True):
        OPS.time_stages(on)
        santa_torch.decode(q, k, k, samples=64)
        text = OPS.time_stages(False)
        times[on] = {name: float(value) for name, value in (x.split("=") for x in text.split())}
    assert set(times[True]) == {
        "score", "softmax", "include", "draw", "gather", "accumulate", "merge"
    }  # fmt: skip
    assert not any(times[False].values())
    assert {name for name, spent in times[True].items() if spent > 0} == {
        "score", "softmax", "include", "draw", "gather"
    }  # fmt: skip
    assert sum(times[True].values()) < 10
    assert not any(float(x.split("=")[1]) for x in OPS.time_stages(False).split())  # taken once
