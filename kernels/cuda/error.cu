// Error messages of the launchers.
#include "device.cuh"

extern "C" const char* megads_cuda_error(int64_t error) {
  if (error == MEGADS_TOO_LARGE)
    return "the tensor has more rows or columns than the kernel's indices reach: use ops.impl=torch for it";
  return cudaGetErrorString(cudaError_t(error));
}
