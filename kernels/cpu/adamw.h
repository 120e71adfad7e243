// AdamW (Loshchilov and Hutter 2019) with decoupled weight decay, over a range of the flat optimizer state.
#pragma once

#include "vector.h"

namespace megads {

// Constants of one step, the same for all elements.
struct AdamWFactors {
  float clip;             // gradient scale
  float decay;            // learning rate times weight decay
  float rest1;            // 1 - beta1
  float beta2, rest2;     // beta2 and 1 - beta2
  float step_size;        // learning rate / (1 - beta1^step)
  float root_correction;  // sqrt(1 - beta2^step)
  float eps;
};

// Updates elements first..last-1 of the fp32 master weights and moments, and rounds the master weights to `weights`.
template <typename T>
void adamw(const float* grad, float* master, float* exp_avg, float* exp_avg_sq, T* weights, const AdamWFactors& factors,
           int64_t first, int64_t last);

}  // namespace megads
