"""The parts of the benchmark suite: timing, the quiet machine, inputs, checks and targets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import inputs, machine, own, report, targets, timing
from santa_torch.bench.cases import MIB, Case, default_suite, full_suite
from santa_torch.bench.results import CaseResult, ModelResult, Row
from santa_torch.bench.timing import Ratio, Schedule, Times, Variant, measure, ratio

TINY = Case(1, 8, 2, 16, 256, "float32", 1, samples=(16,))


# --- timing, with a clock of our own


class FakeClock:
    """Advances when a variant of ``variant`` runs, and at no other time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def variant(self, name: str, seconds: Callable[[int], float], **more: Any) -> Variant:
        count = 0

        def run(i: int) -> None:
            nonlocal count
            self.calls.append((name, i))
            self.now += seconds(count)
            count += 1

        return Variant(name, "santa", run, **more)

    def measure(self, variants: list[Variant], schedule: Schedule) -> dict[str, Times]:
        clock, sleep = (lambda: self.now), (lambda seconds: None)
        return measure(variants, schedule, lambda done: None, clock, sleep, lambda: 0.0)


def test_turns_are_counted_without_the_call_that_wakes_the_threads() -> None:
    clock = FakeClock()
    # Calls are numbered through: rounds of four calls, the first of which does not count.
    times = clock.measure([clock.variant("a", lambda n: 1.0 + n)], Schedule(3, 3, 5))["a"]
    assert times.rounds == {0: [6, 7, 8], 1: [10, 11, 12], 2: [14, 15, 16]}
    assert [i for _, i in clock.calls] == [n % 5 for n in range(16)]


def test_all_variants_walk_through_the_same_sets() -> None:
    clock = FakeClock()
    variants = [clock.variant(name, lambda n: 1.0) for name in "abc"]
    clock.measure(variants, Schedule(2, 2, 7))
    assert [i for _, i in clock.calls] == [n % 7 for n in range(len(clock.calls))]


def test_order_is_shuffled_by_the_seed() -> None:
    def order(seed: int) -> list[str]:
        clock = FakeClock()
        variants = [clock.variant(name, lambda n: 1.0) for name in "abcd"]
        clock.measure(variants, Schedule(5, 1, 3, seed))
        return [name for name, _ in clock.calls[::2]]

    first = order(0)
    assert first == order(0) != order(1)
    rounds = [first[n : n + 4] for n in range(0, len(first), 4)]
    assert all(sorted(turn) == list("abcd") for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 2
    assert len({turn[0] for turn in rounds}) > 1


def test_slow_variants_take_part_in_every_third_round() -> None:
    clock = FakeClock()
    variants = [clock.variant("fast", lambda n: 1.0), clock.variant("slow", lambda n: 11.0)]
    variants.append(clock.variant("read", lambda n: 0.01))
    variants[-1].family = "floor"  # with which nobody is compared
    times = clock.measure(variants, Schedule(7, 1, 2))
    assert set(times["fast"].rounds) == set(range(7))
    assert set(times["slow"].rounds) == {0, 3, 6}


def test_short_calls_are_timed_several_at_once() -> None:
    clock = FakeClock()
    times = clock.measure([clock.variant("a", lambda n: 1e-6)], Schedule(1, 1, 2))["a"]
    assert times.seconds == [pytest.approx(1e-6)]
    assert len(clock.calls) == 2 + 2 * 200  # the warm-up sets the pace


def test_a_variant_that_fails_does_not_stop_the_others() -> None:
    clock = FakeClock()

    def fail(n: int) -> float:
        if n == 6:
            raise ValueError("out of luck\nand more")
        return 1.0

    variants = [clock.variant("bad", fail), clock.variant("good", lambda n: 1.0)]
    times = clock.measure(variants, Schedule(4, 2, 2))
    assert times["bad"].error == "ValueError: out of luck"
    assert set(times["bad"].rounds) == {0}
    assert set(times["good"].rounds) == {0, 1, 2, 3}


def test_prepare_and_rest_surround_every_turn_and_are_not_timed() -> None:
    clock, seen = FakeClock(), []

    def enter() -> None:
        clock.now += 100
        seen.append("in")

    def leave() -> None:
        clock.now += 100
        seen.append("out")

    variant = clock.variant("a", lambda n: 1.0, prepare=enter, rest=leave)
    assert clock.measure([variant], Schedule(2, 2, 2))["a"].seconds == [1.0] * 4
    assert seen == ["in", "out"] * 3


def test_interrupts_carry_what_was_measured() -> None:
    clock = FakeClock()

    def stop(n: int) -> float:
        if n == 5:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(timing.Interrupted) as caught:
        clock.measure([clock.variant("a", stop)], Schedule(9, 1, 2))
    assert caught.value.results["a"].rounds == {0: [1.0]}


def test_ratios_use_lower_quartiles_and_redraw_rounds_for_the_spread() -> None:
    above = Times({0: [8.0, 8.0], 1: [6.0, 6.0], 2: [30.0, 30.0], 3: [7.0, 7.0]})
    below = Times({0: [4.0, 4.0], 1: [2.0, 2.0], 2: [5.0, 5.0]})  # sat round 3 out
    assert timing.lower_quartile([4, 1, 3, 2]) == 2
    found = ratio(above, below)
    assert found is not None
    assert found.value == 7.0 / 2.0
    assert 2.0 <= found.low <= found.value <= found.high <= 6.0
    assert found == ratio(above, below)
    one = Times({0: [3.0]})
    assert ratio(one, one) == Ratio(1.0, 1.0, 1.0)
    assert ratio(above, Times()) is None


# --- is the machine quiet?


class FakeProc:
    """A ``/proc`` whose processes use as many cores as they are told while time passes."""

    def __init__(self, folder: Path, own: float = 0.0, others: float = 0.0) -> None:
        self.folder, self.own, self.others = folder, own, others
        self.now, self.ticks, self.own_ticks = 0.0, 0.0, 0.0
        self.quiet_at = float("inf")
        (folder / "self").mkdir()
        self.watch = machine.Watch(folder, lambda: self.now, self.sleep)
        self.write()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        others = self.others if self.now <= self.quiet_at else 0.0
        self.ticks += (self.own + others) * seconds * os.sysconf("SC_CLK_TCK")
        self.own_ticks += self.own * seconds * os.sysconf("SC_CLK_TCK")
        self.write()

    def write(self) -> None:
        """Half of it is stolen time, which the hypervisor gave to somebody else."""
        half = int(self.ticks / 2)
        total = f"cpu  {int(self.ticks) - half} 0 0 99999 7 0 0 {half} 0 0\ncpu0 1 1 1 1\n"
        (self.folder / "stat").write_text(total)
        user = int(self.own_ticks / 2)
        system = int(self.own_ticks) - user
        own = f"7 (a b) c) R 1 1 1 0 -1 0 0 0 0 0 {user} {system} 5 5 20 0 1 0 1"
        (self.folder / "self/stat").write_text(own)


def test_a_quiet_machine_is_not_waited_for(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path, own=2.0)  # we ourselves do not count
    waited, cores = proc.watch.wait(60.0)
    assert waited == proc.watch.pause
    assert cores == pytest.approx(0.0, abs=0.05)


def test_a_busy_machine_is_waited_for(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path, others=1.0)
    proc.quiet_at = 10.0
    waited, cores = proc.watch.wait(60.0)
    assert 10.0 <= waited <= 11.0
    assert cores == pytest.approx(0.0, abs=0.05)


def test_waiting_ends_with_patience_and_the_run_goes_on(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path, own=1.0, others=0.5)
    with proc.watch.over(5.0) as seen:
        proc.sleep(20.0)
    assert 5.0 <= seen.waited <= 6.0
    assert seen.cores == pytest.approx(0.5, abs=0.02)
    assert not seen.quiet
    assert report.disturbed(seen) == ["  not quiet: others used 0.50 cores meanwhile"]
    proc.others = 0.0
    with proc.watch.over(5.0) as seen:
        proc.sleep(20.0)
    assert seen.quiet
    assert report.disturbed(seen) == []


def test_a_system_that_does_not_tell_counts_as_quiet(tmp_path: Path) -> None:
    watch = machine.Watch(tmp_path / "nowhere", sleep=lambda seconds: None)
    with watch.over(5.0) as seen:
        pass
    assert seen.cores is None
    assert seen.quiet


def test_the_facts_are_there() -> None:
    facts = machine.facts()
    assert facts["cpu_level"] in facts["cpu_levels"]
    assert facts["cores"] >= 1
    json.dumps(facts)


# --- sets of K and V


def test_sets_hold_four_times_the_last_level_cache() -> None:
    case = Case(rows=8192)  # 32 MiB
    plan = inputs.plan(case, 300 * MIB, 20 * 2**30)
    assert (plan.sets, plan.total_bytes) == (38, 38 * 32 * MIB)
    assert plan.out_of_cache
    assert "from cache" not in str(plan)
    assert inputs.plan(Case(rows=131072), 300 * MIB, 20 * 2**30).sets == 3
    assert inputs.plan(Case(rows=2**20), 300 * MIB, 20 * 2**30).sets == 2


def test_little_memory_gives_fewer_sets_and_says_so() -> None:
    plan = inputs.plan(Case(rows=8192), 300 * MIB, 512 * MIB, copies=1.0)
    assert 2 <= plan.sets <= (512 - 64) // 64
    assert not plan.out_of_cache
    assert "partly from cache" in str(plan)


def test_what_does_not_fit_is_refused_with_the_bytes_it_needs() -> None:
    with pytest.raises(inputs.DoesNotFitError) as error:
        inputs.plan(Case(rows=2**20), 300 * MIB, 4 * 2**30)
    needed = re.search(r"needs (\d+\.\d+) GiB", str(error.value))
    assert needed is not None
    assert float(needed[1]) > 8
    assert "4.00 GiB each" in str(error.value)
    assert "4.00 GiB may be used" in str(error.value)


def test_k_and_v_of_a_set_are_one_allocation() -> None:
    tensors = inputs.Inputs(TINY, 3)
    for flat, k, v in zip(tensors.flat, tensors.keys, tensors.values, strict=True):
        assert k.shape == v.shape == (1, 2, 256, 16)
        assert torch.equal(flat, torch.cat([k.flatten(), v.flatten()]))
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == flat.data_ptr()
    assert len({flat.data_ptr() for flat in tensors.flat}) == 3
    assert not torch.equal(tensors.flat[0], tensors.flat[1])
    halves, _ = tensors.converted(torch.float16)
    assert torch.equal(halves[2], tensors.keys[2].half())
    assert tensors.converted(torch.float16)[0][2].data_ptr() == halves[2].data_ptr()


@pytest.mark.parametrize("case", dict.fromkeys([*full_suite(2), *default_suite(2), TINY]), ids=str)
def test_no_head_of_any_set_equals_another(case: Case) -> None:
    sets = inputs.MOST_SETS
    starts = inputs.head_starts(case, sets)
    assert len(set(starts)) == len(starts) == sets * 2 * case.batch * case.kv_heads


def test_a_pool_of_a_power_of_two_repeats_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_POOLS", (2**20, 2**24))
    starts = inputs.head_starts(Case(rows=131072), 1)  # its heads have 2**24 elements
    assert len(set(starts)) == 1


def test_heads_start_where_they_are_said_to() -> None:
    case = Case(2, 4, 2, 16, 4096, "float32", 1)
    size = inputs.pool_size(case)
    pool = torch.randn(size, generator=torch.Generator().manual_seed(0))
    heads = [
        head
        for flat in inputs.Inputs(case, 3).flat
        for head in flat.view(-1, case.rows * case.head_dim)
    ]
    for start, head in zip(inputs.head_starts(case, 3), heads, strict=True):
        assert torch.equal(head, pool[(start + torch.arange(len(head))) % size])


# --- targets


def _result(case: Case, ms: dict[str, float], families: dict[str, str] | None = None) -> CaseResult:
    result = CaseResult(case)
    for name, value in ms.items():
        family = (families or {}).get(name) or ("santa" if name.startswith("santa") else "torch")
        family = "floor" if name == own.FLOOR else family
        times = Times({r: [value / 1e3] for r in range(4)})
        result.rows.append(Row(name, family, times))
    return result


def test_targets_are_judged_by_their_worst_case() -> None:
    ms = {own.FLOOR: 4.0, own.DENSE: 5.0, "santa shared S=128": 2.0, "a": 9.0, "b": 8.0}
    long = _result(Case(rows=32768), ms, {"b": "library"})
    longer = _result(Case(rows=131072), {**ms, own.DENSE: 4.2, "b": 6.0})
    found = {verdict.text: verdict for verdict in targets.judge([long, longer])}
    share = found["dense: share of bandwidth, L >= 32k"]
    assert (share.measured, share.met, share.case) == (pytest.approx(0.8), False, str(long.case))
    assert share.missed_by == pytest.approx(1 / 9)
    peer = found["santa shared S=128 against the strongest peer, L >= 32k"]
    assert (peer.measured, peer.met) == (pytest.approx(3.0), False)
    assert peer.case == str(longer.case)
    assert found["santa shared S=128 against own dense, L >= 32k"].met
    assert "dense: share of bandwidth, 8k" not in found
    assert not [text for text in found if "systematic" in text]
    table = report.targets_table(list(found.values()))
    assert re.search(r"share of bandwidth, L >= 32k +>= 90 % +80 % +missed by 11 %", table)
    assert re.search(r"shared S=128 against own dense, L >= 32k +>= 1.80x +2.10x +met", table)


def test_targets_that_are_upper_bounds() -> None:
    tiny = _result(Case(rows=16), {own.DENSE: 0.009})
    found = {verdict.text: verdict for verdict in targets.judge([tiny])}
    overhead = found["overhead of a call, L = 16"]
    assert (overhead.measured, overhead.met) == (pytest.approx(9.0), False)
    assert overhead.missed_by == pytest.approx(1 / 8)
    slow = _result(Case(rows=8192), {own.DENSE: 1.0, "santa dense (avx2)": 1.4})
    found = {verdict.text: verdict for verdict in targets.judge([slow])}
    assert found["santa dense: AVX2 against AVX-512"].met
    both = {own.DENSE: 0.8, "santa dense (avx2)": 1.4, "santa dense (avx512)": 0.9}
    found = {v.text: v for v in targets.judge([_result(Case(rows=8192), both)])}
    assert found["santa dense: AVX2 against AVX-512"].measured == pytest.approx(1.4 / 0.9)


def test_shares_of_other_shapes_are_compared_with_the_standard_one() -> None:
    standard = _result(Case(rows=32768), {own.FLOOR: 9.0, own.DENSE: 10.0})
    other = _result(Case(rows=32768, dtype="float32"), {own.FLOOR: 7.2, own.DENSE: 10.0})
    (verdict,) = [v for v in targets.judge([standard, other]) if "at other shapes" in v.text]
    assert verdict.measured == pytest.approx(0.8)
    assert verdict.case == str(other.case)
    long = _result(Case(rows=131072), {own.FLOOR: 1.0, own.DENSE: 10.0})
    other.case = Case(rows=131072, dtype="float32")
    (verdict,) = [v for v in targets.judge([standard, long, other]) if "at other shapes" in v.text]
    assert verdict.measured == pytest.approx(7.2)  # as many rows first
    assert not [v for v in targets.judge([other]) if "at other shapes" in v.text]


def test_growth_and_scratch() -> None:
    short = _result(Case(rows=8192), {own.FLOOR: 0.5, own.DENSE: 1.0})
    long = _result(Case(rows=2**20), {own.FLOOR: 128.0, own.DENSE: 384.0})  # a slower memory
    long.rows[1].method, long.rows[1].scratch_bytes = "dense", long.case.kv_bytes
    found = {verdict.text: verdict for verdict in targets.judge([short, long])}
    assert (
        found["santa dense: time over reading K and V, at 1M rows over that at 8k"].measured == 1.5
    )
    scratch = found["dense: scratch bytes over (G + 2) / D of the KV bytes"]
    assert scratch.measured == pytest.approx(128 / 6)
    assert own.scratch_bytes(Case(rows=8192), "shared") > 8 * 8192


def test_growth_of_draw_and_gather() -> None:
    name = own.label("shared", 128)
    short = _result(Case(rows=8192), {name: 1.0})
    long = _result(Case(rows=2**20), {name: 120.0})
    text = f"{name}: draw and gather, time per row at 1M rows over that at 8k"
    assert text not in {verdict.text for verdict in targets.judge([short, long])}
    short.rows[0].stages = {"score": 1.0, "draw": 2.0, "gather": 2.0}
    long.rows[0].stages = {"score": 900.0, "draw": 60.0, "gather": 4.0}
    found = {verdict.text: verdict for verdict in targets.judge([short, long])}
    assert found[text].measured == pytest.approx(16 / 128)


def test_models_are_judged_against_the_fastest_short_step() -> None:
    ms = {"santa": 40.0, "sdpa": 160.0, "eager": 80.0, "short-santa": 39.0, "short-sdpa": 32.0}
    times = {key: Times({r: [value / 1e3] for r in range(4)}) for key, value in ms.items()}
    result = ModelResult("SmolLM2", judged=True, labels={key: key for key in ms}, times=times)
    verdicts = {verdict.text: verdict for verdict in targets.judge_model(result)}
    short = verdicts["ms per token against a 64-token context"]
    assert (short.measured, short.met) == (pytest.approx(1.25), False)
    assert verdicts["HF SDPA against ours"].met
    assert verdicts["HF eager against ours"].missed_by == pytest.approx(0.2 / 2.2)
    result.judged = False
    assert targets.judge_model(result) == []
