import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core import credit
from maskconnect.core.align import align, aligns_via


def test_the_same_shape_is_the_same_tensor():
    y = torch.randn(2, 3, 8, 8)
    assert align(y, y.shape) is y


@pytest.mark.parametrize(
    ("found", "wanted", "stride"), [(32, 16, 2), (32, 8, 4), (7, 4, 2), (5, 3, 2), (28, 4, 8), (9, 3, 4), (12, 4, 3)]
)
def test_larger_maps_are_subsampled_by_a_stride_and_missing_channels_are_zero(found, wanted, stride):
    y = torch.randn(2, 3, found, found)
    x = align(y, torch.Size((2, 5, wanted, wanted)))
    torch.testing.assert_close(x[:, :3], y[:, :, ::stride, ::stride], rtol=0, atol=0)
    assert not x[:, 3:].any()


def test_alignment_matches_what_a_strided_convolution_leaves():
    y = torch.randn(1, 4, 15, 11)
    like = torch.nn.Conv2d(4, 6, 3, stride=2, padding=1)(y)
    assert align(y, like.shape).shape == like.shape


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 8, 8, 8)])
def test_vectors_and_volumes_are_aligned_likewise(shape):
    wanted = torch.Size((2, 4, *(4 for _ in shape[2:])))
    assert align(torch.randn(shape), wanted).shape == wanted


def test_tensors_of_three_axes_are_left_to_the_user_lest_features_be_taken_for_positions():
    assert align(torch.randn(2, 10, 8), torch.Size((2, 10, 4))) is None


@pytest.mark.parametrize("wanted", [(2, 2, 8, 8), (2, 3, 16, 16), (2, 3, 7, 7), (3, 3, 8, 8), (2, 3, 8), (2, 3, 0, 0)])
def test_what_no_stride_and_no_padding_reaches_is_none(wanted):
    assert align(torch.randn(2, 3, 8, 8), torch.Size(wanted)) is None


def test_shapes_that_cannot_be_aligned_name_source_target_and_both_shapes():
    stack = mc.MaskedStack([torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 3)], fan_in=2)
    says = r"module 0 has output shape \(5, 6\) and cannot feed module 2, which needs \(5, 3\).*module 1"
    with pytest.raises(mc.ConnectivityError, match=says):
        stack(torch.randn(5, 4))


def test_an_align_of_the_users_own_takes_over():
    def crop(source, shape):
        return source[:, : shape[1]]

    stack = mc.MaskedStack([torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2)], 2, align=crop)
    assert stack(torch.randn(5, 4)).shape == (5, 2)


@pytest.mark.parametrize(
    ("wrong", "says"), [(lambda source, _: source, r"returned \(5, 6\)"), (lambda *_: "no", "returned str")]
)
def test_an_align_that_returns_something_else_is_an_error(wrong, says):
    stack = mc.MaskedStack([torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2)], 2, align=wrong)
    with pytest.raises(mc.ConnectivityError, match=says):
        stack(torch.randn(5, 4))


def test_each_source_is_aligned_once_for_all_targets_of_a_shape():
    calls = []

    def pad(source, shape):
        calls.append((source.shape[1], shape[1]))
        return torch.nn.functional.pad(source, (0, shape[1] - source.shape[1]))

    blocks = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 8), *(torch.nn.Linear(8, 8) for _ in range(3))]
    mc.MaskedStack(blocks, 2, align=pad)(torch.randn(5, 4))
    assert calls == [(4, 8)]


@given(st.integers(1, 70), st.integers(0, 3), st.integers(0, 3))
def test_the_way_through_a_shape_in_between_gives_the_same(length, first, second):
    halved = [length]
    for _ in range(first + second):
        halved.append(-(-halved[-1] // 2))
    shapes = [torch.Size((1, channels, n, n)) for channels, n in ((2, length), (3, halved[first]), (4, halved[-1]))]
    source = torch.randn(shapes[0])
    direct = align(source, shapes[2])
    if aligns_via(*shapes):
        assert torch.equal(align(align(source, shapes[1]), shapes[2]), direct)
    assert aligns_via(*(torch.Size((1, 2, n, n)) for n in (32, 16, 8)))
    assert not aligns_via(*(torch.Size((1, 2, n, n)) for n in (27, 14, 3)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [2, 5])
def test_the_gradient_is_that_of_slicing_and_padding_in_the_layout_of_the_source(layout, channels):
    source = torch.randn(3, 2, 8, 8, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    expected = source.detach().clone().requires_grad_()
    y = align(source, torch.Size((3, channels, 4, 4)))
    by_hand = F.pad(expected[:, :, ::2, ::2], [0, 0, 0, 0, 0, channels - 2])
    assert torch.equal(y, by_hand)
    assert y.is_contiguous(memory_format=layout)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    by_hand.backward(gradient)
    assert torch.equal(source.grad, expected.grad)
    (found,) = torch.autograd.grad(align(source, torch.Size((3, channels, 4, 4))).sum(), source)
    assert found.stride() == source.stride()
    assert torch.autograd.gradcheck(lambda x: align(x, torch.Size((3, channels, 4, 4))), source)
    assert torch.autograd.gradgradcheck(lambda x: align(x, torch.Size((3, channels, 4, 4))) ** 2, source)


def test_nothing_that_was_aligned_for_mask_gradients_outlives_the_backward_pass(monkeypatch):
    made = []
    monkeypatch.setattr(credit, "Aligned", lambda _original=credit.Aligned: made.append(_original()) or made[-1])
    widths = [(3, 3), (3, 8), (8, 8), (8, 8), (8, 8)]
    stack = mc.MaskedStack([nn.Conv2d(*pair, 1) for pair in widths], 1)
    loss = stack(torch.randn(2, 3, 4, 4)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert [aligned.latest for aligned in made] == [(None, {})]
