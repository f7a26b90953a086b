"""Benchmarks: decode steps and whole models against what people would use instead.

    python -m santa_torch bench --help

``options.py`` reads the command line and is all that is imported for it. ``cases.py`` lists shapes;
``operators.py`` makes the inputs (``inputs.py``), our variants (``own.py``) and the rivals
(``peers/``), compares them with float64 (``check.py``) and times them (``timing.py``) while
``machine.py`` watches the machine. ``model.py`` times whole steps. ``results.py`` holds the
figures, ``targets.py`` judges them, ``report.py`` and ``plots.py`` show them.
"""

from __future__ import annotations

import sys

from santa_torch.bench.options import BenchError, parse

__all__ = ["BenchError", "main"]


def main(argv: list[str] | None = None) -> int:
    """Run the suite.

    Parameters
    ----------
    argv : list of str, optional
        Options without the program's name; default ``sys.argv[1:]``.

    Returns
    -------
    int
        Exit code: 0, 2 where the options ask for something that is not there or an output is wrong
        (said in one line on standard error), 130 after Ctrl-C.
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        try:
            from santa_torch.bench.run import run
        except ImportError as error:
            raise BenchError(f"{error} (pip install 'santa-torch[bench]' helps)") from error
        run(options)
    except BenchError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bench: interrupted; what was measured is in {options.out}", file=sys.stderr)
        return 130
    return 0
