"""Text from rewired and pruned models of transformers, with and without a cache; and how fast a pruned one is."""

import copy

import pytest
import torch
from families import IDS, llama

import maskconnect as mc
from maskconnect.ship.measure import interleaved

WIRINGS = {
    "chain": [[], [0], [0], [2], [2], [4]],
    "joins": [[], [0], [0], [1], [0, 2], [2, 4]],
}  # in both, blocks 1 and 3 are unread
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "drawn": {"do_sample": True, "top_k": 0},
}


def text(model, prompt, **options):
    torch.manual_seed(0)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def frozen(wiring):
    torch.manual_seed(1)
    model = llama(initializer_range=0.5).eval()
    return mc.rewire(model, "model.layers", connectivity=wiring)


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_pruned_llama_writes_with_a_cache_what_it_does_without(wiring, way):
    prompt = torch.randint(3, IDS, (2, 5))
    model = frozen(wiring)
    uncached = {name: value for name, value in way.items() if name != "cache_implementation"}
    wanted = text(copy.deepcopy(model), prompt, use_cache=False, **uncached)
    assert wanted.shape == (2, 13)
    pruned = mc.prune(model, input_ids=prompt)
    assert torch.equal(text(pruned, prompt, use_cache=False, **uncached), wanted)
    for other in (pruned, model):
        for _ in range(2):  # the frozen model skips its unread blocks from its second pass on
            assert torch.equal(text(other, prompt, use_cache=True, **way), wanted)


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_pruned_blocks_leave_no_entries_in_the_cache(wiring):
    prompt = torch.randint(3, IDS, (2, 5))
    pruned = mc.prune(frozen(wiring), input_ids=prompt)
    cache = pruned(input_ids=prompt, use_cache=True).past_key_values
    assert cache.get_seq_length() == 5
    assert [cache.get_seq_length(k) for k in (0, 1, 2, 3, 4, 5)] == [5, 0, 5, 0, 5, 5]


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_hidden_states_that_are_asked_for_are_those_of_the_frozen_model(wiring):
    prompt = torch.randint(3, IDS, (2, 5))
    model = frozen(wiring)
    asked = {"input_ids": prompt, "output_hidden_states": True, "use_cache": False}
    wanted = copy.deepcopy(model)(**asked).hidden_states
    assert len(wanted) == 7
    pruned = mc.prune(model, asked)
    for other in (model, model, pruned):
        for a, b in zip(other(**asked).hidden_states, wanted, strict=True):
            assert torch.equal(a, b)


def test_a_llama_of_12_layers_without_9_of_them_is_at_least_twice_as_fast():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    plain = llama(12, vocab_size=100, **sizes, use_cache=False).eval()
    unread = set(range(1, 10))
    wiring = [[k for k in range(j) if k not in unread][-1:] for j in range(12)]
    model = mc.rewire(copy.deepcopy(plain), "model.layers", connectivity=wiring)
    ids = torch.randint(3, 100, (2, 64))
    pruned = mc.prune(model, input_ids=ids).eval()
    millions = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (plain, pruned)]
    assert millions == pytest.approx([7.9, 2.0], abs=0.1)
    with torch.inference_mode():
        variants = {"plain": lambda: plain(input_ids=ids), "pruned": lambda: pruned(input_ids=ids)}
        times = interleaved(variants, rounds=30, seconds=5.0)
    assert times["plain"].over(times["pruned"]).rounds > 2  # 3.8 to 4.1 where this was written
