// Entrances to the CUDA kernels, in plain C: what bindings call, and Python through ctypes.
//
// Every call enqueues on `stream` (a cudaStream_t as an integer; 0: the default stream), waits for nothing, and returns
// a cudaError_t: 0, or why it could not be enqueued, for megads_cuda_error to put in words. Pointers are to memory of
// the device, tensors contiguous; "or null" is said where a pointer may be null. Nothing to do is no error.
//
// Elements are counted with 64 bits: a tensor may have more than 2^31 of them. Rows, and the columns of one row, are
// counted with 32 where it is said; what is larger is refused with MEGADS_TOO_LARGE.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Numbers of element types.
enum { MEGADS_FP32 = 0, MEGADS_BF16 = 1, MEGADS_FP16 = 2 };

// Of a launcher: a shape that its indices do not reach.
enum { MEGADS_TOO_LARGE = -1 };

const char* megads_cuda_error(int64_t error);

// --- softmax.cu ------------------------------------------------------------------------------------------------------

// Attention scores [batch, heads, queries, keys]: softmax(scale * score + slope * (key - place)) over the keys from a
// query's start to its place that are not hidden, 0 elsewhere. A query that sees no key gets zeros. Moves
// (seen + all) / all of 2 * elements * size bytes forward, and one third more backward. Up to 2^31 - 1 rows (batch *
// heads * queries) of fewer than 2^31 - 2^16 keys.
//   slopes: fp32 [heads] or null: no bias.
//   places: int64 [queries] or null: a query's own number.
//   starts: int64 [batch, queries] or null: 0.
//   hidden: bytes [batch, keys], 0 for a key that may be seen; or null.
//   samples: int64 [batch], the number of each sample, of which dropout's mask follows (philox.cuh); null: nothing is
//     dropped, and the following arguments mean nothing. Forward writes `dropped`, the probabilities with dropout, beside
//     `out`; backward takes its gradient, and makes it again.
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
//   residual, kept: [rows, width] of the dtype and of bytes, or null; kept is a dropout's mask.
//   bias: of the dtype, as is weight; or null.
//   added: the sum as it is stored, which is what is normed; null where there is neither residual nor mask.
//   statistics: fp32 [rows, 2], mean (0 where not centred) and reciprocal deviation.
int megads_cuda_norm_forward(int64_t dtype, int64_t rows, int64_t width, double eps, int64_t centred, const void* x,
                             const void* residual, const uint8_t* kept, double kept_scale, const void* weight,
                             const void* bias, void* added, void* out, float* statistics, int64_t stream);

// Rows of `partial`, fp32 [norm_partials, 2, width], room for the backward pass. It follows from the shape alone, so
// that the gradients are the same bits on every device of one kind of arithmetic.
int64_t megads_cuda_norm_partials(int64_t rows, int64_t width);

//   normed: what was normed: `added`, or x.
//   grad_added: what else arrives at it, or null.
//   grad_residual: the gradient of what was normed. grad_x: that times kept * kept_scale; null without a mask.
int megads_cuda_norm_backward(int64_t dtype, int64_t rows, int64_t width, int64_t centred, const void* grad,
                              const void* grad_added, const void* normed, const void* weight, const float* statistics,
                              const uint8_t* kept, double kept_scale, void* grad_residual, void* grad_x,
                              float* partial, void* grad_weight, void* grad_bias, int64_t stream);

// --- cross_entropy.cu ------------------------------------------------------------------------------------------------

// Of logits [rows, columns], of which the first `valid` columns count: fp32 [rows, 3], the largest logit, the sum of
// exp(logit - largest), and the logit of the label, 0 where label - start is not in 0..valid-1. Up to 2^31 - 1 rows of
// 65535 * 1024 columns, the blocks along a row in the backward pass.
int megads_cuda_cross_entropy_forward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid, int64_t start,
                                      const void* logits, const int64_t* labels, float* statistics, int64_t stream);

// grad_logits = (exp(logit - largest) / total - one at the label) * grad of the row; 0 in columns from `valid` on.
// grad_logits may be logits.
int megads_cuda_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid, int64_t start,
                                       const void* logits, const int64_t* labels, const float* largest,
                                       const float* total, const float* grad, void* grad_logits, int64_t stream);

// --- gelu.cu ---------------------------------------------------------------------------------------------------------

// The tanh approximation of GELU, of x + bias where bias, [width] of the dtype, is not null; x is [rows, width]. With a
// bias rows and width are up to 2^30; without one only their product matters.
int megads_cuda_gelu_forward(int64_t dtype, int64_t rows, int64_t width, const void* x, const void* bias, void* out,
                             int64_t stream);

// Rows of `partial`, fp32 [gelu_partials, width].
int64_t megads_cuda_gelu_partials(int64_t rows, int64_t width);

//   partial, grad_bias: null without a bias.
int megads_cuda_gelu_backward(int64_t dtype, int64_t rows, int64_t width, const void* grad, const void* x,
                              const void* bias, void* grad_x, float* partial, void* grad_bias, int64_t stream);

// --- swiglu.cu -------------------------------------------------------------------------------------------------------

// gate * sigmoid(gate) * up, [count], of gate_up [2 count]: gates at even places, ups at odd ones.
int megads_cuda_swiglu_forward(int64_t dtype, int64_t count, const void* gate_up, void* out, int64_t stream);
int megads_cuda_swiglu_backward(int64_t dtype, int64_t count, const void* grad, const void* gate_up,
                                void* grad_gate_up, int64_t stream);

// --- dropout.cu ------------------------------------------------------------------------------------------------------

// x * factor + residual, rounded once, of hidden states [batch, tokens, width]. The factor is 0 for what the mask drops
// (philox.cuh), else its scale.
//   residual: of the dtype, or null.
//   places: int64 [tokens] or null: a token's own number.
//   samples: int64 [batch].
int megads_cuda_dropout(int64_t dtype, int64_t batch, int64_t tokens, int64_t width, const void* x,
                        const void* residual, const int64_t* places, const int64_t* samples, int64_t key,
                        int64_t threshold, void* out, int64_t stream);

// --- rotary.cu -------------------------------------------------------------------------------------------------------

// Features i and i + dim / 2 of every head turned by an angle; x is [batch, tokens, heads, dim] with these strides in
// elements, out is contiguous. cos and sin are fp32 [table_rows, dim / 2]; token t of sample b takes row
// (b * tokens + t) % table_rows. Up to 2^31 - 1 tokens in all samples of 65535 * 128 features in all heads.
//   inverse: turn back, which is the backward pass.
int megads_cuda_rotary(int64_t dtype, int64_t batch, int64_t tokens, int64_t heads, int64_t dim, int64_t batch_stride,
                       int64_t token_stride, int64_t head_stride, int64_t table_rows, int64_t inverse, const void* x,
                       const float* cos, const float* sin, void* out, int64_t stream);

// --- optimizer.cu ----------------------------------------------------------------------------------------------------

// Sum of squares of each of `pieces` pieces of a flat fp32 tensor, in fp64.
//   bounds: int64 [pieces, 2], of the device: first element of a piece and the one after its last.
//   partial: fp64 [pieces, MEGADS_SQUARE_SUM_BLOCKS], room. Up to 2^31 - 1 pieces.
enum { MEGADS_SQUARE_SUM_BLOCKS = 64 };
int megads_cuda_square_sums(int64_t pieces, const float* flat, const int64_t* bounds, double* partial, double* sums,
                            int64_t stream);

// AdamW with decoupled weight decay; masters and moments are fp32, weights of the dtype. Reads 16 bytes an element and
// writes 12 and a weight.
//   clip: fp32 [1], factor of the gradient; where it is not finite, everything stays as it was. step: from 1.
int megads_cuda_adamw(int64_t dtype, int64_t count, const float* grad, float* master, float* exp_avg,
                      float* exp_avg_sq, void* weights, const float* clip, double lr, double weight_decay,
                      double beta1, double beta2, double eps, int64_t step, int64_t stream);

#ifdef __cplusplus
}
#endif
