"""The benchmark suite's comparison with float64: what it refuses, and what it lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from santa_torch.bench import check, inputs
from santa_torch.bench.cases import Case

TINY = Case(1, 8, 2, 16, 256, "float32", 1, samples=(16,))


@pytest.fixture(scope="module")
def exact() -> tuple[inputs.Inputs, check.Exact]:
    tensors = inputs.Inputs(TINY, 1)
    return tensors, check.Exact(tensors.q, tensors.keys[0], tensors.values[0], (16,))


def _sampled(tensors: inputs.Inputs, method: str, seed: int, **more: Any) -> torch.Tensor:
    import santa_torch

    arguments = {"samples": 16, "method": method, "seed": seed, **more}
    out = santa_torch.decode(tensors.q, tensors.keys[0], tensors.values[0], **arguments)
    assert isinstance(out, torch.Tensor)
    return out


def test_the_exact_result_is_attention(exact: tuple[inputs.Inputs, check.Exact]) -> None:
    tensors, reference = exact
    q = tensors.q.double()[:, :, None]
    k, v = (t[0].double().repeat_interleave(4, 1) for t in (tensors.keys, tensors.values))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, :, 0]
    assert torch.allclose(reference.out, wanted, atol=1e-12)


@pytest.mark.parametrize("method", ["multinomial", "stratified", "systematic", "shared"])
def test_sampled_methods_have_the_expected_error(
    exact: tuple[inputs.Inputs, check.Exact], method: str
) -> None:
    tensors, reference = exact
    error = reference.check_sampled(method, lambda s: _sampled(tensors, method, s), method, 16)
    assert 0.1 < error / reference.expected(method, 16) < 2
    mean = torch.stack([_sampled(tensors, method, seed).double() for seed in range(400)]).mean(0)
    of_mean = reference.error(mean) * 400**0.5 / reference.expected(method, 16)
    assert of_mean < 1.2  # a bound, and for multinomial draws the very number
    if method == "multinomial":
        assert of_mean > 0.8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensors, method, seed: 1.5 * _sampled(tensors, method, seed),
        lambda tensors, method, seed: _sampled(tensors, method, seed, scale=0.5),
        lambda tensors, method, seed: _sampled(tensors, method, seed).roll(1, 1),
        lambda tensors, method, seed: _sampled(tensors, method, 0),
        lambda tensors, method, seed: torch.zeros_like(tensors.q),
        lambda tensors, method, seed: _sampled(tensors, method, seed) * float("nan"),
    ],
    ids=["factor", "scale", "heads", "one seed", "zeros", "nan"],
)
@pytest.mark.parametrize("method", ["systematic", "shared"])
def test_wrong_samplers_are_refused(
    exact: tuple[inputs.Inputs, check.Exact], method: str, wrong: Callable[..., torch.Tensor]
) -> None:
    tensors, reference = exact
    with pytest.raises(check.WrongResultError, match="that one, mean of 16 seeds: relative RMS"):
        reference.check_sampled("that one", lambda s: wrong(tensors, method, s), method, 16)


@pytest.fixture(scope="module")
def larger() -> tuple[inputs.Inputs, check.Exact]:
    tensors = inputs.Inputs(Case(1, 32, 8, 128, 2048, "bfloat16", 1), 1)
    return tensors, check.Exact(tensors.q, tensors.keys[0], tensors.values[0], (128,))


@pytest.mark.parametrize("method", ["multinomial", "stratified", "systematic", "shared"])
def test_small_biases_of_samplers_are_refused(
    larger: tuple[inputs.Inputs, check.Exact], method: str
) -> None:
    import santa_torch

    tensors, reference = larger

    def run(seed: int, rows: int = 2048, first: int = 0) -> torch.Tensor:
        q, k, v = tensors.q, *(t[0][:, :, first:rows] for t in (tensors.keys, tensors.values))
        seeds = torch.tensor([seed + 1000 * first])
        out = santa_torch.decode(q, k, v, samples=128, method=method, seed=seeds)
        assert isinstance(out, torch.Tensor)
        return out

    reference.check_sampled("fine", run, method, 128)
    with pytest.raises(check.WrongResultError, match="that one, mean of 16 seeds"):
        reference.check_sampled("that one", lambda seed: 1.1 * run(seed), method, 128)
    for rows, first in ((1946, 0), (2048, 102)):  # 5 % missing at the end, and at the start
        with pytest.raises(check.WrongResultError, match="that one"):
            reference.check_sampled("that one", lambda s: run(s, rows, first), method, 128)  # noqa: B023


def test_unbiased_samplers_pass_over_many_seeds(
    larger: tuple[inputs.Inputs, check.Exact],
) -> None:
    _, reference = larger
    draw = torch.Generator().manual_seed(3)
    size = reference.expected("multinomial", 128) * reference.out.square().mean().sqrt()

    def run(seed: int) -> torch.Tensor:
        noise = torch.randn(reference.out.shape, generator=draw, dtype=torch.float64)
        return (reference.out + size * noise).float()

    for _ in range(300):
        reference.check_sampled("fine", run, "multinomial", 128)


def test_ours_are_held_to_less_than_rivals(exact: tuple[inputs.Inputs, check.Exact]) -> None:
    _, reference = exact
    for dtype, own_error in (
        (torch.bfloat16, 0.006),
        (torch.float16, 0.003),
        (torch.float32, 4e-5),
    ):
        out = (1 + own_error) * reference.out
        with pytest.raises(check.WrongResultError, match="ours"):
            reference.check_exact("ours", out, dtype)
        assert reference.check_peer("theirs", out, dtype)[1] is False


def test_wrong_exact_outputs_are_refused(exact: tuple[inputs.Inputs, check.Exact]) -> None:
    _, reference = exact
    assert reference.check_exact("fine", reference.out.float(), torch.float32) < 1e-6
    for wrong in (1.001 * reference.out, reference.out.roll(1, 1), reference.out * float("nan")):
        with pytest.raises(check.WrongResultError, match="that one"):
            reference.check_exact("that one", wrong, torch.float32)
