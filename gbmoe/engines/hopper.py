"""Our own kernels for compute capability 9.0 (csrc/hopper/): sizes on the device, the activation inside the products.

Shape suffixes: T tokens, P rows of all groups, E groups (experts), H hidden, F ffn hidden.
"""

from __future__ import annotations

import functools

import torch

from gbmoe import extension, reference
from gbmoe.engines.base import Engine, device_sizes, known, result_shape

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_SIZE = 2**31 - 2**10  # rows and columns are int32 in the kernels, and a tile may reach some hundreds beyond the last
_GATHERED_BYTES = 2**36  # products that gather number the tokens' matrix in pieces of 16 bytes, in 32 bits


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class Hopper(Engine):
    """Near dense speed from a few hundred rows a group on, and no host wait."""

    name = "hopper"
    fuses_activation = True

    def unavailable(self, device):
        if device.type != "cuda":
            return f"runs on CUDA devices only, not on {device.type}"
        capability = _capability(device)
        if capability != (9, 0):
            return f"runs on compute capability 9.0, this device has {capability[0]}.{capability[1]}"
        status = extension.status()
        if not status.loaded:
            return f"needs the CUDA extension: {status.reason}"
        if not torch.ops.gbmoe_cuda.hopper_built():
            return "the extension was compiled without sm_90; rebuild it with 9.0 in TORCH_CUDA_ARCH_LIST"
        return None

    def refuses(self, problem):
        if problem.dtype not in _DTYPES:
            return f"takes bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
        # Tensor maps want rows that start at multiples of 16 bytes.
        if problem.inner % 8 or problem.columns % 8:
            return f"takes row lengths that are multiples of 8, not {problem.inner} and {problem.columns}"
        sizes = (problem.rows, problem.groups, problem.inner, problem.columns)
        if 0 in sizes:
            return "takes no empty operands"
        too_large = [size for size in sizes if known(size > _MAX_SIZE)]
        if too_large:
            return f"takes at most {_MAX_SIZE} rows, groups and columns, not {too_large[0]}"
        return None

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        sizes = _on_device(sizes, a)
        if trans_a and accumulate and out.dtype == torch.float32:
            torch.ops.gbmoe_cuda.hopper_weights(a, b, sizes, _workspace_of_weights(out, a.size(0), sizes), out)
            return out
        product = out
        if out is None or accumulate:
            product = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        if trans_a:
            torch.ops.gbmoe_cuda.hopper_weights(a, b, sizes, _workspace_of_weights(product, a.size(0), sizes), product)
        else:
            ping_pong, workspace = _walk_of_rows(product, a.size(1), sizes)
            torch.ops.gbmoe_cuda.hopper_rows(a, b, None, None, sizes, trans_b, ping_pong, workspace, product)
        return out.add_(product) if accumulate else product

    def gathers(self, x, ffn, activation):
        """True where `up` is to be given the tokens x, and False where their rows gathered; by ffn hidden size and activation's name.

        Gathering inside the product saves writing and reading [P,H], time in proportion to H, and costs a tenth of the product's
        speed, time in proportion to H F: on an H200 it pays at F = 256, and no longer at 768.
        """
        return ffn <= 512 and activation in ("silu", "gelu_tanh") and x.nbytes < _GATHERED_BYTES

    def up(self, x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, activation, save):
        """a = act(x @ w1[e].T), or act(x @ w1[e].T) * (x @ v1[e].T): (a, h, g) [P,F]; h and g None unless `save`, g without v1.

        x is [P,H]; or, where `gathers`, [T,H] with slot_of_row_P, int32 [P]: row r is line slot_of_row[r] // top_k, or zeros where
        that is negative. All bfloat16 or float16, contiguous, aligned to 16 bytes, on one device; weights [E,F,H] as MegaBlocks
        has them; sizes integer [E]; `activation` a name in reference.ACTIVATIONS. a is computed from h and g as they are rounded
        for storage.
        """
        a_PF = x.new_empty(x.size(0) if slot_of_row_P is None else slot_of_row_P.size(0), w1_EFH.size(1))
        h_PF = torch.empty_like(a_PF) if save else None
        g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
        sizes, index = _on_device(sizes, x), reference.ACTIVATION_INDEX[activation]
        workspace = _workspace_of_up(a_PF, x.size(1), sizes) if slot_of_row_P is None else None
        if v1_EFH is None:
            torch.ops.gbmoe_cuda.hopper_up(x, slot_of_row_P, top_k, w1_EFH, sizes, index, workspace, a_PF, h_PF)
        else:
            torch.ops.gbmoe_cuda.hopper_up_glu(x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, index, workspace, a_PF, h_PF, g_PF)
        return a_PF, h_PF, g_PF

    def gathers_in_backward(self, x, ffn):
        """For the gradient of the output and for x, True where `rows_gathered` and `weights_gathered` are to pick their rows.

        By ffn hidden size; where False, `gather` comes before the products. It saves and costs what it does in `gathers`; weights'
        gradients are a ninth to a seventh slower. For x it pays at F = 512 and no longer at 768; for the gradient, which then has
        the activation's gradient apart from its product, at 256.
        """
        reachable = x.nbytes < _GATHERED_BYTES
        return reachable and ffn <= 256, reachable and ffn <= 512

    def rows_gathered(self, x_TH, slot_of_row_P, top_k, w_EFH, sizes):
        """x[slot_of_row // top_k] @ w[e].T, [P,F]; zeros in rows without a slot. Dtypes and layouts as in `up` where it gathers."""
        product_PF = x_TH.new_empty(slot_of_row_P.size(0), w_EFH.size(1))
        torch.ops.gbmoe_cuda.hopper_rows_gathered(x_TH, slot_of_row_P, top_k, w_EFH, _on_device(sizes, x_TH), product_PF)
        return product_PF

    def weights_gathered(self, a_PF, x_TH, slot_of_row_P, top_k, sizes):
        """a[rows of e].T @ x[slot_of_row // top_k], [E,F,H], where rows without a slot count as zeros of x.

        a [P,F] may hold anything behind the last group. Dtypes and layouts as in `rows_gathered`.
        """
        product_EFH, sizes = x_TH.new_empty(sizes.numel(), a_PF.size(1), x_TH.size(1)), _on_device(sizes, x_TH)
        workspace = _workspace_of_weights(product_EFH, a_PF.size(0), sizes)
        torch.ops.gbmoe_cuda.hopper_weights_gathered(a_PF, x_TH, slot_of_row_P, top_k, sizes, workspace, product_EFH)
        return product_EFH

    def differentiates(self, hidden):
        """True where `down_backward` is faster than the product and the gradient of the activation apart; by hidden size.

        The tensor cores work on a tile for as long as its sums are, in proportion to H, and what follows should take no longer: on
        an H200 it pays from H = 1,536 on, by a sixth to a tenth, and at 1,024 or 512 it depends on the routing.
        """
        return hidden >= 1536

    def down_backward(self, dz_PH, w2_EFH, sizes, h_PF, g_PF, slot_of_row_P, weights_TK, activation):
        """With d = dz @ w2[e].T and the row's router weight w, or 1 without weights: (w a, dh, dg, dweights).

        a = act(h) (* g), dh = w d act'(h) (* g), dg = w d act(h), all [P,F], with zeros in a group's rows without a slot, and
        nothing written behind the last group; dweights [T,K] is <a, d>, and 0 for a slot without a row. d is rounded to the dtype
        of dz in between. dg is None without g, dweights without weights. dz [P,H], w2 [E,F,H], h and g [P,F], all bfloat16 or
        float16, contiguous, aligned to 16 bytes, on one device; slot_of_row int32 [P], negative for none; weights [T,K] of any
        floating dtype; sizes integer [E]; `activation` a name in reference.ACTIVATIONS. The formulas are csrc/activation.cu's.
        """
        a_PF, dh_PF = torch.empty_like(h_PF), torch.empty_like(h_PF)
        dg_PF = None if g_PF is None else torch.empty_like(h_PF)
        dweights_TK = dots_CP = None
        if weights_TK is not None:
            dweights_TK = weights_TK.new_zeros(weights_TK.shape)
            weights_TK = (weights_TK.float() if weights_TK.dtype == torch.float64 else weights_TK).contiguous()
            dots_CP = h_PF.new_empty((h_PF.size(1) + 63) // 64, h_PF.size(0), dtype=torch.float32)  # by 64 columns
        torch.ops.gbmoe_cuda.hopper_down_backward(dz_PH, w2_EFH, _on_device(sizes, dz_PH), h_PF, g_PF, slot_of_row_P, weights_TK,
                                                  reference.ACTIVATION_INDEX[activation], a_PF, dh_PF, dg_PF, dots_CP, dweights_TK)
        return a_PF, dh_PF, dg_PF, dweights_TK

    def up_backward(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes):
        """dx = dh @ w1[e] (+ dg @ v1[e]) [P,H], summed before it is rounded; dtypes and layouts as in `up`."""
        dx_PH, sizes = dh_PF.new_empty(dh_PF.size(0), w1_EFH.size(2)), _on_device(sizes, dh_PF)
        ping_pong, workspace = _walk_of_rows(dx_PH, dh_PF.size(1) * (1 if v1_EFH is None else 2), sizes)
        torch.ops.gbmoe_cuda.hopper_rows(dh_PF, w1_EFH, dg_PF, v1_EFH, sizes, False, ping_pong, workspace, dx_PH)
        return dx_PH


def _on_device(sizes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return device_sizes(sizes, like.device)


def _walk_of_rows(product: torch.Tensor, inner: int, sizes: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Whether a product of rows is made in ping-pong, and its workspace; measured on an H200.

    Ping-pong hides the end of a tile, and is worth up to 20 % of sums of up to 4,096 terms; beyond, and where tokens are few, it is
    what the L2 or memory deliver that counts. Of sums of 2,048 terms and more, blocks that take their tiles from a counter stay
    closer together, in what they read too, than those that have a fixed share: up to 20 %, for the 3 us that the schedule takes.
    Few tiles of them are cut into parts, for which they are not made in ping-pong.
    """
    (rows, columns), groups = product.shape, sizes.numel()
    square_tiles = max(rows / 128, min(rows, groups)) * columns / 128  # about, if no group is empty
    ping_pong = inner <= 4096 and rows >= 4 * groups and (inner < 2048 or square_tiles >= 256)
    if inner < 2048:
        return ping_pong, None
    return ping_pong, _workspace(product, sizes, parts=0 if ping_pong or square_tiles > 1 << 13 else 2)


def _workspace_of_up(product: torch.Tensor, inner: int, sizes: torch.Tensor) -> torch.Tensor | None:
    """Memory to count tiles in, or None where that would not pay: up to 9 % of long sums (see `_walk_of_rows`)."""
    pays = inner >= 2048 and _tiles(*product.shape) >= 256
    return _workspace(product, sizes, parts=0) if pays else None


def _workspace_of_weights(product: torch.Tensor, rows: int, sizes: torch.Tensor) -> torch.Tensor:
    """Memory to balance a product in whose sums are over groups of `rows` rows; few tiles are cut into more parts."""
    few = len(product) * _tiles(*product.shape[1:]) <= 1 << 10
    return _workspace(product, sizes, parts=0 if rows <= 2048 else 4 if few else 2)


def _tiles(rows: int, columns: int) -> float:
    return rows / 128 * columns / 256


def _workspace(like: torch.Tensor, sizes: torch.Tensor, parts: int) -> torch.Tensor:
    return like.new_empty(_workspace_bytes(like.device, sizes.numel(), parts), dtype=torch.uint8)


@functools.lru_cache(maxsize=256)
def _workspace_bytes(device: torch.device, groups: int, parts: int) -> int:
    return torch.ops.gbmoe_cuda.hopper_workspace(torch.empty(0, device=device), groups, parts)
