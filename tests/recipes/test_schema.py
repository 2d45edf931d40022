"""The limits of each field, by settings over a recipe that is right."""

import pytest

import maskconnect as mc
from maskconnect.models import ResNetSpec, ResNeXtSpec
from maskconnect.recipes import load

RESNET, RESNEXT = "paper/cifar100-resnet38-learned", "paper/cifar10-resnext20-4-8-learned"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed=-1", "seed is -1; it must be at least 0 and below 2**63."),
        (f"seed={2**63}", f"seed is {2**63}; it must be at least 0"),
        ("data.validation=-1", "data.validation is -1; it must be 0 or more."),
        ("data.shrink=0", "data.shrink is 0; it must be 1 or more."),
        ("data.train_images=0", "data.train_images is 0; it must be 1 or more."),
        ("data.test_images=0", "data.test_images is 0; it must be 1 or more."),
        ("model.architecture=resnest", "model.architecture is 'resnest'; it must be one of resnet, resnext, mixed."),
        ("model.architecture=resnext", "model.width is missing; a resnext needs it."),
        ("model.depth=10004", "model.depth is 10004; it must be at most 10,000."),
        ("model.cardinality=4", "model.cardinality is 4; only a resnext has this field. Remove it."),
        ("model.norm=sum", "model.norm is 'sum'; only a resnext has this field. Remove it."),
        ("model.stem=cfar", "model.stem is 'cfar'; it must be one of cifar, mini, imagenet."),
        (
            "model.aggregation=max",
            "model.aggregation is 'max'; it must be one of mean, residual, stream, sum, scaled.",
        ),
        ("model.mask_init=0", "model.mask_init is 0.0; it must be 'uniform', or a number above 0"),
        ("training.batch_size=0", "training.batch_size is 0; it must be 1 or more."),
        ("training.accumulate=0", "training.accumulate is 0; it must be 1 or more."),
        ("training.accumulate=129", "training.accumulate is 129; it must be at most training.batch_size, 128."),
        ("training.evaluate_every=-1", "training.evaluate_every is -1; it must be 0 or more."),
        ("training.reestimate=-1", "training.reestimate is -1; it must be 0 or more."),
        ("training.norm_group=1", "training.norm_group is 1; it must be 2 or more."),
        ("training.weight_decay=-1", "training.weight_decay is -1.0; it must be 0 or more, and finite."),
        ("training.momentum=1", "training.momentum is 1.0; it must be at least 0 and below 1."),
        ("training.momentum=-0.1", "training.momentum is -0.1; it must be at least 0 and below 1."),
        (
            "training={momentum = 0, nesterov = true}",
            "training.nesterov is true and training.momentum is 0; set a momentum above 0.",
        ),
        ("phase.fine.epochs=0", "phase.fine.epochs is 0; it must be 1 or more."),
        ("phase.fine.lr=inf", "phase.fine.lr is inf; it must be 0 or more, and finite."),
        ("phase.fine.lr=-1", "phase.fine.lr is -1.0; it must be 0 or more, and finite."),
        ("phase.learn.mask_lr=-1", "phase.learn.mask_lr is -1.0; it must be 0 or more, and finite."),
        (
            "phase.fine.mask_lr=0.1",
            "a phase with mask_lr above 0 follows one with mask_lr 0; frozen masks stay frozen.",
        ),
        ("phase.learn.mask_lr=0", "model.connectivity is 'learned', but phase.learn.mask_lr is 0; set it"),
        ("learning.way=mix", "learning.way is 'mix'; it must be one of draw, blend."),
        ("learning.temperature=0.5", "learning.temperature is 0.5; it must be 1 (draw) or 0 (read the top-K)."),
        (
            "learning.uniform_floor=0.1",
            "learning.uniform_floor is 0.1; learning.way='draw' does not have this field",
        ),
        (
            "learning={way = 'blend', cool = true}",
            "learning.cool is True; learning.way='blend' does not have this field",
        ),
        (
            "learning={way = 'blend', uniform_floor = 1.0}",
            "learning.uniform_floor is 1.0; it must be at least 0 and below 1.",
        ),
        ("learning.keep=0.5", "learning.keep is 0.5; learning.way='draw' does not have this field"),
        ("learning={way = 'blend', keep = 0.0}", "learning.keep is 0.0; it must be above 0 and at most 1."),
        ("learning.gradient=flat", "learning.gradient is 'flat'; it must be one of plain, direction, rms, none."),
        ("learning.credit=fooo", "learning.credit is 'fooo'; it must be one of whole, new."),
        ("phase.learn.blend=true", 'phase.learn.blend is now learning.way (way = "blend")'),
        ("phase.learn.even=0.1", "phase.learn.even is now learning.uniform_floor"),
        ("phase.learn.cool_to=0.0", "phase.learn.cool_to is now learning.cool (true or false)"),
        ("phase.learn.temperature=0.0", "phase.learn.temperature is now learning.temperature"),
        ("training.mask_gradient=none", "training.mask_gradient is now learning.gradient"),
        ("model.mask_credit=new", "model.mask_credit is now learning.credit"),
        (
            "training.mask_momentum=0.9",
            "training.mask_momentum was removed: masks have no momentum. Remove it from the recipe.",
        ),
        ("phase.fine.name=learn", "the phases are named learn, freeze, learn, finer; give each a different name."),
    ],
)
def test_a_value_out_of_bounds_is_refused(setting, said):
    with pytest.raises(mc.ConfigError) as caught:
        load(RESNET, [setting])
    assert str(caught.value).startswith(f"{RESNET}: {said}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.width=0", "model.width is 0; it must be 1 or more."),
        (
            "learning.credit=new",
            "learning.credit is 'new', which resnext does not support; set it to 'whole'.",
        ),
        ("model.norm=brnch", "model.norm is 'brnch'; it must be one of branch, sum."),
        ("model={norm = 'sum', aggregation = 'mean'}", "model.norm='sum' normalizes the sum of residuals"),
        ("model.connectivity=[[[]]]", "model.connectivity has 1 rows; the stack has 6 layers."),
        ("model.architecture=resnet", "model.width is 4; only a resnext or mixed has this field. Remove it."),
    ],
)
def test_a_branch_out_of_bounds_is_refused(setting, said):
    with pytest.raises(mc.ConfigError) as caught:
        load(RESNEXT, [setting])
    assert str(caught.value).startswith(f"{RESNEXT}: {said}")


@pytest.mark.parametrize(
    "setting",
    [
        *("seed=0", f"seed={2**63 - 1}", "data.validation=0", "data.shrink=1", "data.train_images=1"),
        *("model.fan_in=1", "model.fan_in=99", "model.mask_init=1", "model.connectivity=full", "model.aggregation=sum"),
        *("training.batch_size=1", "training.accumulate=128", "training.norm_group=2", "training.weight_decay=0"),
        *("training.momentum=0", "training.momentum=0.99", "training.nesterov=true", "training.reestimate=0"),
        *("phase.fine.epochs=1", "phase.fine.lr=0", "phase.freeze.mask_lr=0.1", "data.labels=coarse"),
    ],
)
def test_the_last_value_within_bounds_is_taken(setting):
    assert load(RESNET, [setting]).name == RESNET


def test_fixed_connectivity_needs_no_rate_for_masks():
    recipe = load(RESNET, ["model.connectivity=prev", "phase.learn.mask_lr=0"])
    assert not recipe.learns
    assert load(RESNET).learns


def test_epochs_of_all_phases_are_added_up():
    assert load(RESNET, ["phase.learn.epochs=1", "phase.finer.epochs=5"]).epochs == 1 + 30 + 10 + 5


def test_the_spec_of_a_network_has_what_the_recipe_says_and_the_defaults_of_its_family():
    resnet = load(RESNET, ["model.aggregation=sum", "model.mask_init=0.5"]).model
    resnext = load(RESNEXT, ["model.norm=sum"]).model
    common = {"num_classes": 7, "in_channels": 1, "seed": 5}
    assert resnet.spec(**common) == ResNetSpec(depth=38, fan_in=10, aggregation="sum", mask_init=0.5, **common)
    assert resnext.spec(**common) == ResNeXtSpec(depth=20, width=4, cardinality=8, fan_in=4, norm="sum", **common)
    assert load(RESNEXT).model.spec(**common).norm == "branch"


@pytest.mark.parametrize("setting", ["learning.cool=true", "learning.temperature=0.0"])
def test_draws_without_learning_need_draws(setting):
    with pytest.raises(mc.ConfigError, match="a control that draws from uniform masks"):
        load(RESNET, ["learning.gradient=none", setting])
    with pytest.raises(mc.ConfigError, match="it cannot blend them"):
        load("quick/cifar100-strong", ["learning.gradient=none"])


NEXT = ("model.architecture=resnext", "model.depth=29", "model.width=4", "model.cardinality=8")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("field", ["depth", "cardinality", "width", "fan_in"])
@pytest.mark.parametrize("number", [10**19, 2**64, 10**4000], ids=["10**19", "2**64", "10**4000"])
def test_a_network_of_any_size_is_refused_at_once(field, number):
    with pytest.raises(mc.ConfigError, match=rf"model\.{field} is 1.*; "):
        load("quick/digits", [*NEXT, f"model.{field}={number}"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([*NEXT, "model.cardinality=5000"], "model.cardinality is 5000; it must be at most 4,096."),
        ([*NEXT, "model.cardinality=900"], "model.depth 29 makes 8,100 modules"),
        (["model.depth=4004"], "could learn 2,001,000 connections; the limits are 4,096 and 2,000,000."),
    ],
)
def test_sizes_that_are_too_large_together_are_refused_at_once(settings, said):
    with pytest.raises(mc.ConfigError) as error:
        load("quick/digits", settings)
    assert said in str(error.value)


COUNTS = ("training.batch_size", "training.reestimate", "training.norm_group", "data.validation", "data.shrink")
SIDES = (
    "augmentation.size",
    "augmentation.pad",
    "augmentation.test_shorter",
    "phase.learn.epochs",
    "data.train_images",
)


@pytest.mark.parametrize("field", [*COUNTS, *SIDES])
def test_every_count_has_an_upper_limit(field):
    with pytest.raises(mc.ConfigError, match="it must be at most"):
        load("quick/digits", [f"{field}={10**19}"])


def test_a_budget_of_a_recipe_is_that_of_its_blend():
    assert load("quick/cifar10-strong", ["learning.keep=0.75"]).learning.how(9).keep == 0.75
    assert load("quick/cifar10-strong").learning.how(9).keep == 1
