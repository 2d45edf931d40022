"""The benchmark behind research/when.md: what its sources see, what is paired, what is kept."""

import json
from statistics import fmean

import pytest
import when_learning_pays as pays


def case(**options):
    return pays.Case(**{"readers": 1, "kind": "noisy copies", "candidates": 16, "wiring": "random"} | options)


def seen(view):
    return view.rows, view.columns, view.noise


@pytest.mark.parametrize("kind", pays.KINDS)
def test_only_equal_sources_see_the_same(kind):
    different = {repr(seen(view)) for view in pays.views(kind, 16, seed=0)}
    assert (len(different) == 1) == (kind == "equal")


def test_few_candidates_are_the_first_of_many_and_each_seed_has_its_own():
    many, few, other = (pays.views("unlike", *which) for which in ((64, 0), (4, 0), (4, 1)))
    assert [*map(seen, many[:4])] == [*map(seen, few)] != [*map(seen, other)]


def test_training_validation_and_test_images_are_distinct_parts_of_the_digits():
    images, labels = pays.digits()
    assert [len(part) for part in images] == [len(part) for part in labels] == [797, 300, 700]
    assert all(part.unique().tolist() == [*range(10)] for part in labels)


def test_a_run_is_the_same_again_and_random_wiring_reads_two():
    first, again = (pays.train(case(), 0, steps=(2, 2, 1)) for _ in range(2))
    assert first == again
    assert [len(row) for row in first["wiring"]] == [2]


def test_a_learned_reader_finds_sources_with_little_noise():
    noise = [view.noise for view in pays.views("noisy copies", 16, seed=0)]
    run = pays.train(case(wiring="learned", rate=pays.RATE), 0)
    assert fmean(noise[k] for k in run["wiring"][0]) < 0.5 * fmean(noise)
    assert run["test"] > 85


def test_what_is_there_is_not_run_again_and_differences_are_learned_less_random(tmp_path, monkeypatch, capsys):
    runs = {}
    for kind in pays.KINDS:
        for wiring, rate, better in (("random", None, 0.0), ("learned", pays.RATE, 5.0)):
            which = case(kind=kind, candidates=4, wiring=wiring, rate=rate)
            runs[which.name] = {str(seed): {"validation": 0.0, "test": 80 + better + seed**better} for seed in (0, 1)}
    place = tmp_path / "when_learning_pays.json"
    place.write_text(json.dumps(runs))
    chosen = ["--results", str(tmp_path), "--seeds", "2"]
    pays.main([*chosen, "--readers", "1", "--candidates", "4", "--wirings", "random", "learned"])
    assert json.loads(place.read_text()) == runs
    capsys.readouterr()
    pays.main([*chosen, "--show", "random"])
    assert "| unlike | 1 | 2 | +4.50 (-1.85 to +10.85) |" in capsys.readouterr().out
