// Copies to shared memory that go on beside a thread's work; see cuda_runtime.h. Here they arrive when they are waited
// for, so that who reads too early reads what was there before.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

namespace shim {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Of the thread that runs: groups of copies that are on their way, and those that no group has yet.
struct Pipeline {
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

Pipeline& pipeline();

}  // namespace shim

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  shim::pipeline().open.push_back({to, from, bytes});
}

inline void __pipeline_commit() {
  auto& here = shim::pipeline();
  here.groups.push_back(std::move(here.open));
  here.open.clear();
}

inline void __pipeline_wait_prior(size_t still_under_way) {
  auto& groups = shim::pipeline().groups;
  for (; groups.size() > still_under_way; groups.pop_front())
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}
