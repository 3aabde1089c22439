"""The kinds of load-balancing losses against their formulas in float64, with their gradients: padding, sequences, the global batch."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import Arguments, losses, same_layers
from gbmoe.layers.losses import save_router_logsumexp
from gbmoe.testing import cuda_graphs, exact_inputs
from tests import rank_groups
from tests.conftest import dtype_id

HIDDEN, LENGTH, BATCH = 16, 6, 5
SIGMOID = dict(moe_router_score_function="sigmoid", moe_normalize_expert_weights=1)
SIZES = (8, 4, 8)  # experts of the layers of a model


def make(device="cpu", seed=0, **fields):
    torch.manual_seed(seed)
    return gbmoe.dMoE(Arguments(**{
        **dict(hidden_size=HIDDEN, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2, fp16=False, bias=False, device=device,
               mlp_type="glu", moe_loss_weight=0.25, num_layers=3, init_method=functools.partial(torch.nn.init.normal_, std=0.3)),
        **fields}))


def model(device="cpu", **fields):
    return [make(device, seed, moe_num_experts=experts, **fields) for seed, experts in enumerate(SIZES)]


def inputs(*leading, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(*leading, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def padding_of(*leading, seed=3):
    """Some tokens; and all of the second sequence."""
    mask = torch.rand(*leading, generator=torch.Generator().manual_seed(seed)) < 0.3
    mask[:, 1] = True
    return mask


def shares_of(layer, x):
    """(shares [T,E] of the experts in the scores, float64, with a gradient; one-hot choices [T,E]) by the formulas of DeepSeek-V3."""
    logits_TE = x.reshape(-1, HIDDEN).double() @ layer.router.layer.weight.double().t()
    scores_TE = logits_TE.sigmoid() if layer.args.moe_router_score_function == "sigmoid" else logits_TE.softmax(1)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, logits_TE.topk(layer.args.moe_top_k).indices, 1)
    return scores_TE / scores_TE.sum(1, keepdim=True), chosen_TE


def balance(layer, groups):
    """The mean, over groups of tokens, of E / (K * T) * sum of count * mean share, as (shares, choices) of each."""
    experts, top_k = layer.args.moe_num_experts, layer.args.moe_top_k
    return torch.stack([experts / (top_k * len(s)) * (c.sum(0) * s.mean(0)).sum() for s, c in groups if len(s)]).mean()


def expected_of(layers, x, sequence_T, padding_T=None):
    """The weight times the mean over layers, for tokens that belong to sequences, -1 for none."""
    total = 0.0
    for layer in layers:
        shares_TE, chosen_TE = shares_of(layer, x)
        counts_T = torch.ones_like(sequence_T, dtype=torch.bool) if padding_T is None else ~padding_T
        total += balance(layer, [(shares_TE[counts_T & (sequence_T == s)], chosen_TE[counts_T & (sequence_T == s)])
                                 for s in range(int(sequence_T.max()) + 1)])
    return layers[0].args.moe_loss_weight / layers[0].args.num_layers * total


def check(loss, expected, layers, tolerance=2e-6):
    routers = [layer.router.layer.weight for layer in layers]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for got, want in zip(*(torch.autograd.grad(of, routers, retain_graph=True) for of in (loss, expected)), strict=True):
        assert got.any()
        torch.testing.assert_close(got.double(), want.double(), rtol=100 * tolerance, atol=tolerance * float(want.abs().max()))


ALL_ONE = torch.zeros(LENGTH * BATCH, dtype=torch.int64)
LAYOUTS = {
    "sequence first": (dict(), (LENGTH, BATCH), None, torch.arange(LENGTH * BATCH) % BATCH),
    "batch first": (dict(batch_first=True), (LENGTH, BATCH), None, torch.arange(LENGTH * BATCH) // BATCH),
    "batch first, of four dimensions": (dict(batch_first=True), (2, 3, BATCH), None, torch.arange(LENGTH * BATCH) // BATCH),
    "sequence first, of four dimensions": (dict(), (LENGTH, BATCH, 1), None, torch.arange(LENGTH * BATCH) % BATCH),
    "one sequence": (dict(), (LENGTH * BATCH,), None, ALL_ONE),
    "packed": (dict(), (LENGTH * BATCH, 1), [0, 7, 7, 20, 30], torch.tensor([0] * 7 + [2] * 13 + [3] * 10)),
    "packed, with a rest": (dict(batch_first=True), (1, LENGTH * BATCH), [0, 11, 21], torch.tensor([0] * 11 + [1] * 10 + [-1] * 9)),
}


@pytest.mark.parametrize("padded", [False, True], ids=["all tokens", "padding"])
@pytest.mark.parametrize("scores", [SIGMOID, dict()], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_each_sequence(device, layout, scores, padded):
    fields, leading, bounds, sequence_T = LAYOUTS[layout]
    layers = model(device, moe_router_load_balancing_type="seq_aux_loss", **scores, **fields)
    x, sequence_T = inputs(*leading, device=device), sequence_T.to(device)
    given = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}
    if padded:
        given["padding_mask"] = (torch.arange(LENGTH * BATCH) % 3 == 0).view(leading).to(device)
    for layer in layers:
        layer(x, **given)
    padding_T = given["padding_mask"].flatten() if padded else None
    check(gbmoe.batched_load_balancing_loss(layers[0].args), expected_of(layers, x, sequence_T, padding_T), layers)


def test_a_sequence_of_padding_alone_is_no_sequence():
    layers, x, mask = model(moe_router_load_balancing_type="seq_aux_loss", **SIGMOID), inputs(LENGTH, BATCH), padding_of(LENGTH, BATCH)
    for layer in layers:
        layer(x, padding_mask=mask)
    expected = expected_of(layers, x, torch.arange(LENGTH * BATCH) % BATCH, mask.flatten())
    check(gbmoe.batched_load_balancing_loss(layers[0].args), expected, layers)


@pytest.mark.parametrize("leading, bounds", [((0, 3), None), ((4, 0), None), ((0,), [0]), ((0,), [0, 0])], ids=str)
@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss", "aux_loss"])
def test_no_tokens_are_no_loss(kind, leading, bounds):
    layer = make(num_layers=1, moe_router_load_balancing_type=kind, **SIGMOID)
    layer(inputs(*leading), **({} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}))
    loss = gbmoe.batched_load_balancing_loss(layer.args)
    loss.backward()
    assert loss == 0 and not layer.router.layer.weight.grad.any()


@pytest.mark.parametrize("bounds", [[0, 99], [0, -5, 8], [0, 20, 3, 30], [7, 30]], ids=str)
def test_bounds_that_are_none_lead_nowhere_else(device, bounds):
    layer = make(device, num_layers=1, moe_router_load_balancing_type="seq_aux_loss", **SIGMOID)
    layer(inputs(LENGTH * BATCH, device=device), cu_seqlens=torch.tensor(bounds, device=device))
    loss = gbmoe.batched_load_balancing_loss(layer.args)
    loss.backward()
    assert bool(loss.isfinite()) and bool(layer.router.layer.weight.grad.isfinite().all())


@pytest.mark.parametrize("scores", [SIGMOID, dict()], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_padding_was_counted_among_the_tokens(device, kind, scores):
    layers, x = model(device, moe_router_load_balancing_type=kind, moe_zloss_weight=0.5, **scores), inputs(LENGTH, BATCH, device=device)
    mask = padding_of(LENGTH, BATCH).to(device)
    for layer in layers:
        layer(x, padding_mask=mask)
    check(gbmoe.batched_load_balancing_loss(layers[0].args), expected_of(layers, x, ALL_ONE.to(device), mask.flatten()), layers)
    logits = [x[~mask].double() @ layer.router.layer.weight.double().t() for layer in layers]
    expected = 0.5 * torch.stack([logits_TE.logsumexp(1).square().mean() for logits_TE in logits])
    z_loss = gbmoe.batched_router_zloss(layers[0].args)
    torch.testing.assert_close(z_loss.double(), expected, rtol=2e-6, atol=0)
    check(z_loss.sum(), expected.sum(), layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_losses_are_summed_in_float32_and_have_the_dtype_of_the_scores(kind, dtype):
    for in_fp32 in (False, True):
        gbmoe.clear_load_balancing_loss()
        layers = [layer.to(dtype) for layer in model(moe_router_load_balancing_type=kind, moe_lbl_in_fp32=in_fp32, **SIGMOID)]
        x, mask = inputs(LENGTH, BATCH, dtype=dtype), padding_of(LENGTH, BATCH)
        for layer in layers:
            layer(x, padding_mask=mask)
        loss = gbmoe.batched_load_balancing_loss(layers[0].args)
        assert loss.dtype == (torch.float32 if in_fp32 else dtype)
        sequence_T = torch.arange(LENGTH * BATCH) % BATCH if kind == "seq_aux_loss" else ALL_ONE
        expected = expected_of(layers, x, sequence_T, mask.flatten())
        torch.testing.assert_close(loss.double(), expected, rtol={torch.float64: 1e-7 if in_fp32 else 1e-12}.get(dtype, 2e-2), atol=0)


def test_all_padding_is_no_loss():
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        layer = make(num_layers=1, moe_router_load_balancing_type=kind, moe_zloss_weight=1.0)
        layer(inputs(LENGTH, BATCH), padding_mask=torch.ones(LENGTH, BATCH, dtype=torch.bool))
        loss = gbmoe.batched_load_balancing_loss(layer.args) + gbmoe.batched_router_zloss(layer.args).sum()
        loss.backward()
        assert loss == 0 and not layer.router.layer.weight.grad.any()


def test_a_router_of_ones_own_may_score_padding():
    class Own(torch.nn.Module):
        def forward(self, x, padding_mask):
            scores_TE = torch.full((x.numel() // HIDDEN, 8), 1 / 8).masked_fill(padding_mask.flatten()[:, None], 1e4)
            return scores_TE, scores_TE[:, :2], torch.tensor([[0, 1]]).expand(scores_TE.size(0), 2).masked_fill(
                padding_mask.flatten()[:, None], -1)

    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        gbmoe.clear_load_balancing_loss()
        layer = make(num_layers=1, moe_router_load_balancing_type=kind)
        layer.router = Own()
        layer(inputs(LENGTH, BATCH), padding_mask=padding_of(LENGTH, BATCH))
        assert gbmoe.batched_load_balancing_loss(layer.args).item() == pytest.approx(0.25)


def test_none_keeps_nothing():
    layer = make(moe_router_load_balancing_type="none")
    layer(inputs(3, 1))
    assert gbmoe.get_load_balancing_loss() == [] and gbmoe.batched_load_balancing_loss(layer.args) == 0.0
    with pytest.raises(ValueError, match="moe_router_load_balancing_type: expected one of aux_loss, .* nearest is seq_aux_loss"):
        make(moe_router_load_balancing_type="seq_aux")


def test_what_lacks_ids_or_has_other_shapes_is_refused():
    args = Arguments(device="cpu", moe_num_experts=4, moe_top_k=2, moe_router_load_balancing_type="seq_aux_loss")
    counts, scores, ids = torch.tensor([3, 3, 3, 3]), torch.rand(6, 4), torch.zeros(6, 2, dtype=torch.int64)
    for given, words in ((dict(), "experts: expected ids of each token, .*'seq_aux_loss' keep, got None"),
                         (dict(experts=ids[:5]), r"experts: expected shape \[..., K\] with 6 tokens, .* got \[5, 2\]"),
                         (dict(experts=ids, padding_mask=torch.zeros(5, dtype=torch.bool)), "padding_mask: expected 6 entries, .* got 5"),
                         (dict(experts=ids, cu_seqlens=torch.zeros(2, 2)), r"cu_seqlens: expected shape \[S\+1\], got \[2, 2\]")):
        gbmoe.clear_load_balancing_loss()
        gbmoe.layers.save_load_balancing_loss((counts, scores), **given)
        with pytest.raises(ValueError, match=words):
            gbmoe.batched_load_balancing_loss(args)
    layer = make(moe_router_load_balancing_type="seq_aux_loss")
    with pytest.raises(TypeError, match="dMoE: cu_seqlens: expected dtype int32, int64"):
        layer(inputs(6), cu_seqlens=torch.zeros(2))


@pytest.mark.parametrize("how, kind", [
    ("checkpoint", "seq_aux_loss"), ("checkpoint", "global_aux_loss"), ("compiled", "global_aux_loss"),
    ("compiled checkpoint", "seq_aux_loss"), pytest.param("compiled", "seq_aux_loss", marks=pytest.mark.slow),
    pytest.param("compiled checkpoint", "global_aux_loss", marks=pytest.mark.slow)])
def test_losses_of_checkpoints_and_graphs(how, kind):
    torch.compiler.reset()
    layers = model(moe_router_load_balancing_type=kind, moe_zloss_weight=0.5, **SIGMOID)
    x, mask, bounds = inputs(LENGTH, BATCH), padding_of(LENGTH, BATCH), torch.tensor([0, 11, 30])

    def forward(x, mask, bounds):
        for layer in layers:
            if "checkpoint" in how:
                checkpoint(layer, x, padding_mask=mask, cu_seqlens=bounds, use_reentrant=False)
            else:
                layer(x, padding_mask=mask, cu_seqlens=bounds)
        return gbmoe.batched_load_balancing_loss(layers[0].args) + gbmoe.batched_router_zloss(layers[0].args).sum()

    if "compiled" in how:
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    sequence_T = torch.tensor([0] * 11 + [1] * 19) if kind == "seq_aux_loss" else ALL_ONE
    expected = expected_of(layers, x, sequence_T, mask.flatten()) + 0.5 * sum(
        (x[~mask].double() @ layer.router.layer.weight.double().t()).logsumexp(1).square().mean() for layer in layers)
    check(forward(x, mask, bounds), expected, layers)


@pytest.mark.parametrize("layout", ["sequence first", "packed"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_losses_take_no_operator_whose_sums_have_no_order(device, kind, layout):
    fields, leading, bounds, _ = LAYOUTS[layout]
    layers = model(device, moe_router_load_balancing_type=kind, moe_zloss_weight=0.5, **SIGMOID, **fields)
    given = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}
    for layer in layers:
        layer(inputs(*leading, device=device), padding_mask=torch.zeros(leading, dtype=torch.bool, device=device), **given)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (gbmoe.batched_load_balancing_loss(layers[0].args) + gbmoe.batched_router_zloss(layers[0].args).sum()).backward(
                inputs=[layer.router.layer.weight for layer in layers])
    finally:
        torch.use_deterministic_algorithms(False)
    # The router's own product may be cuBLAS's, which has an order where CUBLAS_WORKSPACE_CONFIG asks for it.
    assert [str(warning.message) for warning in caught if "CUBLAS_WORKSPACE_CONFIG" not in str(warning.message)] == []


@pytest.mark.parametrize("kind", ["seq_aux_loss", pytest.param("global_aux_loss", marks=pytest.mark.slow)])
def test_numbers_of_tokens_share_a_graph(kind):
    torch.compiler.reset()
    layer, counter = make(num_layers=1, moe_router_load_balancing_type=kind, **SIGMOID), CompileCounterWithBackend("aot_eager")

    def forward(x, mask):
        gbmoe.clear_load_balancing_loss()
        layer(x, padding_mask=mask)
        return gbmoe.batched_load_balancing_loss(layer.args)

    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    for length in (6, 7, 9, 12):
        x, mask = inputs(length, BATCH), padding_of(length, BATCH)
        torch.testing.assert_close(compiled(x, mask), forward(x, mask))
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sequence first", "packed"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_a_step_with_its_losses_is_a_cuda_graph_with_the_same_bits(kind, layout):
    device, (fields, leading, bounds, _) = torch.device("cuda"), LAYOUTS[layout]
    layers = model(device, bf16=True, moe_router_load_balancing_type=kind, moe_zloss_weight=0.5, **SIGMOID, **fields)
    x, mask = inputs(*leading, device=device, dtype=torch.bfloat16), (torch.arange(LENGTH * BATCH) % 3 == 0).view(leading).to(device)
    given = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}
    routers = [layer.router.layer.weight for layer in layers]

    def step():
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        for layer in layers:
            layer(x, padding_mask=mask, **given)
        loss = gbmoe.batched_load_balancing_loss(layers[0].args) + gbmoe.batched_router_zloss(layers[0].args).sum()
        return loss.detach(), *torch.autograd.grad(loss, routers)

    expected = step()
    exact_inputs.poison(device)
    graph, results = cuda_graphs.captured(step)
    for _ in range(2):
        graph.replay()
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


# -------------------------------------------------------------------------------------------------------- the global batch


def global_loss(layers, micro_batches):
    """Qwen3's loss of each micro-batch, lists of (x, padding mask) of the ranks: counts of all micro-batches so far."""
    total = [0.0] * len(micro_batches)
    for layer in layers:
        experts, top_k = layer.args.moe_num_experts, layer.args.moe_top_k
        counts_E, tokens = torch.zeros(experts, dtype=torch.float64), 0
        for number, ranks in enumerate(micro_batches):
            parts = [tuple(part[~mask.flatten()] for part in shares_of(layer, x)) for x, mask in ranks]
            counts_E, tokens = counts_E + sum(c.sum(0) for _, c in parts), tokens + sum(len(c) for _, c in parts)
            shares_TE = torch.cat([s for s, _ in parts])
            total[number] += experts / (top_k * tokens) * (counts_E * shares_TE.mean(0)).sum()
    return [layers[0].args.moe_loss_weight / layers[0].args.num_layers * loss for loss in total]


def micro_batch(number, rank):
    return inputs(LENGTH - rank, BATCH, seed=10 * number + rank), padding_of(LENGTH - rank, BATCH, seed=number + rank)


def step(layers, rank, so_far):
    """The losses of two micro-batches."""
    found = []
    for number in range(2):
        x, mask = micro_batch(number, rank)
        for layer in layers:
            layer(x, padding_mask=mask)
        found.append(gbmoe.batched_load_balancing_loss(layers[0].args, so_far=so_far))
        gbmoe.clear_load_balancing_loss()
    return found


def test_counts_of_the_micro_batches_before_are_added():
    layers = model(moe_router_load_balancing_type="global_aux_loss", **SIGMOID)
    for _ in range(2):  # steps
        found, expected = step(layers, 0, []), global_loss(layers, [[micro_batch(number, 0)] for number in range(2)])
        for loss, want in zip(found, expected, strict=True):
            check(loss, want, layers)
    for loss, number in zip(step(layers, 0, None), range(2)):  # where they are not asked for
        check(loss, global_loss(layers, [[micro_batch(number, 0)]])[0], layers)


def test_counts_of_other_layers_are_refused():
    layers, so_far = model(moe_router_load_balancing_type="global_aux_loss"), [torch.zeros(3, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"so_far: expected a list that is empty, .* of shape \[23\], got \[3\]"):
        step(layers, 0, so_far)
    gbmoe.clear_load_balancing_loss()


WORLD = 2


def worker(rank, store, results):
    rank_groups.join(rank, WORLD, store)
    for parallel in (False, True):
        layers = model(moe_router_load_balancing_type="global_aux_loss", moe_expert_model_parallelism=parallel, **SIGMOID)
        found = step(layers, rank, [])
        gradients = [torch.autograd.grad(loss, [layer.router.layer.weight for layer in layers], retain_graph=True) for loss in found]
        results[rank, parallel] = [loss.detach() for loss in found], gradients
    for name, pairs in MISPAIRED.items():
        if name == "in an earlier step":  # as on a GPU, where no host waits for layers that ranks have agreed about
            same_layers._is_free = lambda device: False
        results[rank, name] = [refusal(experts) for experts in pairs[rank]]
    dist.destroy_process_group()


# The numbers of experts of the layers that each rank calls, call by call.
MISPAIRED = {
    "another order": [[(8, 4)], [(4, 8)]],
    "another number": [[(8, 4, 8)], [(8, 4)]],
    "in an earlier step": [[(8, 4), (4, 8), (8, 4), (8, 4)], [(8, 4), (4, 8), (4, 8), (8, 4)]],
}


def refusal(experts):
    """What the loss of such layers raises, or None."""
    layers = [make(seed=seed, moe_num_experts=number, num_layers=len(experts), moe_router_load_balancing_type="global_aux_loss")
              for seed, number in enumerate(experts)]
    try:
        for layer in layers:
            layer(inputs(LENGTH, BATCH))
        gbmoe.batched_load_balancing_loss(layers[0].args)
    except ValueError as error:
        return str(error)
    finally:
        gbmoe.clear_load_balancing_loss()
    return None


@pytest.mark.parametrize("name", MISPAIRED)
@pytest.mark.xdist_group("load_balancing_terms")
def test_counts_of_one_layer_were_added_to_those_of_another(results, name):
    """Layers of as many experts in another order had a sum; others stopped in the collective. All ranks raise."""
    for rank in range(WORLD):
        *before, last = results[rank, name]
        assert before == [None] * len(before)
        mine = MISPAIRED[name][rank][-2 if before else 0]
        assert f"expected the same on all {WORLD} ranks of the group" in last and ("in an earlier step" in last) == bool(before)
        assert f"{len(mine)} layers with {', '.join(map(str, mine))} experts on rank {rank}, and others on other ranks" in last


@pytest.mark.parametrize("parallel", [False, True], ids=["data parallel", "expert parallel"])
@pytest.mark.xdist_group("load_balancing_terms")
def test_the_mean_over_ranks_is_the_loss_of_the_global_batch(results, parallel):
    layers = model(moe_router_load_balancing_type="global_aux_loss", **SIGMOID)
    expected = global_loss(layers, [[micro_batch(number, rank) for rank in range(WORLD)] for number in range(2)])
    for number, want in enumerate(expected):
        losses_of, gradients = zip(*((results[rank, parallel][0][number], results[rank, parallel][1][number]) for rank in range(WORLD)))
        torch.testing.assert_close(torch.stack(losses_of).mean().double(), want.detach(), rtol=2e-6, atol=0)
        exact = torch.autograd.grad(want, [layer.router.layer.weight for layer in layers], retain_graph=True)
        for layer, gradient in enumerate(exact):
            mean = torch.stack([of_rank[layer] for of_rank in gradients]).mean(0)
            torch.testing.assert_close(mean, gradient, rtol=2e-4, atol=2e-6 * float(gradient.abs().max()))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return rank_groups.shared_by_ranks(worker, WORLD, tmp_path_factory.mktemp("ranks"))


# ------------------------------------------------------------------------------------------------- the models' own code


def test_the_loss_of_each_sequence_is_deepseeks():
    """modeling_deepseek.py's gate (DeepSeek-V2, seq_aux), with softmax scores and one layer."""
    layer, x = make(num_layers=1, batch_first=True, moe_router_load_balancing_type="seq_aux_loss"), inputs(BATCH, LENGTH)
    layer(x)
    scores = (x @ layer.router.layer.weight.t()).softmax(-1)
    ids = scores.topk(2).indices.view(BATCH, -1)
    ce = torch.zeros(BATCH, 8).scatter_add_(1, ids, torch.ones(BATCH, LENGTH * 2)).div_(LENGTH * 2 / 8)
    expected = (ce * scores.mean(1)).sum(1).mean() * 0.25
    torch.testing.assert_close(gbmoe.batched_load_balancing_loss(layer.args), expected)


def test_the_loss_of_a_batch_is_transformers_of_qwen3():
    """transformers sums over the K slots where gbmoe and MegaBlocks take the mean; of one layer, with its mask of padding."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    layer = make(num_layers=1, batch_first=True, moe_router_load_balancing_type="global_aux_loss")
    x, mask = inputs(BATCH, LENGTH), padding_of(BATCH, LENGTH)
    layer(x, padding_mask=mask)
    logits = x.view(-1, HIDDEN) @ layer.router.layer.weight.t()
    expected = modeling.load_balancing_loss_func((logits,), 8, 2, attention_mask=(~mask).long())
    check(gbmoe.batched_load_balancing_loss(layer.args), 0.25 / 2 * expected.double(), [layer])


def test_a_z_loss_without_a_mask_keeps_its_bits():
    args = Arguments(device="cpu", moe_zloss_weight=0.1)
    logsumexp_T = torch.randn(7).bfloat16()
    save_router_logsumexp(logsumexp_T)
    assert torch.equal(gbmoe.batched_router_zloss(args), (0.1 * logsumexp_T.square().mean()[None]).bfloat16())
    assert losses._ROUTER_LOGSUMEXP.items() != []
    gbmoe.clear_router_zloss()
