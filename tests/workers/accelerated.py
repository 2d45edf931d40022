"""Run by torchrun: the loop of a user of Hugging Face accelerate."""

import torch
from accelerate import Accelerator
from leaving import leave_at_once
from several_gpus import batch, build
from torch.nn import functional as F

import maskconnect as mc

accelerator = Accelerator(cpu=True)
model = build()
optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.5), momentum=0.9)
mc.attach(optimizer, model)
wrapped, prepared = accelerator.prepare(model, optimizer)
for step in range(60):
    if step == 40:
        mc.freeze(accelerator.unwrap_model(wrapped))
        wrapped = accelerator.prepare(accelerator.unwrap_model(wrapped))
    x, y = batch(step, accelerator.process_index, accelerator.num_processes)
    prepared.zero_grad()
    accelerator.backward(F.cross_entropy(wrapped(x), y))
    prepared.step()
real = torch.cat([masks.detach().flatten() for name, masks in model.named_parameters() if name.endswith("real")])
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
both = accelerator.gather(torch.stack([real.sum(), weights.sum(), weights.abs().max()])[None])
assert torch.equal(both[0], both[-1]), "the ranks have gone apart"
if accelerator.is_main_process:
    print(f"{accelerator.num_processes} ranks: block 5 reads {mc.wiring_of(model)[5]}")
accelerator.end_training()
leave_at_once()
