"""OpenVINO."""

from __future__ import annotations

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import Inputs
from santa_torch.bench.peers.base import AbsentError, Built, Peer

#: Memory beside the sets, in units of the sets.
COPIES = 0.0


def build(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """Not yet."""
    raise AbsentError("not yet")
