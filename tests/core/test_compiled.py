"""A stack that learns under torch.compile: one graph for all steps, with the draws and gradients of eager mode."""

import copy
import shutil
from functools import partial

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import maskconnect as mc
from maskconnect.core.lookup import masks_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own making
X = torch.linspace(-1, 1, 18).reshape(3, 6)
IMAGES = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)
WAYS = {"draw": mc.Draw(), "blend": mc.Blend(steps=20)}


def compiled(model, backend="aot_eager"):
    """The model as one graph, and what counts how often it is compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


def optimizer_of(model, how):
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.05, mask_lr=0.05))
    mc.attach(optimizer, model, how)
    return optimizer


def train(run, model, optimizer, x, steps):
    """Take some steps: of each the loss, the gradients, and the masks before the update."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        masks = [(m.binary.clone(), m.real.detach().clone()) for m in masks_of(model)]
        optimizer.step()
        yield loss.detach(), grads, masks


def assert_alike(found, expected, tolerance=1e-5):
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for (loss, grads, masks), (wanted_loss, wanted_grads, wanted_masks) in zip(found, expected, strict=True):
        close(loss, wanted_loss)
        close(grads, wanted_grads)
        for (binary, real), (wanted_binary, wanted_real) in zip(masks, wanted_masks, strict=True):
            assert torch.equal(binary, wanted_binary)
            close(real, wanted_real)


@pytest.mark.parametrize("way", WAYS)
def test_one_graph_serves_fifty_steps_with_the_draws_losses_and_gradients_of_an_uncompiled_stack(way):
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    twin = copy.deepcopy(stack)
    run, counter = compiled(stack)
    found = list(train(run, stack, optimizer_of(stack, WAYS[way]), X, 50))
    assert len({str(masks) for _, _, masks in found}) > 9, "masks must change for the test to mean something"
    assert_alike(found, train(twin, twin, optimizer_of(twin, WAYS[way]), X, 50))
    assert counter.frame_count == 1


def own(sources, mask):
    """A source of mask 0 adds nothing, but would get a gradient if it were not detached."""
    return sum(m * y.square() + (y - y.detach()) for m, y in zip(mask, sources, strict=True))


STACKS = {
    "mean": lambda: mc.MaskedStack(conv_blocks(), 2),
    "sum": lambda: mc.MaskedStack(mlp_blocks(5), 2, aggregation="sum"),
    "residual": lambda: mc.MaskedStack([mc.Residual(b) for b in mlp_blocks(5)], 2, aggregation="residual"),
    "stream": lambda: mc.MaskedStack(mlp_blocks(5), 2, aggregation="stream"),
    "scaled": lambda: mc.MaskedStack(mlp_blocks(5), 2, aggregation="scaled"),
    "own": lambda: mc.MaskedStack(mlp_blocks(5), 2, aggregation=own),
    "layers": lambda: mc.MaskedStack(mlp_layers(3, 3), 2),
    "scaled layers": lambda: mc.MaskedStack(mlp_layers(3, 3), 2, aggregation="scaled"),
    "several fan-ins": lambda: mc.MaskedStack(mlp_blocks(5), [1, 2, 1, 3]),
    "few candidates": lambda: mc.MaskedStack(mlp_blocks(5), 1, wiring=[[], [0], [0], [0, 1], [1, 3]]),  # 2: unread
    "every module": lambda: mc.MaskedStack(mlp_blocks(5), 1, use_all=True),
    "resnet": lambda: mc.resnet(8, 3, fan_in=2, aggregation="residual", in_channels=4),
    "mixed": lambda: mc.mixed((1, 1), 4, 3, fan_in=2, in_channels=4, kinds=["conv3x3", "maxpool3x3", "globalmean"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STACKS)
def test_every_kind_of_stack_learns_in_one_graph(kind, way):
    stack, x = STACKS[kind]().double(), (IMAGES if kind in ("mean", "resnet", "mixed") else X).double()
    twin = copy.deepcopy(stack)
    run, counter = compiled(stack, "eager")
    found = train(run, stack, optimizer_of(stack, WAYS[way]), x, 3)
    expected = train(twin, twin, optimizer_of(twin, WAYS[way]), x, 3)
    assert_alike(found, expected, 1e-10)  # in float32, mask updates of length 1 magnify the rounding of tiny gradients
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["mean", "sum", "residual"])
def test_the_credit_of_what_is_new_is_the_same(kind):
    stack, x, how = STACKS[kind](), IMAGES if kind == "mean" else X, mc.Draw(credit="new")
    twin = copy.deepcopy(stack)
    run, _ = compiled(stack, "eager")
    found = train(run, stack, optimizer_of(stack, how), x, 3)
    assert_alike(found, train(twin, twin, optimizer_of(twin, how), x, 3))


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_compiles_once_and_reads_the_top_k_of_each_epoch(way):
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=1)
    optimizer, (run, counter) = optimizer_of(stack, WAYS[way]), compiled(stack, "eager")
    wirings = []
    for _ in range(4):
        list(train(run.train(), stack, optimizer, X, 5))
        with torch.no_grad():
            torch.testing.assert_close(run.eval()(X), stack(X))
        wirings.append(str(stack.wiring()))
    assert len(set(wirings)) > 1, "the top-K must change for the test to mean something"
    assert counter.frame_count == 2


def test_freezing_compiles_once_more():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    run, counter = compiled(stack, "eager")
    list(train(run, stack, optimizer_of(stack, mc.Draw()), X, 3))
    mc.freeze(stack)
    for _ in range(3):
        torch.testing.assert_close(run(X), stack(X))
    assert counter.frame_count == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_was_saved_in_the_middle_continues_alike(way):
    stack, other = (mc.MaskedStack(mlp_blocks(5), fan_in=2, seed=seed) for seed in (0, 1))
    run, counter = compiled(stack, "eager")
    list(train(run, stack, optimizer_of(stack, WAYS[way]), X, 4))
    saved = copy.deepcopy(stack.state_dict())
    expected = list(train(run, stack, optimizer_of(stack, WAYS[way]), X, 4))
    assert counter.frame_count == 1
    optimizer, (rerun, counter) = optimizer_of(other, WAYS[way]), compiled(other, "eager")
    list(train(rerun, other, optimizer, X, 1))
    other.load_state_dict(saved)
    assert_alike(train(rerun, other, optimizer, X, 4), expected)
    assert counter.frame_count == 1


def test_copies_draw_for_themselves():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    run, _ = compiled(stack, "eager")
    run(X)
    twin, before = copy.deepcopy(stack), stack.masks.generator.get_state()
    torch.compile(twin, backend="eager", fullgraph=True)(X)
    assert torch.equal(stack.masks.generator.get_state(), before)
    assert not torch.equal(twin.masks.generator.get_state(), before)


def test_an_infinite_output_that_nothing_reads_does_not_spoil_an_evaluation():
    stack = mc.MaskedStack(mlp_blocks(3), fan_in=1, wiring=[[], [0], [0, 1]]).eval()
    with torch.no_grad():
        stack.masks.real.copy_(torch.tensor([[1.0, 0.0], [0.9, 0.1]]))
        stack.blocks[1] = torch.nn.Threshold(torch.inf, torch.inf)
        run, _ = compiled(stack, "eager")
        assert torch.equal(run(X), stack(X))
        assert run(X).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_returns_what_it_was_given_and_adds_up_gradients_of_masks_in_float32(dtype):
    stack = mc.MaskedStack([torch.nn.Identity() for _ in range(4)], fan_in=2, aggregation="mean").to(dtype)
    twin, x = copy.deepcopy(stack), torch.full((64, 64), 100.0, dtype=dtype)  # a sum of which is beyond float16
    run, _ = compiled(stack, "eager")
    for model, y in ((stack, run(x)), (twin, twin(x))):
        assert y.dtype == dtype
        y.backward(torch.ones_like(y))
        assert model.masks.real.grad.dtype == torch.float32
    torch.testing.assert_close(stack.masks.real.grad, twin.masks.real.grad, rtol=1e-5, atol=1e-5)


def test_running_a_compiled_pass_again_in_the_backward_pass_is_an_error():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    run, _ = compiled(stack, "eager")
    loss = checkpoint(run, X.clone().requires_grad_(), use_reentrant=True).sum()
    with pytest.raises(mc.ConnectivityError, match="run again during a backward pass"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("way", WAYS)
def test_inductor_gives_the_same(way):
    network = mc.resnet(8, 3, fan_in=2, aggregation="residual", in_channels=4)
    twin = copy.deepcopy(network)
    run, counter = compiled(network, "inductor")
    found = train(run, network, optimizer_of(network, WAYS[way]), IMAGES, 4)
    assert_alike(found, train(twin, twin, optimizer_of(twin, WAYS[way]), IMAGES, 4))
    assert counter.frame_count == 1
