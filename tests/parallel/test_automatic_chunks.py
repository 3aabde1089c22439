"""The number of chunks that is chosen without a process group; tests/parallel/test_exchange.py has it chosen by four ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gbmoe.parallel import automatic_chunks, cost_model
from gbmoe.parallel.placement import Placement
from gbmoe.tuning.device import Device

WHERE = Placement(group=None, world=4, rank=0, experts=16, experts_per_rank=4, shards=1)


@pytest.mark.parametrize("where, device", [(WHERE, "cpu"), (replace(WHERE, experts=4, experts_per_rank=1), "cuda")])
def test_one_chunk_where_speeds_are_unknown_or_there_is_one_expert(where, device):
    assert automatic_chunks.choose(where, 100, 16, 32, 2, 3, torch.float32, torch.device(device)) == 1


@pytest.mark.parametrize("shape, ranks, chunks", [
    (cost_model.Shape(8192, 4096, 14336, 8, 2), 2, 1),        # inside a node nothing overlaps
    (cost_model.Shape(16384, 2048, 768, 128, 8), 2, 1),
    (cost_model.Shape(16384, 2048, 768, 128, 8), 4, 1),       # eight were chosen, and took 2.3 times as long on four H200s
    (cost_model.Shape(16384, 2048, 768, 128, 8), 8, 1),
    (cost_model.Shape(4096, 7168, 2048, 256, 8), 64, 4),      # links between nodes are what takes time
])
def test_chunks_of_known_layers(shape, ranks, chunks):
    gpu, links = automatic_chunks.SPEEDS["cuda"]
    assert cost_model.best_chunks(shape, gpu, replace(links, ranks_per_node=min(8, ranks)), ranks) == chunks


@pytest.mark.parametrize("chunks, measured", [(2, 11.9 / 10.3), (4, 14.6 / 10.3)])
def test_chunks_inside_a_node_cost_what_was_measured(chunks, measured):
    """qwen3's layer over four H200s, the exchange, forward and backward. With eight chunks, 24.1 ms, the host is what limits."""
    shape = cost_model.Shape(16384, 2048, 768, 128, 8)
    gpu, links = automatic_chunks.SPEEDS["cuda"]
    links = replace(links, ranks_per_node=4)
    one, several = (cost_model.exchange(shape, gpu, links, 4, count, cost_model.even_load(shape, links, 4, count)) for count in (1, chunks))
    assert several / one == pytest.approx(measured, rel=0.1)


H100, H100_PCIE, B200 = Device(132, 50 << 20, (9, 0)), Device(114, 50 << 20, (9, 0)), Device(148, 126 << 20, (10, 0))


@pytest.mark.parametrize("here, slowest, chunks", [(H100, H100, 4), (H100_PCIE, H100_PCIE, 8), (B200, B200, 1), (B200, H100_PCIE, 8)])
def test_every_gpu_was_taken_for_an_h200(monkeypatch, group_of_one, here, slowest, chunks):
    """A rank on each of four hosts, whose GPUs may differ: all must choose the same number, by the slowest one."""
    rates = [int(device.flops(cost_model.Gpu().flops)) for device in (here, slowest)]

    def all_reduce(most, op, group):
        assert most.tolist() == [4096, -rates[0], 2]
        most[1] = -min(rates)

    monkeypatch.setitem(automatic_chunks.SPEEDS, "cpu", automatic_chunks.SPEEDS["cuda"])
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: here))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    where = replace(WHERE, group=dist.group.WORLD, experts=64, experts_per_rank=16)
    assert automatic_chunks.choose(where, 4096, 4096, 512, 8, 3, torch.bfloat16, torch.device("cpu")) == chunks
