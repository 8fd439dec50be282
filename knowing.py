"""Three ways of knowing an image: the second of ARR-COC's five stages.

Each is a score map `[h, w]` in [0, 1] over the cells of one image:

- *propositional*: what information is here. How much would be lost if the cell were shown coarsely.
- *perspectival*: what stands out from here. Centre-surround saliency, with a mild pull to the centre of view.
- *participatory*: what this question asks for here. Read from the *glance* (a few coarse tokens of the image beside the
  question, half-way through the language model), from *texture* (a learned bridge), or from both.

The names are Vervaeke's kinds of knowing. Every learned part starts as a rule that needs no training: the glance is
read as a plain mean over heads, the lens and the bridge are closed gates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .texture import channel_names

_EPS = 1e-6


def propositional(detail: Tensor) -> Tensor:
    """`[2, h, w]` detail lost at scales 2 and 4 -> `[h, w]` in [0, 1]: their mean."""
    return detail.mean(0)


def perspectival(texture: Tensor, foveal: float = 0.2) -> Tensor:
    """`[C, h, w]` texture -> `[h, w]` in [0, 1]: saliency, and `foveal` of it nearness to the image's centre."""
    names = channel_names()
    saliency, eccentricity = texture[names.index("saliency")], texture[names.index("eccentricity")]
    return ((1 - foveal) * saliency + foveal * (1 - eccentricity)).clamp(0, 1)


class Glance(nn.Module):
    """Question-to-cell affinity out of the glance's attention: logits over its coarse cells.

    Two readings are added. *Affinity* is the attention that the question pays to each cell, q·kᵀ, one number a head,
    against the attention that a content-free token (`<|vision_end|>`, which stands between image and question) pays
    to it: `log a - log b`. Cells that draw every token's attention (sinks, Xiao et al. 2023) cancel out. Heads are
    mixed by learned weights, a plain mean until trained. The *lens* is a low-rank bilinear form between question and
    cell states, nothing until trained.
    """

    def __init__(self, num_heads: int, hidden_size: int, rank: int):
        super().__init__()
        self.head_logits = nn.Parameter(torch.empty(num_heads))
        self.temperature = nn.Parameter(torch.empty(()))
        self.bias = nn.Parameter(torch.empty(()))
        self.token_score = nn.Linear(hidden_size, 1, bias=False)
        self.lens_question = nn.Linear(hidden_size, rank, bias=False)
        self.lens_cell = nn.Linear(hidden_size, rank, bias=False)
        self.cell_score = nn.Linear(hidden_size, 1, bias=False)

    def reset_parameters(self):
        nn.init.zeros_(self.head_logits)
        nn.init.ones_(self.temperature)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.token_score.weight)
        nn.init.zeros_(self.cell_score.weight)
        nn.init.normal_(self.lens_question.weight, std=self.lens_question.in_features**-0.5)
        nn.init.zeros_(self.lens_cell.weight)

    def forward(self, query: Tensor, neutral: Tensor, key: Tensor, question: Tensor, cells: Tensor) -> Tensor:
        """One image.

        Args:
            query (`[H, Q, D]`): the question tokens' queries, scaled, over all heads of all layers that are read.
            neutral (`[H, 1, D]`): the content-free token's.
            key (`[H, N, D]`): the coarse cells' keys.
            question (`[Q, d]`), cells (`[N, d]`): the states after the glance's last layer.

        Returns:
            `[N]` float32 logits; 0 means no more than a neutral token would look.
        """
        weight = self.head_logits.softmax(0)[:, None]
        asked = (query.float() @ key.float().mT).softmax(-1).mean(1)  # [H, N]
        drawn = (neutral.float() @ key.float().mT).softmax(-1)[:, 0]
        affinity = ((weight * asked).sum(0) + _EPS).log() - ((weight * drawn).sum(0) + _EPS).log()
        question, cells = (F.layer_norm(x.float(), x.shape[-1:]) for x in (question, cells))
        pooled = self.token_score(question).softmax(0).mT @ self.lens_question(question)  # [1, rank]
        lens = (self.lens_cell(cells) @ pooled.mT)[:, 0] + self.cell_score(cells)[:, 0]
        return self.temperature * affinity + lens + self.bias


class Bridge(nn.Module):
    """Texture against the question: `conv(C -> 64 -> d)` over the cells, dotted with the question's projection.

    Cheap, and blind to what a thing is. The gate is closed until trained.
    """

    def __init__(self, channels: int, hidden_size: int, dim: int):
        super().__init__()
        self.near = nn.Conv2d(channels, 64, 3, padding=1)
        self.far = nn.Conv2d(64, dim, 3, padding=1)
        self.question = nn.Linear(hidden_size, dim)
        self.gate = nn.Parameter(torch.empty(()))

    def reset_parameters(self):
        for layer in (self.near, self.far, self.question):
            layer.reset_parameters()
        nn.init.zeros_(self.gate)

    def forward(self, texture: Tensor, question: Tensor) -> Tensor:
        """`[C, h, w]` texture and the question's mean embedding `[d]` -> `[h, w]` logits."""
        cells = self.far(F.gelu(self.near(texture[None].float())))[0]
        asked = self.question(F.layer_norm(question.float(), question.shape))
        return self.gate * torch.einsum("dhw,d->hw", cells, asked) / len(asked) ** 0.5


def to_grid(logits: Tensor, scale: int, h: int, w: int) -> Tensor:
    """The glance's logits `[n]`, in raster order at one scale, on the native grid: `[h, w]`, bilinear."""
    rows, columns = -(-h // scale), -(-w // scale)
    coarse = logits.reshape(1, 1, rows, columns)
    return F.interpolate(coarse, size=(rows * scale, columns * scale), mode="bilinear")[0, 0, :h, :w]
