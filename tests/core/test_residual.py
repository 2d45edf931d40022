"""Residuals are summed, shortcuts averaged: `aggregation="residual"` of any blocks."""

import copy

import pytest
import torch
from networks import blending, mlp_blocks, option_a
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import both_ways

import maskconnect as mc
from maskconnect.core.outputs import Outputs
from maskconnect.ship.export import export_onnx

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STAGES = [(4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2), (16, 16, 1)]


class Padded(nn.Module):
    """The parameter-free shortcut."""

    def __init__(self, outputs, stride):
        super().__init__()
        self.outputs, self.stride = outputs, stride

    def forward(self, x):
        return option_a(x, torch.Size((len(x), self.outputs, *(n // self.stride for n in x.shape[2:]))))


def residual_blocks():
    """Six blocks in three stages of resolution, so that residuals and shortcuts must be aligned."""
    bodies = [nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1), nn.Tanh()) for i, o, s in STAGES]
    shortcuts = [None if i == o else Padded(o, s) for i, o, s in STAGES]
    return [mc.Residual(body, shortcut) for body, shortcut in zip(bodies, shortcuts, strict=True)]


def stack_of(fan_in=2, **options):
    return mc.MaskedStack(residual_blocks(), fan_in, aggregation="residual", **options).double()


def by_hand(blocks, mask_TS, fan_in, x):
    """The rule as it is written, with masks of any real value."""
    parts = [(blocks[0].residual(x), blocks[0].shortcut(x))]
    for t, block in enumerate(blocks[1:]):
        shape = parts[-1][0].shape
        residual = sum(mask_TS[t, k] * option_a(f, shape) for k, (f, _) in enumerate(parts))
        shortcut = sum(mask_TS[t, k] * option_a(s, shape) for k, (_, s) in enumerate(parts))
        read = F.relu(residual + shortcut / fan_in[t])
        parts.append((block.residual(read), block.shortcut(read)))
    return F.relu(sum(parts[-1]))


def gradients_of(y, model):
    y.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fan_in", [1, 2, 3, 5])
def test_outputs_and_gradients_of_a_pass_that_learns_are_those_of_the_rule(fan_in):
    stack = stack_of(fan_in)
    twin = copy.deepcopy(stack)
    found = stack(X)
    mask = stack.masks.binary.double().requires_grad_()
    expected = by_hand(twin.blocks, mask, stack.masks.fan_in.tolist(), X)
    torch.testing.assert_close(found, expected)
    ours, theirs = gradients_of(found, stack), gradients_of(expected, twin)
    torch.testing.assert_close(ours.pop("masks.real"), mask.grad)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, msg=name)


@pytest.mark.parametrize("credit", ["whole", "new"])
@pytest.mark.parametrize("connectivity", ["learned", "random", "full", "prev"])
def test_the_fast_path_is_the_readable_one(connectivity, credit):
    stack = stack_of(3, connectivity=connectivity)
    stack.masks.learn_by(mc.Draw(credit=credit))
    both_ways(stack, lambda m: _backward(m))


def test_blended_masks_average_shortcuts_by_their_shares():
    stack = blending(stack_of(2), 0.5)
    with torch.no_grad():
        stack.masks.real.mul_(torch.rand(stack.masks.real.shape, dtype=torch.float64) + 0.5)
    twin = copy.deepcopy(stack)
    found = both_ways(stack, lambda m: _backward(m))
    shares = twin.masks.draw().mask_TS
    assert ((shares > 0) & (shares < 1)).any()
    torch.testing.assert_close(found, by_hand(twin.blocks, shares, twin.masks.fan_in.tolist(), X))


def _backward(model):
    y = model(X)
    y.square().sum().backward()
    return y


def test_with_prev_it_is_the_plain_residual_chain_bitwise():
    stack = stack_of(connectivity="prev", fan_in=None)
    x = X
    for block in stack.blocks:
        x = F.relu(block.residual(x) + block.shortcut(x))
    assert torch.equal(stack(X), x)


def test_with_one_source_each_it_is_the_network_in_which_a_block_reads_that_source_bitwise():
    wiring = [[], [0], [0], [2], [1], [4]]
    stack = stack_of(connectivity=wiring, fan_in=None)
    outputs = []
    for block, row in zip(stack.blocks, wiring, strict=True):
        x = option_a(outputs[row[0]], outputs[-1].shape) if row else X
        outputs.append(F.relu(block.residual(x) + block.shortcut(x)))
    assert torch.equal(stack(X), outputs[-1])


def test_readers_of_one_fan_in_share_the_sum_of_a_residual_and_its_part_of_the_shortcut(monkeypatch):
    made = []
    monkeypatch.setattr("maskconnect.core.outputs.combined", lambda f, s, fan_in: made.append(fan_in) or f + s / fan_in)
    stack_of(2, connectivity="full")(X)
    assert sorted(made) == [1] * 2 + [2] * 2  # from three sources on, readers of all modules take running sums
    made.clear()
    stack_of(1)(X)
    assert sorted(made) == [1] * 6


def test_branches_of_layers_are_joined_alike():
    layers = [[mc.Residual(body) for body in mlp_blocks(3)] for _ in range(3)]
    stack = mc.MaskedStack(layers, 2, aggregation="residual", connectivity="random")
    x = torch.randn(5, 6)
    outputs = [block(x) for block in layers[0]]
    for layer, rows in zip(layers[1:], stack.wiring()[1:], strict=True):
        reads = [
            F.relu(sum(outputs[k].residual for k in row) + sum(outputs[k].shortcut for k in row) / 2) for row in rows
        ]
        outputs = [block(read) for block, read in zip(layer, reads, strict=True)]
    expected = F.relu(sum(y.residual for y in outputs) + sum(y.shortcut for y in outputs) / 3)
    torch.testing.assert_close(stack(x), expected)


def test_a_pair_from_a_module_of_the_users_own_will_do():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, scale=1.0):
            return scale * self.linear(x), x

    stack = mc.MaskedStack([Own() for _ in range(4)], 2, aggregation="residual")
    x = torch.randn(5, 6)
    stack(x).sum().backward()
    assert stack.masks.real.grad[-1].count_nonzero() == 3
    assert not torch.equal(stack.eval()(x), stack(x, scale=2.0))


def test_further_arguments_go_to_the_body():
    class Body(nn.Module):
        def forward(self, x, factor):
            return factor * x

    y = mc.Residual(Body())(torch.ones(2), factor=3.0)
    assert y.residual.tolist() == [3.0, 3.0]
    assert y.shortcut.tolist() == [1.0, 1.0]


def test_an_align_of_the_users_own_gets_residual_and_shortcut_one_by_one():
    """It need not be linear, so it must not be given a sum that depends on who reads."""

    def align(y, shape):
        return option_a(y, shape).sin()

    stack = stack_of(2, connectivity="full", align=align).eval()
    parts = [stack.blocks[0](X)]
    for j, block in enumerate(stack.blocks[1:], start=1):
        shape = parts[-1].residual.shape
        fs, ss = ([y[i] if y[i].shape == shape else align(y[i], shape) for y in parts] for i in range(2))
        parts.append(block(F.relu(sum(fs) + sum(ss) / j)))
    torch.testing.assert_close(stack(X), F.relu(sum(parts[-1])))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (nn.Linear(6, 6), "module 1 returned an output of type Tensor"),
        (mc.Residual(nn.Linear(6, 5)), r"a tuple of 2 with shapes \(5, 5\), \(5, 6\)"),
    ],
)
def test_a_block_that_returns_no_pair_is_named(block, said):
    stack = mc.MaskedStack([mc.Residual(nn.Linear(6, 6)), block, block], 1, aggregation="residual")
    with pytest.raises(mc.ConnectivityError, match=said) as error:
        stack(torch.randn(5, 6))
    assert "mc.Residual(body, shortcut)" in str(error.value)


def test_a_body_that_is_not_a_module_is_refused():
    with pytest.raises(mc.ConfigError, match="body is of type function; it must be"):
        mc.Residual(lambda x: x)
    with pytest.raises(mc.ConfigError, match="shortcut is of type int; it must be"):
        mc.Residual(nn.Linear(2, 2), 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_stack_trains_exactly_as_one_that_is_not(reentrant):
    stack = stack_of(2)
    twin = copy.deepcopy(stack)
    for step in range(3):
        x = (X + step).requires_grad_()
        checkpoint(stack, x, use_reentrant=reentrant).square().sum().backward()
        twin(X + step).square().sum().backward()
        for (name, p), q in zip(stack.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


class Own(nn.Module):
    """A block of the user's own, which returns a pair."""

    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, factor=1.0):
        return factor * self.linear(x).tanh(), x


def of_own_blocks():
    return mc.MaskedStack([Own() for _ in range(6)], 2, aggregation="residual", seed=1)


BUILDERS = {"mc.Residual": lambda: stack_of(2).float(), "own blocks": of_own_blocks}


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", BUILDERS)
def test_it_is_pruned_saved_loaded_and_exported(kind, merge, tmp_path):
    model = BUILDERS[kind]()
    x = X.float() if kind == "mc.Residual" else torch.randn(5, 6)
    model.masks.fix(((), (0,), (0, 1), (0, 1), (1, 3), (0, 3)))
    assert not all(model.masks.current_wiring().alive)
    slim = mc.prune(model.eval(), x, merge=merge)
    torch.testing.assert_close(slim(x), model(x))
    for number, network in enumerate((model, slim)):
        mc.save(network, tmp_path / str(number))
        torch.testing.assert_close(mc.load(tmp_path / str(number), into=BUILDERS[kind]())(x), model(x))
    program = torch.export.export(slim, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    apart = export_onnx(slim, x, tmp_path / "slim.onnx")
    assert apart < 1e-5


def test_a_pruned_stack_of_own_blocks_still_takes_further_arguments():
    stack = of_own_blocks().eval()
    mc.freeze(stack)
    x = torch.randn(5, 6)
    slim = mc.prune(stack, x, factor=2.0)
    torch.testing.assert_close(slim(x, factor=3.0), stack(x, factor=3.0))


def test_it_is_drawn_as_any_other_stack(tmp_path):
    stack = stack_of(2)
    mc.draw(stack, tmp_path / "wiring.svg")
    assert "<svg" in (tmp_path / "wiring.svg").read_text()


@pytest.mark.parametrize(
    "first", [nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True)], ids=str
)
def test_a_body_that_writes_over_its_input_is_an_error(first):
    """Its shortcut would pass on the changed input."""
    block = mc.Residual(nn.Sequential(first, nn.Linear(6, 6)))
    with pytest.raises(
        mc.ConnectivityError, match="changed its input in place, which its shortcut reads too; use inpl"
    ):
        block(torch.randn(4, 6))
    with torch.inference_mode():  # where torch does not count changes
        mc.Residual(nn.Linear(6, 6))(torch.randn(4, 6))
        with pytest.raises(mc.ConnectivityError, match="changed its input in place"):
            mc.Residual(nn.Sequential(first.train(), nn.Linear(6, 6)))(torch.randn(4, 6))


def test_a_shortcut_that_writes_over_its_input_changes_nobody_elses():
    torch.manual_seed(0)
    layers = [[mc.Residual(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(2)] for _ in range(2)]
    stack = mc.MaskedStack(layers, connectivity="full", aggregation="residual").eval()
    x = torch.randn(4, 6)
    first = [block(x.clone()) for block in layers[0]]
    read = F.relu(sum(y.residual for y in first) + sum(y.shortcut for y in first) / 2)
    second = [block(read.clone()) for block in layers[1]]
    expected = F.relu(sum(y.residual for y in second) + sum(y.shortcut for y in second) / 2)
    torch.testing.assert_close(stack(x.clone()), expected)
    torch.testing.assert_close(mc.prune(stack, x.clone())(x.clone()), expected)


def test_a_pruned_stack_refuses_sizes_that_its_bodies_round_in_another_way():
    """The bodies of mc.Residual are the user's, and a pool rounds down where a stride rounds up."""
    body = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1))
    blocks = [mc.Residual(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)]
    blocks[1] = mc.Residual(body, nn.MaxPool2d(2))
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0, 1], [0, 2]], aggregation="residual").eval()
    slim = mc.prune(stack, torch.randn(2, 4, 8, 8))
    x = torch.randn(1, 4, 16, 16)
    torch.testing.assert_close(slim(x), stack(x))
    with pytest.raises(AssertionError, match="needs sources aligned in another way"):
        slim(torch.randn(2, 4, 3, 3))


class Holding(nn.Module):
    """A user's module with an mc.Residual inside."""

    def __init__(self):
        super().__init__()
        self.inner = mc.Residual(nn.Linear(6, 6))

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", ["a hook", "inside another module"])
def test_an_mc_residual_that_must_stay_a_module_stays_one_in_the_pruned_network(kind):
    blocks = [mc.Residual(nn.Linear(6, 6)) if kind == "a hook" else Holding() for _ in range(4)]
    seen = []
    if kind == "a hook":
        blocks[1].register_forward_hook(lambda *_: seen.append(1))
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0, 1], [1, 2]], aggregation="residual").eval()
    x = torch.randn(4, 6)
    slim = mc.prune(stack, x)
    seen.clear()
    torch.testing.assert_close(slim(x), stack(x))
    assert len(seen) == (2 if kind == "a hook" else 0)


def test_a_body_keeps_the_names_and_defaults_of_its_arguments_when_it_is_pruned():
    class Body(nn.Module):
        def forward(self, x, scale=1.0):
            return scale * x

    stack = mc.MaskedStack([mc.Residual(Body()) for _ in range(4)], connectivity="full", aggregation="residual").eval()
    x = torch.randn(4, 6)
    slim = mc.prune(stack, x, scale=2.0)
    torch.testing.assert_close(slim(x), stack(x))
    torch.testing.assert_close(slim(x, scale=0.5), stack(x, scale=0.5))


def test_nested_tensors_are_joined_and_pruned():
    stack = mc.MaskedStack(
        [mc.Residual(nn.Linear(6, 6)) for _ in range(4)], connectivity="full", aggregation="residual"
    )
    rows = [torch.randn(2, 6), torch.randn(5, 6)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found = stack.eval()(x).unbind()
    for row, y in zip(rows, found, strict=True):
        torch.testing.assert_close(y, stack(row))
    for y, z in zip(mc.prune(stack, x)(x).unbind(), found, strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("aggregation", ["mean", "stream"])
def test_pairs_under_another_aggregation_are_named(aggregation):
    stack = mc.MaskedStack([mc.Residual(nn.Linear(6, 6)) for _ in range(3)], 1, aggregation=aggregation)
    with pytest.raises(mc.ConnectivityError, match="module 0 returned a Pair; use aggregation='residual'"):
        stack(torch.randn(4, 6))


def test_a_pair_is_not_kept_longer_than_somebody_reads_it(monkeypatch):
    """With full wiring no two readers have one fan-in, so nothing is shared and nothing need be kept."""
    kept = []
    part = Outputs.part
    monkeypatch.setattr(
        Outputs, "part", lambda self, k, fan_in: (part(self, k, fan_in), kept.append(len(self.joined)))[0]
    )
    stack_of(2, connectivity="full").eval()(X)
    assert max(kept) == 0
    stack_of(2, connectivity="random").eval()(X)
    assert 0 < max(kept) < 6


def test_residual_blocks_run_in_inference_mode_on_the_meta_device():
    stack = mc.MaskedStack(
        [mc.Residual(nn.Linear(4, 4)) for _ in range(3)], connectivity="prev", aggregation="residual"
    )
    with torch.inference_mode():
        assert stack.to("meta").eval()(torch.randn(2, 4, device="meta")).shape == (2, 4)


def test_a_body_that_writes_over_its_input_is_found_after_an_input_that_is_not_a_number():
    block = mc.Residual(nn.ReLU(inplace=True))
    with torch.inference_mode():
        block(torch.full((2,), torch.nan))
        with pytest.raises(mc.ConnectivityError, match="changed its input in place"):
            block(torch.tensor([-1.0, 2.0]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_masks_do_not_learn_from_nested_tensors():
    stack = mc.MaskedStack([nn.Linear(6, 6) for _ in range(4)], 2, aggregation="stream")
    x = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(5, 6)], layout=torch.jagged)
    for images in (None, 1):
        mc.attach(torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.1)), stack, mc.Draw(images=images))
        with pytest.raises(mc.ConnectivityError, match=r"module 0 returned a nested tensor, .* Pad the inputs"):
            stack(x)
