// C interface of the CUDA kernels, called by the bindings and from Python through ctypes.
//
// Every function enqueues on `stream` (a cudaStream_t as an integer; 0: the default stream) without synchronizing and
// returns a cudaError_t: 0, or why it could not enqueue; megads_cuda_error gives the message. Pointers are to device
// memory, tensors contiguous; a pointer may be null only where stated. Empty inputs are not an error.
//
// Element counts are 64-bit: a tensor may have more than 2^31 elements. Rows, and the columns of one row, are indexed
// with 32 bits where stated; larger shapes are rejected with MEGADS_TOO_LARGE.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Element type codes.
enum { MEGADS_FP32 = 0, MEGADS_BF16 = 1, MEGADS_FP16 = 2 };

// FP8 format codes.
enum { MEGADS_E4M3 = 0, MEGADS_E5M2 = 1 };

// Launcher error: the shape exceeds the kernel's index range.
enum { MEGADS_TOO_LARGE = -1 };

const char* megads_cuda_error(int64_t error);

// --- softmax.cu ------------------------------------------------------------------------------------------------------

// Attention scores [batch, heads, queries, keys]: softmax(scale * score + slope * (key - place)) over the keys from a
// query's start to its place that are not hidden, 0 elsewhere. A query without visible keys gets zeros. Traffic without
// dropout: (visible + all) * size bytes forward and (2 * visible + all) * size backward, for `visible` of `all` scores.
// Up to 2^31 - 1 rows (batch * heads * queries) of fewer than 2^31 - 2^16 keys.
//   slopes: ALiBi slopes, fp32 [heads]; null: no bias.
//   places: position of each query among the keys, int64 [queries]; null: the query's index.
//   starts: first visible key of each query, int64 [batch, queries]; null: 0.
//   hidden: key mask, bytes [batch, keys], nonzero for masked keys; or null.
//   samples: sample IDs, int64 [batch], from which the dropout mask is derived (philox.cuh); null: no dropout, and key,
//     threshold, first_head and dropped are ignored. Forward writes `dropped`, the probabilities after dropout, in
//     addition to `out`; backward takes the gradient of `dropped` and recomputes it.
int megads_cuda_softmax_forward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                double scale, const float* slopes, const int64_t* places, const int64_t* starts,
                                const uint8_t* hidden, const void* scores, void* out, const int64_t* samples,
                                int64_t key, int64_t threshold, int64_t first_head, void* dropped, int64_t stream);
int megads_cuda_softmax_backward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                 double scale, const int64_t* places, const int64_t* starts, const void* grad,
                                 const void* out, void* grad_scores, const int64_t* samples, int64_t key,
                                 int64_t threshold, int64_t first_head, void* dropped, int64_t stream);

// --- norm.cu ---------------------------------------------------------------------------------------------------------

// LayerNorm (centred) or RMSNorm of rows [rows, width] of x * kept * kept_scale + residual. Rows and width are below
// 2^31 - 2^16.
//   residual: [rows, width] of the dtype, or null. kept: dropout mask, bytes [rows, width], or null.
//   weight: [width] of the dtype. bias: likewise, or null.
//   added: the sum rounded to the dtype, which is the input of the norm; null without residual and mask.
//   statistics: fp32 [rows, 2], mean (0 if not centred) and reciprocal standard deviation.
int megads_cuda_norm_forward(int64_t dtype, int64_t rows, int64_t width, double eps, int64_t centred, const void* x,
                             const void* residual, const uint8_t* kept, double kept_scale, const void* weight,
                             const void* bias, void* added, void* out, float* statistics, int64_t stream);

// Rows of `partial`, fp32 [norm_partials, 2, width], the workspace of the backward pass. They depend on the shape
// alone, so that gradients are bitwise identical on all devices with the same arithmetic.
int64_t megads_cuda_norm_partials(int64_t rows, int64_t width);

//   normed: input of the norm: `added`, or x.
//   grad_added: gradient of that input from its other uses, or null.
//   grad_residual: gradient of `normed`. grad_x: grad_residual * kept * kept_scale; null without a mask.
int megads_cuda_norm_backward(int64_t dtype, int64_t rows, int64_t width, int64_t centred, const void* grad,
                              const void* grad_added, const void* normed, const void* weight, const float* statistics,
                              const uint8_t* kept, double kept_scale, void* grad_residual, void* grad_x,
                              float* partial, void* grad_weight, void* grad_bias, int64_t stream);

// --- cross_entropy.cu ------------------------------------------------------------------------------------------------

// Row statistics, fp32 [rows, 3], of logits [rows, columns] with `valid` valid columns: the largest logit, the sum of
// exp(logit - largest), and the logit of the label, 0 if label - start is not in 0..valid-1. Up to 2^31 - 1 rows of
// 65535 * 1024 columns, limited by the blocks along a row in the backward pass.
int megads_cuda_cross_entropy_forward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid, int64_t start,
                                      const void* logits, const int64_t* labels, float* statistics, int64_t stream);

// grad_logits = (exp(logit - largest) / total - onehot(label)) * grad of the row; 0 in columns from `valid` on.
// grad_logits may alias logits.
int megads_cuda_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid, int64_t start,
                                       const void* logits, const int64_t* labels, const float* largest,
                                       const float* total, const float* grad, void* grad_logits, int64_t stream);

// --- gelu.cu ---------------------------------------------------------------------------------------------------------

// GELU (tanh approximation) of x, [rows, width], or of x + bias if bias, [width] of the dtype, is not null. With a bias
// rows and width are below 2^30; without one only their product matters.
int megads_cuda_gelu_forward(int64_t dtype, int64_t rows, int64_t width, const void* x, const void* bias, void* out,
                             int64_t stream);

// Rows of `partial`, fp32 [gelu_partials, width].
int64_t megads_cuda_gelu_partials(int64_t rows, int64_t width);

//   partial, grad_bias: null without a bias.
int megads_cuda_gelu_backward(int64_t dtype, int64_t rows, int64_t width, const void* grad, const void* x,
                              const void* bias, void* grad_x, float* partial, void* grad_bias, int64_t stream);

// --- swiglu.cu -------------------------------------------------------------------------------------------------------

// gate * sigmoid(gate) * up, [count], from gate_up, [2 * count]: gates at even indices, ups at odd ones.
int megads_cuda_swiglu_forward(int64_t dtype, int64_t count, const void* gate_up, void* out, int64_t stream);
int megads_cuda_swiglu_backward(int64_t dtype, int64_t count, const void* grad, const void* gate_up,
                                void* grad_gate_up, int64_t stream);

// --- dropout.cu ------------------------------------------------------------------------------------------------------

// x * factor + residual, rounded once, for hidden states [batch, tokens, width]. factor is 0 for dropped elements
// (philox.cuh) and the mask's scale for kept ones.
//   residual: of the dtype, or null.
//   places: position of each token in its sample, int64 [tokens]; null: the token's index.
//   samples: sample IDs, int64 [batch].
int megads_cuda_dropout(int64_t dtype, int64_t batch, int64_t tokens, int64_t width, const void* x,
                        const void* residual, const int64_t* places, const int64_t* samples, int64_t key,
                        int64_t threshold, void* out, int64_t stream);

// --- rotary.cu -------------------------------------------------------------------------------------------------------

// Rotates features i and i + dim / 2 of every head by an angle; x is [batch, tokens, heads, dim] with these strides in
// elements, out is contiguous. cos and sin are fp32 [table_rows, dim / 2]; token t of sample b uses row
// (b * tokens + t) % table_rows. Up to 2^31 - 1 tokens in all samples, with 65535 * 128 features in all heads.
//   inverse: rotate by the negative angle, which is the backward pass.
int megads_cuda_rotary(int64_t dtype, int64_t batch, int64_t tokens, int64_t heads, int64_t dim, int64_t batch_stride,
                       int64_t token_stride, int64_t head_stride, int64_t table_rows, int64_t inverse, const void* x,
                       const float* cos, const float* sin, void* out, int64_t stream);

// --- optimizer.cu ----------------------------------------------------------------------------------------------------

// Sum of squares, in fp64, of each of `pieces` pieces of a flat fp32 tensor. Up to 2^31 - 1 pieces.
//   bounds: int64 [pieces, 2] on the device: first element of each piece and one past its last.
//   partial: fp64 [pieces, MEGADS_SQUARE_SUM_BLOCKS], workspace.
enum { MEGADS_SQUARE_SUM_BLOCKS = 64 };
int megads_cuda_square_sums(int64_t pieces, const float* flat, const int64_t* bounds, double* partial, double* sums,
                            int64_t stream);

// AdamW with decoupled weight decay; master weights and moments are fp32, weights of the dtype. Per element it reads 16
// bytes and writes 12 bytes and a weight.
//   clip: gradient scale, fp32 [1]; if it is not finite, the step is skipped. step: counts from 1.
int megads_cuda_adamw(int64_t dtype, int64_t count, const float* grad, float* master, float* exp_avg,
                      float* exp_avg_sq, void* weights, const float* clip, double lr, double weight_decay,
                      double beta1, double beta2, double eps, int64_t step, int64_t stream);

// --- float8.cu -------------------------------------------------------------------------------------------------------

// Quantization to FP8 (megads/ops/float8.py) of fp32 and bf16. Magnitudes are the bits of fp32 numbers without their
// sign, as int32. Inverse scales and values of a group are NaN if its largest magnitude is infinite or NaN.

// Largest magnitude of each group of x, [groups, size]. Reads a value once. Up to 2^31 - 1 groups.
//   partial: int32 [groups, float8_parts], workspace; unused if float8_parts is 1.
int64_t megads_cuda_float8_parts(int64_t groups, int64_t size);
int megads_cuda_float8_magnitudes(int64_t dtype, int64_t groups, int64_t size, const void* x, void* partial,
                                  int32_t* bits, int64_t stream);

// Largest magnitude of each column of x, [rows, columns]. Reads a value once. Up to 2^31 - 2^16 rows and columns.
//   partial: int32 [float8_column_parts, columns], workspace; unused if float8_column_parts is 1.
int64_t megads_cuda_float8_column_parts(int64_t rows);
int megads_cuda_float8_column_magnitudes(int64_t dtype, int64_t rows, int64_t columns, const void* x, void* partial,
                                         int32_t* bits, int64_t stream);

// x, [groups, size], times the scale of its group, rounded to the format: to nearest, ties to even. Reads a value and
// writes a byte. Up to 2^31 - 1 chunks of 4096 (fp32: 2048) values, at least one in each group.
//   bits: magnitudes of the groups. inverse: fp32 [groups].
int megads_cuda_float8_quantize(int64_t dtype, int64_t format, int64_t groups, int64_t size, const void* x,
                                const int32_t* bits, void* values, float* inverse, int64_t stream);

// float8_magnitudes and float8_quantize of rows, [rows, width]. Reads a value and writes a byte: rows of up to 8192
// values stay in registers, longer ones in the cache. Up to 2^31 - 1 rows of 2^31 - 2^16 values.
int megads_cuda_float8_quantize_rows(int64_t dtype, int64_t format, int64_t rows, int64_t width, const void* x,
                                     void* values, float* inverse, int64_t stream);

// x, [rows, columns], in E4M3: with scales of its rows, and transposed, [columns, rows], with scales of its columns.
// Reads a value and writes two bytes. Up to 64 * 65535 rows.
//   row_groups: 1, one scale for all of x, or rows. column_groups: 1 or columns.
int megads_cuda_float8_quantize_both(int64_t dtype, int64_t rows, int64_t columns, int64_t row_groups,
                                     int64_t column_groups, const void* x, const int32_t* row_bits,
                                     const int32_t* column_bits, void* values, void* transposed, float* row_inverse,
                                     float* column_inverse, int64_t stream);

#ifdef __cplusplus
}
#endif
