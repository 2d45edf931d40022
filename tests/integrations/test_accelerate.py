"""Your own loop with Hugging Face accelerate; on two processes it is in tests/training/test_ranks.py."""

import pytest
import torch
from accelerate import Accelerator
from small import Regression, copied, differences, samples

import maskconnect as mc

STEPS, FROZEN_AT = 12, 6
DATA = samples(4 * STEPS)


def prepared(accelerator, seed):
    model = Regression(seed)
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=0.01, mask_lr=0.2))
    return model, *accelerator.prepare(model, optimizer)


def train(accelerator, model, wrapped, optimizer, steps):
    for step in steps:
        if step == FROZEN_AT:
            mc.freeze(model)
        rows = DATA[4 * step : 4 * step + 4]
        optimizer.zero_grad()
        loss = wrapped(*(torch.stack([row[name] for row in rows]) for name in ("x", "labels")))["loss"]
        accelerator.backward(loss)
        optimizer.step()


@pytest.mark.parametrize("how", [mc.Draw(), mc.Blend(steps=FROZEN_AT)], ids=["draw", "blend"])
@pytest.mark.parametrize("cut", [3, FROZEN_AT + 2], ids=["before the freeze", "after the freeze"])
@pytest.mark.parametrize("attached", [True, False], ids=["attached before loading", "attached after loading"])
def test_a_loop_that_resumes_from_a_saved_state_is_equal_bitwise(how, cut, attached, tmp_path):
    accelerator = Accelerator(cpu=True)
    whole = prepared(accelerator, seed=0)
    mc.attach(whole[2].optimizer, whole[0], how)
    train(accelerator, *whole, range(cut))
    accelerator.save_state(str(tmp_path))
    train(accelerator, *whole, range(cut, STEPS))

    accelerator.free_memory()
    resumed = prepared(accelerator, seed=5)
    if attached:
        mc.attach(resumed[2].optimizer, resumed[0], how)
    accelerator.load_state(str(tmp_path))
    if not attached:
        mc.attach(resumed[2].optimizer, resumed[0], how)
    train(accelerator, *resumed, range(cut, STEPS))
    assert differences(resumed[0].state_dict(), whole[0].state_dict()) == []
    assert "stack.masks.real" in differences(copied(Regression()), whole[0].state_dict())
