#include "softmax.h"

#include <algorithm>
#include <vector>

#include "denormals.h"
#include "lanes.h"

namespace megads {
namespace {

// Visible keys first..last-1 of one row, and its ALiBi bias.
struct Row {
  int64_t sample, head, place;
  int64_t first, last;
  float slope, distance;  // distance: from the query to key 0

  Row(const MaskedSoftmax& shape, int64_t row) {
    const int64_t query = row % shape.queries;
    sample = row / shape.queries / shape.heads;
    head = row / shape.queries % shape.heads;
    place = shape.places ? shape.places[query] : query;
    const int64_t start = shape.starts ? shape.starts[sample * shape.queries + query] : 0;
    last = std::clamp<int64_t>(place + 1, 0, shape.keys);
    first = std::clamp<int64_t>(start, 0, last);
    slope = shape.slopes ? shape.slopes[head] : 0.0f;
    distance = float(-place);
  }
};

// Prefetch distance in rows. Visible keys end before the next row starts, so the hardware prefetcher is wrong at every
// row.
constexpr int64_t kRowsAhead = 2;

template <typename T>
void clear_hidden(const Row& row, int64_t keys, T* to) {
  std::memset(to, 0, row.first * sizeof(T));
  std::memset(to + row.last, 0, (keys - row.last) * sizeof(T));
}

// Dropout factors of a row; 1 without dropout.
template <bool kDropped>
class Factors {
 public:
  explicit Factors(const MaskedSoftmax& shape) : rows_(shape.dropout), room_(shape.keys + MaskRows::kMore + 2 * kLanes) {}

  void draw(const Row& row) {
    first_ = row.first;
    drawn_ = rows_.draw(row.sample, row.head, row.place, row.first, row.last, room_.data());
  }

  Floats at(int64_t key) const { return rows_.stays(drawn_ + (key - first_)) ? broadcast(rows_.scale()) : Floats{}; }

  template <typename T>
  TwoVectors two_at(int64_t key) const {
    const TwoMasks stays = rows_.two_stay<T>(drawn_ + (key - first_));
    const Floats scale = broadcast(rows_.scale());
    return {stays.first ? scale : Floats{}, stays.second ? scale : Floats{}};
  }

 private:
  MaskRows rows_;
  std::vector<uint16_t> room_;
  int64_t first_ = 0;
  const uint16_t* drawn_ = nullptr;
};

template <>
class Factors<false> {
 public:
  explicit Factors(const MaskedSoftmax&) {}

  void draw(const Row&) const {}
  Floats at(int64_t) const { return broadcast(1.0f); }
};

template <bool kDropped, typename T>
void forward(const MaskedSoftmax& shape, const T* scores, T* out, T* dropped, int64_t first, int64_t last) {
  constexpr int kStep = kEvenAndOdd<T> ? 2 * kLanes : kLanes;
  Factors<kDropped> factors(shape);
  const TwoVectors numbers = element_numbers<T>();
  std::vector<float> kept(shape.keys + kStep);  // a row in fp32, in the order of load_step
  for (int64_t r = first; r < last; ++r) {
    const Row row(shape, r);
    const T* from = scores + r * shape.keys;
    T* to = out + r * shape.keys;
    float* weights = kept.data();
    // Calls body(k, count, room) for every step over the visible keys. room > count: the last step may go on into hidden
    // keys, which are cleared afterwards, as partial vectors are slow.
    const auto for_steps = [&](auto body) __attribute__((always_inline)) {
      int64_t k = row.first;
      for (; k + kStep <= row.last; k += kStep) body(k, kStep, kStep);
      if (k < row.last) body(k, int(row.last - k), int(std::min<int64_t>(shape.keys - k, kStep)));
    };
    Floats peaks = broadcast(-kInfinity);
    for_steps([&](int64_t k, int count, int room) {
      __builtin_prefetch(from + kRowsAhead * shape.keys + k);
      const float distance = float(k) + row.distance;
      const auto keep = [&](float* weight, Floats score, Floats number) {
        score = score * shape.scale + row.slope * (number + distance);
        if (count < kStep) score = number < float(count) ? score : broadcast(-kInfinity);
        store(weight, score);
        peaks = larger(score, peaks);
      };
      if constexpr (kStep == kLanes) {
        keep(weights + k, load_lanes(from + k, room), numbers.first);
      } else {
        const TwoVectors score = load_two_lanes(from + k, room);
        keep(weights + k, score.first, numbers.first);
        keep(weights + k + kLanes, score.second, numbers.second);
      }
    });
    const float peak = largest_of(peaks);
    Floats sums{};
    for_steps([&](int64_t k, int, int) {
      for (int64_t i = k; i < k + kStep; i += kLanes) {
        const Floats weight = exp_for<T>(load(weights + i) - peak);
        store(weights + i, weight);
        sums += weight;
      }
    });
    const float factor = 1.0f / sum_of(sums);
    factors.draw(row);
    for_steps([&](int64_t k, int, int room) {
      __builtin_prefetch(to + shape.keys + k, 1);
      const Floats probability = load(weights + k) * factor;
      if constexpr (kStep == kLanes) {
        store_lanes(to + k, probability, room);
        if constexpr (kDropped) store_lanes(dropped + r * shape.keys + k, probability * factors.at(k), room);
      } else {
        const TwoVectors both = {probability, load(weights + k + kLanes) * factor};
        store_two_lanes(to + k, both, room);
        if constexpr (kDropped) {
          const TwoVectors by = factors.template two_at<T>(k);
          store_two_lanes(dropped + r * shape.keys + k, {both.first * by.first, both.second * by.second}, room);
        }
      }
    });
    clear_hidden(row, shape.keys, to);
    if constexpr (kDropped) clear_hidden(row, shape.keys, dropped + r * shape.keys);
  }
}

template <bool kDropped, typename T>
void backward(const MaskedSoftmax& shape, const T* grad, const T* out, T* grad_scores, T* dropped, int64_t first,
              int64_t last) {
  Factors<kDropped> factors(shape);
  for (int64_t r = first; r < last; ++r) {
    const Row row(shape, r);
    const int64_t at = r * shape.keys;
    factors.draw(row);
    Floats products{};
    for_vectors(row.first, row.last, [&](int64_t k, int count) {
      __builtin_prefetch(grad + at + kRowsAhead * shape.keys + k);
      __builtin_prefetch(out + at + kRowsAhead * shape.keys + k);
      products += load_lanes(grad + at + k, count) * factors.at(k) * load_lanes(out + at + k, count);
    });
    const float product = sum_of(products);
    for_vectors(row.first, row.last, [&](int64_t k, int count) {
      __builtin_prefetch(grad_scores + at + shape.keys + k, 1);
      const Floats factor = factors.at(k), probability = load_lanes(out + at + k, count);
      const Floats away = load_lanes(grad + at + k, count) * factor - product;
      store_lanes(grad_scores + at + k, probability * away * shape.scale, count);
      if constexpr (kDropped) store_lanes(dropped + at + k, probability * factor, count);
    });
    clear_hidden(row, shape.keys, grad_scores + at);
    if constexpr (kDropped) clear_hidden(row, shape.keys, dropped + at);
  }
}

}  // namespace

template <typename T>
void softmax_forward(const MaskedSoftmax& shape, const T* scores, T* out, T* dropped, int64_t first, int64_t last) {
  const auto run = shape.dropout.samples ? forward<true, T> : forward<false, T>;
  const FlushDenormals flush;
  run(shape, scores, out, dropped, first, last);
}

template <typename T>
void softmax_backward(const MaskedSoftmax& shape, const T* grad, const T* out, T* grad_scores, T* dropped,
                      int64_t first, int64_t last) {
  const auto run = shape.dropout.samples ? backward<true, T> : backward<false, T>;
  const FlushDenormals flush;
  run(shape, grad, out, grad_scores, dropped, first, last);
}

#define MEGADS_INSTANTIATE(T)                                                                         \
  template void softmax_forward<T>(const MaskedSoftmax&, const T*, T*, T*, int64_t, int64_t);         \
  template void softmax_backward<T>(const MaskedSoftmax&, const T*, const T*, T*, T*, int64_t, int64_t);
MEGADS_INSTANTIATE(float)
MEGADS_INSTANTIATE(BFloat16)

}  // namespace megads
