"""OpenVINO's ScaledDotProductAttention on its CPU device, group folded into the query axis.

One request for each set, laid over our memory; shapes are fixed. OpenVINO turns the operator into
matrix products and a softmax here. It has kernels for caches of its own (a stateful model, pages),
which own K and V and grow at every call; docs/benchmarks.md says what became of them.
"""

from __future__ import annotations

from typing import Any

import torch

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import DTYPES, Inputs
from santa_torch.bench.peers.base import AbsentError, Built, Peer
from santa_torch.bench.timing import Variant

_TYPES = {torch.float16: "f16", torch.float32: "f32"}


def build(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """A compiled model with our number of threads."""
    try:
        import openvino
    except ImportError as error:
        raise AbsentError(f"{error} (pip install openvino)") from None
    dtype = DTYPES[peer.dtype(case.dtype)]
    shape = (case.batch, case.kv_heads, case.group, case.head_dim)
    q = inputs.q.view(shape).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    keys, values = inputs.converted(dtype)
    model = _compile(openvino, shape, case, dtype)
    requests = []
    for k, v in zip(keys, values, strict=True):
        request = model.create_infer_request()
        views = [tensor.numpy() for tensor in (q, k, v, out)]
        for index, view in enumerate(views[:3]):
            request.set_input_tensor(index, openvino.Tensor(view, shared_memory=True))
        request.set_output_tensor(0, openvino.Tensor(views[3], shared_memory=True))
        requests.append((request, views))  # it does not keep the memory alive

    def run(i: int) -> None:
        requests[i][0].infer()

    def result(i: int) -> torch.Tensor:
        run(i)
        return out.view(inputs.q.shape).clone()

    note = f"openvino {openvino.__version__.split('-')[0]}"
    return Built(Variant(peer.label, peer.family, run), result, dtype, note)


def _compile(
    openvino: Any, shape: tuple[int, int, int, int], case: Case, dtype: torch.dtype
) -> Any:
    import openvino.opset13 as ops

    kind = getattr(openvino.Type, _TYPES[dtype])
    cache = [case.batch, case.kv_heads, case.rows, case.head_dim]
    inputs = [ops.parameter(list(sizes), kind) for sizes in (shape, cache, cache)]
    attention = ops.scaled_dot_product_attention(*inputs, causal=False)
    settings = {
        "INFERENCE_NUM_THREADS": case.threads,
        "INFERENCE_PRECISION_HINT": _TYPES[dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    return openvino.Core().compile_model(openvino.Model([attention], inputs), "CPU", settings)
