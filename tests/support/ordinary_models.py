"""Models and optimizers that people train, small: transformers, a vision transformer, tied embeddings, units
that are dead, weights that sparse gradients and autocast reach."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dcpbench.workloads.workload import Workload

TOKENS, WIDTH, HEADS, LENGTH, SAMPLES = 32, 16, 4, 8, 8


class Attention(nn.Module):
    """Causal self-attention with a projection each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a tensor of shape (batch, length, width) to another."""
        heads = [
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(seen.transpose(1, 2).flatten(-2))


class PackedAttention(nn.Module):
    """The same with one projection for all three."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a tensor of shape (batch, length, width) to another."""
        query, key, value = self.packed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a tensor of shape (batch, length, width) to another."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A decoder over token ids, its head the embedding's weight if `tied`."""

    def __init__(self, attention: type[nn.Module], tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token ids of shape (batch, length) to logits of shape (batch, length, tokens)."""
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    """A classifier of images of 8 by 8 pixels, by patches of 4 by 4 and a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.label = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block(Attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images of shape (batch, 3, 8, 8) to logits of shape (batch, 10)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.label.expand(len(images), -1, -1), patches], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class DeadUnits(nn.Module):
    """A perceptron, half of whose hidden units no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 4)
        with torch.no_grad():
            self.up.bias[:WIDTH] = -100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape (batch, width) to one of shape (batch, 4)."""
        return self.down(F.relu(self.up(x)))


def tokens(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Ids of shape (samples, length), drawn as words are, a few often and many seldom."""
    often = 1 / torch.arange(1, TOKENS + 1, device="cpu")
    ids = torch.multinomial(often.expand(SAMPLES, -1), LENGTH + 1, replacement=True, generator=generator)
    return {"ids": ids[:, :-1], "next": ids[:, 1:]}


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(SAMPLES, 3, 8, 8, generator=generator, device="cpu")
    return drawn, torch.randint(10, (SAMPLES,), generator=generator, device="cpu")


def vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.rand(SAMPLES, WIDTH, generator=generator, device="cpu")
    return drawn, torch.randint(4, (SAMPLES,), generator=generator, device="cpu")


def of_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).float().flatten(0, 1), batch["next"].flatten())


def of_classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def in_autocast(loss: object, model: nn.Module, batch: object) -> torch.Tensor:
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        return loss(model, batch)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [one for name, one in model.named_parameters() if "blocks" in name and one.ndim == 2]
    taken = {id(one) for one in matrices}
    others = [one for one in model.parameters() if id(one) not in taken]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "muon": muon,
}
MODELS = {
    "separate": lambda: (LanguageModel(Attention, tied=False), tokens, of_tokens),
    "packed": lambda: (LanguageModel(PackedAttention, tied=False), tokens, of_tokens),
    "tied": lambda: (LanguageModel(Attention, tied=True), tokens, of_tokens),
    "vit": lambda: (VisionTransformer(), images, of_classes),
    "dead": lambda: (DeadUnits(), vectors, of_classes),
}


def build(model: str, optimizer: str, autocast: bool = False) -> Workload:
    """A model and an optimizer by their names."""
    made, batch, loss = MODELS[model]()
    return Workload(made, batch, partial(in_autocast, loss) if autocast else loss, OPTIMIZERS[optimizer])
