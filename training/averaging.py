"""A running mean of weights along a run."""

from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback


class RunningMean(TrainerCallback):
    """Keeps a mean of `module`'s weights beside it, `keeps` of itself at each step (Polyak & Juditsky 1992).

    It is saved with each of the trainer's checkpoints, as `average.bin`, and goes on from there. With `keeps` 0 there
    is none, and `best` is the module itself.
    """

    def __init__(self, module: nn.Module, keeps: float):
        self.module = module
        self.average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(keeps)) if keeps else None

    @property
    def best(self) -> nn.Module:
        """What to keep of a run: the mean where there is one."""
        return self.average.module if self.average else self.module

    @contextmanager
    def in_place(self):
        """The module with `best`'s weights; those in training are put back afterwards, whatever happens."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self):
        if self.average:
            for own, mean in zip(self.module.parameters(), self.average.module.parameters(), strict=True):
                own.data, mean.data = mean.data, own.data

    def on_train_begin(self, args, state, control, **_):
        if self.average:
            self.average.to(args.device)
            if state.global_step:
                self.average.load_state_dict(torch.load(_file(args, state), weights_only=True))

    def on_step_end(self, args, state, control, **_):
        if self.average:
            self.average.update_parameters(self.module)

    def on_save(self, args, state, control, **_):
        if self.average and state.is_world_process_zero:
            torch.save(self.average.state_dict(), _file(args, state))


def _file(args, state) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "average.bin"
