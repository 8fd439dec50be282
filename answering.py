"""One question put to stock Qwen3-VL and to ARR-COC on one copy of the weights. The command line and the app use this.

- `open_image`: any image file as upright RGB, or a refusal in plain words.
- `load`: a checkpoint in either layout.
- `answers`: both arms, streamed; each is timed alone, and ARR-COC goes first, so that it pays for whatever is cold.
"""

import copy
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoProcessor, DynamicCache
from transformers.generation.streamers import BaseStreamer

from . import ArrCocForConditionalGeneration
from .configuration_arr_coc import check_budget

TINY = Path(__file__).resolve().parent / "checkpoints" / "tiny"
MAX_PIXELS = 50_000_000
MAX_ASPECT = 200  # the processor's own limit


class Refused(ValueError):
    """Input that cannot be used; the message names it and the mend."""


def open_image(path, called: str | None = None) -> Image.Image:
    """An image file as upright RGB, its size checked before any pixel is decoded.

    Of an animation the first frame, of 16 bits the upper 8; what is transparent stands on white. `called` names the
    image in refusals in the place of its path.
    """
    called = called or str(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, in our words
            with Image.open(path) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise Refused(
                        f"{called} is {width} x {height} px, more than {MAX_PIXELS // 10**6} megapixels: make it "
                        "smaller."
                    )
                if max(width, height) > MAX_ASPECT * min(width, height):
                    raise Refused(
                        f"{called} is {width} x {height} px, more than {MAX_ASPECT} times as long as it is wide: crop "
                        "it."
                    )
                return _rgb(ImageOps.exif_transpose(image))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise Refused(f"{called} cannot be opened ({error.strerror}): give the path of an image file.") from error
    except Image.DecompressionBombError as error:
        raise Refused(f"{called} is gigantic: make it smaller.") from error
    except UnidentifiedImageError as error:
        raise Refused(f"{called} is not an image that can be read: use a JPEG, PNG, WebP or GIF file.") from error
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{called} is not an image that can be read, or it is damaged ({error}).") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode == "F" or image.mode.startswith("I"):  # more than 8 bits, which PIL would clip
        levels = np.nan_to_num(np.asarray(image, dtype=np.float32)).clip(0)
        top = next((top for top in (1 if image.mode == "F" else 255, 255, 65535) if levels.max() <= top), levels.max())
        image = Image.fromarray((levels / top * 255).astype(np.uint8))
    return image.convert("RGB")


def parse_budget(text: str, name: str = "--budget"):
    """A budget as typed: `200`, `0.2`, `20%`, `auto` or `all`."""
    value = text = text.strip().lower()
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
    except ValueError:
        pass
    try:
        return check_budget(value, name)
    except ValueError as error:
        raise Refused(str(error)) from error


def load(model: str, revision: str | None = None, device: str | None = None, dtype: str = "auto"):
    """A checkpoint in either layout, a folder or a Hub id -> model and processor."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        loaded = ArrCocForConditionalGeneration.from_pretrained(model, revision=revision or "main", dtype=dtype)
        return loaded.to(device).eval(), AutoProcessor.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise Refused(f"--model {model} cannot be loaded: {error}") from error


def variant(model, **fields):
    """The same weights under a config with other `fields`. The model itself is left as it was: requests may differ."""
    other = copy.copy(model)
    other.config = copy.copy(model.config)
    for name, value in fields.items():
        setattr(other.config, name, value)
    return other


def prompt(model, processor, image: Image.Image, question: str):
    """The model's inputs. Special tokens typed into the question stay text."""
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        sanitize_control_tokens=True,
    ).to(model.device)


def answers(
    model,
    processor,
    image: Image.Image,
    question: str,
    budget=None,
    max_new_tokens: int = 64,
    *,
    stock=True,
    known=None,
) -> Iterator[dict]:
    """ARR-COC's answer, then stock's (unless `stock` is false), again after each new token.

    Yields:
        `{"arr_coc": run, "stock": run or None, "perception": ArrCocOutput on the CPU}`. A run is `{"answer", "tokens":
        visual tokens, "first": seconds to the first token, "seconds": {stage: wall seconds, ..., "total"}, "kv_bytes":
        of keys and values, "done"}`. The processor's time, the same for both, is not counted. `known` is the
        perception of the same image with another question.
    """
    inputs = prompt(model, processor, image, question)
    start = _now(model)
    with torch.no_grad():
        known = known and _moved(known, model.device)
        perception = model.perceive(**inputs, num_visual_tokens=budget, known=known)
    state = {"arr_coc": None, "stock": None, "perception": _moved(perception, "cpu")}
    spent = sum(perception.seconds.values())
    h, w = perception.grid[0]
    for run in _stream(model, processor, inputs, start, max_new_tokens, perception=perception):
        stages = perception.seconds | {"language": run["seconds"]["total"] - spent}
        state["arr_coc"] = run | {"tokens": len(perception.allocation[0]), "seconds": stages | run["seconds"]}
        yield dict(state)
    if stock:
        for run in _stream(model, processor, inputs, _now(model), max_new_tokens, num_visual_tokens="all"):
            state["stock"] = run | {"tokens": h * w}
            yield dict(state)


def ask(model, processor, image: Image.Image, question: str, budget=None, max_new_tokens: int = 64) -> dict:
    """What `answers` yields last: both answers to one question."""
    *_, last = answers(model, processor, image, question, budget, max_new_tokens)
    return last


def _stream(model, processor, inputs, start: float, max_new_tokens: int, **how) -> Iterator[dict]:
    """One arm's run after each token. Closing the iterator stops the model at its next token."""
    arrivals, cache = _Arrivals(), DynamicCache()
    run = {"answer": "", "tokens": 0, "first": None, "seconds": {"total": 0.0}, "kv_bytes": 0, "done": False}

    def work():
        try:
            model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=arrivals,
                past_key_values=cache,
                **how,
            )
        except BaseException as error:  # whatever it is, the reader must hear of it
            arrivals.queue.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        ids = []
        while (arrived := arrivals.queue.get()) is not None:
            if isinstance(arrived, BaseException):
                raise arrived
            at, new = arrived
            ids += new
            text = processor.decode(ids, skip_special_tokens=True).strip()
            run = run | {"answer": text, "first": run["first"] or at - start, "seconds": {"total": at - start}}
            run["kv_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            yield run
        yield run | {"done": True}
    finally:
        arrivals.stopped = True
        thread.join()


class _Arrivals(BaseStreamer):
    """New token ids with the moment at which they came, through a queue that None ends."""

    def __init__(self):
        self.queue, self.prompt, self.stopped = SimpleQueue(), True, False

    def put(self, value):
        if self.stopped:
            raise InterruptedError("nobody reads this answer any more")
        if not self.prompt:
            self.queue.put((time.perf_counter(), value.flatten().tolist()))
        self.prompt = False

    def end(self):
        self.queue.put(None)


def _now(model) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _moved(perception, device):
    """The same with its tensors there. On the CPU, it may leave a process that owns an accelerator."""
    moved = {
        name: [x.to(device) if torch.is_tensor(x) else x for x in value] if isinstance(value, list) else value
        for name, value in perception.items()
    }
    return type(perception)(**moved)
