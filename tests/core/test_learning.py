"""K distinct draws: their distribution is that of sequential sampling without replacement."""

from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from maskconnect.core.sampling import largest, noisy_scores, normalize_


def exact_probabilities(weights, fan_in):
    """Of every set of `fan_in` sources: the chance that sequential draws without replacement end in it."""
    chances = {}
    for chosen in combinations(range(len(weights)), fan_in):
        chances[chosen] = 0.0
        for order in permutations(chosen):
            left, chance = sum(weights), 1.0
            for k in order:
                chance *= weights[k] / left
                left -= weights[k]
            chances[chosen] += chance
    return chances


def drawn_sets(weights, fan_in, draws, seed=0, temperature=1.0):
    real_TS = torch.tensor([weights]).expand(draws, -1)
    everything = torch.ones_like(real_TS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    counts_T = torch.full((draws,), fan_in)
    score_TS = noisy_scores(real_TS, everything, generator=generator, temperature=temperature)
    mask_TS = largest(score_TS, counts_T)
    return [tuple(row.nonzero().flatten().tolist()) for row in mask_TS]


def test_with_a_temperature_draws_are_those_from_a_power_of_the_masks():
    weights, draws = [0.4, 0.3, 0.2, 0.1], 20_000
    expected = exact_probabilities([w**2 for w in weights], 2)
    found = drawn_sets(weights, 2, draws, temperature=0.5)
    counts = [found.count(chosen) for chosen in expected]
    assert chisquare(counts, [draws * chance for chance in expected.values()]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("weights", "fan_in"),
    [
        ([0.5, 0.3, 0.2], 1),
        ([0.5, 0.3, 0.2], 2),
        ([0.7, 0.1, 0.1, 0.1], 2),
        ([0.4, 0.3, 0.2, 0.05, 0.05], 3),
        ([0.2] * 5, 2),
    ],
)
def test_draws_are_distributed_as_sequential_sampling_without_replacement(weights, fan_in):
    draws = 20_000
    expected = exact_probabilities(weights, fan_in)
    found = drawn_sets(weights, fan_in, draws)
    counts = [found.count(chosen) for chosen in expected]
    assert chisquare(counts, [draws * chance for chance in expected.values()]).pvalue > 1e-3


def test_the_chi_square_test_would_notice_draws_that_ignore_the_weights():
    expected = exact_probabilities([0.5, 0.3, 0.2], 2)
    found = drawn_sets([1 / 3] * 3, 2, 20_000)
    counts = [found.count(chosen) for chosen in expected]
    assert chisquare(counts, [20_000 * chance for chance in expected.values()]).pvalue < 1e-6


def test_where_positive_entries_run_out_the_rest_is_drawn_uniformly_from_the_zero_ones():
    found = drawn_sets([1.0, 0.0, 0.0, 0.0, 0.0], 2, 8_000)
    counts = [found.count((0, k)) for k in (1, 2, 3, 4)]
    assert sum(counts) == 8_000
    assert chisquare(counts).pvalue > 1e-3


def test_the_smallest_positive_entry_still_goes_before_a_zero_one():
    tiny = torch.finfo(torch.float32).tiny
    assert set(drawn_sets([tiny, 0.0, 1.0], 2, 2_000)) == {(0, 2)}


@given(
    rows=st.lists(
        st.lists(st.one_of(st.just(0.0), st.floats(0, 1, width=32)), min_size=1, max_size=7), min_size=1, max_size=6
    ),
    fan_in=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_every_row_has_exactly_its_fan_in_of_ones_all_of_them_candidates(rows, fan_in, seed):
    width = max(map(len, rows))
    real_TS = torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
    candidate_TS = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    fan_in_T = torch.tensor([min(fan_in, len(row)) for row in rows])
    normalize_(real_TS, candidate_TS)
    torch.testing.assert_close(real_TS.sum(dim=1), torch.ones(len(rows)))
    mask_TS = largest(noisy_scores(real_TS, candidate_TS, generator=torch.Generator().manual_seed(seed)), fan_in_T)
    assert torch.equal(mask_TS.sum(dim=1), fan_in_T)
    assert not (mask_TS & ~candidate_TS).any()
    active_T = (mask_TS & (real_TS > 0)).sum(dim=1)
    assert torch.equal(active_T, torch.minimum(fan_in_T, (real_TS > 0).sum(dim=1)))


def test_a_row_of_zeros_becomes_uniform_over_its_candidates_only():
    real_TS = torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.2, 0.0]])
    normalize_(real_TS, torch.tensor([[True, True, False], [True, True, True]]))
    torch.testing.assert_close(real_TS, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]))


def test_all_targets_are_drawn_in_one_call_and_independently():
    real_TS = torch.full((1000, 6), 1 / 6)
    everything = torch.ones_like(real_TS, dtype=torch.bool)
    score_TS = noisy_scores(real_TS, everything, generator=torch.Generator().manual_seed(0))
    mask_TS = largest(score_TS, torch.full((1000,), 2))
    assert len(set(map(tuple, mask_TS.tolist()))) == 15  # all pairs of six occur


def test_of_equal_scores_the_first_are_the_largest():
    score_TS = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert largest(score_TS, torch.tensor([2])).tolist() == [[False, True, True, False]]
