"""Run by torchrun: a new wrapper in the middle, as in a resumed run, changes nothing."""

import torch
import torch.distributed as dist
from leaving import leave_at_once
from torch import nn

import maskconnect as mc
from maskconnect.training.ranks import averaged, digest_of_weights

dist.init_process_group("gloo")
torch.set_num_threads(1)


def trained(*, again):
    torch.manual_seed(0)
    body = [
        nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)) for _ in range(8)
    ]
    stack = mc.MaskedStack([mc.Residual(block) for block in body], fan_in=3, aggregation="residual")
    model = nn.Sequential(nn.Conv2d(3, 24, 3), stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    opt = torch.optim.SGD(mc.param_groups(model, lr=0.05, mask_lr=0.01), momentum=0.9)
    mc.attach(opt, model, mc.Draw())
    wrapped = averaged(model)
    for step in range(4):
        if again and step == 2:
            wrapped = averaged(model)
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x, y = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        opt.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(x), y).backward()
        opt.step()
    return digest_of_weights(model)


assert trained(again=False) == trained(again=True)
if dist.get_rank() == 0:
    print("equal")
dist.destroy_process_group()
leave_at_once()
