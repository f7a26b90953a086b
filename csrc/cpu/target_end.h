// No include guard. Closes what target_begin.h opened; GCC's pragma needs no closing at the end of a file.
#if defined(__clang__)
#pragma clang attribute pop
#endif
