"""Every method that is compared: ours, the simple baselines, and the published rivals, written from their papers.

One file each, one interface (`interface.Method`); to add one, write a file with `METHODS` and name it here.
"""

from . import cdpruner, divprune, downscale, fastv, oracle, ours, pixelprune, prumerge, simple, stock, visionzip
from .interface import Batch, Method, Outcome, prepare

_FILES = (stock, downscale, simple, oracle, ours, fastv, visionzip, divprune, cdpruner, prumerge, pixelprune)
METHODS: dict[str, Method] = {method.name: method for file in _FILES for method in file.METHODS}
ABLATIONS = ("no_participatory", "no_perspectival", "no_propositional", "no_retina", "no_tensions", "untrained")


def named(names: str | list[str]) -> list[Method]:
    """Methods by name; `"all"`, or `"main"` without the ablations and our variants.

    Raises:
        ValueError: for an unknown name, listing those that exist.
    """
    names = names.split(",") if isinstance(names, str) else list(names)
    groups = {
        "all": list(METHODS),
        "main": [n for n in METHODS if n not in ABLATIONS and not n.startswith("arr_coc_") and n != "oracle_topk"],
        "ablations": ["arr_coc", *ABLATIONS],
    }
    names = list(dict.fromkeys(m for name in names for m in groups.get(name, [name])))
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {', '.join(unknown)}: there are {', '.join([*METHODS, *groups])}.")
    return [METHODS[name] for name in names]


__all__ = ["ABLATIONS", "METHODS", "Batch", "Method", "Outcome", "named", "prepare"]
