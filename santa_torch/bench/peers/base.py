"""What every peer has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import Inputs
from santa_torch.bench.timing import Variant


class AbsentError(Exception):
    """A peer that cannot run here; the message is the reason."""


@dataclass
class Built:
    """A peer made for one case.

    Parameters
    ----------
    variant : Variant
        What is timed.
    out : callable
        Output ``[B, Hq, D]`` for a set's index, converted outside of the timed part.
    dtype : torch.dtype
        Of the K and V that it reads; outputs are checked to this dtype's tolerance.
    note : str
        Versions, threads of its own, and what else a reader should know.
    close : callable
        Ends its threads.
    """

    variant: Variant
    out: Callable[[int], torch.Tensor]
    dtype: torch.dtype
    note: str = ""
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Peer:
    """An entry of the list of peers.

    Parameters
    ----------
    key : str
        Its name on the command line.
    label : str
        Its name in the table.
    family : str
        "torch" or "library".
    build : callable
        Makes it for a case; raises `AbsentError`.
    dtypes : tuple of str
        The dtypes of K and V that it takes; another one runs in ``nearest``.
    nearest : str
        See above.
    compiled : bool
        Whether building it takes a compiler and many seconds.
    expands : bool
        Whether a call may hold K and V for every query head.
    only : tuple of str
        Dtypes of cases that it is for; empty for all. Elsewhere another entry does the same.
    imprecise : dict of str to str
        By dtype, why its error may be over the tolerance.
    """

    key: str
    label: str
    family: str
    build: Callable[[Peer, Case, Inputs], Built]
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    nearest: str = "float32"
    compiled: bool = False
    expands: bool = False
    only: tuple[str, ...] = ()
    imprecise: dict[str, str] = field(default_factory=dict, hash=False)

    def dtype(self, wanted: str) -> str:
        """The dtype of K and V that it runs in."""
        return wanted if wanted in self.dtypes else self.nearest
