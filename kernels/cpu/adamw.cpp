#include "adamw.h"

#include <cmath>

#include "denormals.h"

namespace megads {
namespace {

Floats root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#else
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = std::sqrt(x[lane]);
  return x;
#endif
}

struct State {
  Floats master, exp_avg, exp_avg_sq;
};

// Same operations in the same order as torch.optim.AdamW(fused=True).
State updated(State old, Floats grad, const AdamWFactors& f) {
  grad = grad * f.clip;
  State now;
  now.exp_avg = old.exp_avg + f.rest1 * (grad - old.exp_avg);
  now.exp_avg_sq = f.beta2 * old.exp_avg_sq + f.rest2 * (grad * grad);
  const Floats decayed = old.master - old.master * f.decay;
  now.master = decayed - f.step_size * now.exp_avg / (root(now.exp_avg_sq) / f.root_correction + f.eps);
  return now;
}

}  // namespace

template <typename T>
void adamw(const float* grad, float* master, float* exp_avg, float* exp_avg_sq, T* weights, const AdamWFactors& factors,
           int64_t first, int64_t last) {
  const FlushDenormals flush;
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    const State now = updated({load(master + i), load(exp_avg + i), load(exp_avg_sq + i)}, load(grad + i), factors);
    store(master + i, now.master);
    store(exp_avg + i, now.exp_avg);
    store(exp_avg_sq + i, now.exp_avg_sq);
    store(weights + i, now.master);
  }
  const int64_t rest = last - i;
  if (rest == 0) return;
  const State old = {load_some(master + i, rest, 0.0f), load_some(exp_avg + i, rest, 0.0f),
                     load_some(exp_avg_sq + i, rest, 0.0f)};
  const State now = updated(old, load_some(grad + i, rest, 0.0f), factors);
  store_some(master + i, now.master, rest);
  store_some(exp_avg + i, now.exp_avg, rest);
  store_some(exp_avg_sq + i, now.exp_avg_sq, rest);
  store_some(weights + i, now.master, rest);
}

template void adamw<float>(const float*, float*, float*, float*, float*, const AdamWFactors&, int64_t, int64_t);
template void adamw<BFloat16>(const float*, float*, float*, float*, BFloat16*, const AdamWFactors&, int64_t, int64_t);

}  // namespace megads
