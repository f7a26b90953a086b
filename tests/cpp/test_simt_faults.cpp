// Faults of a kernel are seen: each kernel of test_simt_faults.cuh is right in every order, and each planted fault
// is found by what the table says, in the plain build (an order in which the result is wrong, or an error) and
// with the race checker. Prints a line for each.

#include "test_simt_faults.cuh"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "test_simt_checks.h"

namespace santa::simt_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr const char* kWrong = "wrong result";

const char* judge(const std::vector<float>& got, const std::vector<float>& expected) {
  return got == expected ? "" : kWrong;
}

// Numbers whose sums depend on their order.
float number(int i) { return std::sin(static_cast<float>(i)) * 100.0f; }

// Each runs a kernel once under the options in force: "" when its result is right, else what was wrong.
template <Fault kFault>
std::string run_sum_rows() {
  // Two tiles where copies are not waited for, so that none is refilled while in flight: another fault.
  const bool two = kFault == Fault::kNoWait || kFault == Fault::kWaitCount || kFault == Fault::kNoCommit;
  const int blocks = 3, rows = two ? 2 * kTileRows : 10;
  std::vector<float> in((blocks * rows + kTileRows) * kColumns, kNan), out(blocks * kColumns, kNan);
  std::vector<float> expected(out.size());
  for (int i = 0; i < blocks * rows * kColumns; ++i) in[i] = number(i);
  for (int b = 0; b < blocks; ++b) {
    for (int row = 0; row < rows; ++row) {
      for (int c = 0; c < kColumns; ++c) expected[b * kColumns + c] += in[(b * rows + row) * kColumns + c];
    }
  }
  // vectors of floats start where cp.async wants them: at multiples of 16
  const size_t bytes = 2 * kTileRows * kColumns * sizeof(float);
  launch(sum_rows<kFault>,
         {.name = "sum_rows",
          .grid = blocks,
          .block = kColumns,
          .shared_bytes = bytes - (kFault == Fault::kMemoryTooSmall ? sizeof(float) : 0)},
         in.data(), rows, out.data());
  return judge(out, expected);
}

template <Fault kFault>
std::string run_reduce() {
  std::vector<float> in(kReduceThreads), out(2 + kReduceWarps, kNan), expected(out.size());
  for (int i = 0; i < kReduceThreads; ++i) {
    const int quarter = i / 32;
    in[i] = static_cast<float>(i * 37 % 101 - 50 + quarter * 40);
  }
  expected[1] = in[0];
  for (int i = 0; i < kReduceThreads; ++i) {
    expected[0] += in[i];  // of integers, in any order
    expected[1] = std::max(expected[1], in[i]);
    expected[2 + i / kWarpLanes] += in[i] > 0 ? 1.0f : 0.0f;
  }
  launch(reduce<kFault>,
         {.name = "reduce", .grid = 1, .block = kReduceThreads, .shared_bytes = kReduceThreads * sizeof(float)},
         in.data(), out.data());
  return judge(out, expected);
}

template <Fault kFault>
std::string run_merge() {
  const int blocks = kFault == Fault::kOtherBlock ? 2 : 5;
  std::vector<float> in(blocks * kMergeThreads), expected(kMergeThreads);
  for (int i = 0; i < blocks * kMergeThreads; ++i) {
    in[i] = number(i);
    expected[i % kMergeThreads] += 2 * in[i];
  }
  uint32_t counter = 0;
  for (int time = 0; time < 2; ++time) {
    std::vector<float> partial(in.size(), kNan), out(kMergeThreads);
    launch(merge<kFault>, {.name = "merge", .grid = dim3(blocks), .block = kMergeThreads}, in.data(),
           partial.data(), &counter, out.data());
    if (out != expected || counter != 0) return kWrong;
  }
  return "";
}

template <Fault kFault>
std::string run_grids() {
  std::vector<float> x(64), between(64, kNan), out(64, kNan), expected(64);
  for (int i = 0; i < 64; ++i) {
    x[i] = number(i);
    expected[i] = (x[i] + 1) * 2;
  }
  launch(produce<kFault>, {.name = "produce", .grid = 1, .block = 64}, x.data(), between.data());
  launch(consume<kFault>, {.name = "consume", .grid = 1, .block = 64, .overlap = true}, x.data(), between.data(),
         out.data());
  return judge(out, expected);
}

struct Row {
  const char* name;
  std::string (*run)();
  const char* plain;  // in what the plain build says, in some order; null: it cannot see this
  const char* races;  // in what the race checker says
};

#define FAULT(kernel, fault) #fault, run_##kernel<Fault::fault>

const Row kRight[] = {
    {FAULT(sum_rows, kNone), "", ""},
    {FAULT(reduce, kNone), "", ""},
    {FAULT(merge, kNone), "", ""},
    {FAULT(grids, kNone), "", ""},
};

const Row kTable[] = {
    {FAULT(sum_rows, kNoWait), kWrong, "before the wait for a cp.async"},
    {FAULT(sum_rows, kWaitCount), kWrong, "before the wait for a cp.async"},
    {FAULT(sum_rows, kNoCommit), "ends with 2 cp.async", "before the wait for a cp.async"},
    {FAULT(sum_rows, kNoBarrierAfterWait), kWrong, "which nobody has written"},
    {FAULT(sum_rows, kRefillWithoutBarrier), kWrong, "race on byte"},
    {FAULT(sum_rows, kRefillInUse), "another one in flight", "another one in flight"},
    {FAULT(sum_rows, kRowsPastTheEnd), kWrong, kWrong},
    {FAULT(sum_rows, kMisalignedCopy), "not a multiple", "not a multiple"},
    {FAULT(sum_rows, kMemoryTooSmall), "outside every shared object", "outside every shared object"},
    {FAULT(sum_rows, kCopyLeftOver), "ends with 1 cp.async", "ends with 1 cp.async"},
    {FAULT(sum_rows, kSourceOverwritten), kWrong, kWrong},
    {FAULT(reduce, kNoSyncwarp), kWrong, "which nobody has written"},
    {FAULT(reduce, kShuffleForSyncwarp), nullptr, "race on byte"},
    {FAULT(reduce, kNoBarrier), kWrong, "of Scratch, which nobody has written"},
    {FAULT(reduce, kScratchReused), kWrong, "race on byte"},
    {FAULT(reduce, kDivergentBarrier), "__syncthreads at", "race on byte 0 of Scratch"},
    {FAULT(reduce, kTwoBarriers), "while thread", "while thread"},
    {FAULT(reduce, kEarlyExit), "waits in __syncthreads", "waits in __syncthreads"},
    {FAULT(reduce, kShuffleInBranch), "while lanes of the same mask wait in",
     "while lanes of the same mask wait in"},
    {FAULT(reduce, kShuffleAfterExit), "takes no part", "takes no part"},
    {FAULT(reduce, kCallerNotInMask), "leaves out the calling lane", "leaves out the calling lane"},
    {FAULT(reduce, kSourceNotInMask), "reads lane 16 in lane 0", "takes no part"},
    {FAULT(reduce, kTwoShuffles), "while lanes of the same mask wait in", "while lanes of the same mask wait in"},
    {FAULT(reduce, kStaleMemory), kWrong, "of Positive, which nobody has written"},
    {FAULT(reduce, kWritePastObject), "wrote outside of Scratch, 16 bytes", "outside every shared object"},
    {FAULT(reduce, kWriteBeforeObject), "wrote outside of Scratch", "outside every shared object"},
    {FAULT(reduce, kReadPastObject), kWrong, "outside every shared object"},
    {FAULT(reduce, kFarPastDynamic), "outside of shared memory", "outside every shared object"},
    {FAULT(reduce, kOneThreadWrites), kWrong, "race on byte 0 of First"},
    {FAULT(reduce, kWrittenWhileRead), kWrong, "race on byte 0 of Scratch"},
    {FAULT(reduce, kMisalignedVector), "not a multiple", "not a multiple"},
    {FAULT(reduce, kLocalMemory), nullptr, "of the local memory of thread 0"},
    {FAULT(reduce, kMixedAtomic), kWrong, "an atomic by thread"},
    {FAULT(merge, kNoRelease), nullptr, "race on global memory"},
    {FAULT(merge, kNoAcquire), nullptr, "race on global memory"},
    {FAULT(merge, kNoBarrierBeforeTicket), kWrong, "race on global memory"},
    {FAULT(merge, kPlainCounter), nullptr, "race on global memory"},
    {FAULT(merge, kCounterKept), kWrong, kWrong},
    {FAULT(merge, kReadOnlyPath), nullptr, "for what no kernel in flight writes"},
    {FAULT(merge, kOrderOfArrival), kWrong, kWrong},
    {FAULT(merge, kOtherBlock), kWrong, "race on global memory"},
    {FAULT(grids, kNoGridWait), "without having waited for the previous grid", "race on global memory"},
    {FAULT(grids, kReadBeforeGridWait), nullptr, "of the previous grid"},
    {FAULT(grids, kWriteBeforeGridWait), nullptr, "of the previous grid"},
};

// "" when the result is right, else what was wrong.
std::string outcome(const Row& row) {
  std::string said;
  const std::string error = error_of([&] { said = row.run(); });
  return error.empty() ? said : error;
}

std::vector<simt::Options> orders() {
  using simt::Order;
  std::vector<simt::Options> list;
  for (const int resident : {1, 3}) {
    list.push_back({.order = Order::kForward, .resident_blocks = resident});
    list.push_back({.order = Order::kReverse, .resident_blocks = resident});
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      list.push_back({.order = Order::kShuffled, .seed = seed, .resident_blocks = resident});
      list.push_back({.order = Order::kStarving, .seed = seed, .resident_blocks = resident});
    }
  }
  return list;
}

int check_all() {
  int failures = 0;
  for (const Row& row : kRight) {
    for (const simt::Options& order : orders()) {
      simt::options = order;
      const std::string said = outcome(row);
      if (said.empty()) continue;
      std::fprintf(stderr, "a right kernel: %s\n", said.c_str());
      ++failures;
    }
  }
  for (const Row& row : kTable) {
    const char* expected = kRaces ? row.races : row.plain;
    if (expected == nullptr) continue;
    int seen = 0, wrong = 0;
    std::string said, other;
    for (const simt::Options& order : orders()) {
      simt::options = order;
      const std::string now = outcome(row);
      wrong += now.empty() ? 0 : 1;
      if (now.find(expected) != std::string::npos) {
        ++seen;
        said = now;
      } else if (!now.empty()) {
        other = now;
      }
    }
    // Whether there is a race does not depend on who comes first.
    const bool always = kRaces && expected != kWrong;
    if (seen == 0 || (always && wrong < static_cast<int>(orders().size()))) {
      ++failures;
      std::fprintf(stderr, "%s: expected '%s', seen %d times; and: %s\n", row.name, expected, seen, other.c_str());
    } else {
      std::printf("%s\t%d of %zu\t%s\n", row.name, seen, orders().size(), said.c_str());
    }
  }
  return failures;
}

}  // namespace
}  // namespace santa::simt_test

int main() { return santa::simt_test::check_all() == 0 ? 0 : 1; }
