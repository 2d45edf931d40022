"""Run by torchrun: FSDP2 trains as DistributedDataParallel does, and as one process does with the whole batch."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from leaving import leave_at_once
from small import blocks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import maskconnect as mc
from maskconnect.integrations.fsdp import shard

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # ranks that have gone apart wait
mesh = init_device_mesh("cpu", (ranks,))
STEPS, FROZEN_AT = 8, 5
WAYS = {"draw": mc.Draw(), "blend": mc.Blend(steps=FROZEN_AT)}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), mc.MaskedStack(blocks(), fan_in=1), nn.Linear(6, 4))


def made(model, how):
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=0.01, mask_lr=0.2))
    mc.attach(optimizer, model, how)
    return optimizer


def loss(model, step, *, whole=False, part=slice(None)):
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step))
    y = torch.arange(16) % 4
    mine = slice(None) if whole else slice(rank, None, ranks)
    return F.cross_entropy(model(x[mine][part]), y[mine][part])


def train(model, optimizer, steps, *, wrapped=None, whole=False):
    for step in steps:
        if step == FROZEN_AT:
            mc.freeze(model)
        optimizer.zero_grad()
        loss(wrapped or model, step, whole=whole).backward()
        optimizer.step()


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(found, expected, what):
    """All parameters, of which the masks have learned."""
    assert not torch.equal(expected[1].masks.real, build()[1].masks.real), what
    wanted = dict(expected.named_parameters())
    for name, value in found.named_parameters():
        torch.testing.assert_close(full(value), wanted[name], msg=lambda m, name=name: f"{what}: {name}: {m}")
    assert mc.wiring_of(found) == mc.wiring_of(expected), what


def check_ranks(model):
    both = [torch.empty_like(model[1].masks.real) for _ in range(ranks)]
    dist.all_gather(both, model[1].masks.real.detach())
    assert torch.equal(both[0], both[-1]), "the ranks have gone apart"


def check_gradients(how):
    """Those of the whole batch; in two parts too, with what FSDP2 has for that."""
    for parts in (1, 2):
        sharded, one = shard(build(), mesh=mesh), build()
        assert isinstance(sharded[0].weight, DTensor)
        for model in (sharded, one):
            made(model, how)
        loss(one, 0, whole=True).backward()
        # one pass of `one` is one draw, so parts of the other must read the same masks
        state = sharded[1].masks.generator.get_state()
        for k in range(parts):
            sharded[1].masks.generator.set_state(state)
            sharded.set_requires_gradient_sync(k == parts - 1)
            (loss(sharded, 0, part=slice(k, None, parts)) / parts).backward()
        wanted = dict(one.named_parameters())
        for name, value in sharded.named_parameters():
            torch.testing.assert_close(full(value.grad), wanted[name].grad, msg=lambda m, name=name: f"{name}: {m}")
        assert one[1].masks.real.grad.any()


def check_checkpoint(how, folder):
    """A run that resumes from torch.distributed.checkpoint is bitwise identical."""
    for cut in (3, 6):
        model = shard(build(), mesh=mesh)
        optimizer = made(model, how)
        train(model, optimizer, range(cut))
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{cut}")
        train(model, optimizer, range(cut, STEPS))
        resumed = shard(build(), mesh=mesh)
        again = torch.optim.AdamW(mc.param_groups(resumed, lr=0.01, mask_lr=0.2))
        weights, moments = get_state_dict(resumed, again)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{cut}")
        set_state_dict(resumed, again, model_state_dict=weights, optim_state_dict=moments)
        mc.attach(again, resumed, how)
        train(resumed, again, range(cut, STEPS))
        for name, value in model.state_dict().items():
            assert torch.equal(full(resumed.state_dict()[name]), full(value)), (cut, name)


for name, how in WAYS.items():
    sharded, parallel, one = shard(build(), mesh=mesh), build(), build()
    train(sharded, made(sharded, how), range(STEPS))
    train(parallel, made(parallel, how), range(STEPS), wrapped=DistributedDataParallel(parallel))
    train(one, made(one, how), range(STEPS), whole=True)
    check(sharded, parallel, "FSDP2 and DDP")
    check(sharded, one, "FSDP2 and one process")
    check_ranks(sharded)
    check_gradients(how)
    check_checkpoint(how, f"{sys.argv[1]}/{name}")
if rank == 0:
    print("all is well")
dist.destroy_process_group()
leave_at_once()
