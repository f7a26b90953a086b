"""The operator benchmark: one case after the other, each with its variants interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from santa_torch.bench import check, machine, own
from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import DoesNotFitError, Inputs, plan
from santa_torch.bench.peers import Built, Peer, build_peers, fitting, memory
from santa_torch.bench.results import CaseResult, Row
from santa_torch.bench.timing import Interrupted, Schedule, Times, Variant, describe, measure
from santa_torch.progress import bar, status

#: Share of the free memory that inputs may take.
MEMORY_SHARE = 0.7


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Parameters
    ----------
    peers : tuple of str
        Keys of ``peers.PEERS``.
    rounds, calls : int
        Turns of each variant, and counted calls of a turn.
    wait : float
        Seconds to wait for a quiet machine before each case.
    seed : int
        Of the order of the variants.
    memory : int or None
        Bytes that may be used; None takes a share of what is free.
    """

    peers: tuple[str, ...]
    rounds: int
    calls: int
    wait: float
    seed: int = 0
    memory: int | None = None


def run_case(
    result: CaseResult,
    settings: Settings,
    watch: machine.Watch,
    adjust: Callable[[list[Variant]], list[Variant]] = lambda variants: variants,
) -> None:
    """Check and time everything at one shape.

    Parameters
    ----------
    result : CaseResult
        Names the case, and is filled in; whatever stops this, it holds what was measured.
    settings : Settings
        How.
    watch : Watch
        Tells whether the machine is quiet.
    adjust : callable
        Gets the variants right before they are timed; tests look and plant there.

    Raises
    ------
    WrongResultError
        An output of ours is not attention. Wrong peers are reported in their row instead.
    """
    case = result.case
    torch.set_num_threads(case.threads)
    available = settings.memory or int(MEMORY_SHARE * machine.available_memory())
    cache = machine.last_level_cache()

    def fits(keys: Sequence[str]) -> bool:
        try:
            return bool(plan(case, cache, available, *memory(keys, case)))
        except DoesNotFitError:
            return False

    keys, reasons = fitting(settings.peers, fits)
    try:
        chosen = plan(case, cache, available, *memory(keys, case))
    except DoesNotFitError as error:
        result.skipped = str(error)
        return
    result.sets, result.rotated_bytes = str(chosen), chosen.total_bytes
    with status(f"{case}: inputs"):
        inputs = Inputs(case, chosen.sets)
    ours = list(own.own_variants(case, inputs))
    with status(f"{case}: peers") as say:
        built, others = build_peers(keys, case, inputs, say)
    reasons.update(others)
    try:
        with status(f"{case}: compiling and checking"):
            _check(case, inputs, ours, built, result, reasons)
        variants = [item.variant for item in ours]
        variants += [peer.variant for _, peer in built if peer.variant.name not in reasons]
        _measure(adjust(variants), chosen.sets, settings, watch, result)
        for item in ours:
            row = _row(result, item.variant.name)
            if row is not None and item.method:
                row.stages = own.stages(item.variant, chosen.sets, case.threads)
    finally:
        for _, peer in built:
            peer.close()
    for label, reason in reasons.items():
        if (row := _row(result, label)) is None:
            result.rows.append(Row(label, "absent", note=reason))
        else:
            row.note = reason


def _check(
    case: Case,
    inputs: Inputs,
    ours: Sequence[own.Own],
    built: Sequence[tuple[Peer, Built]],
    result: CaseResult,
    reasons: dict[str, str],
) -> None:
    """Compare the first and the last set's outputs with float64; fills ``result.rows``."""
    for item in ours:
        scratch = own.scratch_bytes(case, item.method) if item.method else None
        result.rows.append(
            Row(
                item.variant.name,
                item.variant.family,
                dtype=case.dtype,
                method=item.method,
                samples=item.samples,
                scratch_bytes=scratch,
            )
        )
    for peer, made in built:
        dtype = peer.dtype(case.dtype)
        note = made.note if dtype == case.dtype else _join(f"reads {dtype}", made.note)
        result.rows.append(Row(peer.label, peer.family, dtype=dtype, note=note))
    for index in sorted({len(inputs.keys) - 1, 0}, reverse=True):
        exact = check.Exact(inputs.q, inputs.keys[index], inputs.values[index], case.samples)
        for item in ours:
            if item.check is not None:
                row = _row(result, item.variant.name)
                assert row is not None
                row.error = item.check(exact, index)
        for peer, made in built:
            row = _row(result, peer.label)
            assert row is not None
            if peer.label in reasons:
                continue
            try:
                error, over = exact.check_peer(peer.label, made.out(index), made.dtype)
            except Exception as failure:  # reported, and the run goes on without it
                reasons[peer.label] = f"failed: {describe(failure)}"
                continue
            row.error = max(error, row.error or 0.0)
            if over and "over its tolerance" not in row.note:
                row.note = _join(_imprecise(peer, made), row.note)


def _imprecise(peer: Peer, made: Built) -> str:
    known = peer.imprecise.get(str(made.dtype).removeprefix("torch."))
    return f"over its tolerance: {known or f'more than {check.TOLERANCE[made.dtype]:g}'}"


def _measure(
    variants: list[Variant],
    sets: int,
    settings: Settings,
    watch: machine.Watch,
    result: CaseResult,
) -> None:
    schedule = Schedule(settings.rounds, settings.calls, sets, settings.seed)
    with watch.over(settings.wait) as result.disturbance:
        try:
            with bar(str(result.case), settings.rounds, "rounds") as progress:
                measured = measure(variants, schedule, progress)
        except Interrupted as stop:
            _fill(result, stop.results)
            raise
    _fill(result, measured)


def _fill(result: CaseResult, measured: dict[str, Times]) -> None:
    for name, times in measured.items():
        row = _row(result, name)
        assert row is not None
        row.times = times
        if times.error:
            row.note = _join(f"failed: {times.error}", row.note)


def _row(result: CaseResult, name: str) -> Row | None:
    return next((row for row in result.rows if row.name == name), None)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
