"""record_experts and replay_experts: the experts of a forward, taken again in another one."""

import copy
import functools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe import _torch_names
from gbmoe.layers import LearnedRouter
from tests.parallel import processes

HIDDEN, EXPERTS, TOP_K, LAYERS = 16, 8, 2, 3
CHECKPOINTS = {"none": None, "reentrant": True, "non-reentrant": False}


def arguments(device="cpu", **fields):
    return gbmoe.Arguments(**dict(hidden_size=HIDDEN, ffn_hidden_size=24, moe_num_experts=EXPERTS, moe_top_k=TOP_K, moe_loss_weight=0,
                                  mlp_type="glu", bias=False, fp16=False, device=device,
                                  init_method=functools.partial(torch.nn.init.normal_, std=0.25),
                                  output_layer_init_method=functools.partial(torch.nn.init.normal_, std=0.25)) | fields)


class Block(torch.nn.Module):
    def __init__(self, moe, **fields):
        super().__init__()
        self.mix = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, device=fields.get("device", "cpu"), dtype=fields.get("dtype"))
        self.moe = gbmoe.dMoE(arguments(**fields)) if moe else torch.nn.Identity()

    def forward(self, x):
        x = torch.nn.functional.layer_norm(x + self.mix(x), (HIDDEN,))
        return x + self.moe(x)


class Model(torch.nn.Module):
    """Blocks of which those with even numbers have experts."""

    def __init__(self, **fields):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(number % 2 == 0, **fields) for number in range(2 * LAYERS - 1))
        self.reentrant = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


NAMES = [f"blocks.{2 * layer}.moe" for layer in range(LAYERS)]


def tokens(seed=0, sequence=5, device="cpu", dtype=torch.float32):
    return torch.randn(sequence, 2, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def moved(model):
    """The model with other weights, with which its routers choose otherwise."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).to(parameter)
    return model


def recorded_of(model, *inputs, **options):
    with torch.no_grad(), gbmoe.record_experts(model, **options) as recorded:
        for x in inputs:
            model(x)
    return recorded


def gradients(model, out, *inputs):
    return torch.autograd.grad(out, (*inputs, *model.parameters()))


def test_record_then_replay_gives_the_same_bits(device):
    model, x = Model(device=device), tokens(device=device)
    with gbmoe.record_experts(model) as recorded:
        expected = model(x)
    assert list(recorded) == NAMES
    assert all(ids.dtype == torch.int32 and ids.shape == (10, TOP_K) and ids.device.type == device.type for [ids] in recorded.values())
    with gbmoe.replay_experts(model, recorded):
        out = model(x)
    assert torch.equal(out, expected)
    for one, other in zip(gradients(model, out.square().sum(), x), gradients(model, expected.square().sum(), x)):
        torch.testing.assert_close(one, other)


def test_a_generator_in_inference_mode():
    """Autograd refuses to keep what it made."""
    layer, x = gbmoe.dMoE(arguments()), tokens()
    layer.router = OwnRouter()
    with torch.inference_mode(), gbmoe.record_experts(layer, dtype=torch.int64) as recorded:
        layer(x)
    with gbmoe.replay_experts(layer, recorded):
        layer(x).sum().backward()
    with torch.inference_mode(), gbmoe.replay_experts(layer, recorded):
        layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [None, 1])
def test_tokens_one_by_one_and_as_a_batch_have_the_same_bits(normalize):
    """What batch invariance promises holds for a generator that records and a trainer that replays."""
    fields = dict(hidden_size=256, ffn_hidden_size=128, moe_num_experts=32, moe_top_k=8, moe_normalize_expert_weights=normalize, bf16=True,
                  batch_invariant=True, device="cuda")
    model = torch.nn.Sequential(*(gbmoe.dMoE(arguments(**fields)) for _ in range(2)))
    x = torch.randn(40, 3, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), gbmoe.record_experts(model, dtype=torch.int16) as recorded:
        expected = torch.cat([model(token) for token in x.split(1)])
    with gbmoe.replay_experts(model, gbmoe.unstack_experts(model, gbmoe.stack_experts(recorded))):
        out = model(x)
    assert torch.equal(out, expected)
    out.float().square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_what_is_recorded_is_a_copy_of_the_choice():
    """Autograd keeps the choice itself for backward."""
    model, x = Model(), tokens()
    with gbmoe.record_experts(model, dtype=torch.int64) as recorded:
        out = model(x)
    expected = gradients(model, model(x).square().sum(), x)
    for [ids] in recorded.values():
        ids.zero_()
    for one, other in zip(gradients(model, out.square().sum(), x), expected):
        assert torch.equal(one, other)


def test_after_an_update_the_choice_stays_and_gradients_are_those_of_fixed_experts():
    """Against a loop over slots in float64, whose weights are the live router's."""
    layer, x = gbmoe.dMoE(arguments()).double(), tokens(dtype=torch.float64)
    recorded = recorded_of(layer, x)
    moved(layer)
    assert not torch.equal(recorded_of(layer, x)[""][0], recorded[""][0])
    with gbmoe.record_experts(gbmoe.dMoE(arguments())), gbmoe.replay_experts(layer, recorded):  # a context of another model
        out = layer(x)
    mlp, x_TH, ids_TK = layer.experts.mlp, x.view(-1, HIDDEN), recorded[""][0].long()
    w1, v1, w2 = (weight.view(EXPERTS, -1, HIDDEN) for weight in (mlp.w1, mlp.v1, mlp.w2))
    weights_TK = (x_TH @ layer.router.layer.weight.t()).softmax(-1).gather(1, ids_TK)
    expected = torch.zeros_like(x_TH)
    for slot in range(TOP_K):
        ids = ids_TK[:, slot]
        h = torch.nn.functional.gelu(torch.einsum("th,tfh->tf", x_TH, w1[ids]), approximate="tanh") \
            * torch.einsum("th,tfh->tf", x_TH, v1[ids])
        expected = expected + weights_TK[:, slot, None] * torch.einsum("tf,tfh->th", h, w2[ids])
    torch.testing.assert_close(out.view(-1, HIDDEN), expected)
    for one, other in zip(gradients(layer, out.square().sum(), x), gradients(layer, expected.square().sum(), x)):
        torch.testing.assert_close(one, other)
        assert one.any()


# --------------------------------------------------------------------------------- backward that repeats forwards, micro-batches


def replayed_gradients(model, inputs, recorded, order, retain=False):
    """Gradients, of all forwards, with a backward of each in this order of forwards."""
    model.zero_grad()
    for x in inputs:
        x.grad = None
    with gbmoe.replay_experts(model, recorded):
        losses = [model(x).square().sum() for x in inputs]
        for number in order:
            losses[number].backward(retain_graph=retain)
            if retain:
                losses[number].backward()
    return [tensor.grad for tensor in (*inputs, *model.parameters())]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_micro_batches_take_their_own_ids_again(device, reentrant, order):
    """A repeated forward took the next ids, or chose again. Micro-batches of equal size, so that nothing but the numbers tells. On a GPU
    backward is in another thread."""
    model, inputs = Model(device=device), [tokens(seed, device=device) for seed in range(3)]
    recorded = recorded_of(model, *inputs)
    moved(model)
    expected = replayed_gradients(model, inputs, recorded, order)
    model.reentrant = reentrant
    for one, other in zip(replayed_gradients(model, inputs, recorded, order), expected):
        torch.testing.assert_close(one, other)
    model.reentrant = None
    twice = replayed_gradients(model, inputs, recorded, order, retain=True)
    model.reentrant = reentrant
    if not reentrant:  # a reentrant one's graph is backward's own
        for one, other in zip(replayed_gradients(model, inputs, recorded, order, retain=True), twice):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_forwards_between_backwards(reentrant):
    """As pipelines have them: forward 0, forward 1, backward 0, forward 2, backward 1, backward 2."""
    model, inputs = Model(), [tokens(seed) for seed in range(3)]
    recorded = recorded_of(model, *inputs)
    moved(model)

    def run(mode):
        model.zero_grad()
        model.reentrant = mode
        with gbmoe.replay_experts(model, recorded):
            first, second = model(inputs[0]).sum(), model(inputs[1]).sum()
            first.backward()
            third = model(inputs[2]).sum()
            second.backward()
            third.backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(run(reentrant), run(None)):
        assert torch.equal(one, other)


class Twice(torch.nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(torch.tanh(self.moe(x)))


def replayed(call, model, recorded, inputs):
    """Gradients after the forwards of all inputs and then the backwards."""
    model.zero_grad()
    with gbmoe.replay_experts(model, recorded):
        losses = [call(x).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_runs_twice_in_a_checkpoint(reentrant):
    model, inputs = Twice(gbmoe.dMoE(arguments())), [tokens(seed) for seed in range(2)]
    recorded = recorded_of(model, *inputs)
    assert len(recorded["moe"]) == 4
    moved(model)
    checkpointed = functools.partial(checkpoint, model, use_reentrant=reentrant)
    for one, other in zip(*(replayed(call, model, recorded, inputs) for call in (checkpointed, model))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("outer, inner", [(False, False), (True, False), (False, True), (True, True)])
def test_nested_checkpoints_take_their_ids_or_are_refused(outer, inner):
    model, inputs = Model(), [tokens(seed) for seed in range(2)]
    recorded = recorded_of(model, *inputs)
    moved(model)
    expected = replayed(model, model, recorded, inputs)
    model.reentrant = inner
    nested = functools.partial(checkpoint, model, use_reentrant=outer)
    if outer or inner:
        refused = "replay_experts: layer blocks.*(in a reentrant checkpoint and|a reentrant checkpoint contains)"
        with pytest.raises(NotImplementedError, match=refused):
            replayed(nested, model, recorded, inputs)
        assert all(module._tape is None for module in model.modules() if isinstance(module, gbmoe.dMoE))
    else:
        for one, other in zip(replayed(nested, model, recorded, inputs), expected):
            assert torch.equal(one, other)


def test_a_recorded_checkpoint_leaves_each_forward_once():
    for reentrant in (True, False):
        model, inputs = Model(), [tokens(seed) for seed in range(2)]
        expected = recorded_of(model, *inputs)
        model.reentrant = reentrant
        with gbmoe.record_experts(model) as recorded:
            for x in inputs:
                model(x).sum().backward()
        for name, forwards in expected.items():
            assert len(forwards) == len(recorded[name]) == 2
            assert all(map(torch.equal, forwards, recorded[name]))


def test_selective_checkpoints():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *arguments, **keywords):
        saved = op in (torch.ops.aten._to_copy.default, torch.ops.aten.mm.default, torch.ops.aten.copy_.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = Model(), tokens()
    with gbmoe.record_experts(model) as recorded:
        expected = gradients(model, model(x).square().sum(), x)
        call = functools.partial(checkpoint, model, use_reentrant=False,
                                 context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
        again = gradients(model, call(x).square().sum(), x)
    assert all(len(forwards) == 2 for forwards in recorded.values())
    with gbmoe.replay_experts(model, {name: forwards[:1] for name, forwards in recorded.items()}):
        replayed = gradients(model, call(x).square().sum(), x)
    for one, other, third in zip(expected, again, replayed):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)


def test_a_torch_that_does_not_tell_what_is_repeated(monkeypatch):
    """It may have one forward a context, and is no reason to guess with more."""
    model, inputs = Model(), [tokens(seed) for seed in range(2)]
    recorded = recorded_of(model, *inputs)
    model.reentrant = False
    expected = replayed_gradients(model, inputs, recorded, (0, 1))
    monkeypatch.setattr(_torch_names, "_current_autograd_node", None)
    got = [replayed_gradients(model, [x], {name: [ids[number]] for name, ids in recorded.items()}, (0,)) for number, x in enumerate(inputs)]
    for one, *others in zip(expected[2:], *(each[1:] for each in got)):
        torch.testing.assert_close(one, sum(others))
    with pytest.raises(NotImplementedError, match=r"replay_experts: layer blocks\.4\.moe: it ran 2 times"):
        replayed_gradients(model, inputs, recorded, (0, 1))


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_after_the_context_would_choose_again(reentrant):
    model, x = Model(), tokens()
    model.reentrant = reentrant
    recorded = recorded_of(model, tokens())
    with pytest.warns(UserWarning, match="no backward repeated them within the context"), gbmoe.replay_experts(model, recorded):
        model(x)
    model.reentrant = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gbmoe.replay_experts(model, recorded):
            model(x)


# ------------------------------------------------------------------------------------------------------------- kinds of layers


def test_padding_is_recorded_and_left_out_again():
    layer, x = gbmoe.dMoE(arguments()), tokens()
    padding = torch.zeros(5, 2, dtype=torch.bool)
    padding[3:, 1] = True
    with gbmoe.record_experts(layer) as recorded:
        expected = layer(x, padding_mask=padding)
    [ids_TK] = recorded[""]
    assert (ids_TK[padding.view(-1)] == -1).all() and (ids_TK[~padding.view(-1)] >= 0).all()
    for given in ({}, {"padding_mask": padding}):
        with gbmoe.replay_experts(layer, recorded):
            assert torch.equal(layer(x, **given), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_ids_of_any_integer_dtype(dtype):
    model, x = Model(), tokens()
    recorded = recorded_of(model, x)
    with gbmoe.replay_experts(model, {name: [ids.to(dtype) for ids in forwards] for name, forwards in recorded.items()}):
        out = model(x)
    assert torch.equal(out, model(x))


def test_a_router_by_itself():
    router, x = LearnedRouter(arguments()), tokens()
    recorded = recorded_of(torch.nn.Sequential(router), x)
    assert list(recorded) == ["0"]
    moved(router)
    with gbmoe.replay_experts(torch.nn.Sequential(router), recorded):
        scores_TE, weights_TK, ids_TK = router(x)
    assert torch.equal(ids_TK, recorded["0"][0].long())
    torch.testing.assert_close(weights_TK, scores_TE.gather(1, ids_TK))


class OwnRouter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LearnedRouter(arguments())  # a part of it is no layer

    def forward(self, x, given_experts=None):
        assert given_experts is None or given_experts.shape == (*x.shape[:-1], TOP_K)
        scores_TE = self.inner.layer(x.flatten(0, -2)).sigmoid()
        ids_TK = scores_TE.topk(TOP_K).indices if given_experts is None else given_experts.reshape(-1, TOP_K).long()
        return scores_TE, scores_TE.gather(1, ids_TK), ids_TK


def test_a_router_of_ones_own():
    layer, x = gbmoe.dMoE(arguments()), tokens()
    layer.router = OwnRouter()
    recorded = recorded_of(layer, x)
    assert list(recorded) == [""]
    expected = layer(x)
    with gbmoe.replay_experts(layer, recorded):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("fields", [
    dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4, moe_router_group_topk=2,
         moe_normalize_expert_weights=1, moe_router_dtype="fp32"),
    dict(moe_router_pre_softmax=False, moe_router_linear_bias=True), dict(shared_expert=True, bias=True, return_bias=False),
], ids=["DeepSeek-V3", "gpt-oss", "shared"])
def test_other_layers(fields):
    model, x = Model(**fields), tokens()
    with gbmoe.record_experts(model) as recorded:
        expected = model(x)
    with gbmoe.replay_experts(model, recorded):
        assert torch.equal(model(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend, reentrant", [("eager", True), ("aot_eager", None), ("aot_eager", False)])
@pytest.mark.parametrize("by_layer", [True, False])
def test_compiled_layers(backend, reentrant, by_layer):
    """Compiled before, within and after: the hooks of a module, say, are not looked at again."""
    torch._dynamo.reset()
    model, inputs = Model().double(), [tokens(seed, dtype=torch.float64) for seed in range(2)]
    expected = recorded_of(model, *inputs)
    compiled = copy.deepcopy(model)
    compiled.reentrant = reentrant
    if by_layer:
        for block in compiled.blocks:
            block.compile(backend=backend)
    else:
        compiled = torch.compile(compiled, backend=backend)
    compiled(inputs[0])
    recorded = recorded_of(compiled, *inputs)
    assert list(recorded) == NAMES
    for name in NAMES:
        assert all(map(torch.equal, recorded[name], expected[name]))
    moved(model), moved(compiled)
    want, got = (replayed_gradients(each, inputs, expected, (1, 0)) for each in (model, compiled))
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(compiled(inputs[0]), model(inputs[0]))  # which choose again


def test_a_full_graph_is_refused():
    torch._dynamo.reset()
    layer, x = gbmoe.dMoE(arguments()), tokens()
    recorded = recorded_of(layer, x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for context in (gbmoe.record_experts(layer), gbmoe.replay_experts(layer, recorded)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="are eager: torch.compile breaks its graph there"), context:
            compiled(x)


def test_traces_and_transforms_are_refused():
    layer, x = gbmoe.dMoE(arguments()).eval(), tokens().detach()
    recorded = recorded_of(layer, x)

    def trace(x):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer(mode.from_tensor(x))

    for call in (lambda: trace(x), lambda: torch.func.vmap(layer)(x)):
        with pytest.raises(RuntimeError, match="record_experts: the layer: expected forwards that are neither traced"), \
                gbmoe.record_experts(layer):
            call()
    with pytest.raises(RuntimeError, match="replay_experts: the layer: expected forwards that are neither traced"), \
            gbmoe.replay_experts(layer, recorded):
        trace(x)


def test_names_are_those_without_wrappers():
    model, x = Model(), tokens()
    recorded = recorded_of(model, x)
    wrapped = copy.deepcopy(model)
    wrapped.blocks[2] = checkpoint_wrapper(wrapped.blocks[2])
    wrapped.blocks[4] = torch.compile(wrapped.blocks[4], backend="eager")
    assert list(recorded_of(wrapped, x)) == list(recorded) == NAMES


def test_a_copy_of_a_layer_is_in_no_context():
    layer, x = gbmoe.dMoE(arguments()), tokens()
    with gbmoe.record_experts(layer) as recorded:
        copy.deepcopy(layer)(x)
    assert recorded == {"": []}


# ------------------------------------------------------------------------------------------------------------------ one tensor


def test_one_tensor_of_all_layers():
    """A generator's tokens, one after the other, are those of a batch in MegaBlocks' order."""
    model, x = Model(), tokens()
    steps = recorded_of(model, *x.split(1), dtype=torch.int16)
    ids_TLK = gbmoe.stack_experts(steps)
    assert ids_TLK.shape == (10, LAYERS, TOP_K) and ids_TLK.dtype == torch.int16
    whole = gbmoe.unstack_experts(model, ids_TLK)
    for name, [ids_TK] in recorded_of(model, x).items():
        assert torch.equal(whole[name][0], ids_TK.short())
    parts = gbmoe.unstack_experts(model, ids_TLK, [4, 6])
    assert [ids.size(0) for ids in parts[NAMES[1]]] == [4, 6]
    with gbmoe.replay_experts(model, parts):
        outs = [model(part) for part in x.split([2, 3])]
    torch.testing.assert_close(torch.cat(outs), model(x))


# --------------------------------------------------------------------------------------------------------------------- errors


def changed(recorded, name, forwards):
    return {**recorded, name: forwards}


def test_errors_name_the_layer():
    model, x = Model(), tokens()
    recorded, ids = recorded_of(model, x), torch.zeros(10, TOP_K, dtype=torch.int32)

    def replay(recorded, *inputs, **given):
        with gbmoe.replay_experts(model, recorded):
            for each in inputs:
                model(each)

    layer = r"replay_experts: recorded of layer blocks\.2\.moe: expected "
    for error, match, call in (
        (ValueError, r"recorded: expected ids for each of the layers \['blocks.0.moe', .*none for \['blocks.4.moe'\]",
         lambda: replay({name: recorded[name] for name in NAMES[:2]})),
        (ValueError, r"some for \['other'\]", lambda: replay({**recorded, "other": []})),
        (TypeError, "recorded: expected a mapping", lambda: replay([])),
        (TypeError, layer + "ids of an integer dtype, got torch.float32", lambda: replay(changed(recorded, NAMES[1], [ids.float()]))),
        (TypeError, layer + "tensors of ids", lambda: replay(changed(recorded, NAMES[1], [[0, 1]]))),
        (ValueError, layer + r"shape \[T,K\] with K == 2, got \[10, 3\]",
         lambda: replay(changed(recorded, NAMES[1], [torch.zeros(10, 3, dtype=torch.int32)]))),
        (ValueError, layer + r"ids of 10 tokens for forward 0, got \[9, 2\]", lambda: replay(changed(recorded, NAMES[1], [ids[:9]]), x)),
        (ValueError, layer + "ids on cpu, got meta", lambda: replay(changed(recorded, NAMES[1], [ids.to("meta")]), x)),
        (ValueError, r"recorded of layer blocks\.0\.moe: expected ids for forward 1, got those of 1 forwards",
         lambda: replay(recorded, x, x)),
        (ValueError, layer + "ids of the 1 forwards that ran, got those of 2", lambda: replay(changed(recorded, NAMES[1], [ids, ids]), x)),
        (ValueError, "record_experts: dtype: expected torch.int16, torch.int32 or torch.int64, got torch.uint8",
         lambda: recorded_of(model, dtype=torch.uint8)),
        (ValueError, "record_experts: dtype: expected one that holds the ids of the layer, which has 40000 experts, got torch.int16",
         lambda: recorded_of(LearnedRouter(arguments(moe_num_experts=40000)), dtype=torch.int16)),
        (ValueError, "record_experts: model: expected a module with a gbmoe.dMoE or LearnedRouter, got Linear",
         lambda: recorded_of(torch.nn.Linear(1, 1))),
        (TypeError, "record_experts: model: expected a torch.nn.Module", lambda: recorded_of(None)),
        (ValueError, r"unstack_experts: ids: expected shape \[T,L,K\] with the L == 3 layers", lambda: gbmoe.unstack_experts(
            model, torch.zeros(10, 2, 2, dtype=torch.int32))),
        (ValueError, "unstack_experts: tokens: expected numbers whose sum is the T == 10", lambda: gbmoe.unstack_experts(
            model, torch.zeros(10, 3, 2, dtype=torch.int32), [3, 4])),
        (ValueError, r"stack_experts: recorded: expected as many tokens and experts of layer blocks\.2\.moe as of layer blocks\.0\.moe,"
         r" \[10, 2\], got \[9, 2\]", lambda: gbmoe.stack_experts(changed(recorded, NAMES[1], [ids[:9]]))),
        (ValueError, r"stack_experts: recorded: expected at least one forward of layer blocks\.2\.moe",
         lambda: gbmoe.stack_experts(changed(recorded, NAMES[1], []))),
    ):
        with pytest.raises(error, match=match):
            call()
        assert all(module._tape is None for module in model.modules() if isinstance(module, gbmoe.dMoE))
    with pytest.raises(ValueError, match="given_experts: expected None for the layer, whose ids are replayed"), \
            gbmoe.replay_experts(model.blocks[0].moe, {"": [ids]}):
        model.blocks[0].moe(x, given_experts=ids.view(5, 2, 2))


def test_contexts_of_one_layer_are_not_nested():
    model, x = Model(), tokens()
    recorded = recorded_of(model, x)
    with gbmoe.record_experts(model.blocks[2]) as outer:
        for inner in (gbmoe.record_experts(model), gbmoe.replay_experts(model, recorded)):
            with pytest.raises(ValueError, match=r"layers in no other .*, but layer blocks\.2\.moe is in one"), inner:
                pass
        assert model.blocks[0].moe._tape is None
        model(x)
    assert list(outer) == ["moe"] and len(outer["moe"]) == 1


def test_an_exception_ends_the_context_and_is_what_is_raised():
    model = Model()
    with pytest.raises(KeyError), gbmoe.replay_experts(model, recorded_of(model, tokens())):
        raise KeyError
    assert all("_tape" not in module.__dict__ for module in model.modules())


# ------------------------------------------------------------------------------------------------------------- experts over ranks


def of_rank(rank):
    torch.manual_seed(0)
    layer = gbmoe.dMoE(arguments(moe_expert_model_parallelism=True))
    model, inputs = torch.nn.Sequential(layer), [tokens(2 * rank + number, sequence=3 + rank) for number in range(2)]
    recorded = recorded_of(model, *inputs)
    moved(layer.router)
    results = []
    for reentrant in CHECKPOINTS.values():
        call = model if reentrant is None else functools.partial(checkpoint, model, use_reentrant=reentrant)
        model.zero_grad()
        with gbmoe.replay_experts(model, recorded):
            losses = [call(x).square().sum() for x in inputs]
            for loss in losses:
                loss.backward()
        results.append([loss.detach() for loss in losses] + [parameter.grad.clone() for parameter in model.parameters()])
    return recorded, results


@pytest.mark.slow
def test_each_rank_replays_its_own_tokens(tmp_path):
    found = processes.run(of_rank, 2, tmp_path)
    torch.manual_seed(0)
    layer = gbmoe.dMoE(arguments())
    model = torch.nn.Sequential(layer)
    inputs = [[tokens(2 * rank + number, sequence=3 + rank) for number in range(2)] for rank in range(2)]
    expected = [recorded_of(model, *each) for each in inputs]
    moved(layer.router)
    for rank, (recorded, results) in enumerate(found):
        assert list(recorded) == ["0"] and all(map(torch.equal, recorded["0"], expected[rank]["0"]))
        with gbmoe.replay_experts(model, recorded):
            losses = [model(x).square().sum().detach() for x in inputs[rank]]
        for of_kind in results:
            torch.testing.assert_close(of_kind[:2], losses)
            for one, other in zip(of_kind, results[0]):
                assert torch.equal(one, other)
