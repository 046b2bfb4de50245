// A decoder of the Llama family, and one step of it, in the C ABI. The layout of these structures equals that of the
// ctypes structures in kernels/native/structures.py.
#pragma once

#include "levels.h"

namespace quire {

// Experts of a layer (Shazeer et al., 2017). A token is computed by the `top_k` experts with the largest logits of the
// router; its output is the sum of theirs, each times its probability.
struct Mixture {
  Linear router;          // an output per expert
  const Linear* gate_up;  // [experts], as in Layer
  const Linear* down;     // [experts]
  Linear shared_gate;     // one output: the logit of the shared expert's weight; not used without a shared expert
  int64_t top_k;
  int64_t renormalise;  // not 0: the weights of a token's experts are divided by their sum
};

struct Layer {
  const float* input_norm;  // [hidden]
  const float* mlp_norm;    // [hidden]
  const float* query_norm;  // [head_dim], or null
  const float* key_norm;    // [head_dim], or null
  Linear qkv;               // rows: query heads, key heads, value heads
  Linear output;
  Linear gate_up;  // rows: gate, then up; in a mixture those of the shared expert, without outputs if there is none
  Linear down;
  const Mixture* mixture;  // null: every token is computed by `gate_up` and `down`
  int64_t sliding_window;  // 0: none
};

// Adds up `count` floats over all ranks, in place; returns 0, or another number if that failed.
using Reduce = int32_t (*)(float* data, int64_t count);

// Of a rank that computes a part of each layer (tensor parallelism), the heads, the MLP and the vocabulary are its part.
struct Decoder {
  int64_t num_layers;
  const Layer* layers;
  Linear head;
  const float* final_norm;   // [hidden]
  const void* embedding;     // plain [vocab][hidden] in `embedding_format`; null: the rows of `head`
  int64_t embedding_format;  // kFloat32 or kBFloat16; kParts: `embedding` is a Linear whose rows are unpacked
  int64_t hidden, num_heads, num_kv_heads, head_dim;
  const float* cos;  // [positions][rotary_half]
  const float* sin;
  int64_t rotary_half;
  int64_t cache_format;  // kFloat32, kBFloat16, kInt8, kFp8 or kInt4
  int64_t block_size;
  float eps;
  float scale;
  Reduce reduce;        // null: there is one rank
  int64_t rank;         // 0 also adds what is not divided: the residual stream and the biases
  int64_t first_token;  // token of the first row of `embedding` and `head`
};

// T tokens of R rows, decode rows and chunks; see worker_svc/model/base.py.
struct Step {
  int64_t num_tokens, num_rows;
  int64_t num_kept;                // tokens to compute the last layer's output for
  int64_t num_logits;              // the first of these: tokens to compute logits for
  const int64_t* token_ids;        // [T]
  const int64_t* positions;        // [T]
  const int64_t* slots;            // [T]; negative: not written
  const int32_t* block_tables;     // [R][table_stride]
  int64_t table_stride;
  const int64_t* groups;           // [layers]: KV group of each layer, or null: every layer uses the places above
  const int64_t* window_slots;     // [groups - 1][T]: those of the groups after the first
  const int32_t* window_tables;    // [groups - 1][R][table_stride]
  const int32_t* query_start;      // [R + 1]
  const int32_t* context_lens;     // [R]
  const void* const* k_caches;     // [layers] of [blocks][kv_heads][block_size][head_dim]
  const void* const* v_caches;
  const int64_t* kept_index;       // [num_kept], or null: every token
  float* logits;                   // [num_logits][vocab]
  float* hidden;                   // [num_kept - num_logits][hidden]: the last hidden states of the others
};

// Phases of a step for the time measurement.
enum Phase : int { kEmbed, kNorm, kQkv, kRotate, kAttend, kOutput, kRoute, kGateUp, kActivate, kDown, kHead, kNumPhases };

// Runs the step; returns false, with no result, if `reduce` failed. Adds the times to nanoseconds[phase] if it is not
// null.
bool run_decoder(const Kernels& kernels, const Decoder& decoder, const Step& step, int64_t* nanoseconds);

}  // namespace quire
