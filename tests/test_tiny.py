"""The weights in checkpoints/tiny still answer as well as when they were made. Nothing is trained here."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from arr_coc.answering import load
from arr_coc.checkpoints import make_tiny
from arr_coc.checkpoints.make_tiny import TINY
from benchmarks.methods import METHODS
from benchmarks.tasks import TASKS

QUESTIONS = 200


@pytest.fixture(scope="module")
def answers():
    """A function: the share of the first 200 validation questions that a method answers rightly at a budget."""
    model, processor = load(str(TINY))
    task = TASKS["scenes_valid"]
    samples = list(task.rows(QUESTIONS))
    assert len(samples) == QUESTIONS

    def share(method: str, budget: float) -> float:
        said = []
        for i in range(0, QUESTIONS, 20):
            said += METHODS[method].run(model, processor, samples[i : i + 20], budget, 8).answers
        return sum(task.score(a, s) for a, s in zip(said, samples, strict=True)) / QUESTIONS

    return share


# What the committed weights reach, less what rounding on another machine may cost; raise them with better weights.
FLOORS = (("stock", 0.2, 0.885), ("arr_coc", 0.2, 0.845), ("arr_coc", 0.05, 0.83))


@pytest.mark.parametrize(("method", "budget", "floor"), FLOORS)
def test_accuracy_has_not_dropped(answers, method, budget, floor):
    right = answers(method, budget)
    assert right >= floor, f"{method} answers {right:.3f} of {QUESTIONS} questions, not {floor}"


def test_the_weights_take_16_mib_at_most_and_none_is_lacking():
    weights = load_file(TINY / "model.safetensors")
    assert (TINY / "model.safetensors").stat().st_size <= 16 * 2**20
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    model, _ = load(str(TINY))
    lacking = {name for name in model.state_dict() if name not in weights}
    assert lacking <= {"lm_head.weight"}  # the head is the embedding
    for name, value in model.relevance.state_dict(prefix="relevance.").items():
        assert torch.equal(value, weights[name].float()), name


def test_weights_that_are_not_there_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_tiny", "--weights", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        make_tiny.main()
    assert "nowhere is no folder: give a trained model's, OUT/model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
