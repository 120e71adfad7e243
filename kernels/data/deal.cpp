// Megatron-LM's greedy blending: each sample goes to the dataset that is furthest behind its share, on ties to the
// first.
//
// Each choice depends on the rounding of all previous ones, so the arithmetic matches Megatron's operation by
// operation. Compile with -ffp-contract=off: a fused multiply-add rounds once where Megatron rounds twice.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 4;
// SIMD vector; both g++ and clang++ compile it for processors with and without such registers.
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

constexpr double kNever = std::numeric_limits<double>::infinity();

double due_at(int64_t sample) { return static_cast<double>(std::max<int64_t>(sample, 1)); }

// kDatasets is a compile-time constant, so that everything stays in registers.
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

// Largest lag of each lane so far, and the first dataset that has it.
struct Most {
  Lanes lag, dataset;

  void meet(Lanes other, Lanes number) {
    dataset = other > lag ? number : dataset;
    lag = other > lag ? other : lag;
  }
};

// First dataset with the largest lag over all lanes.
int64_t first_of_most(const Most& a, const Most& b) {
  const Lanes lags = a.lag > b.lag ? a.lag : b.lag;
  const double most = std::max(std::max(lags[0], lags[1]), std::max(lags[2], lags[3]));
  const Lanes of_a = a.lag == most ? a.dataset : Lanes{} + kNever, of_b = b.lag == most ? b.dataset : Lanes{} + kNever;
  const Lanes first = of_a < of_b ? of_a : of_b;
  return static_cast<int64_t>(std::min(std::min(first[0], first[1]), std::min(first[2], first[3])));
}

// kVectors: number of vectors that hold all datasets if it is a compile-time constant, so that they stay in registers;
// else 0.
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
    // Two independent dependency chains.
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

// Assigns `samples` samples, starting with number `first`, to datasets.
//   shares: share of each dataset, [datasets]; sum to 1.
//   had: samples assigned to each dataset so far, [datasets]; updated in place.
//   dealt: dataset of each sample, [samples]; output.
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
  // Padding lanes start with an infinite count, so that they are never chosen.
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
