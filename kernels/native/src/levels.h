// Table of the kernels that exist once per instruction set ("level").
//
// All levels are compiled from the same templates (kernels.inc) over a small set of vector operations (simd_*.h). The
// AMX level replaces products (linear_tiles.inc, attention_tiles.inc). Rows of floats are contiguous, and their length is
// a multiple of 16 unless documented otherwise.
#pragma once

#include "format.h"

namespace quire {

enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

enum Store : int { kStoreFloat = 0, kAddFloat = 1, kStoreBFloat16 = 2 };

// Rows first .. last by blocks begin .. end of one product.
struct LinearTask {
  const Linear* linear;
  const void* x;        // activations in the level's format, rows `x_stride` bytes apart, padded with zeros to whole steps
  int64_t x_stride;
  const float* x_scales;  // int8 and int4: one per row
  void* out;
  int64_t out_stride;  // elements
  int store;
  int64_t first_row, last_row, begin_block, end_block;
};

// Arguments of paged attention, as defined in kernels/paged_attention. Sizes and strides are in elements.
struct Attention {
  const float* query;  // [tokens][heads][head_dim], unscaled
  int64_t query_stride;
  float* out;  // [tokens][heads][head_dim]
  int64_t out_stride;
  const void* k_cache;  // [blocks][kv_heads][block_size][head_dim]
  const void* v_cache;
  int32_t cache_format;  // kFloat32, kBFloat16, kInt8, kFp8 or kInt4
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  const int32_t* block_tables;  // [rows][table_stride]
  int64_t table_stride;
  const int32_t* query_start;   // [rows + 1]
  const int32_t* context_lens;  // [rows]
  int64_t num_rows;
  float scale;
  float soft_cap;          // 0: none
  int32_t sliding_window;  // 0: none
  const float* sinks;      // [num_heads]: a score that takes a share of the weights and has no value; or null
};

// Arguments of latent attention, as defined in kernels/latent_attention.py. Sizes are in elements.
struct LatentAttention {
  const float* query;  // [tokens][heads][rank + rotary_dim], contiguous, unscaled
  float* out;          // [tokens][heads][rank], contiguous
  const void* latent_cache;  // [blocks][block_size][rank]
  const void* rotary_cache;  // [blocks][block_size][rotary_dim]
  int32_t cache_format;  // as in `Attention`
  int32_t num_heads, rank, rotary_dim, block_size;
  const int32_t* block_tables;  // [rows][table_stride]
  int64_t table_stride;
  const int32_t* query_start;   // [rows + 1]
  const int32_t* context_lens;  // [rows]
  int64_t num_rows;
  float scale;
};

// The keys begin .. end of one row for the heads first_head .. last_head, with room for the result before the division.
struct LatentPart {
  int64_t row, first_head, last_head, begin, end;
  bool few;  // whether the row has few tokens, each of which gets the bits that it would get alone
  float* sums;  // [tokens][heads][rank]: weighted sums of the values, `token_stride` from token to token
  int64_t token_stride;
  float* tops;    // [tokens][heads]: largest score
  float* totals;  // [tokens][heads]: sum of exp(score - top)
};

// Products with a matrix per head, for all tokens: out = x W^T. Strides are in elements.
struct HeadProducts {
  int32_t format;      // kFloat32 or kBFloat16, of the weights
  const void* packed;  // [heads], each packed [outputs][inputs]; both are multiples of 16
  int64_t tokens, heads, outputs, inputs;
  const float* x;
  int64_t x_token_stride, x_head_stride;
  float* out;
  int64_t out_token_stride, out_head_stride;
};

// Arguments of the gated delta rule, as defined in kernels/recurrent.py. Sizes and strides are in elements.
struct DeltaRule {
  const void* query;  // [rows * tokens][key_heads][key_dim]
  const void* key;
  const void* value;  // [rows * tokens][value_heads][value_dim]
  int64_t query_stride, key_stride, value_stride;  // from token to token
  const float* gate;  // [rows * tokens][value_heads], logarithms of the decay
  const float* beta;
  void* out;     // [rows * tokens][value_heads][value_dim]
  float* state;  // [states][value_heads][key_dim][value_dim], updated
  const int64_t* places;  // [rows], of the rows' states; or null: 0, 1, 2 ...
  int32_t format;  // kFloat32 or kBFloat16, of query, key, value and out
  int32_t normalise;  // whether keys and queries are divided by their length
  int64_t rows, tokens, key_heads, value_heads, key_dim, value_dim;
};

// Arguments of the selective scan of Mamba 2, as defined in kernels/recurrent.py. Sizes and strides are in elements.
struct SelectiveScan {
  const void* x;      // [rows * tokens][heads][head_dim]
  const void* write;  // [rows * tokens][groups][state_dim]
  const void* read;
  int64_t x_stride, write_stride, read_stride;  // from token to token
  const float* step;   // [rows * tokens][heads]
  const float* decay;  // [heads]: the state decays by exp(decay * step)
  const float* skip;   // [heads]
  void* out;           // [rows * tokens][heads][head_dim]
  float* state;        // [states][heads][head_dim][state_dim], updated
  const int64_t* places;  // [rows], of the rows' states; or null: 0, 1, 2 ...
  int32_t format;      // kFloat32 or kBFloat16, of x, write and read
  int32_t out_format;
  int64_t rows, tokens, heads, groups, head_dim, state_dim;
};

// Arguments of a causal convolution of one token per row, as defined in kernels/recurrent.py.
struct Convolution {
  const void* x;  // [rows][channels]
  int64_t x_stride;
  const void* weight;  // [channels][width]
  const float* bias;   // [channels]; or null
  void* state;         // [states][channels][width], the newest inputs; updated
  const int64_t* places;  // [rows], of the rows' states; or null: 0, 1, 2 ...
  void* out;           // [rows][channels]
  int32_t format;      // kFloat32 or kBFloat16, of all but the bias
  int32_t silu;
  int64_t rows, channels, width;
};

// Arguments of a causal convolution of many tokens of one row, whose state is part of x.
struct TokenConvolution {
  const void* x;  // [tokens][channels]; tokens before the first count as 0
  int64_t x_stride;
  const float* weight;  // [width][channels], the oldest token's first
  const float* bias;    // [channels]; or null
  void* out;            // [tokens][channels]
  int32_t format;       // kFloat32 or kBFloat16, of x and out
  int32_t silu;
  int64_t tokens, channels, width;
};

// Arguments of RMSNorm, as defined in kernels/norm.py. `dim` is a multiple of 16.
struct Norm {
  const void* x;  // [rows][dim]
  const float* weight;  // [dim]
  void* out;            // [rows][dim]
  float eps;
  int32_t format;        // kFloat32 or kBFloat16, of x and out
  int32_t rounds_twice;  // whether the result is rounded before it is multiplied by the weight
  int64_t rows, dim;
};

// Arguments of a write to the KV cache, as defined in kernels/kv_cache.py. Strides are in bytes.
struct KvWrite {
  const char* key;  // [tokens][heads][key_bytes]
  const char* value;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  char* k_cache;  // [blocks][heads][block_size][key_bytes]
  char* v_cache;
  const int64_t* slots;  // [tokens], distinct; a token with a negative slot is not written
  int64_t tokens, heads, block_size, key_bytes, value_bytes;
};

// Arguments of the draw of one row from a part of its tokens: the largest score + noise, ties to the lowest index.
struct Draw {
  const float* logits;  // of the whole row
  int64_t begin, end;   // range of tokens; `begin` is a multiple of 32
  int64_t first;        // vocabulary index of token 0, a multiple of 32, for the noise
  float temperature;    // a score is a logit divided by it
  uint32_t position, choice;
  uint64_t seed;
  float least;        // lowest score that a token may have
  int64_t last_tie;   // last token that may have exactly that score
  float best;         // largest sum so far; updated
  int64_t token;      // its token; updated
};

struct Weighing {
  float temperature;
  float best;  // score
  float bins_per_nat;
  float last_bin;
};

struct Kernels {
  int level;
  // Bytes of one activation of `linear`, by the format of the weights.
  int activation_bytes[4];
  int max_tile_rows;
  int64_t chunk_bytes;  // of activations per pass over the weights, which stay in the L2 cache
  void (*linear)(const LinearTask&);
  // Converts n floats to activations, with zeros after them up to `padded`; int8 and int4 also set *scale.
  void (*to_activations)(int format, const float* x, int64_t n, int64_t padded, void* out, float* scale);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out[i] = silu(gate_up[i]) * gate_up[n + i]; n need not be a multiple of 16.
  void (*silu_mul)(const float* gate_up, int64_t n, float* out);
  // Rotates one head in place; pairs (i, i + half).
  void (*rotate)(float* head, const float* cos, const float* sin, int64_t half);
  void (*store)(int format, const float* x, int64_t n, void* out);
  void (*load)(int format, const void* x, int64_t n, float* out);  // n: a multiple of 16
  // Loads n elements, and zeros after them up to a multiple of 16.
  void (*load_part)(int format, const void* x, int64_t n, float* out);
  // Quantises n floats, the elements of one head, to the codes and the scales of a KV cache (format.h).
  void (*store_scaled)(int format, const float* x, int64_t n, void* out, void* scales);
  // Returns the index of the largest of n floats, the first of equal ones; *finite: whether it can be chosen.
  int64_t (*argmax)(const float* x, int64_t n, bool* finite);
  // Computes for n logits (a multiple of 16) the scores, the masses exp(score - best), and the bins: (best - score) *
  // bins_per_nat, rounded to the nearest integer, at most last_bin.
  void (*weigh)(const float* logits, int64_t n, const Weighing& how, float* scores, float* masses, int32_t* bins);
  // Writes the ascending indices of the floats in [`least`, `end`) and returns their number.
  int64_t (*collect)(const float* x, int64_t n, float least, float end, int32_t* indices);
  void (*draw)(Draw&);
  // Attention of one token that sees `context` keys, for all query heads of the KV heads first .. last.
  void (*attend_token)(const Attention&, int64_t token, int64_t row, int64_t context, int64_t first_kv_head,
                       int64_t last_kv_head);
  // Attention of a row's few tokens, each as `attend_token` computes it, for all query heads of one KV head. All tokens
  // see the first key: there is no sliding window, or it is not shorter than the row.
  void (*attend_few)(const Attention&, int64_t row, int64_t kv_head);
  // Attention of a row's whole chunk, for all query heads of one KV head.
  void (*attend_chunk)(const Attention&, int64_t row, int64_t kv_head);
  // Latent attention of all tokens of a row over some of its keys.
  void (*attend_latent)(const LatentAttention&, const LatentPart&);
  // Combines the parts of one query: sums and statistics are the strides apart. `out` may be the sums of a single part.
  void (*combine_latent)(const float* sums, const float* tops, const float* totals, int64_t parts, int64_t part_stride,
                         int64_t stats_stride, int64_t rank, float* out);
  // The products of one head.
  void (*multiply_head)(const HeadProducts&, int64_t head);
  // The gated delta rule of all tokens of a row, for one head of values.
  void (*delta_rule)(const DeltaRule&, int64_t row, int64_t head);
  // The selective scan of all tokens of a row, for one head.
  void (*selective_scan)(const SelectiveScan&, int64_t row, int64_t head);
  // Convolution of a row's channels begin .. end.
  void (*convolve)(const Convolution&, int64_t row, int64_t begin, int64_t end);
  // Convolution of the tokens begin .. end.
  void (*convolve_tokens)(const TokenConvolution&, int64_t begin, int64_t end);
  // RMSNorm of the rows begin .. end.
  void (*normalise)(const Norm&, int64_t begin, int64_t end);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null if not compiled
const Kernels* avx512_kernels();  // AVX-512 F, BW, VL, DQ, BF16 and VNNI
const Kernels* amx_kernels();     // the same with AMX TILE, BF16 and INT8

}  // namespace quire
