// What went wrong, in words.
#include "device.cuh"

extern "C" const char* megads_cuda_error(int64_t error) { return cudaGetErrorString(cudaError_t(error)); }
