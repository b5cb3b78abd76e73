"""Small networks of the kinds that people train: decoders, experts, a BERT, an LSTM, a ViT, and adapters (LoRA).

Each has less than a million parameters, so that one core trains it for a few hundred steps within a minute or two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt import GPT, VOCAB
from torch import Tensor, nn

MASK = VOCAB
"""The token that stands for a masked byte."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a `Decoder`.

    Attributes:
        layers: Number of blocks.
        width: Size of the residual stream.
        heads: Query heads; divides `width`.
        groups: Key and value heads (grouped-query attention); divides `heads`.
        hidden: Size of the feed-forward layer, of each expert where there are several.
        experts: Feed-forward layers to route between; 1: none is routed.
        active: Experts that serve a token.
        masked: Bytes see those on both sides, and some are `MASK`, as in BERT; the blocks stay those of a Llama.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    groups: int = 2
    hidden: int = 352
    experts: int = 1
    active: int = 2
    masked: bool = False


class SwiGLU(nn.Module):
    """Gated feed-forward layer of Llama: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to the same shape."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class MixtureOfExperts(nn.Module):
    """Feed-forward layers of which a router picks a few for each token, weighed by their softmax (Mixtral)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.active = config.active
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config.width, config.hidden) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(self.active, dim=-1)
        weights = scores.softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return out.view_as(x)


class DecoderBlock(nn.Module):
    """Pre-norm block: grouped-query attention with rotary positions, then a feed-forward layer or a mixture of them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.head = config.heads, config.groups, config.width // config.heads
        self.causal = not config.masked
        self.norm_attention = nn.RMSNorm(config.width)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, self.groups * self.head, bias=False)
        self.value = nn.Linear(config.width, self.groups * self.head, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config.width, config.hidden) if config.experts == 1 else MixtureOfExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        batch, time, width = x.shape
        y = self.norm_attention(x)
        query = self.query(y).view(batch, time, self.heads, self.head).transpose(1, 2)
        key = self.key(y).view(batch, time, self.groups, self.head).transpose(1, 2)
        value = self.value(y).view(batch, time, self.groups, self.head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=self.causal, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    """Llama-like decoder over bytes: rotary positions, grouped-query attention, SwiGLU, a tied output layer."""

    def __init__(self, config: DecoderConfig | None = None) -> None:
        super().__init__()
        config = config or DecoderConfig()
        tokens = VOCAB + config.masked
        self.bytes = nn.Embedding(tokens, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, tokens, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, `(batch, time, 256)`, for int64 `tokens` of `(batch, time)`."""
        x = self.bytes(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


class MixedGPT(GPT):
    """A GPT with weights in fp32 that computes in bf16, as on a GPU."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, fp32, `(batch, time, 256)`, for int64 `tokens` of `(batch, time)`."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens).float()


class LSTM(nn.Module):
    """Two layers of LSTM over bytes."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCAB, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, `(batch, time, 256)`, for int64 `tokens` of `(batch, time)`."""
        logits: Tensor = self.head(self.layers(self.bytes(tokens))[0])
        return logits


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        y: Tensor = self.linear(x) + F.linear(F.linear(x, self.down), self.up) * self.scale
        return y


def with_adapters(model: nn.Module, layers: tuple[str, ...] = ("query", "key", "value", "output")) -> nn.Module:
    """Freeze a model, and put a `LoRA` in place of each linear layer of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in layers:
            if isinstance(linear := getattr(module, name, None), nn.Linear):
                setattr(module, name, LoRA(linear))
    return model


class ViT(nn.Module):
    """Vision transformer for images of 28 by 28 pixels, in patches of 7 by 7, with a class token."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `(batch, 10)` of images `(batch, 1, 28, 28)`."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)[:, 0]))
        return logits


class Bfloat16(nn.Module):
    """A module that computes in bfloat16 from float32 parameters, as FSDP2's mixed precision does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the module with its parameters cast; gradients reach the float32 ones."""
        cast = {name: value.bfloat16() for name, value in self.module.named_parameters()}
        result: Tensor = torch.func.functional_call(self.module, cast, inputs, tie_weights=True)
        return result


def _rotated(x: Tensor) -> Tensor:
    """Apply the rotary position embedding to `(batch, heads, time, size)`, halves paired as in Llama."""
    time, size = x.shape[-2:]
    rates = 10_000 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(time, device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1)
