"""Contract 9, and the ways of training that users have: Trainer, checkpointing, a LoRA, autocast."""

import pytest
import torch
from conftest import IM_END, IMAGE, NEXT_TURN, as_stock, make_inputs, make_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, Trainer, TrainingArguments

SAMPLES = [[(6, 5, 0), [5, 6, 7], NEXT_TURN, [9, 12]], [(4, 4, 1), [8]], [[10, 11]]]


def labelled(samples, padding="right"):
    inputs = make_inputs(samples, padding)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = mask.cumsum(1) == 1  # with left padding, padding would be asked for it
    return inputs | {"labels": ids.masked_fill((ids == IMAGE) | (mask == 0) | first, -100)}


@pytest.fixture
def inputs():
    return labelled(SAMPLES)


def steps(model, inputs, number, lr=0.1, **kwargs):
    """Plain gradient descent on what ARR-COC learns."""
    optimiser = torch.optim.SGD(model.relevance.parameters(), lr)
    for _ in range(number):
        optimiser.zero_grad()
        model(**inputs, **kwargs).loss.backward()
        optimiser.step()


UNUSED = {"both": (), "glance": ("lens.near", "lens.far", "retina"), "texture": ("affinity", "lens.cell", "lens.asked")}


class TestGradients:
    @pytest.mark.parametrize("participatory", UNUSED)
    @pytest.mark.parametrize("realize, allocator", [("before", "lod"), ("before", "topk"), ("after", "lod")])
    def test_they_reach_every_learned_parameter(self, inputs, participatory, allocator, realize):
        """After one step, that is: until then the silent layers hide what feeds them."""
        model = make_model(participatory=participatory, allocator=allocator, realize=realize).train()
        steps(model, inputs, 2, num_visual_tokens=8)
        for name, p in model.relevance.named_parameters():
            if name.startswith(UNUSED[participatory]):
                assert p.grad is None, name
            else:
                assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name
        for name in ("model.visual.patch_embed.proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"):
            assert model.get_parameter(name).grad.abs().max() > 0

    def test_the_gate_changes_no_forward_value(self, inputs):
        model = make_model()
        with torch.no_grad():
            wanted = model(**inputs, num_visual_tokens=8)
        got = model.train()(**inputs, num_visual_tokens=8)
        torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.loss, wanted.loss, rtol=0, atol=1e-5)

    def test_a_cells_gain_learns_what_its_token_is_worth(self, inputs, monkeypatch):
        """d value / d gain is d value / d a of the token's features times (1 + a), by finite differences."""
        model = make_model(allocator="topk", participatory="texture").double().train()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        p = model.perceive(**inputs, num_visual_tokens=5)
        p.gain = [gain.detach().double().requires_grad_() for gain in p.gain]

        def value():
            return model(**inputs, perception=p).logits[0, -8:].log_softmax(-1)[:, 5].sum()

        value().backward()
        _, y, x = p.allocation[0].T
        assert (p.gain[0].grad != 0).nonzero().tolist() == torch.stack([y, x], 1).tolist()
        quiet = type(model)._realize

        def louder(token, by):
            def realize(prompt, perception):
                out = quiet(model, prompt, perception)
                factor = torch.ones(5, 1, dtype=torch.float64)
                factor[token] += by
                return type(out)(
                    pooler_output=(out.pooler_output[0] * factor, *out.pooler_output[1:]),
                    deepstack_features=[(level[0] * factor, *level[1:]) for level in out.deepstack_features],
                )

            monkeypatch.setattr(model, "_realize", realize)
            with torch.no_grad():
                return value()

        model.eval()
        for token in (0, 3):
            slope = (louder(token, 1e-2) - louder(token, -1e-2)) / 2e-2
            torch.testing.assert_close(p.gain[0].grad[y[token], x[token]], slope, rtol=5e-3, atol=1e-4)

    def test_labels_go_with_their_tokens(self, inputs):
        """The loss is that of the shortened prompt, label by label, whatever the padding."""
        model = make_model()
        inputs["labels"][:, 0] = inputs["input_ids"][:, 0]  # whose place must not be padding's
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=6)
            out = model(**inputs, perception=p)
            left = labelled(SAMPLES, "left")
            same = model(**left, perception=p).loss
        logs, labels = [], []
        for row, images in enumerate([[0], [1], []]):
            short = inputs["labels"][row][inputs["attention_mask"][row].bool()].tolist()
            first = 4  # the image's place: the turn's opening and vision start stand before it
            for i in images:
                h, w = p.grid[i]
                short = short[:first] + [-100] * len(p.allocation[i]) + short[first + h * w :]
            scores = out.logits[row, : len(short)].log_softmax(-1)
            for at, label in enumerate(short[1:]):
                if label != -100:
                    logs.append(-scores[at, label])
                    labels.append(label)
        assert labels.count(IM_END) >= 4
        torch.testing.assert_close(out.loss, torch.stack(logs).mean(), rtol=0, atol=1e-5)
        torch.testing.assert_close(same, out.loss, rtol=0, atol=1e-4)


@pytest.mark.parametrize("participatory, allocator", [("both", "lod"), ("texture", "topk")])
def test_rewarding_one_cell_moves_tokens_there(participatory, allocator):
    model = make_model(participatory=participatory, allocator=allocator)
    inputs, spot = make_inputs([[(8, 8, 0), [5, 6]]]), (6, 1)

    def fine():
        with torch.no_grad():
            return model.perceive(**inputs, num_visual_tokens=6)

    def holds(p):
        return [1, *spot] in p.allocation[0].tolist()

    assert not holds(fine())
    optimiser = torch.optim.Adam(model.relevance.parameters(), 0.005)
    for _ in range(30):
        relevance = model.perceive(**inputs, num_visual_tokens=6).relevance[0]
        loss = -relevance.flatten().log_softmax(0)[spot[0] * 8 + spot[1]]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = fine()
    assert holds(after) and after.relevance[0].argmax() == spot[0] * 8 + spot[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(inputs, reentrant):
    losses, grads = [], []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        out = model(**inputs, num_visual_tokens=8)
        out.loss.backward()
        losses.append(out.loss.detach())
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-5, msg=name)


def test_autocast_trains_and_answers():
    inputs = labelled(SAMPLES, "left")
    model = make_model().train()
    plain = model(**inputs, num_visual_tokens=8).loss.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs, num_visual_tokens=8).loss
    loss.backward()
    assert abs(loss.item() - plain.item()) < 0.2
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.relevance.shaping.steepness.grad.abs() > 0
    inputs.pop("labels")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.eval().generate(**inputs, num_visual_tokens=8, max_new_tokens=3)
    assert torch.equal(out[:, :-3], inputs["input_ids"])


class TestLora:
    def config(self, **kwargs):
        return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **kwargs)

    @pytest.mark.parametrize("how", ["by hand", "modules_to_save"])
    def test_it_trains_beside_relevance_saves_and_merges(self, inputs, how, tmp_path):
        torch.manual_seed(1)
        base = make_model()
        frozen = {n: p.clone() for n, p in base.named_parameters() if "relevance" not in n}
        by_name = {"modules_to_save": ["relevance"]} if how == "modules_to_save" else {}
        model = get_peft_model(base, self.config(**by_name)).train()
        if how == "by hand":
            model.base_model.model.relevance.requires_grad_(True)
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        assert names and all("lora_" in n or "relevance" in n for n in names)
        assert any("lora_" in n for n in names) and any("relevance" in n and "lens" in n for n in names)
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            optimiser.zero_grad()
            loss = model(**inputs, num_visual_tokens=8).loss
            loss.backward()
            optimiser.step()
        assert loss.isfinite()
        moved = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
        assert any("lora_A" in n for n in moved) and any(
            "relevance.lens" in n.replace(".modules_to_save.default", "") for n in moved
        )

        asked = make_inputs(SAMPLES)
        model.eval()
        wanted = model.generate(**asked, num_visual_tokens=8, max_new_tokens=4)
        with torch.no_grad():
            logits = model(**asked, num_visual_tokens=8).logits
        assert wanted.shape[1] == asked["input_ids"].shape[1] + 4
        model.save_pretrained(tmp_path)
        if how == "modules_to_save":
            again = PeftModel.from_pretrained(make_model(), tmp_path).eval()
            assert torch.equal(again.generate(**asked, num_visual_tokens=8, max_new_tokens=4), wanted)
        merged = model.merge_and_unload()
        assert type(merged) is type(base) and type(merged.relevance).__name__ == "Relevance"
        with torch.no_grad():
            torch.testing.assert_close(merged(**asked, num_visual_tokens=8).logits, logits, rtol=0, atol=1e-3)
        weights = merged.state_dict()
        changed = {n for n, w in frozen.items() if not torch.equal(weights[n], w)}
        assert changed and all("q_proj" in n or "v_proj" in n for n in changed)


@pytest.mark.parametrize("layout", ["merged", "reference"])
def test_trainer(layout, tmp_path):
    """Two steps with labels, as a user would write them; what it saves loads."""
    model = make_model(num_visual_tokens=6)
    if layout == "reference":
        base = make_model()
        as_stock(base).save_pretrained(tmp_path / "base")
        model.config.base_model_name_or_path = str(tmp_path / "base")
        for p in model.parameters():
            p.requires_grad_(False)
        model.relevance.requires_grad_(True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=3,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=SAMPLES * 2, data_collator=labelled)
    assert 0 < trainer.train().training_loss < 20
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert any(k.startswith("relevance.") for k in moved)
    assert layout == "merged" or all(k.startswith("relevance.") for k in moved)
    again = AutoModel.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
