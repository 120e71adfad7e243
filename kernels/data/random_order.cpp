// Random permutation of more documents than fit in memory: each document has a random key, and sorting by key gives the
// order.
//
// Keys come from NumPy's PCG64, which can jump to any position, so no key is stored: every pass generates all of them
// again and keeps those in its range. Threads generate different parts and sort different buckets.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

typedef unsigned __int128 Wide;

constexpr Wide kMultiplier = (static_cast<Wide>(0x2360ED051FC65DA4) << 64) | 0x4385DF649FCCF645;
constexpr uint32_t kTooLong = UINT32_MAX;
constexpr int kMaxDigitBits = 12;

// PCG64 (XSL-RR 128/64), identical to numpy.random.PCG64.
struct Generator {
  Wide state, increment;

  // `words`: high and low half of the state, then of the increment.
  explicit Generator(const uint64_t* words)
      : state((static_cast<Wide>(words[0]) << 64) | words[1]), increment((static_cast<Wide>(words[2]) << 64) | words[3]) {}

  uint64_t next() {
    state = state * kMultiplier + increment;
    const uint64_t high = static_cast<uint64_t>(state >> 64), low = static_cast<uint64_t>(state);
    return std::rotr(high ^ low, static_cast<int>(high >> 58));
  }

  void advance(uint64_t steps) {
    Wide factor = 1, sum = 0, factor_of_steps = kMultiplier, sum_of_steps = increment;
    for (; steps; steps >>= 1) {
      if (steps & 1) {
        factor *= factor_of_steps;
        sum = sum * factor_of_steps + sum_of_steps;
      }
      sum_of_steps *= factor_of_steps + 1;
      factor_of_steps *= factor_of_steps;
    }
    state = state * factor + sum;
  }
};

// One item of the permutation. `size` is in tokens, kTooLong if it does not fit.
struct Entry {
  uint64_t key;
  uint32_t item;
  uint32_t size;
};

bool comes_before(const Entry& a, const Entry& b) { return a.key != b.key ? a.key < b.key : a.item < b.item; }

template <typename Work>
void in_threads(int threads, Work work) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
}

// A thread's range of items, and the generator advanced to its start.
struct Part {
  int64_t begin, end;
  Generator generator;

  Part(const uint64_t* words, int64_t count, int thread, int threads)
      : begin(count / threads * thread + std::min<int64_t>(count % threads, thread)),
        end(begin + count / threads + (thread < count % threads)),
        generator(words) {
    generator.advance(begin);
  }
};

int64_t load(const char* values, int64_t place) {
  // Arrays in .idx files are not aligned.
  int64_t value;
  std::memcpy(&value, values + 8 * place, sizeof value);
  return value;
}

}  // namespace

// Document boundaries of an indexed dataset.
struct MegadsDocuments {
  const char* document_index;  // starts with the entry of the first item
  const char* offsets;
  int64_t sequences, tokens, token_bytes;

  int64_t start(int64_t item) const {
    const int64_t sequence = load(document_index, item);
    return sequence == sequences ? tokens : load(offsets, sequence) / token_bytes;
  }
};

// Counts keys by their leading bits.
//   generator: 4 words, see Generator.
//   counts: [threads, 2^bits], one row per thread's range; output.
extern "C" void megads_count_keys(const uint64_t* generator, int64_t count, int bits, int threads, int64_t* counts) {
  in_threads(threads, [=](int thread) {
    Part part(generator, count, thread, threads);
    std::vector<int64_t> found(size_t{1} << bits);
    for (int64_t item = part.begin; item < part.end; ++item) ++found[part.generator.next() >> (64 - bits)];
    std::copy(found.begin(), found.end(), counts + (static_cast<int64_t>(thread) << bits));
  });
}

// Sorts the items whose keys have their leading bits in [first, end).
//   counts: output of megads_count_keys for the same generator, count, bits and threads.
//   documents: source of the entries' sizes; null: sizes are 0.
//   entries: [sum of the counts in that range], in sorted order; output.
extern "C" void megads_sort_items(const uint64_t* generator, int64_t count, int bits, int threads, const int64_t* counts,
                                  int64_t first, int64_t end, const MegadsDocuments* documents, Entry* entries) {
  const int64_t buckets = end - first;
  std::vector<int64_t> begins(buckets + 1);
  std::vector<std::vector<int64_t>> next(threads, std::vector<int64_t>(buckets));
  for (int64_t bucket = 0, place = 0; bucket < buckets; ++bucket) {
    begins[bucket] = place;
    for (int thread = 0; thread < threads; ++thread) {
      next[thread][bucket] = place;
      place += counts[(static_cast<int64_t>(thread) << bits) + first + bucket];
    }
    begins[bucket + 1] = place;
  }
  in_threads(threads, [&](int thread) {
    Part part(generator, count, thread, threads);
    int64_t* places = next[thread].data();
    for (int64_t item = part.begin; item < part.end; ++item) {
      const uint64_t key = part.generator.next();
      const uint64_t bucket = (key >> (64 - bits)) - static_cast<uint64_t>(first);
      if (bucket >= static_cast<uint64_t>(buckets)) continue;
      uint32_t size = 0;
      if (documents) {
        const int64_t tokens = documents->start(item + 1) - documents->start(item);
        size = tokens < kTooLong ? static_cast<uint32_t>(tokens) : kTooLong;
      }
      entries[places[bucket]++] = Entry{key, static_cast<uint32_t>(item), size};
    }
  });
  std::atomic<int64_t> next_bucket{0};
  in_threads(threads, [&](int) {
    std::vector<Entry> scratch;
    std::vector<int64_t> places;
    for (int64_t bucket; (bucket = next_bucket++) < buckets;) {
      Entry* const from = entries + begins[bucket];
      const int64_t size = begins[bucket + 1] - begins[bucket];
      // One radix pass with a digit that leaves few entries per value, then insertion sort.
      const int digit = std::min<int>(kMaxDigitBits, std::bit_width(static_cast<uint64_t>(size) / 2));
      if (digit) {
        const auto digit_of = [=](const Entry& entry) { return (entry.key << bits) >> (64 - digit); };
        places.assign((size_t{1} << digit) + 1, 0);
        for (int64_t i = 0; i < size; ++i) ++places[digit_of(from[i]) + 1];
        for (size_t i = 1; i < places.size(); ++i) places[i] += places[i - 1];
        scratch.assign(from, from + size);
        for (const Entry& entry : scratch) from[places[digit_of(entry)]++] = entry;
      }
      for (int64_t i = 1; i < size; ++i) {
        const Entry entry = from[i];
        int64_t place = i;
        for (; place > 0 && comes_before(entry, from[place - 1]); --place) from[place] = from[place - 1];
        from[place] = entry;
      }
    }
  });
}
