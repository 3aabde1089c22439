"""A name of a file is that of one thing: who looks for it in a list of files finds it at first guess."""

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What may have one name, and why. Paths without ".py".
ONE_THING = {
    "build": {"gbmoe/cli/build", "gbmoe/extension/build"},                          # a command, and what it runs
    "permute": {"gbmoe/ops/permute", "gbmoe/launch/permute", "gbmoe/tuning/permute"},  # operators, their launches, and their tuning
    # Called after modules of other libraries, and after a library.
    "ops": {"gbmoe/compat/grouped_gemm/ops", "gbmoe/compat/megablocks/ops"},
    "router": {"gbmoe/layers/router", "gbmoe/compat/transformer_engine/router"},
    "transformers": {"gbmoe/compat/transformers", "gbmoe/cli/bench/rivals/transformers"},
}


def test_eleven_names_of_files_meant_two_things_each():
    files = defaultdict(set)
    for folder in ("gbmoe", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if not file.stem.startswith("__"):
                files[file.stem].add(file.relative_to(ROOT).with_suffix("").as_posix())
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == ONE_THING
