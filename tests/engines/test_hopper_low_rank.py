"""A second pair of operands of low rank in the Hopper engine's GEMMs: on a CPU which GEMM gets it, with operands that lie as it reads them;
on a GPU its sums.

Shape suffixes: E experts, P rows of all groups, H hidden, F ffn hidden, N columns, R rank.
"""

import itertools

import pytest
import torch

from gbmoe import RoutingPlan, WeightLayout, engines, extension, launch
from gbmoe.engines import hopper
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.lora_products import LowRank
from gbmoe.ops.activations import activation_name
from gbmoe.plain import plain_activation
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import exact_inputs
from gbmoe.tuning import gathering
from gbmoe.tuning.hopper_tiles import NARROW, SQUARE, WIDE, GemmConfig, SplitConfig
from tests import csrc_operators
from tests.conftest import HALVES, assert_as_accurate_as, dtype_id
from tests.ops import test_lora_experts as of_lora
from tests.ops.test_expert_biases import GPT_OSS

HOPPER, INVARIANT = engines.ENGINES["hopper"], engines.ENGINES["hopper_batch_invariant"]
LAYOUTS = [WeightLayout(), WeightLayout("interleaved", True), WeightLayout("gate_first", down_transposed=True)]
SIZES = [130, 0, 1, 64, 65, 128, 17, 300]


def rows_of(x, slots, top_k):
    """x, or where there are slots the rows of these tokens: zeros for a row without one."""
    return x if slots is None else torch.where((slots >= 0).unsqueeze(1), x[slots.clamp(min=0).long() // top_k], 0)


def grouped(a, b, sizes, dtype=torch.float32):
    """a[rows of e] @ b[e] in `dtype`, and NaN in rows of no group."""
    out, first = torch.full((a.size(0), b.size(2)), float("nan"), dtype=dtype, device=a.device), 0
    for e, rows in enumerate(sizes.tolist()):
        out[first:first + rows] = a[first:first + rows].to(dtype) @ b[e].to(dtype)
        first += rows
    return out


# ------------------------------------------------------------------------------------------ on a CPU, with GEMMs in plain PyTorch


def along_n(b_EKN):
    """Whether the columns of a stack are contiguous; otherwise its rows are transposed ones. TMA reads 16 bytes at a time."""
    assert 1 in b_EKN.stride()[1:] and all(stride % 8 == 0 for stride in b_EKN.stride() if stride != 1) and b_EKN.data_ptr() % 16 == 0
    return b_EKN.stride(2) == 1


def name_of(activation):
    name, = (name for name in ("silu", activation_name(GPT_OSS)) if [*plain_activation.kernel_arguments(name)] == activation)
    return name


class Gemms:
    """The operators of csrc/hopper/ that LoRA calls, under their schemas. `names` has each call, and `low` those whose last pair has a
    shorter inner dimension, a third one as "three pairs". `gathers`: of each GEMM of gate and up, whether it was given tokens."""

    def __init__(self):
        self.low, self.names, self.gathers, self.of_ranks = [], [], [], []

    def sum(self, name, a, b_EKN, a2, b2_EKN, sizes, a3=None, b3_EKN=None):
        total = grouped(a, b_EKN, sizes)
        assert (a2 is None) == (b2_EKN is None) and (a3 is None) == (b3_EKN is None) and (a3 is None or a2 is not None)
        self.names.append(name)
        last = a2 if a3 is None else a3
        if last is not None and last.size(1) < a.size(1):
            self.low.append(name if a3 is None else "three pairs")
        for rows, further in ((a2, b2_EKN), (a3, b3_EKN)):
            if rows is not None:
                assert rows.is_contiguous() and rows.dtype == further.dtype == a.dtype and along_n(further) == along_n(b_EKN)
                total += grouped(rows, further, sizes)
        return total

    def hopper_rows(self, a, b, a2, b2, a3, b3, places, sizes, trans_b, tiling, workspace, splitting, out):
        b, b2, b3 = (t.mT if trans_b and t is not None else t for t in (b, b2, b3))
        out.copy_(self.sum("rows", a, b, a2, b2, sizes, a3, b3))

    def hopper_rows_biased(self, a, b, a2, b2, places, bias, sizes, trans_b, tiling, workspace, splitting, out):
        b, b2 = (t.mT if trans_b and t is not None else t for t in (b, b2))
        out.copy_(self.sum("biased", a, b, a2, b2, sizes) + grouped(a.new_ones(a.size(0), 1), bias.unsqueeze(1), sizes))

    def hopper_few_rows_gemm(self, a, b, places, sizes, trans_b, early, bias, out):
        assert bias is None
        out.copy_(self.sum("few", a, b.mT if trans_b else b, None, None, sizes))

    def hopper_up_glu(self, x, slots, top_k, w1, v1, a2, b2, v2, places, sizes, activation, tiling, workspace, a, h, g):
        assert a2 is not None
        self.names.append("glu")
        self.low.append("glu")
        self.gathers.append(slots is not None)
        x = rows_of(x, slots, top_k)
        for weight, further, out in ((w1, b2, h), (v1, v2, g)):
            assert a2.is_contiguous() and along_n(further.mT) == along_n(weight.mT)
            out.copy_(grouped(x, weight.mT, sizes) + grouped(a2, further.mT, sizes))
        a.copy_(plain_activation.activate(h, g, name_of(activation)))

    def hopper_up_pairs(self, x, slots, top_k, w, a2, b2, places, bias, sizes, activation, tiling, workspace, a, pairs):
        assert slots is None or bias is None
        self.gathers.append(slots is not None)
        x = rows_of(x, slots, top_k)
        total = self.sum("pairs", x, w.mT, a2, None if b2 is None else b2.mT, sizes)
        total += 0 if bias is None else grouped(x.new_ones(x.size(0), 1), bias.unsqueeze(1), sizes)
        pairs.copy_(total)
        a.copy_(plain_activation.activate_pairs(pairs, name_of(activation)))

    def hopper_down_backward(self, dz, w2, a2, b2, places, sizes, h, g, slots, weights, activation, tiling, a, dh, dg, dots, grad_weights):
        dh.copy_(self.sum("down_backward", dz, w2.mT, a2, None if b2 is None else b2.mT, sizes))
        a.copy_(plain_activation.activate_backward(h, g, dh, slots, weights, name_of(activation))[0])

    def hopper_down_backward_pairs(
            self, dz, w2, a2, b2, places, sizes, pairs, slots, weights, activation, tiling, a, dpairs, dots, grad_weights):
        d = self.sum("down_backward_pairs", dz, w2.mT, a2, None if b2 is None else b2.mT, sizes).to(dz.dtype)
        found = plain_activation.activate_pairs_backward(pairs, d, slots, weights, name_of(activation))
        for out, value in zip((a, dpairs, grad_weights), found):
            if out is not None:
                out.copy_(value)

    def rank_product(self, a, slots, top_k, b, a2, b2, sizes, along_r, out):
        assert out.size(1) <= 64 and along_n(b) and (b2 is None or b2.stride() == b.stride()) and (slots is None or a2 is None)
        b, b2 = (t.mT if t is not None and not along_r else t for t in (b, b2))
        self.of_ranks.append(f"product of {'rows' if slots is None else 'tokens'}")
        out.copy_(grouped(rows_of(a, slots, top_k), b, sizes) + (0 if a2 is None else grouped(a2, b2, sizes)))

    def rank_gradient(self, left, right, slots, top_k, sizes, out):
        assert left.size(1) <= 64 and along_n(out)
        self.of_ranks.append(f"gradient of {'rows' if slots is None else 'tokens'}")
        self.hopper_weights(left, rows_of(right, slots, top_k), sizes, None, None, None, (), False, out)

    def rank_product_and_gradients(self, a, slots, top_k, b, a2, b2, sizes, along_r, out, *gradients):
        self.of_ranks.append("together:")
        self.rank_product(a, slots, top_k, b, a2, b2, sizes, along_r, out)
        for left, right, made in zip(gradients[::3], gradients[1::3], gradients[2::3]):
            if made is not None:
                self.rank_gradient(left, right, slots, top_k, sizes, made)

    def hopper_weights(self, a, b, sizes, tiling, workspace, splitting, places, add, out):
        for e, (left, right) in enumerate(zip(a[:sizes.sum()].split(sizes.tolist()), b[:sizes.sum()].split(sizes.tolist()))):
            product = (left.float().T @ right.float()).to(out.dtype)
            out[e] = out[e] + product if add else product

    def hopper_weights_gathered(self, a, a2, x, slots, top_k, sizes, tiling, workspace, splitting, out, out2):
        for left, made in ((a, out), (a2, out2)):
            if left is not None:
                self.hopper_weights(left, rows_of(x, slots, top_k), sizes, tiling, workspace, splitting, (), False, made)


@pytest.fixture
def gemms(monkeypatch):
    """Both engines compute on the CPU, with `Gemms`."""
    extension.status()  # where the extension can be loaded, it has defined the operators by now
    stubs, library, schemas = Gemms(), torch.library.Library("gbmoe_cuda", "FRAGMENT"), csrc_operators.schemas()
    try:
        for name in (name for name in vars(Gemms) if name.startswith(("hopper_", "rank_"))):
            if not hasattr(torch.ops.gbmoe_cuda, name):
                library.define(schemas[name])
            library.impl(name, getattr(stubs, name), "CPU")
        for engine in engines.ENGINES.values():
            if isinstance(engine, hopper.Hopper):
                monkeypatch.setitem(vars(engine), "unavailable", lambda device: None)
        monkeypatch.setattr(hopper, "_workspace_bytes", lambda *_: 16)
        yield stubs
    finally:
        library._destroy()


@pytest.fixture
def many_rows(monkeypatch):
    monkeypatch.setattr(hopper.Hopper, "has_few_rows", lambda self, rows, groups: False)


def added(monkeypatch):
    """A list of the calls that add a product in memory, from now on."""
    calls, add = [], launch.add_to_rows
    monkeypatch.setattr(launch, "add_to_rows", lambda to, product: calls.append(tuple(to.shape)) or add(to, product))
    return calls


@pytest.mark.parametrize("which", [(), ("up", "down")], ids=["", "biased"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.code)
def test_products_of_factors_were_added_in_memory(gemms, many_rows, monkeypatch, layout, which):
    """h and g, whose GEMM with the activation adds no bias, y, d and dx, which has three pairs where gate and up lie apart."""
    in_memory = added(monkeypatch)
    of_lora.check(layout, torch.device("cpu"), torch.bfloat16, "hopper", which=which, frozen=("w1", "w2", "v1", "weights"))
    if layout.is_paired:
        expected = ["pairs", "biased" if which else "rows", "down_backward_pairs", "rows"]
    else:
        expected = [*(["biased"] * 3 if which else ["glu", "rows"]), "rows", "three pairs"]
    assert gemms.low == expected and not in_memory


@pytest.mark.parametrize("engine", ["hopper", "hopper_batch_invariant"])
def test_what_reads_the_same_rows_is_one_launch_and_tokens_are_read_where_they_lie(gemms, many_rows, engine):
    """t and s; u and dB2; v, both halves of dB1, and dA2; dA1."""
    of_lora.check(LAYOUTS[0], torch.device("cpu"), torch.bfloat16, engine, frozen=("w1", "w2", "v1"))
    assert gemms.of_ranks == ["product of tokens", "product of rows", "together:", "product of tokens", "gradient of tokens",
                              "together:", "product of rows", *["gradient of rows"] * 3, "gradient of tokens"]


def test_few_rows_are_composed_unless_their_number_may_not_decide(gemms, monkeypatch):
    monkeypatch.setattr(hopper.Hopper, "has_few_rows", lambda self, rows, groups: True)
    of_lora.check(LAYOUTS[0], torch.device("cpu"), torch.bfloat16, "hopper")
    assert gemms.low == ["three pairs"] and "few" in gemms.names  # of forward: backward's two pairs never were few rows' kernel's
    gemms.low.clear()
    of_lora.check(LAYOUTS[0], torch.device("cpu"), torch.bfloat16, "hopper_batch_invariant")
    assert gemms.low == ["glu", "rows", "rows", "three pairs"]


def inputs(dtype, device, sizes, inner, columns, rank, behind=8):
    def values(*shape, number, fan_in=1):
        return exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=number, scale=exact_inputs.fan_in_scale(fan_in))

    rows = sum(sizes) + behind
    return (values(rows, inner, number=1), values(len(sizes), inner, columns, number=2, fan_in=inner), values(rows, rank, number=3),
            values(len(sizes), rank, columns, number=4, fan_in=rank), torch.tensor(sizes, dtype=torch.int32, device=device))


def summed(a, b, a2, b2, sizes, dtype):
    rows = int(sizes.sum())
    return (grouped(a, b, sizes, dtype) + grouped(a2, b2, sizes, dtype))[:rows]


LIES = {"as it is": lambda b: b, "transposed": lambda b: b.mT.contiguous().mT,
        "every other column": lambda b: torch.stack([b, b], 3).flatten(2)[..., ::2],
        "permuted": lambda b: b.permute(1, 2, 0).contiguous().permute(2, 0, 1)}


@pytest.mark.parametrize("b2_lies", LIES)
@pytest.mark.parametrize("b_lies", ["as it is", "transposed"])
def test_factors_of_any_strides_are_read_as_the_weight_lies(gemms, many_rows, b_lies, b2_lies):
    a, b, a2, b2, sizes = inputs(torch.bfloat16, "cpu", [3, 0, 9, 4], 24, 40, 16)
    expected = summed(a, b, a2, b2, sizes, torch.float32).bfloat16()
    for trans_b in (False, True):
        weight = LIES[b_lies](b.mT if trans_b else b)
        for bias in (None, torch.zeros(4, 40, dtype=torch.bfloat16)):
            got = HOPPER.product_low_rank(a, weight, bias, sizes, trans_b, a2, LIES[b2_lies](b2))
            assert torch.equal(got[:16], expected)
    assert gemms.low == ["rows", "biased"] * 2


@pytest.mark.parametrize("paired", [False, True], ids=["apart", "pairs"])
def test_the_kernels_with_the_activation_take_the_pair(gemms, many_rows, monkeypatch, paired):
    monkeypatch.setattr(gathering, "_TERMS_THAT_HIDE_ACTIVATION", 0)
    gathering.layer_config.cache_clear()
    dz, w, a2, b2, sizes = inputs(torch.bfloat16, "cpu", [3, 0, 9, 4], 24, 40, 8, behind=0)
    plan = RoutingPlan.from_experts(torch.arange(4, dtype=torch.int32).repeat_interleave(sizes.long()).unsqueeze(1), 4)
    rows, low = GatheredRows(None, plan.slot_map, dz), LowRank(a2, b2)
    expected = summed(dz, w, a2, b2, sizes, torch.float32).bfloat16()
    h = exact_inputs.exact_values(16, 80 if paired else 40, dtype=torch.bfloat16, device="cpu", seed=7)
    slots = plan.slot_of_row_P
    if paired:
        found = HOPPER.down_backward_pairs_low_rank(rows, w.mT.contiguous(), sizes, h, None, "silu", low)[:2]
        assert all(map(torch.equal, found, plain_activation.activate_pairs_backward(h, expected.clone(), slots, None, "silu")))
        assert torch.equal(HOPPER.up_pairs_low_rank(rows, w.mT, None, sizes, "silu", True, low)[1], expected)
    for w2 in () if paired else (w.mT, w.mT.contiguous()):  # [E,F,H]
        a, dh, *_ = HOPPER.down_backward_low_rank(rows, w2, sizes, h, None, None, "silu", low)
        of_d = expected.clone()
        assert torch.equal(a, plain_activation.activate_backward(h, None, of_d, slots, None, "silu")[0]) and torch.equal(dh, of_d)
    assert gemms.low == (["down_backward_pairs", "pairs"] if paired else ["down_backward"] * 2)
    gathering.layer_config.cache_clear()


@pytest.mark.parametrize("layout, low_rank", [(LAYOUTS[1], False), *((layout, True) for layout in LAYOUTS)], ids=str)
def test_a_gemm_that_could_gather_was_given_gathered_rows(gemms, many_rows, monkeypatch, layout, low_rank):
    """Pairs of gate and up, and every gate and up with a second pair."""
    monkeypatch.setattr(gathering.hopper_tiles, "up_forms_pairs", lambda ffn, glu: True)
    gathering.layer_config.cache_clear()
    x, w1, t, b2, sizes = inputs(torch.bfloat16, "cpu", [3, 0, 9, 4], 24, 40, 8, behind=0)
    plan = RoutingPlan.from_experts(torch.randint(0, 4, (8, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1)), 4)
    tokens, sizes, slots = x[:8], plan.padded_counts_E, plan.slot_of_row_P
    rows = GatheredRows(tokens, plan.slot_map)
    low = LowRank(t, b2, None if layout.is_paired else b2.flip(0)) if low_rank else None
    lies = w1 if layout.up_transposed else w1.mT.contiguous().mT
    expected = grouped(rows_of(tokens, slots, 2), w1, sizes) + (grouped(t, b2, sizes) if low_rank else 0)
    expected = expected.bfloat16()
    if layout.is_paired:
        call = HOPPER.up_pairs_low_rank if low_rank else HOPPER.up_pairs
        got = call(rows, lies.mT, None, sizes, "silu", True, *([low] if low_rank else []))[1]
    else:
        got = HOPPER.up_low_rank(rows, lies.mT, lies.flip(0).mT, None, None, sizes, "silu", True, low)[1]
    assert torch.equal(got, expected) and gemms.gathers == [True] and not rows.are_gathered
    gathering.layer_config.cache_clear()


# ----------------------------------------------------------------------------------------------------------------- on a GPU

DEVICE = torch.device("cuda")
SPLIT = SplitConfig(per_sm=2, min_k_blocks=1, most=8)
CONFIGS = [*(GemmConfig(SQUARE, *cluster, ping_pong=True, tile_counter=counted)
             for cluster, counted in (((1, 2), False), ((2, 1), True), ((1, 1), True))),
           GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2, tile_counter=True, split=SPLIT), GemmConfig(NARROW, cluster_n=2),
           GemmConfig(WIDE, tile_counter=True, most_ahead=4, split=SPLIT), GemmConfig(NARROW, cluster_n=2, tile_counter=True, split=SPLIT)]
RANKS = [8, 16, 24, 64, 72, 128]


@pytest.fixture
def on_hopper():
    reason = HOPPER.unavailable(DEVICE)
    if reason is not None:
        pytest.skip(f"hopper: {reason}")


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sizes", [SIZES, [0, 9, 0], [0] * 5, [5000, 3]], ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
def test_sums_of_two_lengths_by_every_tiling(on_hopper, sizes, rank, dtype):
    for inner, columns in ((8, 264), (72, 72), (328, 640), (768, 512)):
        a, b, a2, b2, on_device = inputs(dtype, DEVICE, sizes, inner, columns, rank, behind=40)
        rows = sum(sizes)
        exact = summed(a, b, a2, b2, on_device, torch.float64)
        baseline = summed(a, b, a2, b2, on_device, torch.float32).to(dtype)
        for trans_b in (False, True):
            weights = [w.mT.contiguous() if trans_b else w for w in (b, b2)]
            for config in CONFIGS:
                exact_inputs.poison(DEVICE)  # and with it the workspace
                out = torch.full((rows + 40, columns), float("nan"), dtype=dtype, device=DEVICE)
                hopper.launch_rows(config, a, weights[0], a2, weights[1], on_device, trans_b, out)
                assert_as_accurate_as(out[:rows], baseline, exact, f"{inner=}, {trans_b=}, {config}")
                assert bool(out[rows:].isnan().all()), config


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("sizes", [SIZES, [0, 9, 0], [0] * 5, [5000, 3]], ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
def test_sums_of_three_lengths_by_every_tiling(on_hopper, sizes, dtype):
    """Each pair is the shortest in one of these, and the longest; splits of a sum begin in each."""
    for inners, columns in (((72, 72, 16), 264), ((768, 768, 16), 512), ((8, 8, 80), 72), ((8, 328, 64), 264), ((200, 8, 8), 640),
                            ((64, 128, 328), 392)):
        of_pairs = [inputs(dtype, DEVICE, sizes, first, columns, other, behind=40) for first, other in (inners[:2], (inners[2], 8))]
        (a, b, a2, b2, on_device), (a3, b3, *_) = of_pairs
        rows = sum(sizes)
        exact, baseline = ((summed(a, b, a2, b2, on_device, wide) + grouped(a3, b3, on_device, wide)[:rows])
                           for wide in (torch.float64, torch.float32))
        for trans_b in (False, True):
            first, second, third = (w.mT.contiguous() if trans_b else w for w in (b, b2, b3))
            for config in CONFIGS:
                exact_inputs.poison(DEVICE)  # and with it the workspace
                out = torch.full((rows + 40, columns), float("nan"), dtype=dtype, device=DEVICE)
                hopper.launch_rows(config, a, first, a2, second, on_device, trans_b, out, a3, third)
                assert_as_accurate_as(out[:rows], baseline.to(dtype), exact, f"{inners=}, {trans_b=}, {config}")
                assert bool(out[rows:].isnan().all()), config


def separate(stack):
    """Its matrices as tensors of their own, in memory that is not in their order."""
    made = {e: stack[e].clone() for e in reversed(range(stack.size(0)))}
    return SeparateWeights([made[e] for e in range(stack.size(0))])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 24, 80])
@pytest.mark.parametrize("lies", ["as it is", "transposed"])
def test_the_gradient_of_a_glus_rows_of_stacks_and_of_lists(on_hopper, lies, rank):
    dh, w1, a2, b2, sizes = inputs(torch.bfloat16, DEVICE, SIZES, 200, 264, rank)
    dg, v1, *_ = inputs(torch.bfloat16, DEVICE, SIZES, 200, 264, rank)
    dg, v1 = dg.flip(0), v1.flip(0)
    rows = sum(SIZES)
    exact, baseline = (grouped(dg, v1, sizes, wide)[:rows] + summed(dh, w1, a2, b2, sizes, wide) for wide in (torch.float64, torch.float32))
    w1, v1 = LIES[lies](w1), LIES[lies](v1)
    for engine, (one, other), b2_lies in itertools.product((HOPPER, INVARIANT), ((w1, v1), (separate(w1), separate(v1))), LIES):
        exact_inputs.poison(DEVICE)
        got = engine.up_backward_low_rank(dh, one, dg, other, sizes, LowRank(a2, LIES[b2_lies](b2)))
        assert_as_accurate_as(got[:rows], baseline.bfloat16(), exact, f"{engine.name}, {b2_lies}")


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("activation", ["silu", activation_name(GPT_OSS), "gelu", "relu"])
@pytest.mark.parametrize("ffn, hidden, rank", [(72, 8, 80), (264, 200, 8), (392, 72, 64), (1032, 520, 24)], ids=str)
def test_gate_and_up_of_two_pairs_in_one_gemm(on_hopper, ffn, hidden, rank, activation, dtype):
    """h and g have the bits of a GEMM each; a is the activation's of these."""
    x, w1, t, b2, sizes = inputs(dtype, DEVICE, SIZES, hidden, ffn, rank)
    v1, v2 = w1.flip(0), b2.flip(0)
    rows, guard = sum(SIZES), 300
    configs = [GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2), GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=4)]
    for along_f in (False, True) if activation not in ("gelu", "relu") else (False,):
        lies = [b.mT if along_f else b.mT.contiguous() for b in (w1, v1, b2, v2)]  # [E,F,.]
        products = [torch.empty(x.size(0), ffn, dtype=dtype, device=DEVICE) for _ in range(2)]
        for weight, low, product in zip(lies[:2], lies[2:], products):
            if along_f:
                weight, low = weight.mT, low.mT
            hopper.launch_rows(GemmConfig(WIDE), x, weight, t, low, sizes, not along_f, product)
        h, g = (product[:rows] for product in products)
        baseline, exact = (plain_activation.activate(h.to(wide), g.to(wide), activation) for wide in (dtype, torch.float64))
        for config in configs[along_f:]:
            around = [torch.full((x.size(0) + 2 * guard, ffn), 7.0, dtype=dtype, device=DEVICE) for _ in range(3)]
            inner = [each[guard:-guard] for each in around]
            exact_inputs.poison(DEVICE)
            hopper.launch_up(config, x, None, 1, *lies[:2], sizes, activation, *inner, t, *lies[2:])
            assert torch.equal(inner[1][:rows], h) and torch.equal(inner[2][:rows], g), config
            assert_as_accurate_as(inner[0][:rows], baseline, exact, f"{along_f=}, {config}")
            assert all(bool((each[:guard] == 7).all() & (each[guard + rows:] == 7).all()) for each in around)


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("pairs", [False, True], ids=["apart", "pairs"])
@pytest.mark.parametrize("sizes", [SIZES, [1] * 300, [5000, 3], [0, 9, 0]], ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
@pytest.mark.parametrize("hidden, ffn, top_k, rank", [(136, 72, 1, 80), (8, 264, 2, 8), (520, 136, 3, 64), (2056, 1032, 8, 24)], ids=str)
def test_lines_of_tokens_before_a_second_pair(on_hopper, hidden, ffn, top_k, rank, sizes, pairs, dtype):
    """The bits of rows gathered before, with slots of no token, lines of the next group or of none, and tiles in any order."""
    x, w1, t, b2, on_device = inputs(dtype, DEVICE, sizes, hidden, ffn * (2 if pairs else 1), rank, behind=40)
    rows, total, guard = sum(sizes), x.size(0), 300
    tokens = x[:-(-total // top_k)]
    slots = torch.randperm(tokens.size(0) * top_k, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))[:total].int()
    slots[::17], slots[rows:] = -1, -2
    gathered = torch.where((torch.arange(total, device=DEVICE) < rows).unsqueeze(1), rows_of(tokens, slots, top_k), float("nan"))
    t[rows:] = float("nan")

    def results(config, along_f, second, *of):
        around = [torch.full((total + 2 * guard, columns), 7.0, dtype=dtype, device=DEVICE)
                  for columns in ((ffn, 2 * ffn) if pairs else (ffn, ffn, ffn))]
        inner = [each[guard:-guard] for each in around]
        lie = (lambda b: b.mT) if along_f else (lambda b: b.mT.contiguous())
        exact_inputs.poison(DEVICE)
        if pairs:
            hopper.launch_up_pairs(config, *of, lie(w1), None, on_device, "silu", *inner, *((t, lie(b2)) if second else ()))
        else:
            further = (t, lie(b2), lie(b2.flip(0))) if second else ()
            hopper.launch_up(config, *of, lie(w1), lie(w1.flip(0)), on_device, "silu", *inner, *further)
        assert all(bool((each[:guard] == 7).all() & (each[guard + rows:] == 7).all()) for each in around)
        return [each[:rows] for each in inner]

    for second, along_f in itertools.product((False, True), (True,) if pairs else (False, True)):
        want = results(GemmConfig(WIDE, cluster_n=2), along_f, second, gathered, None, 1)
        for config in (GemmConfig(WIDE, cluster_n=2), GemmConfig(WIDE, cluster_n=2, panel=2, tile_counter=True),
                       GemmConfig(WIDE, cluster_n=2, panel=3, even_panels=True),
                       GemmConfig(WIDE, cluster_n=2, panel=2, tile_counter=True, most_ahead=1)):
            got = results(config, along_f, second, tokens, slots, top_k)
            assert all(map(torch.equal, got, want)), (config, along_f, second)


@pytest.mark.gpu
@pytest.mark.parametrize("b2_lies", LIES)
@pytest.mark.parametrize("lies", ["as it is", "transposed"])
def test_the_engines_gate_and_up(on_hopper, lies, b2_lies):
    """Of stacks and of lists, with factors of any strides, and the same bits however many rows there are."""
    x, w1, t, b2, sizes = inputs(torch.bfloat16, DEVICE, [1000], 328, 264, 16, behind=0)
    v1, v2 = w1.flip(1), b2.flip(1)
    low = LowRank(t, LIES[b2_lies](b2), LIES[b2_lies](v2))
    w1, v1 = (LIES[lies](w).mT for w in (w1, v1))
    slots = RoutingPlan.from_experts(torch.zeros(1000, 1, dtype=torch.int32, device=DEVICE), 1).slot_map
    exact_inputs.poison(DEVICE)
    for engine in (HOPPER, INVARIANT):
        a, h, g = engine.up_low_rank(GatheredRows(None, slots, x), w1, v1, None, None, sizes, "silu", True, low)
        for got, weight, further in ((h, w1, b2), (g, v1, v2)):
            exact, baseline = (summed(x, weight.mT, t, further, sizes, wide) for wide in (torch.float64, torch.float32))
            assert_as_accurate_as(got, baseline.bfloat16(), exact, engine.name)
        assert_as_accurate_as(a, plain_activation.activate(h, g, "silu"), plain_activation.activate(h.double(), g.double(), "silu"), "a")
    for rows in (1, 7, 64, 130):
        few = INVARIANT.up_low_rank(GatheredRows(None, slots, x[:rows]), w1, v1, None, None, torch.tensor([rows], device=DEVICE), "silu",
                                    True, low._replace(rows_PR=t[:rows]))
        assert all(torch.equal(one, other[:rows]) for one, other in zip(few, (a, h, g))), rows


@pytest.mark.gpu
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("b2_lies", LIES)
def test_the_engines_products_with_and_without_a_bias(on_hopper, rank, b2_lies):
    a, b, a2, b2, sizes = inputs(torch.bfloat16, DEVICE, SIZES, 328, 264, rank)
    bias = exact_inputs.exact_values(len(SIZES), 264, dtype=torch.bfloat16, device=DEVICE, seed=9)
    rows = sum(SIZES)
    for engine in (HOPPER, INVARIANT):
        for trans_b in (False, True):
            for with_bias in (False, True):
                exact, baseline = (summed(a, b, a2, b2, sizes, dtype) for dtype in (torch.float64, torch.float32))
                if with_bias:
                    of_row = bias.repeat_interleave(sizes.long(), 0)
                    exact, baseline = exact + of_row.double(), baseline + of_row.float()
                exact_inputs.poison(DEVICE)
                got = engine.product_low_rank(a, b.mT.contiguous() if trans_b else b, bias if with_bias else None, sizes, trans_b, a2,
                                              LIES[b2_lies](b2))
                assert_as_accurate_as(got[:rows], baseline.bfloat16(), exact, f"{engine.name}, {trans_b=}, {with_bias=}")


@pytest.mark.gpu
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("ffn", [72, 384, 1032])
@pytest.mark.parametrize("along_f", [False, True])
def test_the_gradient_of_the_activation_of_two_pairs(on_hopper, along_f, ffn, rank):
    """The kernel with the activation has the bits of d, rounded, and the activation's own kernel: but where d is on a rounding's edge."""
    dz, w, a2, b2, sizes = inputs(torch.bfloat16, DEVICE, SIZES, 200, ffn, rank)
    rows, total = sum(SIZES), dz.size(0)
    w2 = w.mT if along_f else w.mT.contiguous()
    b2_here = b2.mT if along_f else b2.mT.contiguous()
    slots = torch.randperm(total, device=DEVICE).int()
    h, g = (exact_inputs.exact_values(total, ffn, dtype=torch.bfloat16, device=DEVICE, seed=seed) for seed in (7, 8))
    exact_inputs.poison(DEVICE)
    got = hopper.down_backward_gemm(dz, w2, sizes, h, g, slots, None, "silu", a2, b2_here)[:3]

    def expected(dtype):
        d = summed(dz, w, a2, b2, sizes, dtype).to(torch.bfloat16 if dtype == torch.float32 else dtype)
        of = [t[:rows].to(d.dtype) for t in (h, g)]
        a, dg, _ = plain_activation.activate_backward(*of, d, slots[:rows], None, "silu")
        return a, d, dg

    for name, mine, baseline, exact in zip(("a", "dh", "dg"), got, expected(torch.float32), expected(torch.float64)):
        assert_as_accurate_as(mine[:rows], baseline, exact, name)


@pytest.mark.gpu
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(on_hopper):
    a, b, a2, b2, _ = inputs(torch.bfloat16, DEVICE, [2048], 768, 512, 16, behind=0)
    all_rows = INVARIANT.product_low_rank(a, b, None, torch.tensor([2048], device=DEVICE), False, a2, b2)
    for rows in (1, 7, 64, 130, 1000):
        few = INVARIANT.product_low_rank(a[:rows], b, None, torch.tensor([rows], device=DEVICE), False, a2[:rows], b2)
        assert torch.equal(few, all_rows[:rows]), rows


@pytest.mark.gpu
def test_a_second_pair_that_does_not_fit_is_refused(on_hopper):
    a, b, a2, b2, sizes = inputs(torch.bfloat16, DEVICE, [8], 64, 64, 16, behind=0)

    def call(a2, b2, a3=None, b3=None):
        hopper.launch_rows(GemmConfig(WIDE), a, b, a2, b2, sizes, False, torch.empty_like(a), a3, b3)

    with pytest.raises(RuntimeError, match="hopper_rows: expected a2 with 8 rows, got 7"):
        call(a2[:7], b2)
    with pytest.raises(RuntimeError, match=r"hopper_rows: expected b2 .* 64 columns and an inner dimension of 16, got \[1,8,64\]"):
        call(a2, b2[:, :8])
    with pytest.raises(RuntimeError, match="hopper_rows: expected b2 contiguous along N, as b is"):
        call(a2, b2.mT.contiguous().mT)
    with pytest.raises(RuntimeError, match="hopper_rows: expected a2 and b2, or neither"):
        call(a2, None)
    with pytest.raises(RuntimeError, match="hopper_rows: expected a3 with 8 rows, got 7"):
        call(a2, b2, a2[:7], b2)
    with pytest.raises(RuntimeError, match="hopper_rows: expected b3 contiguous along N, as b is"):
        call(a2, b2, a2, b2.mT.contiguous().mT)
    with pytest.raises(RuntimeError, match="hopper_rows: expected a2 and b2 where there are a3 and b3"):
        call(None, None, a2, b2)
    outs, weights = [torch.empty_like(a) for _ in range(3)], (b.mT.contiguous(), b.mT.contiguous())
    for further, message in (((a2, b2.mT.contiguous(), None), "expected a2, b2 and v2, or none of them"),
                             ((a2, b2.mT.contiguous(), b2.mT), "expected v2 contiguous along K, as b is"),
                             ((a2, b2.mT.contiguous(), b2.mT.contiguous()[:, :8]), r"expected v2 .* 64 columns .*, got \[1,8,16\]")):
        with pytest.raises(RuntimeError, match="hopper_up_glu: " + message):
            hopper.launch_up(GemmConfig(WIDE), a, None, 1, *weights, sizes, "silu", *outs, *further)
    with pytest.raises(RuntimeError, match="hopper_up_pairs: expected rows in memory where there is a bias"):
        hopper.launch_up_pairs(GemmConfig(WIDE, cluster_n=2), a, torch.arange(8, device=DEVICE).int(), 1, b.mT, b.new_zeros(1, 64), sizes,
                               "silu", torch.empty_like(a[:, :32]), None)
    with pytest.raises(RuntimeError, match="hopper_up_glu: expected v1, and rows in memory or CTAs in pairs"):
        hopper.launch_up(GemmConfig(WIDE), a, torch.arange(8, device=DEVICE).int(), 1, *weights, sizes, "silu", *outs, a2,
                         *[b2.mT.contiguous()] * 2)
