"""What visitors hand in, read: each function returns what can be used or raises `Refused` with the mend.

`Upload` is the image's component: a file and nothing else. No path, no link, nothing decoded before it is checked.
"""

from collections.abc import Callable
from functools import partial

import gradio as gr
import pydantic
from gradio.data_classes import ImageData
from PIL import Image

from arr_coc.answering import Refused, open_image, parse_budget

NO_LINKS = "Give an image file: links, paths and embedded data are not opened here."
MAX_QUESTION = 500  # characters
MAX_ANSWER = 256  # tokens
MAX_ASKED = 8  # questions or budgets at once


class File(ImageData):
    """An uploaded file; text in its place is a file without a path, which `read_image` refuses in plain words."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_file(cls, value):
        typed = not isinstance(value, (dict, ImageData))
        return {"url": str(value), "meta": {"_type": "gradio.FileData"}} if typed else value


class Upload(gr.Image):
    """An image as the path of its file: nothing is decoded before it is checked, and nothing is fetched."""

    is_template = True  # the browser's part is gr.Image's
    data_model = File

    def preprocess(self, payload):
        return payload and (payload.path or "data:")

    async def async_move_resource_to_block_cache(self, url_or_file_path):
        if url_or_file_path and "://" in str(url_or_file_path):
            raise gr.Error(NO_LINKS, print_exception=False)
        return await super().async_move_resource_to_block_cache(url_or_file_path)


def upload(**kwargs) -> Upload:
    return Upload(type="filepath", image_mode=None, **kwargs)


def read_image(path: str | None, side: int) -> Image.Image:
    """An uploaded file, checked, upright, its longer side at most `side` px."""
    if not path:
        raise Refused("There is no image yet: choose one, or take an example.")
    if path.startswith("data:") or "://" in path:
        raise Refused(NO_LINKS)
    image = open_image(path, "This image")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def read_question(text: str | None) -> str:
    text = (text or "").strip()
    if not text:
        raise Refused("There is no question yet: ask something about the image.")
    if len(text) > MAX_QUESTION:
        raise Refused(f"The question has {len(text):,} characters, more than {MAX_QUESTION}: make it shorter.")
    return text


def read_several(texts, read: Callable, what: str) -> list:
    """A few lines, or a list from the API, each by `read`."""
    if not isinstance(texts, (str, list, type(None))):
        raise Refused(f"Give the {what} as a list.")
    texts = texts.splitlines() if isinstance(texts, str) else texts or []
    texts = [str(text) for text in texts if str(text).strip()]
    if not 0 < len(texts) <= MAX_ASKED:
        raise Refused(f"Give 1 to {MAX_ASKED} {what}, one a line; there are {len(texts)}.")
    return [read(text) for text in texts]


def read_choices(allocator: str, realize: str) -> dict:
    for value, known in ((allocator, ("lod", "topk")), (realize, ("before", "after"))):
        if value not in known:
            raise Refused(f"{value!r} is not one of {', '.join(known)}.")
    return {"allocator": allocator, "realize": realize}


def read_length(tokens) -> int:
    if not isinstance(tokens, (int, float)) or not 1 <= tokens <= MAX_ANSWER:
        raise Refused(f"The longest answer must be 1 to {MAX_ANSWER} tokens, not {tokens}.")
    return int(tokens)


read_budget = partial(parse_budget, name="The budget")
