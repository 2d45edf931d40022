import pytest
import torch

import maskconnect as mc
from maskconnect.core.align import align


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
def test_an_align_that_returns_something_else_is_told_so(wrong, says):
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
