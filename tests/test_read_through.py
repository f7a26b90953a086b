"""The benchmarks' floor reads what it says: every byte, once, at every level."""

import numpy as np
import pytest
import torch

import santa_torch


def xor_of(x: torch.Tensor) -> int:
    data = x.view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype=np.int64)
    return int(np.bitwise_xor.reduce(words)) if words.size else 0


@pytest.fixture(params=santa_torch.build_info().cpu_levels)
def level(request):
    before = torch.ops.santa.cpu_level()
    torch.ops.santa.set_cpu_level(request.param)
    yield request.param
    torch.ops.santa.set_cpu_level(before)


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 4096, 1_000_003])
def test_returns_the_xor_of_all_words(level, size):
    x = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert torch.ops.santa.read_through(x) == xor_of(x)


def test_one_changed_bit_anywhere_shows(level):
    x = torch.randint(-(2**62), 2**62, (5000,))
    before = torch.ops.santa.read_through(x)
    for at in (0, 1, 2500, 4999):
        x[at] ^= 1
        assert torch.ops.santa.read_through(x) == before ^ 1
        x[at] ^= 1


def test_refuses_what_it_cannot_read_in_one_go():
    with pytest.raises(
        ValueError, match=r"x must be a contiguous tensor on the CPU, got float32 \[4, 4\]"
    ):
        torch.ops.santa.read_through(torch.zeros(4, 8)[:, :4])
