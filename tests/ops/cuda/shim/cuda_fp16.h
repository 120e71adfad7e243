// fp16 for the CPU; see cuda_runtime.h.
#pragma once

typedef _Float16 __half;

inline float __half2float(__half x) { return float(x); }
inline __half __float2half_rn(float x) { return __half(x); }
