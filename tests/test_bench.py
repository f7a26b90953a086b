"""The benchmark suite: options, timing, what it refuses, and what it writes. Asserts no time."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from santa_torch.bench import check, inputs, machine, main, operators, own, report, targets, timing
from santa_torch.bench.cases import MIB, Case, full_suite
from santa_torch.bench.options import PEERS, parse
from santa_torch.bench.peers import PEERS as BUILT_PEERS
from santa_torch.bench.peers import ggml
from santa_torch.bench.results import CaseResult, ModelResult, Row
from santa_torch.bench.timing import Ratio, Schedule, Times, Variant, measure, ratio

TINY = Case(1, 8, 2, 16, 256, "float32", 1, samples=(16,))
ARGUMENTS = "--rows 64 256 --heads 8/2 --head-dim 16 --threads 1 --rounds 3 --wait 0".split()  # noqa: SIM905


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [*ARGUMENTS, "--samples", "16", "--out", str(tmp_path / "out")]


# --- the command line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rows 0", "argument --rows: must be a positive integer, got '0'"),
        ("--rows x", "argument --rows: must be a positive integer, got 'x'"),
        ("--heads 32", "argument --heads: must be query heads/KV heads, as 32/8, got '32'"),
        ("--heads 9/2", "argument --heads: 9 query heads are no multiple of 2"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--methods topk", "argument --methods: invalid choice: 'topk'"),
        ("--samples 99999999", "argument --samples: must be between 1 and 16777216, got"),
        ("--peers numpy", "argument --peers: invalid choice: 'numpy'"),
        ("--wait -1", "argument --wait: must be seconds, 0 or more, got '-1'"),
        ("--wait inf", "argument --wait: must be seconds, 0 or more, got 'inf'"),
        ("--memory none", "argument --memory: must be more than 0 GiB, got 'none'"),
        ("--quick --full", "argument --full: not allowed with argument --quick"),
        ("--full --rows 16", "argument --full: lists its own shapes"),
        ("--model gpt2", "argument --model: invalid choice: 'gpt2'"),
        ("--model smollm2 --rows 16", "argument --model: shapes are the model's"),
        ("--context 16", "argument --context: is for --model"),
        (f"--out {__file__}", "is not a directory"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_options_are_one_line(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(given.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.startswith("bench: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--out /proc/nowhere", "argument --out: '/proc/nowhere'"),
        ("--levels generic", "'generic' is not one of this processor's"),
        ("--model llama-layers --memory 0.01", "rows need about"),
    ],
)
def test_what_is_not_there_is_one_line(
    given: str,
    message: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = machine.facts()
    monkeypatch.setattr(machine, "facts", lambda: {**facts, "cpu_levels": [facts["cpu_level"]]})
    given_arguments = given.split()
    if "--model" not in given_arguments:
        given_arguments = arguments + given_arguments
    elif "--out" not in given_arguments:
        given_arguments += arguments[-2:]
    assert main(given_arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench: error: ")
    assert message in error


def test_axes_given_by_hand_are_multiplied() -> None:
    given = "--rows 16 32 --batch 1 2 --dtype float32 --methods shared --threads 1"
    options = parse(given.split())
    assert [(case.rows, case.batch) for case in options.cases] == [
        (16, 1),
        (32, 1),
        (16, 2),
        (32, 2),
    ]
    assert {case.dtype for case in options.cases} == {"float32"}
    assert {case.methods for case in options.cases} == {("dense", "shared")}
    assert {(case.heads, case.kv_heads) for case in options.cases} == {(32, 8)}


def test_suites() -> None:
    default, quick, full = (
        parse([*flags, "--threads", "2"]) for flags in ([], ["--quick"], ["--full"])
    )
    assert {(case.batch, case.rows) for case in default.cases} == {
        (1, 8192), (4, 8192), (1, 32768), (1, 131072),
    }  # fmt: skip
    assert set(default.peers) == set(PEERS) == set(quick.peers) | {"compiled", "flex"}
    assert len(full.cases) == len(set(full.cases)) == 20
    assert set(full_suite(2)) == set(full.cases)
    assert parse(["--peers", "none"]).peers == ()


def test_every_target_has_a_case_in_the_full_suite() -> None:
    for target in targets.TARGETS:
        assert any(target.where(case) for case in full_suite(2)), target.text


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, types\n"
        "sys.modules['santa_torch'] = package = types.ModuleType('santa_torch')\n"
        f"package.__path__ = [{str(Path(timing.__file__).parent.parent)!r}]\n"
        "from santa_torch.bench.options import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    for option in ("rows", "heads", "peers", "model", "quick", "full", "wait", "out"):
        assert f"--{option}" in done.stdout


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
        return measure(variants, schedule, lambda done: None, clock, sleep)


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


def test_ratios_use_lower_quartiles_and_pair_rounds_for_the_spread() -> None:
    above = Times({0: [8.0, 8.0], 1: [6.0, 6.0], 2: [30.0, 30.0], 3: [7.0, 7.0]})
    below = Times({0: [4.0, 4.0], 1: [2.0, 2.0], 2: [5.0, 5.0]})  # sat round 3 out
    assert timing.lower_quartile([4, 1, 3, 2]) == 2
    found = ratio(above, below)
    assert found == Ratio(7.0 / 2.0, 2.5, 4.5)  # pairs: 2, 3, 6
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
        own = f"7 (a b) c) R 1 1 1 0 -1 0 0 0 0 0 {int(self.own_ticks)} 0 5 5 20 0 1 0 1"
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


def test_a_case_that_does_not_fit_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--rows", "100000", "--memory", "0.1", "--peers", "none", "--wait", "0"]
    assert main([*given, "--out", str(tmp_path)]) == 0
    assert "skipped: needs" in capsys.readouterr().out
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert "of memory for two sets" in case["skipped"]
    assert case["variants"] == []


def test_peers_that_need_too_much_are_left_out_first(tmp_path: Path) -> None:
    given = ["--rows", "8192", "--memory", "0.16", "--peers", "grouped", "sdpa-repeated"]
    options = ["--wait", "0", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    assert main(given + options) == 0
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    notes = {row["name"]: row for row in case["variants"]}
    assert "more memory" in notes["SDPA, KV repeated"]["note"]
    assert notes["grouped matmul"]["ms"] is not None


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


# --- outputs against float64


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


def test_wrong_exact_outputs_are_refused(exact: tuple[inputs.Inputs, check.Exact]) -> None:
    _, reference = exact
    assert reference.check_exact("fine", reference.out.float(), torch.float32) < 1e-6
    for wrong in (1.001 * reference.out, reference.out.roll(1, 1), reference.out * float("nan")):
        with pytest.raises(check.WrongResultError, match="that one"):
            reference.check_exact("that one", wrong, torch.float32)


def test_a_planted_wrong_method_stops_the_run_by_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import santa_torch

    honest = santa_torch.decode

    def wrong(*tensors: Any, method: str, **more: Any) -> Any:
        out: Any = honest(*tensors, method=method, **more)
        return 1.5 * out if method == "shared" else out

    monkeypatch.setattr(own.santa_torch, "decode", wrong)
    assert main([*arguments, "--peers", "none"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bench: error: wrong result: santa shared S=16, mean of 16 seeds")


def test_a_planted_wrong_peer_is_reported_and_the_run_goes_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(peer: Any, case: Case, tensors: inputs.Inputs) -> Any:
        built = BUILT_PEERS["grouped"].build(peer, case, tensors)
        good = built.out
        built.out = lambda i: 1.5 * good(i)
        return built

    planted = type(BUILT_PEERS["grouped"])("grouped", "SDPA, wrong", "torch", wrong)
    monkeypatch.setitem(BUILT_PEERS, "sdpa-folded", planted)
    assert main([*arguments, "--peers", "grouped", "sdpa-folded"]) == 0
    for case in json.loads(Path(arguments[-1], "results.json").read_text())["cases"]:
        rows = {row["name"]: row for row in case["variants"]}
        assert rows["SDPA, wrong"]["ms"] is None
        assert "failed: WrongResultError: SDPA, wrong" in rows["SDPA, wrong"]["note"]
        assert case["strongest_peer"] == "grouped matmul"


# --- peers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=pytest.mark.long if BUILT_PEERS[key].compiled else ())
        for key in PEERS
    ],
)
def test_peers_attend(key: str, dtype: str, one_thread: None) -> None:
    case = Case(2, 6, 2, 32, 96, dtype, 1)
    tensors, peer = inputs.Inputs(case, 3), BUILT_PEERS[key]
    try:
        built = peer.build(peer, case, tensors)
    except Exception as error:
        if type(error).__name__ != "AbsentError":
            raise
        pytest.skip(str(error))
    try:
        built.variant.prepare()
        for i in (2, 0):
            exact = check.Exact(tensors.q, tensors.keys[i], tensors.values[i])
            exact.check_exact(peer.label, built.out(i), built.dtype)
        built.variant.run(1)
        built.variant.rest()
    finally:
        built.close()
    assert built.dtype == getattr(torch, peer.dtype(dtype))


@pytest.mark.parametrize(
    ("key", "modules"),
    [
        ("onnxruntime", ["onnxruntime"]),
        ("onnxruntime", ["onnx"]),
        ("openvino", ["openvino"]),
        ("llama.cpp", []),
    ],
)
def test_absent_peers_are_listed_with_the_reason(
    key: str,
    modules: list[str],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(ggml, "PACKAGES", (("no_such_package", "lib"),))
    ggml._libraries.cache_clear()
    assert main([*arguments, "--peers", key]) == 0
    ggml._libraries.cache_clear()
    label = BUILT_PEERS[key].label
    assert re.search(rf"{re.escape(label)} +- +absent: .*pip install", capsys.readouterr().out)
    document = json.loads(Path(arguments[-1], "results.json").read_text())
    for case in document["cases"]:
        (row,) = [row for row in case["variants"] if row["name"] == label]
        assert row["ms"] is None
        assert row["note"].startswith("absent: ")
        assert case["strongest_peer"] is None


# --- what a run writes


def test_results(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*arguments, "--methods", "systematic", "shared", "--samples", "8", "64"]
    assert main([*given, "--peers", "grouped", "sdpa-folded"]) == 0
    out = Path(arguments[-1])
    document = json.loads((out / "results.json").read_text())
    assert [case["case"]["rows"] for case in document["cases"]] == [64, 256]
    names = ["read K and V once", "santa dense"]
    names += [f"santa {method} S={s}" for method in ("systematic", "shared") for s in (8, 64)]
    small = ["santa dense, bare operator"]
    for case in document["cases"]:
        rows = {row["name"]: row for row in case["variants"]}
        assert list(rows) == names + small + ["grouped matmul", "SDPA, group folded"]
        seconds = {n: [s for r in row["seconds"].values() for s in r] for n, row in rows.items()}
        for name, row in rows.items():
            assert set(row["seconds"]) == {"0", "1", "2"}
            assert row["ms"] == pytest.approx(1e3 * timing.lower_quartile(seconds[name]))
            dense = rows["santa dense"]["ms"] / row["ms"]
            assert row["speed_up"]["value"] == pytest.approx(dense)
            floor = rows["read K and V once"]["ms"] / row["ms"]
            assert row["over_floor"]["value"] == pytest.approx(floor)
        peers = [rows[name] for name in ("grouped matmul", "SDPA, group folded")]
        assert case["strongest_peer"] == min(peers, key=lambda row: row["ms"])["name"]
        assert rows["santa shared S=8"]["relative_rms_error"] > 0.01
        assert rows["santa dense"]["relative_rms_error"] < 0.03
        assert case["rotated_bytes"] % case["kv_bytes"] == 0

    lines = list(csv.DictReader(io.StringIO((out / "results.csv").read_text())))
    flat = [(case, row) for case in document["cases"] for row in case["variants"]]
    assert len(lines) == len(flat)
    for line, (case, row) in zip(lines, flat, strict=True):
        assert (line["name"], int(line["rows"])) == (row["name"], case["case"]["rows"])
        assert float(line["ms"]) == row["ms"]
        assert float(line["over_floor"]) == row["over_floor"]["value"]

    shown = capsys.readouterr()
    saved = (out / "table.txt").read_text()
    for line in saved.splitlines():
        assert line in shown.out
    assert saved.count("strongest peer: ") == 2
    markdown = (out / "table.md").read_text()
    assert markdown.count("| santa shared S=64 |") == 2
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "bench.svg").read_text()
    for text in ("rows of the KV cache", "samples S", "share of the read bandwidth"):
        assert text in svg
    assert sorted(path.name for path in out.iterdir()) == [
        "bench.png", "bench.svg", "results.csv", "results.json", "table.md", "table.txt",
    ]  # fmt: skip
    assert "\r" not in shown.out + shown.err


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "santa_torch", "bench", *ARGUMENTS, "--peers", "grouped"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "strongest peer: grouped matmul" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["suite"] == "by hand"


def test_interrupted_runs_leave_what_they_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = operators.measure

    def stop(variants: list[Variant], schedule: Schedule, *more: Any) -> Any:
        if variants[0].name == own.FLOOR and schedule.sets and seen:
            good, count = variants[1].run, 0

            def later(i: int) -> Any:
                nonlocal count
                count += 1
                if count > 9:
                    raise KeyboardInterrupt
                return good(i)

            variants = [variants[0], Variant("santa dense", "santa", later)]
        seen.append(schedule)
        return honest(variants, schedule, *more)

    seen: list[Schedule] = []
    monkeypatch.setattr(operators, "measure", stop)
    monkeypatch.setattr(timing, "RESOLUTION", 0.0)
    assert main([*arguments, "--peers", "none"]) == 130
    assert "interrupted" in capsys.readouterr().err
    first, second = json.loads(Path(arguments[-1], "results.json").read_text())["cases"]
    assert all(len(row["seconds"]) == 3 for row in first["variants"])
    dense = next(row for row in second["variants"] if row["name"] == "santa dense")
    assert len(dense["seconds"]) == 1


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")

    def fail(path: Path) -> bool:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        report.write(tmp_path, {"a.txt": fail})
    assert report.write(tmp_path, {"b.png": lambda path: False}) == []
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_without_matplotlib_there_are_no_plots(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*arguments, "--peers", "none"]) == 0
    assert "no plots, matplotlib is not installed" in capsys.readouterr().err
    assert not Path(arguments[-1], "bench.png").exists()
    assert Path(arguments[-1], "results.json").exists()


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


def test_shares_of_other_shapes_are_compared_with_the_standard_one() -> None:
    standard = _result(Case(rows=32768), {own.FLOOR: 9.0, own.DENSE: 10.0})
    other = _result(Case(rows=32768, dtype="float32"), {own.FLOOR: 7.2, own.DENSE: 10.0})
    (verdict,) = [v for v in targets.judge([standard, other]) if "at other shapes" in v.text]
    assert verdict.measured == pytest.approx(0.8)
    assert verdict.case == str(other.case)
    assert not [v for v in targets.judge([other]) if "at other shapes" in v.text]


def test_growth_and_scratch() -> None:
    short = _result(Case(rows=8192), {own.DENSE: 1.0})
    long = _result(Case(rows=2**20), {own.DENSE: 192.0})
    long.rows[0].method, long.rows[0].scratch_bytes = "dense", long.case.kv_bytes
    found = {verdict.text: verdict for verdict in targets.judge([short, long])}
    assert found["santa dense: time per row at 1M rows over that at 8k"].measured == 1.5
    scratch = found["dense: scratch bytes over (G + 2) / D of the KV bytes"]
    assert scratch.measured == pytest.approx(128 / 6)
    assert own.scratch_bytes(Case(rows=8192), "shared") > 8 * 8192


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


# --- models


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A tiny Llama in place of the packaged model, and the bench that was made of it."""
    from tiny_models import tiny_llama, tokens

    from santa_torch.bench import model, steps

    llama = tiny_llama()

    def load(context: int, options: Any) -> model.Loaded:
        def fill(cache: Any, rows: int) -> None:
            steps.prefill(llama, tokens(1, rows), cache, lambda done: None)

        return model.Loaded(llama, "a tiny one", fill, ("a note",), True)

    made: list[Any] = []
    honest = model._Bench

    def bench(*given: Any) -> Any:
        made.append(honest(*given))
        return made[0]

    monkeypatch.setitem(model._LOADERS, "smollm2", load)
    monkeypatch.setattr(model, "_Bench", bench)
    return made


MODEL = "--model smollm2 --context 100 --samples 8 --threads 1 --rounds 2 --wait 0".split()  # noqa: SIM905


def test_model_steps(
    tiny_model: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, "--out", str(tmp_path)]) == 0
    (model,) = json.loads((tmp_path / "results.json").read_text())["models"]
    keys = ["santa", "dense", "sdpa", "eager", "short-santa", "short-sdpa"]
    assert [row["key"] for row in model["contenders"]] == keys
    rows = {row["key"]: row for row in model["contenders"]}
    wanted = rows["sdpa"]["ms"] / rows["santa"]["ms"]
    assert rows["sdpa"]["over_ours"]["value"] == pytest.approx(wanted)
    lengths = {key: cache.get_seq_length() for key, cache in tiny_model[0]._caches.items()}
    assert lengths == {key: 64 if key.startswith("short") else 100 for key in keys}
    out = capsys.readouterr().out
    assert "a tiny one, bfloat16, 100 rows, S = 8, 1 threads" in out
    assert "a note" in out
    assert (tmp_path / "results.csv").read_text().count(",model,") == 6


def test_a_planted_wrong_attention_of_a_model_is_refused(
    tiny_model: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from spies import operator_calls  # noqa: F401  the operator may be replaced for a while

    honest = torch.ops.santa.decode

    def wrong(q: Any, k: Any, v: Any, **more: Any) -> Any:
        return honest(q, k, v.flip(2), **more)

    monkeypatch.setattr(torch.ops.santa, "decode", wrong)
    assert main([*MODEL, "--out", str(tmp_path)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bench: error: wrong result: HF SDPA, DynamicCache: logits are off by")


def test_requirement_file_and_extra_agree(root: Path) -> None:
    extra = re.search(
        r'^bench = \["santa-torch\[demo\]", (.*)\]$', (root / "pyproject.toml").read_text(), re.M
    )
    assert extra is not None
    lines = (root / "requirements/bench.txt").read_text().splitlines()
    assert set(re.findall(r'"([^"]+)"', extra[1])) == {li for li in lines if li[:1] not in "-#"}
    assert "-r demo.txt" in lines
