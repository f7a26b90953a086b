"""llama.cpp's attention kernel, ``ggml_flash_attn_ext``, from the shared libraries of a wheel.

Only functions are called, and no structure of ggml is read or written, so that its layout may
change. Tensors are laid over our memory; nothing is copied.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from santa_torch.bench.cases import Case
from santa_torch.bench.inputs import DTYPES, Inputs
from santa_torch.bench.peers.base import AbsentError, Built, Peer
from santa_torch.bench.timing import Variant

#: Packages with ggml's shared libraries, and the folder in them: best first. The first carries a
#: CPU library for each instruction set.
PACKAGES = (
    ("transcribe_cpp_native", "_native"),
    ("libggml", "lib64"),
    ("llama_cpp", "lib"),
)

#: ``enum ggml_type``.
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class _Memory(ctypes.Structure):
    """``struct ggml_init_params``: bytes, buffer, and whether tensors get no memory."""

    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


#: Result and arguments of the functions used, by library.
_BASE: dict[str, tuple[Any, ...]] = {
    "ggml_version": (c_char_p,),
    "ggml_init": (c_void_p, _Memory),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, *[c_int64] * 4),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, *[c_float] * 3),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
    "ggml_threadpool_params_init": (None, c_void_p, c_int),
}
_CPU: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
    "ggml_threadpool_new": (c_void_p, c_void_p),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_threadpool_pause": (None, c_void_p),
    "ggml_threadpool_resume": (None, c_void_p),
}


def build(peer: Peer, case: Case, inputs: Inputs) -> Built:
    """A graph of one node for each set, a backend, and its threads."""
    base, cpu, source = _libraries()
    dtype = DTYPES[peer.dtype(case.dtype)]
    q = inputs.q.float()[:, :, None].contiguous()  # queries and outputs are float32 in ggml
    out = torch.empty(case.batch, 1, case.heads, case.head_dim)
    engine = _Engine(base, cpu, case.threads)
    keys, values = inputs.converted(dtype)
    graphs = [engine.graph(q, k, v, out) for k, v in zip(keys, values, strict=True)]

    def run(i: int) -> None:
        engine.compute(graphs[i])

    def result(i: int) -> torch.Tensor:
        engine.wake()
        run(i)
        engine.sleep()
        return out.view(inputs.q.shape).clone()

    variant = Variant(peer.label, peer.family, run, engine.wake, engine.sleep)
    return Built(variant, result, dtype, source, engine.close)


class _Engine:
    """A CPU backend with threads of its own, which only run between ``wake`` and ``sleep``."""

    def __init__(self, base: Any, cpu: Any, threads: int) -> None:
        self._base, self._cpu = base, cpu
        self._backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        parameters = ctypes.create_string_buffer(1 << 16)  # far more than the structure
        base.ggml_threadpool_params_init(parameters, threads)
        self._pool = cpu.ggml_threadpool_new(parameters)
        cpu.ggml_backend_cpu_set_threadpool(self._backend, self._pool)
        self._contexts: list[Any] = []
        self._buffers: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self.sleep()

    def graph(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Any:
        """``q [B, Hq, 1, D]`` float32, ``k, v [B, Hkv, L, D]`` -> ``out [B, 1, Hq, D]``."""
        base = self._base
        room = 8 * base.ggml_tensor_overhead() + base.ggml_graph_overhead()
        context = base.ggml_init(_Memory(room, None, True))
        self._contexts.append(context)
        sources = [self._lay_over(context, tensor) for tensor in (q, k, v)]
        node = base.ggml_flash_attn_ext(context, *sources, None, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._place(node, out)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, node)
        return graph

    def compute(self, graph: Any) -> None:
        """Run a graph."""
        status = self._base.ggml_backend_graph_compute(self._backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def wake(self) -> None:
        """Let the threads wait for work, spinning."""
        self._cpu.ggml_threadpool_resume(self._pool)

    def sleep(self) -> None:
        """Take the threads off the cores."""
        self._cpu.ggml_threadpool_pause(self._pool)

    def close(self) -> None:
        """Give everything back."""
        self.wake()
        for context in self._contexts:
            self._base.ggml_free(context)
        for buffer in self._buffers:
            self._base.ggml_backend_buffer_free(buffer)
        self._base.ggml_backend_free(self._backend)
        self._cpu.ggml_threadpool_free(self._pool)

    def _lay_over(self, context: Any, tensor: torch.Tensor) -> Any:
        sizes = reversed(tensor.shape)  # ggml counts dimensions from the innermost
        view = self._base.ggml_new_tensor_4d(context, _TYPES[tensor.dtype], *sizes)
        self._place(view, tensor)
        return view

    def _place(self, view: Any, tensor: torch.Tensor) -> None:
        base, address = self._base, tensor.data_ptr()
        assert tensor.is_contiguous()
        if base.ggml_nbytes(view) != tensor.nbytes:
            raise RuntimeError(f"ggml expects {base.ggml_nbytes(view)} bytes, not {tensor.nbytes}")
        buffer = base.ggml_backend_cpu_buffer_from_ptr(address, tensor.nbytes)
        self._buffers.append(buffer)
        self._tensors.append(tensor)
        if base.ggml_backend_tensor_alloc(buffer, view, address) != 0:
            raise RuntimeError("ggml_backend_tensor_alloc failed")


@cache
def _libraries() -> tuple[Any, Any, str]:
    """The base library, the best CPU library for this processor, and where they come from."""
    seen = []
    for package, folder in PACKAGES:
        spec = importlib.util.find_spec(package)  # not imported: only its files are of use
        if spec is None or spec.origin is None:
            seen.append(f"no {package}")
            continue
        libraries = Path(spec.origin).parent / folder
        try:
            base = _declare(ctypes.CDLL(_find(libraries, "base"), ctypes.RTLD_GLOBAL), _BASE)
            name, cpu = _best(libraries)
        except (OSError, AttributeError, FileNotFoundError) as error:
            seen.append(f"{package}: {error}")
            continue
        version = (base.ggml_version() or b"").decode()
        return base, _declare(cpu, _CPU), f"ggml {version}, {name} of {package}"
    hint = "pip install --no-deps transcribe-cpp-native, or libggml-python"
    raise AbsentError(f"no shared ggml libraries: {'; '.join(seen)} ({hint})")


def _best(folder: Path) -> tuple[str, Any]:
    """Of libraries for several instruction sets, the one that scores best here."""
    found: list[tuple[int, str, Any]] = []
    for path in _paths(folder, "cpu"):
        library = ctypes.CDLL(str(path))
        score = library.ggml_backend_score() if hasattr(library, "ggml_backend_score") else 1
        found.append((score, path.name, library))
    best = max(found, key=lambda item: item[:2], default=(0, "", None))
    if best[0] <= 0:
        raise FileNotFoundError(f"{folder} has no CPU library for this processor")
    return best[1:]


def _find(folder: Path, part: str) -> str:
    for path in _paths(folder, part):
        return str(path)
    raise FileNotFoundError(f"{folder} has no libggml-{part}")


def _paths(folder: Path, part: str) -> Iterator[Path]:
    """Files ``libggml-<part>*.so``; wheels without links carry only ``.so.0``, or copies."""
    plain = sorted(folder.glob(f"libggml-{part}*.so"))
    yield from plain or sorted(folder.glob(f"libggml-{part}*.so.0"))


def _declare(library: Any, functions: dict[str, tuple[Any, ...]]) -> Any:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
