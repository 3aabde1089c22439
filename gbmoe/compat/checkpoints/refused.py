"""Model types whose layers no dMoE computes, or that were not compared yet, and what each needs. Data only."""

from __future__ import annotations

from collections.abc import Mapping

_UNCOMPARED = "to be compared with transformers first"
_NAMES = "other names: this model type's experts, router or shared expert have names of their own"

# Refused with any config.json. A need that has been met is taken out of its line; a line that is then empty becomes an entry of
# MODEL_TYPES, with the conditions that remain.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "afmoe": (_UNCOMPARED,),
    "aria_text": (_UNCOMPARED, _NAMES),
    "axk1": ("a norm of the layer's output",),
    "axk2": (_UNCOMPARED,),
    "bailing_hybrid": (_UNCOMPARED,),
    "beam": (_UNCOMPARED,),
    "dbrx": ("no conversion: its layers have MegaBlocks' names and shapes already",),
    "deepseek_v4": (_UNCOMPARED, "experts by a token's id in its first layers"),
    "flint": (_UNCOMPARED, _NAMES),
    "hy_v3": (_UNCOMPARED, _NAMES),
    "jetmoe": (_NAMES,),
    "kimi_linear": (_UNCOMPARED,),
    "laguna": (_UNCOMPARED, _NAMES),
    "lfm2_moe": (_UNCOMPARED,),
    "longcat_flash": ("experts that return what they get", _NAMES),
    "nemotron_h": (_UNCOMPARED, "experts without a gate in config.json"),
    "phimoe": ("weights by sparsemixer",),
    "qwen3_vl_moe_text": (_UNCOMPARED,),
    "switch_transformers": ("experts that drop tokens beyond their capacity", _NAMES),
    "zaya": ("a router that is more than one matrix",),
}
