"""SantaConfig and BernoulliConfig: values taken, values refused, and no import of torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from santa_torch import BernoulliConfig, SantaConfig, config


def test_defaults() -> None:
    settings = SantaConfig()
    assert (settings.method, settings.samples, settings.seed) == ("shared", 256, 0)
    assert settings.selects(0)
    assert settings.selects(31)


def test_layers_become_a_sorted_tuple() -> None:
    settings = SantaConfig(layers=(layer for layer in (5, 1, 5)))
    assert settings.layers == (1, 5)
    assert [settings.selects(layer) for layer in (0, 1, 5)] == [False, True, True]
    assert settings == SantaConfig(layers=[1, 5])
    assert hash(settings) == hash(SantaConfig(layers=[1, 5]))


def test_frozen_and_replaceable() -> None:
    settings = SantaConfig(samples=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.samples = 9  # type: ignore[misc]
    assert dataclasses.replace(settings, seed=3) == SantaConfig(samples=8, seed=3)


def test_rows_and_short_contexts() -> None:
    assert SantaConfig(query_rows="all").query_rows == "all"
    assert SantaConfig(dense_below=512).dense_below == 512
    assert (SantaConfig().query_rows, SantaConfig().dense_below) == ("decode", 0)


def test_dense_needs_no_samples() -> None:
    assert SantaConfig("dense", samples=None).samples is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "topk"}, "method must be one of dense, .*, got 'topk'"),
        ({"samples": 0}, "samples must be between 1 and .*, got 0"),
        ({"samples": 2**24 + 1}, "samples must be between 1 and 16777216, got 16777217"),
        ({"samples": 1.5}, "samples must be an integer, got 1.5"),
        ({"samples": True}, "samples must be an integer, got True"),
        ({"samples": None}, "samples must be given for method 'shared', got None"),
        ({"seed": 2**63}, "seed must be between .*, got 9223372036854775808"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"layers": 3}, "layers must be None or an iterable of integers, got 3"),
        ({"layers": "12"}, "layers must be None or an iterable of integers, got '12'"),
        ({"layers": [1, -1]}, "layers must be between 0 and .*, got -1"),
        ({"layers": []}, "layers must name at least one layer"),
        ({"query_rows": "some"}, "query_rows must be one of decode, all, got 'some'"),
        ({"dense_below": -1}, "dense_below must be between 0 and .*, got -1"),
        ({"dense_below": 9, "query_rows": "all"}, "dense_below=9 is for query_rows='decode'"),
        ({"sketch_bits": 3}, "sketch_bits must be None, 16 or 32, got 3"),
        ({"sketch_bits": 64}, "sketch_bits must be between 1 and 32, got 64"),
        ({"sketch_bits": "16"}, "sketch_bits must be an integer, got '16'"),
        ({"sketch_bits": True}, "sketch_bits must be an integer, got True"),
        ({"bernoulli": 4}, "bernoulli must be a BernoulliConfig or None, got 4"),
        ({"bernoulli": BernoulliConfig}, "bernoulli must be a BernoulliConfig or None, got <class"),
    ],
)
def test_wrong_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SantaConfig(**arguments)


@pytest.mark.parametrize(
    "later",
    [
        {"sketch_bits": 8},
        {"sketch_bits": 4},
        {"sketch_bits": 2},
        {"planes": True},
        {"planes": 1},
    ],
)
def test_later_arguments_are_refused_by_name(later: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"{next(iter(later))}="):
        SantaConfig(**later)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws": 0}, "draws must be between 1 and 1024, got 0"),
        ({"draws": 1025}, "draws must be between 1 and 1024, got 1025"),
        ({"draws": 2.0}, "draws must be an integer, got 2.0"),
        ({"draws": True}, "draws must be an integer, got True"),
        ({"shared": 1}, "shared must be True or False, got 1"),
        ({"shared": None}, "shared must be True or False, got None"),
    ],
)
def test_wrong_values_of_bernoulli_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BernoulliConfig(**arguments)


def test_bernoulli_is_a_value() -> None:
    settings = SantaConfig(bernoulli=BernoulliConfig(4, shared=False), sketch_bits=16)
    assert settings == SantaConfig(bernoulli=BernoulliConfig(4, shared=False), sketch_bits=16)
    assert hash(settings) == hash(dataclasses.replace(settings))
    assert settings != SantaConfig(bernoulli=BernoulliConfig(4), sketch_bits=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.bernoulli.draws = 9  # type: ignore[misc, union-attr]
    assert (BernoulliConfig().draws, BernoulliConfig().shared) == (8, True)
    assert BernoulliConfig(1024).draws == config.MAX_BERNOULLI_DRAWS


@pytest.mark.parametrize("bits", [None, 16, 32])
def test_bits_of_a_sketch(bits: int | None) -> None:
    assert SantaConfig(sketch_bits=bits).sketch_bits == bits


def test_largest_samples_are_the_operators() -> None:
    from santa_torch import _load

    assert config.MAX_SAMPLES == _load.C.MAX_SAMPLES


def test_needs_no_torch() -> None:
    script = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(Path(config.__file__))], check=True)
