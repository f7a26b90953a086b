"""What people would use instead: `PEERS`, and `build_peers` for those that a run asks for.

``plain.py`` needs torch alone; each library has a file of its own and is imported when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from santa_torch.bench.cases import ITEM_BYTES, Case
from santa_torch.bench.inputs import Inputs
from santa_torch.bench.options import PEERS as KEYS
from santa_torch.bench.peers import ggml, onnx, plain, vino
from santa_torch.bench.peers.base import AbsentError, Built, Peer
from santa_torch.bench.timing import describe

__all__ = ["PEERS", "AbsentError", "Built", "Peer", "build_peers", "fitting", "memory"]

# Where bfloat16 is missing or slower, what is faster on the machines that we have seen.
_WHOLE = (("float16", "float32"), "float32")
_HALF = (("float16", "float32"), "float16")

PEERS: dict[str, Peer] = {
    peer.key: peer
    for peer in (
        Peer("grouped", "grouped matmul", "torch", plain.grouped),
        Peer("sdpa-folded", "SDPA, group folded", "torch", plain.folded),
        Peer("sdpa-gqa", "SDPA enable_gqa", "torch", plain.gqa, expands=True),
        Peer("sdpa-repeated", "SDPA, KV repeated", "torch", plain.repeated, expands=True),
        Peer("compiled", "grouped, compiled", "torch", plain.compiled, compiled=True),
        Peer("flex", "FlexAttention, compiled", "torch", plain.flex, compiled=True),
        Peer("onnxruntime", "ONNX Runtime GQA", "library", onnx.build, *_WHOLE),
        Peer("openvino", "OpenVINO SDPA", "library", vino.build, *_HALF),
        Peer(
            "llama.cpp", "llama.cpp flash attention", "library", ggml.build, *_HALF,
            imprecise={"float16": "sums in float16"},
        ),
        Peer(
            "llama.cpp-bfloat16", "llama.cpp, bfloat16", "library", ggml.build, only=("bfloat16",)
        ),
    )
}  # fmt: skip
assert tuple(PEERS) == KEYS  # the command line's list, which imports no torch


def memory(keys: Sequence[str], case: Case) -> tuple[float, int]:
    """What peers need beside the sets of K and V.

    Returns
    -------
    copies : float
        Kept beside each set, in units of the set: conversions, once for each dtype.
    work : int
        Bytes at the peak of a call.
    """
    others = {PEERS[key].dtype(case.dtype) for key in keys} - {case.dtype}
    copies = sum(ITEM_BYTES[other] / ITEM_BYTES[case.dtype] for other in others)
    expanded = any(PEERS[key].expands for key in keys)
    return copies, case.group * case.kv_bytes if expanded else 0


def fitting(
    keys: Sequence[str], fits: Callable[[Sequence[str]], bool]
) -> tuple[list[str], dict[str, str]]:
    """Leave out the peers that need the most memory until ``fits``; reasons by label."""
    kept, reasons = list(keys), {}
    for key in ("sdpa-repeated", "sdpa-gqa", "onnxruntime", "openvino", "llama.cpp"):
        if fits(kept):
            break
        if key in kept:
            kept.remove(key)
            reasons[PEERS[key].label] = "absent: needs more memory than there is at this shape"
    return kept, reasons


def build_peers(
    keys: Sequence[str], case: Case, inputs: Inputs, status: Callable[[str], None]
) -> tuple[list[tuple[Peer, Built]], dict[str, str]]:
    """Make peers for a case.

    Parameters
    ----------
    keys : sequence of str
        Of ``PEERS``.
    case, inputs
        What they compute.
    status : callable
        Called with the label of the peer that is about to be made.

    Returns
    -------
    built : list
        Those that can run.
    reasons : dict
        By label, why the others cannot.
    """
    built, reasons = [], {}
    for key in keys:
        peer = PEERS[key]
        if peer.only and case.dtype not in peer.only:
            continue
        status(peer.label)
        try:
            built.append((peer, peer.build(peer, case, inputs)))
        except AbsentError as error:
            reasons[peer.label] = f"absent: {error}"
        except Exception as error:  # a library of somebody else, whose exceptions are its own
            reasons[peer.label] = f"failed: {describe(error)}"
    return built, reasons
