// Megatron-LM's greedy blend: each sample goes to the dataset that lags most, the first of equals.
//
// Every choice depends on the rounding of all before it, so the arithmetic is Megatron's, operation by operation: compile
// with -ffp-contract=off, as a fused multiply-add rounds once where Megatron rounds twice.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 4;
// One vector of lanes; both g++ and clang++ compile it for processors with and without such registers.
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

constexpr double kNever = std::numeric_limits<double>::infinity();

double due_at(int64_t sample) { return static_cast<double>(std::max<int64_t>(sample, 1)); }

// kDatasets is known to the compiler, which keeps all in registers.
template <int kDatasets>
void deal_few(const double* shares, double* had, int64_t first, int64_t samples, int16_t* dealt) {
  double share[kDatasets], count[kDatasets];
  std::copy_n(shares, kDatasets, share);
  std::copy_n(had, kDatasets, count);
  for (int64_t i = 0; i < samples; ++i) {
    const double due = due_at(first + i);
    double most = share[0] * due - count[0];
    int chosen = 0;
    for (int dataset = 1; dataset < kDatasets; ++dataset) {
      const double lag = share[dataset] * due - count[dataset];
      chosen = lag > most ? dataset : chosen;
      most = lag > most ? lag : most;
    }
    dealt[i] = static_cast<int16_t>(chosen);
    for (int dataset = 0; dataset < kDatasets; ++dataset) count[dataset] += dataset == chosen ? 1.0 : 0.0;
  }
  std::copy_n(count, kDatasets, had);
}

// The largest lag that each lane has met, and the dataset that it met it at first.
struct Most {
  Lanes lag, dataset;

  void meet(Lanes other, Lanes number) {
    dataset = other > lag ? number : dataset;
    lag = other > lag ? other : lag;
  }
};

// The first dataset of the largest lag of all lanes.
int64_t first_of_most(const Most& a, const Most& b) {
  const Lanes lags = a.lag > b.lag ? a.lag : b.lag;
  const double most = std::max(std::max(lags[0], lags[1]), std::max(lags[2], lags[3]));
  const Lanes of_a = a.lag == most ? a.dataset : Lanes{} + kNever, of_b = b.lag == most ? b.dataset : Lanes{} + kNever;
  const Lanes first = of_a < of_b ? of_a : of_b;
  return static_cast<int64_t>(std::min(std::min(first[0], first[1]), std::min(first[2], first[3])));
}

// kVectors is how many vectors hold all datasets, where the compiler knows it and keeps all in registers; else 0.
template <int kVectors>
void deal_many(int64_t vectors, const Lanes* shares, Lanes* had, int64_t first, int64_t samples, int16_t* dealt) {
  Lanes share[kVectors ? kVectors : 1], count[kVectors ? kVectors : 1];
  if constexpr (kVectors) {
    std::copy_n(shares, kVectors, share);
    std::copy_n(had, kVectors, count);
    shares = share;
  }
  const int64_t all = kVectors ? kVectors : vectors;
  const Lanes lane = {0, 1, 2, 3};
  for (int64_t i = 0; i < samples; ++i) {
    const double due = due_at(first + i);
    const Lanes* counts = kVectors ? count : had;
    // Two, so that one need not wait for the other.
    Most even{shares[0] * due - counts[0], lane}, odd = even;
    Lanes number = lane;
    int64_t v = 1;
    for (; v + 1 < all; v += 2) {
      odd.meet(shares[v] * due - counts[v], number += kLanes);
      even.meet(shares[v + 1] * due - counts[v + 1], number += kLanes);
    }
    if (v < all) odd.meet(shares[v] * due - counts[v], number += kLanes);
    const int64_t chosen = first_of_most(even, odd);
    dealt[i] = static_cast<int16_t>(chosen);
    if constexpr (kVectors) {
      const double taken = static_cast<double>(chosen);
      for (int k = 0; k < kVectors; ++k) count[k] += lane + k * kLanes == taken ? Lanes{} + 1.0 : Lanes{};
    } else {
      had[chosen / kLanes][chosen % kLanes] += 1.0;
    }
  }
  if constexpr (kVectors) std::copy_n(count, kVectors, had);
}

}  // namespace

// Deals `samples` samples from number `first` on.
//   shares: [datasets], sum to 1.
//   had: [datasets], samples that each dataset has had before; counted on.
//   dealt: [samples], the dataset of each.
extern "C" void megads_deal(const double* shares, double* had, int64_t datasets, int64_t first, int64_t samples,
                            int16_t* dealt) {
  switch (datasets) {
    case 1: return deal_few<1>(shares, had, first, samples, dealt);
    case 2: return deal_few<2>(shares, had, first, samples, dealt);
    case 3: return deal_few<3>(shares, had, first, samples, dealt);
    case 4: return deal_few<4>(shares, had, first, samples, dealt);
    case 5: return deal_few<5>(shares, had, first, samples, dealt);
    case 6: return deal_few<6>(shares, had, first, samples, dealt);
  }
  const int64_t vectors = (datasets + kLanes - 1) / kLanes;
  // The lanes beyond the last dataset have had so much that they never lag.
  std::vector<Lanes> share(vectors, Lanes{}), count(vectors, Lanes{} + kNever);
  for (int64_t dataset = 0; dataset < datasets; ++dataset) {
    share[dataset / kLanes][dataset % kLanes] = shares[dataset];
    count[dataset / kLanes][dataset % kLanes] = had[dataset];
  }
  switch (vectors) {
    case 2: deal_many<2>(vectors, share.data(), count.data(), first, samples, dealt); break;
    case 3: deal_many<3>(vectors, share.data(), count.data(), first, samples, dealt); break;
    case 4: deal_many<4>(vectors, share.data(), count.data(), first, samples, dealt); break;
    default: deal_many<0>(vectors, share.data(), count.data(), first, samples, dealt);
  }
  for (int64_t dataset = 0; dataset < datasets; ++dataset) had[dataset] = count[dataset / kLanes][dataset % kLanes];
}
