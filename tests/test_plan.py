"""RoutingPlan: the order, the padding, the bound, and what happens to ids that name no expert."""

import copy
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import gbmoe.plan
from gbmoe import RoutingPlan, expert_mlp, extension, padded_gather, padded_scatter
from gbmoe.launch import availability
from gbmoe.plain import plain_plan
from gbmoe.testing import cuda_graphs, exact_inputs


def check_invariants(plan, experts_TK):
    """Every statement of RoutingPlan's docstring, against plain Python."""
    ids = experts_TK.reshape(-1).tolist()
    row_of_slot = plan.row_of_slot_TK.reshape(-1).tolist()
    slot_of_row, offsets = plan.slot_of_row_P.tolist(), plan.offsets_E1.tolist()
    by_expert = {e: [slot for slot, i in enumerate(ids) if i == e] for e in range(plan.num_experts)}
    end = 0
    for e, slots in by_expert.items():
        assert offsets[e] == end and offsets[e] % plan.align == 0
        assert plan.counts_E[e] == len(slots)
        assert slot_of_row[end : end + len(slots)] == slots  # stable: ascending slots
        padded = -(-len(slots) // plan.align) * plan.align
        assert slot_of_row[end + len(slots) : end + padded] == [-1] * (padded - len(slots))
        end += padded
    assert offsets[-1] == end <= plan.num_rows and plan.num_rows % plan.align == 0
    assert slot_of_row[end:] == [-2] * (plan.num_rows - end)
    for slot, row in enumerate(row_of_slot):
        assert (row == -1 and not 0 <= ids[slot] < plan.num_experts) or slot_of_row[row] == slot
    for tile, e in enumerate(plan.expert_of_tile.tolist()):
        first = tile * plan.align
        assert (e == -1) if first >= end else offsets[e] <= first < offsets[e + 1]
    assert all(t.dtype == torch.int32 for t in (plan.row_of_slot_TK, plan.slot_of_row_P, plan.counts_E, plan.offsets_E1,
                                                plan.expert_of_tile))


@pytest.mark.parametrize("tokens, experts, top_k", [(0, 4, 2), (1, 1, 1), (7, 3, 1), (64, 8, 2), (33, 128, 8), (300, 5, 5),
                                                      (700, 1024, 3), (1500, 2, 2)])
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_invariants(device, tokens, experts, top_k, align, dtype):
    ids = exact_inputs.expert_ids(tokens, experts, top_k, device=device, seed=tokens, skew=1.0).to(dtype)
    check_invariants(RoutingPlan.from_experts(ids, experts, align=align), ids)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_plan_invariants_on_any_ids(data):
    experts, align = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 5, 16]))
    tokens, top_k = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.integers(-2, experts + 1), min_size=tokens * top_k, max_size=tokens * top_k))
    ids = torch.tensor(flat, dtype=torch.int64).view(tokens, top_k)
    check_invariants(RoutingPlan.from_experts(ids, experts, align=align, check="none"), ids)


@pytest.mark.parametrize("align", [1, 16])
def test_counts_share_no_memory_with_what_products_read(device, align):
    """A caller may reduce the counts over ranks in place, and that must not change the sizes of the products."""
    ids = exact_inputs.expert_ids(40, 6, 2, device=device, seed=0)
    plan = RoutingPlan.from_experts(ids, 6, align=align)
    sizes = plan.padded_counts_E.clone()
    plan.counts_E.data.fill_(10**6)
    assert torch.equal(plan.padded_counts_E, sizes) and torch.equal(plan.host_sizes(), sizes.cpu().long())
    assert torch.equal(plan.offsets_E1.diff(), sizes)


@pytest.mark.memcheck
def test_one_expert_takes_everything(device):
    ids = torch.full((50, 2), 3, device=device)
    check_invariants(RoutingPlan.from_experts(ids, 5, align=16), ids)


@pytest.mark.memcheck
def test_dropped_slots_have_no_row(device):
    ids = torch.tensor([[-1, 2], [0, -1], [-1, -1]], device=device)
    plan = RoutingPlan.from_experts(ids, 3, align=4)
    check_invariants(plan, ids)
    assert (plan.row_of_slot_TK == -1).tolist() == [[True, False], [False, True], [True, True]]


def test_exact_cuts_to_the_rows_in_use(device):
    ids = exact_inputs.expert_ids(40, 6, 2, device=device, seed=0)
    plan = RoutingPlan.from_experts(ids, 6, align=16, exact=True)
    assert plan.num_rows == int(plan.padded_counts_E.sum()) == plan.expert_of_tile.numel() * 16
    check_invariants(plan, ids)


def test_one_dimensional_ids_are_one_slot_a_token():
    plan = RoutingPlan.from_experts(torch.tensor([1, 0, 1]), 2)
    assert plan.row_of_slot_TK.tolist() == [[1], [0], [2]]


@pytest.mark.parametrize("counts, rows", [((3, 0, 2), 5), ((3, 0, 2), 9), ((0, 0), 4), ((7,), 7), ((0,), 0)], ids=str)
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_of_counts_is_that_of_sorted_tokens(device, counts, rows, place, dtype):
    counts_E = torch.tensor(counts, dtype=dtype, device="cpu" if place == "host" else device)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = torch.nn.functional.pad(ids, (0, rows - len(ids)), value=-1).to(device)
    plan = RoutingPlan.from_counts(counts_E, rows, device=device)
    check_invariants(plan, ids)
    sorted_tokens = RoutingPlan.from_experts(ids, len(counts))
    for name in ("row_of_slot_TK", "slot_of_row_P", "counts_E", "offsets_E1", "padded_counts_E"):
        got, want = getattr(plan, name), getattr(sorted_tokens, name)
        assert got.dtype == want.dtype and got.is_contiguous() and torch.equal(got, want), name
    assert plan.host_sizes().tolist() == list(counts)
    assert plan.is_in_expert_order and not sorted_tokens.is_in_expert_order and not plan.pads_within_experts
    check_invariants(plan.exact(), ids[: sum(counts)] if sum(counts) == rows else ids)


def test_exact_plan_of_counts_took_rows_that_it_had_cut(device):
    counts, x, w = torch.tensor([3, 2], device=device), torch.randn(9, 8, device=device), torch.randn(2, 16, 8, device=device)
    plan = RoutingPlan.from_counts(counts, 9)
    torch.testing.assert_close(expert_mlp(x, plan.exact(), w, w), expert_mlp(x, plan, w, w))


def test_counts_of_a_plan_share_no_memory(device):
    plan = RoutingPlan.from_counts(torch.tensor([3, 2], device=device), 5)
    plan.counts_E.fill_(10**6)
    assert plan.padded_counts_E.tolist() == [3, 2] and plan.offsets_E1.tolist() == [0, 3, 5]


def test_unchecked_counts_take_no_rows_that_are_not_there(device):
    plan = RoutingPlan.from_counts(torch.tensor([2, -3, 1, 2**40, 5], device=device), 6, check="none")
    assert plan.counts_E.tolist() == [2, 0, 1, 3, 0] and plan.slot_of_row_P.tolist() == list(range(6))


@pytest.mark.parametrize("bad, words", [
    (dict(num_rows=-1), "num_rows: expected at least 0, got -1"),
    (dict(check="maybe"), "check: expected auto, wait, device or none, got 'maybe'"),
    (dict(counts_E=torch.zeros(2, 2, dtype=torch.int32)), "counts: expected 1 dimensions, got \\[2, 2\\]"),
    (dict(counts_E=torch.zeros(2, dtype=torch.int32, device="meta"), device="cpu"), "counts: expected device cpu, got meta"),
    (dict(counts_E=torch.tensor([5, -1])), "counts: expected no negative entry, got -1"),
    (dict(counts_E=torch.zeros(0, dtype=torch.int64)), "counts: expected at least one expert, got 0"),
    (dict(num_rows=4, check="wait"), "counts: expected a sum of at most num_rows == 4, got 5"),
])
def test_bad_counts(bad, words):
    with pytest.raises(ValueError, match="RoutingPlan.from_counts: " + words):
        RoutingPlan.from_counts(**{"counts_E": torch.tensor([3, 2]), "num_rows": 5, **bad})


@pytest.mark.parametrize("bad, error, words", [
    (dict(num_rows=5.0), TypeError, "num_rows: expected an int, got float"),
    (dict(num_rows=None), TypeError, "num_rows: expected an int, got NoneType"),
    (dict(device="foo"), ValueError, "device: expected what torch.device takes, got 'foo'"),
])
def test_counts_of_a_wrong_kind(bad, error, words):
    with pytest.raises(error, match="RoutingPlan.from_counts: " + words):
        RoutingPlan.from_counts(**{"counts_E": torch.tensor([3, 2]), "num_rows": 5, **bad})


@pytest.mark.parametrize("bad, words", [
    (dict(experts_TK=[[0, 1]], num_experts=2), "experts: expected a torch.Tensor, got list"),
    (dict(experts_TK=torch.zeros(2, 2), num_experts=2), "experts: expected dtype int32, int64, got torch.float32"),
    (dict(experts_TK=torch.zeros(2, 2, 2, dtype=torch.int64), num_experts=2), "experts: expected 1 or 2 dimensions, got \\[2, 2, 2\\]"),
    (dict(experts_TK=torch.zeros(2, 2, dtype=torch.int64), num_experts=0), "num_experts: expected an int of at least 1, got 0"),
    (dict(experts_TK=torch.zeros(2, 2, dtype=torch.int64), num_experts=2, align=0), "align: expected an int of at least 1, got 0"),
    (dict(experts_TK=torch.tensor([[0, 2]]), num_experts=2),
     "experts: expected ids in \\[0, 2\\), or -1 to drop a slot, got ids from 0 to 2"),
    (dict(experts_TK=torch.tensor([[-2, 1]]), num_experts=2), "got ids from -2 to 1"),
    (dict(experts_TK=torch.zeros(2, 2, dtype=torch.int64), num_experts=2, check="maybe"),
     "check: expected auto, wait, device or none, got 'maybe'"),
    (dict(experts_TK=torch.tensor([[0, 1, 2]]), num_experts=3, align=2**30),
     "experts: expected at most 2147483647 padded rows \\(rows are int32\\), got 3221225472"),
])
def test_bad_arguments(bad, words):
    with pytest.raises((TypeError, ValueError), match=words):
        RoutingPlan.from_experts(**bad)


def test_the_extension_says_for_how_many_experts_a_device_has_room(monkeypatch):
    """It is asked once for each device, and only where there is an extension: the kernels' use of shared memory is known there alone."""
    asked = []
    monkeypatch.setattr(extension, "loaded", lambda: True)
    monkeypatch.setattr(torch.ops.gbmoe_cuda, "routing_plan_max_experts", lambda i: asked.append(i) or (391, 1024)[i], raising=False)
    availability._most_experts.cache_clear()
    try:
        small, large, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
        served = [(device, experts) for device in (small, large, cpu) for experts in (391, 392, 1024, 1025)
                  if availability.sorts(device, experts)]
        assert served == [(small, 391), (large, 391), (large, 392), (large, 1024)] and asked == [0, 1]
        monkeypatch.setattr(extension, "loaded", lambda: False)
        assert not availability.sorts(small, 1)
    finally:
        availability._most_experts.cache_clear()


@pytest.mark.gpu
def test_ids_out_of_range_raise_on_the_gpu_where_asked_to_wait():
    with pytest.raises(ValueError, match="got ids from 0 to 9"):
        RoutingPlan.from_experts(torch.tensor([[0, 9]], device="cuda"), 4, check="wait")


@pytest.mark.gpu
def test_ids_out_of_range_assert_on_the_device_without_a_wait():
    # A device-side assertion ends the CUDA context, so it gets a process of its own.
    program = """
import torch
from gbmoe import RoutingPlan
ids = torch.tensor([[0, 9]], device="cuda")
torch.cuda.set_sync_debug_mode("error")
try:
    RoutingPlan.from_experts(ids, 4)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
except RuntimeError as error:  # from whichever call notices first
    print("caught", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "caught CUDA error: device-side assert triggered" in done.stdout, done.stderr
    assert "expected ids in [0, 4)" in done.stderr


@pytest.mark.gpu
def test_plan_is_built_without_a_host_wait():
    ids = exact_inputs.expert_ids(512, 16, 4, device="cuda", seed=0)
    RoutingPlan.from_experts(ids, 16, align=128)
    with cuda_graphs.no_host_wait():
        plan = RoutingPlan.from_experts(ids, 16, align=128)
    check_invariants(plan, ids)


PLAN = RoutingPlan.from_experts(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3, align=2)


@pytest.mark.parametrize("changes, words", [
    (dict(row_of_slot_TK=PLAN.row_of_slot_TK.long()), "row_of_slot_TK: expected dtype int32, got torch.int64"),
    (dict(row_of_slot_TK=PLAN.row_of_slot_TK.flatten()), r"row_of_slot_TK: expected 2 dimensions, got \[6\]"),
    (dict(row_of_slot_TK=PLAN.row_of_slot_TK.t()), "row_of_slot_TK: expected a contiguous tensor, got one that is not"),
    (dict(row_of_slot_TK=PLAN.row_of_slot_TK.tolist()), "row_of_slot_TK: expected a torch.Tensor, got list"),
    (dict(slot_of_row_P=PLAN.slot_of_row_P.repeat_interleave(2)[::2]), "slot_of_row_P: expected a contiguous tensor, got one that is not"),
    (dict(slot_of_row_P=PLAN.slot_of_row_P.to("meta")), "slot_of_row_P: expected device cpu, got meta"),
    (dict(padded_counts_E=PLAN.padded_counts_E[:2]), "padded_counts_E: expected 3 entries, got 2"),
    (dict(slot_of_row_P=PLAN.slot_of_row_P[:-1]), "slot_of_row_P: expected a multiple of align == 2 rows, got 7"),
    (dict(counts_E=PLAN.counts_E[:2]), "counts_E: expected 3 entries, got 2"),
    (dict(offsets_E1=PLAN.offsets_E1[:3]), "offsets_E1: expected 4 entries, got 3"),
    (dict(num_experts=4), "counts_E: expected 4 entries, got 3"),
    (dict(num_experts=0), "num_experts: expected an int of at least 1, got 0"),
    (dict(align=0), "align: expected an int of at least 1, got 0"),
])
def test_a_plan_made_by_hand_must_have_the_shapes_that_kernels_trust(changes, words):
    assert replace(PLAN, counts_E=PLAN.counts_E.clone()).num_rows == 8  # one that fits
    with pytest.raises((TypeError, ValueError), match="RoutingPlan: " + words):
        replace(PLAN, **changes)
    if set(changes) == {"counts_E"}:  # no operator reads these
        return
    changed = copy.copy(PLAN)
    for name, value in changes.items():
        setattr(changed, name, value)
    w = torch.ones(3, 4, 8)
    for operator in (lambda: padded_gather(torch.ones(3, 8), changed), lambda: padded_scatter(torch.ones(8, 8), changed),
                     lambda: expert_mlp(torch.ones(3, 8), changed, w, w)):
        with pytest.raises((TypeError, ValueError), match="RoutingPlan: " + words):
            operator()


@pytest.mark.parametrize("sizes_E, words", [
    (PLAN.counts_E, "expected dtype int64, got torch.int32"),
    (PLAN.counts_E[:2].long(), "expected 3 entries, got 2"),
    (PLAN.counts_E.to("meta").long(), "expected device cpu, got meta"),
])
def test_sizes_on_the_host_that_are_not_the_plans(sizes_E, words):
    assert PLAN.with_host_sizes(PLAN.padded_counts_E.long()).has_host_sizes
    with pytest.raises((TypeError, ValueError), match="RoutingPlan.with_host_sizes: sizes: " + words):
        PLAN.with_host_sizes(sizes_E)


TABLES = ("row_of_slot_TK", "slot_of_row_P", "counts_E", "offsets_E1", "padded_counts_E")


def by_replace(plan, tables):
    return replace(plan, **tables)


def by_assignment(plan, tables):
    return by_assignment_to_the_plan_itself(copy.copy(plan), tables)


def by_assignment_to_the_plan_itself(plan, tables):
    for name, table in tables.items():
        setattr(plan, name, table)
    return plan


def by_assignment_after_pickling(plan, tables):
    return by_assignment(pickle.loads(pickle.dumps(plan)), tables)


def by_copy_replace(plan, tables):
    return copy.replace(plan, **tables)  # type: ignore[attr-defined]


WAYS = [by_replace, by_assignment, by_assignment_to_the_plan_itself, by_assignment_after_pickling]
WAYS += [by_copy_replace] if sys.version_info >= (3, 13) else []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", ["from_experts", "from_counts", "exact", "with_host_sizes"])
def test_a_plan_with_other_tables_kept_the_sizes_and_the_order_of_the_old_ones(device, make, change, compiled):
    ids = torch.tensor([0, 0, 0, 1, 1, 2], device=device)
    plan = RoutingPlan.from_experts(ids, 3) if make != "from_counts" else RoutingPlan.from_counts(torch.tensor([3, 2, 1]), 6, device=device)
    plan = {"exact": plan.exact, "with_host_sizes": lambda: plan.with_host_sizes(plan.host_sizes())}.get(make, lambda: plan)()
    x, w1, w2 = torch.randn(6, 16, device=device), torch.randn(3, 32, 16, device=device), torch.randn(3, 32, 16, device=device)
    expert_mlp(x, plan, w1, w2)
    plan.host_sizes()
    other = RoutingPlan.from_experts(torch.tensor([2, 2, 2, 2, 1, 0], device=device), 3)
    changed = change(plan, {name: getattr(other, name) for name in TABLES})
    function = torch.compile(expert_mlp, backend="aot_eager", fullgraph=device.type == "cuda") if compiled else expert_mlp
    torch.testing.assert_close(function(x, changed, w1, w2), expert_mlp(x, other, w1, w2), rtol=0, atol=0)
    assert changed.host_sizes().tolist() == [1, 1, 4]
    assert not changed.is_in_expert_order and changed.pads_within_experts


def test_a_plan_keeps_what_is_known_of_it_in_copies_and_where_counts_are_replaced():
    """Sizes on the host, which cost a wait, and that rows need no gather and no mask."""
    plan = RoutingPlan.from_counts(torch.tensor([3, 2, 1]), 6)
    plan.host_sizes()
    for same in (plan, copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        same.counts_E = same.counts_E + 1  # as where they are summed over ranks
        assert same.has_host_sizes and same.is_in_expert_order and not same.pads_within_experts
        assert same.with_host_sizes(same.host_sizes()).is_in_expert_order and same.exact().has_host_sizes


def test_nothing_is_known_of_a_plan_that_another_version_has_pickled():
    plan = RoutingPlan.from_counts(torch.tensor([3, 2, 1]), 6)
    state = {name: value for name, value in vars(plan).items() if not name.startswith("_")}
    old = RoutingPlan.__new__(RoutingPlan)
    old.__dict__.update(state, _in_order=True, row_of_slot_TK=plan.row_of_slot_TK.flip(0).contiguous())
    assert not old.is_in_expert_order and not old.has_host_sizes and old.pads_within_experts
    assert old.host_sizes().tolist() == [3, 2, 1] and old.has_host_sizes


def test_a_graph_took_a_plans_old_sizes_after_an_assignment():
    plan = RoutingPlan.from_experts(torch.tensor([0, 0, 0, 1]), 2)
    other = RoutingPlan.from_experts(torch.tensor([1, 1, 0, 1]), 2)
    x, w = torch.randn(4, 8), torch.randn(2, 4, 8)
    plan.host_sizes()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def changed(plan, x):
        for name in TABLES:
            setattr(plan, name, getattr(other, name))
        return expert_mlp(x, plan, w, w)

    torch.testing.assert_close(changed(plan, x), expert_mlp(x, other, w, w))
    assert plan.host_sizes().tolist() == [1, 3]


def test_a_plan_says_whether_its_sizes_are_on_the_host():
    built = RoutingPlan.from_experts(torch.tensor([[1, 0], [1, -1]]), 3)
    assert not built.has_host_sizes and not built.first_rows(3).has_host_sizes
    assert built.first_rows(3, built.padded_counts_E.long()).has_host_sizes
    here, elsewhere = (RoutingPlan.from_counts(torch.tensor([3, 2]), 9, device=of) for of in ("cpu", "meta"))
    assert elsewhere.has_host_sizes and elsewhere.host_sizes().tolist() == [3, 2]
    for name in ("row_of_slot_TK", "slot_of_row_P", "counts_E", "offsets_E1", "padded_counts_E"):
        assert getattr(elsewhere, name).is_meta and getattr(elsewhere, name).shape == getattr(here, name).shape, name


def test_only_plans_that_are_built_say_that_they_pad_nothing():
    """In a hand-made plan, and in plans made from it, rows without a slot may lie among an expert's rows, whatever `align` says."""
    built = RoutingPlan.from_experts(torch.tensor([[1, 0], [1, -1]]), 3)
    assert not built.pads_within_experts and not built.exact().pads_within_experts
    by_hand = replace(built, counts_E=built.counts_E.clone())
    assert by_hand.pads_within_experts and by_hand.exact().pads_within_experts
    assert RoutingPlan.from_experts(torch.tensor([[1, 0], [1, -1]]), 3, align=2).pads_within_experts


def test_a_plan_made_by_hand_is_checked_in_a_graph_too():
    def halved(rows):
        return RoutingPlan(3, 2, rows, PLAN.slot_of_row_P, PLAN.counts_E, PLAN.offsets_E1, PLAN.padded_counts_E).row_of_slot_TK // 2

    compiled = torch.compile(halved, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 2):
        assert torch.equal(compiled(PLAN.row_of_slot_TK[:tokens]), PLAN.row_of_slot_TK[:tokens] // 2)
    with pytest.raises(Exception, match="row_of_slot_TK: expected dtype int32"):
        compiled(PLAN.row_of_slot_TK.long())


def test_host_sizes_asked_for_in_inference_mode_serve_training():
    plan = RoutingPlan.from_experts(torch.tensor([[0, 1], [1, 2]]), 3)
    with torch.inference_mode():
        plan.host_sizes()
    w = torch.randn(3, 4, 8, requires_grad=True)
    expert_mlp(torch.randn(2, 8), plan, w, w).sum().backward()
    assert bool(w.grad.isfinite().all())


def test_meta_device():
    ids = torch.zeros(5, 2, dtype=torch.int64, device="meta")
    for check in ("auto", "wait", "device", "none"):
        plan = RoutingPlan.from_experts(ids, 4, align=16, check=check)
        assert plan.num_rows == 64 and plan.slot_of_row_P.is_meta
    with pytest.raises(ValueError, match="RoutingPlan.host_sizes: device: expected one that has the plan's values, got meta"):
        RoutingPlan.from_experts(ids, 4, exact=True)


@pytest.fixture
def threads_that_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 4096], ids=["one CTA", "many CTAs"])
def test_threads_with_different_numbers_of_experts_lowered_each_others_limit(threads_that_take_turns_often, tokens):
    """The limit of a kernel's dynamic shared memory was set to what one launch needed, and another thread's launch failed."""
    experts, repeats = (256, 1000, 300, 900), 1500
    ids = [torch.randint(count, (tokens, 2), generator=torch.Generator().manual_seed(count)) for count in experts]
    expected = [RoutingPlan.from_experts(of, count).slot_of_row_P for of, count in zip(ids, experts)]
    begin, faults = threading.Barrier(len(experts)), []

    def build(of, count, slot_of_row):
        try:
            begin.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                of, slot_of_row = of.cuda(), slot_of_row.cuda()
                for _ in range(repeats):
                    last = RoutingPlan.from_experts(of, count, check="none")
                if not torch.equal(last.slot_of_row_P, slot_of_row):
                    faults.append(f"{count} experts: another plan")
        except Exception as error:
            faults.append(f"{count} experts: {error}")

    threads = [threading.Thread(target=build, args=arguments) for arguments in zip(ids, experts, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_rows_that_int32_cannot_number_are_refused():
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**31 - 64, 1)  # which takes no memory
    gbmoe.plan._check_values(ids, 1, 1, "none")
    with pytest.raises(ValueError, match="experts: expected at most 2147483647 padded rows .* got 2147483648"):
        gbmoe.plan._check_values(ids, 1, 128, "none")
    gbmoe.plan._check_counts(torch.tensor([5]), 2**31 - 1, "wait")
    with pytest.raises(ValueError, match="num_rows: expected at most 2147483647"):
        gbmoe.plan._check_counts(torch.tensor([5]), 2**31, "none")


def test_rows_are_no_more_than_any_routing_needs():
    assert [plain_plan.padded_rows(slots, 3, 8) for slots in (0, 1, 2, 3, 4, 10)] == [0, 8, 16, 24, 24, 24]
    assert plain_plan.padded_rows(11, 3, 8) == 32 and plain_plan.padded_rows(11, 3, 1) == 11


def test_values_are_checked_on_the_device():
    """Without a wait; on a CPU the assertion raises at once."""
    RoutingPlan.from_experts(torch.tensor([[-1, 2]]), 3, check="device")
    RoutingPlan.from_counts(torch.tensor([0, 2, 3]), 5, check="device")
    for ids in ([[-2, 2]], [[0, 3]]):
        with pytest.raises(RuntimeError, match=r"expected ids in \[0, 3\)"):
            RoutingPlan.from_experts(torch.tensor(ids), 3, check="device")
    for counts in ([-1, 2, 3], [1, 2, 3]):
        with pytest.raises(RuntimeError, match="expected no negative entry and a sum of at most num_rows == 5"):
            RoutingPlan.from_counts(torch.tensor(counts), 5, check="device")
