"""Rows and files of runs that never happened, to test the code that reads them."""

import re
from itertools import takewhile

from gbmoe.cli.bench.measurements.layer import LayerMeasurement

RUN = {
    "machine": {"device": "cuda", "name": "NVIDIA H200", "driver": "580"}, "clocks": None, "extension": {},
    "versions": {"torch": "2.11.0", "gbmoe": "0.1.0", "commit": "0123456789abcdef", "dirty": False},
    "dtype": "bfloat16", "seed": 0, "time": "2026-01-01T00:00:00+00:00",
    "limits": {"flops": 7e14, "bytes": 4e12}, "limit_rows": [],
    "peers": {"loop": "loop 1.0"}, "peers_left_out": {"sonicmoe": "it is | not here"}, "engines_left_out": {},
}


# How far a rate that is derived from fields of a file may be from the file's: each of them has six digits.
ROUNDED = 5e-5


def printed(out):
    """The lines of the printed tables, each as its cells by heading. A table ends with its shapes in words."""
    lines, found = out.splitlines(), []
    for number, rule in enumerate(lines):
        if re.fullmatch("-+(  -+)+", rule):
            spans = [match.span() for match in re.finditer("-+", rule)]
            rows = takewhile(lambda line: not re.match(r"\S+: ", line), lines[number + 1 :])
            found += [{lines[number - 1][slice(*span)].strip(): row[slice(*span)].strip() for span in spans} for row in rows]
    return found


def row(measurement, seconds=None, outcome="verified", problem=None, speedup=None, **more):
    """A verified row with `seconds` as its median, or one without a time."""
    found = measurement.describe() | {"dtype": "bfloat16", "verified": outcome == "verified", "outcome": outcome,
                                      "problem": problem, "run": 0, "speedup": speedup}
    if seconds is not None:
        flops = measurement.flops()
        found |= {"median": seconds, "quartiles": [seconds * 0.99, seconds * 1.01], "repetitions": 10,
                  "flops": flops, "tflops": flops / seconds / 1e12, "bytes": 10**9, "terabytes": 1e-3 / seconds,
                  "of_limit": 0.5, "bound_by": "compute", "extra_peak_bytes": 2**30}
    return found | more


def layer_row(case, by, seconds=None, computation="forward", memory_limit=None, **more):
    implementation, _, engine = by.partition("-") if by.startswith("gbmoe-") else (by, "", "")
    measurement = LayerMeasurement(case, implementation, engine or None, "uniform", computation, memory_limit)
    return row(measurement, seconds, **more)


def content(suite, rows, **more):
    """The content of a result file."""
    names = list(dict.fromkeys(row["setting"] for row in rows))
    run = RUN | {"configurations": names}
    return {"suite": suite, "baseline": "bmm", "configurations": names, "runs": [run], "rows": rows, **more}
