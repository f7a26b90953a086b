"""A language model at long context, with exact and with sampled attention side by side.

    python -m santa_torch demo --help

``options.py`` reads the command line, ``subject.py`` finds the model and the text, ``measure.py``
runs, ``report.py`` shows. Only the first is imported before the options are known to be good.
"""

from __future__ import annotations

import sys

from santa_torch.demo.options import DemoError, parse

__all__ = ["DemoError", "main"]


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv : list of str, optional
        Options without the program's name; default ``sys.argv[1:]``.

    Returns
    -------
    int
        Exit code: 0, or 2 where the options ask for something that is not there, memory included
        (said in one line on standard error).
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        try:
            from santa_torch.demo.run import run
        except ImportError as error:
            raise DemoError(f"{error} (pip install 'santa-torch[demo]' brings it along)") from error
        run(options)
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    return 0
