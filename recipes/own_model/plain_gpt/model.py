"""The model: pre-norm transformer blocks with a fixed table of positions.

TorchTitan asks three things of a model: that it can be built on the meta device, that ``init_weights`` fills it
afterwards, and, for pipeline parallelism, that it runs with any of its children missing.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import BaseModelArgs


@dataclass
class PlainGPTArgs(BaseModelArgs):
    dim: int = 128
    n_layers: int = 4
    n_heads: int = 8
    vocab_size: int = 2048
    max_seq_len: int = 2048

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        self.max_seq_len = job_config.training.seq_len

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and floating-point operations a token, forward and backward."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # The embedding is looked up, not multiplied; attention multiplies each token with seq_len others, twice.
        matrices = parameters - self.vocab_size * self.dim
        return parameters, 6 * matrices + 12 * self.n_layers * self.dim * seq_len


class Embedding(nn.Module):
    def __init__(self, args: PlainGPTArgs) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.dim)

    def forward(self, tokens: Tensor, table: Tensor, positions: Tensor | None) -> Tensor:
        return self.tokens(tokens) + (table[: tokens.size(1)] if positions is None else table[positions])


class Attention(nn.Module):
    def __init__(self, args: PlainGPTArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))
        # TorchTitan's wrapper: context parallelism takes hold of it.
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is left open: tensor parallelism gives each rank a part of them.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.inner_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args: PlainGPTArgs) -> None:
        super().__init__()
        self.up = nn.Linear(args.dim, 4 * args.dim, bias=False)
        self.down = nn.Linear(4 * args.dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, args: PlainGPTArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.feed_forward_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PlainGPT(nn.Module):
    def __init__(self, model_args: PlainGPTArgs) -> None:
        super().__init__()
        self.model_args = model_args
        self.embed: Embedding | None = Embedding(model_args)
        # A ModuleDict: blocks keep their numbers when a pipeline stage leaves others out.
        self.layers = nn.ModuleDict({str(number): Block(model_args) for number in range(model_args.n_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(model_args.dim)
        self.head: nn.Linear | None = nn.Linear(model_args.dim, model_args.vocab_size, bias=False)
        # Under this name TorchTitan 0.2.1 shards a table of positions together with the tokens.
        self.register_buffer("freqs_cis", self._table(), persistent=False)

    def _table(self) -> Tensor:
        """Sines and cosines, shape (max_seq_len, dim)."""
        args = self.model_args
        rates = torch.exp(torch.arange(0, args.dim, 2) * (-math.log(10000.0) / args.dim))
        angles = torch.outer(torch.arange(args.max_seq_len), rates)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        with torch.device(buffer_device or self.freqs_cis.device):
            self.freqs_cis = self._table()
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens (batch, sequence) to logits (batch, sequence, vocabulary); in a pipeline, hidden states between."""
        if self.embed is not None:
            x = self.embed(x, self.freqs_cis, positions)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)
