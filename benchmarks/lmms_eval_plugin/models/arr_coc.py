"""lmms-eval's interface to `ArrCocForConditionalGeneration`. Needs `pip install lmms-eval`."""

import torch
from accelerate import Accelerator
from lmms_eval.api.model import lmms
from lmms_eval.api.registry import register_model
from tqdm import tqdm
from transformers import AutoProcessor

from arr_coc import ArrCocForConditionalGeneration
from arr_coc.configuration_arr_coc import check_budget
from benchmarks.methods import named


@register_model("arr_coc")
class ArrCoc(lmms):
    """`num_visual_tokens`: tokens, a share such as 0.2, `auto` or `all`. `method`: another one at that share."""

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        revision: str | None = None,
        num_visual_tokens: int | float | str = 200,
        method: str = "arr_coc",
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "bfloat16",
        max_pixels: int = 2048 * 2048,
        **unknown,
    ):
        super().__init__()
        if unknown:
            raise ValueError(f"unknown --model_args {sorted(unknown)}.")
        accelerator = Accelerator(cpu=device == "cpu")
        self.accelerator, self._rank, self._world_size = (
            accelerator,
            accelerator.process_index,
            accelerator.num_processes,
        )
        self.budget, (self.method,) = check_budget(_number(num_visual_tokens)), named(method)
        if method != "arr_coc" and not isinstance(self.budget, float):
            raise ValueError(f"method={method} takes a share of the tokens, such as num_visual_tokens=0.2.")
        self.batch_size_per_gpu = int(batch_size)
        model = ArrCocForConditionalGeneration.from_pretrained(
            pretrained, revision=revision or "main", dtype=getattr(torch, dtype)
        )
        self.model = model.to(accelerator.device).eval()
        self.processor = AutoProcessor.from_pretrained(pretrained, revision=revision or "main")
        self.processor.image_processor.size["longest_edge"] = int(max_pixels)

    @property
    def batch_size(self) -> int:
        return self.batch_size_per_gpu

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def loglikelihood(self, requests):
        raise NotImplementedError("ARR-COC answers freely: choose tasks of output_type generate_until.")

    def generate_until_multi_round(self, requests):
        raise NotImplementedError("ARR-COC's plug-in answers single rounds.")

    def generate_until(self, requests) -> list[str]:
        """One answer a request, in their order; requests of the same settings are answered together."""
        order = sorted(range(len(requests)), key=lambda i: repr(requests[i].args[1]))
        answers: list[str] = [""] * len(requests)
        bar = tqdm(total=len(requests), disable=self.rank != 0, desc="ARR-COC")
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            groups: dict[str, list[int]] = {}
            for i in numbers:
                groups.setdefault(repr(requests[i].args[1]), []).append(i)
            for same in groups.values():
                for i, answer in zip(same, self._answer([requests[i].args for i in same]), strict=True):
                    answers[i] = answer
            bar.update(len(numbers))
        bar.close()
        return answers

    def _answer(self, arguments: list[tuple]) -> list[str]:
        settings = dict(arguments[0][1])
        until = settings.get("until") or []
        until = [u for u in ([until] if isinstance(until, str) else until) if u.strip()]
        samples = []
        for context, _, visual, doc, task, split in arguments:
            images = visual(self.task_dict[task][split][doc]) or []
            samples.append({"id": str(doc), "images": images, "question": context.replace("<image>", "").strip()})
        new = int(settings.get("max_new_tokens", 128))
        if self.method.name != "arr_coc":
            if any(len(s["images"]) != 1 for s in samples):
                raise ValueError(f"method={self.method.name} takes questions about one image.")
            samples = [s | {"image": s["images"][0]} for s in samples]
            said = self.method.run(self.model, self.processor, samples, self.budget, new).answers
        else:
            said = self._generate(samples, new, settings)
        for end in until:
            said = [text.split(end)[0] for text in said]
        return [text.strip() for text in said]

    def _generate(self, samples: list[dict], new: int, settings: dict) -> list[str]:
        messages = []
        for s in samples:
            parts = [{"type": "image", "image": image.convert("RGB")} for image in s["images"]]
            messages.append([{"role": "user", "content": [*parts, {"type": "text", "text": s["question"]}]}])
        inputs = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        ).to(self.model.device)
        warm = float(settings.get("temperature") or 0)
        how = {"do_sample": True, "temperature": warm, "top_p": settings.get("top_p")} if warm else {"do_sample": False}
        out = self.model.generate(
            **inputs, max_new_tokens=new, num_beams=settings.get("num_beams", 1), num_visual_tokens=self.budget, **how
        )
        return self.processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _number(text):
    """`--model_args` come as text or numbers."""
    if not isinstance(text, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
