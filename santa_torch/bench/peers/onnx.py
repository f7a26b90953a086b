"""ONNX Runtime's GroupQueryAttention (com.microsoft), float16 or float32.

K and V stay where they are: the operator's past and present buffers are one and the same memory,
bound once for each set. It appends a row at every call; here that row is the one that already
stands last in the set, so that it attends the same rows as everybody.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import DTYPES, Inputs
from santa_torch.bench.peers.base import AbsentError, Built, Peer
from santa_torch.bench.timing import Variant


def build(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """A session with our number of threads, and one binding for each set."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise AbsentError(f"{error} (pip install onnxruntime onnx)") from None
    dtype = DTYPES[peer.dtype(case.dtype)]
    session = _session(onnxruntime, _model(onnx, case, dtype), case.threads)
    keys, values = inputs.converted(dtype)
    out = torch.empty(case.batch, 1, case.heads * case.head_dim, dtype=dtype)
    small = _small_inputs(case, inputs.q.to(dtype), keys, values)
    bindings = [
        _bind(session, {**tensors, "past_key": k, "past_value": v}, {
            "output": out, "present_key": k, "present_value": v,
        })
        for tensors, k, v in zip(small, keys, values, strict=True)
    ]  # fmt: skip
    once = onnxruntime.RunOptions()

    def run(i: int) -> None:
        session.run_with_iobinding(bindings[i], once)

    def result(i: int) -> torch.Tensor:
        run(i)
        return out.view(inputs.q.shape).clone()

    note = f"onnxruntime {onnxruntime.__version__}"
    variant = Variant(peer.label, peer.family, run)
    return Built(variant, result, dtype, note)


def _session(onnxruntime: Any, model: bytes, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails is raised as well
    # Its threads spin while it runs, and leave the cores to others when it is done.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _model(onnx: Any, case: Case, dtype: torch.dtype) -> bytes:
    kinds = onnx.TensorProto
    kind = kinds.FLOAT16 if dtype == torch.float16 else kinds.FLOAT
    batch, cache = case.batch, [case.batch, case.kv_heads, case.rows, case.head_dim]
    info = onnx.helper.make_tensor_value_info
    new = [batch, 1, case.kv_heads * case.head_dim]
    inputs = [
        info("query", kind, [batch, 1, case.heads * case.head_dim]),
        info("key", kind, new),
        info("value", kind, new),
        info("past_key", kind, cache),
        info("past_value", kind, cache),
        info("seqlens_k", kinds.INT32, [batch]),
        info("total_sequence_length", kinds.INT32, [1]),
    ]
    outputs = [
        info("output", kind, [batch, 1, case.heads * case.head_dim]),
        info("present_key", kind, cache),
        info("present_value", kind, cache),
    ]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain="com.microsoft",
        num_heads=case.heads,
        kv_num_heads=case.kv_heads,
        scale=1 / math.sqrt(case.head_dim),
    )
    versions = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "gqa", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=9)
    return bytes(model.SerializeToString())


def _small_inputs(
    case: Case, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Everything but the caches, for each set."""
    shared = {
        "query": q.reshape(case.batch, 1, -1),
        "seqlens_k": torch.full((case.batch,), case.rows - 1, dtype=torch.int32),
        "total_sequence_length": torch.tensor([case.rows], dtype=torch.int32),
    }
    return [
        {
            **shared,
            "key": k[:, :, -1].reshape(case.batch, 1, -1).clone(),
            "value": v[:, :, -1].reshape(case.batch, 1, -1).clone(),
        }
        for k, v in zip(keys, values, strict=True)
    ]


def _bind(session: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    import numpy

    kinds = {
        torch.float16: numpy.float16,
        torch.float32: numpy.float32,
        torch.int32: numpy.int32,
    }
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            bind(name, "cpu", 0, kinds[tensor.dtype], list(tensor.shape), tensor.data_ptr())
    binding.santa_tensors = (inputs, outputs)  # their memory must outlive the pointers
    return binding
