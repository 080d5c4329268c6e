"""A small BERT-style encoder for masked language modelling.

J. Devlin et al.: BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding, 2019.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

PADDING = 0  # the token id of [PAD]


class Bert(nn.Module):
    """Encoder from tokens, int64 (n, t), to logits (n, t, vocabulary). The output layer shares the embedding's weights.

    Dropout is off by default: its random numbers differ between ranks, so results would depend on the world size.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        feedforward: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the logits (n, t, vocabulary) of all positions. Attention ignores [PAD]."""
        hidden = self.norm(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        hidden = self.encoder(hidden, src_key_padding_mask=tokens == PADDING)
        return functional.linear(hidden, self.embedding.weight, self.output_bias)
