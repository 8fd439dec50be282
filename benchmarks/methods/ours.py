"""ARR-COC in each variant: both allocators and realizers, each source of knowing, and what each stage is worth."""

from contextlib import contextmanager

import torch
from torch import nn

from arr_coc.attending import attend
from arr_coc.balancing import Policy, balance
from arr_coc.modeling_arr_coc import Relevance

from .interface import Method, Outcome

_NEUTRAL = 0.5


@contextmanager
def config_of(model, **fields):
    """The model's config with other values, for as long as the context lasts."""
    before = {name: getattr(model.config, name) for name in fields}
    for name, value in fields.items():
        setattr(model.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)


@contextmanager
def _with(module, name, other):
    kept = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, kept)


def untrained(model) -> Relevance:
    """The relevance parts as they were before any training; the same for the same config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = Relevance(model.config)
        fresh.apply(model._init_weights)
    return fresh.to(model.device).eval()


def replaced(model, perception, budgets, **maps: float):
    """A perception in which some score maps are constants: balanced, shaped and spent anew."""
    names = ("propositional", "perspectival", "participatory")
    for i in range(len(perception.grid)):
        for name, value in maps.items():
            getattr(perception, name)[i] = torch.full_like(getattr(perception, name)[i], value)
        three = tuple(getattr(perception, name)[i] for name in names)
        relevance = balance(three, perception.weights[i], perception.tensions[i])
        perception.relevance[i], perception.gain[i] = relevance, model.relevance.shaping(relevance)
        perception.allocation[i] = attend(
            perception.gain[i],
            perception.detail[i],
            budgets[i],
            model.config.allocator,
            model.config.topk_neighbourhood,
        )
    return perception


def _ours(change=None, swap=None, **fields):
    """An answering function: config `fields`, `change(model, perception, budgets)`, `swap(model)` a stand-in."""

    def answer(model, batch, budgets, run) -> Outcome:
        with config_of(model, **fields), swap(model) if swap else config_of(model):
            with run.clock.stage("choose"):
                perception = batch.perceived(model, run.clock, budgets)
                if change:
                    perception = change(model, perception, budgets)
            answers = run.generate(model, batch.inputs, perception=perception)
        maps = {name: perception[name] for name in ("relevance", "participatory", "gain")}
        seconds = {f"choose/{stage}": value for stage, value in perception.seconds.items()}
        return Outcome(answers, perception.allocation, seconds, maps)

    return answer


def _constant(name):
    return lambda model, perception, budgets: replaced(model, perception, budgets, **{name: _NEUTRAL})


def _neutral_policy(model):
    config = model.config
    fresh = Policy(config.text_config.hidden_size, config.policy_dim, config.weights_normalisation)
    fresh.apply(model._init_weights)
    return _with(model.relevance, "policy", fresh.to(model.device))


class _Shut(nn.Module):
    """A retina that sees nothing."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, pixels, grid):
        return pixels.new_zeros(len(pixels), self.dim, *grid)


_BEFORE, _AFTER = "before the tower", "after the tower"
METHODS = [
    Method("arr_coc", _BEFORE, "ARR-COC as its checkpoint sets it", _ours()),
    Method("arr_coc_lod", _BEFORE, "ARR-COC, tokens at scales 4, 2 and 1", _ours(allocator="lod")),
    Method("arr_coc_topk", _BEFORE, "ARR-COC, the most relevant cells at scale 1", _ours(allocator="topk")),
    Method("arr_coc_glance", _BEFORE, "ARR-COC, the question read through the glance", _ours(participatory="glance")),
    Method("arr_coc_texture", _BEFORE, "ARR-COC, no glance: texture and retina alone", _ours(participatory="texture")),
    Method("arr_coc_after", _AFTER, "ARR-COC, tokens picked from the tower's output", _ours(realize="after")),
    Method("no_participatory", _BEFORE, "ablation: the question asks nothing", _ours(_constant("participatory"))),
    Method("no_perspectival", _BEFORE, "ablation: nothing stands out", _ours(_constant("perspectival"))),
    Method("no_propositional", _BEFORE, "ablation: all cells hold as much", _ours(_constant("propositional"))),
    Method(
        "no_retina",
        _BEFORE,
        "ablation: the retina sees nothing",
        _ours(swap=lambda model: _with(model.relevance, "retina", _Shut(model.config.lens_dim))),
    ),
    Method("no_tensions", _BEFORE, "ablation: weights and tensions as before training", _ours(swap=_neutral_policy)),
    Method(
        "untrained",
        _BEFORE,
        "ARR-COC before any training",
        _ours(swap=lambda model: _with(model, "relevance", untrained(model))),
    ),
]
