"""Gates in TRL: a GRPOTrainer that trains nothing but one gate per KV head.

For those who live in TRL (``pip install 'rlkv[trl]'``). Rollouts, rewards and the policy loss are
TRL's; this adds the gates, the adaptive L1 penalty, clamping, and checkpoints that hold gates only.
Advantages over groups and a token mean (``loss_type="dapo"``) give the gradient of RLKV's own
trainer on the same rollouts.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlkv.core.files import write_atomic
from rlkv.errors import CheckpointError, MissingExtraError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates
from rlkv.hf.loading import LoadedModel
from rlkv.train.config import PenaltyConfig
from rlkv.train.penalty import penalty_weight

GATES_FILE = "gates.safetensors"
_MEAN_REWARD = "rlkv_mean_reward"
_MODULE = "rlkv_gates"


def gate_trainer(
    loaded: LoadedModel,
    gates: Gates,
    *,
    penalty: PenaltyConfig,
    sink: int = 16,
    recent: int = 64,
    **settings: Any,  # noqa: ANN401 - GRPOTrainer's own
) -> Any:  # noqa: ANN401 - a class that exists only where TRL does
    """A TRL trainer of ``gates``; call ``train()``, then ``detach()``.

    Args:
        loaded: The model; everything in it is frozen.
        gates: What is trained.
        penalty: The L1 pressure; its scope is the batch.
        sink: First tokens that the local branch sees.
        recent: Last tokens that the local branch sees.
        **settings: Passed to GRPOTrainer: ``reward_funcs``, ``args``, ``train_dataset`` and so on.

    Raises:
        MissingExtraError: TRL is not installed.
    """
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError(
            "training with TRL needs the package trl, which is not installed; run `pip install "
            "'rlkv[trl]'`, or use `rlkv train`"
        )
    attached = ExitStack()
    attached.enter_context(
        attach_gates(loaded.model, gates, sink=sink, recent=recent, spec=loaded.spec)
    )
    loaded.model.requires_grad_(False)
    loaded.model.add_module(_MODULE, gates)  # the optimizer finds parameters through the model
    try:
        trainer = _trainer_class()(
            model=loaded.model, processing_class=loaded.tokenizer, **settings
        )
        trainer.bind(gates, penalty, attached)
        return trainer
    except BaseException:
        attached.close()
        delattr(loaded.model, _MODULE)
        raise


def _trainer_class() -> type:
    import torch
    from trl import GRPOTrainer

    class GateTrainer(GRPOTrainer):
        """GRPO on gates, with the adaptive penalty."""

        def bind(self, gates: Gates, penalty: PenaltyConfig, attached: ExitStack) -> None:
            """Takes the gates and arranges that they are clamped after every step."""
            self.gates, self.penalty, self.attached = gates, penalty, attached
            self.add_callback(_clamping_callback(gates))

        def detach(self) -> None:
            """Gives the model back as it was."""
            self.attached.close()
            delattr(self.model, _MODULE)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:  # noqa: ANN401
            output = super()._generate_and_score_completions(inputs)
            mode = "train" if self.model.training else "eval"
            # read here, where it was just written: logging clears it
            mean = self._metrics[mode]["reward"][-1]
            output[_MEAN_REWARD] = torch.tensor(float(mean))
            return output

        def _compute_loss(self, model: Any, inputs: Any) -> Any:  # noqa: ANN401
            loss = super()._compute_loss(model, inputs)
            mean = float(inputs[_MEAN_REWARD])
            weight = self.penalty.beta * penalty_weight([[mean]], self.penalty)
            # the loss of each accumulation step is summed, not averaged
            return loss + weight * self.gates.l1() / self.current_gradient_accumulation_steps

        def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
            _save_gates(Path(output_dir or self.args.output_dir), self.gates)

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
            _load_gates(Path(resume_from_checkpoint), self.gates)

        def create_model_card(self, *arguments: object, **settings: object) -> None:
            """No card: a checkpoint holds a few hundred numbers."""

    return GateTrainer


def _save_gates(folder: Path, gates: Gates) -> None:
    from safetensors.torch import save

    write_atomic(folder / GATES_FILE, save({"alpha": gates.alpha.detach().cpu().contiguous()}))


def _load_gates(folder: Path, gates: Gates) -> None:
    from safetensors.torch import load_file

    path = folder / GATES_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {GATES_FILE}, expected a checkpoint of gates; pass one that this "
            "trainer wrote"
        )
    gates.alpha.data.copy_(load_file(str(path))["alpha"])


def _clamping_callback(gates: Gates) -> Any:  # noqa: ANN401
    from rlkv.hf.trainer_callback import AfterOptimizerStep

    return AfterOptimizerStep(gates.clamp_)
