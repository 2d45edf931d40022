"""What people do to their networks: autocast, compile, memory formats, meta, safetensors."""

import shutil

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers
from safetensors.torch import load_file, save_file
from torch import nn

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


@pytest.mark.parametrize("make", [lambda: mlp_blocks(6), lambda: mlp_layers(3, 4)])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_autocast_learns_in_low_precision_with_masks_in_float32(make, aggregation):
    stack = mc.MaskedStack(make(), fan_in=2, aggregation=aggregation)
    exact = mc.MaskedStack(stack.flat() if not stack.layout.layered else stack.blocks, 2, aggregation=aggregation)
    with torch.autocast("cpu", torch.bfloat16):
        output = stack(X)
        output.float().square().sum().backward()
    assert stack.masks.real.grad.dtype == torch.float32
    found = stack.masks.real.grad.clone()
    exact(X).square().sum().backward()
    torch.testing.assert_close(found, exact.masks.real.grad, rtol=0.1, atol=0.1)


def test_sources_of_different_precision_are_added_in_the_higher_one():
    class Low(nn.Linear):
        def forward(self, x):
            return super().forward(x.float()).bfloat16()

    class High(nn.Linear):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x)

    stack = mc.MaskedStack([Low(6, 6), nn.Linear(6, 6).bfloat16(), Low(6, 6), High(6, 6)], connectivity="full")
    stack.blocks[2] = High(6, 6)  # module 3 now reads two low ones and a high one
    stack.blocks[2].forward = lambda x: nn.Linear.forward(stack.blocks[2], x.float())
    assert stack(X).dtype == torch.float32


def compilers():
    return ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own making
@pytest.mark.parametrize("backend", compilers())
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["chain", "layers", "convolutions", "residual", "stream", "scaled"])
def test_a_frozen_stack_compiles_whole_with_equal_outputs_and_gradients(kind, train, backend):
    modules = {"layers": mlp_layers(3, 4), "convolutions": conv_blocks(), "stream": conv_blocks()}.get(
        kind, mlp_blocks(8)
    )
    if kind == "residual":
        modules = [mc.Residual(body) for body in modules]
    join = kind if kind in ("residual", "stream", "scaled") else "mean"
    x = torch.randn(2, 4, 8, 8) if kind in ("convolutions", "stream") else X
    stack = mc.MaskedStack(modules, fan_in=1, connectivity="random", aggregation=join, seed=3).train(train)
    assert all(stack.masks.fixed.alive) == (kind == "stream"), "some module is unread"
    torch._dynamo.reset()
    compiled = torch.compile(stack, backend=backend, fullgraph=True)
    found, expected = [], []
    for run, results in ((compiled, found), (stack, expected)):
        stack.zero_grad()
        output = run(x)
        output.square().sum().backward()
        results += [output.detach(), *(p.grad.clone() for p in stack.blocks.parameters())]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_a_compiled_stack_has_the_wiring_that_was_loaded_last():
    first, second = (mc.MaskedStack(mlp_blocks(5), 1, connectivity="random", seed=seed) for seed in (0, 1))
    assert first.wiring() != second.wiring()
    x = torch.randn(3, 6)
    compiled = torch.compile(first, backend="aot_eager")
    compiled(x)
    first.load_state_dict(second.state_dict())
    found = compiled(x)
    torch.testing.assert_close(found, second(x))


def test_channels_last_stays_channels_last_and_gives_the_same_gradients():
    stack = mc.MaskedStack(conv_blocks(), fan_in=3)
    x = torch.randn(2, 4, 8, 8)
    stack(x).square().sum().backward()
    expected = [p.grad.clone() for p in stack.parameters()]
    stack.zero_grad()
    stack.load_state_dict(stack.state_dict() | {"masks._extra_state": torch.Generator().manual_seed(0).get_state()})
    stack.to(memory_format=torch.channels_last)
    output = stack(x.to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.square().sum().backward()
    for p, gradient in zip(stack.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-5)


def test_batch_norm_inside_a_frozen_stack_sees_each_batch_once():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [1], [0]])
    for _ in range(3):
        stack(X)
    assert [int(block[1].num_batches_tracked) for block in blocks] == [3, 0, 0, 3]


def test_a_stack_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        stack = mc.MaskedStack([nn.Linear(1000, 1000) for _ in range(20)], connectivity="random", fan_in=3)
        assert stack(torch.empty(8, 1000)).shape == (8, 1000)
    assert all(block.weight.is_meta for block in stack.blocks)


@pytest.mark.parametrize("connectivity", ["learned", "random"])
def test_inference_mode_works_for_networks_made_inside_and_outside_of_it(connectivity):
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2, connectivity=connectivity)
    with torch.inference_mode():
        inside = mc.MaskedStack(stack.flat(), fan_in=2, connectivity=connectivity)
        for mode in (True, False):
            assert torch.equal(inside.train(mode)(X), stack.train(mode)(X))


def test_the_state_dict_fits_into_safetensors(tmp_path):
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    mc.freeze(stack)
    save_file(stack.state_dict(), tmp_path / "stack.safetensors")
    other = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    other.load_state_dict(load_file(tmp_path / "stack.safetensors"))
    assert torch.equal(stack(X), other(X))


def test_a_model_can_be_exported_once_it_is_frozen():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2).eval()
    mc.freeze(stack)
    program = torch.export.export(stack, (X,))
    assert torch.equal(program.module()(X), stack(X))


def test_a_frozen_network_with_several_resolutions_is_exported_for_any_batch_size():
    stack = mc.MaskedStack(conv_blocks(), fan_in=3).eval()
    mc.freeze(stack)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(stack, (torch.randn(2, 4, 8, 8),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 4, 8, 8)
    torch.testing.assert_close(program.module()(x), stack(x))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_network_without_memory_is_filled_from_a_state_dict(frozen, assign):
    saved = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    if frozen:
        mc.freeze(saved)
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2).to("meta")
    if not assign:
        stack.to_empty(device="cpu")
    stack.load_state_dict(saved.state_dict(), assign=assign)
    assert stack.masks.is_frozen == frozen
    assert torch.equal(stack(X), saved(X))
    assert torch.equal(stack.masks.binary, saved.masks.binary)


def test_a_call_with_the_state_of_another_frozen_stack_has_its_wiring():
    stacks = [mc.MaskedStack(mlp_blocks(6), 2, connectivity="random", seed=seed).eval() for seed in (0, 1)]
    assert stacks[0].wiring() != stacks[1].wiring()
    outputs = [stack(X) for stack in stacks]
    state = {**dict(stacks[1].named_parameters()), **dict(stacks[1].named_buffers())}
    torch.testing.assert_close(torch.func.functional_call(stacks[0], state, (X,)), outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(stacks[0](X), outputs[0], rtol=0, atol=0)


@pytest.mark.parametrize("modules", [4, 100])
def test_the_saved_state_has_the_same_size_however_masks_learn(modules):
    stack = mc.MaskedStack([nn.Linear(3, 3) for _ in range(modules)], fan_in=1)
    before = stack.state_dict()
    stack.masks.learn_by(mc.Blend(steps=10, keep=0.5, costs=tuple(123456.789 + k for k in range(modules))))
    assert {name: tensor.shape for name, tensor in stack.state_dict().items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
