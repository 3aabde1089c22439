// Registers the extension's operators with torch.library through the stable ABI; nothing computes here.
//
// These are the CUDA halves that gbmoe/ calls after it has checked the arguments. The public operators, their autograd,
// fakes and autocast rules live in gbmoe/ops/ under the namespace "gbmoe".

#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(gbmoe_cuda, m) {
  m.def("cublas_loop(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor(a!) out) -> ()");
  m.def("cublas_grouped(Tensor a, Tensor b, Tensor sizes, bool trans_a, bool trans_b, bool accumulate, Tensor(a!) pointers,"
        " Tensor(b!) out) -> ()");
  m.def("zero_empty_groups(Tensor sizes, Tensor(a!) out) -> ()");
  m.def("routing_plan(Tensor ids, int num_experts, int align, int rows, int most_chunks)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("routing_plan_max_experts(int device) -> int");
  m.def("mask_row_map(Tensor mask, Tensor? pad_offsets, Tensor(a!) counts_by_chunk, Tensor(b!) row_map, Tensor(c!)? row_of_slot,"
        " Tensor(d!)? slot_of_row) -> ()");
  m.def("map_slots(Tensor row, Tensor? column, Tensor? count, Tensor? pad_offsets, Tensor? probs, Tensor(a!) row_of_slot,"
        " Tensor(b!) slot_of_row) -> ()");
  m.def(
      "route(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, Tensor? given, int kind, int groups, int group_topk,"
      " int group_best, float p, float epsilon, float scale, int lanes, int numbers_per_lane, int longest_vector, int "
      "list_length,"
      " Tensor(a!) scores, Tensor(b!) weights, Tensor(c!) ids, Tensor(d!) logsumexp) -> ()");
  m.def(
      "route_backward(Tensor saved, Tensor ids, Tensor? padding_mask, Tensor? grad_scores, Tensor? grad_weights,"
      " Tensor? grad_logsumexp, int kind, int groups, int group_topk, int group_best, float p, float epsilon, float scale, int "
      "lanes,"
      " int numbers_per_lane, int longest_vector, int slots_per_lane, Tensor(a!) grad) -> ()");
  m.def("padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? scale,"
        " Tensor? probs, bool drop_zero_probs, bool clear_behind, int short_row, Tensor(a!) out, Tensor(b!)? probs_out) -> ()");
  m.def("padded_scatter(Tensor y, Tensor row_of_slot, Tensor? columns, Tensor? counts, Tensor? weights, Tensor(a!) out) -> ()");
  m.def("padded_scatter_backward(Tensor grad, Tensor? y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns,"
        " Tensor? counts, Tensor? weights, bool clear_behind, Tensor(a!)? grad_y, Tensor(b!)? grad_weights) -> ()");
  m.def("publish_slots(Tensor ids, Tensor? weights, Tensor header, Tensor(a!) ids_out, Tensor(b!)? weights_out, Tensor(c!) header_out)"
        " -> ()");
  m.def("collect_slots(Tensor id_peers, Tensor? weight_peers, Tensor header_peers, int first_expert, int experts, bool only_differing,"
        " Tensor(a!) ids, Tensor(b!)? weights, Tensor(c!) headers) -> ()");
  m.def("pull_rows(Tensor peers, int rank, Tensor row_of_slot, Tensor(a!) out) -> ()");
  m.def("push_row_sums(Tensor y, Tensor row_of_slot, Tensor? weights, Tensor peers, int rank) -> ()");
  m.def("push_slot_rows(Tensor y, Tensor slot_of_row, int top_k, int capacity, Tensor peers) -> ()");
  m.def("sum_pushed_rows(Tensor pushed, Tensor ids, int experts, int experts_per_rank, float scale, Tensor(a!) out) -> ()");
  m.def("push_slot_scalars(Tensor slot_scalars, Tensor row_of_slot, int rows, int shard, Tensor peers) -> ()");
  m.def("sum_pushed_scalars(Tensor pushed, Tensor ids, int ranks, int experts, int experts_per_rank, Tensor(a!) out) -> ()");
  m.def("clear_rows_without_slot(Tensor slot_of_row, Tensor(a!) rows) -> ()");
  m.def(
      "activate(Tensor h, Tensor? g, int activation, float[] constants, Tensor(a!) out) -> ()");
  m.def(
      "activate_backward(Tensor h, Tensor? g, Tensor(a!) d, Tensor slot_of_row, Tensor? weights, int activation, float[]"
      " constants, Tensor(b!) a, Tensor(c!)? dg, Tensor(d!)? grad_weights) -> ()");
  m.def("hopper_built() -> bool");
  m.def("hopper_workspace(Tensor on, int groups, int splits_per_sm) -> int");
  m.def(
      "hopper_rows(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor? sizes, bool trans_b, int tile_n, int cluster_m,"
      " int cluster_n, int panel, int most_ahead, Tensor(a!)? workspace, int min_k_blocks, int split_cost, int most_splits,"
      " Tensor(b!) out) -> ()");
  m.def("hopper_weights(Tensor a, Tensor b, Tensor sizes, int cluster_m, int cluster_n, int panel, Tensor(a!) workspace,"
        " int min_k_blocks, int split_cost, int most_splits, float even, Tensor(b!) out) -> ()");
  m.def("hopper_rows_gathered(Tensor tokens, Tensor slot_of_row, int top_k, Tensor b, Tensor sizes, int panel, Tensor(a!) out) -> ()");
  m.def(
      "hopper_weights_gathered(Tensor a, Tensor? a2, Tensor tokens, Tensor slot_of_row, int top_k, Tensor sizes, int cluster_m,"
      " int cluster_n, int panel, Tensor(a!) workspace, int min_k_blocks, int split_cost, int most_splits, float even,"
      " Tensor(b!) out, Tensor(c!)? out2) -> ()");
  m.def(
      "hopper_up(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor sizes, int activation, float[] constants, int"
      " cluster_n, int panel, bool even_panels, int most_ahead, Tensor(a!)? workspace, Tensor(b!) a, Tensor(c!)? h) -> ()");
  m.def(
      "hopper_up_glu(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor v1, Tensor sizes, int activation, float[]"
      " constants, int cluster_n, int panel, bool even_panels, int most_ahead, Tensor(a!)? workspace, Tensor(b!) a,"
      " Tensor(c!)? h, Tensor(d!)? g) -> ()");
  m.def(
      "hopper_down_backward(Tensor dz, Tensor w2, Tensor sizes, Tensor h, Tensor? g, Tensor slot_of_row, Tensor? weights,"
      " int activation, float[] constants, int tile_n, int cluster_n, int panel, Tensor(a!) a, Tensor(b!) dh, Tensor(c!)? dg,"
      " Tensor(d!)? dots, Tensor(e!)? grad_weights) -> ()");
  m.def("hopper_few_rows_gemm(Tensor a, Tensor b, Tensor? sizes, bool trans_b, bool reads_early, Tensor(a!) out) -> ()");
  m.def(
      "hopper_few_rows_up(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor? v1, Tensor sizes, int activation,"
      " float[] constants, Tensor(a!) a, Tensor(b!)? h, Tensor(c!)? g) -> ()");
  m.def("tensor_core_built(int device) -> bool");
  m.def("hopper_scaled_rows(Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor? a2, Tensor? scales_a2, Tensor? b2,"
        " Tensor? scales_b2, Tensor sizes, int tile_n, int cluster_n, int panel, Tensor(a!)? workspace, Tensor(b!) out) -> ()");
  m.def(
      "hopper_scaled_up(Tensor x, Tensor scales_x, Tensor w1, Tensor scales_w1, Tensor? v1, Tensor? scales_v1, Tensor sizes,"
      " int activation, float[] constants, int cluster_n, int panel, bool even_panels, Tensor(a!)? workspace, bool"
      " power_of_two, bool bfloat16, Tensor(b!) a, Tensor(c!) scales_a, Tensor(d!)? h, Tensor(e!)? g) -> ()");
  m.def("hopper_scaled_weights(Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor filled_rows, int panel, Tensor(a!) workspace,"
        " Tensor(b!) out) -> ()");
  m.def("quantize_gathered(Tensor x, Tensor row_of_slot, Tensor slot_of_row, bool power_of_two, Tensor(a!) out, Tensor(b!) scales)"
        " -> ()");
  m.def("quantize_rows(Tensor x, bool power_of_two, Tensor(a!) out, Tensor(b!) scales) -> ()");
  m.def("quantize_weights(Tensor weights, bool power_of_two, Tensor(a!)? out, Tensor(b!)? scales, Tensor(c!)? transposed,"
        " Tensor(d!)? transposed_scales) -> ()");
  m.def(
      "activate_backward_scaled(Tensor h, Tensor? g, Tensor(a!) d, Tensor slot_of_row, Tensor? weights, int activation,"
      " float[] constants, bool power_of_two, Tensor(b!) a, Tensor(c!)? dg, Tensor(d!) scaled_dh, Tensor(e!) scales_dh,"
      " Tensor(f!)? scaled_dg, Tensor(g!)? scales_dg, Tensor(h!)? grad_weights) -> ()");
  m.def(
      "activate_backward_k_blocks(Tensor h, Tensor? g, Tensor d, Tensor slot_of_row, Tensor? weights, Tensor sizes, int"
      " activation, float[] constants, bool power_of_two, Tensor(a!) dh, Tensor(b!) scales_dh, Tensor(c!)? dg, Tensor(d!)?"
      " scales_dg, Tensor(e!) a_blocks, Tensor(f!) a_scales, Tensor(g!) dh_blocks, Tensor(h!) dh_scales, Tensor(i!)?"
      " dg_blocks, Tensor(j!)? dg_scales, Tensor(k!) filled_rows, Tensor(l!)? dots, Tensor(m!)? grad_weights) -> ()");
  m.def("quantize_k_blocks(Tensor x, Tensor? slot_of_row, int top_k, Tensor sizes, bool power_of_two, Tensor(a!) out,"
        " Tensor(b!) scales, Tensor(c!) filled_rows) -> ()");
  m.def("tensor_core_rows(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor? sizes, bool trans_b, int tile_m, int tile_n, int panel,"
        " Tensor(a!) out) -> ()");
  m.def("tensor_core_weights(Tensor a, Tensor b, Tensor sizes, int tile_m, int tile_n, int panel, bool accumulate, Tensor(a!) out)"
        " -> ()");
  m.def(
      "tensor_core_up(Tensor x, Tensor w1, Tensor? v1, Tensor sizes, int activation, float[] constants, int tile_m, int"
      " tile_n, int panel, Tensor(a!) a, Tensor(b!)? h, Tensor(c!)? g) -> ()");
  m.def("few_rows_gemm(Tensor a, Tensor b, Tensor? sizes, bool trans_b, bool reads_early, Tensor(a!) out) -> ()");
  m.def("few_rows_linear(Tensor x, Tensor weight, Tensor? sizes, Tensor(a!) out) -> ()");
  m.def(
      "few_rows_up(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor? v1, Tensor sizes, int activation, float[]"
      " constants, Tensor(a!) a, Tensor(b!)? h, Tensor(c!)? g) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gbmoe_cuda, CompositeExplicitAutograd, m) {
  m.impl("hopper_built", TORCH_BOX(&gbmoe::hopper_built));
  m.impl("routing_plan_max_experts", TORCH_BOX(&gbmoe::routing_plan_max_experts));
  m.impl("tensor_core_built", TORCH_BOX(&gbmoe::tensor_core_built));
}

STABLE_TORCH_LIBRARY_IMPL(gbmoe_cuda, CUDA, m) {
  m.impl("cublas_loop", TORCH_BOX(&gbmoe::cublas_loop));
  m.impl("cublas_grouped", TORCH_BOX(&gbmoe::cublas_grouped));
  m.impl("zero_empty_groups", TORCH_BOX(&gbmoe::zero_empty_groups));
  m.impl("routing_plan", TORCH_BOX(&gbmoe::routing_plan));
  m.impl("mask_row_map", TORCH_BOX(&gbmoe::mask_row_map));
  m.impl("map_slots", TORCH_BOX(&gbmoe::map_slots));
  m.impl("route", TORCH_BOX(&gbmoe::route));
  m.impl("route_backward", TORCH_BOX(&gbmoe::route_backward));
  m.impl("padded_gather", TORCH_BOX(&gbmoe::padded_gather));
  m.impl("padded_scatter", TORCH_BOX(&gbmoe::padded_scatter));
  m.impl("padded_scatter_backward", TORCH_BOX(&gbmoe::padded_scatter_backward));
  m.impl("publish_slots", TORCH_BOX(&gbmoe::publish_slots));
  m.impl("collect_slots", TORCH_BOX(&gbmoe::collect_slots));
  m.impl("pull_rows", TORCH_BOX(&gbmoe::pull_rows));
  m.impl("push_row_sums", TORCH_BOX(&gbmoe::push_row_sums));
  m.impl("push_slot_rows", TORCH_BOX(&gbmoe::push_slot_rows));
  m.impl("sum_pushed_rows", TORCH_BOX(&gbmoe::sum_pushed_rows));
  m.impl("push_slot_scalars", TORCH_BOX(&gbmoe::push_slot_scalars));
  m.impl("sum_pushed_scalars", TORCH_BOX(&gbmoe::sum_pushed_scalars));
  m.impl("clear_rows_without_slot", TORCH_BOX(&gbmoe::clear_rows_without_slot));
  m.impl("activate", TORCH_BOX(&gbmoe::activate));
  m.impl("activate_backward", TORCH_BOX(&gbmoe::activate_backward));
  m.impl("hopper_workspace", TORCH_BOX(&gbmoe::hopper_workspace));
  m.impl("hopper_rows", TORCH_BOX(&gbmoe::hopper_rows));
  m.impl("hopper_weights", TORCH_BOX(&gbmoe::hopper_weights));
  m.impl("hopper_rows_gathered", TORCH_BOX(&gbmoe::hopper_rows_gathered));
  m.impl("hopper_weights_gathered", TORCH_BOX(&gbmoe::hopper_weights_gathered));
  m.impl("hopper_up", TORCH_BOX(&gbmoe::hopper_up));
  m.impl("hopper_up_glu", TORCH_BOX(&gbmoe::hopper_up_glu));
  m.impl("hopper_down_backward", TORCH_BOX(&gbmoe::hopper_down_backward));
  m.impl("hopper_few_rows_gemm", TORCH_BOX(&gbmoe::hopper_few_rows_gemm));
  m.impl("hopper_few_rows_up", TORCH_BOX(&gbmoe::hopper_few_rows_up));
  m.impl("hopper_scaled_rows", TORCH_BOX(&gbmoe::hopper_scaled_rows));
  m.impl("hopper_scaled_up", TORCH_BOX(&gbmoe::hopper_scaled_up));
  m.impl("hopper_scaled_weights", TORCH_BOX(&gbmoe::hopper_scaled_weights));
  m.impl("quantize_gathered", TORCH_BOX(&gbmoe::quantize_gathered));
  m.impl("quantize_rows", TORCH_BOX(&gbmoe::quantize_rows));
  m.impl("quantize_weights", TORCH_BOX(&gbmoe::quantize_weights));
  m.impl("activate_backward_scaled", TORCH_BOX(&gbmoe::activate_backward_scaled));
  m.impl("activate_backward_k_blocks", TORCH_BOX(&gbmoe::activate_backward_k_blocks));
  m.impl("quantize_k_blocks", TORCH_BOX(&gbmoe::quantize_k_blocks));
  m.impl("tensor_core_rows", TORCH_BOX(&gbmoe::tensor_core_rows));
  m.impl("tensor_core_weights", TORCH_BOX(&gbmoe::tensor_core_weights));
  m.impl("tensor_core_up", TORCH_BOX(&gbmoe::tensor_core_up));
  m.impl("few_rows_gemm", TORCH_BOX(&gbmoe::few_rows_gemm));
  m.impl("few_rows_linear", TORCH_BOX(&gbmoe::few_rows_linear));
  m.impl("few_rows_up", TORCH_BOX(&gbmoe::few_rows_up));
}
