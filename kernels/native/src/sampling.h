// Sampling of tokens: top-k, top-p, min-p and the draw, as defined in kernels/sampling.py.
#pragma once

#include "levels.h"

namespace quire {

// Arguments, one entry per row; the layout equals that of the ctypes structure in kernels/native/structures.py.
struct Sampling {
  const float* logits;  // [rows][stride]
  int64_t rows, stride, vocab;
  const float* temperature;  // 0: greedy
  const int32_t* top_k;      // null: no row truncates; 0: off
  const float* top_p;        // 1: off
  const float* min_p;        // 0: off
  const int64_t* seed;
  const int32_t* choice;
  const int32_t* position;
  int64_t* tokens;  // the result, from 0; -1 if no logit can be chosen
  int64_t first;    // vocabulary index of the first logit, a multiple of 32
  float* sums;      // the logit, or score and noise, of each token; null: not needed
};

void sample_rows(const Kernels& kernels, const Sampling& sampling);

}  // namespace quire
