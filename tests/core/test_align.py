import pytest
import torch

import maskconnect as mc
from maskconnect.core.align import align


def test_the_same_shape_is_the_same_tensor():
    y = torch.randn(2, 3, 8, 8)
    assert align(y, y.shape) is y


@pytest.mark.parametrize(("found", "wanted", "stride"), [(32, 16, 2), (32, 8, 4), (7, 4, 2), (5, 3, 2), (9, 1, 9)])
def test_larger_maps_are_subsampled_by_a_stride_and_missing_channels_are_zero(found, wanted, stride):
    y = torch.randn(2, 3, found, found)
    x = align(y, torch.Size((2, 5, wanted, wanted)))
    torch.testing.assert_close(x[:, :3], y[:, :, ::stride, ::stride], rtol=0, atol=0)
    assert not x[:, 3:].any()


def test_alignment_matches_what_a_strided_convolution_leaves():
    y = torch.randn(1, 4, 15, 11)
    like = torch.nn.Conv2d(4, 6, 3, stride=2, padding=1)(y)
    assert align(y, like.shape).shape == like.shape


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 8), (2, 3, 8, 8, 8)])
def test_every_number_of_spatial_axes_will_do(shape):
    y = torch.randn(shape)
    assert align(y, torch.Size((2, 4, *(4 for _ in shape[2:])))).shape[1] == 4


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


def test_an_align_that_returns_another_shape_is_told_so():
    stack = mc.MaskedStack(
        [torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2)], 2, align=lambda source, _: source
    )
    with pytest.raises(mc.ConnectivityError, match=r"the one given returned \(5, 6\)"):
        stack(torch.randn(5, 4))
