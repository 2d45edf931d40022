"""Multiply-accumulates by hand, times in turn, and random wirings counted by building every one of them."""

import copy
import time
from collections import Counter

import pytest
import torch
from networks import EncoderBlock, conv_blocks, mlp_blocks, mlp_layers
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.errors import ConfigError
from maskconnect.pruning.prune import pruned_parameters
from maskconnect.ship.measure import WARM_UP, Ratio, Times, interleaved, latency, macs
from maskconnect.ship.random_pruning import WeightsLeft, random_pruning, random_wirings

BLOCK = 6 * 6 + 6  # the weights of one of `mlp_blocks`
SEEDED = {"connectivity": "random", "seed": 1}
TAIL = [[], [0], [1], [2], [0], [4]]  # modules 1 to 3 read each other, and nothing else reads them


# Multiply-accumulates


def test_macs_of_a_small_network_are_those_counted_by_hand():
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 5, stride=2, padding=2, groups=4, bias=False),
        nn.Flatten(),
        nn.Linear(12 * 4 * 3, 7),
    )
    by_hand = 8 * 6 * (8 * 3 * 9) + 4 * 3 * (12 * 2 * 25) + 12 * 4 * 3 * 7
    assert macs(network, (3, 8, 6)) == by_hand
    assert macs(network.double(), (3, 8, 6)) == by_hand
    assert macs(network, torch.randn(5, 3, 8, 6, dtype=torch.float64)) == by_hand, "of one input, not of the batch"


def test_macs_of_a_plain_resnet_follow_the_formula():
    total = 3 * 16 * 9 * 32**2 + 64 * 10
    for inputs, width, size in ((16, 16, 32), (16, 32, 16), (32, 64, 8)):
        total += (inputs * width + 5 * width * width) * 9 * size**2
    assert total == 40_551_040
    assert macs(mc.resnet(20, 10, connectivity="prev"), (3, 32, 32)) == total


def test_attention_and_recurrent_layers_count_as_matrix_products():
    tokens, width = 5, 16
    attention = 4 * tokens * width**2 + 2 * tokens**2 * width
    assert macs(EncoderBlock(width), (tokens, width)) == attention + 4 * tokens * width**2
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
    assert macs(layer, (tokens, width)) == attention + 4 * tokens * width**2
    assert macs(nn.LSTM(8, 4), (3, 8)) == 3 * (8 * 16 + 4 * 16)


class LooksAtValues(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if float(x.detach().abs().sum()) >= 0 else x


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: mc.resnet(20, 10, 2, connectivity="random"), (3, 32, 32)),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (5, 16)),
        (lambda: nn.LSTM(8, 4), (3, 8)),
    ],
)
def test_a_network_that_looks_at_values_is_counted_as_well(make, shape):
    network = make()
    assert macs(LooksAtValues(network), shape) == macs(network, shape) > 0
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mkldnn.enabled


def macs_of_layers(model, x):
    """What the convolutions and linear layers do that run in the second pass, one by one."""
    model.eval()(x)
    found = []

    def note(layer, _, y):
        found.append(y[0].numel() * layer.weight[0].numel() if y.dim() > 2 else layer.weight.numel())

    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(found)


@pytest.mark.parametrize(
    "make",
    [
        lambda fan_in, connectivity: mc.resnet(20, 10, fan_in, connectivity=connectivity, seed=1),
        lambda fan_in, connectivity: mc.resnext(20, 4, 4, 10, fan_in, connectivity=connectivity, seed=3),
    ],
)
def test_modules_that_cannot_reach_the_output_do_not_count_though_the_first_pass_runs_them(make):
    model, x = make(1, "random"), torch.randn(1, 3, 16, 16)
    found = macs(model, (3, 16, 16))
    assert found == macs_of_layers(model, x) < macs(make(None, "full"), (3, 16, 16))


@pytest.mark.parametrize(
    "make", [lambda: mc.resnet(14, 10, 1, **SEEDED), lambda: mc.resnext(11, 2, 3, 10, 1, **SEEDED)]
)
def test_a_pruned_network_does_no_more_than_the_frozen_one(make):
    model, x = make(), torch.randn(1, 3, 16, 16)
    assert 0 < macs(mc.prune(model, x), x) <= macs(model, x)


def test_a_network_that_still_learns_counts_as_its_top_k():
    model = mc.resnet(20, 10, 1)
    with torch.no_grad():
        model.stack.masks.real.copy_(torch.rand_like(model.stack.masks.real) * (model.stack.masks.source >= 0))
    found = macs(model, (3, 32, 32))
    assert not model.stack.masks.is_frozen
    mc.freeze(model)
    assert found == macs(model, (3, 32, 32)) < 40_551_040


def test_counting_leaves_the_network_the_example_and_random_numbers_as_they_were():
    model = mc.resnet(20, 10, 2)
    model.stem = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(), *model.stem)
    model.stack.blocks[0].eval()
    for network in (model, LooksAtValues(model)):
        x = torch.randn(2, 3, 32, 32)
        example, state, draws = x.clone(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
        modes = [part.training for part in model.modules()]
        macs(network, x)
        assert modes == [part.training for part in model.modules()]
        assert torch.equal(x, example)
        assert torch.equal(draws, torch.get_rng_state())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert not model.stack._shapes


def test_a_mistake_in_the_network_is_not_hidden_by_the_second_try():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        macs(nn.Linear(3, 4), (5,))


# Times


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self):
        self.now = 0.0
        self.ran = []

    def __call__(self):
        return self.now

    def taking(self, name, *seconds):
        def run():
            self.now += seconds[self.ran.count(name) % len(seconds)]
            self.ran.append(name)

        return run


def test_variants_run_in_turn_after_a_warm_up():
    clock = Clock()
    variants = {"a": clock.taking("a", 1.0), "b": clock.taking("b", 2.0), "c": clock.taking("c", 0.5)}
    found = interleaved(variants, 4, 1e9, clock=clock)
    assert "".join(clock.ran) == "abc" * (WARM_UP + 4)
    assert found == {"a": Times((1.0,) * 4), "b": Times((2.0,) * 4), "c": Times((0.5,) * 4)}


def test_slow_first_calls_are_not_timed():
    clock = Clock()
    found = interleaved({"a": clock.taking("a", 9.0, 9.0, 1.0, 2.0, 4.0)}, 3, clock=clock, seconds=1e9)
    assert WARM_UP == 2
    assert found["a"] == Times((1.0, 2.0, 4.0))
    assert (found["a"].minimum, found["a"].median) == (1.0, 2.0)


def test_rounds_end_before_the_time_is_over_but_not_before_the_least():
    def rounds(seconds, most=50, least=3):
        clock = Clock()
        variants = {"a": clock.taking("a", 1.0), "b": clock.taking("b", 1.0)}
        found = interleaved(variants, most, seconds, least=least, clock=clock)
        return len(found["a"].seconds), clock.now

    assert rounds(seconds=21.0) == (8, 20.0), "2 rounds of warm-up and 8 of 2 seconds; another would take 22"
    assert rounds(seconds=0) == (3, 10.0)
    assert rounds(seconds=1e9) == (50, 104.0)
    assert rounds(seconds=0, most=2) == (2, 8.0)


def test_the_ratio_of_rounds_is_not_moved_by_a_machine_that_slows_down():
    one, other = Times((1.0, 10.0, 4.0, 2.0)), Times((2.0, 20.0, 8.0, 1.0))
    assert one.over(other) == Ratio(minima=1.0, rounds=0.5)
    assert other.over(one) == Ratio(minima=1.0, rounds=2.0)


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.seen = seconds, set()
        self.inner = nn.Dropout()

    def forward(self, x):
        time.sleep(self.seconds)
        self.seen.add((torch.is_inference_mode_enabled(), self.training, self.inner.training, tuple(x.shape)))
        return self.inner(x).add_(1)


def test_latency_is_that_of_eval_and_inference_mode_and_modes_come_back():
    slow, fast, x = Slow(0.01), Slow(0.001), torch.zeros(3, 2)
    slow.inner.eval()
    fast.eval()
    found = latency({"slow": slow, "fast": fast}, x, 8, 5.0)
    assert slow.seen == fast.seen == {(True, False, False, (3, 2))}
    assert (slow.training, slow.inner.training, fast.training, fast.inner.training) == (True, False, False, False)
    assert not x.any()
    assert [len(times.seconds) for times in found.values()] == [8, 8]
    assert found["slow"].minimum >= 0.01
    assert found["slow"].over(found["fast"]).rounds > 2


def test_modes_come_back_also_after_an_error():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        latency({"a": network}, torch.zeros(1, 4))
    assert all(part.training for part in network.modules())


def test_modules_that_need_not_run_take_no_time():
    blocks = conv_blocks() + [nn.Conv2d(16, 16, 3, padding=1) for _ in range(30)]
    whole = mc.MaskedStack(blocks, connectivity="prev")
    short = mc.MaskedStack(blocks, connectivity=[[], *([k] for k in range(5)), *([5] for _ in range(30))])
    found = latency({"whole": whole, "short": short}, torch.randn(2, 4, 32, 32), 20, 2.0)
    assert found["short"].over(found["whole"]).rounds < 0.8


# Random wirings


def drawn(fan_in, seed=0):
    return {"fan_in": fan_in, "connectivity": "random", "seed": seed}


class Nested(nn.Module):
    """A stack in a block of another, a second one beside, one of them twice, and weights that several modules share."""

    def __init__(self, outer, inner, second):
        super().__init__()
        blocks, parts, layers = mlp_blocks(7), mlp_blocks(4), mlp_layers(3, 3)
        blocks[3] = nn.Sequential(mc.MaskedStack(parts, **inner), nn.Linear(6, 6, bias=False))
        blocks[5] = blocks[1]
        blocks[2][0].weight = parts[1][0].weight
        parts[2][0].bias = layers[0][1][0].bias
        blocks[4][0].weight = layers[1][2][0].weight
        self.first = mc.MaskedStack(blocks, **outer)
        self.second = mc.MaskedStack(layers, **second)
        self.again = self.first
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.again(self.second(self.first(x))))


def chain(stack):
    return mc.MaskedStack(mlp_blocks(7), **stack)


def few_candidates(stack):
    wiring = [[], [0], [0], [1, 2], [0, 3], [2, 3, 4]]
    if stack["connectivity"] == "random":
        stack = {**stack, "wiring": wiring, "fan_in": [1, 1, 2, 1, 2]}
    return mc.MaskedStack(mlp_blocks(6), **stack)


def resnet(stack):
    return mc.resnet(14, 4, **stack)


def resnext(stack):
    return mc.resnext(11, 2, 3, 4, **stack)


MODELS = {
    "chain": (chain, [2], (6,)),
    "few candidates": (few_candidates, [1], (6,)),
    "resnet": (resnet, [1], (3, 8, 8)),
    "resnext": (resnext, [1], (3, 8, 8)),
    "nested": (Nested, [1, 1, 1], (6,)),
    "nested, several sources": (Nested, [2, 1, 2], (6,)),
}


def weights_that_run(model, x):
    """The weights of all modules that run in the second pass: those that can reach the output."""
    model.eval()(x)
    ran = set()
    handles = [part.register_forward_hook(lambda part, *_: ran.add(part)) for part in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(p.numel() for p in {p for part in ran for p in part.parameters(recurse=False)})


@pytest.mark.parametrize("name", MODELS)
def test_every_draw_leaves_as_much_as_a_network_that_is_built_with_its_wiring(name):
    make, fan_in, shape = MODELS[name]
    model = make(*(drawn(k, seed=5) for k in fan_in))
    stacks = [part for part in model.modules() if isinstance(part, mc.MaskedStack)]
    found, counts, sizes = random_pruning(model, draws=25, seed=3), [], []
    for wirings in random_wirings(stacks, 25, 3):
        plain = [stack.layout.to_plain(wiring) for stack, wiring in zip(stacks, wirings, strict=True)]
        built = make(*({"connectivity": wiring} for wiring in plain))
        counts.append(pruned_parameters(built))
        sizes.append(weights_that_run(built, torch.randn(2, *shape)))
    assert found.transitive.draws == tuple(count.transitive for count in counts) == tuple(sizes)
    assert found.one_step.draws == tuple(count.one_step for count in counts)
    assert (found.weights, found.one_step.learned, found.transitive.learned) == pruned_parameters(model)
    assert len(set(sizes)) > 1, "draws must differ, or this shows nothing"


def test_random_wirings_are_those_of_random_connectivity():
    layers = mc.MaskedStack(mlp_layers(3, 3), [1, 2, 3, 1, 2, 3])
    model = few_candidates(drawn(1))
    for first, second in random_wirings([layers, model], 20, 0):
        for stack, sources in ((layers, first), (model, second)):
            targets = stack.layout.targets
            assert [len(sources[j]) for j in targets] == stack.masks.fan_in.tolist()
            assert all(set(row) <= set(may) for row, may in zip(sources, stack.masks.candidates, strict=True))
            assert all(list(row) == sorted(set(row)) for row in sources)


def test_draws_of_a_small_chain_have_the_probabilities_that_follow_by_hand():
    # Module 2 reads 0 or 1 and module 3 reads 0, 1 or 2: six wirings, all as likely.
    found = random_pruning(mc.MaskedStack(mlp_blocks(4), 1), draws=6000)
    for rule, expected in ((found.transitive, {2: 2, 3: 3, 4: 1}), (found.one_step, {2: 1, 3: 4, 4: 1})):
        shares = {left // BLOCK: count / 6000 for left, count in Counter(rule.draws).items()}
        assert shares == pytest.approx({left: ways / 6 for left, ways in expected.items()}, abs=0.02)


def test_stacks_draw_independently_of_each_other():
    model = nn.Sequential(*(mc.MaskedStack(mlp_blocks(4), 1) for _ in range(2)))
    found = random_pruning(model, draws=3000).transitive
    assert found.draws.count(4 * BLOCK) / 3000 == pytest.approx((1 / 3) ** 2, abs=0.02)


def test_a_stack_under_two_names_has_one_wiring():
    stack = mc.MaskedStack(mlp_blocks(4), 1)
    twice, once = random_pruning(nn.Sequential(stack, stack), draws=30), random_pruning(stack, draws=30)
    assert twice == once


def test_draws_are_on_average_what_networks_of_random_connectivity_lose():
    built = [pruned_parameters(mc.MaskedStack(mlp_blocks(8), **drawn(2, seed))) for seed in range(800)]
    found = random_pruning(mc.MaskedStack(mlp_blocks(8), 2), draws=3000)
    for rule, name in ((found.transitive, "transitive"), (found.one_step, "one_step")):
        left = torch.tensor([getattr(count, name) for count in built], dtype=torch.float64)
        assert rule.mean == pytest.approx(float(left.mean()), abs=5 * rule.deviation / 800**0.5)
        assert rule.deviation == pytest.approx(float(left.std()), rel=0.1)
        assert rule.deviation > BLOCK / 4


def test_the_same_seed_draws_the_same_and_another_one_does_not():
    model = Nested(drawn(1), drawn(1), drawn(1))
    before = torch.get_rng_state(), mc.wiring_of(model)
    first, again, other = (random_pruning(model, draws=20, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.transitive.draws != other.transitive.draws
    assert first.transitive.learned == other.transitive.learned
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == mc.wiring_of(model)
    assert random_pruning(model, draws=5).one_step.draws == first.one_step.draws[:5]


def test_what_is_said_of_the_draws():
    left = WeightsLeft(learned=30, draws=(10, 30, 40, 60))
    assert (left.mean, left.smallest, left.largest) == (35, 10, 60)
    assert left.deviation == pytest.approx(((25**2 + 5**2 + 5**2 + 25**2) / 3) ** 0.5)
    assert left.share_that_lost_as_much() == 0.5
    assert WeightsLeft(learned=9, draws=(10, 30)).share_that_lost_as_much() == 0


def test_a_wiring_that_loses_nothing_is_matched_by_every_draw_and_one_that_loses_much_by_few():
    long = random_pruning(mc.MaskedStack(mlp_blocks(6), connectivity="prev"))
    assert long.transitive.learned == long.weights == 6 * BLOCK
    assert long.transitive.share_that_lost_as_much() == 1
    short = random_pruning(mc.MaskedStack(mlp_blocks(6), connectivity=TAIL)).transitive
    assert short.learned == 3 * BLOCK
    assert 0 < short.share_that_lost_as_much() < 1
    every = random_pruning(mc.MaskedStack(mlp_blocks(6), connectivity="full")).one_step
    assert (every.smallest, every.largest, every.deviation) == (6 * BLOCK, 6 * BLOCK, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mc.resnext(29, 8, 8, 100, 4, connectivity="random"),
        lambda: mc.resnet(110, 100, 10, connectivity="random"),
    ],
)
def test_two_hundred_draws_of_a_network_of_the_paper_take_at_most_two_seconds(make):
    model = make()
    started = time.process_time()
    found = random_pruning(model)
    assert time.process_time() - started < 2
    assert len(found.transitive.draws) == len(found.one_step.draws) == 200
    assert all(a <= b <= found.weights for a, b in zip(found.transitive.draws, found.one_step.draws, strict=True))


def test_what_cannot_be_meant_is_refused():
    stack = mc.MaskedStack(mlp_blocks(3), 1)
    for call, words in (
        (lambda: random_pruning(nn.Linear(2, 3)), "no MaskedStack"),
        (lambda: random_pruning(stack, draws=1), "draws is 1"),
        (lambda: random_pruning(stack, seed=0.5), "seed is 0.5"),
        (lambda: interleaved({}), "there are no variants to time"),
        (lambda: interleaved({"a": F.relu}, rounds=0), "rounds is 0"),
        (lambda: interleaved({"a": F.relu}, least=0), "least is 0"),
        (lambda: interleaved({"a": F.relu}, seconds=float("nan")), "seconds is nan"),
        (lambda: macs(nn.Linear(2, 3), (2.0,)), "example is 2.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_a_model_that_runs_its_blocks_itself_is_measured_and_pruned_at_random():
    blocks = mlp_blocks(4)
    rewired = mc.rewire(nn.Sequential(*blocks), "", connectivity=[[], [0], [0, 1], [0, 1]])
    assert macs(rewired, (6,)) == 3 * 36  # nothing reads block 2
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0, 1], [0, 1]])
    assert random_pruning(rewired, draws=20) == random_pruning(stack, draws=20)
