"""grouped_gemm by name and signature, on gbmoe's operators: any floating dtype, CPU and CUDA, batch_sizes on either.

`ops` and `backend` mirror every public name of grouped_gemm 0.3 (github.com/tgale96/grouped_gemm), `grouped_gemm_backend` its CUDA
extension, and `ops` also has the permute and unpermute of NVIDIA's nv-grouped-gemm. register() makes
`import grouped_gemm` find this package, for code that imports that name: MegaBlocks' mlp_impl='grouped', OLMo-core, Nanotron,
Megatron-LM.
"""

from __future__ import annotations

import sys

from gbmoe._importable import is_importable
from gbmoe.compat.grouped_gemm import backend, grouped_gemm_backend, ops

__all__ = ["backend", "ops", "register"]

# As grouped_gemm names it; set here, because the stand-in computes through backend.
backend.backend = grouped_gemm_backend  # type: ignore[attr-defined]


def register(*, force: bool = False) -> None:
    """Make `import grouped_gemm` find this package where it would find no other. Idempotent.

    Call it before importing code that imports grouped_gemm: most callers look for it only once, when they are imported.

    Args:
        force: take the place of another one too: of the real package, or of a stub in sys.modules. Modules that have imported that
            already keep it.

    Example:
        >>> register()
        >>> from grouped_gemm import ops
    """
    if force or not is_importable("grouped_gemm"):
        sys.modules["grouped_gemm"] = sys.modules[__name__]
        sys.modules.update({"grouped_gemm.ops": ops, "grouped_gemm.backend": backend, "grouped_gemm_backend": grouped_gemm_backend})
