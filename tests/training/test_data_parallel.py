"""One process on several GPUs: sums over the parts of a batch, a loss inside the model, and the refusal on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from dualtrain import UserError
from dualtrain.trainer.data_parallel import WithLoss, replicate, sums

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


def batch(classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(24, 6, generator=draw), torch.randint(classes, (24,), generator=draw)


def model(classes: int = 10) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_sum_divided_by_the_weight_is_the_mean_loss(smoothing):
    inputs, targets = batch()
    logits = model()(inputs)
    targets[::3] = -100
    loss, weight, *_ = sums(logits, targets, smoothing)
    assert weight == 16
    torch.testing.assert_close(
        (loss / weight).float(), functional.cross_entropy(logits, targets, label_smoothing=smoothing)
    )


def test_correct_predictions_are_counted_in_the_top_1_and_the_top_5():
    logits = torch.arange(8.0).repeat(5, 1)
    assert sums(logits, torch.tensor([7, 7, 3, 2, -100]))[1:].tolist() == [4, 2, 3]


def test_with_few_classes_every_counted_target_is_in_the_top_5():
    logits = torch.arange(3.0).repeat(4, 1)
    assert sums(logits, torch.tensor([2, 0, 1, -100]))[1:].tolist() == [3, 1, 3]


def test_tokens_are_counted_like_samples():
    logits = torch.arange(8.0).repeat(2, 3, 1)
    targets = torch.tensor([[7, -100, 4], [0, -100, -100]])
    torch.testing.assert_close(sums(logits, targets), sums(logits.flatten(0, 1), targets.flatten()))
    assert sums(logits, targets)[1:].tolist() == [3, 1, 2]


def test_a_batch_of_ignored_targets_gives_zero_sums_and_zero_gradients():
    logits = torch.randn(3, 4, requires_grad=True)
    result = sums(logits, torch.full((3,), -100), 0.1)
    result[0].backward()
    assert result.tolist() == [0, 0, 0, 0]
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_is_summed_in_higher_precision():
    logits = torch.zeros(3000, 2, dtype=torch.float16)
    result = sums(logits, torch.zeros(3000, dtype=torch.int64))
    assert (result.dtype, result[1].item()) == (torch.float64, 3000)
    torch.testing.assert_close(result[0].item(), 3000 * 0.6931471805599453)


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_sums_and_gradients_of_the_parts_add_up_to_those_of_the_batch(parts):
    inputs, targets = batch()
    targets[0] = -100
    whole, split = WithLoss(model(), 0.1), WithLoss(model(), 0.1)
    expected = whole(inputs, targets)
    chunks = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
    gathered = torch.cat([split(*part) for part in chunks])
    assert (expected.shape, gathered.shape) == ((1, 4), (parts, 4))
    torch.testing.assert_close(gathered.sum(0), expected[0])
    expected[0, 0].backward()
    gathered.sum(0)[0].backward()
    for part, full in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.grad, full.grad)


def test_wrapping_a_model_with_its_loss_adds_no_parameters():
    inner = model()
    assert list(WithLoss(inner).parameters()) == list(inner.parameters())


def test_data_parallel_on_a_cpu_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"needs GPUs: on the cpu .* torchrun .* --nproc N") as caught:
        replicate(WithLoss(model()), torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@needs_gpu
def test_an_output_device_that_does_not_exist_is_named():
    count = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"--output-device {count} does not exist: torch sees {count} GPU"):
        replicate(model().cuda(), torch.device("cuda", 0), count)


@pytest.mark.gpu
@needs_gpu
def test_on_gpus_the_loss_inside_the_model_has_the_same_sums_and_gradients():
    device = torch.device("cuda", 0)
    inputs, targets = (tensor.to(device) for tensor in batch())
    alone, spread = model().to(device), model().to(device)
    expected = sums(alone(inputs), targets, 0.1)
    result = replicate(WithLoss(spread, 0.1), device)(inputs, targets)
    assert result.shape == (min(torch.cuda.device_count(), len(inputs)), 4)
    torch.testing.assert_close(result.sum(0), expected)
    expected[0].backward()
    result.sum(0)[0].backward()
    for part, full in zip(spread.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(part.grad, full.grad)


@pytest.mark.gpu
@needs_gpus
def test_outputs_are_gathered_on_the_requested_gpu():
    device = torch.device("cuda", 0)
    outputs = replicate(model().to(device), device, 1)(batch()[0].to(device))
    assert outputs.device == torch.device("cuda", 1)
