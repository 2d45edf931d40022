"""The callback in the real Trainer of transformers."""

import pytest
import torch
from safetensors.torch import load_file
from small import Regression, copied, differences, samples
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import maskconnect as mc
from maskconnect.core.lookup import masks_of
from maskconnect.integrations.huggingface import MaskConnectCallback

STEPS = 20
FROZEN_AT = 10
TOLD = {"masks/entropy", "masks/moved", "masks/changes", "masks/alive", "masks/progress", "masks/temperature"}


def llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=5,
        num_attention_heads=2,
        pad_token_id=0,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return mc.rewire(LlamaForCausalLM(config), "model.layers", fan_in=2)


def sentences():
    tokens = torch.randint(16, (48, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


MODELS = {"own": (lambda seed=0: Regression(seed, dropout=0.1), samples), "llama": (llama, sentences)}
HOWS = {"draw": mc.Draw(), "blend": mc.Blend(steps=FROZEN_AT)}


def trainer(folder, model, data, *callbacks, **options):
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return Trainer(
        model=model, args=TrainingArguments(**arguments | options), train_dataset=data, callbacks=[*callbacks]
    )


@pytest.fixture(scope="module", params=[(m, h) for m in MODELS for h in HOWS], ids="-".join)
def whole(request, tmp_path_factory):
    """A run that was not interrupted, with its checkpoints; and how to start it again from another seed."""
    name, how = request.param
    make, data = MODELS[name]

    def start(folder, seed, **options):
        callback = MaskConnectCallback(mask_lr=0.1, how=HOWS[how], freeze_at=FROZEN_AT)
        return trainer(folder, make(seed), data(), callback, save_strategy="steps", save_steps=5, **options)

    folder = tmp_path_factory.mktemp("whole")
    run = start(folder, seed=0)
    before = copied(run.model)
    run.train()
    return start, run, before, folder


@pytest.mark.parametrize("step", [5, FROZEN_AT, 15], ids=["before the freeze", "at the freeze", "after the freeze"])
def test_a_resumed_run_is_equal_bitwise(whole, step, tmp_path):
    start, run, before, folder = whole
    resumed = start(tmp_path, seed=5)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert differences(resumed.model.state_dict(), run.model.state_dict()) == []
    assert all(masks.is_frozen for masks in masks_of(resumed.model))
    changed = differences(before, run.model.state_dict())
    for part in ("masks.real", "masks.binary", "masks.frozen", "masks.progress", "weight"):
        assert any(name.endswith(part) for name in changed), part
    assert resumed.state.log_history[:-1] == run.state.log_history[:-1]  # the last is about times


def test_a_checkpoint_has_all_that_the_masks_are(whole):
    _, run, _, folder = whole
    saved = load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors")
    state = {name: value for name, value in run.model.state_dict().items() if ".masks." in name}
    assert {name.rpartition(".")[2] for name in state} >= {"real", "frozen", "progress", "_extra_state"}
    assert differences(state, {name: saved[name] for name in state}) == []


def test_masks_learn_as_in_a_loop_with_param_groups(tmp_path):
    how, rate, mask_rate = mc.Blend(steps=STEPS), 0.01, 0.2
    model = Regression()
    callback = MaskConnectCallback(mask_lr=mask_rate, how=how)
    options = {"learning_rate": rate, "max_grad_norm": 0.0, "warmup_steps": 5, "train_sampling_strategy": "sequential"}
    trainer(tmp_path, model, samples(), callback, **options).train()

    loop = Regression()
    optimizer = torch.optim.AdamW(mc.param_groups(loop, lr=rate, mask_lr=mask_rate), weight_decay=0.0)
    mc.attach(optimizer, loop, how)
    schedule = LambdaLR(optimizer, lambda step: step / 5 if step < 5 else (STEPS - step) / (STEPS - 5))
    data = samples()
    for step in range(STEPS):
        rows = [data[(4 * step + k) % len(data)] for k in range(4)]
        optimizer.zero_grad()
        loop(*(torch.stack([row[name] for row in rows]) for name in ("x", "labels")))["loss"].backward()
        optimizer.step()
        schedule.step()
    mc.freeze(loop)
    for name, value in loop.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=lambda m, name=name: f"{name}: {m}")
    assert not torch.equal(loop.stack.masks.real, Regression().stack.masks.real)


def test_the_log_has_the_metrics_of_the_masks_and_the_wiring_is_drawn(tmp_path):
    callback = MaskConnectCallback(mask_lr=0.1, how=mc.Blend(steps=FROZEN_AT), draw=tmp_path / "new" / "wiring.svg")
    run = trainer(tmp_path, Regression(), samples(), callback)
    run.train()
    *lines, last = run.state.log_history
    assert [line["masks/progress"] for line in lines] == [5, 10, 10, 10]
    assert [line["masks/frozen"] for line in lines] == [0, 1, 1, 1]
    assert all(line.keys() >= TOLD for line in lines)
    assert not last.keys() & TOLD  # the summary of the run
    assert "learned, K=2" in (tmp_path / "new" / "wiring.svg").read_text()


def test_added_to_a_trainer_the_metrics_reach_its_loggers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        run = trainer(tmp_path, Regression(), samples(), report_to="tensorboard")
        MaskConnectCallback(mask_lr=0.1).add_to(run)
        run.train()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert {f"train/{name}" for name in TOLD} <= set(board.Tags()["scalars"])
    assert [event.value for event in board.Scalars("train/masks/progress")] == [5, 10, 15, 20]


def test_loggers_that_do_not_get_the_metrics_are_a_warning(tmp_path):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        run = trainer(tmp_path, Regression(), samples(), MaskConnectCallback(mask_lr=0.1), report_to="tensorboard")
        with pytest.warns(UserWarning, match=r"do not reach tensorboard.*callback\.add_to\(trainer\)"):
            run.train()


def test_masks_are_frozen_after_an_epoch_and_steps_count_whole_batches(tmp_path):
    model = Regression()
    callback = MaskConnectCallback(mask_lr=0.1, freeze_at_epoch=2)  # of 48 / (4 * 2) = 6 steps each
    run = trainer(tmp_path, model, samples(), callback, gradient_accumulation_steps=2)
    run.train()
    assert model.stack.masks.steps_taken == 12
    assert model.stack.masks.is_frozen


def test_masks_without_an_end_keep_learning(tmp_path):
    model = Regression()
    trainer(tmp_path, model, samples(), MaskConnectCallback(mask_lr=0.1)).train()
    assert model.stack.masks.steps_taken == STEPS
    assert not model.stack.masks.is_frozen


def test_masks_that_end_early_are_a_warning(tmp_path):
    callback = MaskConnectCallback(mask_lr=0.1, how=mc.Blend(steps=15), freeze_at=10)
    with pytest.warns(UserWarning, match=r"frozen after 10 of the 15 steps of mc\.Blend"):
        trainer(tmp_path, Regression(), samples(), callback).train()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"freeze_at": 5, "freeze_at_epoch": 1}, "leave one out"),
        ({"freeze_at": -1}, "freeze_at is -1"),
        ({"freeze_at_epoch": 0.5}, "freeze_at_epoch is 0.5; it must be an integer"),
        ({"draw": "wiring.jpg"}, r"draw is 'wiring.jpg'.*\.svg or \.png"),
    ],
)
def test_wrong_arguments_are_errors_before_training(wrong, said):
    with pytest.raises(mc.ConfigError, match=said):
        MaskConnectCallback(mask_lr=0.1, **wrong)


def test_a_model_without_a_stack_is_an_error(tmp_path):
    class Plain(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": (super().forward(x) - labels).square().mean()}

    with pytest.raises(mc.ConfigError, match="there is no MaskedStack"):
        trainer(tmp_path, Plain(6, 6), samples(), MaskConnectCallback(mask_lr=0.1)).train()
