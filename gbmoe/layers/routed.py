"""What a layer keeps of its routing for the load-balancing loss, and sums of it over the tokens of a sequence or of all.

Shape suffixes: T tokens, K slots a token (top-k), E experts, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routed(NamedTuple):
    """One forward of a layer.

    Attributes:
        counts_E: tokens of each expert, without padding.
        scores_TE: the router's.
        experts: ids [..., K] with the leading dimensions of the layer's input, for a loss of each sequence; -1 for none.
        padding_mask_T: True for tokens that count nowhere.
        cu_seqlens: [S+1], where packed sequences begin and the last one ends.
    """

    counts_E: torch.Tensor
    scores_TE: torch.Tensor
    experts: torch.Tensor | None = None
    padding_mask_T: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def number_of_tokens(self) -> torch.Tensor:
        """int64 [], without padding, on the device of the scores."""
        if self.padding_mask_T is not None:
            return self.padding_mask_T.numel() - self.padding_mask_T.sum()
        return torch.full((), self.scores_TE.size(0), dtype=torch.int64, device=self.scores_TE.device)

    def shares(self, dtype: torch.dtype, normalize: bool) -> torch.Tensor:
        """The scores [T,E] in a dtype, divided by their sum over the experts if `normalize`, and 0 for padding."""
        scores_TE = self.scores_TE.to(dtype)
        if normalize:
            scores_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
        # A router of the user's may give padding any scores.
        return scores_TE if self.padding_mask_T is None else scores_TE.masked_fill(self.padding_mask_T[:, None], 0)


class Sequences:
    """Which sequence each token belongs to, and sums over the tokens of each.

    Args:
        leading: the leading dimensions of the layer's input, of T tokens in all. Packed sequences take no note of them.
        batch_first: whether the last of them is the position in a sequence, instead of the first.
        cu_seqlens: for packed sequences. Tokens after the last sequence belong to none.
    """

    def __init__(self, leading: torch.Size, batch_first: bool, cu_seqlens: torch.Tensor | None, device: torch.device):
        tokens = leading.numel()
        length = (leading[-1] if batch_first else leading[0]) if leading else 1
        self._batch_first, self._length, self._lengths = batch_first, length, None
        token_T = torch.arange(tokens, dtype=torch.int64, device=device)
        if cu_seqlens is not None:
            # Made to rise, and not beyond the tokens: bounds that are none must not lead a kernel out of these.
            ends_S = cu_seqlens[1:].to(torch.int64).clamp(0, tokens)
            ends_S = ends_S.cummax(0).values if ends_S.size(0) else ends_S
            self.number, first = ends_S.size(0), ends_S.new_zeros(1)
            self._index_T = torch.searchsorted(ends_S, token_T, right=True)
            self._lengths = torch.diff(torch.cat([first, ends_S, first + tokens]))
        else:
            self.number = tokens // length if length else 0
            self._index_T = token_T // max(length, 1) if batch_first else token_T % max(self.number, 1)

    def sum(self, values_TE: torch.Tensor) -> torch.Tensor:
        """[S,E], with a gradient, in a fixed order."""
        if self._lengths is not None:
            return torch.segment_reduce(values_TE, "sum", lengths=self._lengths, axis=0, unsafe=True, initial=0)[:-1]
        if self._batch_first:
            return values_TE.view(self.number, self._length, values_TE.size(1)).sum(1)
        return values_TE.view(self._length, self.number, values_TE.size(1)).sum(0)

    def tokens(self, padding_mask_T: torch.Tensor | None) -> torch.Tensor:
        """int64 [S], without padding."""
        ones_T = torch.ones_like(self._index_T) if padding_mask_T is None else (~padding_mask_T).to(torch.int64)
        return self._count(self._index_T, ones_T, 1).view(self.number)

    def counts(self, experts_TK: torch.Tensor, experts: int, padding_mask_T: torch.Tensor | None) -> torch.Tensor:
        """Tokens of each expert, int64 [S,E]."""
        chosen_TK = experts_TK >= 0
        if padding_mask_T is not None:
            chosen_TK = chosen_TK & ~padding_mask_T[:, None]
        index_TK = self._index_T[:, None] * experts + experts_TK.clamp(min=0)
        return self._count(index_TK.flatten(), chosen_TK.to(torch.int64).flatten(), experts).view(self.number, experts)

    def _count(self, index: torch.Tensor, ones: torch.Tensor, each: int) -> torch.Tensor:
        # Integers have the same sum in any order. The last row is that of the tokens in no sequence.
        counts = torch.zeros((self.number + 1) * each, dtype=torch.int64, device=index.device)
        return counts.scatter_add_(0, index, ones)[:-each]
