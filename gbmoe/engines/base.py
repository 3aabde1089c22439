"""What an engine is: one way to compute grouped GEMMs, and with them the experts of a layer.

Shape suffixes of a grouped GEMM: M rows of all groups, E groups (experts), K inner, N columns. Of a layer: T tokens, K slots a token,
H hidden, F ffn hidden, G columns of pairs, 2F, P padded rows of the plan, Y bytes, B columns of ones, R ranks. Group e has sizes[e]
consecutive rows. Rows after those of the last group belong to no group: they are not read, and in the result they are undefined.

    m-grouped:  out [M,N],    out[rows of e] = a[rows of e] @ b[e]
                b [E,K,N], or [E,N,K] with trans_b
    k-grouped:  out [E,K,N],  out[e] = a[rows of e].T @ b[rows of e]
                a [M,K], b [M,N], with trans_a
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch

from gbmoe import launch
from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import require
from gbmoe.engines.lora_products import LowRankProducts
from gbmoe.launch.alignment import aligned
from gbmoe.plain import plain_gmm
from gbmoe.problem import Problem
from gbmoe.slot_map import SlotMap

# Columns of the matrices by which biases are added and their gradients summed, of which all but one are zeros: engines need rows of
# multiples of 16 bytes.
RANKS_OF_BIAS = 8


class GatheredRows:
    """The rows of tokens in the order of a plan's rows, [P,H]. They are gathered when rows_PH() is first called, and then kept.

    An engine whose kernels gather reads tokens_TH instead. That is None where there is nothing to gather, because the rows were pulled
    from other ranks or were in expert order from the beginning.
    """

    def __init__(self, tokens_TH: torch.Tensor | None, slots: SlotMap, rows_PH: torch.Tensor | None = None):
        self.tokens_TH, self.slots = tokens_TH, slots
        self._rows_PH = rows_PH
        self._made: dict[str, Any] = {}

    @property
    def are_gathered(self) -> bool:
        """Whether rows_PH() has nothing left to compute."""
        return self._rows_PH is not None

    @property
    def num_rows(self) -> int:
        """P."""
        return self.slots.num_rows if self._rows_PH is None else self._rows_PH.size(0)

    @property
    def given(self) -> torch.Tensor:
        """The tokens that the rows are made of, or the rows where there is nothing to gather."""
        given = self._rows_PH if self.tokens_TH is None else self.tokens_TH
        assert given is not None
        return given

    @property
    def tokens_shape(self) -> torch.Size | None:
        """[T,H] of tokens_TH, which this does not make."""
        return None if self.tokens_TH is None else self.tokens_TH.shape

    def new_empty(self, *shape: int) -> torch.Tensor:
        """A tensor that is not initialised, with the dtype of the rows and on their device."""
        return self.given.new_empty(*shape)

    def rows_PH(self) -> torch.Tensor:
        """The rows [P,H]."""
        if self._rows_PH is None:
            assert self.tokens_TH is not None  # without tokens, the rows were given
            self._rows_PH, _ = launch.gather(self.tokens_TH, self.slots)
        return self._rows_PH

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of these rows: it is called the first time, and its result kept under that name as long as the rows are."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def forget(self) -> None:
        """Free the memory of what was made of the rows, and that of the gathered rows, if they can be gathered again."""
        self._made.clear()
        if self.tokens_TH is not None:
            self._rows_PH = None


class Engine(LowRankProducts):
    """A stateless way to compute the experts of a layer; one instance each in gbmoe.engines.ENGINES or FLOAT8_ENGINES.

    An engine has to define `gmm`, the grouped GEMM. The methods that a layer calls, `up`, `down` and their gradients, are composed
    here of the gather, that GEMM and the activation; an engine with kernels that fuse several of these overrides them.

    Attributes:
        name: what `engine=` takes.
        needs_host_sizes: True if `gmm` reads the sizes on the host; given sizes on the device, it then waits for them.
        decides_by_kind: True if what its methods launch depends on the kind of call alone, and on no number of a tensor or state of its own
            (gbmoe/programs/).
        reads_separate_weights: whether weights may be gbmoe.separate_weights.SeparateWeights; other engines get a stack.
        adds_in_16_bits: whether `gmm` with trans_a and accumulate adds to a result of 16 bits in the product's kernel, which neither reads
            nor writes the matrices of groups without rows.
    """

    name: str
    needs_host_sizes: bool = False
    decides_by_kind: bool = False
    reads_separate_weights: bool = False
    adds_in_16_bits: bool = False

    def unavailable(self, device: torch.device) -> str | None:
        """None if this engine runs on `device`, otherwise the reason why not. Loads the extension if the engine needs it."""
        return None

    def refuses(self, problem: Problem) -> str | None:
        """None if this engine takes operands of the problem's dtype and shapes, otherwise the reason why not."""
        return None

    def gmm(self, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool, trans_b: bool,
            out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
        """Compute the product of a and b, which have one dtype, are on one device, contiguous, and aligned to 16 bytes; b may be what
        `readable` makes of it.

        Args:
            sizes: rows of each group, integer [E], on the host or on the device of a.
            out: tensor for the result, allocated where it is None; contiguous, or one of which `writes_in_place` says so.
            accumulate: add to `out` instead of overwriting it (out must be given).
        """
        raise TypeError(f"{type(self).__name__} does not say how it computes a grouped GEMM")

    def product(self, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
                out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
        """`gmm` for operands with any strides. A transposed view of a stack of matrices is passed on by trans_b, without a copy."""
        if a.dtype != b.dtype:
            require(False, "gmm", "b", lambda: f"the dtype of a, {a.dtype}", b.dtype, TypeError)
        if trans_a:
            # Kernels decide by the row length alone whether to access 16 bytes at a time, so the operands must be aligned.
            return self.gmm(aligned(a), aligned(b), sizes, True, False, out, accumulate)
        b, is_transposed = self.readable(b)
        return self.gmm(aligned(a), b, sizes, False, trans_b != is_transposed, out, accumulate)

    def readable(self, matrices: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(matrices, False) of a stack [E,R,C] with any strides as `gmm` reads it, or its transposed matrices [E,C,R] and True. It is
        copied where it can be read in neither way. An engine that reads rows which lie further apart overrides this."""
        if not matrices.is_contiguous() and matrices.transpose(1, 2).is_contiguous():
            return aligned(matrices.transpose(1, 2)), True
        return aligned(matrices), False

    def writes_in_place(self, out_EKN: torch.Tensor) -> bool:
        """Whether `gmm` with trans_a writes a result with these strides; otherwise it needs a contiguous one."""
        return out_EKN.is_contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x @ weight.T, [P,N], of x [P,K] and weight [N,K], which have one dtype and are on one device: the product of one group that has
        all rows. The result is float32 where they have 16 bits, and otherwise of their dtype. N may be any number; K and the dtype are as
        in `gmm`. TypeError for another dtype of weight."""
        require(x.dtype == weight.dtype, "linear", "weight", lambda: f"the dtype of x, {x.dtype}", weight.dtype, TypeError)
        return plain_gmm.linear(x, weight)

    # The methods below take a plan's slot map and sizes_E, its rows of each expert with their padding. Weights are [E,F,H] with any
    # strides, as are the tensors for their gradients; v1 is given for a GLU only. `activation` is what plain_activation.functions takes.
    # Rows after the last expert may hold anything in the arguments, and do so in the results.

    def weight_for_both_passes(self, w_EFH: torch.Tensor, for_backward_Y: torch.Tensor, transpose: bool) -> Any:
        """A weight as forward's product takes it, rows @ w[e] with `transpose` (w2) and rows @ w[e].T without (w1, v1). Backward's takes
        it the other way round. An engine that prepares weights prepares both here, and writes backward's to `for_backward_Y`, uint8,
        Y = ScaledWeights.bytes_of(w_EFH.shape); it overrides this and weight_for_backward."""
        return w_EFH

    def weight_for_backward(self, w_EFH: torch.Tensor, for_backward_Y: torch.Tensor | None, transpose: bool) -> Any:
        """A weight as backward's product takes it, of what weight_for_both_passes wrote for the same `transpose`; or the weight itself,
        where that is None."""
        return w_EFH

    def up(self, x: GatheredRows, w1_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, sizes_E: torch.Tensor, activation: str, save: bool,
           ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """a = act(h), or act(h) * g, with h = x @ w1[e].T and g = x @ v1[e].T: (a, h, g) [P,F].

        h and g are rounded for storage before a is computed from them; they are None unless `save`, and g without v1.
        """
        h_PF = self.product(x.rows_PH(), w1_EFH, sizes_E, trans_b=True)
        g_PF = None if v1_EFH is None else self.product(x.rows_PH(), v1_EFH, sizes_E, trans_b=True)
        x.forget()
        a_PF = launch.activate(h_PF, g_PF, activation)
        return (a_PF, h_PF, g_PF) if save else (a_PF, None, None)

    def up_biased(self, x: GatheredRows, w1_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, w1_bias_EF: torch.Tensor | None,
                  v1_bias_EF: torch.Tensor | None, sizes_E: torch.Tensor, activation: str, save: bool,
                  ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """`up` with h = x @ w1[e].T + w1_bias[e], and g likewise; a bias may be None."""
        h_PF = self.biased_product(x.rows_PH(), w1_EFH, w1_bias_EF, sizes_E, trans_b=True)
        g_PF = None if v1_EFH is None else self.biased_product(x.rows_PH(), v1_EFH, v1_bias_EF, sizes_E, trans_b=True)
        x.forget()
        a_PF = launch.activate(h_PF, g_PF, activation)
        return (a_PF, h_PF, g_PF) if save else (a_PF, None, None)

    def up_pairs(self, x: GatheredRows, w_EGH: torch.Tensor, bias_EG: torch.Tensor | None, sizes_E: torch.Tensor, activation: str,
                 save: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`up` of weights whose rows are gate and up in turns: (a [P,F], pairs [P,2F] of h and g in turns, x @ w[e].T + bias[e])."""
        pairs_PG = self.biased_product(x.rows_PH(), w_EGH, bias_EG, sizes_E, trans_b=True)
        x.forget()
        a_PF = launch.activate_pairs(pairs_PG, activation)
        return a_PF, pairs_PG if save else None

    def biased_product(self, a: torch.Tensor, b: torch.Tensor, bias_EN: torch.Tensor | None, sizes_E: torch.Tensor, trans_b: bool = False,
                       ) -> torch.Tensor:
        """a[rows of e] @ b[e] + bias[e]; without a bias the product alone. Here the product is rounded before the bias is added."""
        out_PN = self.product(a, b, sizes_E, trans_b=trans_b)
        return out_PN if bias_EN is None else self.add_bias(out_PN, bias_EN, sizes_E)

    def add_bias(self, out_PN: torch.Tensor, bias_EN: torch.Tensor, sizes_E: torch.Tensor) -> torch.Tensor:
        """out[rows of e] += bias[e], in place, by a product with ones, for which no row needs to know its expert. Returns out."""
        ones_PB = out_PN.new_ones(out_PN.size(0), RANKS_OF_BIAS)
        bias_EBN = torch.nn.functional.pad(bias_EN.unsqueeze(1), (0, 0, 0, RANKS_OF_BIAS - 1))
        return self.product(ones_PB, bias_EBN, sizes_E, out=out_PN, accumulate=True)

    def bias_gradient(self, rows_PN: torch.Tensor, sizes_E: torch.Tensor, weights_PB: torch.Tensor | None = None) -> torch.Tensor:
        """out[e], [E,N]: the sum of e's rows, each times its weight where there are launch.weights_in_columns; rank_gradient with these or
        a column of ones, which sums in float32 and in a fixed order."""
        if weights_PB is None:
            left_PB = rows_PN.new_zeros(rows_PN.size(0), RANKS_OF_BIAS)
            left_PB[:, 0] = 1
            return self.rank_gradient(left_PB, rows_PN, sizes_E)[:, 0].contiguous()
        return sum_of_both(self.rank_gradient(weights_PB, rows_PN, sizes_E))

    def bias_backward(self, rows: GatheredRows, bias_EN: torch.Tensor | None, sizes_E: torch.Tensor, weights_PB: torch.Tensor | None,
                      ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(a matrix whose first column is <bias[e], row> of each row of e, in float32 for rows of 16 bits; bias_gradient of the rows with
        their weights): either None without its argument. Rows after the last expert may have any product."""
        rows_PN, dots_P1 = rows.rows_PH(), None
        if bias_EN is not None:
            dots_PE = self.linear(rows_PN, bias_EN.contiguous())
            ends_E = sizes_E.to(rows_PN.device, torch.int64, non_blocking=True).cumsum(0)
            row_P = torch.arange(rows_PN.size(0), dtype=torch.int64, device=rows_PN.device)
            expert_P = torch.searchsorted(ends_E, row_P, right=True).clamp(max=bias_EN.size(0) - 1)
            dots_P1 = dots_PE.gather(1, expert_P.unsqueeze(1))
        return dots_P1, None if weights_PB is None else self.bias_gradient(rows_PN, sizes_E, weights_PB)

    # What a user is told (gbmoe/ops/expert_path.py), for those that override the methods above and below. `rows` is P.

    def copies(self, w1_EFH: torch.Tensor, v1_EFH: torch.Tensor | None = None) -> bool:
        """Whether a product copies this matrix before it reads it, or one that reads two copies either."""
        return any(w is not None and not (w.data_ptr() % 16 == 0 and (w.is_contiguous() or w.transpose(1, 2).is_contiguous()))
                   for w in (w1_EFH, v1_EFH))

    def why_composed(self, w1_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, activation: str, rows: int, biased: bool, paired: bool,
                     ) -> str | None:
        """None if `up`, `up_biased` or (of `paired` weights [E,2F,H]) `up_pairs` computes the activation in the kernel of its products;
        otherwise why the activation is a kernel of its own."""
        return "the engine has no kernel that multiplies and activates"

    def adds_bias_in_kernel(self, rows: int, w_EFH: torch.Tensor) -> bool:
        """Whether biased_product with such a weight adds the bias in the product's kernel, before it rounds."""
        return False

    def gathers_before_up(self, ffn: int, activation: str, token_bytes: int) -> bool:
        """Whether there are rows to keep for backward: `up` gathers them in their dtype into memory, or takes ones that were gathered for
        this alone. Traced, as `refuses` is."""
        return True

    def down(self, a_PF: torch.Tensor, w2_EFH: torch.Tensor, sizes_E: torch.Tensor) -> torch.Tensor:
        """y = a @ w2[e], [P,H]. Called directly after `up`, with its sizes; nothing writes them or w2 from when `up` began, unless the
        stream has waited since for an event after which w2 is there (lent experts)."""
        return self.product(a_PF, w2_EFH, sizes_E)

    def down_biased(self, a_PF: torch.Tensor, w2_EFH: torch.Tensor, bias_EH: torch.Tensor, sizes_E: torch.Tensor) -> torch.Tensor:
        """`down` with y = a @ w2[e] + bias[e]."""
        return self.biased_product(a_PF, w2_EFH, bias_EH, sizes_E)

    def down_backward(self, dz: GatheredRows, w2_EFH: torch.Tensor, sizes_E: torch.Tensor, h_PF: torch.Tensor,
                      g_PF: torch.Tensor | None, weights_TK: torch.Tensor | None, activation: str,
                      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple]:
        """(w a, dh, dg, dweights, (dh, dg)), with d = dz @ w2[e].T and w the row's router weight, or 1 without weights. h and g are
        contiguous, and aligned to 16 bytes.

        a = act(h) (* g), dh = w d act'(h) (* g), dg = w d act(h), all [P,F] with zeros in an expert's rows without a slot; dweights
        [T,K] is <a, d>, and 0 for a slot without a row. dg is None without g, dweights is None without weights. The formulas are
        derived at the top of csrc/activation_kernels.cu. The pair at the end is what up_backward takes: dh and dg as its products read
        them, which may be other than the tensors that weight_gradient takes.
        """
        d_PF = self.product(dz.rows_PH(), w2_EFH, sizes_E, trans_b=True)
        a_PF, dg_PF, dweights_TK = launch.activate_backward(h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)
        return a_PF, d_PF, dg_PF, dweights_TK, (d_PF, dg_PF)

    def down_backward_pairs(self, dz: GatheredRows, w2_EFH: torch.Tensor, sizes_E: torch.Tensor, pairs_PG: torch.Tensor,
                            weights_TK: torch.Tensor | None, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`down_backward` of what `up_pairs` saved: (w a [P,F], the pairs of dh and dg [P,2F], dweights)."""
        d_PF = self.product(dz.rows_PH(), w2_EFH, sizes_E, trans_b=True)
        return launch.activate_pairs_backward(pairs_PG, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)

    def makes_gradient_of_pairs(self, added: bool) -> bool:
        """Of weights that have gate and up in turns along the rows of memory, where h and g are apart: whether down_backward_to_pairs is
        called in place of down_backward. `added`: their gradient is added to a sink."""
        return False

    def down_backward_to_pairs(self, dz: GatheredRows, w2_EFH: torch.Tensor, sizes_E: torch.Tensor, h_PF: torch.Tensor, g_PF: torch.Tensor,
                               weights_TK: torch.Tensor | None, activation: str) -> tuple[Any, Any, torch.Tensor | None, tuple]:
        """`down_backward` of h and g that are apart, whose dh and dg are pairs for weight_gradient: (w a [P,F], the pairs [P,2F], dweights,
        (dh, dg)). Not more memory than that takes."""
        raise TypeError(f"{type(self).__name__} makes no gradient of pairs of h and g that are apart")

    def up_backward(self, dh_PF: torch.Tensor, w1_EFH: torch.Tensor, dg_PF: torch.Tensor | None, v1_EFH: torch.Tensor | None,
                    sizes_E: torch.Tensor) -> torch.Tensor:
        """dx = dh @ w1[e], [P,H]; for a GLU dx = dh @ w1[e] + dg @ v1[e]. dh and dg are the pair that down_backward returned last."""
        dx_PH = self.product(dh_PF, w1_EFH, sizes_E)
        if v1_EFH is not None and dg_PF is not None:
            self.product(dg_PF, v1_EFH, sizes_E, out=dx_PH, accumulate=True)
        return dx_PH

    def rows_for_weights(self, x: GatheredRows) -> GatheredRows:
        """The rows of x, or of the output's gradient, as gradients of weights and biases take them: these, but in float8_dispatch."""
        return x

    def weight_gradient(self, left_PF: torch.Tensor, rows: GatheredRows, sizes_E: torch.Tensor, out_EFH: torch.Tensor | None = None,
                        only: bool = False) -> torch.Tensor:
        """out[e] = left[rows of e].T @ rows[rows of e]; exactly 0 for an expert without rows. out is allocated where it is None. `only`: no
        other gradient of weights has these rows."""
        if out_EFH is None:
            out_EFH = rows.new_empty(sizes_E.numel(), left_PF.size(1), rows.rows_PH().size(1))
        self.write_gradient(left_PF, rows.rows_PH(), sizes_E, out_EFH)
        return out_EFH

    def add_weight_gradient(self, left_PF: torch.Tensor, rows: GatheredRows, sizes_E: torch.Tensor, out_EFH: torch.Tensor,
                            scale: float = 1.0) -> None:
        """out[e] += scale * left[rows of e].T @ rows[rows of e], to out in float32 of any strides. An engine whose kernels add sums to
        float32 rounds nothing before; others round the product to its dtype."""
        self._add_product(left_PF, rows.rows_PH(), sizes_E, out_EFH, scale)

    def _add_product(self, left_PF: torch.Tensor, right_PH: torch.Tensor, sizes_E: torch.Tensor, out_EFH: torch.Tensor,
                     scale: float) -> None:
        if out_EFH.stride(2) != 1 and out_EFH.stride(1) == 1:
            left_PF, right_PH, out_EFH = right_PH, left_PF, out_EFH.transpose(1, 2)
        if scale == 1 and self.adds_in_place(out_EFH):
            self.product(left_PF, right_PH, sizes_E, trans_a=True, out=out_EFH, accumulate=True)
        else:
            out_EFH.add_(self.product(left_PF, right_PH, sizes_E, trans_a=True), alpha=scale)

    def adds_in_place(self, out_EKN: torch.Tensor) -> bool:
        """Whether `gmm` with trans_a and accumulate adds float32 sums to a float32 result with these strides."""
        return False

    def write_gradient(self, left_PF: torch.Tensor, right_PH: torch.Tensor, sizes_E: torch.Tensor, out_EFH: torch.Tensor) -> None:
        """out[e] = left[rows of e].T @ right[rows of e], to out of any strides. If that has the matrices transposed, the operands change
        sides."""
        if out_EFH.stride(2) != 1 and out_EFH.stride(1) == 1:
            left_PF, right_PH, out_EFH = right_PH, left_PF, out_EFH.transpose(1, 2)
        if self.writes_in_place(out_EFH):
            self.product(left_PF, right_PH, sizes_E, trans_a=True, out=out_EFH)
        else:
            out_EFH.copy_(self.product(left_PF, right_PH, sizes_E, trans_a=True))

    def makes_two_weight_gradients(self, left_PF: torch.Tensor, rows: GatheredRows, sizes_E: torch.Tensor) -> bool:
        """Whether the engine gains by making both gradients of a GLU in one GEMM. If not, the caller asks for one after the other, and
        frees the first left side in between."""
        return False

    def two_weight_gradients(self, left_PF: torch.Tensor, left2_PF: torch.Tensor, rows: GatheredRows, sizes_E: torch.Tensor,
                             out_EFH: torch.Tensor, out2_EFH: torch.Tensor) -> None:
        """weight_gradient of both left sides, which have one shape, in one GEMM, where makes_two_weight_gradients says so."""
        raise TypeError(f"{type(self).__name__} makes one gradient at a time")


def sum_of_both(sums_EBN: torch.Tensor) -> torch.Tensor:
    """[E,N] of what rank_gradient made of weights_in_columns."""
    return (sums_EBN[:, 0].to(accumulate_dtype(sums_EBN.dtype)) + sums_EBN[:, 1]).to(sums_EBN.dtype)


def why_not_cuda(device: torch.device) -> str | None:
    """None if the device is a CUDA device, otherwise why an engine that needs one does not run on it."""
    return None if device.type == "cuda" else f"runs on CUDA devices only, not on {device.type}"


def host_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """The sizes as contiguous int64 on the CPU; waits for the device if they are there."""
    return sizes.to("cpu", torch.int64).contiguous()


@overload
def device_sizes(sizes: torch.Tensor, device: torch.device) -> torch.Tensor: ...
@overload
def device_sizes(sizes: None, device: torch.device) -> None: ...
def device_sizes(sizes, device):
    """The sizes, contiguous on `device`, without a wait; None as it is. If the caller rewrites sizes on the host afterwards, the result is
    the same."""
    if sizes is None:
        return None
    if sizes.device.type == "cpu":
        # A copy from pinned memory may read it after this function has returned. A clone is not pinned, and is read before.
        sizes = sizes.clone()
    return sizes.to(device, non_blocking=True).contiguous()
