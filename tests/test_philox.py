"""Random numbers and thresholds: one arithmetic in Python and C++, bound to published vectors."""

from __future__ import annotations

import random

import pytest

from santa_torch import reference
from santa_torch._load import C

FULL = 2**32 - 1
# Random123 (Salmon et al.), tests/kat_vectors: philox4x32 10, counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
LARGEST_TOTAL = 2**61 - 2**30  # 2^31 - 1 rows of weight 2^30


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert tuple(reference.philox4x32(counter, key)) == answer
    assert tuple(C.philox4x32(counter, key)) == answer


def test_philox_agrees_on_random_words() -> None:
    words = random.Random(1)
    for _ in range(500):
        counter = [words.getrandbits(32) for _ in range(4)]
        key = [words.getrandbits(32) for _ in range(2)]
        assert C.philox4x32(counter, key) == reference.philox4x32(counter, key)


@pytest.mark.parametrize("length", [0, 3, 5])
def test_philox_refuses_other_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=f"counter.*{length}"):
        C.philox4x32([0] * length, [0, 0])
    with pytest.raises(ValueError, match=f"key.*{length}"):
        C.philox4x32([0] * 4, [0] * length)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 2**32 - 1, 2**32 + 5, -1, -(2**63)])
def test_random64_places_every_word_of_the_address(seed: int, position: int) -> None:
    for layer in (0, 1, 2**24 - 1):
        for head in (0, 7, 2**32 - 1):
            for draw in (0, 3, 2**24 - 1):
                got = C.random64(seed, position, layer, head, draw)
                assert got == reference.random64(seed, position, layer, head, draw)
                # The documented layout, spelled out without either implementation's helper.
                low, high = seed % 2**32, seed // 2**32 % 2**32
                word = reference.philox4x32((position % 2**32, draw, layer, head), (low, high))
                assert got == word[1] << 32 | word[0]


def test_addresses_do_not_collide() -> None:
    """Neighbouring seeds, positions, layers, heads and draws all give different bits."""
    axes = [(0, 1, 2, 2**32), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    seen = {
        C.random64(s, p, la, h, d)
        for s in axes[0]
        for p in axes[1]
        for la in axes[2]
        for h in axes[3]
        for d in axes[4]
    }
    assert len(seen) == 4 * 3**4


def test_multiply_high() -> None:
    words = random.Random(2)
    edges = [0, 1, 2, 2**30, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 2, 2**64 - 1]
    pairs = [(a, b) for a in edges for b in edges]
    pairs += [(words.getrandbits(64), words.getrandbits(64)) for _ in range(1000)]
    for a, b in pairs:
        assert C.multiply_high(a, b) == a * b >> 64


def test_rule24_u_is_below_one() -> None:
    """The largest random word maps below the total, so the last threshold stays inside."""
    for total in (1, 2, 3, 2**30, 2**53 + 1, LARGEST_TOTAL):
        u = C.multiply_high(2**64 - 1, total)
        assert u == total - 1
        assert C.multiply_high(0, total) == 0
        for samples in (1, 2, 3, 1000, 2**24 - 1, 2**24):
            assert C.stratum_threshold(samples - 1, samples, total, u) == total - 1
            assert C.stratum_threshold(0, samples, total, 0) == 0


@pytest.mark.parametrize(
    "total",
    [1, 2, 7, 2**24, 2**30, 2**30 + 1, 2**53 + 1, 2**60 - 1, 2**61 - 1, LARGEST_TOTAL],
)
@pytest.mark.parametrize("samples", [1, 2, 3, 100, 2**20 + 7, 2**24 - 1, 2**24])
def test_thresholds_equal_big_integers(total: int, samples: int) -> None:
    numbers = random.Random(total + samples)
    ms = {0, samples // 2, samples - 1, *(numbers.randrange(samples) for _ in range(5))}
    us = {0, 1 % total, total // 2, total - 1, *(numbers.randrange(total) for _ in range(5))}
    for m in ms:
        for u in us:
            assert C.stratum_threshold(m, samples, total, u) == (m * total + u) // samples


def test_shared_thresholds_equal_the_reference() -> None:
    bits = [0, 1, 2**34 - 1, 2**34, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for word in bits:
        points = reference.thresholds("shared", 1, 50 * 2**30 + 17, lambda m, word=word: word)
        assert points == [C.shared_threshold(k, word) for k in range(len(points))]
        assert C.shared_threshold(len(points), word) >= 50 * 2**30 + 17
        offset = word >> 34
        assert points[0] == 2**30 - 1 - offset
        # A row of inclusion 1 is taken whatever the offset: each unit interval holds one point.
        assert all(k * 2**30 <= point < (k + 1) * 2**30 for k, point in enumerate(points[:50]))


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize("weights", [(3, 0, 7, 1, 26), (1,), (0, 5, 0), (10, 10, 10, 10)])
def test_rule30_expected_counts_are_exact(samples: int, weights: tuple[int, ...]) -> None:
    """Over every u, each row is drawn exactly ``samples * weight`` times: no bias at all."""
    total = sum(weights)
    counts = [0] * total
    for m in range(samples):
        for u in range(total):
            counts[C.stratum_threshold(m, samples, total, u)] += 1
    assert counts == [samples] * total


def test_capacity() -> None:
    assert C.draw_capacity(False, 17, 8) == 17
    for samples in (1, 100, 2**20, 2**24):
        for group in (1, 3, 71):
            assert samples * group < C.draw_capacity(True, samples, group) < 2**31
    assert C.MAX_SAMPLES == 2**24
