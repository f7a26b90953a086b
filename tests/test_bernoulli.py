"""Stochastic queries and steps that score with them: bits, odd heads, statistics, graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import DTYPES, METHODS, Case
from compare import (
    OPS,
    assert_equal,
    assert_same,
    assert_within,
    output_tolerance,
    reference_weights,
)

import santa_torch
from santa_torch import BernoulliConfig, KeySketch, reference

FORMS = (True, False)
WHERE = torch.tensor([1])


def query(q: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return santa_torch.bernoulli_query(q, **{"seed": 5, "position": 9, **arguments})


# ---- the query -----------------------------------------------------------------------------------

SHAPES = [
    Case(),
    Case(batch=1, kv_heads=1, group=1, head_dim=1),
    Case(kv_heads=3, group=1, head_dim=5),
    Case(batch=3, kv_heads=1, group=4, head_dim=80, peak=0.01),
    Case(group=5, head_dim=128, peak=300.0),
    Case(batch=1, group=71, kv_heads=1, head_dim=33),
    Case(batch=1, head_dim=257, group=2),
]


@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_query_has_the_bits_of_the_reference(
    level: str, case: Case, dtype: torch.dtype, shared: bool
) -> None:
    q = case.but(dtype=dtype).inputs().q
    seeds = torch.arange(case.batch) * 2**40 - 3
    for draws in (1, 4, 7) if case.group < 9 else (3,):
        arguments = {
            "draws": draws,
            "shared": shared,
            "kv_heads": case.kv_heads,
            "seed": seeds,
            "position": torch.tensor([2**33 + 17]),
            "layer": 2**24 - 1,
            "head_offset": 77,
        }
        got = santa_torch.bernoulli_query(q, **arguments)
        assert_equal("query", got, reference.bernoulli_query(q, **arguments))
        assert got.is_contiguous()


@pytest.mark.parametrize("shared", FORMS)
def test_query_depends_on_where_it_is_drawn_and_on_nothing_else(backend: str, shared: bool) -> None:
    q = Case(batch=4, kv_heads=2, group=2).inputs().q
    common = {"draws": 2, "shared": shared, "kv_heads": 2}
    whole = query(q, **common)
    for b in range(4):
        assert_equal("one sequence", query(q[b : b + 1].clone(), **common), whole[b : b + 1])
    part = query(q[:, 2:].clone(), **{**common, "kv_heads": 1, "head_offset": 2})
    assert_equal("heads of another rank", part, whole[:, 2:])
    wide = q.new_full((4, 5, 70), math.nan)[:, :4, 3:67]
    assert_equal("other strides", query(wide.copy_(q), **common), whole)
    for change in ({"seed": 6}, {"position": 10}, {"layer": 1}, {"head_offset": 4}):
        assert not torch.equal(query(q, **common, **change), whole), change


@pytest.mark.parametrize("threads", [1, 2])
def test_query_does_not_depend_on_threads(threads: int) -> None:
    q = Case(batch=8, kv_heads=8, group=4, head_dim=128).inputs().q
    torch.set_num_threads(1)
    expected = query(q, draws=8, shared=False, kv_heads=8)
    torch.set_num_threads(threads)
    assert_equal("query", query(q, draws=8, shared=False, kv_heads=8), expected)


def test_draws_of_a_head_are_stratified(backend: str) -> None:
    """Of n draws floor(n p) or one more take a feature of chance p, and both happen."""
    q = Case(batch=1, kv_heads=1, group=3).inputs().q
    largest = q.abs().amax(-1, keepdim=True)
    for draws in (1, 2, 5, 64):
        counts = (query(q, draws=draws, shared=False, kv_heads=1) * draws / largest).abs().double()
        assert_within("counts", counts, counts.round(), 1e-5 * counts + 1e-9)
        expected = draws * (q.abs() / largest).double()
        more = counts.round() - (expected + 1e-9).floor()
        assert ((more == 0) | (more == 1)).all()
        assert 0 < more.sum() < more.numel()


def test_the_largest_feature_is_always_drawn(backend: str) -> None:
    q = Case(batch=2, kv_heads=2, group=3).inputs().q
    got = query(q, draws=3, shared=False, kv_heads=2)
    largest = q.abs().argmax(-1, keepdim=True)
    assert_equal("largest of a head", got.gather(-1, largest), q.gather(-1, largest))
    size = q.view(2, 2, 3, 64).norm(dim=2)
    got = query(q, draws=1, kv_heads=2).view(2, 2, 3, 64)
    at = size.argmax(-1)[..., None, None].expand(2, 2, 3, 1)
    assert_equal("largest of a group", got.gather(-1, at), q.view(2, 2, 3, 64).gather(-1, at))


@pytest.mark.parametrize("shared", FORMS)
def test_degenerate_heads(level: str, shared: bool) -> None:
    q = Case(batch=1, kv_heads=1, group=5).inputs().q
    common = {"draws": 2, "shared": shared, "kv_heads": 1}
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = q.clone()
        spoilt[0, 3, 17] = bad
        got = query(spoilt, **common)
        assert got[0, 3].isnan().all()
        rest = spoilt.clone()
        rest[0, 3] = 0
        expected = query(rest, **common)
        assert not expected.isnan().any()
        assert_equal("others", got[0, [0, 1, 2, 4]], expected[0, [0, 1, 2, 4]])
    zeros = query(torch.zeros_like(q), **common)
    assert not zeros.any()
    tiny = query(q * 1e-42, **common)  # subnormal
    assert tiny.isfinite().all()
    assert tiny.any()
    huge = (q / q.abs().max()).double() * torch.finfo(torch.float32).max
    assert query(huge.float(), draws=1, kv_heads=1, shared=False).isfinite().all()


# ---- steps ---------------------------------------------------------------------------------------


def sketch_of(case: Case, k: torch.Tensor, rows: int | None = None) -> KeySketch:
    lengths = None if rows is None else torch.full((case.batch,), rows)
    return KeySketch(k, seq_lens=lengths)


STEPS = [
    Case(),
    Case(batch=1, kv_heads=1, group=1, rows=64, head_dim=8),
    Case(rows=700, head_dim=80, dtype=torch.bfloat16, seq_lens=(0, 517)),
    Case(rows=500, dtype=torch.float16, mask="heads", group=2),
    Case(rows=500, mask="sparse", group=4, head_dim=33, softcap=20.0),
    Case(rows=300, mask="additive_heads", sinks="float32", layout="interleaved"),
    Case(batch=1, rows=129, group=7, layout="offset", value_dim=24, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_step_against_the_reference(level: str, case: Case, method: str, shared: bool) -> None:
    inputs = case.inputs()
    sketch = sketch_of(case, inputs.k)
    arguments = {
        **inputs.arguments(),
        "method": method,
        "samples": 12,
        "seed": 3,
        "layer": 5,
        "sketch": sketch,
        "bernoulli": BernoulliConfig(draws=2, shared=shared),
        "return_lse": True,
        "return_stats": True,
    }
    got = santa_torch.decode(**arguments)
    assert isinstance(got, santa_torch.DecodeOutput)
    where = {"position": last_attended(case, inputs), "seed": 3, "layer": 5}
    q = reference.bernoulli_query(inputs.q, draws=2, shared=shared, kv_heads=case.kv_heads, **where)
    scores, maxima = OPS.score(
        q, inputs.k, **inputs.scoring(), key_blocks=sketch.blocks, block_rows=sketch.rows
    )
    with reference_weights(OPS.weigh(scores, maxima)):
        exact = reference.decode(**arguments)
    size = santa_torch.decode(**{**arguments, "v": inputs.v.abs()}).out.double().nan_to_num()
    # fp32 scores of a noisier query: their rounding is what the dense weights carry
    noise = 2.0**-20 * (1 + scores[scores.isfinite()].abs().max()) if scores.isfinite().any() else 0
    bound = output_tolerance(
        exact.out, size, case.dtype, float(noise) if method == "dense" else 0.0
    )
    assert_within("out", got.out, exact.out, bound)
    assert_within("lse", got.lse, exact.lse, 2.0**-18 * (1 + exact.lse.abs().nan_to_num(0, 0, 0)))
    for name in ("key_rows", "key_features", "value_rows", "bytes_read", "bytes_total"):
        assert_equal(name, getattr(got.stats, name), getattr(exact.stats, name))


def last_attended(case: Case, inputs: Any) -> torch.Tensor:
    attends, _ = reference.attended(inputs.q, case.rows, inputs.mask, inputs.seq_lens)
    places = torch.where(attends.any(1), torch.arange(1, case.rows + 1), 0)
    return places.amax(-1)


@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_stages_compose_to_the_step(level: str, method: str, shared: bool) -> None:
    """bernoulli_query, then score with it: the scores that decode has, at every method."""
    case = Case(rows=400, dtype=torch.bfloat16)
    inputs = case.inputs()
    sketch = sketch_of(case, inputs.k)
    config = BernoulliConfig(draws=4, shared=shared)
    common = {"seed": torch.tensor([7]), "position": torch.tensor([400])}
    q = santa_torch.bernoulli_query(inputs.q, draws=4, shared=shared, kv_heads=2, **common)
    scores, maxima = santa_torch.score(q, inputs.k, sketch=sketch, sparse_query=True)
    got = santa_torch.decode(
        inputs.q,
        inputs.k,
        inputs.v,
        method=method,
        samples=9,
        sketch=sketch,
        bernoulli=config,
        return_lse=True,
        **common,
    )
    if method == "dense":
        assert_within("lse", got.lse, scores.double().logsumexp(-1), torch.full((2, 6), 1e-4))
        return
    weights = santa_torch.weigh(scores, maxima)
    lse = maxima.double() + (weights.sum(-1).double() / 2**30).log()
    assert_equal("lse", got.lse, lse.float())
    drawn = santa_torch.draw(weights, samples=9, method=method, kv_heads=2, **common)
    stats = santa_torch.decode(
        inputs.q,
        inputs.k,
        inputs.v,
        method=method,
        samples=9,
        sketch=sketch,
        bernoulli=config,
        return_stats=True,
        **common,
    ).stats
    if method == "shared":
        assert_equal("rows", stats.value_rows, drawn[2].long())


@pytest.mark.parametrize("shared", FORMS)
def test_result_does_not_depend_on_what_is_packed(level: str, shared: bool) -> None:
    """The noise of a query is the same for every row, whether it is scored from k or not."""
    case = Case(rows=400, group=4, dtype=torch.bfloat16)
    inputs = case.inputs()
    config = BernoulliConfig(draws=2, shared=shared)
    for method in METHODS:
        common = {**inputs.arguments(), "method": method, "samples": 20, "bernoulli": config}
        results = [
            santa_torch.decode(**common, sketch=sketch, return_lse=True)
            for sketch in (None, *(sketch_of(case, inputs.k, rows) for rows in (0, 63, 128, 400)))
        ]
        for other in results[1:]:
            assert_same(other, results[0])


@pytest.mark.parametrize("method", METHODS)
def test_features_that_are_not_used_are_not_read(level: str, method: str) -> None:
    """NaN in their place is never noticed, and the bytes that are counted leave them out."""
    case = Case(batch=1, kv_heads=2, group=3, rows=320, dtype=torch.bfloat16)
    inputs = case.inputs()
    sketch = sketch_of(case, inputs.k)
    common = {
        **inputs.arguments(),
        "method": method,
        "samples": 16,
        "bernoulli": BernoulliConfig(draws=1),
        "position": 320,
        "return_lse": True,
        "return_stats": True,
    }
    expected = santa_torch.decode(**common, sketch=sketch)
    q = santa_torch.bernoulli_query(inputs.q, draws=1, kv_heads=2, position=320)
    used = (q != 0).view(1, 2, 3, 64).any(2)
    assert_equal("features", expected.stats.key_features, used.sum(-1))
    assert (used.sum(-1) < 60).all()
    sketch.blocks.masked_fill_(~used[:, :, None, :, None], math.nan)
    assert_same(santa_torch.decode(**common, sketch=sketch), expected)
    keys = used.sum(-1) * 320 * 2
    assert_equal("bytes", expected.stats.bytes_read, keys + expected.stats.value_rows * 64 * 2)
    sketch.blocks[0, 1, :, used[0, 1].nonzero()[0]] = math.nan
    noticed = santa_torch.decode(**common, sketch=sketch)
    assert noticed.out[:, 3:].isnan().all()
    assert not noticed.out[:, :3].isnan().any()


@pytest.mark.parametrize("method", METHODS)
def test_nan_head_leaves_the_others_alone(level: str, method: str) -> None:
    inputs = Case(rows=200).inputs()
    sketch = KeySketch(inputs.k)
    for shared in FORMS:
        common = {
            "method": method,
            "samples": 8,
            "bernoulli": BernoulliConfig(2, shared),
            "sketch": sketch,
            "return_stats": True,
        }
        spoilt, without = inputs.q.clone(), inputs.q.clone()
        spoilt[1, 4, 3] = math.inf
        without[1, 4] = math.nan
        got = santa_torch.decode(spoilt, inputs.k, inputs.v, **common)
        expected = santa_torch.decode(without, inputs.k, inputs.v, **common)
        assert got.out[1, 4].isnan().all()
        assert got.out.isnan().sum() == 64
        assert_same(got._replace(lse=got.out), expected._replace(lse=expected.out))
        assert (got.stats.key_features <= 64).all()
        alone = santa_torch.decode(
            torch.full_like(inputs.q, math.nan), inputs.k, inputs.v, **common
        )
        assert alone.out.isnan().all()
        assert (alone.stats.key_features == 1).all()


def test_zero_query_attends_evenly(backend: str) -> None:
    inputs = Case(rows=130).inputs()
    common = {"method": "dense", "sketch": KeySketch(inputs.k), "return_stats": True}
    got = santa_torch.decode(
        torch.zeros_like(inputs.q), inputs.k, inputs.v, bernoulli=BernoulliConfig(), **common
    )
    exact = inputs.v.double().mean(2).repeat_interleave(3, 1)
    assert_within("out", got.out, exact, torch.full_like(exact, 1e-6))
    assert (got.stats.key_features == 1).all()


# ---- errors and graphs ---------------------------------------------------------------------------


def test_config_is_checked() -> None:
    inputs = Case().inputs()
    for wrong in (4, True, {"draws": 4}, "shared"):
        with pytest.raises(ValueError, match="bernoulli"):
            santa_torch.decode(*inputs[:3], samples=4, bernoulli=wrong)  # type: ignore[arg-type]


BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"draws": 0}, ("draws", "1024", "0")),
    ({"draws": -1}, ("draws", "-1")),
    ({"draws": 1025}, ("draws", "1025")),
    ({"kv_heads": 4}, ("kv_heads", "4")),
    ({"kv_heads": 0}, ("kv_heads", "0")),
    ({"layer": -1}, ("layer", "-1")),
    ({"layer": 2**24}, ("layer", "16777216")),
    ({"head_offset": -1}, ("head_offset", "-1")),
    ({"seed": torch.tensor([1, 2, 3])}, ("seed", "[3]")),
    ({"position": torch.tensor([1.0])}, ("position", "float32")),
    ({"q": torch.zeros(6, 64)}, ("q", "[6, 64]")),
    ({"q": torch.zeros(2, 6, 64).double()}, ("q", "float64")),
    ({"q": torch.zeros(2, 6, 0)}, ("q", "[2, 6, 0]")),
    ({"q": torch.zeros(2, 6, 128)[..., ::2]}, ("q", "stride 2")),
]


@pytest.mark.parametrize("raw", [False, True], ids=["santa_torch", "torch.ops.santa"])
@pytest.mark.parametrize(("change", "words"), BAD, ids=[next(iter(c)) for c, _ in BAD])
def test_rule16_bad_argument(
    backend: str, raw: bool, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    call = OPS.bernoulli_query if raw else santa_torch.bernoulli_query
    good = {"q": Case().inputs().q, "draws": 2, "kv_heads": 2, "seed": WHERE, "position": WHERE}
    call(**good)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call(**{**good, **change})
    for word in words:
        assert word in str(caught.value)


def test_rule16_flags() -> None:
    inputs = Case().inputs()
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match="shared must be True or False"):
            query(inputs.q, draws=1, kv_heads=2, shared=wrong)
        with pytest.raises(ValueError, match="sparse_query must be True or False"):
            santa_torch.score(inputs.q, inputs.k, sparse_query=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("draws", [-1, 1025, 2**40])
def test_rule16_draws_of_the_operator(backend: str, draws: int) -> None:
    inputs = Case().inputs()
    with pytest.raises((ValueError, RuntimeError), match=rf"bernoulli_draws.*{draws}"):
        OPS.decode(*inputs[:3], samples=4, seed=WHERE, bernoulli_draws=draws)


@pytest.mark.parametrize("shared", FORMS)
def test_rule32_opcheck(backend: str, shared: bool) -> None:
    inputs = Case(rows=150, dtype=torch.bfloat16).inputs()
    where = {"seed": WHERE, "position": WHERE}
    given = {"draws": 3, "shared": shared, "kv_heads": 2, **where}
    torch.library.opcheck(OPS.bernoulli_query.default, (inputs.q,), given)
    sketch = KeySketch(inputs.k)
    blocks = {"key_blocks": sketch.blocks, "block_rows": sketch.rows}
    more = {"bernoulli_draws": 3, "bernoulli_shared": shared, "return_stats": True, **blocks}
    torch.library.opcheck(OPS.decode.default, inputs[:3], {"samples": 4, **where, **more})
    scoring = {**blocks, "sparse_query": True}
    torch.library.opcheck(OPS.score.default, (inputs.q.float(), inputs.k), scoring)


def test_rule33_compiled_step_has_the_bits_of_the_eager_one() -> None:
    inputs = Case(rows=200).inputs()
    sketch = KeySketch(inputs.k)
    config = BernoulliConfig(draws=2)

    def step(q: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        out = santa_torch.decode(
            q, inputs.k, inputs.v, samples=8, sketch=sketch, bernoulli=config, seed=seed
        )
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for seed in (torch.tensor([1]), torch.tensor([2])):
        assert_equal("out", compiled(inputs.q, seed), step(inputs.q, seed))
