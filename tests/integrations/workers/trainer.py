"""Run by torchrun: the Trainer of transformers on all ranks, and again from its checkpoints."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401  before transformers
from leaving import leave_at_once
from several import HOWS, trainer
from small import copied, differences

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
for name, how in HOWS.items():
    run = trainer(folder / name, how, ranks=ranks)
    run.train()
    state = copied(run.model)
    weights = torch.cat([value.double().flatten() for value in state.values()])
    least, most = weights.clone(), weights.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(least, most), "the ranks have gone apart"
    for step in (3, 6, 9):
        resumed = trainer(folder / f"{name}-{step}", how, seed=5, ranks=ranks)
        resumed.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{step}"))
        assert differences(resumed.model.state_dict(), state) == [], step
    if run.is_world_process_zero():
        torch.save(state, folder / f"{name}.pt")
dist.destroy_process_group()
leave_at_once()
