// Shared by all CUDA bindings: device and stream of the tensors, and launcher errors as exceptions.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "../../cuda/launchers.h"
#include "../tensors.h"

// Exists only in a torch with CUDA. Weak, so that the library also loads without, where no tensor reaches this code.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace megads::bindings {

// Device guard for the device of the tensors; kernels are launched on torch's current stream there.
class Launch {
 public:
  explicit Launch(const Tensor& x) : guard_(index_of(x)) {
    require(aoti_torch_get_current_cuda_stream != nullptr,
            "the CUDA kernels were built beside a torch without CUDA: remove them, and they are built anew");
    void* stream = nullptr;
    // STABLE_TORCH_ERROR_CODE_CHECK requires torch 2.13.
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_of(x), &stream));
    stream_ = reinterpret_cast<int64_t>(stream);
  }

  // Calls launcher(arguments..., stream); throws if it returns an error.
  template <typename... Parameters, typename... Arguments>
  void operator()(int (*launcher)(Parameters...), const Arguments&... arguments) const {
    const int error = launcher(arguments..., stream_);
    STD_TORCH_CHECK(error == 0, "megads: a CUDA kernel could not be started: ", megads_cuda_error(error), " (error ",
                    error, ")");
  }

 private:
  static int32_t index_of(const Tensor& x) {
    require(x.is_cuda(), "the CUDA kernels take tensors on a GPU, and were called with one that is not");
    return int32_t(x.get_device_index());
  }

  torch::stable::accelerator::DeviceGuard guard_;
  int64_t stream_ = 0;
};

inline int64_t number_of_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return MEGADS_FP32;
    case ScalarType::BFloat16: return MEGADS_BF16;
    case ScalarType::Half: return MEGADS_FP16;
    default: require(false, "the CUDA kernels take fp32, bf16 and fp16 tensors only");
  }
  return -1;
}

// Checks that all tensors are contiguous and on the device of the first.
inline void require_together(std::initializer_list<const Tensor*> tensors) {
  const Tensor* first = *tensors.begin();
  for (const Tensor* x : tensors)
    require(x->is_contiguous() && x->get_device() == first->get_device(),
            "tensors must be contiguous and on one device");
}

// Checks the arguments of a dropout mask; `require_together` checks the device.
inline void require_mask(const Tensor& samples, int64_t batch, int64_t threshold) {
  require(samples.scalar_type() == ScalarType::Long && samples.numel() == batch, "samples must be int64 [batch]");
  require(threshold >= 0 && threshold < 65536, "the threshold of dropout must be in 0..65535");
}

inline void* data(const Tensor& x) { return x.mutable_data_ptr(); }
inline void* data(const std::optional<Tensor>& x) { return x ? x->mutable_data_ptr() : nullptr; }

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, std::vector<int64_t>(sizes));
}

}  // namespace megads::bindings
