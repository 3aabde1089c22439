"""The table of engines, and the choice of one for a product and for a layer; gbmoe.engines has the names of it that others use."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import torch

from gbmoe import programs
from gbmoe._checks import require
from gbmoe.engines.base import Engine
from gbmoe.engines.cublas import CublasGrouped, CublasLoop
from gbmoe.engines.float8 import Float8, Float8Hopper, Float8Reference
from gbmoe.engines.hopper import Hopper, HopperBatchInvariant
from gbmoe.engines.reference import Reference
from gbmoe.engines.resolved import ByKind, Resolved
from gbmoe.engines.tensor_core import TensorCore, TensorCoreBatchInvariant
from gbmoe.engines.torch_grouped import TorchGrouped
from gbmoe.float8 import Float8BlockScaling
from gbmoe.problem import Problem, allows_tf32, known
from gbmoe.tuning.device import Device
from gbmoe.tuning.engine_order import engine_order


class _Table(dict[str, Engine]):
    """Engines by their names. What was resolved is forgotten when one is put in or taken out: an engine that is mended and put in again is
    the one that computes."""

    def __setitem__(self, name: str, engine: Engine) -> None:
        require(isinstance(engine, Engine), "ENGINES", name, "an instance of gbmoe.engines.base.Engine", repr(engine), TypeError)
        require(getattr(engine, "name", None) == name, "ENGINES", name, f"an engine whose name is {name!r}",
                repr(getattr(engine, "name", None)))
        super().__setitem__(name, engine)
        forget()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        forget()

    # By the two above.
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __ior__(self, others):  # type: ignore[misc]
        self.update(others)
        return self


_OWN = (Hopper(), HopperBatchInvariant(), TensorCore(), TensorCoreBatchInvariant(), CublasLoop(), CublasGrouped(), TorchGrouped(),
        Reference())
ENGINES: dict[str, Engine] = _Table({engine.name: engine for engine in _OWN})

# The engines that give a row the same bits whatever other rows there are, by the engines that they stand for.
BATCH_INVARIANT: dict[str, str] = {Hopper.name: HopperBatchInvariant.name, TensorCore.name: TensorCoreBatchInvariant.name}

# The engines that recipes of gbmoe.float8 name: on CUDA, and on every other device.
FLOAT8_ENGINES: dict[str, tuple[Float8, Float8]] = {
    recipe.engine: (Float8Hopper(recipe), Float8Reference(recipe))
    for recipe in (Float8BlockScaling(power_2, weights, float8_dispatch=dispatch)
                   for dispatch in (False, True) for weights in (False, True) for power_2 in (False, True))}


def names() -> list[str]:
    """The values that `engine=` takes."""
    return ["auto", *ENGINES]


def batch_invariant(engine: str, device: torch.device | None = None) -> str:
    """The engine that stands for `engine` where a row's bits are to be the same whatever other rows there are.

    "auto" becomes the one for Hopper, or where that does not run on `device` and tensor_core does, that of tensor_core; without a device
    it is the one for Hopper. The number of rows does not matter, nor does anything else that changes from batch to batch.

    Raises:
        ValueError: for an engine that is not "auto" and whose bits may depend on them.
    """
    known_names = ("auto", *BATCH_INVARIANT, *BATCH_INVARIANT.values())
    require(engine in known_names, "batch_invariant", "engine", lambda: f"one of {', '.join(known_names)}", repr(engine))
    if engine != "auto":
        return BATCH_INVARIANT.get(engine, engine)
    if device is None or device.type != "cuda":
        return HopperBatchInvariant.name
    return _BATCH_INVARIANT_ON.of((device,), _batch_invariant_on)


def _named(engine: str, device: torch.device) -> Engine:
    if engine in FLOAT8_ENGINES:
        return FLOAT8_ENGINES[engine][0 if device.type == "cuda" else 1]
    return ENGINES[engine]


def _unavailable(engine: str, device: torch.device) -> str | None:
    return _named(engine, device).unavailable(device)


def _device_fields(device: torch.device) -> tuple | None:
    # A graph may be compiled for CUDA where there is no GPU.
    return tuple(Device.of(device)) if device.type == "cuda" and torch.cuda.is_available() else None


# torch.compile calls these functions instead of tracing them, because the answer may need the extension to be built and loaded. The
# attribute is what torch.compiler.assume_constant_result sets; calling that would add a second to the import.
_unavailable._dynamo_marked_constant = _device_fields._dynamo_marked_constant = True  # type: ignore[attr-defined]


# What was resolved, by kind of call: the engines of single products, those of layers, and the names of batch-invariant ones.
_OF_PRODUCT: ByKind[Engine] = ByKind()
_OF_LAYER: ByKind[Resolved] = ByKind()
_BATCH_INVARIANT_ON: ByKind[str] = ByKind()


def forget() -> None:
    """Forget what was resolved, so that every engine is asked again, and the programs in which it was used."""
    for table in (_OF_PRODUCT, _OF_LAYER, _BATCH_INVARIANT_ON):
        table.forget()
    programs.forget_all()


def _batch_invariant_on(device: torch.device) -> str:
    of_hopper, of_others = HopperBatchInvariant.name, TensorCoreBatchInvariant.name
    return of_others if _unavailable(of_hopper, device) and not _unavailable(of_others, device) else of_hopper


def select(engine: str, problem: Problem) -> Engine:
    """The engine for this product. Raises ValueError for an unknown name, or an engine that is named and cannot compute it."""
    p = problem
    return _select(engine, p.device, p.dtype, p.rows, p.groups, p.inner, p.columns, p.k_grouped, p.sizes_on_host, p.tf32)


def _select(engine: str, *of_problem) -> Engine:
    return _OF_PRODUCT.of((engine, *of_problem), _choose)


def of_operands(engine: str, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool, trans_b: bool,
                dtype: torch.dtype | None = None) -> Engine:
    """`select` for the product of a and b in their dtype, or in `dtype`, which autocast casts them to."""
    dtype, columns = dtype or a.dtype, b.size(1 if trans_a or trans_b else 2)
    return _select(engine, a.device, dtype, a.size(0), sizes.numel(), a.size(1), columns, trans_a, sizes.device.type == "cpu",
                   allows_tf32(dtype))


def _choose(engine: str, *of_problem) -> Engine:
    problem = Problem(*of_problem)
    known_names = (*names(), *FLOAT8_ENGINES)
    require(engine in known_names, "gmm", "engine", lambda: f"one of {', '.join(known_names)}", repr(engine))
    if engine != "auto":
        chosen = _named(engine, problem.device)
        # A batch of nothing is a batch, too, and has no elements that could differ.
        if (engine in BATCH_INVARIANT.values() or engine in FLOAT8_ENGINES) and known(problem.rows == 0):
            return ENGINES["reference"]
        reason = _unavailable(engine, problem.device)
        if reason is None:
            reason = chosen.refuses(problem)
            if reason is not None and known(problem.rows == 0):
                return ENGINES["reference"]
        if reason is not None:
            of_recipe = ", that of a gbmoe.Float8BlockScaling," if engine in FLOAT8_ENGINES else ""
            raise ValueError(f"gmm: engine {engine!r}{of_recipe} cannot serve this product: {reason}")
        return chosen
    fields = _device_fields(problem.device)  # as a tuple, because a graph can use no property of what is made outside of it
    for name in engine_order(problem, None if fields is None else Device(*fields)):
        candidate = ENGINES[name]
        if _unavailable(name, problem.device) is None and candidate.refuses(problem) is None:
            return candidate
    return ENGINES["reference"]


def float8(recipe: Float8BlockScaling, engine: str) -> str:
    """The engine that computes a recipe in place of `engine`, which has to be "auto".

    Raises:
        TypeError, ValueError: for what is not a recipe, or another engine.
    """
    require(isinstance(recipe, Float8BlockScaling), "float8", "recipe", "a Float8BlockScaling", type(recipe).__name__, TypeError)
    require(engine == "auto", "float8", "engine", "auto with a recipe, which has engines of its own", repr(engine))
    return recipe.engine


def recipe_of(engine: str) -> Float8BlockScaling | None:
    """The recipe that an engine of this name computes, or None."""
    return FLOAT8_ENGINES[engine][0].recipe if engine in FLOAT8_ENGINES else None


def product(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
            *, engine: str = "auto", out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
    """The grouped GEMM by the engine that `engine` names or "auto" chooses; see Engine.gmm for shapes, out and accumulate.

    Operators call this inside. It has no autograd, does not check the sizes, and lets the groups have fewer rows than a; rows after the
    last group are neither read nor written.
    """
    return of_operands(engine, a, b, sizes, trans_a, trans_b).product(a, b, sizes, trans_a, trans_b, out, accumulate)


def linear(x: torch.Tensor, weight: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """x @ weight.T by the engine that `engine` names or "auto" chooses, in float32 (float64 for float64) and without autograd; see
    Engine.linear for shapes. ValueError for a named engine that cannot compute it."""
    columns = -(-weight.size(0) // 8) * 8  # Engine.linear pads to the row lengths that all engines take
    on_host = x.device.type == "cpu"
    return _select(engine, x.device, x.dtype, x.size(0), 1, x.size(1), columns, False, on_host, allows_tf32(x.dtype)).linear(x, weight)


class _ByProduct(Engine):
    """A layer's products, each by an engine of its own: m-grouped and k-grouped ones, each with `a` of one row length or the other."""

    def __init__(self, name: str, ffn: int, of_products: tuple[Engine, ...]):
        self.name, self._ffn, self.of_products = name, ffn, of_products
        self.needs_host_sizes = any(engine.needs_host_sizes for engine in of_products)
        self.decides_by_kind = all(engine.decides_by_kind for engine in of_products)

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        chosen = self.of_products[2 * trans_a + (a.size(1) == self._ffn)]
        return chosen.gmm(a, b, sizes, trans_a, trans_b, out, accumulate)


def resolve(engine: str, device: torch.device, dtype: torch.dtype, rows: int, shape_EFH: Sequence[int], on_host: bool,
            batch_invariant: bool = False) -> Resolved:
    """What computes the experts of a layer: asked once in a forward, and from then on asked itself.

    Args:
        engine: a name, see gbmoe.engines.
        dtype: of the products.
        rows: P, the rows of the plan.
        shape_EFH: of the weights, [E,F,H].
        on_host: whether the sizes of the experts are on the host.
        batch_invariant: the engine that stands for the named one is wanted; see `batch_invariant`.

    Raises:
        ValueError: for an unknown name, and for an engine that is named and cannot compute this.
    """
    return _OF_LAYER.of((engine, batch_invariant, device, dtype, rows, *shape_EFH, on_host, allows_tf32(dtype)), _choose_for_layer)


def _choose_for_layer(engine, is_batch_invariant, device, dtype, rows, experts, ffn, hidden, on_host, tf32) -> Resolved:
    if is_batch_invariant:
        engine = batch_invariant(engine, device)
    chosen = tuple(_choose(engine, device, dtype, rows, experts, *inner_columns, k_grouped, on_host, tf32)
                   for k_grouped in (False, True) for inner_columns in ((hidden, ffn), (ffn, hidden)))
    alike = all(each is chosen[0] for each in chosen)
    return Resolved(engine, chosen[0] if alike else _ByProduct(engine, ffn, chosen))


def refusals(device: torch.device, dtype: torch.dtype, rows: int, shape_EFH: Sequence[int], on_host: bool) -> dict[str, str]:
    """The engines that "auto" passes over for a layer with these products, with the reason; arguments as of `resolve`. Those that it has
    after the one that it takes are not asked."""
    experts, ffn, hidden = shape_EFH
    fields = _device_fields(device)
    passed: dict[str, str] = {}
    for k_grouped, inner, columns in ((False, hidden, ffn), (False, ffn, hidden), (True, hidden, ffn), (True, ffn, hidden)):
        problem = Problem(device, dtype, rows, experts, inner, columns, k_grouped, on_host, allows_tf32(dtype))
        for name in engine_order(problem, None if fields is None else Device(*fields)):
            reason = _unavailable(name, device) or ENGINES[name].refuses(problem)
            if reason is None:
                break
            passed.setdefault(name, reason)
    return passed


def for_experts(engine: str | Resolved, x_TH: torch.Tensor, rows: int, w1_EFH: torch.Tensor, sizes_E: torch.Tensor) -> Engine:
    """The engine that computes a layer's experts with P = `rows` rows: what the caller has resolved, or the one of that name."""
    if isinstance(engine, str):
        engine = resolve(engine, x_TH.device, x_TH.dtype, rows, w1_EFH.shape, sizes_E.device.type == "cpu")
    assert engine.engine is not None  # only on the meta device, where no kernel runs
    return engine.engine


def availability(device: torch.device) -> dict[str, str | None]:
    """For every engine that `engine=` takes, None if it runs on `device`, otherwise the reason why not."""
    return {name: engine.unavailable(device) for name, engine in ENGINES.items()}


def recipes_availability(device: torch.device) -> dict[str, str | None]:
    """As `availability`, for the engines that recipes of gbmoe.float8 name."""
    return {name: _unavailable(name, device) for name in FLOAT8_ENGINES}


def taken_by_auto(device: torch.device) -> dict[str, list[str]]:
    """The engines that "auto" takes on `device` for products of rows whose sizes are on it too, by dtype: for groups of 1,024 rows, of 32
    and of one; each once. "float32 in TF32" stands for float32 where TF32 is allowed, "odd bfloat16" for rows that are no multiple
    of 8 elements. Other shapes may get another one."""
    width, groups = 2048, 64
    dtypes = {str(dtype).removeprefix("torch."): (dtype, False) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
    dtypes["float32 in TF32"] = (torch.float32, True)
    problems = {name: [Problem(device, dtype, rows * groups, groups, width, width, False, tf32=tf32) for rows in (1024, 32, 1)]
                for name, (dtype, tf32) in dtypes.items()}
    problems["odd bfloat16"] = [replace(problem, inner=width + 1, columns=width + 1) for problem in problems["bfloat16"]]
    return {name: list(dict.fromkeys(select("auto", problem).name for problem in of_dtype)) for name, of_dtype in problems.items()}
