"""Print "compiled:" and the folder of the gbmoe that is installed here, if its kernels were compiled with it; otherwise nothing.

    python scripts/slurm/installed_gbmoe.py

It imports neither gbmoe nor torch. Python looks for modules in this script's folder first, and not in the checkout.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

if __name__ == "__main__":
    found = importlib.util.find_spec("gbmoe")
    for folder in (found and found.submodule_search_locations) or ():
        if (Path(folder) / "_C.so").exists():
            print(f"compiled:{folder}")
            break
