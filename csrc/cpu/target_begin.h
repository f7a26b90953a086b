// No include guard. Opens the region of a level: everything after it is compiled for SANTA_TARGET, so a file must
// include the standard library, which other levels share, before. The region lasts to the end of the file,
// since templates are instantiated there.
#define SANTA_PRAGMA_TEXT(x) _Pragma(#x)
#define SANTA_PRAGMA(x) SANTA_PRAGMA_TEXT(x)
#if defined(__clang__)
SANTA_PRAGMA(clang attribute push(__attribute__((target(SANTA_TARGET))), apply_to = function))
#else
SANTA_PRAGMA(GCC target(SANTA_TARGET))
#endif
