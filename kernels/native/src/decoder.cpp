// One step of a Llama-type decoder: all layers in one call, without a return to Python.
//
// The residual stream is float32; activations are rounded only to the operand types of the kernels. Each phase of a
// layer is one parallel loop; a phase that is too small to share runs on the calling thread.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "levels.h"
#include "linear.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kGrain = 4096;  // minimum elements per task

// Buffers kept between steps; there is one worker per process, and one step at a time.
struct Workspace {
  Buffer residual, kept, wide, attended, activations, scales;
  // Of a mixture: inputs and outputs of experts, logits of the router, and pairs of token and expert.
  Buffer normed, outputs, logits, shared, chosen, weights, places, sorted;
  std::vector<LinearTask> products;
};

Workspace& workspace() {
  static Workspace* const instance = new Workspace;
  return *instance;
}

float* thread_row(int64_t count) {
  static thread_local Buffer buffer;
  return buffer.of<float>(count);
}

class Clock {
 public:
  explicit Clock(int64_t* nanoseconds) : nanoseconds_(nanoseconds), last_(now()) {}
  void count(Phase phase) {
    if (nanoseconds_ == nullptr) return;
    const int64_t time = now();
    nanoseconds_[phase] += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  int64_t* nanoseconds_;
  int64_t last_;
};

class Run {
 public:
  Run(const Kernels& kernels, const Decoder& decoder, const Step& step, int64_t* nanoseconds)
      : k_(kernels), d_(decoder), s_(step), clock_(nanoseconds) {}

  bool all() {
    int64_t tokens = s_.num_tokens;
    const int64_t* index_of = nullptr;  // the token of each row of the residual stream; null: row i is token i
    residual_ = space_.residual.of<float>(tokens * d_.hidden);
    embed();
    if (!add_up(tokens)) return false;
    clock_.count(kEmbed);
    const int64_t query_size = d_.num_heads * d_.head_dim, qkv_size = query_size + 2 * d_.num_kv_heads * d_.head_dim;
    float* const wide_rows = space_.wide.of<float>(tokens * widest(qkv_size));
    float* const attended = space_.attended.of<float>(tokens * query_size);
    for (int64_t index = 0; index < d_.num_layers; ++index) {
      const Layer& layer = d_.layers[index];
      norm(layer.qkv, layer.input_norm, tokens);
      clock_.count(kNorm);
      product(layer.qkv, wide_rows, qkv_size, kStoreFloat, tokens);
      clock_.count(kQkv);
      rotate_and_write(layer, index, wide_rows, qkv_size);
      clock_.count(kRotate);
      attend(layer, index, wide_rows, qkv_size, attended);
      clock_.count(kAttend);
      if (index == d_.num_layers - 1 && s_.kept_index != nullptr) {  // from here on only the kept tokens
        tokens = s_.num_kept;
        index_of = s_.kept_index;
        keep(index_of, tokens);
      }
      activate(layer.output, tokens, query_size, [=](int64_t row, float*) {
        return attended + (index_of == nullptr ? row : index_of[row]) * query_size;
      });
      begin_sum(tokens);
      product(layer.output, residual_, d_.hidden, kAddFloat, tokens);
      if (!add_up(tokens)) return false;
      clock_.count(kOutput);
      if (layer.mixture == nullptr) {
        norm(layer.gate_up, layer.mlp_norm, tokens);
        clock_.count(kNorm);
        begin_sum(tokens);
        mlp(layer, tokens, wide_rows, residual_, kAddFloat);
      } else {
        add_mixture(layer, tokens, wide_rows);
      }
      if (!add_up(tokens)) return false;
      clock_.count(kDown);
    }
    norm(d_.head, d_.final_norm, s_.num_logits);
    hidden_states();
    clock_.count(kNorm);
    product(d_.head, s_.logits, d_.head.outputs, kStoreFloat, s_.num_logits);
    clock_.count(kHead);
    return true;
  }

 private:
  // The residual stream is equal on all ranks. In a sum over the ranks only rank 0 has it; the others add their parts
  // to zeros.
  void begin_sum(int64_t rows) {
    if (d_.reduce != nullptr && d_.rank != 0) std::memset(residual_, 0, rows * d_.hidden * sizeof(float));
  }

  bool add_up(int64_t rows) {
    return d_.reduce == nullptr || rows == 0 || d_.reduce(residual_, rows * d_.hidden) == 0;
  }

  // Returns the elements per token that a layer needs for its widest activations.
  int64_t widest(int64_t qkv_size) const {
    int64_t result = qkv_size;
    for (const Layer* layer = d_.layers; layer < d_.layers + d_.num_layers; ++layer) {
      result = std::max(result, layer->gate_up.outputs);
      if (layer->mixture != nullptr)
        result = std::max(result, layer->mixture->top_k * layer->mixture->gate_up[0].outputs);
    }
    return result;
  }

  void embed() {
    parallel_chunks(s_.num_tokens, kGrain / d_.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        float* const out = residual_ + token * d_.hidden;
        const int64_t id = s_.token_ids[token] - d_.first_token;
        if (id < 0 || id >= d_.head.outputs)  // another rank has this token
          std::memset(out, 0, d_.hidden * sizeof(float));
        else if (d_.embedding == nullptr)
          unpack_row(d_.head, id, out);
        else if (d_.embedding_format == kParts)
          unpack_row(*static_cast<const Linear*>(d_.embedding), id, out);
        else
          k_.load(d_.embedding_format,
                  static_cast<const char*>(d_.embedding) + id * d_.hidden * element_bytes(d_.embedding_format),
                  d_.hidden, out);
      }
    });
  }

  // Prepares each row as operand of `linear`: make(row, scratch) returns the floats; `cost` is the cost of a row in
  // elements.
  template <class Make>
  void activate(const Linear& linear, int64_t rows, int64_t cost, const Make& make) {
    stride_ = activation_stride(k_, linear.format, linear.inputs);
    activate_each(linear.inputs, rows, cost, [&](int64_t) { return linear.format; }, make);
  }

  // The same for rows of several experts; weights of a quantised checkpoint may have different formats.
  template <class ExpertOf, class Make>
  void activate_experts(const Linear* linears, int64_t count, int64_t rows, int64_t cost, const ExpertOf& expert_of,
                        const Make& make) {
    stride_ = 0;
    for (const Linear* linear = linears; linear < linears + count; ++linear)
      stride_ = std::max(stride_, activation_stride(k_, linear->format, linear->inputs));
    activate_each(linears->inputs, rows, cost, [&](int64_t row) { return linears[expert_of(row)].format; }, make);
  }

  template <class FormatOf, class Make>
  void activate_each(int64_t inputs, int64_t rows, int64_t cost, const FormatOf& format_of, const Make& make) {
    const int64_t padded = round_up(inputs, 16);
    char* const out = space_.activations.of<char>(rows * stride_);
    float* const scales = space_.scales.of<float>(rows);
    parallel_chunks(rows, kGrain / cost, [&](int64_t begin, int64_t end) {
      float* const scratch = thread_row(padded);
      for (int64_t row = begin; row < end; ++row)
        k_.to_activations(format_of(row), make(row, scratch), inputs, padded, out + row * stride_, scales + row);
    });
    activations_ = out;
    scales_ = scales;
  }

  // Reduces the residual stream to these tokens.
  void keep(const int64_t* tokens, int64_t count) {
    float* const kept = space_.kept.of<float>(count * d_.hidden);
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(kept + row * d_.hidden, residual_ + tokens[row] * d_.hidden, d_.hidden * sizeof(float));
    residual_ = kept;
  }

  void norm(const Linear& linear, const float* weight, int64_t rows) {
    activate(linear, rows, d_.hidden, [&](int64_t row, float* scratch) {
      k_.rms_norm(residual_ + row * d_.hidden, weight, d_.eps, d_.hidden, scratch);
      return scratch;
    });
  }

  void hidden_states() {
    const int64_t first = s_.num_logits, count = s_.num_kept - s_.num_logits;
    parallel_chunks(count, kGrain / d_.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        k_.rms_norm(residual_ + (first + row) * d_.hidden, d_.final_norm, d_.eps, d_.hidden,
                    s_.hidden + row * d_.hidden);
    });
  }

  void product(const Linear& linear, float* out, int64_t out_stride, Store store, int64_t rows) {
    multiply(k_, {&linear, activations_, stride_, scales_, out, out_stride, store, 0, rows, 0, 0});
  }

  // Returns a function that gates row `row` of `gate_up`.
  auto gated(const float* gate_up, int64_t inputs) const {
    return [=](int64_t row, float* scratch) {
      k_.silu_mul(gate_up + row * 2 * inputs, inputs, scratch);
      return scratch;
    };
  }

  // Computes the MLP of a layer, or its shared expert, whose input is activated.
  void mlp(const Layer& layer, int64_t rows, float* wide_rows, float* out, Store store) {
    product(layer.gate_up, wide_rows, layer.gate_up.outputs, kStoreFloat, rows);
    clock_.count(kGateUp);
    activate(layer.down, rows, 2 * layer.down.inputs, gated(wide_rows, layer.down.inputs));
    clock_.count(kActivate);
    product(layer.down, out, d_.hidden, store, rows);
    clock_.count(kDown);
  }

  // Adds the output of a layer's experts to the residual stream. The pairs of token and expert are sorted by expert, so
  // that the rows of an expert are adjacent, and one product per expert with rows computes them.
  void add_mixture(const Layer& layer, int64_t tokens, float* wide_rows) {
    const Mixture& m = *layer.mixture;
    const int64_t hidden = d_.hidden, top_k = m.top_k, experts = m.router.outputs, pairs = tokens * top_k;
    float* const normed = space_.normed.of<float>(tokens * hidden);
    float* const outputs = space_.outputs.of<float>(pairs * hidden);
    parallel_chunks(tokens, kGrain / hidden, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        k_.rms_norm(residual_ + row * hidden, layer.mlp_norm, d_.eps, hidden, normed + row * hidden);
    });
    begin_sum(tokens);
    const auto row_of_token = [=](int64_t row, float*) { return normed + row * hidden; };
    clock_.count(kNorm);
    if (layer.gate_up.outputs > 0) {
      float* const shared = space_.shared.of<float>(tokens);
      activate(m.shared_gate, tokens, hidden, row_of_token);
      product(m.shared_gate, shared, 1, kStoreFloat, tokens);
      activate(layer.gate_up, tokens, hidden, row_of_token);
      clock_.count(kRoute);
      mlp(layer, tokens, wide_rows, outputs, kStoreFloat);
      parallel_chunks(tokens, kGrain / hidden, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
          add_weighted(outputs + row * hidden, 1.0f / (1.0f + std::exp(-shared[row])), row);
      });
      clock_.count(kDown);
    }

    float* const logits = space_.logits.of<float>(tokens * experts);
    activate(m.router, tokens, hidden, row_of_token);
    product(m.router, logits, experts, kStoreFloat, tokens);
    int64_t* const chosen = space_.chosen.of<int64_t>(pairs);
    float* const weights = space_.weights.of<float>(pairs);
    parallel_chunks(tokens, kGrain / (experts * top_k), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        choose(m, logits + row * experts, chosen + row * top_k, weights + row * top_k);
    });
    // The place of each pair in the order of experts, and the pair of each place.
    int64_t* const places = space_.places.of<int64_t>(pairs + experts + 1);
    int64_t* const starts = places + pairs;
    int64_t* const sorted = space_.sorted.of<int64_t>(pairs);
    std::fill(starts, starts + experts + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) ++starts[chosen[pair] + 1];
    for (int64_t expert = 0; expert < experts; ++expert) starts[expert + 1] += starts[expert];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t place = starts[chosen[pair]]++;  // afterwards the start of the next expert
      places[pair] = place;
      sorted[place] = pair;
    }
    const auto expert_of = [=](int64_t place) { return chosen[sorted[place]]; };
    activate_experts(m.gate_up, experts, pairs, hidden, expert_of,
                     [=](int64_t place, float*) { return normed + sorted[place] / top_k * hidden; });
    clock_.count(kRoute);
    products_of_experts(m.gate_up, starts, experts, wide_rows, kStoreFloat);
    clock_.count(kGateUp);
    activate_experts(m.down, experts, pairs, 2 * m.down->inputs, expert_of, gated(wide_rows, m.down->inputs));
    clock_.count(kActivate);
    products_of_experts(m.down, starts, experts, outputs, kStoreFloat);
    parallel_chunks(tokens, kGrain / (hidden * top_k), [&](int64_t begin, int64_t end) {
      for (int64_t pair = begin * top_k; pair < end * top_k; ++pair)
        add_weighted(outputs + places[pair] * hidden, weights[pair], pair / top_k);
    });
    clock_.count(kDown);
  }

  // Chooses the experts of a token. Of equal logits the first is chosen.
  static void choose(const Mixture& m, const float* logits, int64_t* chosen, float* weights) {
    const int64_t experts = m.router.outputs;
    for (int64_t i = 0; i < m.top_k; ++i) {
      int64_t best = -1;
      for (int64_t expert = 0; expert < experts; ++expert)
        if ((best < 0 || logits[expert] > logits[best]) && std::find(chosen, chosen + i, expert) == chosen + i)
          best = expert;
      chosen[i] = best;
    }
    const float top = logits[chosen[0]];
    float total = 0.0f;
    for (int64_t i = 0; i < m.top_k; ++i) weights[i] = std::exp(logits[chosen[i]] - top);
    if (m.renormalise != 0)
      for (int64_t i = 0; i < m.top_k; ++i) total += weights[i];
    else
      for (int64_t expert = 0; expert < experts; ++expert) total += std::exp(logits[expert] - top);
    for (int64_t i = 0; i < m.top_k; ++i) weights[i] /= total;
  }

  // Multiplies the activated rows of each expert. `ends[e]` is the row after the last one of expert e.
  void products_of_experts(const Linear* linears, const int64_t* ends, int64_t experts, float* out, Store store) {
    space_.products.clear();
    for (int64_t expert = 0, row = 0; expert < experts; row = ends[expert++]) {
      const int64_t outputs = linears[expert].outputs;
      if (ends[expert] > row)
        space_.products.push_back({&linears[expert], activations_ + row * stride_, stride_, scales_ + row,
                                   out + row * outputs, outputs, store, 0, ends[expert] - row, 0, 0});
    }
    multiply_all(k_, space_.products.data(), static_cast<int64_t>(space_.products.size()));
  }

  // Adds `weight` times a row to row `row` of the residual stream.
  void add_weighted(const float* x, float weight, int64_t row) {
    float* const out = residual_ + row * d_.hidden;
    for (int64_t i = 0; i < d_.hidden; ++i) out[i] += weight * x[i];
  }

  int64_t group_of(int64_t layer) const { return s_.groups == nullptr ? 0 : s_.groups[layer]; }

  void rotate_and_write(const Layer& layer, int64_t index, float* qkv, int64_t stride) {
    const int64_t head_dim = d_.head_dim, token_bytes = kv_code_bytes(d_.cache_format, head_dim);
    const int64_t scale_bytes = kv_scale_bytes(d_.cache_format, head_dim);
    const int64_t head_bytes = kv_head_bytes(d_.cache_format, head_dim, d_.block_size);
    const auto write = [=](const float* x, char* head, int64_t offset) {
      char* const to = head + offset * token_bytes;
      if (scale_bytes > 0)
        k_.store_scaled(d_.cache_format, x, head_dim, to, head + d_.block_size * token_bytes + offset * scale_bytes);
      else
        k_.store(d_.cache_format, x, head_dim, to);
    };
    const int64_t group = group_of(index);
    const int64_t* const slots = group == 0 ? s_.slots : s_.window_slots + (group - 1) * s_.num_tokens;
    char* const k_cache = static_cast<char*>(const_cast<void*>(s_.k_caches[index]));
    char* const v_cache = static_cast<char*>(const_cast<void*>(s_.v_caches[index]));
    parallel_chunks(s_.num_tokens, kGrain / stride, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t position = s_.positions[token], slot = slots[token];
        const float* const cos = d_.cos + position * d_.rotary_half;
        const float* const sin = d_.sin + position * d_.rotary_half;
        float* head = qkv + token * stride;
        for (int64_t i = 0; i < d_.num_heads + d_.num_kv_heads; ++i, head += head_dim) {
          const float* const weight = i < d_.num_heads ? layer.query_norm : layer.key_norm;
          if (weight != nullptr) k_.rms_norm(head, weight, d_.eps, head_dim, head);
          k_.rotate(head, cos, sin, d_.rotary_half);
        }
        if (slot < 0) continue;
        const float* const keys = qkv + token * stride + d_.num_heads * head_dim;
        const float* const values = keys + d_.num_kv_heads * head_dim;
        const int64_t block = slot / d_.block_size, offset = slot % d_.block_size;
        for (int64_t i = 0; i < d_.num_kv_heads; ++i) {
          const int64_t at = (block * d_.num_kv_heads + i) * head_bytes;
          write(keys + i * head_dim, k_cache + at, offset);
          write(values + i * head_dim, v_cache + at, offset);
        }
      }
    });
  }

  void attend(const Layer& layer, int64_t index, const float* qkv, int64_t stride, float* out) {
    Attention a{};
    a.query = qkv;
    a.query_stride = stride;
    a.out = out;
    a.out_stride = d_.num_heads * d_.head_dim;
    a.k_cache = s_.k_caches[index];
    a.v_cache = s_.v_caches[index];
    a.cache_format = static_cast<int32_t>(d_.cache_format);
    a.num_heads = static_cast<int32_t>(d_.num_heads);
    a.num_kv_heads = static_cast<int32_t>(d_.num_kv_heads);
    a.head_dim = static_cast<int32_t>(d_.head_dim);
    a.block_size = static_cast<int32_t>(d_.block_size);
    const int64_t group = group_of(index);
    a.block_tables =
        group == 0 ? s_.block_tables : s_.window_tables + (group - 1) * s_.num_rows * s_.table_stride;
    a.table_stride = s_.table_stride;
    a.query_start = s_.query_start;
    a.context_lens = s_.context_lens;
    a.num_rows = s_.num_rows;
    a.scale = d_.scale;
    a.sliding_window = static_cast<int32_t>(layer.sliding_window);
    attend_pages(k_, a);
  }

  const Kernels& k_;
  const Decoder& d_;
  const Step& s_;
  Clock clock_;
  Workspace& space_ = workspace();
  float* residual_ = nullptr;
  char* activations_ = nullptr;
  float* scales_ = nullptr;
  int64_t stride_ = 0;
};

}  // namespace

bool run_decoder(const Kernels& kernels, const Decoder& decoder, const Step& step, int64_t* nanoseconds) {
  return Run(kernels, decoder, step, nanoseconds).all();
}

}  // namespace quire
