"""Step: masks on the device that asks for them."""

from __future__ import annotations

import torch

from rlkv.attention.step import Step


def test_a_pass_on_another_device_has_its_masks_there_and_is_made_once():
    cpu, other = torch.device("cpu"), torch.device("meta")
    step = Step(2, 3, 4, torch.tensor([0, 2]), cpu)
    assert step.on(cpu) is step
    moved = step.on(other)
    assert moved is step.on(other)
    assert (moved.batch, moved.past, moved.new, moved.device) == (2, 3, 4, other)
    assert moved.mask(0, 4, sink=1, recent=2).device == other
    assert moved.mask(0, 4).shape == step.mask(0, 4).shape
    assert step.mask(0, 4).device == cpu
