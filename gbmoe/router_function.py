"""RouterFunction: how a router's logits become scores, a choice of experts and their weights, as data.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from gbmoe._checks import require, require_choice

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class RouterFunction:
    """What a router's choice and weights depend on, apart from its logits and the experts' biases.

    1. The scores [T,E] are a softmax over the experts, or the sigmoid or the root of the softplus of each logit.
    2. What experts are ranked by is the score plus the expert's bias. With `pre_softmax` False it is the logit plus the bias. Where there
       are neither biases nor groups it is the logit in every case, which has the order of the scores and keeps more bits.
    3. With groups, num_groups of E / num_groups experts that lie side by side, only experts of the group_topk best groups can be chosen.
       A group is worth the sum of what its group_best best experts are ranked by.
    4. The weights [T,K] are the scores of those chosen, without biases, divided by their p-norm plus epsilon, times scale. With
       `pre_softmax` False they are the softmax over the chosen logits instead, times scale.

    Groups and experts that are worth the same are taken in order, the lower one first, and NaN ranks above every number. Scores and sums
    are rounded to float32 (float64 of float64 logits): where two of them differ by that alone, which is larger depends on the device.

    Attributes:
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        pre_softmax: of a softmax alone. True: it is taken over all experts, before the choice. False: over those chosen, after it.
        num_groups: 1 for no groups.
        group_topk: how many of the groups experts are chosen from.
        group_best: how many experts a group is judged by: 2 for DeepSeek-V3's, 1 for DeepSeek-V2's.
        normalize: p of the norm, positive or infinity; None: weights are not divided.
        epsilon: what is added to the norm.
        scale: what weights are multiplied by.

    Raises:
        ValueError: naming the attribute, what was expected and what came.

    Example:
        >>> deepseek_v3 = RouterFunction("sigmoid", num_groups=8, group_topk=4,
        ...                              normalize=1, epsilon=1e-20, scale=2.5)
        >>> logits, bias = torch.randn(3, 256), torch.zeros(256)
        >>> routing = gbmoe.ops.route(logits, 8, function=deepseek_v3, expert_bias=bias)
        >>> routing.experts_TK.shape
        torch.Size([3, 8])
    """

    score: str = "softmax"
    pre_softmax: bool = True
    num_groups: int = 1
    group_topk: int = 1
    group_best: int = 2
    normalize: float | None = None
    epsilon: float = 0.0
    scale: float = 1.0
    # A string that stands for this function where only strings can, as in an operator's arguments; `of_code` reads it.
    code: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self):
        owner = "RouterFunction"
        require_choice(owner, "score", self.score, SCORES)
        for name in ("num_groups", "group_topk", "group_best"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, owner, name, "an int of at least 1", repr(value))
        require(self.group_topk <= self.num_groups, owner, "group_topk", f"at most num_groups == {self.num_groups}", self.group_topk)
        p = self.normalize
        require(p is None or (isinstance(p, (int, float)) and p > 0), owner, "normalize", "None or a positive p", repr(p))
        require(self.epsilon >= 0, owner, "epsilon", "a number of at least 0", repr(self.epsilon))
        require(math.isfinite(self.scale), owner, "scale", "a finite number", repr(self.scale))
        if not self.pre_softmax:
            require(self.score == "softmax", owner, "pre_softmax", f"True with score {self.score!r}", self.pre_softmax)
            require(p in (None, 1), owner, "normalize", "None or 1 without pre_softmax, as the chosen experts' weights sum to one then", p)
        object.__setattr__(self, "code", " ".join((
            self.score, "pre" if self.pre_softmax else "post", str(self.num_groups), str(self.group_topk), str(self.group_best),
            "None" if p is None else repr(float(p)), repr(float(self.epsilon)), repr(float(self.scale)))))

    @staticmethod
    @functools.cache
    def of_code(code: str) -> RouterFunction:
        """The function whose `code` this is."""
        score, softmax, groups, chosen, best, p, epsilon, scale = code.split(" ")
        return RouterFunction(score, softmax == "pre", int(groups), int(chosen), int(best), None if p == "None" else float(p),
                              float(epsilon), float(scale))

    @property
    def has_groups(self) -> bool:
        """Whether groups limit the choice."""
        return self.group_topk < self.num_groups

    @property
    def is_softmax_topk(self) -> bool:
        """Whether, without biases, this is no more than a softmax, the K highest, and their p-norm (that of MegaBlocks)."""
        return self.score == "softmax" and self.group_topk >= self.num_groups and self.epsilon == 0 and self.scale == 1

    @property
    def softmax_topk_norm(self) -> float | None:
        """The p-norm of a function that is_softmax_topk: a softmax over the chosen logits is one over all, divided by its sum over
        these."""
        return self.normalize if self.pre_softmax else 1.0

    def check(self, operator: str, experts: int, top_k: int) -> None:
        """Raise ValueError unless top_k of so many experts can be chosen in these groups."""
        if not self.has_groups:
            return
        size = experts // self.num_groups
        require(experts % self.num_groups == 0, operator, "num_groups", lambda: f"a divisor of {experts}, the number of experts",
                self.num_groups)
        require(self.group_best <= size, operator, "group_best", lambda: f"at most {size}, the experts of a group", self.group_best)
        require(top_k <= size * self.group_topk, operator, "top_k",
                lambda: f"at most {size * self.group_topk}, the experts of group_topk == {self.group_topk} groups", top_k)


def softmax_topk_code(p: float | None) -> str:
    """RouterFunction(normalize=p).code, without checks."""
    return f"softmax pre 1 1 2 {None if p is None else float(p)!r} 0.0 1.0"
