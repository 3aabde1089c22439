"""What `import gbmoe` must not do."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, sys
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
import gbmoe
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted(m for m in set(sys.modules) - with_torch if "." not in m or m == "torch._dynamo"),
    "names": [n for n in gbmoe.__all__ if not hasattr(gbmoe, n)],
}))
"""


def test_import_starts_no_cuda_and_imports_no_peer_nor_the_compiler():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env={**os.environ})
    seen = json.loads(done.stdout)
    assert seen["cuda"] is False
    assert not {"triton", "megablocks", "stk", "grouped_gemm", "transformers", "rich", "matplotlib", "torch._dynamo"} & set(seen["modules"])
    assert seen["names"] == []
    assert done.stderr == ""


def test_layer_and_operators_on_the_cpu_never_ask_for_the_extension(monkeypatch):
    import torch

    import gbmoe
    from gbmoe.extension import loader

    monkeypatch.setattr(loader, "load", lambda: (_ for _ in ()).throw(AssertionError("asked for the extension")))
    layer = gbmoe.dMoE(gbmoe.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=2, fp16=False, device="cpu"))
    out, _ = layer(torch.randn(3, 1, 16))
    out.sum().backward()


def test_adapters_imported_what_other_modules_call_private():
    """A name with an underscore is used in its own module alone. A module whose own name has one is private to gbmoe."""
    folder = Path(__file__).parents[1] / "gbmoe"
    taken = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gbmoe":
                source = folder.joinpath(*node.module.split(".")[1:])
                taken += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names
                          if alias.name.startswith("_") and alias.name != "__version__"
                          and not (source / f"{alias.name}.py").exists() and not (source / alias.name).is_dir()]
    assert taken == []
