"""What operators compute with a torch that lacks a private name: python -m tests.without_private_names MODULE DEVICE NAME ...

MODULE, which looks the names up, sees a torch without torch.NAME; torch itself keeps it. Operators can be registered only once in
a process, so each name is tried in a fork, after whatever the first fork has imported from elsewhere than gbmoe, which takes most of its
time, has been imported for all. Prints JSON: for each NAME, and for "" (nothing missing), the digest of all results and those of MODULE's
variables that are None, True or False.
"""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import types

import torch


class Without:
    """Stands for an object, and the objects that it holds, but lacks the attribute at the end of `path`."""

    def __init__(self, whole, path):
        self._whole, self._path = whole, path

    def __getattr__(self, name):
        if name != self._path[0]:
            return getattr(self._whole, name)
        if len(self._path) == 1:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), self._path[1:])


def import_without(module, name):
    """Import `module` so that it, and it alone, sees a torch without torch.`name`."""
    packages = module.split(".")[:-1]
    folders = [".".join(packages[:depth]) for depth in range(1, len(packages) + 1)]
    for folder in folders:
        sys.modules[folder] = types.ModuleType(folder)
        sys.modules[folder].__path__ = [os.path.join(*folder.split("."))]
    sys.modules["torch"] = Without(torch, name.split("."))
    found = importlib.import_module(module)
    sys.modules["torch"] = torch
    for folder in folders:
        del sys.modules[folder]
    return found


def refused(call, error, text):
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"not refused: {text}")


def results(device):
    """Outputs and gradients of each operator that has a gradient, of one that has none, of one under autocast, and in such a backward."""
    import gbmoe
    from gbmoe.compat import transformer_engine

    torch.manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, device=device).requires_grad_()

    def with_gradients(function, *leaves):
        out = function(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return [out.detach(), *grads]

    args = gbmoe.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, bias=False, fp16=False, bf16=False,
                           mlp_type="glu", device=device)
    layer, x = gbmoe.dMoE(args), leaf(9, 1, 16)
    yield from with_gradients(lambda x, *_: layer(x), x, *layer.parameters())
    with torch.autocast(device, dtype=torch.bfloat16):
        yield from with_gradients(lambda x, *_: layer(x), x, *layer.parameters())
        w1, ids = leaf(4, 32, 16), torch.arange(18, device=device).view(9, 2) % 4
        plan = gbmoe.RoutingPlan.from_experts(ids, 4, align=4)
        yield from with_gradients(lambda x, w1: gbmoe.expert_mlp(x, plan, w1, w1), leaf(9, 16), w1)
    with torch.no_grad():
        yield layer(x)
    weights = leaf(9, 2)
    yield from with_gradients(lambda x, weights: gbmoe.padded_gather(x, plan, slot_scale_TK=weights), leaf(9, 16), weights)
    yield from with_gradients(lambda y, weights: gbmoe.padded_scatter(y, plan, weights), leaf(plan.num_rows, 16), weights)
    yield from with_gradients(lambda a, b: gbmoe.gmm(a, b, plan.host_sizes()), leaf(int(plan.host_sizes().sum()), 16), leaf(4, 16, 8))
    mask = torch.arange(36, device=device).view(9, 4) % 3 == 0

    def permuted(x, probs):
        out, probs_P, _ = transformer_engine.moe_permute_with_probs(x, probs, mask, int(mask.sum()))
        return out * probs_P[:, None]

    yield from with_gradients(permuted, leaf(9, 16), leaf(9, 4))

    from gbmoe.float8 import quantize_rows, quantize_weights
    a, b = quantize_rows(torch.randn(12, 32, device=device)), quantize_weights(torch.randn(4, 16, 32, device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        scaled = gbmoe.gmm(a.values_PK, b.values_ENK, torch.full((4,), 3, device=device), trans_b=True,
                           scale_a=a.scales_PC.requires_grad_(), scale_b=b.scales)
    assert not scaled.requires_grad
    yield scaled

    def of_backward_in_autocast(a, b):
        out = gbmoe.gmm(a, b, torch.full((4,), 3, device=device))
        with torch.autocast(device, dtype=torch.bfloat16):
            return torch.autograd.grad(out.square().sum(), (a, b))

    yield from of_backward_in_autocast(leaf(12, 16), leaf(4, 16, 8))

    def twice():
        x = leaf(9, 16)
        grad, = torch.autograd.grad(gbmoe.padded_scatter(x, plan_of_nine).square().sum(), x, create_graph=True)
        grad.sum().backward()

    plan_of_nine = gbmoe.RoutingPlan.from_experts(torch.zeros(9, 1, dtype=torch.int64, device=device), 1)
    refused(twice, RuntimeError, "differentiable once")
    with torch.autograd.forward_ad.dual_level():
        x = leaf(9, 16)
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        refused(lambda: gbmoe.padded_gather(dual, plan), NotImplementedError, "forward mode")


def import_all(names):
    for name in names:
        if name.partition(".")[0] not in ("gbmoe", "tests", "__main__"):
            with contextlib.suppress(Exception):  # a module that stands in sys.modules under a name of its own
                importlib.import_module(name)


def report(module, device, name):
    found = import_without(module, name) if name else importlib.import_module(module)
    digest = hashlib.sha256()
    for tensor in results(device):
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    flags = {key: value for key, value in vars(found).items() if not key.startswith("__") and (value is None or isinstance(value, bool))}
    return {"digest": digest.hexdigest(), "flags": flags, "imported": [] if name else list(sys.modules)}


def main(module, device, *names):
    reports = {}
    for name in ("", *names):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, json.dumps(report(module, device, name)).encode())
                os._exit(0)
            finally:
                import traceback
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"without torch.{name}: status {status}")
        reports[name] = json.loads(said)
        import_all(reports[name].pop("imported"))
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
