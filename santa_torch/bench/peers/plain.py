"""Peers in plain PyTorch: what a user can write without another package.

All take ``q [B, Hq, D]`` and attend ``k, v [B, Hkv, L, D]`` with one query row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import Inputs
from santa_torch.bench.peers.base import AbsentError, Built, Peer
from santa_torch.bench.timing import Variant


def grouped(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """matmul, softmax, matmul over the query heads of a KV head, into preallocated outputs.

    The scores are formed as ``q K^T`` or as ``K q^T``, whichever is faster at the case.
    """
    q, keys, values = _grouped_q(case, inputs), inputs.keys, inputs.values
    transposed = [k.transpose(-1, -2) for k in keys]
    scores = q.new_empty(case.batch, case.kv_heads, case.group, case.rows)
    columns = q.new_empty(case.batch, case.kv_heads, case.rows, case.group)
    weights, out = torch.empty_like(scores), torch.empty_like(q)
    scale = case.head_dim**-0.5

    def wide(i: int) -> torch.Tensor:
        torch.matmul(q * scale, transposed[i], out=scores)
        torch.softmax(scores, -1, out=weights)  # fp32 inside, whatever the dtype
        return torch.matmul(weights, values[i], out=out)

    def tall(i: int) -> torch.Tensor:
        torch.matmul(keys[i], (q * scale).transpose(-1, -2), out=columns)
        torch.softmax(columns.transpose(-1, -2), -1, out=weights)
        return torch.matmul(weights, values[i], out=out)

    run = min((wide, tall), key=lambda form: _pace(form, len(keys)))
    built = _built(peer, inputs, run)
    built.note = "scores as K q^T" if run is tall else ""
    return built


def _pace(run: Callable[[int], Any], sets: int) -> float:
    """Seconds of the fastest of a few calls after the first."""
    seconds = []
    for i in range(5):
        start = time.perf_counter()
        run(i % sets)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def compiled(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """The same expression under ``torch.compile``."""
    q, keys, values = _grouped_q(case, inputs), inputs.keys, inputs.values
    scale = case.head_dim**-0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q * scale) @ k.transpose(-1, -2)).softmax(-1) @ v

    function = _compile(attend, case.threads)
    return _built(peer, inputs, lambda i: function(q, keys[i], values[i]))


def folded(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """SDPA with the heads of a group as query rows: K and V are read once."""
    q, keys, values = _grouped_q(case, inputs), inputs.keys, inputs.values
    return _built(peer, inputs, lambda i: scaled_dot_product_attention(q, keys[i], values[i]))


def gqa(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """SDPA with ``enable_gqa``."""
    q, keys, values = inputs.q[:, :, None], inputs.keys, inputs.values

    def run(i: int) -> torch.Tensor:
        return scaled_dot_product_attention(q, keys[i], values[i], enable_gqa=True)

    return _built(peer, inputs, run)


def repeated(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """SDPA over K and V repeated for every query head, as many models do it.

    Repeating is part of a step, and it is timed.
    """
    q, keys, values, group = inputs.q[:, :, None], inputs.keys, inputs.values, case.group

    def run(i: int) -> torch.Tensor:
        k = keys[i].repeat_interleave(group, 1)
        v = values[i].repeat_interleave(group, 1)
        return scaled_dot_product_attention(q, k, v)

    return _built(peer, inputs, run)


def flex(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """FlexAttention with ``enable_gqa``, compiled."""
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        raise AbsentError(f"this torch has no FlexAttention ({error})") from None
    q, keys, values = inputs.q[:, :, None], inputs.keys, inputs.values
    function = _compile(flex_attention, case.threads)
    return _built(peer, inputs, lambda i: function(q, keys[i], values[i], enable_gqa=True))


def _compile(function: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """A graph for the shapes of this case alone, and for its number of threads."""
    torch.compiler.reset()
    # The threads are compiled in; as an option they are part of what cached code is looked up by.
    options: dict[str, Any] = {"cpp.threads": threads}
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def _grouped_q(case: Case, inputs: Inputs) -> torch.Tensor:
    """``[B, Hkv, G, D]``."""
    return inputs.q.view(case.batch, case.kv_heads, case.group, case.head_dim)


def _built(peer: Peer, inputs: Inputs, run: Callable[[int], torch.Tensor]) -> Built:
    @torch.no_grad()
    def timed(i: int) -> torch.Tensor:
        return run(i)

    variant = Variant(peer.label, peer.family, timed)
    return Built(variant, lambda i: timed(i).reshape(inputs.q.shape).clone(), inputs.q.dtype)
