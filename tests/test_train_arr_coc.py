"""train.py arr-coc: the curriculum's losses by hand, gradients through the hard choice, and whole runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file

from arr_coc import ArrCocForConditionalGeneration, ArrCocOutput
from arr_coc.checkpoints.make_tiny import TINY
from arr_coc.train import parser
from benchmarks.scene_vocabulary import COLOURS, KINDS
from benchmarks.scenes import make_scene
from training import arr_coc, relevance, rows

SIZE = 128


@pytest.fixture(scope="module")
def model():
    return ArrCocForConditionalGeneration.from_pretrained(TINY, dtype=torch.float32)


def a_row(**changes) -> rows.Row:
    image = np.random.default_rng(0).integers(0, 256, (96, 64, 3), np.uint8)
    return rows.Row(**{"image": image, "question": "what is red?", "answer": "cup", **changes})


# ---- what a run begins with


def test_learned_parts_begin_as_another_models_where_they_fit(model):
    learned = {name: value + 1 for name, value in model.relevance.state_dict().items()}
    other = deepcopy(model.relevance)
    grown = learned | {"affinity.head_logits": torch.zeros(len(learned["affinity.head_logits"]) + 1)}
    before = other.state_dict()["affinity.head_logits"].clone()
    assert arr_coc.begin_with(other, grown) == ["affinity.head_logits"]
    for name, value in other.state_dict().items():
        assert torch.equal(value, before if name == "affinity.head_logits" else learned[name]), name
    assert arr_coc.begin_with(other, learned) == []
    with pytest.raises(ValueError, match="give the --set that --learned was trained with"):
        arr_coc.begin_with(other, {name: value[..., None] for name, value in learned.items()})


# ---- losses by hand


def test_evidence_is_the_cells_that_boxes_reach_into():
    boxes = rows.evidence(a_row(boxes=[(33, 5, 60, 60), (0, 70, 9, 79)]), 3, 2, 96, 64)
    assert boxes[0].tolist() == [[False, True], [False, True], [False, False]]
    assert boxes[1].tolist() == [[False, False], [False, False], [True, False]]
    whole = rows.evidence(a_row(whole=True), 3, 2, 96, 64)
    assert whole.shape == (1, 3, 2) and whole.all()
    assert rows.evidence(a_row(), 3, 2, 96, 64) is None


def test_grounding_loss_by_hand():
    p, gain = torch.tensor([[0.8, 0.4, 0.4, 0.4]]), torch.tensor([[0.6, 0.2, 0.1, 0.1]])
    one, whole = torch.tensor([[[True, False, False, False]]]), torch.ones(1, 1, 4, dtype=torch.bool)
    inside = (-math.log(0.8) - math.log(0.6)) / 2 - 0.5 * math.log(0.6)
    two = torch.tensor([[[True, False, False, False]], [[False, True, True, False]]])  # the smaller weighs as much
    both = (-(math.log(0.8) + math.log(0.4)) / 2 - math.log(0.6)) / 2 - 0.25 * (math.log(0.6) + math.log(0.3))
    everywhere = -(math.log(0.8) + 3 * math.log(0.4)) / 4
    for masks, weight, wanted in (
        ([one], [1.0], inside),
        ([one], [2.0], inside),
        ([two], [1.0], both),
        ([one, None], [1.0, 9.0], inside),
        ([one, whole], [2.0, 1.0], (2 * inside + everywhere) / 3),
        ([None], [1.0], 0.0),
    ):
        perception = ArrCocOutput(participatory=[p] * len(masks), gain=[gain] * len(masks))
        loss = relevance.grounding_loss(perception, masks, torch.tensor(weight))
        assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_naming_loss_by_hand(model):
    """Kind and colour; things alike, an empty cell a tenth. Images that say nothing of their cells count nothing."""
    learner = relevance.Learner(model, "cells")
    seen = torch.randn(model.config.lens_dim, 1, 4)
    kind, colour = (head(seen[:, 0].T).log_softmax(-1) for head in learner.names)
    kinds, colours, things = [3, 3, 5, 0], [2, 2, 1, 0], [1, 1, 2, 0]
    each = [-(kind[i, k] + colour[i, c]) for i, (k, c) in enumerate(zip(kinds, colours, strict=True))]
    wanted = (each[0] / 2 + each[1] / 2 + each[2] + each[3] / 10) / 2.1
    loss, right = learner.naming_loss([seen, seen], [torch.tensor([[kinds], [colours], [things]]), None])
    torch.testing.assert_close(loss, wanted)
    hits = (kind.argmax(1) == torch.tensor(kinds)).tolist()
    assert right == pytest.approx((hits[0] / 2 + hits[1] / 2 + hits[2]) / 2)  # the empty cell is not a thing


def test_log_likelihood_by_hand():
    """The tokens' shares of the gain; a coarse one has that of all it covers."""
    gain = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    fine, coarse = torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.tensor([[2, 0, 0]])
    share = relevance.token_gain(gain, fine).tolist()  # of a gain that sums to 1
    assert float(relevance._log_likelihood(gain, fine)) == pytest.approx(np.mean(np.log(share)), rel=1e-5)
    assert share == pytest.approx([0.2, 0.4])
    assert float(relevance._log_likelihood(gain, coarse)) == pytest.approx(
        math.log(float(relevance.token_gain(gain, coarse)[0])), rel=1e-5
    )


# ---- batches


def test_batches_hold_what_the_processor_makes(processor, model):
    """Prompts are those of generation, answers follow them, and texture computed by the workers is `perceive`'s own."""
    collate = rows.Collate(processor, model.config)
    group = [a_row(boxes=[(0, 0, 9, 9)]), a_row(question="and blue?", answer="telephone", hard=True)]
    batch = collate([group])
    assert batch["weight"].tolist() == [1.0, 2.0] and batch["questions"] == [2]
    for i, row in enumerate(group):
        stock = arr_coc.chat_inputs(processor, Image.fromarray(row.image), row.question)
        real = batch["input_ids"][i][batch["attention_mask"][i].bool()]
        n = stock["input_ids"].shape[1]
        assert real[:n].tolist() == stock["input_ids"][0].tolist()
        said = batch["labels"][i][batch["labels"][i] >= 0]
        assert processor.tokenizer.decode(said) == row.answer + "<|im_end|>"
        assert real[n:].tolist() == said.tolist() and batch["labels"][i][-1] >= 0
        torch.testing.assert_close(batch["patches"][0], stock["pixel_values"])
        with torch.no_grad():
            seen = model.perceive(**stock)
        torch.testing.assert_close(batch["texture"][i], seen.texture[0])
        torch.testing.assert_close(batch["detail"][i], seen.detail[0])
        with torch.no_grad():
            (retina,) = model.relevance.retina(batch["pixels"][0][None], seen.grid[0])
        torch.testing.assert_close(retina, seen.retina[0])


def test_batches_say_what_stands_in_each_cell(processor, model):
    group = rows.scene_rows(1 << 36, "valid", SIZE, 2)
    batch = rows.Collate(processor, model.config)([group, [a_row()]])
    kind, colour, thing = batch["cells"][0]
    scene = make_scene(1 << 36, "valid", SIZE, n_questions=2)
    assert {(KINDS[k - 1], COLOURS[c - 1]) for k, c in zip(kind[kind > 0], colour[kind > 0], strict=True)} <= {
        (thing.kind, thing.colour) for thing in scene.objects
    }
    assert (kind > 0).any() and ((kind > 0) == (thing > 0)).all()
    assert batch["cells"][1] is None and len(batch["pixels"]) == 2


@pytest.mark.parametrize(
    "columns, answer",
    [
        ({"answer": ["cup"]}, "cup"),
        ({"multiple_choice_answer": ["cup"]}, "cup"),
        ({"answers": [["mug", "cup", "cup"]]}, "cup"),
        ({"answers": [[{"answer": "cup"}, {"answer": "mug"}, {"answer": "cup"}]]}, "cup"),
        ({"answer": ["cup"], "boxes": [[[1, 2, 3, 4]]]}, "cup"),
    ],
    ids=lambda x: str(sorted(x))[:40],
)
def test_datasets_like_vqav2(tmp_path, columns, answer):
    image = Image.new("RGBA", (40, 30))
    Dataset.from_dict({"image": [image], "question": ["what?"], **columns}).save_to_disk(tmp_path / "rows")
    ((row,),) = [rows.DatasetRows(str(tmp_path / "rows"), "train")[0]]
    assert (row.answer, row.question, row.image.mode) == (answer, "what?", "RGB")
    assert list(map(list, row.boxes)) == columns.get("boxes", [[]])[0]


def test_a_dataset_without_the_columns_is_refused(tmp_path):
    Dataset.from_dict({"picture": ["x"], "question": ["what?"]}).save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"lacks the columns \['answer', 'image'\]; it has \['picture', 'question'\]"):
        rows.DatasetRows(str(tmp_path / "rows"), "train")


# ---- through the hard choice


def answer_loss(processor, choice: str, distil: float, budget: float, **fields):
    """One batch's loss and its gradient by each row's gain, with noise and choice repeatable."""
    model = ArrCocForConditionalGeneration.from_pretrained(TINY, dtype=torch.float32, **fields).train()
    model.requires_grad_(False)
    batch = rows.Collate(processor, model.config)([rows.scene_rows(1 << 36, "valid", SIZE, 3)])
    learner = relevance.Learner(model, "answers", choice, noise=2.0, distil=distil)  # noise: choices that differ
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids")}
    inputs["pixel_values"] = torch.cat(batch["patches"] * 3)
    torch.manual_seed(0)
    perception = model.perceive(**inputs, num_visual_tokens=budget)
    perception.gain = [gain.detach().requires_grad_() for gain in perception.gain]
    loss = learner.answer_loss(inputs, batch["labels"], batch["answer_tokens"], perception, batch["weight"])
    loss.backward()
    return loss.detach(), [gain.grad for gain in perception.gain]


@pytest.mark.parametrize("choice", relevance.CHOICES)
def test_gradients_reach_the_gain_through_the_choice(processor, choice):
    _, grads = answer_loss(processor, choice, 0.0, 0.25)
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    moved = [bool(grad.abs().sum() > 0) for grad in grads]  # two noisy choices may be the same: no gradient, then
    assert all(moved) if choice == "straight-through" else any(moved)


def test_distilling_from_all_tokens_adds_nothing_where_all_are_kept(processor):
    """KL(all || chosen) is zero where they are the same, and positive where tokens are missing."""
    for budget, same in ((1.0, True), (0.25, False)):
        plain, _ = answer_loss(processor, "straight-through", 0.0, budget, allocator="topk")
        taught, _ = answer_loss(processor, "straight-through", 1.0, budget, allocator="topk")
        assert taught == pytest.approx(float(plain), abs=1e-5) if same else taught > plain + 1e-4


# ---- runs


def run(out, *more):
    args = parser().parse_args(
        ["arr-coc", "--out", str(out), "--size", str(SIZE), "--pictures", "1", "--questions", "2",
         "--steps", "4", "--workers", "0", "--log-every", "1", "--save-every", "2", "--picture-every", "2", *more]
    )  # fmt: skip
    arr_coc.train(args)
    return [row for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "loss" in row]


@pytest.mark.parametrize("stage, more", [("grounded", ()), ("answers", ("--distil", "0.5"))])
def test_a_run_trains_relevance_alone_and_shows_itself(tmp_path, stage, more):
    log = run(tmp_path, "--stage", stage, "--lr", "0.01", "--report-to", "tensorboard", *more)
    assert [row["step"] for row in log] == [1, 2, 3, 4] and all(math.isfinite(row["loss"]) for row in log)
    shown = {"ground", "budget", "steepness", "offset", "tension/compress_particularize", "tension/exploit_explore"}
    assert shown <= log[-1].keys() and ("answer" in log[-1]) == (stage == "answers")
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "model"))
    learned = {name for name in after if "relevance." in name}
    assert learned and any(not torch.equal(before[n].float(), after[n].float()) for n in learned)
    assert all(torch.equal(before[n].float(), after[n].to(torch.bfloat16).float()) for n in before.keys() - learned)
    assert sorted(p.name for p in (tmp_path / "pictures").glob("*.jpg")) == [f"{n:07d}.jpg" for n in (1, 2, 4)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "pictures")).Reload()
    assert [event.step for event in board.Images("relevance")] == [1, 2, 4]
    scalars = EventAccumulator(str(next(tmp_path.glob("state/runs/*")))).Reload().Tags()["scalars"]
    assert any("steepness" in name for name in scalars)


def test_the_retina_learns_cells_and_nothing_else_moves(tmp_path):
    log = run(tmp_path, "--stage", "cells", "--lr", "0.01", "--picture-every", "0")
    assert all(row["cells"] == pytest.approx(row["loss"], rel=1e-3) for row in log)
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "model"))
    moved = {name for name in after if not torch.equal(before[name].float(), after[name].to(before[name]).float())}
    assert moved and all(name.startswith("relevance.retina.") for name in moved)


def test_cells_cannot_be_learned_where_none_are_named_or_no_retina_looks(tmp_path):
    shutil.copytree(TINY, tmp_path / "glance")
    config = json.loads((TINY / "config.json").read_text()) | {"participatory": "glance"}
    (tmp_path / "glance" / "config.json").write_text(json.dumps(config))
    for more in (("--dataset", "rows"), ("--model", str(tmp_path / "glance"))):
        with pytest.raises(ValueError, match="leave --dataset out"):
            run(tmp_path / "out", "--stage", "cells", *more)


@pytest.mark.slow
def test_two_processes_learn_as_one(tmp_path):
    """After steps on different scenes both hold the same weights, which are not those of either alone."""
    code = """
import sys, torch
from arr_coc.train import parser
from training import arr_coc
out = sys.argv[1]
end = arr_coc.ArrCocTrainer.train
def train(self, **kwargs):
    end(self, **kwargs)
    learned = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
    torch.save(learned, f"{out}/rank{self.args.process_index}.pt")
arr_coc.ArrCocTrainer.train = train
args = ["arr-coc", "--device", "cpu", "--out", out, "--size", "128", "--pictures", "1", "--questions", "2", "--lr",
        "0.01", "--steps", "3", "--seconds", "600", "--workers", "0", "--picture-every", "0", "--stage", "grounded"]
arr_coc.train(parser().parse_args(args))
"""
    (tmp_path / "train_it.py").write_text(code)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    for count, command in ((1, [sys.executable]), (2, launch)):
        (tmp_path / str(count)).mkdir()
        command = [*command, str(tmp_path / "train_it.py"), str(tmp_path / str(count))]
        subprocess.run(command, check=True, cwd=TINY.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"})
    first, second = (torch.load(tmp_path / "2" / f"rank{rank}.pt") for rank in range(2))
    alone = torch.load(tmp_path / "1" / "rank0.pt")
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], alone[name]) for name in first)


def test_a_stopped_run_goes_on(tmp_path):
    run(tmp_path, "--stage", "grounded", "--steps", "2", "--lr", "0.01")
    before = load_file(tmp_path / "model" / "model.safetensors")
    with open(tmp_path / "log.jsonl", "a") as file:  # logged after the last state: to be done, and logged, again
        file.write(json.dumps({"step": 3, "loss": 9.9}) + "\n")
    log = run(tmp_path, "--stage", "grounded", "--steps", "3", "--lr", "0", "--resume")  # at no rate it stays as it was
    assert [row["step"] for row in log] == [1, 2, 3]
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="state/checkpoint-3 is of another run: "):
        run(tmp_path, "--stage", "grounded", "--lora", "2", "--resume")


def test_the_mean_of_what_is_learned_is_saved_and_goes_on(tmp_path):
    more = ("--stage", "grounded", "--average", "0.5", "--favour", "relation")
    run(tmp_path, *more, "--steps", "2", "--lr", "0.01")
    mean = load_file(tmp_path / "model" / "model.safetensors")
    state = torch.load(tmp_path / "state" / "checkpoint-2" / "pytorch_model.bin", weights_only=True)
    run(tmp_path, *more, "--steps", "3", "--lr", "0", "--resume")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    moved = 0
    for name, learned in state.items():
        if name.startswith("model.relevance."):
            short = name.removeprefix("model.")
            torch.testing.assert_close(saved[short], (mean[short] + learned) / 2)
            moved += not torch.equal(saved[short], learned)
    assert moved > 10


def test_a_resumed_run_goes_on_with_the_scenes_that_follow():
    def asked(data, n):
        return [[row.question for row in next(data)] for _ in range(n)]

    for rank in (0, 1):
        whole, rest = (
            iter(rows.SceneRows(7, 2, SIZE, rank=rank, world=2, favour=("relation",), start=start)) for start in (0, 3)
        )
        assert asked(whole, 5)[3:] == asked(rest, 2)


def test_a_scene_without_anything_of_a_favoured_type_is_asked_the_others(monkeypatch):
    real = rows.scene_rows
    monkeypatch.setattr(rows, "scene_rows", lambda *a: real(*a) if len(a) < 5 or not a[4] else [])
    data = iter(rows.SceneRows(7, 2, SIZE, favour=("relation",)))
    assert len([next(data) for _ in range(2)][1]) == 2


def test_every_second_scene_is_asked_the_favoured_types_alone():
    plain, favoured = (iter(rows.SceneRows(7, 3, SIZE, favour=favour)) for favour in ((), ("pointing",)))
    for turn in range(4):
        questions, others = ([row.question for row in next(rows)] for rows in (plain, favoured))
        assert (questions == others) == (turn % 2 == 0)
        if turn % 2:
            assert others == [q.question for q in make_scene(7 + turn, "train", SIZE, 3, types=("pointing",)).questions]
