// What a level asks of memory ahead of its use. No include guard: see kernels-inl.h.

constexpr int64_t kLineBytes = 64;

// Into the first-level cache, and into the second. In a function of their own that does nothing else they need
// always_inline around them: GCC takes such a function for one without effect and drops its calls.
inline void prefetch_near(const char* line) { __builtin_prefetch(line, 0, 3); }
inline void prefetch_far(const char* line) { __builtin_prefetch(line, 0, 2); }

// Rows of row_length numbers that span at least so many bytes.
template <class T>
inline int64_t rows_spanning(int64_t bytes, int64_t row_length) {
  return 1 + (bytes - 1) / (row_length * static_cast<int64_t>(sizeof(T)));
}
