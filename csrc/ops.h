// Every operator of the extension. They compute and neither allocate nor check: callers in gbmoe/ hand them contiguous
// tensors of matching dtypes on one device, CPU int64 `sizes`, and the tensors to write to, allocated by torch in Python
// (where running out of memory is torch's own exception). Whatever maps, ids and sizes hold, no operator reads or writes outside
// its tensors: an entry outside its range counts as none.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace gbmoe {

using torch::stable::Tensor;

// cublas_grouped_gemm.cu; pointers: int64 on the device, room for three per group
void cublas_loop(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor out);
void cublas_grouped(
    Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor pointers, Tensor out);

// zero_empty_groups.cu
void zero_empty_groups(Tensor sizes, Tensor out);

// routing_plan.cu; the exception that allocates: its outputs are small and many, and Python's overhead would outlast the kernels.
// ids int32 or int64 [T,K]; most_chunks is tuning.permutation.most_chunks; returns row_of_slot, slot_of_row, counts, offsets,
// padded_counts
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> routing_plan(
    Tensor ids, int64_t num_experts, int64_t align, int64_t rows, int64_t most_chunks);

// For how many experts routing_plan and mask_row_map have room in the shared memory of this device (its index)
int64_t routing_plan_max_experts(int64_t device);

// row_map.cu; mask [T,E] of any integer type or bool, int64 pad_offsets [E], counts_by_chunk int32 [chunks,E] to work in,
// row_map int32 [T,2E+1]; with row_of_slot [T,E] and slot_of_row [P], both or neither, also what map_slots makes of the map
void mask_row_map(Tensor mask, std::optional<Tensor> pad_offsets, Tensor counts_by_chunk, Tensor row_map,
                  std::optional<Tensor> row_of_slot, std::optional<Tensor> slot_of_row);
// row, column and count may be views with a row stride; of row_of_slot the entries in use are written
void map_slots(Tensor row, std::optional<Tensor> column, std::optional<Tensor> count, std::optional<Tensor> pad_offsets,
               std::optional<Tensor> probs, Tensor row_of_slot, Tensor slot_of_row);

// router_forward.cu, router_backward.cu; `kind` and what follows it are a RouterFunction (router_function.cuh), p = 0 stands for
// no norm; ids and given are int64, logsumexp and expert_bias float32, padding_mask bool; lanes and what follows are a
// tuning.router.RouterConfig. All other tensors are bfloat16, float16 or float32. `saved` are the scores where kind is 0, and the
// logits of any other function.
void route(
    Tensor logits, std::optional<Tensor> expert_bias, std::optional<Tensor> padding_mask, std::optional<Tensor> given,
    int64_t kind, int64_t groups, int64_t group_topk, int64_t group_best, double p, double epsilon, double scale, int64_t lanes,
    int64_t numbers_per_lane, int64_t longest_vector, int64_t list_length, Tensor scores, Tensor weights, Tensor ids,
    Tensor logsumexp);
void route_backward(
    Tensor saved, Tensor ids, std::optional<Tensor> padding_mask, std::optional<Tensor> grad_scores,
    std::optional<Tensor> grad_weights, std::optional<Tensor> grad_logsumexp, int64_t kind, int64_t groups, int64_t group_topk,
    int64_t group_best, double p, double epsilon, double scale, int64_t lanes, int64_t numbers_per_lane, int64_t longest_vector,
    int64_t slots_per_lane, Tensor grad);

// padded_gather.cu, padded_scatter.cu, padded_scatter_backward.cu; row_of_slot, columns and counts may be views with a row
// stride, short_row is tuning.permutation.SHORT_ROW
void padded_gather(
    Tensor x, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns, std::optional<Tensor> counts,
    std::optional<Tensor> scale, std::optional<Tensor> probs, bool drop_zero_probs, bool clear_behind, int64_t short_row,
    Tensor out, std::optional<Tensor> probs_out);
void padded_scatter(
    Tensor y, Tensor row_of_slot, std::optional<Tensor> columns, std::optional<Tensor> counts, std::optional<Tensor> weights,
    Tensor out);
void padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns,
    std::optional<Tensor> counts, std::optional<Tensor> weights, bool clear_behind, std::optional<Tensor> grad_y,
    std::optional<Tensor> grad_weights);

// peer_slots.cu, peer_pull.cu, peer_push.cu, peer_sum.cu; expert parallelism among ranks that map each other's memory. `peers`
// and *_peers are int64 on the CPU: the address, in each rank's memory, of the region that is read or written; rows are aligned
// to 16 bytes there. The tokens of all ranks are numbered rank * capacity + index, and S = ranks * capacity. Z is the number of
// shards of an expert, `rank` is this rank.
// ids [T,K] int32 or int64, header int64 [4] on the CPU -> ids_out int32, weights_out float32 [capacity,K], header_out int32 [4]
void publish_slots(Tensor ids, std::optional<Tensor> weights, Tensor header, Tensor ids_out, std::optional<Tensor> weights_out,
                   Tensor header_out);
// -> ids int32 [S,K], counted from first_expert, -1 where they name none of `experts`; weights float32 [S,K]; headers int32
// [ranks,4], with only_differing not written where their second numbers are equal
void collect_slots(Tensor id_peers, std::optional<Tensor> weight_peers, Tensor header_peers, int64_t first_expert, int64_t experts,
                   bool only_differing, Tensor ids, std::optional<Tensor> weights, Tensor headers);
// row_of_slot [S,K]; out [P,H], of any dtype, where rows without a slot stay as they are
void pull_rows(Tensor peers, int64_t rank, Tensor row_of_slot, Tensor out);
// Into [ranks, capacity, H] of each token's owner
void push_row_sums(Tensor y, Tensor row_of_slot, std::optional<Tensor> weights, Tensor peers, int64_t rank);
// Into [capacity * K, H] of each token's owner, without a sum
void push_slot_rows(Tensor y, Tensor slot_of_row, int64_t top_k, int64_t capacity, Tensor peers);
// pushed [ranks, capacity, H], int64 ids [T,K]; out [T,H], `scale` times the sums
void sum_pushed_rows(Tensor pushed, Tensor ids, int64_t experts, int64_t experts_per_rank, double scale, Tensor out);
// float32 [S,K] into [Z, capacity, K] of each token's owner, 0 for slots whose row is not one of `rows`
void push_slot_scalars(Tensor slot_scalars, Tensor row_of_slot, int64_t rows, int64_t shard, Tensor peers);
// pushed float32 [Z, capacity, K], int64 ids [T,K]; out [T,K], any floating dtype
void sum_pushed_scalars(Tensor pushed, Tensor ids, int64_t ranks, int64_t experts, int64_t experts_per_rank, Tensor out);
// clear_rows.cu; rows [P,F] of any dtype, zeroed where slot_of_row is negative and not touched elsewhere
void clear_rows_without_slot(Tensor slot_of_row, Tensor rows);

// activation_kernels.cu; d becomes dh, grad_weights comes as zeros
void activate(Tensor h, std::optional<Tensor> g, int64_t activation, std::vector<double> constants, Tensor out);
void activate_backward(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, int64_t activation, std::vector<double> constants,
    Tensor a, std::optional<Tensor> dg, std::optional<Tensor> grad_weights);

// hopper/; compute capability 9.0, bf16 and fp16, row lengths that are multiples of 8, int32 or int64 sizes on the device.
// tile_n, cluster_m, cluster_n, panel and even_panels are fields of tuning.hopper_tiles.GemmConfig; min_k_blocks, split_cost,
// most_splits and even are min_k_blocks, cost, most and even of its SplitConfig.
bool hopper_built();
// The bytes of a workspace, which may hold anything before it is used. `splits_per_sm`, 0 to 4: the number of tiles' partial sums
// that it has room for, for each multiprocessor; with 0 no sum is split, and clusters only take their tiles from its counter.
int64_t hopper_workspace(Tensor on, int64_t groups, int64_t splits_per_sm);
// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]); b [E,K,N], or [E,N,K] with trans_b; without sizes one
// group has all rows. out is of their dtype, or with trans_b, in square tiles and no cluster, fp32
void hopper_rows(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::optional<Tensor> sizes, bool trans_b,
    int64_t tile_n, int64_t cluster_m, int64_t cluster_n, int64_t panel, int64_t most_ahead, std::optional<Tensor> workspace,
    int64_t min_k_blocks, int64_t split_cost, int64_t most_splits, Tensor out);
// out[e] = a[rows of e].T @ b[rows of e], in their dtype; or out[e] += that, where out is float32
void hopper_weights(
    Tensor a, Tensor b, Tensor sizes, int64_t cluster_m, int64_t cluster_n, int64_t panel, Tensor workspace, int64_t min_k_blocks,
    int64_t split_cost, int64_t most_splits, double even, Tensor out);
// hopper_rows with b [E,N,K] and a[r] = tokens[slot_of_row[r] / top_k], or zeros where slot_of_row[r] names no slot
void hopper_rows_gathered(Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor b, Tensor sizes, int64_t panel, Tensor out);
// hopper_weights with b[r] = tokens[slot_of_row[r] / top_k], or zeros where slot_of_row[r] names no slot; in their dtype only. With a2
// and out2, which have the shapes of a and out, the same for these, too.
void hopper_weights_gathered(
    Tensor a, std::optional<Tensor> a2, Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor sizes, int64_t cluster_m,
    int64_t cluster_n, int64_t panel, Tensor workspace, int64_t min_k_blocks, int64_t split_cost, int64_t most_splits,
    double even, Tensor out, std::optional<Tensor> out2);
// h = x @ w1[e].T and a = act(h), or with g = x @ v1[e].T a = act(h) * g; h and g are written if they are given, both or neither.
// With slot_of_row, for silu and gelu_tanh only, x is [tokens,H], and row r that of token slot_of_row[r] / top_k; where cluster_n is
// not 2 the workspace is not used then.
void hopper_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor sizes, int64_t activation, std::vector<double> constants, int64_t cluster_n,
    int64_t panel, bool even_panels, int64_t most_ahead, std::optional<Tensor> workspace, Tensor a, std::optional<Tensor> h);
void hopper_up_glu(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor v1, Tensor sizes, int64_t activation, std::vector<double> constants,
    int64_t cluster_n, int64_t panel, bool even_panels, int64_t most_ahead, std::optional<Tensor> workspace, Tensor a,
    std::optional<Tensor> h, std::optional<Tensor> g);
// d = dz[rows of e] @ w2[e].T and what activate_backward makes of it; dots: float32 [F / 64 rounded up, P], to work in, given
// where grad_weights is
void hopper_down_backward(
    Tensor dz, Tensor w2, Tensor sizes, Tensor h, std::optional<Tensor> g, Tensor slot_of_row, std::optional<Tensor> weights,
    int64_t activation, std::vector<double> constants, int64_t tile_n, int64_t cluster_n, int64_t panel, Tensor a, Tensor dh, std::optional<Tensor> dg,
    std::optional<Tensor> dots, std::optional<Tensor> grad_weights);
// few_rows_gemm and few_rows_up, where a sum has the bits that hopper_rows gives it if it splits none
void hopper_few_rows_gemm(Tensor a, Tensor b, std::optional<Tensor> sizes, bool trans_b, bool reads_early, Tensor out);
void hopper_few_rows_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, Tensor sizes,
    int64_t activation, std::vector<double> constants, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g);

// hopper/, e4m3 operands with scales (float8.cuh): a, x [P,K] with fp32 [P, K / 128], b [E,N,K] with fp32 [E, N / 128, K / 128],
// rounded up; both contiguous along K, and K a multiple of 16.
//
// out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), bf16 or fp16
void hopper_scaled_rows(
    Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, std::optional<Tensor> a2, std::optional<Tensor> scales_a2,
    std::optional<Tensor> b2, std::optional<Tensor> scales_b2, Tensor sizes, int64_t tile_n, int64_t cluster_n, int64_t panel,
    std::optional<Tensor> workspace, Tensor out);
// x bf16 or fp16, out e4m3; rows of multiples of 16 elements. As padded_gather, rows behind the last expert are left
// as they are; out [P,H], scales [P, H / 128 rounded up].
void quantize_gathered(Tensor x, Tensor row_of_slot, Tensor slot_of_row, bool power_of_two, Tensor out, Tensor scales);
void quantize_rows(Tensor x, bool power_of_two, Tensor out, Tensor scales);
// weights [E,F,H]: out [E,F,H] with scales [E, F / 128, H / 128], transposed [E,H,F] with [E, H / 128, F / 128], rounded up; what is
// given of the two is written, from one read
void quantize_weights(Tensor weights, bool power_of_two, std::optional<Tensor> out, std::optional<Tensor> scales,
                      std::optional<Tensor> transposed, std::optional<Tensor> transposed_scales);
// activate_backward, and quantize_rows of dh and dg
void activate_backward_scaled(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, int64_t activation, std::vector<double> constants,
    bool power_of_two, Tensor a, std::optional<Tensor> dg, Tensor scaled_dh, Tensor scales_dh, std::optional<Tensor> scaled_dg,
    std::optional<Tensor> scales_dg, std::optional<Tensor> grad_weights);
// activate_backward, whose results leave in e4m3 alone: quantize_rows of dh and dg, but for rows behind the last expert's, and
// quantize_k_blocks of a', dh and dg, which share filled_rows. grad_weights of slots whose rows lie behind the last expert is undefined. dots is scratch, fp32 [F / 128, P], rounded up; given with grad_weights
void activate_backward_k_blocks(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, Tensor sizes,
    int64_t activation, std::vector<double> constants, bool power_of_two, Tensor dh, Tensor scales_dh, std::optional<Tensor> dg, std::optional<Tensor> scales_dg,
    Tensor a_blocks, Tensor a_scales, Tensor dh_blocks, Tensor dh_scales, std::optional<Tensor> dg_blocks,
    std::optional<Tensor> dg_scales, Tensor filled_rows, std::optional<Tensor> dots, std::optional<Tensor> grad_weights);
// x [P,K] bf16 or fp16, K a multiple of 16; with slot_of_row [P] x is [T,K], and row r that of token slot_of_row[r] / top_k, or zeros where
// slot_of_row[r] names no slot. out e4m3 [B,K,128], scales [B,K], with room for B >= P / 128 + E k-blocks, of which those behind the last
// expert's are left as they are. filled_rows int32 [E]: each expert's rows, rounded up to k-blocks
void quantize_k_blocks(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, bool power_of_two, Tensor out, Tensor scales,
    Tensor filled_rows);
// out[e] [M,N] = the sum over the rows of e of a's times b's, bf16 or fp16; both as quantize_k_blocks makes them of the same sizes, a
// [B,M,128] and b [B,N,128]
void hopper_scaled_weights(
    Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor filled_rows, int64_t panel, Tensor workspace, Tensor out);
// hopper_up(_glu) with a in e4m3 and its scales, from a rounded to bf16 or, without `bfloat16`, fp16; h and g in that dtype
void hopper_scaled_up(
    Tensor x, Tensor scales_x, Tensor w1, Tensor scales_w1, std::optional<Tensor> v1, std::optional<Tensor> scales_v1, Tensor sizes,
    int64_t activation, std::vector<double> constants, int64_t cluster_n, int64_t panel, bool even_panels, std::optional<Tensor> workspace, bool power_of_two,
    bool bfloat16, Tensor a, Tensor scales_a, std::optional<Tensor> h, std::optional<Tensor> g);

// tensor_core/; compute capability 8.0 and later, row lengths that are multiples of 8, int32 or int64 sizes on the device. tile_m,
// tile_n and panel are fields of tuning.tensor_core_tiles.TensorCoreConfig.
//
// Whether the extension has code for this device (its index)
bool tensor_core_built(int64_t device);
// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]); b [E,K,N], or [E,N,K] with trans_b; bf16, fp16, or fp32, whose
// operands are rounded to TF32; without sizes one group has all rows. out is of their dtype, or with trans_b and without a2 fp32
void tensor_core_rows(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::optional<Tensor> sizes, bool trans_b,
    int64_t tile_m, int64_t tile_n, int64_t panel, Tensor out);
// out[e] = a[rows of e].T @ b[rows of e], in their dtype; with `accumulate` it is added to out, which is fp32
void tensor_core_weights(
    Tensor a, Tensor b, Tensor sizes, int64_t tile_m, int64_t tile_n, int64_t panel, bool accumulate, Tensor out);
// h = x[rows of e] @ w1[e].T, a = act(h); with v1 g = x[rows of e] @ v1[e].T, a = act(h) * g; h and g are stored where they are given;
// bf16 and fp16
void tensor_core_up(Tensor x, Tensor w1, std::optional<Tensor> v1, Tensor sizes, int64_t activation, std::vector<double> constants, int64_t tile_m, int64_t tile_n,
                    int64_t panel, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g);
// The same as tensor_core_rows without a second pair, and as tensor_core_up, for groups of few rows; bf16 and fp16. Sums are made of parts.
// With slot_of_row, x is [tokens,H], and row r that of token slot_of_row[r] / top_k, or zeros where that names none. With reads_early,
// which needs b and sizes to have been complete before the kernel before this one began, they are read before that has ended. Without
// sizes one group has all rows.
void few_rows_gemm(Tensor a, Tensor b, std::optional<Tensor> sizes, bool trans_b, bool reads_early, Tensor out);
void few_rows_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, Tensor sizes,
    int64_t activation, std::vector<double> constants, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g);
// out = x @ weight.T, of as many rows as the only group has, in their dtype or fp32, where a sum has on Hopper the bits that
// tensor_core_rows gives it
void few_rows_linear(Tensor x, Tensor weight, std::optional<Tensor> sizes, Tensor out);

}  // namespace gbmoe
