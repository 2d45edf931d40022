import json

import pytest

import maskconnect as mc
from maskconnect.core.wiring import Layout, random_sources, reaching_output

CHAIN = Layout((1, 1, 1, 1), layered=False)
LAYERED = Layout((3, 2, 3), layered=True)


def test_in_a_chain_every_earlier_module_is_a_candidate():
    assert CHAIN.candidates() == ((), (0,), (0, 1), (0, 1, 2))


def test_in_layers_all_branches_of_the_layer_before_are_candidates():
    assert LAYERED.candidates() == ((), (), (), (0, 1, 2), (0, 1, 2), (3, 4), (3, 4), (3, 4))


def test_prev_is_the_module_before_or_the_same_branch_of_the_layer_before():
    assert CHAIN.prev() == ((), (0,), (1,), (2,))
    assert LAYERED.prev() == ((), (), (), (0,), (1,), (3,), (4,), (3,))


def test_ties_prefer_the_nearest_source_or_the_own_branch_and_then_cyclic_ones():
    assert sorted(range(3), key=lambda k: CHAIN.preferred(3, k)) == [2, 1, 0]
    wide = Layout((4, 4), layered=True)
    assert sorted(range(4), key=lambda k: wide.preferred(6, k)) == [2, 3, 0, 1]


@pytest.mark.parametrize("layout", [CHAIN, LAYERED])
def test_plain_data_goes_through_json_and_back(layout):
    sources = layout.candidates()
    plain = json.loads(json.dumps(layout.to_plain(sources)))
    assert layout.from_plain(plain, what="wiring") == sources


def test_plain_data_of_layers_counts_branches_of_the_layer_before():
    assert LAYERED.to_plain(LAYERED.prev()) == [[[], [], []], [[0], [1]], [[0], [1], [0]]]


def test_random_sources_are_seeded_distinct_and_as_many_as_asked():
    candidates = Layout((1,) * 9, layered=False).candidates()
    fan_in = [min(3, len(row)) for row in candidates[1:]]
    first = random_sources(candidates, fan_in, seed=1)
    assert first == random_sources(candidates, fan_in, seed=1)
    assert first != random_sources(candidates, fan_in, seed=2)
    assert [len(set(row)) for row in first[1:]] == fan_in
    assert all(set(row) <= set(allowed) for row, allowed in zip(first, candidates, strict=True))


def test_only_modules_with_a_path_to_the_output_reach_it():
    # 1 is read by 2 alone, and 2 by nothing: neither reaches the output, module 3.
    assert reaching_output(((), (0,), (1,), (0,)), [3]) == (True, False, False, True)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ([[], [0], [3], [0]], "module 2 lists source 3; it may read only the modules before it, 0 to 1"),
        ([[], [1], [0], [0]], "module 1 lists source 1"),
        ([[], [0], [-1], [0]], "module 2 lists source -1"),
        ([[0], [0], [0], [0]], "module 0 lists source 0; it reads the input of the stack and nothing else"),
        ([[], [0], [], [0]], "module 2 has no source"),
        ([[], [0], [0, 0], [0]], "module 2 lists a source twice"),
        ([[], [0], [0.5], [0]], "a source of module 2 is 0.5; it must be an integer"),
        ([[], [0], 0, [0]], "holds 0; a wiring has a list of sources"),
        ([[], [0]], "has 2 rows; the stack has 4 modules"),
        ({"a": [[]], "b": [[]]}, "is a dict"),
    ],
)
def test_a_wiring_that_does_not_fit_is_one_clear_error(plain, says):
    with pytest.raises(mc.MaskConnectError, match=says.replace("[", r"\[")):
        CHAIN.from_plain(plain, what="wiring")


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (
            [[[], [], []], [[3], [0]], [[0], [0], [0]]],
            "branch 0 of layer 1 lists source 3; it may read only the branch",
        ),
        ([[[], [], []], [[0]], [[0], [0], [0]]], "layer 1 has 1 rows; it has 2 branches"),
        ([[[], [], []], [[0], [0]]], "has 2 rows; the stack has 3 layers"),
    ],
)
def test_a_layered_wiring_that_does_not_fit_is_one_clear_error(plain, says):
    with pytest.raises(mc.ConnectivityError, match=says):
        LAYERED.from_plain(plain, what="connectivity")
