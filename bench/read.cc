// The read floor of a CPU: threads that only read, with their work handed out as the kernels' is.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));
constexpr int64_t kTask = 64 << 10;

// Eight independent chains, so that loads do not wait for each other.
Words read(const char* data, int64_t bytes) {
  Words sum[8] = {};
  const int64_t step = sizeof(sum);
  for (int64_t i = 0; i + step <= bytes; i += step)
    for (int j = 0; j < 8; ++j) {
      Words word;
      std::memcpy(&word, data + i + j * sizeof(word), sizeof(word));
      sum[j] |= word;
    }
  for (int j = 1; j < 8; ++j) sum[0] |= sum[j];
  return sum[0];
}

// One read at a time, on all threads; they wait for each other without sleeping.
struct Reads {
  const char* data = nullptr;
  int64_t bytes = 0;
  std::atomic<int64_t> next = 0;
  std::atomic<int> round = 0, finished = 0;
  std::atomic<uint64_t> seen = 0;  // so that the reads are not optimised away

  void work() {
    Words sum = {};
    for (int64_t at; (at = next.fetch_add(kTask)) < bytes;)
      sum |= read(data + at, std::min(kTask, bytes - at));
    seen |= sum[0];
    ++finished;
  }
};

}  // namespace

// Microseconds, the median of `calls` reads of `bytes`, which go through `total` bytes.
extern "C" double jaxgemv_bench_read(const char* data, int64_t total, int64_t bytes, int threads,
                                     int calls) {
  Reads reads;
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i)
    others.emplace_back([&] {
      for (int round = 1; round <= calls; ++round) {
        while (reads.round < round) std::this_thread::yield();
        reads.work();
      }
    });
  std::vector<double> times;
  int64_t at = 0;
  for (int round = 1; round <= calls; ++round, at = at + 2 * bytes > total ? 0 : at + bytes) {
    reads.data = data + at, reads.bytes = bytes;
    reads.next = 0, reads.finished = 0;
    const auto start = std::chrono::steady_clock::now();
    reads.round = round;
    reads.work();
    while (reads.finished < threads) std::this_thread::yield();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    times.push_back(time.count());
  }
  for (std::thread& other : others) other.join();
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[calls / 2];
}
