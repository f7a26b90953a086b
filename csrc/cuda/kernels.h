#pragma once

#include "step.h"

// What the torch side launches. `stream` is a cudaStream_t. Errors are std::runtime_error.
namespace santa::cuda {

// The stochastic query, step.query, and how many features it uses.
void bernoulli(const Step& step, void* stream);

// Appends rows to a sketch. `access`: bytes that every row of k and every open row can be read in at once.
void sketch_append(const AppendParams& params, int access, bool overlap, void* stream);

// Scores of every row, the largest of each chunk, and which rows are attended.
void score(const Step& step, void* stream);
// The largest score of each head: stage "score" alone.
void finish_maxima(const Step& step, void* stream);

// Partial outputs of every chunk, and their merge.
void dense(const Step& step, void* stream);
void merge(const Step& step, void* stream);

// Where weights come from: scores; scores and their maxima, as stage "weigh" gets them; integers, as "draw" does.
enum class Source : uint8_t { kScores, kScoresAndMaxima, kWeights };
void weigh(const Step& step, Source source, void* stream);
void include(const Step& step, void* stream);
void draw(const Step& step, void* stream);
// Output in the dtype of V, or in fp32.
void gather(const Step& step, bool fp32, void* stream);

}  // namespace santa::cuda
