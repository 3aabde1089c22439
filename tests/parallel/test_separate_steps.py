"""dispatch, experts and combine as steps of their own: two micro-batches interleaved give the bits of the layer in one call, and ranks that
take steps in different orders are told.

Two processes (gloo) run all cases at one start; what needs no other rank runs in a group of one. On GPUs two processes (NCCL) run them.

Shape suffixes: T tokens, K slots a token, S rows received, H hidden, E experts.
"""

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gbmoe
from gbmoe.layers import Arguments
from gbmoe.layers.dmoe import ParallelDroplessMLP
from gbmoe.parallel import check_steps, combine, dispatch, separate_steps
from tests import rank_groups

WORLD, EXPERTS, HIDDEN, TOP_K = 2, 8, 16, 3
# The tokens of each rank in each micro-batch.
TOKENS = {"as many": ((9, 9), (9, 9)), "different numbers": ((9, 4), (5, 14)), "none on a rank": ((0, 13), (7, 0)),
          "none": ((0, 0), (3, 2))}
RANKS = [pytest.mark.slow, pytest.mark.xdist_group("separate steps")]  # one start serves all tests


def make(device, dtype=torch.float32, group=None):
    torch.manual_seed(0)
    return ParallelDroplessMLP(Arguments(
        hidden_size=HIDDEN, ffn_hidden_size=32, moe_num_experts=EXPERTS, moe_top_k=TOP_K, mlp_type="glu", bias=False, fp16=False,
        bf16=dtype == torch.bfloat16, device=device, moe_loss_weight=0, activation_fn=torch.nn.functional.silu,
        moe_expert_model_parallelism=True, expert_parallel_group=group, expert_parallel_transport="exchange",
        expert_parallel_chunks=1, init_method=functools.partial(torch.nn.init.normal_, std=0.3)))


def drawn(tokens, seed, device, dtype=torch.float32, x_needs=True, weights_need=True):
    """x, ids, router weights and the gradient of the output, of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device, dtype)
    return x.requires_grad_(x_needs), ids, weights.requires_grad_(weights_need), grad


def sent(layer, x, ids, weights):
    return dispatch(x, ids, weights, layer.args.expert_parallel_group, EXPERTS, trains=any(p.requires_grad for p in layer.parameters()))


def computed(layer, dispatched):
    return layer.mlp(dispatched.rows_SH, dispatched.plan, dispatched.weights_SK)


def results(layer, batches, outs):
    found = [*(out.detach() for out in outs), *(t.grad for batch in batches for t in (batch[0], batch[2])), *(
        p.grad for p in layer.parameters())]
    layer.zero_grad()
    return [None if t is None else t.cpu() for t in found]


def in_one_call(layer, batches):
    outs = []
    for x, ids, weights, grad in batches:
        outs.append(layer(x, x.new_zeros(x.size(0), EXPERTS), weights, ids))
        if outs[-1].requires_grad:
            outs[-1].backward(grad)
    return results(layer, batches, outs)


def in_steps(layer, batches):
    """Both micro-batches, each as one graph."""
    sents = [sent(layer, *batch[:3]) for batch in batches]
    outs = [combine(computed(layer, each), each) for each in sents]
    for out, batch in zip(outs, batches):
        if out.requires_grad:
            out.backward(batch[3])
    return results(layer, batches, outs)


def interleaved(layer, batches):
    """As a 1F1B schedule: each step's backward by itself, and the second micro-batch's forward between the backward steps of the first."""
    (first, second), outs = batches, []
    a = sent(layer, *first[:3])
    leaves_a = a.detached()
    y_a = computed(layer, leaves_a)
    leaf_a = y_a.detach().requires_grad_(y_a.requires_grad)
    outs.append(combine(leaf_a, a))

    outs[0].backward(first[3])                   # backward of combine, A
    b = sent(layer, *second[:3])                 # dispatch, B
    y_a.backward(leaf_a.grad)                    # backward of experts, A
    leaves_b = b.detached()
    y_b = computed(layer, leaves_b)              # experts, B
    a.backward(leaves_a)                         # backward of dispatch, A
    leaf_b = y_b.detach().requires_grad_(y_b.requires_grad)
    outs.append(combine(leaf_b, b))

    outs[1].backward(second[3])
    y_b.backward(leaf_b.grad)
    b.backward(leaves_b)
    return results(layer, batches, outs)


def compared(rank, device):
    found = {}
    for name, tokens in TOKENS.items():
        for dtype in (torch.float32, torch.bfloat16):
            layer = make(device, dtype)

            def batches():
                return [drawn(of_ranks[rank], 10 * batch + rank, device, dtype) for batch, of_ranks in enumerate(tokens)]

            found[name, dtype] = {"one call": in_one_call(layer, batches()), "steps": in_steps(layer, batches()),
                                  "interleaved": interleaved(layer, batches())}
    return found


def needed_on_some_ranks(rank, device):
    """Gradients that only one rank needs: the other takes part in the trips."""
    found = {}
    for name, needs in {"x on rank 1": (rank == 1, False, False), "weights on rank 0": (False, rank == 0, False),
                        "experts on rank 1": (False, False, rank == 1), "nothing": (False, False, False)}.items():
        layer = make(device)
        layer.requires_grad_(needs[2])

        def batches():
            return [drawn(7 + 3 * rank, batch, device, x_needs=needs[0], weights_need=needs[1]) for batch in range(2)]

        found[name] = {"one call": in_one_call(layer, batches()), "steps": in_steps(layer, batches())}
    return found


def combines_in_another_order(rank, layer, batches):
    sents = [sent(layer, *batch[:3]) for batch in batches]
    ys = [computed(layer, each) for each in sents]
    first = 1 if rank else 0
    combine(ys[first], sents[first])


def combine_where_the_other_dispatches(rank, layer, batches):
    a = sent(layer, *batches[0][:3])
    y_a = computed(layer, a)
    if rank:
        sent(layer, *batches[1][:3])
    else:
        combine(y_a, a)


def backwards_in_another_order(rank, layer, batches):
    sents = [sent(layer, *batch[:3]) for batch in batches]
    outs = [combine(computed(layer, each), each) for each in sents]
    outs[rank].backward(batches[rank][3])


def a_backward_left_out(rank, layer, batches):
    a = sent(layer, *batches[0][:3])
    out = combine(computed(layer, a), a)
    if rank:
        out.backward(batches[0][3])
    sent(layer, *batches[1][:3])


def the_layer_in_one_call_on_one_rank(rank, layer, batches):
    x, ids, weights, _ = batches[0]
    if rank:
        layer(x, x.new_zeros(x.size(0), EXPERTS), weights, ids)
    else:
        sent(layer, x, ids, weights)


def sums_of_another_dtype(rank, layer, batches):
    a = sent(layer, *batches[0][:3])
    y = computed(layer, a)
    combine(y.double() if rank else y, a)


DIFFERING = {  # the path that the error shows for each rank
    combines_in_another_order: ("combine of dispatch 1,", "combine of dispatch 2,"),
    combine_where_the_other_dispatches: ("combine of dispatch 1,", "dispatch to 8 experts of"),
    backwards_in_another_order: ("backward of combine of dispatch 1,", "backward of combine of dispatch 2,"),
    a_backward_left_out: ("dispatch to 8 experts of", "backward of combine of dispatch 1,"),
    the_layer_in_one_call_on_one_rank: ("dispatch to 8 experts of", "exchange of"),
    sums_of_another_dtype: ("16 x torch.float32 a row", "16 x torch.float64 a row"),
}


def errors(rank):
    found = {}
    for case in DIFFERING:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=30))  # which counts from one
        layer = make("cpu", group=group)
        batches = [drawn(6 + rank, seed, "cpu") for seed in (rank, 10 + rank)]
        with pytest.raises(ValueError, match="expected all ranks of the group to make the same pass") as error:
            case(rank, layer, batches)
        again = in_steps(layer, [drawn(6 + rank, seed, "cpu") for seed in (rank, 10 + rank)])  # who catches it may go on
        found[case.__name__] = str(error.value), all(t.isfinite().all() for t in again)
    return found


def told_later(rank):
    """Where nobody waits for headers, as on GPUs: (whether check_steps and dispatch were content with ranks that took the same steps, what
    they say where ranks combined two micro-batches with equal numbers of rows in different orders)."""
    layer, found = make("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(separate_steps, "_is_compared_later", lambda device: True)

        def batches():
            return [drawn(6, 1, "cpu") for _ in range(2)]

        in_steps(layer, batches())
        check_steps()
        for tell in (check_steps, lambda: sent(layer, *batches()[0][:3])):
            sents = [sent(layer, *batch[:3]) for batch in batches()]
            for number in (rank, 1 - rank):
                combine(computed(layer, sents[number]), sents[number])
            with pytest.raises(ValueError) as error:
                tell()
            found.append(str(error.value))
            check_steps()  # it was said once
        in_steps(layer, batches())
    return found


def worker(rank, store, device_type, folder):
    device = rank_groups.join(rank, WORLD, store, device_type)
    found = {"compared": compared(rank, device), "needs": needed_on_some_ranks(rank, device)}
    check_steps()
    if device_type == "cpu":
        found["errors"], found["told later"] = errors(rank), told_later(rank)
    torch.save(found, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ran(request, tmp_path_factory):
    return rank_groups.files_of_ranks(worker, WORLD, tmp_path_factory.mktemp("steps"), request.param, device_type=request.param)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


class TestTwoRanks:
    pytestmark = RANKS

    @pytest.mark.parametrize("how", ["steps", "interleaved"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", TOKENS)
    def test_steps_give_the_bits_of_one_call(self, ran, name, dtype, how):
        for found in ran:
            of = found["compared"][name, dtype]
            assert_same(of[how], of["one call"])
            assert all(t.isfinite().all() for t in of[how])

    @pytest.mark.parametrize("name", ["x on rank 1", "weights on rank 0", "experts on rank 1", "nothing"])
    def test_gradients_that_one_rank_alone_needs(self, ran, name):
        for rank, found in enumerate(ran):
            of = found["needs"][name]
            assert_same(of["steps"], of["one call"])
            assert any(t is not None for t in of["steps"][2:]) == name.endswith(f"rank {rank}")

    @pytest.mark.parametrize("case", DIFFERING, ids=lambda case: case.__name__)
    def test_ranks_that_take_different_steps_are_told_in_what(self, ran, case):
        if "errors" not in ran[0]:
            pytest.skip("on GPUs ranks are told later")
        for found in ran:
            message, goes_on = found["errors"][case.__name__]
            for rank, path in enumerate(DIFFERING[case]):
                assert path in message and f"on rank {rank}" in message, message
            assert goes_on


    def test_ranks_that_nobody_waits_for_are_told_by_the_next_dispatch(self, ran):
        """Each got the sums of the other micro-batch."""
        if "told later" not in ran[0]:
            pytest.skip("of CPUs")
        for rank, found in enumerate(ran):
            for message in found["told later"]:
                assert "this rank's was the combine of dispatch " in message and f"ranks [{1 - rank}] took another step" in message


# -------------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.usefixtures("group_of_one")
def test_against_float64():
    def of(dtype):
        x, ids, weights, grad = drawn(11, 1, "cpu", torch.float64)
        ids[3, 1] = -1
        w1, w2, v1 = (torch.randn(EXPERTS, 32, HIDDEN, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weights, w1, w2, v1)]
        if dtype == torch.float64:
            x, weights, w1, w2, v1 = leaves
            h = torch.nn.functional.silu(torch.einsum("th,efh->tef", x, w1)) * torch.einsum("th,efh->tef", x, v1)
            y_TEH = torch.einsum("tef,efh->teh", h, w2)
            shares_TE = torch.zeros(11, EXPERTS + 1, dtype=dtype).scatter(1, torch.where(ids < 0, EXPERTS, ids), weights)[:, :EXPERTS]
            out = torch.einsum("te,teh->th", shares_TE, y_TEH)
        else:
            sent = dispatch(leaves[0], ids, leaves[1], None, EXPERTS)
            out = combine(gbmoe.expert_mlp(sent.rows_SH, sent.plan, *leaves[2:], weights_TK=sent.weights_SK), sent)
            assert sent.tokens_per_expert.tolist() == torch.bincount(ids[ids >= 0], minlength=EXPERTS).tolist()
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for got, expected in zip(of(torch.float32), of(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("group_of_one")
def test_arguments_that_are_refused():
    x, ids, weights, _ = drawn(5, 1, "cpu")
    for change, error in ((dict(num_experts=0), "num_experts: expected a multiple of 1 ranks, got 0"),
                          (dict(ids_TK=ids.float()), "dispatch: experts: expected dtype"), (dict(weights_TK=weights[:, :2]), "weights: "
                           "expected shape"), (dict(x_TH=x[:4]), "x: expected 5 rows")):
        with pytest.raises((TypeError, ValueError), match=error):
            dispatch(**{**dict(x_TH=x, ids_TK=ids, weights_TK=weights, group=None, num_experts=EXPERTS), **change})
    sent = dispatch(x, ids, weights, None, EXPERTS)
    for y, dispatched, error in ((sent.rows_SH[1:], sent, "y: expected shape"), (sent.rows_SH[:, 1:], sent, "y: expected shape"),
                                 (sent.rows_SH, None, "dispatched: expected what gbmoe.parallel.dispatch returned")):
        with pytest.raises((TypeError, ValueError), match=error):
            combine(y, dispatched)


@pytest.mark.slow
@pytest.mark.usefixtures("group_of_one")
def test_a_graph_breaks_around_the_steps():
    x, ids, weights, grad = drawn(5, 1, "cpu")
    w1, w2 = (torch.randn(EXPERTS, 8, HIDDEN) for _ in range(2))

    def run(x, weights):
        sent = dispatch(2 * x, ids, weights, None, EXPERTS)
        return 3 * combine(gbmoe.expert_mlp(sent.rows_SH, sent.plan, w1, w2, weights_TK=sent.weights_SK), sent)

    graph = torch.compile(run, backend="aot_eager")
    assert_same(*([out.detach(), *torch.autograd.grad(out, (x, weights), grad)] for out in (graph(x, weights), run(x, weights))))
    torch.compiler.reset()
