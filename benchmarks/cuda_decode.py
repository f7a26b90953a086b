"""Time a decode step on a GPU against its rivals and against the bytes that it must read.

    python benchmarks/cuda_decode.py [--batch 1 4 16] [--rows 8192 32768 131072]
        [--samples 128 1024] [--rounds 30] [--quick] [--out DIR]
    python benchmarks/cuda_decode.py --list          who would take part, and who is missing
    python benchmarks/cuda_decode.py --rehearse      the same code on the CPU with tiny shapes

Every contender is captured in a CUDA graph, and its first sequence is compared with float64 before
anything is timed. Contenders take turns in a shuffled order; before each replay the L2 cache is
filled with something else by reading. CUDA events measure one replay; the table shows medians.

The floor of a step is the bytes of K and V that it must read over the bandwidth that the same GPU
reached when this run read or copied memory with torch's own kernels.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cuda_report
import torch
from cuda_contenders import Contender, Inputs, Step, contenders, versions

import santa_torch
from santa_torch.bench import machine
from santa_torch.bench.check import Exact, WrongResultError
from santa_torch.bench.inputs import PEAK, size
from santa_torch.bench.peers.base import AbsentError
from santa_torch.bench.timing import describe
from santa_torch.files import make_directory

HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPE = torch.bfloat16
MIB = 2**20


class CheckError(RuntimeError):
    """What makes the run fail; the message is a line for the user."""


@dataclass
class Line:
    """What was found of one contender at one shape.

    Parameters
    ----------
    name : str
        Of the contender.
    microseconds : list of float
        One replay each.
    bytes_read : int
        Bytes of K and V that the step must read.
    error : float or None
        Relative RMS error of the first sequence against float64; of one seed where it samples.
    absent : str or None
        Why it did not take part.
    """

    name: str
    microseconds: list[float] = field(default_factory=list)
    bytes_read: int = 0
    error: float | None = None
    absent: str | None = None

    @property
    def median(self) -> float:
        """Median of the replays in microseconds."""
        return statistics.median(self.microseconds)


class Graphs:
    """Steps as CUDA graphs, timed by events with a cold L2 cache."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        found = torch.cuda.get_device_properties(self.device)
        self.name, self.memory = found.name, found.total_memory
        cache = max(256 * MIB, 4 * found.L2_cache_size)
        self._other = torch.zeros(cache // 4, device=self.device)
        self._sum = torch.zeros((), device=self.device)

    def available(self) -> int:
        """Bytes that can be allocated."""
        return torch.cuda.mem_get_info(self.device)[0]

    def prepare(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        """A replay of the step, and the tensor that holds its result afterwards."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return graph.replay, out

    def time(self, calls: list[Callable[[], None]]) -> list[float]:
        """Microseconds of each call, one after the other; the host waits once at the end."""
        events = []
        for call in calls:
            # By reading: lines that were written would be written back while the call is timed.
            torch.sum(self._other, dim=0, out=self._sum)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in events]


class Rehearsal:
    """Plain calls on the CPU in the place of graphs."""

    device, name, memory = torch.device("cpu"), "REHEARSAL on the CPU", 0

    def available(self) -> int:
        """Bytes that can be allocated."""
        return machine.available_memory()

    def prepare(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        """The call, and the tensor that holds its result afterwards."""
        out = step().clone()

        def replay() -> None:
            out.copy_(step())

        return replay, out

    def time(self, calls: list[Callable[[], None]]) -> list[float]:
        """Microseconds of each call."""
        found = []
        for call in calls:
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
        return found


Timer = Graphs | Rehearsal


def bandwidth(timer: Timer, count: int) -> float:
    """Bytes per second of reading ``count`` bytes or copying half of them: the faster one."""
    flat = torch.zeros(count // 4, device=timer.device)
    half = len(flat) // 2
    total = torch.zeros((), device=timer.device)

    def read() -> torch.Tensor:
        return torch.sum(flat, dim=0, out=total)

    def copy() -> torch.Tensor:
        return flat[:half].copy_(flat[half : 2 * half])

    calls = [timer.prepare(step)[0] for step in (read, copy)]
    times = [timer.time(calls) for _ in range(10)]
    return count / (1e-6 * min(statistics.median(column) for column in zip(*times, strict=True)))


def make_inputs(timer: Timer, batch: int, rows: int, dim: int = DIM) -> Inputs:
    """Random tensors with peaked scores, made where they are used."""
    source = torch.Generator(timer.device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=DTYPE, device=timer.device)
        return out.normal_(generator=source)

    q = PEAK * randn(batch, HEADS, dim)
    k, v = randn(batch, KV_HEADS, rows, dim), randn(batch, KV_HEADS, rows, dim)
    return Inputs(q, k, v, torch.zeros(1, dtype=torch.int64, device=timer.device))


def verify(
    contender: Contender,
    exact: Exact,
    inputs: Inputs,
    replay: Callable[[], None],
    out: torch.Tensor,
) -> float:
    """Relative RMS error of the first sequence; raises where it is no attention."""

    def run(seed: int) -> torch.Tensor:
        inputs.seed.fill_(seed)
        out.fill_(torch.nan)  # a replay that writes nothing is found out
        replay()
        return out[:1].clone()

    try:
        if contender.method is None:
            return exact.check_peer(contender.name, run(0), DTYPE)[0]
        if contender.samples is None:
            return exact.check_exact(contender.name, run(0), DTYPE)
        return exact.check_sampled(contender.name, run, contender.method, contender.samples)
    finally:
        inputs.seed.zero_()


def measure(
    timer: Timer, inputs: Inputs, samples: tuple[int, ...], rounds: int, seed: int
) -> list[Line]:
    """All contenders at one shape."""
    exact = Exact(inputs.q[:1], inputs.k[:1], inputs.v[:1], samples)
    lines, running = [], []
    for contender in contenders(samples):
        line = Line(contender.name)
        lines.append(line)
        try:
            replay, out = timer.prepare(contender.build(inputs))
            line.error = verify(contender, exact, inputs, replay, out)
        except AbsentError as error:
            line.absent = str(error)
            continue
        except Exception as error:  # a rival that fails or is wrong is listed; ours ends the run
            if contender.method is not None:
                raise
            line.absent = describe(error)
            continue
        line.bytes_read = contender.bytes_read(inputs)
        running.append((line, replay))
    order = random.Random(seed)
    for number in range(-1, rounds):  # round -1 warms up
        turns = running[:]
        order.shuffle(turns)
        times = timer.time([replay for _, replay in turns])
        if number >= 0:
            for (line, _), microseconds in zip(turns, times, strict=True):
                line.microseconds.append(microseconds)
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options, with the rehearsal's shapes in the place of a GPU's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1 4 16")
    parser.add_argument("--rows", type=int, nargs="+", help="default: 8192 32768 131072")
    parser.add_argument("--samples", type=int, nargs="+", help="default: 128 1024")
    parser.add_argument("--rounds", type=int, help="replays that count (default: 30)")
    parser.add_argument("--quick", action="store_true", help="batch 1, two lengths, 10 rounds")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--list", action="store_true", help="name the contenders and stop")
    parser.add_argument("--out", type=Path, default=Path("out/cuda_decode"), help="folder")
    args = parser.parse_args(argv)
    quick, tiny = args.quick, args.rehearse
    args.batch = args.batch or ([1] if quick else [1, 2] if tiny else [1, 4, 16])
    lengths = [256, 1024] if tiny else [8192, 32768] if quick else [8192, 32768, 131072]
    args.rows = args.rows or lengths
    args.samples = tuple(args.samples or ([16, 64] if tiny else [128, 1024]))
    args.rounds = args.rounds or (3 if tiny else 10 if quick else 30)
    for name in ("batch", "rows", "samples"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name}: must be positive, got {min(getattr(args, name))}")
    if args.rounds < 1:
        parser.error(f"--rounds: must be positive, got {args.rounds}")
    return args


def make_timer(rehearse: bool) -> Timer:
    """What runs and times the steps; a GPU unless it is a rehearsal."""
    if rehearse:
        return Rehearsal()
    if not torch.cuda.is_available():
        raise CheckError("torch finds no GPU; --rehearse runs on the CPU")
    module = santa_torch.build_info().cuda_module
    if module != "loaded":
        raise CheckError(f"no CUDA operators in this build: {module}")
    return Graphs()


def list_contenders(args: argparse.Namespace) -> None:
    """Print who is there, tried at a small shape."""
    cuda = torch.cuda.is_available() and santa_torch.build_info().cuda_module == "loaded"
    timer: Timer = Graphs() if cuda else Rehearsal()
    for line in measure(timer, make_inputs(timer, 1, 256), args.samples, 1, 0):
        print(f"{line.name:28s}{'missing: ' + line.absent if line.absent else 'takes part'}")
    print(f"on {timer.name}: " + ", ".join(f"{k} {v}" for k, v in versions().items()))


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure every shape; print and write after each."""
    if args.list:
        list_contenders(args)
        return
    make_directory(args.out, CheckError)
    timer = make_timer(args.rehearse)
    speed = bandwidth(timer, (4 if args.rehearse else 1024) * MIB)
    document = {
        "rehearsal": args.rehearse,
        "device": timer.name,
        "packages": versions(),
        "machine": machine.facts(),
        "rounds": args.rounds,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        "bytes_per_second": speed,
        "results": [],
        "skipped": [],
    }
    print(cuda_report.heading(document), flush=True)
    for batch in args.batch:
        for rows in args.rows:
            # K and V, four copies in the layouts of rivals, and room for the check.
            needed = 5 * 2 * batch * KV_HEADS * rows * DIM * DTYPE.itemsize + 1024 * MIB
            if needed > timer.available():
                reason = f"needs {size(needed)}, there are {size(timer.available())}"
                document["skipped"].append({"batch": batch, "rows": rows, "reason": reason})
                print(f"B={batch} L={rows}: skipped, {reason}\n", flush=True)
                continue
            inputs = make_inputs(timer, batch, rows)
            lines = measure(timer, inputs, args.samples, args.rounds, batch + rows)
            result = {"batch": batch, "rows": rows, "kv_bytes": inputs.kv_bytes}
            result["lines"] = [asdict(line) for line in lines]
            document["results"].append(result)
            print(cuda_report.table(document, result) + "\n", flush=True)
            cuda_report.write(args.out, document)
            del inputs, lines
            gc.collect()
            if not args.rehearse:
                torch.cuda.empty_cache()
    if not document["results"]:
        raise CheckError("nothing was measured: no shape fits into memory")
    for path in cuda_report.write(args.out, document):
        print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """Run; 1 where a result is wrong or nothing can be measured."""
    args = parse(argv)
    try:
        run(args)
    except (CheckError, WrongResultError) as error:
        print(f"cuda_decode: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
