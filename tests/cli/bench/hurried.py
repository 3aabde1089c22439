"""gbmoe's command line, whose `bench --quick` repeats what it times as few times as it can: for tests of what is measured, not of times.

    python tests/cli/bench/hurried.py bench --quick --shape 48,32,40,4,2
"""

import os
import runpy
import sys


def least():
    """(module, name, value): --quick is two repetitions, or two rounds of some, and what the limits are measured on is small."""
    from gbmoe.cli.bench import command
    from gbmoe.cli.bench.running import parent_process, processes
    from gbmoe.cli.bench.running.burst_timer import Effort
    from gbmoe.cli.bench.running.repeat import Sustained

    return [(command, "QUICK", Effort(0, 2, 2)), (processes, "IN_TURNS_QUICK", Sustained(1e-4, 2)),
            (parent_process, "LIMITS_ELSEWHERE", (64, 2**8))]


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as `python -m gbmoe` has it
    for place in least():
        setattr(*place)
    runpy.run_module("gbmoe", run_name="__main__", alter_sys=True)
