// Runs kernels on the CPU, thread by thread, and finds what a GPU would pass over in silence:
//   threads of a block that wait at different places, or have ended, when others wait at a barrier or for their lanes;
//   shared memory that is read before it is written: it is full of NaN when a block starts;
//   a missing barrier: warps run ahead of each other, in an order that the caller chooses, as do blocks;
//   accesses outside a buffer: it lies against a page that may not be touched, the margin on its other side is full of
//   NaN and looked at afterwards, and inputs may not be written;
//   misaligned accesses and other undefined behaviour, where the compiler was told to trap it.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "cuda_pipeline_primitives.h"
#include "cuda_runtime.h"

constexpr size_t kWithoutAsking = 48 * 1024, kSharedBytes = 227 * 1024;  // what a block may have
constexpr size_t kMarginBytes = 4096;
alignas(16) unsigned char megads_shared[kSharedBytes + kMarginBytes];

namespace shim {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kWarp = 32;
constexpr int kPoison = 0xff;  // as fp64, fp32, fp16 or bf16 it is NaN

enum class State { ready, at_barrier, among_lanes, ended };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state;
  unsigned number, line, mask, source;
  uint64_t value;
  Pipeline pipeline;
};

std::vector<Fiber> fibers;
Fiber* current = nullptr;
ucontext_t scheduler;
const std::function<void()>* body = nullptr;
std::string problem;
size_t asked_for = 0;  // shared memory of the next launch
int order = 0;  // 0 forwards, 1 backwards, else the seed of a shuffle
unsigned last_blocks = 0;  // how many are run, the last ones of a grid; 0: all
sigjmp_buf escape;
volatile sig_atomic_t caught = 0;
void* volatile touched = nullptr;

std::string thread_name(unsigned number) {
  return "thread " + std::to_string(number) + " of block " + std::to_string(blockIdx.x) + "," +
         std::to_string(blockIdx.y);
}

const char* waits(State state) {
  switch (state) {
    case State::at_barrier: return "waits at the barrier in line ";
    case State::among_lanes: return "waits for its lanes in line ";
    case State::ended: return "has ended; its last line was ";
    default: return "runs after line ";
  }
}

void leave(State state, unsigned line) {
  current->state = state;
  current->line = line;
  swapcontext(&current->context, &scheduler);
}

void start_of_fiber() {
  (*body)();
  leave(State::ended, current->line);
}

void enter(Fiber& fiber) {
  current = &fiber;
  threadIdx = {fiber.number, 0, 0};
  fiber.state = State::ready;
  swapcontext(&scheduler, &fiber.context);
}

std::vector<unsigned> numbers(unsigned count, std::mt19937& shuffle) {
  std::vector<unsigned> found(count);
  for (unsigned i = 0; i < count; ++i) found[i] = order == 1 ? count - 1 - i : i;
  if (order > 1) std::shuffle(found.begin(), found.end(), shuffle);
  return found;
}

bool all_at(State state, unsigned line) {
  for (const Fiber& fiber : fibers)
    if (fiber.state != state || fiber.line != line) return false;
  return true;
}

// Lets go the lanes of the warp of `fiber` if all that it waits for are there, each with what its source brought.
bool exchange_values(Fiber& fiber) {
  const unsigned base = fiber.number / kWarp * kWarp;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(fiber.mask >> lane & 1u)) continue;
    if (base + lane >= fibers.size()) return false;
    const Fiber& other = fibers[base + lane];
    if (other.state != State::among_lanes || other.line != fiber.line || other.mask != fiber.mask) return false;
  }
  uint64_t brought[kWarp];
  for (unsigned lane = 0; lane < kWarp; ++lane)
    brought[lane] = fiber.mask >> lane & 1u ? fibers[base + lane].value : ~uint64_t(0);
  const unsigned mask = fiber.mask;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    Fiber& other = fibers[base + lane];
    other.value = other.source < kWarp ? brought[other.source] : ~uint64_t(0);
    other.state = State::ready;
  }
  return true;
}

// Runs what can run of a warp, up to its next exchange; false: nothing can.
bool advance(unsigned warp, std::mt19937& shuffle) {
  bool ran = false;
  const unsigned base = warp * kWarp;
  for (unsigned lane : numbers(std::min(kWarp, unsigned(fibers.size()) - base), shuffle)) {
    if (fibers[base + lane].state != State::ready) continue;
    enter(fibers[base + lane]);
    ran = true;
  }
  for (unsigned number = base; number < std::min(base + kWarp, unsigned(fibers.size())); ++number)
    if (fibers[number].state == State::among_lanes) ran |= exchange_values(fibers[number]);
  return ran;
}

// Runs the threads of a block to their ends; false: `problem` says why they cannot get there. A warp runs as far ahead
// of the others as it can, so that what only luck keeps apart on a GPU collides here.
bool run_threads(std::mt19937& shuffle) {
  while (true) {
    for (unsigned warp : numbers(unsigned(fibers.size() + kWarp - 1) / kWarp, shuffle))
      while (advance(warp, shuffle)) continue;
    const Fiber& first = fibers.front();
    bool ended = true;
    for (const Fiber& fiber : fibers) ended &= fiber.state == State::ended;
    if (ended) return true;
    if (first.state == State::at_barrier && all_at(State::at_barrier, first.line)) {
      for (Fiber& fiber : fibers) fiber.state = State::ready;
      continue;
    }
    for (const Fiber& fiber : fibers) {
      if (fiber.state == first.state && fiber.line == first.line) continue;
      problem = "divergence: " + thread_name(first.number) + " " + waits(first.state) + std::to_string(first.line) +
                ", while thread " + std::to_string(fiber.number) + " " + waits(fiber.state) +
                std::to_string(fiber.line);
      return false;
    }
    problem = "divergence: " + thread_name(first.number) + " waits for lanes that its block has not";
    return false;
  }
}

bool run_block(const cudaLaunchConfig_t& config, std::mt19937& shuffle) {
  std::memset(megads_shared, kPoison, sizeof megads_shared);
  for (unsigned number = 0; number < fibers.size(); ++number) {
    Fiber& fiber = fibers[number];
    fiber.number = number;
    fiber.line = 0;
    fiber.state = State::ready;
    fiber.pipeline = {};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start_of_fiber, 0);
  }
  if (!run_threads(shuffle)) return false;
  for (size_t at = config.dynamicSmemBytes; at < sizeof megads_shared; ++at)
    if (megads_shared[at] != kPoison) {
      problem = "shared memory was written at byte " + std::to_string(at) + " of " +
                std::to_string(config.dynamicSmemBytes) + ", by block " + std::to_string(blockIdx.x);
      return false;
    }
  return true;
}

void on_signal(int number, siginfo_t* information, void*) {
  caught = number;
  touched = information->si_addr;
  siglongjmp(escape, 1);
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};

// Catches what a thread may die of, while it is there.
class Net {
 public:
  Net() : stack_(kStackBytes) {
    const stack_t own{stack_.data(), 0, stack_.size()};
    sigaltstack(&own, &old_stack_);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~Net() {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  std::vector<char> stack_;
  stack_t old_stack_;
  struct sigaction old_[4];
};

bool run_blocks(const cudaLaunchConfig_t& config) {
  std::mt19937 shuffle{unsigned(order)};
  const unsigned columns = config.gridDim.x, total = columns * config.gridDim.y;
  const unsigned count = last_blocks && last_blocks < total ? last_blocks : total;
  if (sigsetjmp(escape, 1)) {
    char where[32];
    std::snprintf(where, sizeof where, "%p", touched);
    problem = thread_name(current->number) + " after line " + std::to_string(current->line) +
              (caught == SIGILL ? ": undefined behaviour, such as a misaligned access, by the instruction at "
                                : ": an access outside its buffers, or a write to an input, at ") + where;
    return false;
  }
  for (unsigned of_count : numbers(count, shuffle)) {
    const unsigned number = total - count + of_count;
    blockIdx = {number % columns, number / columns, 0};
    if (!run_block(config, shuffle)) return false;
  }
  return true;
}

struct Buffer {
  char* pages;
  size_t page_bytes, offset, bytes;
};

std::map<void*, Buffer> buffers;

}  // namespace

void barrier(unsigned line) { leave(State::at_barrier, line); }

uint64_t exchange(unsigned mask, uint64_t value, unsigned source, unsigned line) {
  current->mask = mask;
  current->value = value;
  current->source = source;
  leave(State::among_lanes, line);
  return current->value;
}

unsigned lane() { return current->number % kWarp; }

const char* message() { return problem.c_str(); }

Pipeline& pipeline() { return current->pipeline; }

cudaError_t ask_for_shared(int bytes) {
  if (bytes < 0 || size_t(bytes) > kSharedBytes) return cudaErrorInvalidValue;
  asked_for = size_t(bytes);
  return cudaSuccess;
}

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1 || block.x == 0 || block.x > 1024 || block.y != 1 ||
      block.z != 1 || config.dynamicSmemBytes > std::max(kWithoutAsking, std::exchange(asked_for, 0))) {
    problem = "invalid configuration of a launch";
    return cudaErrorInvalidConfiguration;
  }
  gridDim = grid;
  blockDim = block;
  fibers.resize(block.x);
  for (Fiber& fiber : fibers) fiber.stack.resize(kStackBytes);
  body = &thread;
  const Net net;
  return run_blocks(config) ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace shim

extern "C" const char* shim_message() { return shim::message(); }

extern "C" void shim_set_order(int64_t wanted) { shim::order = int(wanted); }

extern "C" void shim_set_last_blocks(int64_t wanted) { shim::last_blocks = unsigned(wanted); }

// A buffer of poison. Its address is `residue` more than a multiple of 16, as near as that allows to the page behind it
// (at_end) or the page before it, which must not be touched.
extern "C" void* shim_allocate(int64_t bytes, int64_t residue, int64_t at_end) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t inner = (size_t(bytes) + 32 + page - 1) / page * page;
  char* pages = static_cast<char*>(
      mmap(nullptr, inner + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (pages == MAP_FAILED) return nullptr;
  mprotect(pages, page, PROT_NONE);
  mprotect(pages + page + inner, page, PROT_NONE);
  std::memset(pages + page, shim::kPoison, inner);
  size_t offset = size_t(residue);
  if (at_end) offset = (inner - size_t(bytes) - size_t(residue)) / 16 * 16 + size_t(residue);
  void* data = pages + page + offset;
  shim::buffers[data] = {pages + page, inner, offset, size_t(bytes)};
  return data;
}

extern "C" void shim_make_input(void* data) {
  const shim::Buffer& buffer = shim::buffers.at(data);
  mprotect(buffer.pages, buffer.page_bytes, PROT_READ);
}

// Whether nothing was written beside the buffer; it is freed.
extern "C" int64_t shim_free(void* data) {
  const shim::Buffer buffer = shim::buffers.at(data);
  shim::buffers.erase(data);
  bool intact = true;
  for (size_t at = 0; at < buffer.page_bytes; ++at)
    if (at < buffer.offset || at >= buffer.offset + buffer.bytes)
      intact &= static_cast<unsigned char>(buffer.pages[at]) == shim::kPoison;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  munmap(buffer.pages - page, buffer.page_bytes + 2 * page);
  return intact;
}
