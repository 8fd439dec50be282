"""train.py and the small model's files: text, pictures and positions equal stock's; a run goes on where it stopped."""

import json
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from arr_coc import realizing
from arr_coc.attending import SCALES, flat
from arr_coc.checkpoints import make_tiny
from arr_coc.train import parser
from benchmarks import scenes
from training import arr_coc, base
from training.batches import Conversations, Scenes, answer_mask, evidence_shares, hops, rope_positions
from training.few import pyramid_index
from training.learning import Learner, blocked_attention, pixel_values, quicken
from training.plan import Plan, Stage

SIZE = 128


@pytest.fixture(scope="module")
def data(processor):
    return Scenes(Plan([Stage(SIZE, 3, 12)]), processor, seed=0, questions=4)


@pytest.fixture(scope="module")
def made(data):
    return [data.scene(seed, "train", SIZE) for seed in range(3)]


@pytest.fixture(scope="module")
def batch(data, made):
    return data.collate(made)


def fresh_model(processor, seed=0):
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(make_tiny.tiny_config(processor.tokenizer)).eval()


def messages(scene):
    turns = []
    for i, q in enumerate(scene.questions):
        picture = [{"type": "image", "image": Image.fromarray(scene.image)}] if i == 0 else []
        turns.append({"role": "user", "content": [*picture, {"type": "text", "text": q.question}]})
        turns.append({"role": "assistant", "content": q.answer})
    return turns


# ---- files


def test_files_load_as_qwen3_vl(processor):
    names = [type(p).__name__ for p in (processor, processor.image_processor, processor.video_processor)]
    assert names == ["Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"]
    assert type(processor.tokenizer).__name__ == "Qwen2Tokenizer"
    config = make_tiny.tiny_config(processor.tokenizer)
    assert config.image_token_id == processor.image_token_id
    assert processor.tokenizer.eos_token == "<|im_end|>" and processor.tokenizer.pad_token == "<|endoftext|>"


def test_model_fits_its_budget(processor):
    model = fresh_model(processor)
    assert sum(p.numel() for p in model.parameters()) <= 7_700_000
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text):
    tokenizer = _TOKENIZER
    for token in make_tiny.SPECIAL_TOKENS:  # typed control tokens are the template's business
        text = text.replace(token, "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize("NFC", text)


_TOKENIZER = AutoProcessor.from_pretrained(make_tiny.TINY).tokenizer


def test_every_byte_is_known(processor):
    text = bytes(range(256)).decode("latin-1") + "日本語 🏔 ½ ﷽"
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)


def test_answers_are_few_tokens(processor):
    for word in (*scenes.KINDS, *scenes.COLOURS, *scenes.WORDS, "yes", "no"):
        assert len(processor.tokenizer(word).input_ids) == 1, word
    assert processor.tokenizer.tokenize("42") == ["4", "2"]


def test_chat_template_by_hand(processor):
    picture = {"type": "image", "image": Image.new("RGB", (64, 64))}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [picture, {"type": "text", "text": "and"}, picture, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "Now?"}, picture]},
    ]
    seen = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    inputs = processor.apply_chat_template(
        talk, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert processor.tokenizer.decode(inputs["input_ids"][0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{seen}and{seen}?<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>\n"
        f"<|im_start|>user\nNow?{seen}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]] * 3


@pytest.mark.parametrize("size", [(128, 128), (512, 96), (2048, 2048)])
def test_sizes_within_limits_pass_unresized(processor, size):
    grid = processor.image_processor(Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0].tolist()
    assert grid == [1, size[1] // 16, size[0] // 16]


# ---- batches


def test_pixel_values_equal_the_processors(processor, batch, made):
    stock = processor.image_processor([Image.fromarray(s.image) for s in made], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixel_values(batch["images"]), stock, rtol=0, atol=1e-6)


def test_ids_and_positions_equal_stock(processor, batch, made):
    model = fresh_model(processor)
    for i, scene in enumerate(made):
        stock = processor.apply_chat_template(messages(scene), tokenize=True, return_dict=True, return_tensors="pt")
        n = stock["input_ids"].shape[1]
        assert batch["input_ids"][i, :n].tolist() == stock["input_ids"][0].tolist()
        assert (batch["input_ids"][i, n:] == processor.tokenizer.pad_token_id).all()
        positions, _ = model.model.get_rope_index(
            stock["input_ids"],
            stock["mm_token_type_ids"],
            stock["image_grid_thw"],
            attention_mask=stock["attention_mask"],
        )
        assert torch.equal(batch["position_ids"][:, i, :n], positions[:, 0])


def test_rope_positions_of_an_oblong_picture(processor):
    model = fresh_model(processor)
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (160, 96))},
                                      {"type": "text", "text": "what is it?"}]}],
        tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    first = int((inputs["input_ids"][0] == processor.image_token_id).int().argmax())
    stock, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])
    mine = rope_positions(inputs["input_ids"].shape[1], first, (3, 5))
    assert np.array_equal(mine, stock[:, 0].numpy())


def test_labels_are_the_answers_alone(processor, batch, made):
    assert processor.tokenizer.decode(batch["answer_target"]) == "".join(
        q.answer + "<|im_end|>" for s in made for q in s.questions
    )
    flat = batch["input_ids"].flatten()
    assert torch.equal(flat[batch["answer_index"] + 1], batch["answer_target"])  # each index predicts its target
    assert batch["answer_question"].max() + 1 == sum(len(s.questions) for s in made)
    for number, q in enumerate(q for s in made for q in s.questions):
        tokens = batch["answer_target"][batch["answer_question"] == number]
        assert processor.tokenizer.decode(tokens, skip_special_tokens=True) == q.answer


def test_two_processes_and_steps_share_no_seed(processor):
    plan = Plan([Stage(128, 2, 1), Stage(160, 3, 1)], pictures=60, world=2)
    seen = []
    for rank in range(2):
        data = Scenes(plan, processor, seed=1, questions=1, rank=rank)
        data.scene = lambda seed, split, size: seen.append(seed)
        data.collate = lambda batch, *_: {"pictures": len(batch)}
        steps = [b["pictures"] for b in data]
        assert len(steps) == plan.total_steps and set(steps) == {2, 3}
    assert len(seen) == len(set(seen)) == plan.pictures


# ---- the quickened tower


@torch.no_grad()
@pytest.mark.parametrize("on_cpu", [True, False])
def test_learner_equals_stock(processor, batch, made, on_cpu):
    """Folded attention, linear patch embedding and precomputed tables: the logits of answers are stock's."""
    learner = Learner(quicken(fresh_model(processor), on_cpu), processor.tokenizer).eval()
    mine = learner(**batch, return_logits=True)["logits"]
    stock_model, theirs = fresh_model(processor), []
    header, end = learner_header(processor)
    for scene in made:
        inputs = processor.apply_chat_template(messages(scene), tokenize=True, return_dict=True, return_tensors="pt")
        ids = inputs["input_ids"][0].numpy()
        theirs.append(stock_model(**inputs).logits[0, np.flatnonzero(answer_mask(ids, header, end)) - 1])
    torch.testing.assert_close(mine, torch.cat(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_blocked_attention_equals_the_fused_one(length, causal):
    """Results and gradients, at lengths within one block, at its edge and beyond."""
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mine = blocked_attention(q, k, v, scale=0.3, block=64, causal=causal)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, is_causal=causal)
    torch.testing.assert_close(mine, fused)
    towards = torch.randn_like(fused)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v), towards) for x in (mine, fused)))


def learner_header(processor):
    talk = Conversations(processor)
    return talk.header, talk.end


@torch.no_grad()
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_few_tokens_equal_the_realizers(processor, data, made, share):
    """A row of few tokens gives the logits that stock gives to what the realizer makes of its allocation."""
    batch = data.collate(made, share=share, dice=np.random.default_rng(0))
    learner = Learner(quicken(fresh_model(processor)), processor.tokenizer).eval()
    mine = learner(**batch, return_logits=True)["logits"]
    stock, theirs, scales = fresh_model(processor), [], set()
    header, end = learner_header(processor)
    side, grid = stock.model.visual.num_grid_per_side, (SIZE // 32, SIZE // 32)
    asked = [(scene, q) for scene in made for q in scene.questions[: max(1, round(1.2 / share))]]
    assert len(asked) == len(batch["picture"])
    for (scene, q), allocation in zip(asked, batch["allocation"], strict=True):
        alone = replace(scene, questions=[q])
        inputs = processor.apply_chat_template(messages(alone), tokenize=True, return_dict=True, return_tensors="pt")
        patches = realizing.gather_patches(
            inputs["pixel_values"], allocation, *grid, patch_size=16, temporal_patch_size=2, merge_size=2
        )
        tower = realizing.tower_inputs([allocation], [grid], side)
        seen = stock.model.visual(patches, grid_thw=inputs["image_grid_thw"], return_dict=True, **tower)
        seen.pooler_output, seen.deepstack_features = (seen.pooler_output,), [(f,) for f in seen.deepstack_features]
        positions, _ = stock.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"],
        )  # fmt: skip
        is_image = inputs["input_ids"] == processor.image_token_id
        short = realizing.shorten(
            inputs["input_ids"], inputs["attention_mask"], positions, is_image, [allocation], [grid], pad=0
        )
        said = np.flatnonzero(answer_mask(short["input_ids"][0].numpy(), header, end)) - 1
        del short["kept"]
        theirs.append(stock(**short, mm_encoder_outputs={"image": seen}).logits[0, said])
        scales |= set(allocation[:, 0].tolist())
    assert len(scales) > 1
    torch.testing.assert_close(mine, torch.cat(theirs), rtol=1e-4, atol=1e-5)


def test_few_tokens_are_labelled_with_what_they_show(data):
    """Labels and evidence belong to the tokens shown; numbers run on through a picture's flat allocations."""
    scene = data.scene(5, "train", 256)
    batch = data.collate([scene], share=0.3, dice=np.random.default_rng(1))
    h = w = 8
    for scale in SCALES:
        numbers = pyramid_index(flat(h, w, scale), h, w)
        assert torch.equal(numbers, numbers[0] + torch.arange((h // scale) * (w // scale)))
    for r, (q, allocation) in enumerate(zip(scene.questions, batch["allocation"], strict=False)):
        assert len(allocation) == round(0.3 * h * w)
        looks = batch["look_index"] // batch["input_ids"].shape[1] == r
        for hop, boxes in enumerate(hops(q)):
            shares = np.zeros(len(allocation))
            for t, (s, y, x) in enumerate(allocation.tolist()):
                cells = scenes.cell_labels(scene, 32 * s)
                assert batch["kind"][r, t] == cells["kind"][y // s, x // s]
                shares[t] = evidence_shares(boxes, (256, 256), (h, w)).reshape(h, w)[y : y + s, x : x + s].sum()
            wanted = torch.tensor(shares / max(shares.sum(), 1e-6)).float()
            torch.testing.assert_close(batch["evidence"][looks, hop], wanted.expand(int(looks.sum()), -1))


def test_few_tokens_need_whole_regions(processor):
    with pytest.raises(ValueError, match="128 px: .160. px"):
        Scenes(Plan([Stage(128, 2, 4), Stage(160, 2, 4)]), processor, seed=0, questions=4, few=0.5)


def test_every_second_picture_is_asked_the_favoured_types(processor):
    data = Scenes(Plan([Stage(SIZE, 2, 4)]), processor, seed=0, questions=4, favour=["pointing", "relation"])
    types = [{q.type for q in data.scene(seed, "train", SIZE).questions} for seed in range(12)]
    assert all(each <= {"pointing", "relation"} for each in types[1::2])
    assert len(set().union(*types[::2])) > 4


# ---- runs


def run(out, *more):
    args = parser().parse_args(
        ["base", "--device", "cpu", "--out", str(out), "--stage", "128:2:1", "--pictures", "12", "--warmup", "4",
         "--workers", "0", "--log-every", "0", "--save-every", "0", "--eval-scenes", "4", "--eval-every", "0",
         "--questions", "2", "--few", "0.5", *more]
    )  # fmt: skip
    base.train(args)
    return [row for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "loss" in row]


def test_a_stopped_run_goes_on_exactly(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", "--average", "0.5")
    step_end = base.Report.on_step_end

    def stop_at_three(self, args, state, control, **kwargs):
        step_end(self, args, state, control, **kwargs)
        control.should_training_stop = control.should_training_stop or state.global_step == 3

    with monkeypatch.context() as patch:
        patch.setattr(base.Report, "on_step_end", stop_at_three)
        assert len(run(tmp_path / "parts", "--average", "0.5")) == 3
    with open(tmp_path / "parts" / "log.jsonl", "a") as log:  # a step after the last state, done again
        log.write(json.dumps({"step": 4, "loss": 9.9}) + "\n")
    parts = run(tmp_path / "parts", "--average", "0.5", "--resume")
    keys = ("step", "pictures", "lr", "loss", "answers", "probe", "gaze")
    assert [[row[k] for k in keys] for row in parts] == [[row[k] for k in keys] for row in whole]
    assert len(whole) == 6 and whole[-1]["pictures"] == 12
    stock = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16).state_dict()
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert stock.keys() - saved.keys() == {"lm_head.weight"}
    assert all(torch.equal(stock[name], weight) for name, weight in saved.items())
    resumed = load_file(tmp_path / "parts" / "model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in saved.items())
    adopted = arr_coc.adopt(str(tmp_path / "whole"), AutoProcessor.from_pretrained(tmp_path / "whole"), lens_dim=96)
    assert torch.equal(adopted.lm_head.weight.bfloat16(), stock["lm_head.weight"])
    record = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert record["finished"] and record["accuracy"] and record["seed"] == 0
    weights = tmp_path / "whole" / "model.safetensors"
    assert weights.stat().st_size < 15.5e6
    again = run(tmp_path / "init", "--init", str(tmp_path / "whole"))  # weights alone are enough to start from
    assert again[0]["answers"] < whole[0]["answers"]


def test_the_average_is_what_is_saved(tmp_path):
    run(tmp_path, "--average", "0.5", "--save-every", "1000")
    steps = sorted((tmp_path / "state").glob("checkpoint-*"))
    state = torch.load(steps[-1] / "pytorch_model.bin", weights_only=True)
    average = torch.load(steps[-1] / "average.bin", weights_only=True)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    saved = load_file(tmp_path / "model.safetensors")[name]
    assert torch.equal(saved, average[f"module.{name}"].bfloat16())
    assert not torch.equal(saved, state[f"model.{name}"].bfloat16())


def test_a_soup_is_the_mean_of_the_weights(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for i, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.json").write_text(str(i))
        (folder / "curves.png").write_text("of this folder's own run")
        weights = {"w": torch.full((2, 3), float(i)), "relevance.w": torch.full((2,), float(i))}
        save_file(weights, folder / "model.safetensors")

    def soup(*more) -> dict:
        base.soup(parser().parse_args(["soup", *map(str, folders), "--out", str(tmp_path / "out"), *more]))
        return load_file(tmp_path / "out" / "model.safetensors")

    assert torch.equal(soup()["w"], torch.full((2, 3), 0.5))
    mixed = soup("--shares", "0.75", "0.25")
    assert torch.equal(mixed["w"], torch.full((2, 3), 0.25)) and torch.equal(mixed["relevance.w"], torch.zeros(2))
    assert (tmp_path / "out" / "config.json").read_text() == "0"
    assert not (tmp_path / "out" / "curves.png").exists()
    assert json.loads((tmp_path / "out" / "training.json").read_text())["command"].startswith("python train.py")
    with pytest.raises(SystemExit, match="--out .*a is one of the models"):
        soup("--out", str(folders[0]))
    with pytest.raises(SystemExit, match="one for each of the 2 models, 1 in all"):
        soup("--shares", "0.5", "0.6")
    save_file({"w": torch.zeros(3)}, folders[1] / "model.safetensors")
    with pytest.raises(SystemExit, match="b does not fit .*a: w is missing, or of another shape"):
        soup()


def test_in_a_tower_stage_the_tower_and_the_words_alone_learn(processor, tmp_path):
    rows = run(tmp_path, "--stage", "128:2:1:tower")  # before it, the test's own stage
    assert rows[0]["answers"] > 0 and rows[-1]["answers"] is None and rows[-1]["loss"] == rows[-1]["probe"] > 0
    learner = Learner(quicken(fresh_model(processor)), processor.tokenizer)
    plan = Plan([Stage(SIZE, 2, 2, tower_only=True)])
    learner(**next(iter(Scenes(plan, processor, seed=0, questions=2))))["loss"].backward()
    learned = {name for name, p in learner.model.named_parameters() if p.grad is not None}
    assert all("visual" in name or "embed_tokens" in name for name in learned) and len(learned) > 50
    with pytest.raises(ValueError, match="a stage is SIZE:BATCH:WEIGHT or SIZE:BATCH:WEIGHT:tower, not '128:2:1:eyes'"):
        Stage.parse("128:2:1:eyes")


def test_the_probe_names_what_stands_in_cells_in_the_models_own_words(processor, data):
    """Its labels are the scene's things; a cell's vector that is the sum of their words' embeddings names them best."""
    scene = next(s for s in (data.scene(i, "train", SIZE) for i in range(50)) if any(o.text for o in s.objects))
    batch = data.collate([scene])
    cells = scenes.cell_labels(scene)
    signs = [i for i, o in enumerate(scene.objects) if o.text]
    for cell, thing in enumerate(cells["thing"].flatten() - 1):
        text = batch["text"][0, cell]
        assert bool((text >= 0).any()) == (text[0] >= 0) == (thing in signs)
        if thing in signs:
            ids = processor.tokenizer(scene.objects[thing].text).input_ids
            assert text.tolist() == (ids + [-100] * 4)[:4]
    learner = Learner(fresh_model(processor), processor.tokenizer)
    words = learner.model.get_input_embeddings().weight.detach()
    right = torch.zeros(cells["kind"].size, words.shape[1])
    for name in ("kind", "colour"):
        label = batch[name][0]
        right[label > 0] += words[getattr(learner, name)].mean(1)[label[label > 0] - 1]
    first = batch["text"][0, :, 0]
    right += torch.where(first[:, None] >= 0, words[first.clamp(min=0)], 0.0)
    wrong = right.roll(1, 1)
    assert learner.probe(100 * right, batch) < learner.probe(100 * wrong, batch)


@torch.no_grad()
def test_the_probe_reads_what_signs_say_letter_by_letter(processor):
    """Loss of cells that say the text's first token, through a layer that turns it into the next: the least of all."""
    learner = Learner(fresh_model(processor), processor.tokenizer)
    words = torch.eye(learner.model.config.text_config.vocab_size)[:, : learner.model.config.text_config.hidden_size]
    learner.model.get_input_embeddings().weight.data = 50 * words
    hidden = words.shape[1]
    after = torch.eye(hidden).roll(1, 1)  # of token t: t + 1
    learner.spell.weight.data = torch.cat([after.T, (after @ after).T, (after @ after @ after).T])
    learner.spell.bias.data.zero_()
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    labels = {"kind": nothing, "colour": nothing, "where": torch.zeros(1, 2, 4, dtype=torch.int64)}

    def loss(*text):
        return float(learner.probe(words[[3, 7]], labels | {"text": torch.tensor([text, [-100] * 4])[None]}))

    none = loss(*[-100] * 4)
    assert loss(3, 4, 5, 6) == pytest.approx(none, abs=1e-4)
    assert loss(3, 4, -100, -100) == pytest.approx(none, abs=1e-4)  # what is not there costs nothing
    for wrong in ((2, 4, 5, 6), (3, 5, 5, 6), (3, 4, 5, 5)):
        assert loss(*wrong) > none + 1


def test_a_relation_is_looked_up_in_two_steps(data):
    """First the thing that it starts from, then the one that the answer is about; all else at once."""
    asked = [(scene, q) for scene in (data.scene(seed, "train", 256) for seed in range(30)) for q in scene.questions]
    assert all(hops(q) == (q.boxes, q.boxes) for _, q in asked if q.type != "relation")
    starts = []
    for scene, q in asked:
        if q.type == "relation":
            (start,), (end,) = hops(q)
            start, end = (next(o for o in scene.objects if o.box == box) for box in (start, end))
            starts.append(scenes.normalise(start.kind) in scenes.normalise(q.question))
            assert q.answer in (end.kind, end.colour, "yes", "no")
    assert len(starts) > 5 and np.mean(starts) > 0.7  # the others are typed wrongly


def test_middle_layers_are_taught_to_look_at_the_evidence(processor, batch, made):
    """From the question's last word and from all that predicts its answer, at the boxes' cells and nowhere else."""
    talk, ids = Conversations(processor), batch["input_ids"].flatten()
    row = 0
    for scene in made:
        said = int(sum(len(talk.tokenizer(q.answer).input_ids) + 1 for q in scene.questions))
        look, evidence = (batch[name][row : row + said + len(scene.questions)] for name in ("look_index", "evidence"))
        for i, q in enumerate(scene.questions):
            words = talk.tokenizer(q.question).input_ids
            end = int(look[said + i]) + 1
            assert ids[end - len(words) : end].tolist() == words and ids[end] == talk.end
            for shares, boxes in zip(evidence[said + i].view(2, SIZE // 32, SIZE // 32), hops(q), strict=True):
                for y, x in np.ndindex(*shares.shape):
                    cell = (32 * x, 32 * y, 32 * x + 32, 32 * y + 32)
                    inside = any(
                        x0 < cell[2] and x1 > cell[0] and y0 < cell[3] and y1 > cell[1] for x0, y0, x1, y1 in boxes
                    )
                    assert (shares[y, x] > 0) == inside
                assert float(shares.sum()) == pytest.approx(float(bool(boxes)))
        row += len(look)
    assert row == len(batch["evidence"]) > 0

    learner = Learner(quicken(fresh_model(processor)), processor.tokenizer)
    first, cells = batch["first"], batch["evidence"].shape[2]
    keys = torch.zeros(*batch["input_ids"].shape, cells)
    keys[:, first : first + cells] = torch.eye(cells)

    def loss(*scores, evidence=batch["evidence"]):
        """Of middle layers whose heads' scores over the picture's cells are these, `[m, cells]` each."""
        for attention, each in zip(learner.lookers, scores, strict=True):
            queries = torch.zeros_like(keys)
            queries.view(-1, cells)[batch["look_index"]] = each
            attention.scaling, attention.overheard = 1.0, (queries[:, None].repeat(1, 2, 1, 1), keys[:, None])
        return float(learner.gaze(batch | {"evidence": evidence}))

    first, then = (each.clamp(min=1e-9).log() for each in batch["evidence"].unbind(1))
    known = batch["evidence"][batch["evidence"].sum((1, 2)) > 0]
    least = float((torch.special.entr(known).sum(2).mean(0) * torch.tensor([1, 2])).sum() / 3)
    nowhere = torch.zeros_like(first)
    assert loss(first, then, then) == pytest.approx(least, rel=1e-4)
    assert loss(nowhere, nowhere, nowhere) == pytest.approx(np.log(cells), rel=1e-5)
    assert loss(first.flip(1), then.flip(1), then.flip(1)) > loss(nowhere, nowhere, nowhere) > least
    nothing = torch.zeros_like(batch["evidence"])
    assert loss(nowhere, nowhere, nowhere, evidence=nothing) == 0  # no question of the batch has evidence


def test_a_loss_that_is_no_number_ends_the_run_even_among_others():
    report = base.Report.__new__(base.Report)
    report.trainer = SimpleNamespace(losses=[torch.tensor([1.0, torch.nan, 1.0, 1.0]), torch.full((4,), torch.nan)])
    with pytest.raises(FloatingPointError, match="The loss is nan at step 7: lower --lr"):
        report.log(SimpleNamespace(global_step=7), 1.0)


def test_shrunk_pictures_equal_an_area_average(data, made):
    batch = data.collate(made[:1], 2)
    small = np.asarray(Image.fromarray(made[0].image).reduce(2)).astype(int)
    assert np.abs(batch["images"][0].numpy().astype(int) - small).max() <= 1
    assert batch["kind"].shape[1] == (SIZE // 64) ** 2
