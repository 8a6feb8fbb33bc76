"""Digests of tensors on a device, computed here on the CPU."""

import sys
from typing import Any

import pytest
import torch

from dcpbench.plugins.script.run import RECORDER


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recorder's module, with a chunk that is smaller than the largest tensor."""
    monkeypatch.setattr(sys, "path", [str(RECORDER), *sys.path])
    from dcpbench_recorder import digests

    monkeypatch.setattr(digests, "_CHUNK", 1 << 14)
    monkeypatch.setattr(digests, "_SMALL", 4096)
    return digests


def tensors() -> list[torch.Tensor]:
    """Words of tensors: small ones, larger ones, and several chunks."""
    torch.manual_seed(1)
    return [torch.randn(count).view(torch.int32) for count in (1, 10, 4096, 4097, 50_000)]


def numbers(sums: list[Any]) -> list[int]:
    return [int(total) for total in sums]


def test_each_change_is_seen(digests: Any) -> None:
    words = tensors()
    before = numbers(digests._sums(words))
    for number, changed in enumerate(words):
        for at in {0, len(changed) // 2, len(changed) - 1}:
            for bit in (0, 31):
                other = changed.clone()
                other[at] ^= torch.tensor(1 << bit).int()
                after = numbers(digests._sums([*words[:number], other, *words[number + 1 :]]))
                assert [place for place in range(len(words)) if before[place] != after[place]] == [number]


def test_order_counts(digests: Any) -> None:
    words = torch.arange(10_000, dtype=torch.int32)
    swapped = [words.clone() for _ in range(3)]
    for (first, second), other in zip([(0, 1), (0, 4096), (4095, 4096)], swapped, strict=True):
        other[[first, second]] = other[[second, first]]
    assert len({*numbers(digests._sums([words, *swapped, words.flip(0)]))}) == 5


def test_a_digest_is_of_the_tensor_alone(digests: Any) -> None:
    """A checkpoint has the same tensors under other names, in another order, and among others."""
    words = tensors()
    together = numbers(digests._sums(words))
    assert numbers(digests._sums(words[::-1])) == together[::-1]
    assert [int(digests._sums([other])[0]) for other in words] == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_one_element_has_the_same_digest_on_each_device(digests: Any, dtype: torch.dtype) -> None:
    step = torch.tensor(7).to(dtype)
    words = step.view(-1).view(digests._INTEGERS[step.element_size()])
    named = digests.digests({"step": step, "more": torch.ones(3), "same": step[None]})
    assert named["step"] == named["same"] == numbers(digests._sums([words]))[0]
    assert named["step"] != digests.digests({"step": torch.zeros((), dtype=dtype)})["step"]


def test_samples_have_a_digest_each(digests: Any) -> None:
    batch = torch.arange(24).view(4, 3, 2)[[1, 0, 1, 3]]
    first, second, third, fourth = digests.rows([[batch], {}]).values()
    assert first == third
    assert len({first, second, fourth}) == 3
    assert digests.rows([[torch.tensor(3.0)], {"x": batch.bool()}])
    assert digests.rows([[torch.zeros(10_000, 2)], {}]) == {}


def test_rows_of_a_batch_are_its_samples_and_numbers_are_not(digests: Any) -> None:
    assert len(digests.rows([3, torch.arange(8), torch.zeros(5, 2)])) == 5
    assert digests.rows([torch.arange(8)]) == {}
