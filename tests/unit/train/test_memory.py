"""The memory model against what a training pass really holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkv.hf.loading import load_model
from rlkv.registry import TASKS
from rlkv.train.config import LossConfig, TrainConfig
from rlkv.train.estimate import sizes_of, training_bytes
from rlkv.train.unit import Solution
from rlkv.train.worker import Worker


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the different tensors that autograd keeps, weights left out."""

    def __init__(self, model):
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0
        self.alive = []

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.total += storage.nbytes()
                self.alive.append(storage)  # so that no address is used twice
            return tensor

        super().__init__(keep, lambda tensor: tensor)


def saved_bytes(name: str, rows: int, tokens: int, checkpointing: bool, dtype: str) -> int:
    loaded = load_model(name, dtype=dtype)
    loss = LossConfig(micro_rows=rows, gradient_checkpointing=checkpointing)
    worker = Worker(loaded, TASKS.load("chain")(), TrainConfig(name, "chain", loss=loss))
    ids = torch.randint(5, 90, (rows, tokens), generator=torch.Generator().manual_seed(0))
    solutions = [
        Solution(str(i), tuple(row), tuple(range(tokens - 8, tokens)), 8)
        for i, row in enumerate(ids.tolist())
    ]
    alpha = np.full(loaded.spec.shape, 0.9, dtype=np.float32)
    for solution in solutions:  # the teacher's outputs are another matter
        worker._set(alpha)
        with worker._attached():
            worker._teacher_hidden(solution)
    saved = SavedBytes(loaded.model)
    with saved:
        worker.distill(solutions, alpha)
    return saved.total


def predicted(checkpointing: bool) -> tuple[int, int]:
    """Bytes of activations at the peak, and of one layer's."""
    sizes, _ = sizes_of("embedded")
    kind = {"head_chunk": 1 << 25, "kind": "cpu"}
    plain = training_bytes(sizes, 4, 200, checkpointing=False, **kind)["activation_bytes"]
    found = training_bytes(sizes, 4, 200, checkpointing=checkpointing, **kind)
    return found["activation_bytes"] + found["recomputed_bytes"], plain // sizes.layers


def test_saved_activations_are_as_predicted():
    found = saved_bytes("embedded", 4, 200, False, "float32")
    assert found == pytest.approx(predicted(False)[0], rel=0.1)


def test_checkpointing_keeps_the_inputs_of_layers():
    found = saved_bytes("embedded", 4, 200, True, "float32")
    peak, one_layer = predicted(True)
    # one layer's activations come and go in the backward pass, out of the counter's sight
    assert found == pytest.approx(peak - one_layer, rel=0.25)
