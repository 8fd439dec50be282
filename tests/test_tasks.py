"""Tasks: our own by their rows, public ones on rows of the shape that the Hub's have."""

import pytest
from PIL import Image

from benchmarks import tasks

IMAGE = Image.new("L", (200, 100), 128)

# One row a data set, with the columns of its schema on the Hub.
ROWS = {
    "vqav2": {
        "question_type": "what is", "multiple_choice_answer": "net", "image_id": 458752, "answer_type": "other",
        "question_id": 458752000, "question": "What is this photo taken looking through?", "image": IMAGE,
        "answers": [
            {"answer": a, "answer_confidence": "yes", "answer_id": i + 1}
            for i, a in enumerate(["net"] * 8 + ["netting", "mesh"])
        ],
    },
    "textvqa": {
        "image_id": "003a8ae2ef43b901", "question_id": 34602, "question": "what is the brand of this camera?",
        "question_tokens": ["what"], "image": IMAGE, "image_width": 200, "image_height": 100, "set_name": "val",
        "flickr_original_url": "", "flickr_300k_url": "", "image_classes": ["Camera"], "ocr_tokens": ["DAKOTA"],
        "answers": ["dakota"] * 7 + ["dakota digital", "nous les gosses", "clos culombu"],
    },
    "docvqa": {
        "questionId": "49153", "question": "What is the value?", "question_types": ["figure/diagram"], "image": IMAGE,
        "docId": 14465, "ucsf_document_id": "pybv0228", "ucsf_document_page_no": "81", "answers": ["0.28"],
        "data_split": "val",
    },
    "chartqa": {"type": "human_test", "question": "How many food items?", "answer": "14", "image": IMAGE},
    "gqa": {
        "id": "201307251", "imageId": "n161313", "question": "Is it overcast?", "answer": "no", "fullAnswer": "No.",
        "isBalanced": True, "groups": {"global": None, "local": "13-weather_overcast"}, "entailed": "[]",
        "equivalent": "[]", "types": {"detailed": "weatherVerify", "semantic": "global", "structural": "verify"},
        "annotations": {}, "semantic": [], "semanticStr": "", "image": IMAGE,
    },
    "pope": {
        "id": "0", "question_id": "1", "question": "Is there a snowboard in the image?", "answer": "yes",
        "image_source": "COCO_val2014_000000310196", "image": IMAGE, "category": "adversarial",
    },
    "realworldqa": {
        "image": IMAGE, "image_path": "0.webp", "answer": "B",
        "question": "Which way?\n\nA. Left\nB. Right\nC. Ahead\nPlease answer directly with only the letter.",
    },
    "vstar": {
        "image": IMAGE, "category": "direct_attributes", "label": "A", "question_id": "0", "bbox": [[10, 20, 30, 40]],
        "text": "What is the material of the glove?\n(A) rubber\n(B) cotton\nAnswer with the option's letter from the "
        "given choices directly.",
    },
    "refcoco": {
        "question_id": "469306", "image": IMAGE, "question": "Please carefully observe.", "answer": ["guy in yellow"],
        "segmentation": [1.0, 2.0], "bbox": [100.0, 50.0, 60.0, 40.0], "iscrowd": 0, "file_name": "a.jpg",
    },
}  # fmt: skip

ANSWERS = {  # right and wrong predictions
    "vqav2": ("Net", "wall"), "textvqa": ("Dakota", "canon"), "docvqa": ("0.28", "17"), "chartqa": ("14.5", "15"),
    "gqa": ("No.", "yes"), "pope": ("Yes", "no"), "realworldqa": ("B. Right", "C"), "vstar": ("(A)", "B"),
    "refcoco": ("```json [{'bbox_2d': [500, 500, 800, 900]}]```", "[0, 0, 500, 500]"),
}  # fmt: skip


class TestPublic:
    @pytest.mark.parametrize("name", tasks.PUBLIC)
    def test_a_row_becomes_a_sample_and_is_scored_by_its_rule(self, name):
        public = tasks.PUBLIC[name]
        sample = public.read(ROWS[name])
        assert set(sample) == {"id", "image", "question", "answers", "type", "stratum", "boxes", "seed"}
        assert (
            sample["image"].mode == "RGB" and sample["question"] and all(isinstance(a, str) for a in sample["answers"])
        )
        right, wrong = ANSWERS[name]
        assert public.score(right, sample) >= 0.9 and public.score(wrong, sample) == 0
        assert public.score("", sample) == 0

    def test_boxes_are_corners(self):
        assert tasks.refcoco(ROWS["refcoco"])["boxes"] == [[100, 50, 160, 90]]
        assert tasks.vstar(ROWS["vstar"])["boxes"] == [[10, 20, 40, 60]]

    @pytest.mark.parametrize("name", tasks.PUBLIC)
    def test_it_reads_a_folder_in_the_place_of_the_hub(self, name, tmp_path, monkeypatch):
        from datasets import Dataset
        from datasets import Image as HubImage

        row = {k: v for k, v in ROWS[name].items() if v not in ({}, [])}
        Dataset.from_list([row, row]).cast_column("image", HubImage()).save_to_disk(tmp_path / name)
        monkeypatch.setenv("ARR_COC_DATA", str(tmp_path))
        samples = list(tasks.TASKS[name].rows(1))
        assert len(samples) == 1 and samples[0]["question"] == tasks.PUBLIC[name].read(ROWS[name])["question"]


class TestScores:
    def test_vqa_accuracy_is_the_mean_over_people_left_out(self):
        sample = {"answers": ["yes"] * 3 + ["no"] * 7}
        # Three agree: leaving one of them out 2/3, any other 1.
        assert tasks.vqa_accuracy("Yes.", sample) == pytest.approx((3 * 2 / 3 + 7) / 10)
        assert tasks.vqa_accuracy("no", sample) == 1 and tasks.vqa_accuracy("maybe", sample) == 0

    def test_anls_by_hand(self):
        assert tasks.anls("hallo", {"answers": ["hello"]}) == pytest.approx(0.8)
        assert tasks.anls("help", {"answers": ["wanted"]}) == 0

    @pytest.mark.parametrize(
        ("said", "answer", "right"),
        [
            ("104", "100", 1),
            ("106", "100", 0),
            ("5%", "0.05", 1),
            ("1,000", "1000", 1),
            ("Yes", "yes", 1),
            ("0", "0", 1),
        ],
    )
    def test_relaxed(self, said, answer, right):
        assert tasks.relaxed(said, {"answers": [answer]}) == right

    @pytest.mark.parametrize(
        ("said", "right"),
        [("B", 1), ("b", 0), ("(B) x", 1), ("The answer is B", 1), ("right", 1), ("A", 0), ("Bananas", 0)],
    )
    def test_option(self, said, right):
        assert tasks.option(said, {"answers": ["B", "Right"]}) == right


class TestOurs:
    @pytest.mark.parametrize("name", [*tasks.SCENES, "easy_vqa"])
    def test_rows_are_the_same_each_time_and_their_answers_right(self, name):
        task = tasks.TASKS[name]
        first, again = list(task.rows(9)), list(task.rows(9))
        assert [r["id"] for r in first] == [r["id"] for r in again] and len({r["id"] for r in first}) == 9
        for row in first:
            assert task.score(row["answers"][0], row) == 1 and task.score("nothing of the kind", row) == 0
            assert row["image"].size == (512, 512)

    def test_easy_vqa_never_repeats(self):
        import easy_vqa

        n = len(easy_vqa.get_test_questions()[0])
        assert len({i * 4201 % n for i in range(n)}) == n


def test_an_unknown_task_lists_what_exists():
    with pytest.raises(ValueError, match="unknown task vqa: there are scenes_valid, scenes_normal"):
        tasks.named("vqa")
    assert [t.name for t in tasks.named("scenes,easy_vqa")] == [*tasks.SCENES, "easy_vqa"]


class TestLmmsEval:
    """The plug-in under stand-ins for lmms-eval's own classes, which are not installed here."""

    @pytest.fixture(scope="class")
    def plugin(self, tmp_path_factory):
        import sys
        import types

        from benching import small_model, tiny_processor

        folder = tmp_path_factory.mktemp("model")
        small_model().save_pretrained(folder)
        tiny_processor().save_pretrained(folder)
        names = ("lmms_eval", "lmms_eval.api", "lmms_eval.api.model", "lmms_eval.api.registry")
        modules = {name: types.ModuleType(name) for name in names}
        modules["lmms_eval.api.model"].lmms = type("lmms", (), {})
        modules["lmms_eval.api.registry"].register_model = lambda name: lambda cls: cls
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            import importlib

            models = importlib.import_module("benchmarks.lmms_eval_plugin.models")
            ((name, cls),) = models.AVAILABLE_MODELS.items()
            found = getattr(importlib.import_module(f"benchmarks.lmms_eval_plugin.models.{name}"), cls)
            yield lambda **args: found(str(folder), device="cpu", dtype="float32", batch_size="2", **args)

    def requests(self, model, n=3):
        from types import SimpleNamespace

        from benching import sample

        model.task_dict = {"toy": {"test": [sample(i) for i in range(n)]}}
        settings = [{"max_new_tokens": 3, "until": ["\n\n"]}, {"max_new_tokens": 2}]
        return [
            SimpleNamespace(
                args=(f"<image> {sample(i)['question']}", settings[i % 2], lambda doc: [doc["image"]], i, "toy", "test")
            )
            for i in range(n)
        ]

    def test_answers_come_in_the_order_of_the_requests_and_are_those_of_one_at_a_time(self, plugin):
        model = plugin(num_visual_tokens="0.25")
        requests = self.requests(model)
        together = model.generate_until(requests)
        assert together == [model.generate_until([r])[0] for r in requests] and len(together) == 3
        assert model.processor.image_processor.size["longest_edge"] == 2048 * 2048
        assert model.rank == 0 and model.world_size == 1 and model.batch_size == 2

    def test_any_method_may_answer(self, plugin):
        model = plugin(num_visual_tokens=0.25, method="downscale")
        assert len(model.generate_until(self.requests(model))) == 3

    def test_what_it_cannot_do_is_said(self, plugin):
        with pytest.raises(ValueError, match="takes a share"):
            plugin(num_visual_tokens=200, method="downscale")
        with pytest.raises(ValueError, match="unknown --model_args"):
            plugin(nonsense=1)
        with pytest.raises(NotImplementedError, match="generate_until"):
            plugin().loglikelihood([])
