"""Learn the wiring of a transformer encoder: which two of the earlier blocks each of six blocks reads.

Run it with: python examples/transformer.py (75 seconds on one core)
Result here, mean of 3 seeds: learned 99.5 %, chain 99.5 %, random 98.9 %. All of them solve this task.
"""

import torch
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

WORDS, LENGTH, WIDTH = 12, 16, 32


class Encoder(nn.Module):
    def __init__(self, connectivity, fan_in, seed):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(6)]
        self.blocks = mc.MaskedStack(blocks, fan_in, connectivity=connectivity, seed=seed)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        x = self.blocks(x, src_key_padding_mask=tokens == 0)  # the stack passes the mask to every block
        return self.head(x[:, 0])


def batch(size, generator):
    """Return sentences of 8 to 16 tokens, and whether the first token occurs a second time."""
    tokens = torch.randint(1, WORDS + 1, (size, LENGTH), generator=generator)
    length = torch.randint(8, LENGTH + 1, (size, 1), generator=generator)
    tokens[torch.arange(LENGTH) >= length] = 0
    return tokens, (tokens[:, 1:] == tokens[:, :1]).any(dim=1).long()


def train(connectivity="learned", seed=0, how=mc.Blend(steps=200), mask_lr=0.03, fan_in=2):
    """Learn for 200 steps, freeze, then fine-tune for 100."""
    torch.manual_seed(seed)
    model, data = Encoder(connectivity, fan_in, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=mask_lr))
    mc.attach(optimizer, model, how)
    for step in range(300):
        if step == 200:
            mc.freeze(model)
        tokens, label = batch(64, data)
        F.cross_entropy(model(tokens), label).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, label = batch(2000, data)
    return model, (model.eval()(tokens).argmax(dim=1) == label).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # this network is too small to gain from more
    for connectivity in ("learned", "prev", "random"):
        accuracies = [train(connectivity, seed)[1] for seed in range(3)]
        print(f"{connectivity:8} wiring: {100 * sum(accuracies) / 3:.1f} % of test sentences correct")
