"""The scenes as a `datasets` builder: one row a question, rendered while it builds, nothing downloaded.

from benchmarks.scenes import Scenes
builder = Scenes("hard", count=200, size=512)   # or Scenes(splits=("train", "valid"), count=1000)
builder.download_and_prepare()
data = builder.as_dataset()
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import datasets
from PIL import Image

from .scene_painting import ASSETS
from .scenes import QUESTION_TYPES, SPLITS, STRATA, extent, make_scene

# What decides a scene's bytes is part of the version, so that no stale cache is ever served.
_SOURCES = [
    *(
        Path(__file__).with_name(f"{name}.py")
        for name in ("scenes", "scene_painting", "scene_questions", "scene_vocabulary")
    ),
    ASSETS,
]


@dataclass
class ScenesConfig(datasets.BuilderConfig):
    """`count` scenes of each of `splits`, `size` pixels a side, up to `questions` questions each."""

    splits: tuple[str, ...] = SPLITS
    count: int = 100
    size: int = 512
    questions: int = 6


class Scenes(datasets.GeneratorBasedBuilder):
    """One config a split, and `default` with all of them; every field of the config is an argument."""

    VERSION = datasets.Version(f"1.0.{zlib.crc32(b''.join(path.read_bytes() for path in _SOURCES))}")
    BUILDER_CONFIG_CLASS = ScenesConfig
    BUILDER_CONFIGS = [ScenesConfig(name="default"), *(ScenesConfig(name=split, splits=(split,)) for split in SPLITS)]
    DEFAULT_CONFIG_NAME = "default"

    def _info(self):
        return datasets.DatasetInfo(
            description="Rendered scenes with questions whose evidence is known.",
            features=datasets.Features(
                {
                    "id": datasets.Value("string"),
                    "image": datasets.Image(),
                    "question": datasets.Value("string"),
                    "answer": datasets.Value("string"),
                    "question_type": datasets.ClassLabel(names=list(QUESTION_TYPES)),
                    "boxes": datasets.List(
                        datasets.List(datasets.Value("int32"), length=4)
                    ),  # x0, y0, x1, y1 in pixels
                    "stratum": datasets.ClassLabel(names=list(STRATA)),
                    "extent": datasets.Value("string"),
                    "seed": datasets.Value("int64"),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator(split, gen_kwargs={"split": split}) for split in self.config.splits]

    def _generate_examples(self, split: str):
        for seed in range(self.config.count):
            scene = make_scene(seed, split, self.config.size, self.config.questions)
            image = Image.fromarray(scene.image)
            for number, asked in enumerate(scene.questions):
                key = f"{split}-{seed:06d}-{number}"
                yield (
                    key,
                    {
                        "id": key,
                        "image": image,
                        "question": asked.question,
                        "answer": asked.answer,
                        "question_type": asked.type,
                        "boxes": [list(box) for box in asked.boxes],
                        "stratum": scene.stratum,
                        "extent": extent(asked.boxes),
                        "seed": seed,
                    },
                )
