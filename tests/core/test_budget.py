"""Budgets: `mc.Blend(steps=N, keep=0.6)` learns a wiring whose used modules hold at most 60 % of the parameters."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import maskconnect as mc
from maskconnect.core.budget import Budget, parameters_of
from maskconnect.core.fit import fit, smallest_cost
from maskconnect.core.mask_saving import from_plain, to_plain
from maskconnect.core.sampling import normalize_, shares
from maskconnect.core.wiring import reaching_output
from maskconnect.errors import ConfigError

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def unequal_blocks(count, seed=0):
    """Blocks of 4 features with 20 to 60 parameters."""
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(4, 2 + k % 3), nn.Tanh(), nn.Linear(2 + k % 3, 4)) for k in range(count)]


def chain(count=6, fan_in=1, seed=0, **options):
    return mc.MaskedStack(unequal_blocks(count, seed), fan_in, **{"mask_init": 0.01, "seed": seed, **options})


def attached(stack, how, mask_lr=0.05):
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.05, mask_lr=mask_lr), momentum=0.9)
    mc.attach(optimizer, stack, how)
    return optimizer


def train(stack, optimizer, steps, x=X):
    for _ in range(steps):
        optimizer.zero_grad()
        (stack(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def used_part(stack):
    sizes = [sum(p.numel() for p in module.parameters()) for module in stack.flat()]
    alive = stack.masks.current_wiring().alive
    return sum(size for size, on in zip(sizes, alive, strict=True) if on) / sum(sizes)


def random_case(modules, fan_in, seed, keep=0.6):
    """The budget of a chain, and random masks of it."""
    stack = chain(modules, fan_in, seed)
    how = mc.Blend(steps=1, keep=keep).priced(stack.flat(), stack.layout)
    real_TS = torch.rand(stack.masks.real.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    real_TS *= stack.masks.candidate_TS
    normalize_(real_TS, stack.masks.candidate_TS)
    return stack.masks, how.budget(stack.masks), real_TS


@settings(deadline=None, max_examples=25)
@given(
    st.integers(4, 9),
    st.integers(1, 3),
    st.sampled_from(["uniform", 0.1, 0.01]),
    st.floats(0, 0.99),
    st.integers(1, 7),
    st.integers(0, 99),
)
def test_the_budget_is_met_at_the_freeze_whatever_the_stack(modules, fan_in, mask_init, way, steps, seed):
    stack = chain(modules, fan_in, seed, mask_init=mask_init)
    masks, budget, _ = random_case(modules, fan_in, seed)
    smallest = smallest_cost(budget, masks._preferred_first_TS)
    keep = smallest + way * (1 - smallest)
    optimizer = attached(stack, mc.Blend(steps=steps, keep=keep))
    train(stack, optimizer, steps - 1)
    stack.train()
    stack(X)  # the last pass reads the top-K
    assert used_part(stack) <= keep + 1e-9
    train(stack, optimizer, 1)
    mc.freeze(stack)
    assert used_part(stack) <= keep + 1e-9


@settings(deadline=None, max_examples=10)
@given(st.floats(0, 0.9), st.integers(0, 99))
def test_the_budget_is_met_where_not_all_modules_may_be_read(way, seed):
    nearest = [list(range(max(0, k - 2), k)) for k in range(8)]
    stack = mc.MaskedStack(unequal_blocks(8, seed), 1, wiring=nearest, mask_init=0.01)
    how = mc.Blend(steps=6, keep=0.5).priced(stack.flat(), stack.layout)
    smallest = smallest_cost(how.budget(stack.masks), stack.masks._preferred_first_TS)
    keep = smallest + way * (1 - smallest)
    optimizer = attached(stack, mc.Blend(steps=6, keep=keep))
    train(stack, optimizer, 6)
    mc.freeze(stack)
    assert used_part(stack) <= keep + 1e-9


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 2), st.floats(0.75, 0.95), st.integers(0, 99))
def test_the_budget_is_met_in_layers_too(fan_in, keep, seed):
    blocks = iter(unequal_blocks(10, seed))
    stack = mc.MaskedStack([[next(blocks) for _ in range(size)] for size in (3, 3, 3, 1)], fan_in, seed=seed)
    optimizer = attached(stack, mc.Blend(steps=5, keep=keep))
    train(stack, optimizer, 5)
    mc.freeze(stack)
    assert used_part(stack) <= keep + 1e-9


def test_a_freeze_before_the_end_is_within_the_budget_too():
    stack = chain(8)
    optimizer = attached(stack, mc.Blend(steps=100, keep=0.5))
    train(stack, optimizer, 3)
    with pytest.warns(UserWarning, match="end"):
        mc.freeze(stack)
    assert used_part(stack) <= 0.5


@pytest.mark.parametrize("fan_in", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_fit_loses_least_of_all_wirings_within_the_budget(fan_in, seed):
    masks, budget, real_TS = random_case(5, fan_in, seed, keep=0.75)
    found = fit(real_TS, budget, masks._preferred_first_TS, budget.keep)

    def outcome(mask_TS):
        sources = [(), *(tuple(row.nonzero().flatten().tolist()) for row in mask_TS)]
        alive = reaching_output(tuple(sources), masks.layout.outputs)
        cost = float(torch.tensor(alive).double() @ budget.cost_M)
        best = [row.topk(len(read)).values.sum() for row, read in zip(real_TS, sources[1:], strict=True)]
        lost = [top - row[list(read)].sum() for top, row, read in zip(best, real_TS, sources[1:], strict=True)]
        return cost, float(sum(x for x, on in zip(lost, alive[1:], strict=True) if on))

    rows = [list(itertools.combinations(range(j), min(fan_in, j))) for j in range(1, 5)]
    every = []
    for wiring in itertools.product(*rows):
        mask_TS = torch.zeros(4, 4, dtype=torch.bool)
        for row, read in zip(mask_TS, wiring, strict=True):
            row[list(read)] = True
        every.append(outcome(mask_TS))
    assert outcome(found.mask_TS) == pytest.approx((found.cost, found.lost))
    assert found.cost <= budget.keep
    assert found.lost == pytest.approx(min(lost for cost, lost in every if cost <= budget.keep + 1e-9))
    assert smallest_cost(budget, masks._preferred_first_TS) == pytest.approx(min(cost for cost, _ in every))


@pytest.mark.parametrize("fan_in", [1, 2])
def test_the_gradient_of_the_expected_cost_is_that_of_finite_differences(fan_in):
    masks, budget, real_TS = random_case(6, fan_in, seed=3)
    share_MM = budget.matrix(shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=1.0))
    assert torch.autograd.gradcheck(budget.cost, (share_MM.clone().requires_grad_(),))


def test_the_use_of_modules_is_how_often_random_wirings_use_them():
    masks, budget, real_TS = random_case(6, 1, seed=1)
    wirings = itertools.product(*(list(enumerate(row[:j].tolist())) for j, row in enumerate(real_TS, start=1)))
    expected_M = torch.zeros(6, dtype=torch.float64)
    for wiring in wirings:
        alive = reaching_output(((), *((k,) for k, _ in wiring)), masks.layout.outputs)
        expected_M += torch.tensor(alive) * torch.tensor([p for _, p in wiring], dtype=torch.float64).prod()
    torch.testing.assert_close(budget.used(budget.matrix(real_TS)), expected_M)


def test_to_use_a_module_less_changes_the_use_of_no_other_and_costs_less_by_what_it_costs():
    _, budget, real_TS = random_case(6, 1, seed=2)
    share_MM = budget.matrix(real_TS)
    use_M, less_M = budget.used(share_MM), budget.used(budget.less_of(share_MM, 3, 0.25))
    expected_M = use_M.clone()
    expected_M[3] *= 0.75
    torch.testing.assert_close(less_M, expected_M)


def test_worth_is_the_squared_slope_of_the_loss_along_that():
    _, budget, real_TS = random_case(6, 1, seed=2)
    share_MM = budget.matrix(real_TS)
    grad_MM = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * budget.may_MM
    slopes = [((budget.less_of(share_MM, k, 0.1) - share_MM) * grad_MM).sum() / 0.1 for k in range(1, 5)]
    square = torch.stack(slopes).square()
    torch.testing.assert_close(budget.worth(share_MM, grad_MM)[1:5], square / square.mean())


def test_a_step_uses_no_more_than_the_budget_and_gives_up_what_is_worth_least():
    _, budget, _ = random_case(6, 1, seed=0)
    share_MM = budget.matrix(torch.eye(5))  # each reads the one before
    gain_M = torch.tensor([0, 9, 9, 0, 9, 0], dtype=torch.float64)
    after_MM = budget.step(share_MM, gain_M, 0.9)
    assert float(budget.cost(after_MM)) == pytest.approx(0.9)
    use_M = budget.used(after_MM)
    assert use_M[3] < 1
    torch.testing.assert_close(use_M[[0, 1, 2, 4, 5]], torch.ones(5, dtype=torch.float64))


class Added(nn.Module):
    """A residual block that adds a fixed amount of one feature, or next to nothing."""

    def __init__(self, feature, amount):
        super().__init__()
        self.register_buffer("add", amount * torch.nn.functional.one_hot(torch.tensor(feature), 4).float())
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.add * self.weight


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_matter_stay(seed):
    useful = {1, 4, 6}
    chooser = torch.Generator().manual_seed(seed)
    blocks = [Added(k % 4, 1.0 if k in useful else 0.01) for k in range(9)]
    target = sum(block.add for block in blocks)
    stack = mc.MaskedStack(blocks, 1, mask_init=0.01, seed=seed)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.0, mask_lr=0.05))
    mc.attach(optimizer, stack, mc.Blend(steps=100, keep=5 / 9))
    for _ in range(100):
        x = torch.randn(4, 4, generator=chooser)
        noise = torch.randn(4, 4, generator=chooser)
        optimizer.zero_grad()
        (stack(x) - x - target - noise).square().mean().backward()
        optimizer.step()
    mc.freeze(stack)
    alive = {k for k, on in enumerate(stack.masks.current_wiring().alive) if on}
    assert useful | {0, 8} == alive


def test_a_rewired_model_learns_which_blocks_to_skip():
    model = mc.rewire(nn.Sequential(nn.Linear(4, 4), nn.Sequential(*unequal_blocks(8))), "1", fan_in=1)
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=0.05))
    mc.attach(optimizer, model, mc.Blend(steps=20, keep=0.5))
    train(model, optimizer, 20)
    mc.freeze(model)
    assert used_part(model[1]) <= 0.5


def test_a_budget_of_all_changes_nothing_bitwise():
    def learned(**options):
        stack = chain(6, 2)
        train(stack, attached(stack, mc.Blend(steps=12, **options)), 12)
        return stack.state_dict()

    plain, kept, smaller = learned(), learned(keep=1), learned(keep=0.8)
    assert all(torch.equal(plain[name], kept[name]) for name in plain)
    assert not torch.equal(plain["masks.real"], smaller["masks.real"])


@pytest.mark.parametrize("load_first", [True, False])
def test_a_resumed_run_is_equal_bitwise(load_first):
    how = mc.Blend(steps=20, keep=0.6)
    whole = chain()
    optimizer = attached(whole, how)
    train(whole, optimizer, 9)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, 12)

    resumed = chain(seed=5)
    if load_first:
        resumed.load_state_dict(saved[0])
    optimizer = attached(resumed, how)
    if not load_first:
        resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, 12)
    expected, found = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.wiring() == resumed.wiring()


def test_a_restored_stack_knows_its_budget_without_attach():
    stack = chain(8)
    train(stack, attached(stack, mc.Blend(steps=100, keep=0.5)), 3)
    restored = chain(8, seed=1)
    restored.load_state_dict(stack.state_dict())
    assert restored.masks.how == stack.masks.how
    assert restored.wiring() == stack.wiring()
    assert used_part(restored) <= 0.5


def test_a_budget_is_plain_data_and_back():
    how = mc.Blend(steps=3, keep=0.5, costs=[1, 2, 3])
    assert how.costs == (1.0, 2.0, 3.0)
    assert from_plain(to_plain(how)) == how
    assert from_plain({**to_plain(how), "costs": [1.0, 2.0, 3.0]}) == how  # as JSON has it


def test_other_costs_than_parameters_can_be_counted():
    stack = chain(6)
    optimizer = attached(stack, mc.Blend(steps=10, keep=0.5, costs=[0, 1, 1, 1, 1, 0]))
    train(stack, optimizer, 10)
    mc.freeze(stack)
    assert sum(stack.masks.current_wiring().alive[1:5]) <= 2


def test_parameters_that_modules_share_are_not_counted():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    assert parameters_of([one, two, nn.Linear(2, 1)]) == (2, 0, 3)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (chain, {"keep": 0}, "keep is 0.0; it must be above 0 and at most 1"),
        (chain, {"keep": 1.1}, "keep is 1.1; it must be above 0 and at most 1"),
        (chain, {"keep": "half"}, "keep is 'half'"),
        (chain, {"keep": 0.1}, r"keep is 0.1; the smallest possible here is 0.\d+, because the first and the last"),
        (
            lambda: chain(use_all=True),
            {"keep": 0.8},
            "use_all=True makes every module read. Set keep=1 or",
        ),
        (lambda: chain(aggregation="stream"), {"keep": 0.8}, "aggregation='stream' reads every module"),
        (chain, {"keep": 0.8, "costs": [1, 2]}, "costs has 2 numbers; the stack has 6 modules"),
        (chain, {"keep": 0.8, "costs": [-1] * 6}, "costs has -1.0; each must be a finite number of 0 or more"),
        (chain, {"keep": 0.8, "costs": 3}, "costs is 3; it must be a list with one number per module"),
        (lambda: mc.MaskedStack([nn.Tanh()] * 3, 1), {"keep": 0.8}, "the cost of every module is 0; pass costs"),
        (
            lambda: mc.MaskedStack([nn.LazyLinear(4) for _ in range(3)], 1),
            {"keep": 0.8},
            "Run a batch before mc.attach",
        ),
    ],
)
def test_a_budget_that_cannot_be_met_is_one_sentence(make, options, message):
    stack = make()
    optimizer = torch.optim.SGD([*mc.param_groups(stack, lr=0.1, mask_lr=0.1), {"params": [nn.Parameter(X)]}])
    with pytest.raises(ConfigError, match=message):
        mc.attach(optimizer, stack, mc.Blend(steps=5, **options))


def test_the_smallest_budget_that_the_error_names_works():
    stack = chain(6, 2)
    with pytest.raises(ConfigError, match="smallest possible here is") as error:
        attached(stack, mc.Blend(steps=5, keep=0.1))
    smallest = float(str(error.value).split("here is ")[1].split(",")[0])
    optimizer = attached(stack, mc.Blend(steps=5, keep=smallest))
    train(stack, optimizer, 5)
    mc.freeze(stack)
    assert [k for k, on in enumerate(stack.masks.current_wiring().alive) if on] == [0, 1, 5]


def test_a_budget_goes_down_in_a_straight_line_and_then_stays():
    _, budget, _ = random_case(6, 1, seed=0, keep=0.6)
    assert isinstance(budget, Budget)
    assert [budget.limit_after(part) for part in (0, 0.35, 0.7, 1)] == pytest.approx([1, 0.8, 0.6, 0.6])
