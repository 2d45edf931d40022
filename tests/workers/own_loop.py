"""Run by torchrun: the loop of examples/several_gpus.py in float64: the same weights on any number."""

import os

import several_gpus
import torch
import torch.distributed as dist
from leaving import leave_at_once

import maskconnect as mc

torch.set_default_dtype(torch.float64)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
model, _ = several_gpus.train(rank, ranks, steps=120)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
least, most = weights.clone(), weights.clone()
dist.all_reduce(least, dist.ReduceOp.MIN)
dist.all_reduce(most, dist.ReduceOp.MAX)
assert torch.equal(least, most), "the ranks have gone apart"
if rank == 0:
    print(f"{weights.sum():.8f} {weights.abs().sum():.8f} {mc.wiring_of(model)}")
dist.destroy_process_group()
leave_at_once()
