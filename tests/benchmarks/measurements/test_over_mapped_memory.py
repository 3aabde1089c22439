"""Layers and trips of bench's suite `parallel` over mapped memory: two processes that map files."""

import pytest
import torch

from benchmarks.measurements.link import COMBINE, DISPATCH, LinkMeasurement
from benchmarks.measurements.parallel_layer import LOANS, ParallelLayerMeasurement
from gbmoe.cli.bench.measurements.measurement import FORWARD, TRAINING
from gbmoe.parallel import peer_memory
from gbmoe.testing import mapped_files
from gbmoe.testing.moe_shapes import MoeCase
from tests.parallel.processes import run

pytestmark = pytest.mark.xdist_group("mapped-files")

CASE = MoeCase("small", 40, 64, 32, 8, 2, "glu")
LAYERS = [(transport, computation) for transport in ("auto", "peer_memory", LOANS) for computation in (FORWARD, TRAINING)]
TRIPS = [(case, trip) for case in (CASE, MoeCase("one expert", 24, 64, 32, 1, 1, "glu")) for trip in (DISPATCH, COMBINE)]


def measured(rank):
    """For each measurement whether this rank's results are right, and whether rows were pulled."""
    peer_memory.MAPPERS["cpu"] = lambda: mapped_files
    found = {}
    measurements = {f"{by} {computation}": ParallelLayerMeasurement(CASE, "gbmoe", "auto", "skewed", computation, transport=by)
                    for by, computation in LAYERS}
    measurements |= {f"{case.name} {trip}": LinkMeasurement(case, "gbmoe", None, "skewed", trip, transport="peer_memory")
                     for case, trip in TRIPS}
    for name, measurement in measurements.items():
        subject = measurement.build(torch.device("cpu"), torch.float32)
        verdict = subject.check(subject.outputs())
        found[name] = verdict.passed, bool(peer_memory._MEMORIES), str(verdict)
        peer_memory.release()
    return found


def test_auto_was_the_exchange_and_the_trip_back_an_error(tmp_path):
    """bench makes layers on the meta device."""
    for rank, found in enumerate(run(measured, 2, tmp_path)):
        assert len(found) == len(LAYERS) + len(TRIPS)
        for name, (passed, pulled, verdict) in found.items():
            assert passed and pulled, (rank, name, verdict)
