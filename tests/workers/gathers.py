"""Run by torchrun: what goes between ranks arrives whole and in order; norms over all ranks are norms of all images."""

import pytest
import torch
from leaving import leave_at_once
from torch import nn

import maskconnect as mc
from maskconnect.models.synced import synchronize_norms_
from maskconnect.training.ranks import interleaved, join, leave

ranks = join()
rows = torch.arange(7.0)[:, None] * torch.ones(3)
assert torch.equal(interleaved(ranks.gather(rows[ranks.rank :: ranks.count])), rows)
assert interleaved(ranks.gather(rows[:0])).shape == (0, 3)
assert ranks.sum(ranks.rank, 1.0) == [1.0, 2.0]
state = {"weights": torch.arange(5), "step": 3} if ranks.first else None
assert ranks.from_first(state)["weights"].tolist() == [0, 1, 2, 3, 4]


def mistake():
    raise mc.ConfigError("no such thing")


with pytest.raises(mc.MaskConnectError, match="no such thing") as caught:
    ranks.on_first(mistake)
assert (caught.type is mc.ConfigError) == ranks.first

torch.manual_seed(0)
x = 3 * torch.randn(5, 4, 3, 3).double() + 2
dy = torch.randn_like(x)
plain, synced = (nn.BatchNorm2d(4).double() for _ in range(2))
nn.init.normal_(plain.weight)
nn.init.normal_(plain.bias)
synced.load_state_dict(plain.state_dict())
synchronize_norms_(synced)
whole, own = x.clone().requires_grad_(), x[ranks.rank :: ranks.count].clone().requires_grad_()  # 3 and 2 images
plain(whole).backward(dy)
synced(own).backward(dy[ranks.rank :: ranks.count])
torch.testing.assert_close(own.grad, whole.grad[ranks.rank :: ranks.count])
for one, other in zip(plain.parameters(), synced.parameters(), strict=True):
    grad = other.grad.clone()
    torch.distributed.all_reduce(grad)
    torch.testing.assert_close(grad, one.grad)
for one, other in zip(plain.buffers(), synced.buffers(), strict=True):
    torch.testing.assert_close(other, one)
torch.testing.assert_close(synced.eval()(x), plain.eval()(x))
if ranks.first:
    print("all is well")
leave(ranks)
leave_at_once()
