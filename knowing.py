"""Three ways of knowing an image: the second of ARR-COC's five stages.

Each is a score map `[h, w]` in [0, 1] over the cells of one image:

- *propositional*: what information is here. How much would be lost if the cell were shown coarsely.
- *perspectival*: what stands out from here. Centre-surround saliency, with a mild pull to the centre of view.
- *participatory*: what this question asks for here. Read from the *glance* (a few coarse tokens of the image beside the
  question, half-way through the language model), from *texture*, what the *retina* sees and the question's words
  (cheap), or from both.

The names are Vervaeke's kinds of knowing. Every learned part starts as a rule that needs no training: the glance is
read as a plain mean over heads, and the lens is silent.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .texture import channel_names

_EPS = 1e-6
TURNS = (0.5, 1.0, 2.0, 4.0)  # frequencies of places, in half turns from an image's middle to its edge


def propositional(detail: Tensor) -> Tensor:
    """`[2, h, w]` detail lost at scales 2 and 4 -> `[h, w]` in [0, 1]: their mean."""
    return detail.mean(0)


def perspectival(texture: Tensor, foveal: float = 0.2) -> Tensor:
    """`[C, h, w]` texture -> `[h, w]` in [0, 1]: saliency, and `foveal` of it nearness to the image's centre."""
    names = channel_names()
    saliency, eccentricity = texture[names.index("saliency")], texture[names.index("eccentricity")]
    return ((1 - foveal) * saliency + foveal * (1 - eccentricity)).clamp(0, 1)


class Silent(nn.Linear):
    """A linear layer that starts at zero: what it feeds says nothing until trained."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Affinity(nn.Module):
    """The attention that the question pays to each of the glance's cells, free of sinks: logits, without training.

    One number a head, q·kᵀ over the cells, against the attention that a content-free token (`<|vision_end|>`, which
    stands between image and question) pays them: `log asked - log drawn`. Cells that draw every token's attention
    (sinks, Xiao et al. 2023) cancel out. Heads are mixed by learned weights, and the question's tokens by how far they
    stand from its end (the last one has read all of it, the others know only a part): plain means until trained.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.head_logits = nn.Parameter(torch.empty(num_heads))
        self.recency = nn.Parameter(torch.empty(()))  # a token's weight falls by exp(-recency) for each that follows
        self.temperature = nn.Parameter(torch.empty(()))

    def reset_parameters(self):
        nn.init.zeros_(self.head_logits)
        nn.init.zeros_(self.recency)
        nn.init.ones_(self.temperature)

    def forward(self, query: Tensor, neutral: Tensor, key: Tensor) -> Tensor:
        """One image.

        Args:
            query (`[H, Q, D]`): the question tokens' queries, scaled, over all heads of all layers that are read.
            neutral (`[H, 1, D]`): the content-free token's.
            key (`[H, N, D]`): the coarse cells' keys.

        Returns:
            `[N]` float32 logits; 0 means no more than a neutral token would look.
        """
        weight = self.head_logits.softmax(0)[:, None]
        tokens = (self.recency * torch.arange(query.shape[1], device=query.device)).softmax(0)  # [Q]
        asked = tokens @ (query.float() @ key.float().mT).softmax(-1)  # [H, N]
        drawn = (neutral.float() @ key.float().mT).softmax(-1)[:, 0]
        asked, drawn = ((weight * x).sum(0) + _EPS for x in (asked, drawn))
        return self.temperature * (asked.log() - drawn.log())


class Retina(nn.Module):
    """What stands in each cell, seen by a small convolutional network before any of the tower runs.

    Texture says how a cell is drawn, not what it shows; and the glance sees a thing of 20 px as one of 10. This sees
    native resolution, at less than a thousandth of what Qwen3-VL-2B's prefill takes. No question is needed: what it saw
    of an image serves all that are asked about it. A cell's value depends on the pixels up to 64 px around.
    """

    WIDTHS = (32, 64, 112)  # at a quarter, an eighth and a sixteenth of the pixels

    def __init__(self, dim: int):
        super().__init__()
        fine, middle, coarse = self.WIDTHS
        self.stem = nn.Conv2d(3, fine, 7, stride=4, padding=3)
        self.layers = nn.ModuleList([
            nn.Conv2d(fine, middle, 3, stride=2, padding=1),
            nn.Conv2d(middle, middle, 3, padding=1),
            nn.Conv2d(middle, coarse, 3, stride=2, padding=1),
            nn.Conv2d(coarse, coarse, 3, padding=1),
            nn.Conv2d(coarse, coarse, 3, padding=1),
        ])  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(layer.in_channels) for layer in self.layers)
        self.norms.append(nn.BatchNorm2d(coarse))
        self.out = nn.Linear(2 * coarse, dim)
        self.gathers = False

    def train(self, mode: bool = True):
        """What the norms know of a channel's mean and spread is gathered while cells are learned (`gathers`), and stays
        as it is from then on: a model in training answers as it will answer after it."""
        super().train(mode)
        self.norms.train(mode and self.gathers)
        return self

    def forward(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Images of one size, `[B, 3, H, W]` in [0, 1] of `grid` cells -> `[B, dim, h, w]` float32, unbounded."""
        x = self.stem(pixels.float().mul(2).sub_(1))
        for norm, layer in zip(self.norms, self.layers, strict=False):
            seen = layer(F.gelu(norm(x)))
            x = x + seen if seen.shape == x.shape else seen
        x = F.gelu(self.norms[-1](x))
        cells = torch.cat([F.adaptive_max_pool2d(x, grid), F.adaptive_avg_pool2d(x, grid)], 1)
        return self.out(cells.movedim(1, -1)).movedim(-1, 1).float()


@lru_cache(maxsize=16)
def places(h: int, w: int, device: torch.device) -> Tensor:
    """Where each cell of a grid stands, `[h * w, 2 + 4 * len(TURNS)]` in [-1, 1]: row and column, and their sines and
    cosines at each frequency, by whose products attention can look a given way and distance off (Vaswani et al. 2017,
    *Attention is all you need*, 3.5). Made once for a grid and device, and not to be written to."""
    with torch.inference_mode(False):  # or training could not use what answering had made
        rows, columns = (torch.linspace(-1, 1, n) for n in (h, w))
        at = torch.cartesian_prod(rows, columns)
        angles = math.pi * at[:, None] * torch.tensor(TURNS)[:, None]  # [h * w, frequencies, 2]
        return torch.cat([at, angles.sin().flatten(1), angles.cos().flatten(1)], 1).to(device)


class Lens(nn.Module):
    """What training adds: question and cells read together at native resolution, by three small transformer blocks.

    A cell enters as its texture, `conv(C -> 64 -> d)`, and what the retina saw there, as the language model's state of
    the glance's cell that it lies in, or as all of them; the question as its tokens' embeddings, with a glance their
    states, too. So what is asked for can be a colour, a thing, or what stands left of another. Its last layer starts at
    zero: silent until trained.
    """

    BLOCKS = 3

    def __init__(self, channels: int, hidden_size: int, dim: int):
        super().__init__()
        self.near = nn.Conv2d(channels, 64, 3, padding=1)
        self.far = nn.Conv2d(64, dim, 3, padding=1)
        self.cell = nn.Linear(hidden_size, dim)
        self.place = nn.Linear(2 + 4 * len(TURNS), dim)
        self.word = nn.Linear(hidden_size, dim)
        self.asked = nn.Linear(hidden_size, dim)
        self.blocks = nn.ModuleList(_Block(dim) for _ in range(self.BLOCKS))
        self.out = Silent(dim, 1)

    def forward(
        self,
        grid: tuple[int, int],
        words: Tensor,
        texture: Tensor | None = None,
        retina: Tensor | None = None,
        glance: tuple[Tensor, Tensor, int] | None = None,
    ) -> Tensor:
        """One image's logits, `[h, w]` for a grid `(h, w)`.

        Args:
            words (`[Q, d]`): the question's embeddings.
            texture (`[C, h, w]`) or None.
            retina (`[dim, h, w]`) or None: what `Retina` saw.
            glance: after its last layer the question's states (`[Q, d]`) and those of its cells (`[n, d]`, in raster
                order), and the cells' scale; or None.
        """
        h, w = grid
        cells = self.place(places(h, w, words.device))  # [h * w, dim]
        if texture is not None:
            cells = cells + self.far(F.gelu(self.near(texture[None])))[0].flatten(1).T
        if retina is not None:
            cells = cells + retina.flatten(1).T
        question = self.word(_normal(words))
        if glance is not None:
            asked, states, scale = glance
            question = question + self.asked(_normal(asked))
            cells = cells + to_grid(self.cell(_normal(states)).T, scale, h, w).flatten(1).T
        x = torch.cat([cells, question])
        for block in self.blocks:
            x = block(x)
        return self.out(_normal(x[: h * w])).reshape(h, w)


class _Block(nn.Module):
    """A pre-norm transformer block over one set of tokens, `[n, d]` -> `[n, d]`."""

    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv, self.mix = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(_normal(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)  # each [heads, n, d]
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(_normal(x))))


def _normal(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:])


def to_grid(coarse: Tensor, scale: int, h: int, w: int) -> Tensor:
    """The glance's values `[..., n]`, in raster order at one scale, on the native grid: `[..., h, w]`, bilinear."""
    rows, columns = -(-h // scale), -(-w // scale)
    maps = coarse.reshape(1, -1, rows, columns)
    maps = F.interpolate(maps, size=(rows * scale, columns * scale), mode="bilinear")[..., :h, :w]
    return maps.reshape(*coarse.shape[:-1], h, w)
