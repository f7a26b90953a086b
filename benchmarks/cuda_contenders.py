"""Who takes part in ``cuda_decode.py``: our methods, torch's SDPA, FlashInfer, FlashAttention.

Each is built for one shape from ``q [B, Hq, D]`` and ``k, v [B, Hkv, L, D]`` and gives a call that
returns ``[B, Hq, D]``, fit for capture in a CUDA graph. One that cannot run raises ``AbsentError``
and is listed with the reason. What another layout costs to make is not timed: a cache would be kept
in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import santa_torch
from santa_torch.bench.peers.base import AbsentError

METHODS = ("dense", "multinomial", "stratified", "systematic", "shared")
PAGE = 16  # rows of a page of FlashInfer's cache

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a shape on its device.

    Parameters
    ----------
    q, k, v : Tensor
        ``[B, Hq, D]`` and ``[B, Hkv, L, D]``.
    seed : Tensor
        int64 ``[1]`` on the same device; sampled steps read it there.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seed: torch.Tensor

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, which exact attention must read."""
        return 2 * self.k.numel() * self.k.element_size()


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    Parameters
    ----------
    name : str
        Unique.
    build : callable
        Makes the step for given inputs; raises `AbsentError`.
    method : str or None
        Of santa_torch; None for a rival.
    samples : int or None
        S, where it samples.
    """

    name: str
    build: Callable[[Inputs], Step]
    method: str | None = None
    samples: int | None = None

    def bytes_read(self, inputs: Inputs) -> int:
        """Bytes of K and V that this step must read: all, or all keys and the drawn values."""
        if self.samples is None:
            return inputs.kv_bytes
        got = santa_torch.decode(
            inputs.q,
            inputs.k,
            inputs.v,
            samples=self.samples,
            method=self.method or "",
            seed=inputs.seed,
            return_stats=True,
        )
        assert isinstance(got, santa_torch.DecodeOutput)
        assert got.stats is not None
        return int(got.stats.bytes_read.sum())


def contenders(samples: tuple[int, ...]) -> Iterator[Contender]:
    """Ours first, then every rival that is known, installed or not."""
    for method in METHODS:
        for count in (None,) if method == "dense" else samples:
            name = f"santa {method}" if count is None else f"santa {method} S={count}"
            yield Contender(name, partial(_santa, method, count), method, count)
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for name, backend in backends.items():
        yield Contender(f"SDPA {name}, enable_gqa", partial(_sdpa_gqa, backend))
        yield Contender(f"SDPA {name}, group folded", partial(_sdpa_folded, backend))
    yield Contender("FlashInfer", partial(_flashinfer, False))
    yield Contender("FlashInfer, tensor cores", partial(_flashinfer, True))
    yield Contender("FlashAttention-2", partial(_flash_attention, "flash_attn"))
    yield Contender("FlashAttention-3", partial(_flash_attention, "flash_attn_interface"))


def versions() -> dict[str, str | None]:
    """Versions of the rivals' packages; None for one that is not installed."""
    names = ("torch", "flashinfer-python", "flash-attn", "flash-attn-3")
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _santa(method: str, samples: int | None, inputs: Inputs) -> Step:
    q, k, v, seed = inputs.q, inputs.k, inputs.v, inputs.seed

    def step() -> torch.Tensor:
        out = santa_torch.decode(q, k, v, samples=samples, method=method, seed=seed)
        assert isinstance(out, torch.Tensor)
        return out

    return step


def _sdpa_gqa(backend: SDPBackend, inputs: Inputs) -> Step:
    """One query row for each head; the backend knows of groups, or refuses."""
    q, k, v = inputs.q[:, :, None], inputs.k, inputs.v

    def step() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

    return step


def _sdpa_folded(backend: SDPBackend, inputs: Inputs) -> Step:
    """The heads of a group as query rows: K and V are read once."""
    batch, heads, dim = inputs.q.shape
    kv_heads = inputs.k.shape[1]
    q = inputs.q.view(batch, kv_heads, heads // kv_heads, dim)

    def step() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, inputs.k, inputs.v).reshape(batch, heads, dim)

    return step


def _flashinfer(tensor_cores: bool, inputs: Inputs) -> Step:
    """Its batched decode over a paged cache of its own layout, planned once per shape."""
    flashinfer = _module("flashinfer")
    _need_gpu(inputs)
    batch, kv_heads, rows, dim = inputs.k.shape
    if rows % PAGE:
        raise AbsentError(f"{rows} rows are no multiple of a page of {PAGE}")
    pages = rows // PAGE
    device = inputs.q.device

    def paged(x: torch.Tensor) -> torch.Tensor:
        split = x.view(batch, kv_heads, pages, PAGE, dim).permute(0, 2, 3, 1, 4)
        return split.reshape(batch * pages, PAGE, kv_heads, dim)

    cache = paged(inputs.k), paged(inputs.v)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    starts = torch.arange(0, batch * pages + 1, pages, dtype=torch.int32, device=device)
    listed = torch.arange(batch * pages, dtype=torch.int32, device=device)
    last = torch.full((batch,), PAGE, dtype=torch.int32, device=device)
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k.dtype}
    wrapper.plan(starts, listed, last, inputs.q.shape[1], kv_heads, dim, PAGE, **dtypes)
    return lambda: wrapper.run(inputs.q, cache)


def _flash_attention(module: str, inputs: Inputs) -> Step:
    """Decode of FlashAttention-2 or 3 over ``[B, L, Hkv, D]``, in memory as it likes it."""
    function = _module(module).flash_attn_with_kvcache
    _need_gpu(inputs)
    q = inputs.q[:, None]
    k, v = (x.transpose(1, 2).contiguous() for x in (inputs.k, inputs.v))

    def step() -> torch.Tensor:
        out = function(q, k, v)
        return (out[0] if isinstance(out, tuple) else out)[:, 0]

    return step


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AbsentError(f"not installed ({error})") from None


def _need_gpu(inputs: Inputs) -> None:
    if not inputs.q.is_cuda:
        raise AbsentError("needs a GPU")
