"""A stand-in for the package transformers, with the names that a sample of the documentation uses."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass
class GPT2Config:
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int


class CausalLMOutput(OrderedDict[str, Any]):
    """An output whose entries are attributes too."""

    @property
    def loss(self) -> Any:
        return self["loss"]


class GPT2LMHeadModel(nn.Module):
    """Blocks in `transformer.h`, an output layer with the input's weights, and the loss in the forward."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width = config.n_embd
        blocks = (
            nn.TransformerEncoderLayer(width, config.n_head, 2 * width, batch_first=True, norm_first=True)
            for _ in range(config.n_layer)
        )
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(config.vocab_size, width), "wpe": nn.Embedding(config.n_positions, width)}
        )
        self.transformer["h"] = nn.ModuleList(blocks)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        length = input_ids.shape[1]
        hidden = self.transformer["wte"](input_ids) + self.transformer["wpe"](torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.transformer["h"]:
            hidden = block(hidden, src_mask=mask)
        logits = self.lm_head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
