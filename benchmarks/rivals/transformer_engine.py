"""TransformerEngine's MoE permutation with its Triton kernels: permute and pad, unpermute, and its gradients."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.rivals.kinds import Permutation, PermutationRival
from gbmoe.cli.bench.rivals.rival import Prepared, needs_cuda, not_importable, versions

_MODULE = "transformer_engine.pytorch.permutation"


class TransformerEngine(PermutationRival):
    def unavailable(self, device):
        return needs_cuda(device) or not_importable(_MODULE)

    def about(self):
        return versions("transformer_engine")

    def permutation(self, ids_TK, experts, align):
        return _Permutation(ids_TK, experts, align)


class _Permutation(Permutation):
    """The permutation by a mask [T,E]. One operator makes the map and gathers the rows, so there is neither a plan nor a gather alone."""

    def __init__(self, ids_TK: torch.Tensor, experts: int, align: int):
        from transformer_engine.pytorch import permutation

        self.permutation, self.ids_TK, self.align = permutation, ids_TK, align
        self.mask_TE = torch.zeros(len(ids_TK), experts, dtype=torch.int32, device=ids_TK.device).scatter_(1, ids_TK, 1)
        self.counts_E = self.mask_TE.sum(0)
        probs_TE = self._dense(torch.ones(ids_TK.shape, dtype=torch.float32, device=ids_TK.device))
        out_PH, _, self.row_id_map, self.pad_offsets, _ = self._permute(
            torch.zeros(len(ids_TK), 16, dtype=torch.bfloat16, device=ids_TK.device), probs_TE)
        self.rows = len(out_PH)

    def _dense(self, weights_TK: torch.Tensor) -> torch.Tensor:
        return weights_TK.new_zeros(self.mask_TE.shape).scatter_(1, self.ids_TK, weights_TK)

    def _permute(self, x_TH, probs_TE):
        return self.permutation.moe_permute_and_pad_with_probs(x_TH, probs_TE, self.mask_TE, self.counts_E, self.align)

    def plan_and_gather(self, x_TH):
        probs_TE = self._dense(torch.ones(self.ids_TK.shape, dtype=torch.float32, device=x_TH.device))
        return Prepared(partial(self._permute, x_TH, probs_TE), lambda results: results[0])

    def _unpermute(self, y_PH, probs_TE):
        return self.permutation.moe_unpermute(
            y_PH, self.row_id_map, merging_probs=probs_TE, pad_offsets=self.pad_offsets,
            restore_shape=torch.Size((len(self.ids_TK), y_PH.size(1))))

    def scatter(self, y_PH, weights_TK):
        return Prepared(partial(self._unpermute, y_PH, self._dense(weights_TK)))

    def scatter_backward(self, grad_TH, y_PH, weights_TK):
        y_PH, probs_TE = y_PH.detach().requires_grad_(), self._dense(weights_TK).requires_grad_()
        out_TH = self._unpermute(y_PH, probs_TE)
        return Prepared(lambda: torch.autograd.grad(out_TH, (y_PH, probs_TE), grad_TH, retain_graph=True),
                        lambda grads: (grads[0], grads[1].gather(1, self.ids_TK)))
