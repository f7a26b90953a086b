// The schemas of every operator, and nothing else. Kernels are registered at the foot of the files that hold them.
#include "registration.h"

SANTA_OPERATORS(m) {
  // One decode step: out [B, Hq, Dv], lse [B, Hq]; with return_stats keys_read int64 [B, Hkv, 3] (rows, features,
  // bytes), value_rows int64 [B, Hkv] and squared_error [B, Hq], otherwise those three have no elements. Rows in
  // whole blocks of key_blocks are scored from there; bernoulli_draws > 0 scores with bernoulli_query.
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, *, int samples, str method=\"shared\", float? scale=None, "
      "Tensor? mask=None, Tensor? seq_lens=None, float? softcap=None, Tensor? sinks=None, Tensor seed, "
      "Tensor? position=None, int layer=0, int head_offset=0, bool return_stats=False, "
      "Tensor? key_blocks=None, Tensor? block_rows=None, int bernoulli_draws=0, bool bernoulli_shared=True) "
      "-> (Tensor out, Tensor lse, Tensor keys_read, Tensor value_rows, Tensor squared_error)");

  // The stages that decode fuses. Composing them gives the bits of decode, before the cast to q's dtype.
  m.def(
      "bernoulli_query(Tensor q, *, int draws, bool shared=True, int kv_heads, Tensor seed, Tensor position, "
      "int layer=0, int head_offset=0) -> Tensor");
  m.def(
      "score(Tensor q, Tensor k, *, float? scale=None, Tensor? mask=None, Tensor? seq_lens=None, "
      "float? softcap=None, Tensor? key_blocks=None, Tensor? block_rows=None, bool sparse_query=False) "
      "-> (Tensor scores, Tensor maxima)");
  m.def("weigh(Tensor scores, Tensor maxima) -> Tensor weights");
  m.def(
      "draw(Tensor weights, *, int samples, str method=\"shared\", int kv_heads, Tensor seed, Tensor position, "
      "int layer=0, int head_offset=0, Tensor? row_mass=None) -> (Tensor rows, Tensor counts, Tensor num_rows)");
  m.def("gather(Tensor rows, Tensor coefficients, Tensor num_rows, Tensor v) -> Tensor out");

  // Appends the first num_rows[b] (all, without it) of the rows k [B, Hkv, n, D] to each sequence of a sketch:
  // key_blocks [B, Hkv, capacity, D, 64], open_rows [B, Hkv, 64, D], block_rows int64 [B].
  m.def(
      "sketch_append(Tensor(a!) key_blocks, Tensor(b!) open_rows, Tensor(c!) block_rows, Tensor k, *, "
      "Tensor? num_rows=None) -> ()");

  // Reads a contiguous CPU tensor once, as fast as this machine reads memory, and returns the xor of its 64-bit
  // words: the floor that benchmarks measure against.
  m.def("read_through(Tensor x) -> int");

  // Asks the system for huge pages under a contiguous CPU tensor that is not written yet. A hint about its memory,
  // not a change of its values: a graph may drop it. The memory keeps the advice after the tensor is freed.
  m.def("prefer_huge_pages(Tensor x) -> ()");

  // Switches the timing of the CPU backend's stages on or off and returns the seconds spent in each since the last
  // call, summed over threads: "score=1.2e-3 softmax=...".
  m.def("time_stages(bool on) -> str");

  // The instruction-set level of the CPU kernels: "generic", "avx2", "avx512" or "amx".
  m.def("cpu_level() -> str");
  m.def("set_cpu_level(str level) -> ()");

  // What the CUDA kernels were compiled with; implemented where the CUDA library is loaded.
  m.def("cuda_info() -> str");
}
