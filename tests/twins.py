"""The same thing done by a model in the fast way and by its twin in the readable way."""

import copy

from maskconnect.core.reference import reference


def largest_difference(found, expected):
    """Relative to the largest entry."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def assert_same(fast, readable, tolerance=1e-10):
    """Gradients of weights and masks, and running statistics."""
    for (name, p), q in zip(fast.named_parameters(), readable.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or largest_difference(p.grad, q.grad) < tolerance, name
    for (name, p), q in zip(fast.named_buffers(), readable.buffers(), strict=True):
        assert largest_difference(p.double(), q.double()) < tolerance, name


def both_ways(model, use, tolerance=1e-10):
    """Do the same with a model and in the readable way with its twin; they must end alike."""
    twin = copy.deepcopy(model)
    found = use(model)
    with reference():
        expected = use(twin)
    assert largest_difference(found, expected) < tolerance
    assert_same(model, twin, tolerance)
    return found
