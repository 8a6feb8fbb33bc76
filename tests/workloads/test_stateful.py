"""The stateful object of every training run: its values, and that each step changes it."""

import torch

from dcpbench.compare.leaves import bits
from dcpbench.workloads.stateful import MovingObject

CPU = torch.device("cpu")


def test_each_step_and_seed_has_another_object() -> None:
    objects = [MovingObject(seed, CPU) for seed in (0, 1000, 2000)]
    seen: dict[str, set[bytes]] = {}
    for each in objects:
        for _ in range(20):
            for name, value in each.state_dict().items():
                seen.setdefault(name, set()).add(bits(value).numpy().tobytes())
            each.advance()
    assert {name: len(values) for name, values in seen.items()} == dict.fromkeys(seen, 60)


def test_object_keeps_values_that_a_detour_loses() -> None:
    each = MovingObject(0, CPU)
    for _ in range(50):
        each.advance()
    held = each.state_dict()
    small = held["denormals"].double().abs()
    assert ((small > 0) & (small < torch.finfo(torch.float32).tiny)).all()
    assert held["nans"].isnan().all()
    assert len(held["nans"].view(torch.int32).unique()) == 8
    assert {*held["zeros"].signbit().tolist()} == {True, False}
    assert not held["zeros"].any()
    assert not torch.equal(held["integers"].double().long(), held["integers"])
    assert {str(value.dtype).removeprefix("torch.") for value in held.values()} == {
        "float32", "bool", "int64", "complex64", "bfloat16", "float8_e4m3fn",
    }  # fmt: skip


def test_object_moves_in_place() -> None:
    each = MovingObject(0, CPU)
    before = {name: value.data_ptr() for name, value in each.state_dict().items()}
    each.advance()
    assert {name: value.data_ptr() for name, value in each.state_dict().items()} == before
