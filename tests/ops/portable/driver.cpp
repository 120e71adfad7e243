// Runs the CPU kernels on seeded inputs and compares them with plain loops in fp64. It links neither torch nor Python,
// so it also runs on an emulated processor (tests/ops/test_portable.py).
//
// Prints a line per result: the kernel, its type, the error over the tolerance, "ok" or "WRONG". Exits with 1 if one is
// wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "cpu/adamw.h"
#include "cpu/attention.h"
#include "cpu/bias_gelu.h"
#include "cpu/cross_entropy.h"
#include "cpu/denormals.h"
#include "cpu/dropout.h"
#include "cpu/float8.h"
#include "cpu/gelu.h"
#include "cpu/gemm.h"
#include "cpu/norm.h"
#include "cpu/rotary.h"
#include "cpu/row_blocks.h"
#include "cpu/softmax.h"
#include "cpu/square_sum.h"
#include "cpu/swiglu.h"

using namespace megads;

namespace {

using Doubles = std::vector<double>;

constexpr double kTanhRoot = 0.7978845608028654;  // sqrt(2 / pi)
bool all_right = true;

template <typename T>
constexpr double kRounding = sizeof(T) == 4 ? 6e-8 : 3.91e-3;  // half a unit in the last place, relative

template <typename T>
double value(const T& x) {
  return double(widen(x));
}

// Roughly normal numbers, the same on every processor.
class Draws {
 public:
  double next() {
    double sum = 0.0;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      sum += double(state_ >> 40) / double(1 << 24) - 0.5;
    }
    return sum * 1.7;
  }

  template <typename T>
  std::vector<T> drawn(int64_t count, double scale = 1.0) {
    std::vector<T> found(count);
    for (T& x : found) narrow(&x, float(next() * scale));
    return found;
  }

 private:
  uint64_t state_ = 4242;
};

Draws draws;

// Elements may be wrong by `units` roundings of themselves, and by 1e-6 of the largest.
template <typename T>
void check(const std::string& name, const std::vector<T>& got, const Doubles& want, double units = 4.0) {
  double largest = 0.0, worst = got.size() == want.size() && !got.empty() ? 0.0 : INFINITY;
  for (double x : want) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0.0);
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const double x = value(got[i]);
    if (std::isnan(x) && std::isnan(want[i])) continue;
    const double allowed = units * kRounding<T> * std::abs(want[i]) + 1e-6 * largest + 1e-30;
    const double error = std::abs(x - want[i]) / allowed;
    worst = error <= worst ? worst : error;  // NaN stays
  }
  const bool right = worst <= 1.0;
  all_right = all_right && right;
  std::printf("%-28s %s %9.3f %s\n", name.c_str(), sizeof(T) == 4 ? "fp32" : "bf16", worst, right ? "ok" : "WRONG");
}

double gelu_of(double x) { return 0.5 * x * (1.0 + std::tanh(kTanhRoot * (x + 0.044715 * x * x * x))); }

double gelu_slope_of(double x) {
  const double t = std::tanh(kTanhRoot * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kTanhRoot * (1.0 + 3.0 * 0.044715 * x * x);
}

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

template <typename T>
void activations(int64_t rows, int64_t width) {
  const int64_t count = rows * width;
  auto x = draws.drawn<T>(count, 3.0), bias = draws.drawn<T>(width), grad = draws.drawn<T>(count);
  const float extremes[] = {0.0f, -0.0f, 11.0f, -11.0f, 300.0f, -300.0f, 1e30f, -1e30f};
  for (int i = 0; i < 8; ++i) narrow(&x[i], extremes[i]);
  std::vector<T> out(count), grad_x(count);
  Doubles want(count), want_grad(count);
  for (int64_t i = 0; i < count; ++i) {
    want[i] = gelu_of(value(x[i]));
    want_grad[i] = value(grad[i]) * gelu_slope_of(std::clamp(value(x[i]), -300.0, 300.0));
  }
  gelu_forward(x.data(), out.data(), 0, count);
  gelu_backward(grad.data(), x.data(), grad_x.data(), 0, count);
  std::vector<T> some(out.begin() + 8, out.end());
  check("gelu", some, Doubles(want.begin() + 8, want.end()), 8.0);
  check("gelu of extremes", std::vector<T>(out.begin(), out.begin() + 8), Doubles(want.begin(), want.begin() + 8));
  check("gelu backward", grad_x, want_grad, 16.0);

  std::vector<float> partial(row_blocks(rows) * width), sums(width);
  Doubles want_bias(width);
  x = draws.drawn<T>(count, 3.0);
  for (int64_t i = 0; i < count; ++i) {
    const double sum = value(x[i]) + value(bias[i % width]);
    want[i] = gelu_of(sum);
    want_grad[i] = value(grad[i]) * gelu_slope_of(sum);
    want_bias[i % width] += want_grad[i];
  }
  bias_gelu_forward(width, x.data(), bias.data(), out.data(), 0, rows);
  bias_gelu_backward(rows, width, grad.data(), x.data(), bias.data(), grad_x.data(), partial.data(), 0,
                     row_blocks(rows));
  add_blocks(row_blocks(rows), width, partial.data(), sums.data(), 0, width);
  check("bias_gelu", out, want, 8.0);
  check("bias_gelu backward", grad_x, want_grad, 16.0);
  check("bias_gelu backward, bias", sums, want_bias, 100.0);

  auto pairs = draws.drawn<T>(2 * count, 3.0);
  for (int i = 0; i < 6; ++i) narrow(&pairs[2 * i], extremes[i]);
  std::vector<T> grad_pairs(2 * count);
  Doubles want_pairs(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    const double gate = value(pairs[2 * i]), up = value(pairs[2 * i + 1]), s = sigmoid_of(gate), g = value(grad[i]);
    want[i] = gate * s * up;
    want_pairs[2 * i] = g * up * (s + gate * s * (1.0 - s));
    want_pairs[2 * i + 1] = g * gate * s;
  }
  swiglu_forward(pairs.data(), out.data(), 0, count);
  swiglu_backward(grad.data(), pairs.data(), grad_pairs.data(), 0, count);
  check("swiglu", out, want, 8.0);
  check("swiglu backward", grad_pairs, want_pairs, 16.0);
}

template <typename T>
void norms(int64_t rows, int64_t width) {
  for (const bool centred : {true, false}) {
    const Norm shape{rows, width, 1e-5f, centred};
    const std::string name = centred ? "layer_norm" : "rms_norm";
    const auto x = draws.drawn<T>(rows * width), weight = draws.drawn<T>(width), bias = draws.drawn<T>(width);
    const auto grad = draws.drawn<T>(rows * width);
    std::vector<T> out(rows * width), grad_x(rows * width);
    std::vector<float> statistics(2 * rows), partial(row_blocks(rows) * 2 * width), sums(2 * width);
    norm_forward<T>(shape, x.data(), nullptr, weight.data(), bias.data(), nullptr, out.data(), statistics.data(), 0,
                    rows);
    norm_backward<T>(shape, grad.data(), nullptr, x.data(), weight.data(), statistics.data(), grad_x.data(),
                     partial.data(), 0, row_blocks(rows));
    add_blocks(row_blocks(rows), 2 * width, partial.data(), sums.data(), 0, 2 * width);
    Doubles want(rows * width), want_grad(rows * width), want_sums(2 * width);
    for (int64_t r = 0; r < rows; ++r) {
      double mean = 0.0, variance = 0.0, of_grad = 0.0, of_product = 0.0;
      for (int64_t c = 0; c < width; ++c) mean += centred ? value(x[r * width + c]) / double(width) : 0.0;
      for (int64_t c = 0; c < width; ++c) variance += std::pow(value(x[r * width + c]) - mean, 2) / double(width);
      const double inverse = 1.0 / std::sqrt(variance + double(shape.eps));
      for (int64_t c = 0; c < width; ++c) {
        const int64_t i = r * width + c;
        const double normed = (value(x[i]) - mean) * inverse, g = value(grad[i]) * value(weight[c]);
        want[i] = normed * value(weight[c]) + value(bias[c]);
        of_grad += centred ? g / double(width) : 0.0;
        of_product += g * normed / double(width);
        want_sums[c] += value(grad[i]) * normed;
        want_sums[width + c] += value(grad[i]);
      }
      for (int64_t c = 0; c < width; ++c) {
        const int64_t i = r * width + c;
        const double normed = (value(x[i]) - mean) * inverse, g = value(grad[i]) * value(weight[c]);
        want_grad[i] = inverse * (g - of_grad - normed * of_product);
      }
    }
    check(name, out, want, 8.0);
    check(name + " backward", grad_x, want_grad, 32.0);
    check(name + " backward, weights", sums, want_sums, 100.0);
  }
}

// Probabilities of row r by the definition.
template <typename T>
Doubles probabilities(const T* scores, int64_t keys, double scale, double slope, int64_t first, int64_t place) {
  Doubles found(keys);
  double largest = -INFINITY, total = 0.0;
  for (int64_t k = first; k <= place; ++k)
    largest = std::max(largest, value(scores[k]) * scale + slope * double(k - place));
  for (int64_t k = first; k <= place; ++k)
    total += found[k] = std::exp(value(scores[k]) * scale + slope * double(k - place) - largest);
  for (double& p : found) p = total > 0.0 ? p / total : 0.0;
  return found;
}

// Philox4x32-10 by the definition: the 16 random bits of one element.
uint32_t random_bits(uint64_t key, int64_t sample, int64_t head, int64_t place, int64_t element) {
  uint32_t x[4] = {uint32_t(element / kPhiloxElements), uint32_t(place), uint32_t(sample),
                   uint32_t(uint64_t(sample) >> 32) << 16 | uint32_t(head)};
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const uint64_t p0 = uint64_t(x[0]) * 0xd2511f53u, p1 = uint64_t(x[2]) * 0xcd9e8d57u;
    const uint32_t y[4] = {uint32_t(p1 >> 32) ^ x[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ x[3] ^ k1, uint32_t(p0)};
    std::copy(y, y + 4, x);
  }
  const int64_t half = element % kPhiloxElements;
  return x[half / 2] >> 16 * (half % 2) & 0xffffu;
}

template <typename T>
void softmaxes(int64_t keys, bool drops) {
  const int64_t batch = 2, heads = 3, queries = keys, rows = batch * heads * queries;
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f};
  std::vector<int64_t> starts(batch * queries);
  for (int64_t i = 0; i < batch * queries; ++i) starts[i] = std::min(i % queries, i % queries / 7 * 7);
  const std::vector<int64_t> samples = {5, (int64_t(9) << 32) + 1};
  const DropoutMask mask{0x1234567890abcdefu, 20000, drops ? samples.data() : nullptr, 4};
  const MaskedSoftmax shape{batch, heads, queries, keys, 0.125f, slopes.data(), nullptr, starts.data(), mask};
  auto scores = draws.drawn<T>(rows * keys, 20.0);
  const auto grad = draws.drawn<T>(rows * keys);
  for (int64_t r = 0; r < rows; ++r)  // hidden scores must not matter
    for (int64_t k = r % queries + 1; k < keys; ++k) narrow(&scores[r * keys + k], NAN);
  const T unset = draws.drawn<T>(1)[0];
  std::vector<T> out(rows * keys, unset), dropped(out), grad_scores(out), again(out);
  softmax_forward(shape, scores.data(), out.data(), drops ? dropped.data() : nullptr, 0, rows);
  softmax_backward(shape, grad.data(), out.data(), grad_scores.data(), drops ? again.data() : nullptr, 0, rows);
  Doubles want, want_grad, want_dropped;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = r % queries, head = r / queries % heads, sample = r / queries / heads;
    Doubles p = probabilities(&scores[r * keys], keys, 0.125, double(slopes[head]),
                                    starts[sample * queries + query], query);
    want.insert(want.end(), p.begin(), p.end());
    for (int64_t k = 0; k < keys; ++k) p[k] = value(out[r * keys + k]);  // backward is given the rounded ones
    double product = 0.0;
    Doubles of_row(keys);
    for (int64_t k = 0; k < keys; ++k) {
      const bool stays = !drops || random_bits(mask.key, samples[sample], 4 + head, query, k) >= mask.threshold;
      const double factor = !drops ? 1.0 : stays ? double(mask.scale()) : 0.0;
      want_dropped.push_back(p[k] * factor);
      of_row[k] = value(grad[r * keys + k]) * factor;
      product += p[k] * of_row[k];
    }
    for (int64_t k = 0; k < keys; ++k) want_grad.push_back(0.125 * p[k] * (of_row[k] - product));
  }
  const std::string name = drops ? "softmax with dropout" : "softmax";
  check(name, out, want, 16.0);
  if (drops) check(name + ", dropped", dropped, want_dropped, 16.0);
  check(name + " backward", grad_scores, want_grad, 16.0);
}

template <typename T>
void dropouts(int64_t width) {
  const std::vector<int64_t> samples = {7, 8};
  const HiddenDropout shape{5, width, nullptr, {99, 30000, samples.data(), 0}};
  const auto x = draws.drawn<T>(10 * width), residual = draws.drawn<T>(10 * width);
  std::vector<T> out(10 * width);
  dropout(shape, x.data(), residual.data(), out.data(), 0, 10);
  Doubles want;
  for (int64_t i = 0; i < 10 * width; ++i) {
    const int64_t row = i / width;
    const bool stays = random_bits(99, samples[row / 5], 0, row % 5, i % width) >= 30000;
    want.push_back((stays ? value(x[i]) * double(shape.mask.scale()) : 0.0) + value(residual[i]));
  }
  check("dropout", out, want);
}

template <typename T>
void cross_entropies(int64_t columns, int64_t valid) {
  const int64_t count = 5;
  auto logits = draws.drawn<T>(count * columns, 4.0);
  narrow(&logits[columns + 3], 1e4f);                                         // one logit decides
  for (int64_t c = 0; c < valid / 2; ++c) narrow(&logits[2 * columns + c], -INFINITY);
  narrow(&logits[3 * columns + valid - 1], 60.0f);                            // the largest comes last
  const std::vector<int64_t> labels = {0, 3, valid - 1, 1, valid + 5};
  const std::vector<float> grad = {0.5f, 0.25f, 1.0f, -2.0f, 1.0f};
  Doubles want(count * columns), want_statistics;
  for (int64_t r = 0; r < count; ++r) {
    const T* row = &logits[r * columns];
    double largest = -INFINITY, total = 0.0;
    for (int64_t c = 0; c < valid; ++c) largest = std::max(largest, value(row[c]));
    for (int64_t c = 0; c < valid; ++c) total += std::exp(value(row[c]) - largest);
    const bool own = labels[r] < valid;
    want_statistics.insert(want_statistics.end(), {largest, total, own ? value(row[labels[r]]) : 0.0});
    for (int64_t c = 0; c < valid; ++c)
      want[r * columns + c] = (std::exp(value(row[c]) - largest) / total - (c == labels[r])) * double(grad[r]);
  }
  std::vector<float> statistics(3 * count), largest(count), total(count);
  auto fused = logits;
  LogitRows<T> rows{logits.data(), labels.data(), columns, valid, 0};
  cross_entropy_forward(rows, statistics.data(), 0, count);
  check("cross_entropy, statistics", statistics, want_statistics, 60.0);
  for (int64_t r = 0; r < count; ++r) {
    largest[r] = statistics[3 * r];
    total[r] = statistics[3 * r + 1];
  }
  cross_entropy_gradient(rows, largest.data(), total.data(), grad.data(), 0, count);
  check("cross_entropy, gradient", logits, want, sizeof(T) == 4 ? 60.0 : 4.0);
  rows.logits = fused.data();
  cross_entropy_loss(rows, grad.data(), statistics.data(), 0, count);
  check("cross_entropy, both: loss", statistics, want_statistics, 60.0);
  check("cross_entropy, both: gradient", fused, want, sizeof(T) == 4 ? 60.0 : 4.0);
}

template <typename T>
void rotaries(int64_t pairs) {
  const int64_t batch = 2, tokens = 3, heads = 2, width = 2 * pairs, count = batch * tokens * heads * width;
  const auto x = draws.drawn<T>(count);
  const auto cos = draws.drawn<float>(tokens * pairs), sin = draws.drawn<float>(tokens * pairs);
  for (const bool backward : {false, true}) {
    const Rotary shape{tokens, heads, pairs, tokens * heads * width, heads * width, width, cos.data(), sin.data(), 0,
                       backward};
    std::vector<T> out(count);
    rotary(shape, x.data(), out.data(), 0, batch * tokens);
    Doubles want(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = i % width, p = place % pairs, token = i / width / heads % tokens;
      const double other = value(x[place < pairs ? i + pairs : i - pairs]), sign = (place < pairs) != backward ? -1 : 1;
      want[i] = value(x[i]) * double(cos[token * pairs + p]) + sign * other * double(sin[token * pairs + p]);
    }
    check(backward ? "rotary backward" : "rotary", out, want, 4.0);
  }
}

template <typename T>
void optimizer(int64_t count) {
  const auto grad = draws.drawn<float>(count);
  auto master = draws.drawn<float>(count), exp_avg = draws.drawn<float>(count), squares = draws.drawn<float>(count);
  for (float& x : squares) x *= x;
  const AdamWFactors f{0.5f, 1e-3f, 0.1f, 0.99f, 0.01f, 2e-3f, 0.7f, 1e-8f};
  Doubles want, want_avg, want_squares;
  for (int64_t i = 0; i < count; ++i) {
    const double g = double(grad[i]) * 0.5, avg = exp_avg[i] + double(f.rest1) * (g - exp_avg[i]);
    const double square = double(f.beta2) * squares[i] + double(f.rest2) * g * g;
    want_avg.push_back(avg);
    want_squares.push_back(square);
    want.push_back(master[i] - double(master[i]) * double(f.decay) -
                   double(f.step_size) * avg / (std::sqrt(square) / double(f.root_correction) + double(f.eps)));
  }
  std::vector<T> weights(count);
  adamw(grad.data(), master.data(), exp_avg.data(), squares.data(), weights.data(), f, 0, count);
  check("adamw, master", master, want);
  check("adamw, weights", weights, want);
  check("adamw, exp_avg", exp_avg, want_avg);
  check("adamw, exp_avg_sq", squares, want_squares);
}

template <typename T>
void products(int64_t rows, int64_t columns, int64_t inner) {
  const auto a = draws.drawn<T>(rows * inner), b = draws.drawn<T>(columns * inner);
  const auto bias = draws.drawn<float>(columns);
  for (const bool transposed : {false, true}) {  // b as [columns, inner] or as [inner, columns]
    const Matrix<T> of_a{a.data(), inner, 1}, of_b{b.data(), transposed ? 1 : inner, transposed ? columns : 1};
    std::vector<float> packed_a(padded(rows, kPanelRows) * inner + kSlack);
    std::vector<float> packed_b(padded(columns, kPanelColumns) * inner), c(rows * columns);
    pack_rows(of_a, 0, rows, 0, inner, packed_a.data());
    pack_columns(of_b, 0, columns, 0, inner, packed_b.data());
    block_product(rows, columns, inner, packed_a.data(), packed_b.data(), bias.data(), 0, c.data(), columns);
    Doubles want;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        double sum = double(bias[j]);
        for (int64_t k = 0; k < inner; ++k) sum += value(a[i * inner + k]) * value(b[j * of_b.row + k * of_b.inner]);
        want.push_back(sum);
      }
    const std::string name = transposed ? "gemm, b transposed" : "gemm";
    check(name + (sizeof(T) == 4 ? ", fp32 operands" : ", bf16 operands"), c, want, 100.0);
  }
}

template <typename T>
void attentions(int64_t tokens, int64_t dim) {
  const int64_t batch = 2, heads = 4, key_heads = 2, all = batch * heads * tokens * dim;
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  const Attention shape{batch, heads, key_heads, tokens, tokens, dim, 0.3f, slopes.data(), nullptr, nullptr, {}};
  const auto q = draws.drawn<T>(all), k = draws.drawn<T>(all / 2), v = draws.drawn<T>(all / 2), g = draws.drawn<T>(all);
  std::vector<T> out(all), grad_q(all), grad_k(all / 2), grad_v(all / 2);
  std::vector<float> statistics(2 * batch * heads * tokens);
  const auto as = [&](auto* data, int64_t n) {
    return Rows<std::remove_pointer_t<decltype(data)>>{data, n * tokens * dim, tokens * dim, dim};
  };
  attention_forward<T>(shape, as(q.data(), heads), as(k.data(), key_heads), as(v.data(), key_heads),
                       as(out.data(), heads), statistics.data(), 0, attention_tasks(shape));
  const AttentionBackward<T> tensors{as(g.data(), heads),          as(q.data(), heads),
                                     as(k.data(), key_heads),      as(v.data(), key_heads),
                                     as((const T*)out.data(), heads), statistics.data(),
                                     as(grad_q.data(), heads),     as(grad_k.data(), key_heads),
                                     as(grad_v.data(), key_heads)};
  attention_backward(shape, BackwardPart::heads, tensors, 0, attention_backward_tasks(shape, BackwardPart::heads));
  Doubles want(all), want_q(all), want_k(all / 2), want_v(all / 2);
  for (int64_t row = 0; row < batch * heads * tokens; ++row) {
    const int64_t n = row / tokens % heads, place = row % tokens, b = row / tokens / heads;
    const int64_t from = (b * key_heads + n / 2) * tokens * dim;
    std::vector<float> scores(tokens);
    Doubles exact(tokens), p(tokens), of_p(tokens);
    double largest = -INFINITY, total = 0.0, product = 0.0;
    for (int64_t key = 0; key <= place; ++key) {
      for (int64_t d = 0; d < dim; ++d) exact[key] += value(q[row * dim + d]) * value(k[from + key * dim + d]);
      exact[key] = exact[key] * double(shape.scale) + double(slopes[n]) * double(key - place);
      largest = std::max(largest, exact[key]);
    }
    for (int64_t key = 0; key <= place; ++key) total += p[key] = std::exp(exact[key] - largest);
    for (int64_t key = 0; key <= place; ++key) {
      p[key] /= total;
      for (int64_t d = 0; d < dim; ++d) {
        want[row * dim + d] += p[key] * value(v[from + key * dim + d]);
        of_p[key] += value(g[row * dim + d]) * value(v[from + key * dim + d]);
        want_v[from + key * dim + d] += p[key] * value(g[row * dim + d]);
      }
      product += p[key] * of_p[key];
    }
    for (int64_t key = 0; key <= place; ++key)
      for (int64_t d = 0; d < dim; ++d) {
        const double of_score = p[key] * (of_p[key] - product) * double(shape.scale);
        want_q[row * dim + d] += of_score * value(k[from + key * dim + d]);
        want_k[from + key * dim + d] += of_score * value(q[row * dim + d]);
      }
  }
  // In bf16 weights and gradients of scores are rounded before they are multiplied.
  const auto compare = [](const std::string& name, const std::vector<T>& got, const Doubles& wanted) {
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      error += std::pow(value(got[i]) - wanted[i], 2);
      norm += wanted[i] * wanted[i];
    }
    const std::vector<float> relative = {1.0f + float(std::sqrt(error / norm))};
    check(name + (sizeof(T) == 4 ? ", fp32" : ", bf16"), relative, {1.0}, sizeof(T) == 4 ? 30.0 : 2e5);
  };
  compare("attention", out, want);
  compare("attention backward, q", grad_q, want_q);
  compare("attention backward, k", grad_k, want_k);
  compare("attention backward, v", grad_v, want_v);
}

// The FP8 number with this code; not NaN.
double float8_of(Float8 format, int code) {
  const int mantissa = format == Float8::e4m3 ? 3 : 2, bias = format == Float8::e4m3 ? 7 : 15;
  const int exponent = code >> mantissa & (1 << (7 - mantissa)) - 1, rest = code & (1 << mantissa) - 1;
  const double size = exponent ? std::ldexp(rest + (1 << mantissa), exponent - bias - mantissa)
                               : std::ldexp(rest, 1 - bias - mantissa);
  return code & 0x80 ? -size : size;
}

template <typename T>
void quantizations(int64_t rows, int64_t width) {
  const int64_t count = rows * width;
  const auto x = draws.drawn<T>(count);
  double largest = 0.0;
  for (const T& each : x) largest = std::max(largest, std::abs(value(each)));
  const uint32_t bits = largest_magnitude(x.data(), count);
  std::vector<uint32_t> of_columns(width, 0u);
  column_magnitudes(x.data(), rows, width, 0, width, of_columns.data());
  const bool same = bits == *std::max_element(of_columns.begin(), of_columns.end());
  for (const Float8 format : {Float8::e4m3, Float8::e5m2}) {
    const int top = format == Float8::e4m3 ? 0x7e : 0x7b;
    const double inverse = std::exp2(std::ceil(std::log2(largest / float8_of(format, top))));
    std::vector<uint8_t> codes(count), transposed(count);
    quantize(format, x.data(), count, bits, codes.data());
    if (format == Float8::e4m3) quantize_transposed(x.data(), rows, width, &bits, 0, 0, width, transposed.data());
    std::vector<float> got, got_transposed;
    Doubles want;
    for (int64_t i = 0; i < count; ++i) {
      const double size = std::abs(value(x[i])) / inverse;
      int closest = 0;
      for (int code = 1; code <= top; ++code) {
        const double off = std::abs(float8_of(format, code) - size), best = std::abs(float8_of(format, closest) - size);
        if (off < best || (off == best && code % 2 == 0)) closest = code;
      }
      want.push_back(std::copysign(float8_of(format, closest), value(x[i])));
      got.push_back(float(float8_of(format, codes[i])));
      got_transposed.push_back(float(float8_of(format, transposed[i % width * rows + i / width])));
    }
    check("quantize", got, want);
    if (format == Float8::e4m3) check("quantize, transposed", got_transposed, want);
    check("inverse scale", std::vector<float>{same ? inverse_scale(format, bits) : 0.0f}, {inverse});
  }
}

template <typename T>
void all_of() {
  activations<T>(19, 83);
  activations<T>(33, 64);
  norms<T>(37, 83);
  norms<T>(16, 256);
  for (const bool drops : {false, true}) softmaxes<T>(45, drops);
  dropouts<T>(83);
  cross_entropies<T>(3100, 3017);
  cross_entropies<T>(64, 64);
  rotaries<T>(13);
  optimizer<T>(301);
  products<T>(29, 83, 67);
  attentions<T>(77, 24);
  quantizations<T>(67, 83);
}

// Denormals are flushed within the guard, and only there.
void denormals() {
  volatile float tiny = 1e-39f;
  std::vector<float> found;
  {
    const FlushDenormals flush;
    found.push_back(tiny * 0.5f);
  }
  found.push_back(tiny * 0.5f != 0.0f);
  check("denormals", found, {0.0, 1.0});
}

}  // namespace

int main() {
  std::printf("%d fp32 lanes\n", kLanes);
  all_of<float>();
  all_of<BFloat16>();
  const auto x = draws.drawn<float>(1003);
  double want = 0.0;
  for (float each : x) want += double(each) * double(each);
  check("square_sum", std::vector<float>{float(square_sum(x.data(), 0, 1003))}, {want});
  denormals();
  return all_right ? 0 : 1;
}
