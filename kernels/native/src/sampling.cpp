#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "threads.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kPart = 1 << 14;   // tokens that one task draws from; takes some ten microseconds
constexpr int64_t kChunk = 256;      // logits per iteration
constexpr int kBins = 1024;          // bins of scores, 24 nats down from the best; the last has all lower ones
constexpr float kBinsPerNat = kBins / 24.0f;

// Tokens that a row keeps: scores above `least`, and scores equal to it up to token `last_tie`.
struct Cut {
  float least;
  int64_t last_tie;
};

struct Scored {
  float score;
  int64_t token;
};

bool truncates(const Sampling& s, int64_t row) {
  return s.top_k != nullptr && (s.top_k[row] > 0 || s.top_p[row] < 1.0f || s.min_p[row] > 0.0f);
}

// Returns the k-th largest of n floats. Candidates are collected, and reduced to k when there are 2k, which raises the
// threshold for further candidates.
float kth_largest(const Kernels& kernels, const float* x, int64_t n, int64_t k) {
  static thread_local std::vector<float> kept;
  int32_t indices[kChunk];
  kept.clear();
  float least = -kInfinity;
  const auto thin_out = [&] {
    std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(), std::greater<float>());
    kept.resize(static_cast<size_t>(k));
    least = kept.back();
  };
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = kernels.collect(x + first, std::min(kChunk, n - first), least, kInfinity, indices);
    for (int64_t i = 0; i < count; ++i) kept.push_back(x[first + indices[i]]);
    if (static_cast<int64_t>(kept.size()) >= 2 * k + kChunk) thin_out();
  }
  thin_out();
  return least;
}

// Bounds of the logits whose quotient by the temperature may round to `score`.
float surely_below(float score, float temperature) {
  const float logit = score * temperature;
  return logit - 0x1p-20f * std::fabs(logit) - std::numeric_limits<float>::min();
}
float surely_above(float score, float temperature) {
  const float logit = score * temperature;
  return logit + 0x1p-20f * std::fabs(logit) + std::numeric_limits<float>::min();
}

// Top-p of the scores >= `least`: tokens stay, in the order of scores and then indices, while the mass before them is
// below p. A histogram finds the bin with the cut; only the tokens of this bin are sorted.
class Nucleus {
 public:
  Nucleus(const Kernels& kernels, const float* x, int64_t n, float temperature, float best, float least)
      : kernels_(kernels), x_(x), n_(n), how_{temperature, best, kBinsPerNat, kBins - 1}, least_(least) {}

  Cut of(float p) {
    const double total = fill_bins();
    const double target = std::max(p * total, 1e-30);  // the best token stays even for p = 0
    int bin = 0;
    double before = 0.0;
    for (; bin < kBins - 1 && before + bins_[bin] < target; ++bin) before += bins_[bin];
    Cut cut{least_, n_};
    for (const Scored& token : tokens_of(bin)) {
      if (before >= target) break;
      cut = {token.score, token.token};
      before += std::exp(static_cast<double>(token.score) - how_.best);
    }
    return cut;
  }

 private:
  // Returns the sum.
  double fill_bins() {
    std::fill(bins_, bins_ + kBins, 0.0);
    const float logit = least_ > -kInfinity ? surely_below(least_, how_.temperature) : -kInfinity;
    int32_t indices[kChunk];
    for (int64_t first = 0; first < n_; first += kChunk) {
      const int64_t count = std::min(kChunk, n_ - first);
      if (logit > -kInfinity && kernels_.collect(x_ + first, count, logit, kInfinity, indices) == 0) continue;
      const float* from = x_ + first;
      float padded[kChunk];
      if (count < kChunk) {
        std::fill(std::copy(from, from + count, padded), padded + kChunk, -kInfinity);
        from = padded;
      }
      kernels_.weigh(from, kChunk, how_, scores_, masses_, bin_of_);
      for (int64_t i = 0; i < count; ++i)
        if (scores_[i] >= least_) bins_[bin_of_[i]] += masses_[i];
    }
    double total = 0.0;
    for (double mass : bins_) total += mass;
    return total;
  }

  // Returns the sorted tokens of one bin.
  const std::vector<Scored>& tokens_of(int bin) {
    static thread_local std::vector<Scored> tokens;
    tokens.clear();
    const float lowest = bin == kBins - 1 ? least_ : std::max(least_, how_.best - (bin + 1) / kBinsPerNat);
    const float from = lowest > -kInfinity ? surely_below(lowest, how_.temperature) : -kInfinity;
    const float to = bin < 2 ? kInfinity : surely_above(how_.best - (bin - 1) / kBinsPerNat, how_.temperature);
    int32_t indices[kChunk];
    for (int64_t first = 0; first < n_; first += kChunk) {
      const int64_t count = std::min(kChunk, n_ - first);
      const int64_t found = kernels_.collect(x_ + first, count, from, to, indices);
      float logits[kChunk];
      for (int64_t i = 0; i < round_up(found, kBlock); ++i) logits[i] = i < found ? x_[first + indices[i]] : -kInfinity;
      kernels_.weigh(logits, round_up(found, kBlock), how_, scores_, masses_, bin_of_);
      for (int64_t i = 0; i < found; ++i)
        if (bin_of_[i] == bin && scores_[i] >= least_) tokens.push_back({scores_[i], first + indices[i]});
    }
    std::sort(tokens.begin(), tokens.end(), [](const Scored& a, const Scored& b) {
      return a.score > b.score || (a.score == b.score && a.token < b.token);
    });
    return tokens;
  }

  const Kernels& kernels_;
  const float* x_;
  int64_t n_;
  Weighing how_;
  float least_;
  double bins_[kBins];
  float scores_[kChunk], masses_[kChunk];
  int32_t bin_of_[kChunk];
};

Cut select(const Kernels& kernels, const Sampling& s, int64_t row, const float* x, float best) {
  const float temperature = s.temperature[row];
  Cut cut{-kInfinity, s.vocab};
  if (s.top_k[row] > 0 && s.top_k[row] < s.vocab)
    cut.least = kth_largest(kernels, x, s.vocab, s.top_k[row]) / temperature;
  if (s.top_p[row] < 1.0f) cut = Nucleus(kernels, x, s.vocab, temperature, best, cut.least).of(s.top_p[row]);
  if (s.min_p[row] > 0.0f) {
    const float likely = static_cast<float>(best + std::log(static_cast<double>(s.min_p[row])));
    if (likely > cut.least) cut = {likely, s.vocab};
  }
  return cut;
}

// Sum of score and noise of a row's best token, which always stays; other tokens must exceed it.
Draw begin_draw(const Kernels& kernels, const Sampling& s, int64_t row, const float* x, int64_t likeliest) {
  Draw draw{};
  draw.logits = x;
  draw.temperature = s.temperature[row];
  draw.position = static_cast<uint32_t>(s.position[row]);
  draw.choice = static_cast<uint32_t>(s.choice[row]);
  draw.seed = static_cast<uint64_t>(s.seed[row]);
  draw.least = -kInfinity;
  draw.last_tie = s.vocab;
  if (truncates(s, row)) {
    const Cut cut = select(kernels, s, row, x, x[likeliest] / draw.temperature);
    draw.least = cut.least;
    draw.last_tie = cut.last_tie;
  }
  draw.best = -kInfinity;
  draw.token = likeliest;
  draw.first = s.first;
  draw.begin = likeliest / 32 * 32;
  draw.end = std::min(draw.begin + 32, s.vocab);
  kernels.draw(draw);
  return draw;
}

}  // namespace

void sample_rows(const Kernels& kernels, const Sampling& s) {
  std::vector<Draw> begun(static_cast<size_t>(s.rows));
  parallel_for(s.rows, [&](int64_t row) {
    const float* const x = s.logits + row * s.stride;
    bool finite = false;
    const int64_t likeliest = kernels.argmax(x, s.vocab, &finite);
    s.tokens[row] = finite ? likeliest : -1;
    if (s.sums != nullptr) s.sums[row] = x[likeliest];
    if (finite && s.temperature[row] > 0.0f) begun[row] = begin_draw(kernels, s, row, x, likeliest);
  });
  const int64_t parts = ceil_div(s.vocab, kPart);
  std::vector<Draw> drawn(static_cast<size_t>(s.rows * parts));
  parallel_for(s.rows * parts, [&](int64_t task) {
    Draw draw = begun[task / parts];
    if (draw.logits == nullptr) return;
    draw.begin = task % parts * kPart;
    draw.end = std::min(draw.begin + kPart, s.vocab);
    kernels.draw(draw);
    drawn[task] = draw;
  });
  for (int64_t row = 0; row < s.rows; ++row) {
    if (begun[row].logits == nullptr) continue;
    const Draw* best = &drawn[row * parts];
    for (const Draw* part = best + 1; part < &drawn[row * parts] + parts; ++part)
      if (part->best > best->best || (part->best == best->best && part->token < best->token)) best = part;
    s.tokens[row] = best->token;
    if (s.sums != nullptr) s.sums[row] = best->best;
  }
}

}  // namespace quire
