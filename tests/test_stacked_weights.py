import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gbmoe
from gbmoe import WeightLayout
from gbmoe.testing import exact_inputs
from tests.conftest import copied_weights

E, F, H = 4, 48, 32


def in_buffer(rows, columns, device, dtype=torch.float32, distance=None, count=E, fill=0):
    """Parameters that lie in one buffer, each `distance` elements after the one before."""
    distance = rows * columns if distance is None else distance
    buffer = exact_inputs.exact_values(count * distance + 8, dtype=dtype, device=device, seed=fill)
    return [torch.nn.Parameter(buffer[8 + e * distance : 8 + e * distance + rows * columns].view(rows, columns)) for e in range(count)]


@pytest.mark.parametrize("distance", [None, F * H + 64], ids=["", "padded"])
def test_parameters_in_one_buffer_are_not_copied(distance, device):
    weights = in_buffer(F, H, device, distance=distance)
    one = gbmoe.stacked(weights)
    assert one.data_ptr() == weights[0].data_ptr() and torch.equal(one, torch.stack(list(weights)))
    grad = exact_inputs.exact_values(E, F, H, dtype=torch.float32, device=device, seed=5)
    one.backward(grad)
    for weight, expected in zip(weights, grad):
        assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("weights", [
    [torch.randn(3, 4) for _ in range(3)], list(torch.randn(3, 4, 5).transpose(1, 2)), list(torch.randn(4, 3, 4).flip(0))[::-1],
    [torch.randn(6, 4)[::2] for _ in range(2)], [torch.randn(20)[4 * i : 4 * i + 6].view(2, 3) for i in range(2)],
], ids=["apart", "strided", "backwards", "rows apart", "overlapping"])
def test_others_are_copied(weights):
    leaves = [weight.clone(memory_format=torch.preserve_format).requires_grad_() for weight in weights]
    one = gbmoe.stacked(leaves)
    assert torch.equal(one, torch.stack(leaves))
    one.square().sum().backward()
    assert all(torch.equal(leaf.grad, 2 * leaf) for leaf in leaves)


def test_sharded_parameters_ended_in_an_error_about_a_storage(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        values = torch.randn(2, 4, 5)
        for count in (1, 2):
            weights = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values[:count]]
            one = gbmoe.stacked(weights)
            assert isinstance(one, DTensor) and torch.equal(one.full_tensor(), values[:count])
            one.sum().backward()
            assert all(torch.equal(weight.grad.full_tensor(), torch.ones(4, 5)) for weight in weights)
    finally:
        dist.destroy_process_group()


def test_a_change_of_one_parameter_is_seen():
    weights = in_buffer(F, H, "cpu")
    with torch.no_grad():
        weights[2].fill_(3)
        assert bool((gbmoe.stacked(weights)[2] == 3).all())


def test_tensors_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"weights\[1\]: expected \[2, 3\] of torch.float32 on cpu, as weights\[0\]"):
        gbmoe.stacked([torch.zeros(2, 3), torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="at least one tensor"):
        gbmoe.stacked([])


def test_megatrons_parameters_and_main_gradients(engine_on, monkeypatch):
    """weight{e} [2F,H] and [H,F] and their main_grads, each in one buffer with gaps: the same as one tensor, and no copy of a weight."""
    engine, device = engine_on
    dtype = torch.bfloat16
    up, down = (in_buffer(*shape, device, dtype, shape[0] * shape[1] + 64, fill=seed) for seed, shape in enumerate(((2 * F, H), (H, F)), 1))
    of_up, of_down = (in_buffer(*shape, device, torch.float32, shape[0] * shape[1] + 64, fill=7) for shape in ((2 * F, H), (H, F)))
    x = exact_inputs.exact_values(60, H, dtype=dtype, device=device, seed=3)
    plan = gbmoe.RoutingPlan.from_experts(torch.randint(E, (60, 2), generator=torch.Generator().manual_seed(1)).to(device), E)
    layout = WeightLayout("gate_first", down_transposed=True)
    whole = [torch.stack(list(parameters)).detach().requires_grad_() for parameters in (up, down)]
    expected = gbmoe.expert_mlp(x, plan, *whole, layout=layout, engine=engine)
    grad = exact_inputs.exact_values(60, H, dtype=dtype, device=device, seed=4)
    gradients = torch.autograd.grad(expected, whole, grad)
    before = [torch.stack(list(main)).detach() for main in (of_up, of_down)]
    copied = copied_weights(monkeypatch)
    with torch.no_grad():
        sink = gbmoe.WeightGradientSink(*(gbmoe.stacked(main) for main in (of_up, of_down)), hand_back=True)
    got = gbmoe.expert_mlp(x, plan, gbmoe.stacked(up), gbmoe.stacked(down), layout=layout, engine=engine, gradient_sink=sink)
    got.backward(grad)
    torch.testing.assert_close(got, expected)
    assert all(parameter.grad is not None for parameter in (*up, *down))  # which only runs hooks
    for main, gradient, was in zip((of_up, of_down), gradients, before):
        added = torch.stack(list(main)).detach() - was
        assert float((added - gradient.float()).norm() / gradient.float().norm()) <= 4e-3
    if engine in ("hopper", "hopper_batch_invariant", "tensor_core", "tensor_core_batch_invariant"):
        assert not copied
