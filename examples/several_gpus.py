"""Your own training loop on several GPUs, or cores: torchrun --nproc-per-node=2 examples/several_gpus.py

Every process builds the model from the same seed, so that all draw the same masks.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import maskconnect as mc


def batch(step, rank, ranks, size=64):
    """This process's part of a batch: points inside a ring, or not."""
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(step))
    return x[rank::ranks], ((x.norm(dim=1) - 1).abs() < 0.4).long()[rank::ranks]


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16)) for _ in range(6)]
    return nn.Sequential(nn.Linear(2, 16), mc.MaskedStack(blocks, fan_in=2), nn.Linear(16, 2))


def train(rank=0, ranks=1, steps=600):
    model = build()
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.03, mask_lr=0.3), momentum=0.9)
    mc.attach(optimizer, model)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    for step in range(steps):
        if step == steps // 2:
            mc.freeze(model)
        x, y = batch(step, rank, ranks)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    x, y = batch(steps, rank=0, ranks=1, size=2000)
    return model, (model.eval()(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network gains nothing from more
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model, accuracy = train(rank, ranks)
    if rank == 0:
        print(f"{ranks} process{'es' * (ranks > 1)}: {accuracy:.0%}; block 5 reads {mc.wiring_of(model)[5]}")
    if ranks > 1:
        dist.destroy_process_group()
