"""A run of the Trainer of transformers that is the same on any number of ranks, except for rounding."""

from small import Regression, samples
from transformers import Trainer, TrainingArguments

import maskconnect as mc
from maskconnect.integrations.huggingface import MaskConnectCallback

STEPS, FROZEN_AT, BATCH = 12, 6, 8
HOWS = {"draw": mc.Draw(), "blend": mc.Blend(steps=FROZEN_AT)}


def trainer(folder, how, *, seed=0, ranks=1):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH // ranks,
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=3,
        save_steps=3,
        disable_tqdm=True,
    )
    callback = MaskConnectCallback(mask_lr=0.2, how=how, freeze_at=FROZEN_AT, draw=folder / "wiring.svg")
    return Trainer(model=Regression(seed), args=arguments, train_dataset=samples(), callbacks=[callback])
