"""A second pair of operands of low rank in the Hopper engine's GEMMs: on a CPU which GEMM gets it, with operands that lie as it reads them;
on a GPU its sums.

Shape suffixes: E experts, P rows of all groups, H hidden, F ffn hidden, N columns, R rank.
"""

import pytest
import torch

from gbmoe import RoutingPlan, WeightLayout, engines, extension, launch
from gbmoe.engines import hopper
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.lora_products import LowRank
from gbmoe.ops.activations import activation_name
from gbmoe.plain import plain_activation
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
    """The operators of csrc/hopper/ that LoRA calls, under their schemas. `names` has each call, and `second` those with a second pair of
    a shorter inner dimension."""

    def __init__(self):
        self.second, self.names = [], []

    def sum(self, name, a, b_EKN, a2, b2_EKN, sizes):
        total = grouped(a, b_EKN, sizes)
        assert (a2 is None) == (b2_EKN is None)
        self.names.append(name)
        if a2 is not None:
            self.second += [name] if a2.size(1) < a.size(1) else []
            assert a2.is_contiguous() and a2.dtype == b2_EKN.dtype == a.dtype and along_n(b2_EKN) == along_n(b_EKN)
            total += grouped(a2, b2_EKN, sizes)
        return total

    def hopper_rows(self, a, b, a2, b2, places, sizes, trans_b, tiling, workspace, splitting, out):
        b, b2 = (t.mT if trans_b and t is not None else t for t in (b, b2))
        out.copy_(self.sum("rows", a, b, a2, b2, sizes))

    def hopper_rows_biased(self, a, b, a2, b2, places, bias, sizes, trans_b, tiling, workspace, splitting, out):
        b, b2 = (t.mT if trans_b and t is not None else t for t in (b, b2))
        out.copy_(self.sum("biased", a, b, a2, b2, sizes) + grouped(a.new_ones(a.size(0), 1), bias.unsqueeze(1), sizes))

    def hopper_few_rows_gemm(self, a, b, places, sizes, trans_b, early, bias, out):
        assert bias is None
        out.copy_(self.sum("few", a, b.mT if trans_b else b, None, None, sizes))

    def hopper_up_pairs(self, x, w, a2, b2, places, bias, sizes, activation, tiling, workspace, a, pairs):
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

    def hopper_weights(self, a, b, sizes, tiling, workspace, splitting, places, add, out):
        for e, (left, right) in enumerate(zip(a[:sizes.sum()].split(sizes.tolist()), b[:sizes.sum()].split(sizes.tolist()))):
            product = (left.float().T @ right.float()).to(out.dtype)
            out[e] = out[e] + product if add else product

    def hopper_weights_gathered(self, a, a2, x, slots, top_k, sizes, tiling, workspace, splitting, out, out2):
        rows = x[slots.clamp(min=0).long() // top_k] * (slots >= 0).unsqueeze(1)
        for left, made in ((a, out), (a2, out2)):
            if left is not None:
                self.hopper_weights(left, rows, sizes, tiling, workspace, splitting, (), False, made)


@pytest.fixture
def gemms(monkeypatch):
    """Both engines compute on the CPU, with `Gemms`."""
    extension.status()  # where the extension can be loaded, it has defined the operators by now
    stubs, library, schemas = Gemms(), torch.library.Library("gbmoe_cuda", "FRAGMENT"), csrc_operators.schemas()
    try:
        for name in (name for name in vars(Gemms) if name.startswith("hopper_")):
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
    """h, g, y and d, and dx where gate and up are one matrix; of three pairs the third is still added."""
    in_memory = added(monkeypatch)
    of_lora.check(layout, torch.device("cpu"), torch.bfloat16, "hopper", which=which, frozen=("w1", "w2", "v1", "weights"))
    one = "biased" if which else "rows"
    expected = ["pairs", one, "down_backward_pairs", "rows"] if layout.is_paired else [one, one, one, "rows"]
    assert gemms.second == expected and len(in_memory) == (not layout.is_paired)


def test_few_rows_are_composed_unless_their_number_may_not_decide(gemms, monkeypatch):
    monkeypatch.setattr(hopper.Hopper, "has_few_rows", lambda self, rows, groups: True)
    of_lora.check(LAYOUTS[0], torch.device("cpu"), torch.bfloat16, "hopper")
    assert gemms.second == [] and "few" in gemms.names
    of_lora.check(LAYOUTS[0], torch.device("cpu"), torch.bfloat16, "hopper_batch_invariant")
    assert gemms.second == ["rows"] * 4


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
    assert gemms.second == ["rows", "biased"] * 2


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
    assert gemms.second == (["down_backward_pairs", "pairs"] if paired else ["down_backward"] * 2)
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

    def call(a2, b2, trans_b=False):
        hopper.launch_rows(GemmConfig(WIDE), a, b, a2, b2, sizes, trans_b, torch.empty_like(a))

    with pytest.raises(RuntimeError, match="hopper_rows: expected a2 with 8 rows, got 7"):
        call(a2[:7], b2)
    with pytest.raises(RuntimeError, match=r"hopper_rows: expected b2 .* 64 columns and a2's inner dimension of 16, got \[1,8,64\]"):
        call(a2, b2[:, :8])
    with pytest.raises(RuntimeError, match="hopper_rows: expected b2 contiguous along N, as b is"):
        call(a2, b2.mT.contiguous().mT)
    with pytest.raises(RuntimeError, match="hopper_rows: expected a2 and b2, or neither"):
        call(a2, None)
