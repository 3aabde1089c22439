// The instances of the kernels in csrc/tensor_core/ and csrc/low_rank/ that are emulated, by number; tests/engines/emulated_gpu/__init__.py calls them.
// It compiles this file once for each function that is called (EMULATED_rows, ...) and each dtype that it is called with (DTYPE).

#include "csrc/low_rank/low_rank_kernel.cuh"
#include "csrc/tensor_core/few_rows.cuh"
#include "csrc/tensor_core/grouped_gemm.cuh"

namespace gbmoe::tensor_core {

thread_local unsigned char shared_bytes[emulated_gpu::kSharedBytes];  // which the kernel declares as extern

namespace {

using emulated_gpu::Run;

template <typename Traits> void launch_instance(const Arguments& args, const Run& run) {
  static_assert(Traits::kSharedBytes <= emulated_gpu::kSharedBytes);
  emulated_gpu::launch(run, Traits::kThreads, shared_bytes, [&] { grouped_gemm_kernel<Traits>(args); });
}

template <typename Element, typename Output, typename Tile, bool kKMajorA, bool kKMajorB, bool kGroupedK, EpilogueKind kEpilogue,
          typename Family = void>
void launch(const Arguments& args, const Run& run) {
  if (run.large_memory) {
    launch_instance<GemmTraits<Element, Output, Tile, Memory::kLarge, kKMajorA, kKMajorB, kGroupedK, kEpilogue, Family>>(args, run);
  } else {
    launch_instance<GemmTraits<Element, Output, Tile, Memory::kSmall, kKMajorA, kKMajorB, kGroupedK, kEpilogue, Family>>(args, run);
  }
}

template <typename... Tiles, typename F> bool with_tile(int tile_m, int tile_n, const F& f) {
  return ((tile_m == Tiles::kTileM && tile_n == Tiles::kTileN ? (f(Tiles()), true) : false) || ...);
}

template <typename F> bool with_dtype(int dtype, const F& f) {
  if (dtype != DTYPE) return false;
  if constexpr (DTYPE == 0) f(__nv_bfloat16());
  else if constexpr (DTYPE == 1) f(__half());
  else f(float());
  return true;
}

}  // namespace

extern "C" {

// What the kernel that was launched last did wrong, or null.
const char* failure() { return emulated_gpu::failure; }

// Each returns whether there is an instance.
#ifdef EMULATED_rows
bool rows(int dtype, bool to_float, int tile_m, int tile_n, bool trans_b, const Arguments* args, const Run* run) {
  bool found = false;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    found = with_tile<WideTile, SquareTile, LowTile>(tile_m, tile_n, [&](auto tile) {
      using Tile = decltype(tile);
      if (to_float && trans_b) launch<T, float, Tile, true, true, false, EpilogueKind::kStore>(*args, *run);
      else if (trans_b) launch<T, T, Tile, true, true, false, EpilogueKind::kStore>(*args, *run);
      else launch<T, T, Tile, true, false, false, EpilogueKind::kStore>(*args, *run);
    });
  });
  return found;
}
#endif

#ifdef EMULATED_weights
bool weights(int dtype, int tile_m, int tile_n, bool accumulate, const Arguments* args, const Run* run) {
  bool found = false;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    found = with_tile<WideTile, SquareTile>(tile_m, tile_n, [&](auto tile) {
      using Tile = decltype(tile);
      if (accumulate) launch<T, float, Tile, false, false, true, EpilogueKind::kAccumulate>(*args, *run);
      else launch<T, T, Tile, false, false, true, EpilogueKind::kStore>(*args, *run);
    });
  });
  return found;
}
#endif

#ifdef EMULATED_up
// In bfloat16, with one activation of each family.
bool up(int tile_m, int tile_n, bool glu, const Arguments* args, const Run* run) {
  using T = __nv_bfloat16;
  return with_tile<WideTile, LowTile>(tile_m, tile_n, [&](auto tile) {
    using Tile = decltype(tile);
    const auto of_family = [&](auto family) {
      using Family = decltype(family);
      if (glu) launch<T, T, Tile, true, true, false, EpilogueKind::kGlu, Family>(*args, *run);
      else launch<T, T, Tile, true, true, false, EpilogueKind::kActivation, Family>(*args, *run);
    };
    const ActivationOf& activation = args->activation;
    if (activation.kind == kGelu) of_family(ErfActivation(activation));
    else if (activation.kind <= kGeluTanh) of_family(SigmoidActivation(activation));
    else if (changes_gate(activation.kind)) of_family(GatingActivation(activation));
    else of_family(PiecewiseActivation(activation));
  });
}
#endif

}  // extern "C"

}  // namespace gbmoe::tensor_core

namespace gbmoe::few_rows {

thread_local unsigned char shared_bytes[emulated_gpu::kSharedBytes];

namespace {

// An operand that is NaN until it arrives.
struct Late {
  Late(void* at, int64_t bytes) : at(static_cast<unsigned char*>(at)), bytes(this->at, this->at + bytes) { std::memset(at, 0xff, bytes); }
  void arrive() { std::memcpy(at, bytes.data(), bytes.size()); }
  unsigned char* at;
  std::vector<unsigned char> bytes;
};

template <typename Columns> constexpr bool kKMajor = true;
template <typename T, bool kUp, bool kGlu> constexpr bool kKMajor<NMajorColumns<T, kUp, kGlu>> = false;

template <typename T, typename Columns, EpilogueKind kEpilogue, bool kInTurns = false>
void launch(const Arguments& args, emulated_gpu::Run run) {
  static_assert(sizeof(Sums<Columns, kInTurns>) <= emulated_gpu::kSharedBytes);
  run.ctas = ceil_div(args.size_n, Columns::kTileN) * std::min(args.groups, args.rows) * args.row_blocks;
  // The kernel before writes the rows and, unless they are read early, the weights.
  std::vector<Late> late{Late(const_cast<void*>(args.x), (args.slot_of_row ? args.tokens : args.rows) * int64_t{args.size_k} * sizeof(T))};
  if (!args.reads_early) {
    const int size_n = args.paired ? 2 * args.size_n : args.size_n;
    const int rows = kKMajor<Columns> ? size_n : args.size_k, columns = kKMajor<Columns> ? args.size_k : size_n;
    late.emplace_back(
        const_cast<void*>(args.b[0]),
        ((args.groups - 1) * args.pitch_b.group + (rows - 1) * int64_t{args.pitch_b.row} + columns) * sizeof(T));
  }
  emulated_gpu::kernel_before = [&] { for (Late& operand : late) operand.arrive(); };
  emulated_gpu::launch(run, 32 * Columns::kWarps, shared_bytes, [&] { few_rows_kernel<T, Columns, kEpilogue, kInTurns>(args); });
}
}  // namespace

extern "C" {

#ifdef EMULATED_few_rows_gemm
bool few_rows_gemm(int dtype, bool trans_b, const Arguments* args, const emulated_gpu::Run* run) {
  return dtype < 2 && tensor_core::with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (trans_b) launch<T, KMajorColumns<T, false>, EpilogueKind::kStore>(*args, *run);
      else launch<T, NMajorColumns<T>, EpilogueKind::kStore>(*args, *run);
    }
  });
}
#endif

#ifdef EMULATED_few_rows_linear
bool few_rows_linear(int dtype, const Arguments* args, const emulated_gpu::Run* run) {
  return dtype < 2 && tensor_core::with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (args->row_blocks == 1) launch<T, KMajorColumns<T, false, true, 1>, EpilogueKind::kStore, true>(*args, *run);
      else if (args->row_blocks == 2) launch<T, KMajorColumns<T, false, true, 2>, EpilogueKind::kStore, true>(*args, *run);
      else launch<T, KMajorColumns<T, false>, EpilogueKind::kStore, true>(*args, *run);
    }
  });
}
#endif

#ifdef EMULATED_few_rows_up
bool few_rows_up(int dtype, bool transposed, bool glu, const Arguments* args, const emulated_gpu::Run* run) {
  return dtype < 2 && tensor_core::with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (transposed && glu) launch<T, NMajorColumns<T, true, true>, EpilogueKind::kGlu>(*args, *run);
      else if (transposed) launch<T, NMajorColumns<T, true>, EpilogueKind::kActivation>(*args, *run);
      else if (glu) launch<T, KMajorColumns<T, true>, EpilogueKind::kGlu>(*args, *run);
      else launch<T, KMajorColumns<T, false>, EpilogueKind::kActivation>(*args, *run);
    }
  });
}
#endif

}  // extern "C"

}  // namespace gbmoe::few_rows

namespace gbmoe::low_rank {

thread_local unsigned char shared_bytes[emulated_gpu::kSharedBytes];

namespace {

// On a GPU of few multiprocessors, so that rings are shallow; or with large memory on one of as many as let them be deep.
template <typename Traits> void launch(Arguments args, emulated_gpu::Run run) {
  const Launch of = launch_of<Traits>(args, run.large_memory ? 1 << 20 : 1, 228 << 10);
  run.ctas = static_cast<int>(of.ctas);
  emulated_gpu::shared_limit = of.shared_bytes;
  emulated_gpu::launch(run, kThreads, shared_bytes, [&] { low_rank_kernel<Traits>(args); });
  emulated_gpu::shared_limit = emulated_gpu::kSharedBytes;  // of all kernels: libraries share inline variables
}

}  // namespace

extern "C" {

#ifdef EMULATED_low_rank
bool low_rank(int ranks, const Arguments* args, const emulated_gpu::Run* run) {
  if (ranks <= 16) launch<Traits<16>>(*args, *run);
  else if (ranks <= 32) launch<Traits<32>>(*args, *run);
  else launch<Traits<64>>(*args, *run);
  return ranks <= 64;
}

// (CTAs, shared memory of each, stages of products, and of gradients).
void low_rank_launch(int ranks, const Arguments* args, int multiprocessors, int multiprocessor_bytes, int64_t* found) {
  Arguments of = *args;
  const Launch launch = ranks <= 16 ? launch_of<Traits<16>>(of, multiprocessors, multiprocessor_bytes)
                      : ranks <= 32 ? launch_of<Traits<32>>(of, multiprocessors, multiprocessor_bytes)
                                    : launch_of<Traits<64>>(of, multiprocessors, multiprocessor_bytes);
  found[0] = launch.ctas, found[1] = launch.shared_bytes, found[2] = of.product.stages, found[3] = of.stages_of_gradients;
}
#endif

}  // extern "C"

}  // namespace gbmoe::low_rank
