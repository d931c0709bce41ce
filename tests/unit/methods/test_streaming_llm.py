"""streaming_llm: exactly sink and recent tokens, by a fixed or a proportional window."""

from __future__ import annotations

from rlkv.core.budget import Budget
from rlkv.methods.base import MethodOptions
from rlkv.methods.streaming_llm import StreamingLLM
from tests.drive import SPEC, drive, held_positions, random_sequence


def test_proportional_window_holds_sink_and_the_newest():
    options = MethodOptions(streaming_recent="proportional")
    layer = StreamingLLM(SPEC, Budget(0.5, sink=4, recent=12), options=options).make_layer(0)
    sequence = random_sequence(1, 120)
    drive(layer, sequence, [30])
    for i in range(30, 120):
        drive(layer, sequence, [1], past=i)
        for head in range(3):
            held = held_positions(layer, head=head)
            recent = len(held) - 4
            assert held == [*range(4), *range(i + 1 - recent, i + 1)]
            assert len(held) == layer.plan.after(i + 1)
