"""A frozen model does not run blocks that nothing reads, unless the model itself uses what they return."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from networks import EncoderBlock
from torch import nn
from torch.utils.checkpoint import checkpoint

import maskconnect as mc
from maskconnect.retrofit.stand_in import form_of, stand_in

WIRING = [[], [0], [0], [2], [2], [2, 4]]  # blocks 1 and 3 are read by nothing
UNREAD = {1, 3}


class Block(EncoderBlock):
    """A block that counts its calls."""

    calls = 0

    def forward(self, x, *args, cache=None, **kwargs):
        self.calls += 1
        y = super().forward(x)
        return y if self.form is None else self.form(y, cache)

    form = None


class Model(nn.Module):
    """What models do with the outputs of their blocks."""

    def __init__(self, way="plain"):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.way, self.between = way, nn.Linear(16, 16)

    def forward(self, x, **kwargs):
        collected, total = [], 0
        for block in self.blocks:
            if self.way == "named":
                x = block(x=x)
            elif self.way in ("tuple", "cache"):
                x = block(x, cache=kwargs.get("cache"))[0]
            elif self.way == "passed on":
                x, bias = block(x, cache=kwargs.setdefault("bias", torch.ones(3)))
                kwargs["bias"] = bias
            elif self.way == "residual":
                x = x + block(x)
            elif self.way == "in place":
                old, x = x, block(x)
                x += old
            elif self.way == "between":
                x = self.between(block(x))
            elif self.way == "decides":
                x = block(x)
                if x.sum() > 1e9:
                    x = 2 * x
            else:
                x = block(x)
            if self.way in ("collected", "collected and used"):
                collected.append(x)
            if self.way == "total":
                total = total + x
        if self.way == "collected":
            return x, collected
        if self.way == "collected and used":
            return x + sum(collected)
        if self.way == "total":
            return x, total
        return x


def rewired(way, form=None):
    model = Model(way).eval()
    for block in model.blocks:
        block.form = form
    return mc.rewire(model, "blocks", connectivity=WIRING)


def calls(model):
    return [block.calls for block in model.blocks.flat()]


def leaves(y):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(y) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["plain", "named", "between", "tuple"])
def test_blocks_that_nothing_reads_do_not_run(way, training):
    model, x = rewired(way, (lambda y, _: (y, None)) if way == "tuple" else None), torch.randn(2, 3, 16)
    model.train(training)
    wanted = copy.deepcopy(model)(x)
    for _ in range(4):
        assert torch.equal(model(x), wanted)
    counted = calls(model)
    assert [counted[k] for k in range(6) if k not in UNREAD] == [4] * 4
    assert [counted[k] for k in UNREAD] == [1, 1]  # one pass showed that nobody uses their outputs


@pytest.mark.parametrize("way", ["collected", "collected and used", "total", "residual", "in place", "decides"])
@pytest.mark.parametrize("hold", [True, False])
def test_a_block_whose_output_the_model_itself_uses_always_runs(way, hold):
    model, x = rewired(way), torch.randn(2, 3, 16)
    wanted, held = [leaf.clone() for leaf in leaves(copy.deepcopy(model)(x))], []
    for _ in range(3):
        found = model(x)
        assert all(torch.equal(a, b) for a, b in zip(leaves(found), wanted, strict=True))
        held.append(found if hold else None)
        del found
    assert min(calls(model)) == 3


def test_what_a_block_returns_of_its_arguments_is_passed_on():
    model, x = rewired("passed on", lambda y, cache: (y, cache)), torch.randn(2, 3, 16)
    wanted = copy.deepcopy(model)(x)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    assert [calls(model)[k] for k in UNREAD] == [1, 1]


def test_a_cache_gets_no_entries_from_blocks_that_do_not_run():
    model, x = rewired("cache", lambda y, cache: (y, cache.append(1) or cache)), torch.randn(2, 3, 16)
    sizes = []
    for _ in range(3):
        cache = []
        model(x, cache=cache)
        sizes.append(len(cache))
    assert sizes == [6, 4, 4]


def test_an_output_that_cannot_be_described_keeps_its_block():
    class Odd:
        def __init__(self, y):
            self.y = y

        def __getitem__(self, _):
            return self.y

    model = rewired("tuple", lambda y, _: Odd(y))
    for _ in range(3):
        model(torch.randn(2, 3, 16))
    assert calls(model) == [3] * 6


def test_a_block_with_a_forward_hook_runs_while_the_hook_is_there():
    model, x, seen = rewired("plain"), torch.randn(2, 3, 16), []
    wanted = [model(x) for _ in range(2)]
    handle = model.blocks.flat()[3].register_forward_hook(lambda *args: seen.append(args[2]))
    for _ in range(3):
        assert torch.equal(model(x), wanted[0])
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[2])
    handle.remove()
    before = calls(model)
    model(x)
    assert [after - count for after, count in zip(calls(model), before, strict=True)] == [1, 0, 1, 0, 1, 1]


def test_the_weights_of_blocks_that_do_not_run_get_a_gradient_of_zero():
    model = rewired("plain").train()
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 3, 16)).sum().backward()
    for number, block in enumerate(model.blocks.flat()):
        assert all((p.grad == 0).all() for p in block.parameters()) == (number in UNREAD)


def test_while_masks_are_learned_every_block_runs():
    model = mc.rewire(Model(), "blocks", fan_in=1, mask_init="uniform")
    for _ in range(3):
        model(torch.randn(2, 3, 16))
    assert calls(model) == [3] * 6


def test_where_shapes_change_what_is_passed_on_has_the_shape_of_the_output():
    layers = [nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 1)]
    model = nn.Sequential(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)))
    mc.rewire(model, "0", connectivity=[[], [0], [0], [2]])  # block 2 reads block 0, in the shape of block 1
    seen, forward = [], layers[1].forward
    layers[1].forward = lambda x: seen.append(1) or forward(x)
    for side in (8, 8, 5, 5, 6, 8):
        x = torch.randn(2, 2, side, side)
        y = torch.cat([layers[0](x)[:, :, ::2, ::2], torch.zeros(2, 2, -(-side // 2), -(-side // 2))], dim=1)
        torch.testing.assert_close(model(x), model[0].flat()[3](layers[2](y)))
    assert seen == [1, 1, 1]  # once for every size


def like(model, way):
    """The same model, in which nothing has been judged as yet."""
    fresh = rewired(way)
    fresh.load_state_dict(model.state_dict())
    return fresh.train(model.training)


def test_a_use_that_comes_later_is_an_error_once_and_then_right():
    model, x = rewired("plain"), torch.randn(2, 3, 16)
    for _ in range(2):
        model(x)
    assert [calls(model)[k] for k in UNREAD] == [1, 1]
    model.way = "collected and used"
    for number in sorted(UNREAD):
        with pytest.raises(mc.ConnectivityError, match=f"block {number} was left out, because the model did not use"):
            model(x)
    assert torch.equal(model(x), like(model, "collected and used")(x))


def test_hidden_states_of_which_the_first_were_dropped_unread_are_right():
    model, x = rewired("collected"), torch.randn(2, 3, 16)
    for _ in range(3):
        model(x)  # nobody looks at what was collected
    for found, wanted in zip(model(x)[1], like(model, "collected")(x)[1], strict=True):
        assert torch.equal(found + 0, wanted + 0)


def test_what_is_used_in_train_mode_only_is_judged_in_train_mode():
    model, x = rewired("plain"), torch.randn(2, 3, 16)
    for _ in range(2):
        model(x)
    model.way = "collected and used"
    fresh = like(model.train(), "collected and used")
    for _ in range(2):
        assert torch.equal(model(x), fresh(x))


class Listing(Model):
    def forward(self, x):
        self.seen = []
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.flatten()[:1].tolist())
        return x


def test_a_list_of_numbers_is_a_use():
    model, x, seen = mc.rewire(Listing().eval(), "blocks", connectivity=WIRING), torch.randn(2, 3, 16), []
    for _ in range(3):
        model(x)
        seen.append(model.seen)
    assert seen[0] == seen[1] == seen[2]


def test_a_use_that_cannot_be_seen_is_not_silent():
    class Hidden(Model):
        def forward(self, x):
            total = 0.0
            for block in self.blocks:
                x = block(x)
                total = total + torch.tensor(x.mean())
            return x + total

    model, x = mc.rewire(Hidden().eval(), "blocks", connectivity=WIRING), torch.randn(2, 3, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, that torch.tensor copies
        found = [model(x) for _ in range(3)]
    assert found[0].isfinite().all()
    assert found[2].isnan().all()


def test_a_block_that_leaves_a_tensor_behind_always_runs():
    model = rewired("plain")
    for block in model.blocks.flat():
        block.form = lambda y, _, block=block: setattr(block, "loss", y.mean()) or y
    for _ in range(3):
        model(torch.randn(2, 3, 16))
    assert calls(model) == [3] * 6


def test_threads_do_not_mix_their_passes():
    model, inputs = rewired("plain"), [torch.randn(2, 3, 16) for _ in range(24)]
    wanted = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for found, y in zip(pool.map(model, inputs), wanted, strict=True):
            torch.testing.assert_close(found, y)


def while_another_thread_runs(model, first, x, meanwhile):
    """Call `meanwhile` while another thread is in block `first` of model(x); return the output of that thread."""
    entered, go = threading.Event(), threading.Event()

    def pause(*_):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go.wait(60)

    handle = first.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(model, x)
        try:
            assert entered.wait(60)
            meanwhile()
        finally:
            go.set()
            handle.remove()
    return found.result()


def test_a_pass_is_not_disturbed_by_another_thread_with_inputs_of_another_size():
    convs = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]
    model = mc.rewire(nn.Sequential(nn.Sequential(*convs)), "0", connectivity=[[], [0], [1], [1]]).eval()
    small, big = torch.randn(1, 2, 8, 8), torch.randn(1, 2, 16, 16)
    for _ in range(3):
        wanted = model(small)  # block 2 is left out from the second pass on
    assert torch.equal(while_another_thread_runs(model, convs[0], small, lambda: model(big)), wanted)


def test_a_pass_is_not_disturbed_by_another_thread_that_uses_what_it_leaves_out():
    model, x = rewired("plain"), torch.randn(2, 3, 16)
    for _ in range(3):
        wanted = model(x)

    def use():
        model.way = "collected and used"
        with pytest.raises(mc.ConnectivityError, match="block 1 was left out"):
            model(x)
        model.way = "plain"

    assert torch.equal(while_another_thread_runs(model, model.blocks.flat()[0], x, use), wanted)


def test_strides_are_found_whatever_the_size():
    for side in (57, 56, 5, 8):
        form = form_of(torch.zeros(1, 4, -(-side // 2), -(-side // 2)), torch.zeros(1, 2, side, side), {})
        for other in (1, 7, 8, 56, 57):
            shape = stand_in(form, torch.zeros(3, 2, other, other), {}).shape
            assert shape == (3, 4, -(-other // 2), -(-other // 2))


def test_another_type_of_numbers_does_not_hide_the_shape():
    x = torch.zeros(2, 3, 16)
    assert stand_in(form_of(x.double(), x, {}), torch.zeros(2, 5, 16), {}).shape == (2, 5, 16)


def test_a_part_of_a_list_runs_and_data_parallel_is_refused():
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    model, x = mc.rewire(nn.Sequential(*blocks), "", connectivity=[[], [0], [0, 1], [2]]), torch.randn(2, 4)
    y0 = blocks[0](x)
    torch.testing.assert_close(model[:3](x), blocks[2]((y0 + blocks[1](y0)) / 2))
    with pytest.raises(mc.ConnectivityError, match="use DistributedDataParallel"):
        model._replicate_for_data_parallel()


class Checkpointed(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.blocks, self.on = nn.ModuleList(EncoderBlock() for _ in range(5)), on

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.on else block(x)
        return x


@pytest.mark.parametrize(
    "wiring", [[[], [0], [0], [0], [3]], [[], [0], [1], [1], [3]], [[], [0], [0], [1], [1]], [[], [0], [0], [2], [2]]]
)
@pytest.mark.parametrize("training", [True, False])
def test_checkpointing_in_the_first_frozen_steps(wiring, training):
    models = [Checkpointed(on).train(training) for on in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        mc.rewire(model, "blocks", connectivity=wiring)
    for _ in range(3):
        x = torch.randn(2, 3, 16, requires_grad=True)
        for model in models:
            model.zero_grad()
            model(x).square().sum().backward()
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("aggregation", ["mean", "residual"])
def test_checkpointing_around_the_whole_model_in_the_first_frozen_steps(aggregation, reentrant):
    models = [Model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        mc.rewire(model, "blocks", connectivity=[[], [0], [0], [0, 2], [0, 2], [2, 4]], aggregation=aggregation)
    for _ in range(3):
        x = torch.randn(2, 3, 16, requires_grad=True)
        for model in models:
            model.zero_grad()
        checkpoint(models[0], x, use_reentrant=reentrant).square().sum().backward()
        models[1](x).square().sum().backward()
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    assert [calls(models[0])[k] for k in UNREAD] == [2, 2]  # in the first pass and its repetition


def test_a_repeated_pass_does_not_decide_that_an_output_is_unused():
    model, x = rewired("collected").train(), torch.randn(2, 3, 16, requires_grad=True)
    for _ in range(3):
        y = checkpoint(model, x, use_reentrant=False)[0]  # what was collected is gone before the pass is repeated
        y.sum().backward()
    assert calls(model) == [6] * 6


@pytest.mark.parametrize("how", ["learned", "fixed", "blended"])
def test_checkpointing_around_single_blocks(how):
    models = [Checkpointed(on) for on in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        if how == "fixed":
            mc.rewire(model, "blocks", connectivity=[[], [0], [0], [1, 2], [0, 3]])
        else:
            mc.rewire(model, "blocks", fan_in=2, mask_init="uniform")
            optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1))
            mc.attach(optimizer, model, mc.Blend(steps=9) if how == "blended" else None)
    x = torch.randn(2, 3, 16, requires_grad=True)
    for _ in range(2):  # two passes in flight
        losses = [(model(x).square().sum() + model(x + 1).sum()) for model in models]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_checkpointing_around_single_blocks_does_not_keep_activations():
    import gc
    import weakref

    model, alive = mc.rewire(Checkpointed(True), "blocks", fan_in=2, mask_init="uniform"), []
    model.blocks.flat()[2].register_forward_hook(lambda *args: alive.append(weakref.ref(args[2])))
    model(torch.randn(2, 3, 16)).sum().backward()
    gc.collect()
    assert all(handle() is None for handle in alive)


@pytest.mark.parametrize("aggregation", ["mean", "residual"])
def test_outside_of_training_an_output_lives_until_its_last_reader_has_read_it(aggregation):
    import weakref

    model, outputs, alive = Model().eval(), [], []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: outputs.append(weakref.ref(args[2])))
    model.blocks[5].register_forward_pre_hook(lambda *_: alive.extend(y() is not None for y in outputs))
    mc.rewire(model, "blocks", connectivity=[[], [0], [0, 1], [1, 2], [0, 3], [3, 4]], aggregation=aggregation)
    wanted = model(torch.ones(1, 3, 16))
    alive.clear(), outputs.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 3, 16)), wanted)
    assert alive == [False, False, False, False, True]  # block 5 has read 3 and 4; the model holds 4


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.dropped = nn.ModuleList(EncoderBlock() for _ in range(5)), set()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number not in self.dropped:
                x = block(x)
        return x


@pytest.mark.parametrize("dropped", [{2}, {0}, {0, 1}, {4}, {1, 2, 3}])
def test_a_block_that_the_model_leaves_out_passes_on_what_the_one_before_did(dropped):
    model, x = LayerDrop(), torch.randn(2, 3, 16)
    blocks, wiring = list(model.blocks), [[], [0], [0, 1], [1, 2], [2, 3]]
    model.dropped, outs = dropped, []
    for number, block in enumerate(blocks):
        before = outs[-1] if outs else x
        read = sum(outs[k] for k in wiring[number]) / 2 if number > 1 else before
        outs.append(before if number in dropped else block(read))
    mc.rewire(model, "blocks", connectivity=wiring)
    torch.testing.assert_close(model(x), outs[-1])
    model.dropped = set()
    model(x)
    model.eval().dropped = {2}
    with pytest.raises(mc.ConnectivityError, match="out of order"):
        model(x)


LEFT_OUT = [({4}, {0}), ({2, 3, 4}, {0, 1, 2}), ({3, 4}, {0, 1, 2, 3}), ({1, 2, 3, 4}, {0, 1})]


@pytest.mark.parametrize(("before", "dropped"), LEFT_OUT)
def test_a_pass_that_ended_early_is_not_continued_by_one_that_begins_late(before, dropped):
    model, x = mc.rewire(LayerDrop(), "blocks", connectivity=[[], [0], [0, 1], [0, 2], [0, 3]]), torch.randn(2, 3, 16)
    model.dropped = dropped
    wanted = copy.deepcopy(model)(x)
    model.dropped = before
    model(torch.randn(2, 3, 16))
    model.dropped = dropped
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("way", ["list", "two loops"])
def test_a_loop_over_the_list_in_the_middle_of_a_pass_begins_no_other(way):
    class Odd(LayerDrop):
        def forward(self, x):
            if way == "list":
                for number in range(5):
                    x = 2 * list(self.blocks)[number](x)
            else:
                for part in (0, 1):
                    for number, block in enumerate(self.blocks):
                        x = 2 * block(x) if (number > 2) == part else x
            return x

    model, x = mc.rewire(Odd(), "blocks", connectivity=[[], [0], [0, 1], [1, 2], [2, 3]]), torch.randn(2, 3, 16)
    assert torch.equal(model.train()(x), model.eval()(x))


class Tuples(nn.Module):
    """A block that takes and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given):
        x, mask = given
        return self.linear(x) * mask, mask


def test_blocks_that_pass_on_tuples_are_joined_by_their_first_tensor():
    blocks = [Tuples() for _ in range(4)]
    model, x, mask = nn.Sequential(*blocks), torch.randn(2, 4), torch.tensor([1.0, 0.0, 1.0, 1.0])
    wanted = model((x, mask))
    assert torch.equal(mc.rewire(copy.deepcopy(model), "", connectivity="prev")((x, mask))[0], wanted[0])
    y0 = blocks[0]((x, mask))[0]
    y1 = blocks[1]((y0, mask))[0]
    wanted = blocks[3](((y0 + y1) / 2, mask))[0]
    model = mc.rewire(model, "", connectivity=[[], [0], [1], [0, 1]])
    for _ in range(3):
        torch.testing.assert_close(model((x, mask))[0], wanted)
