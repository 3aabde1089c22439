"""A name of a file is that of one thing: who looks for it in a list of files finds it at first guess."""

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What may have one name, and why.
ONE_THING = {
    # A command, and what it runs.
    "build": {"gbmoe/cli/build.py", "gbmoe/extension/build.py"},
    # Operators, their launches, and their tuning.
    "permute": {"gbmoe/ops/permute.py", "gbmoe/launch/permute.py", "gbmoe/tuning/permute.py"},
    # Called after modules of other libraries, and after a library.
    "ops": {"gbmoe/compat/grouped_gemm/ops.py", "gbmoe/compat/megablocks/ops.py"},
    # And after what a layer's router launches.
    "router": {"gbmoe/layers/router.py", "gbmoe/launch/router.py", "gbmoe/compat/transformer_engine/router.py"},
    "transformers": {"gbmoe/compat/transformers.py", "gbmoe/cli/transformers.py", "gbmoe/cli/bench/rivals/transformers.py"},
}


def test_eleven_names_of_files_meant_two_things_each():
    files = defaultdict(set)
    for folder in ("gbmoe", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if not file.stem.startswith("__"):
                files[file.stem].add(file.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == ONE_THING
