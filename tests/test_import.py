"""What `import gbmoe` must not do."""

import json
import os
import subprocess
import sys

PROBE = """
import json, sys
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
import gbmoe
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted(m for m in set(sys.modules) - with_torch if "." not in m),
    "names": [n for n in gbmoe.__all__ if not hasattr(gbmoe, n)],
}))
"""


def test_import_starts_no_cuda_and_imports_no_peer():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env={**os.environ})
    seen = json.loads(done.stdout)
    assert seen["cuda"] is False
    assert not {"triton", "megablocks", "stk", "grouped_gemm", "transformers", "rich", "matplotlib"} & set(seen["modules"])
    assert seen["names"] == []
    assert done.stderr == ""


def test_layer_and_operators_on_the_cpu_never_ask_for_the_extension(monkeypatch):
    import torch

    import gbmoe
    from gbmoe import extension

    monkeypatch.setattr(extension, "load", lambda: (_ for _ in ()).throw(AssertionError("asked for the extension")))
    layer = gbmoe.dMoE(gbmoe.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=2, fp16=False, device="cpu"))
    out, _ = layer(torch.randn(3, 1, 16))
    out.sum().backward()
