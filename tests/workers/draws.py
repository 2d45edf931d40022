"""Run by torchrun: rank 1 draws once more than rank 0, or has gone astray in another way."""

import sys

import torch
from leaving import leave_at_once

import maskconnect as mc
from maskconnect.core.lookup import masks_of
from maskconnect.training.ranks import join, leave

ranks = join()
torch.manual_seed(0)
network = mc.MaskedStack([torch.nn.Identity() for _ in range(5)], fan_in=2, seed=7)
network(torch.ones(2, 3))
found = ranks.check_draws(network, "step 1")
assert found[0] == found[1]
if ranks.rank == 1:
    masks_of(network)[0].draw()
try:
    ranks.check_draws(network, "step 2")
except mc.MaskConnectError as error:
    print(f"rank {ranks.rank} says: {error}")
else:
    sys.exit("nobody has noticed")
leave(ranks)
leave_at_once()
