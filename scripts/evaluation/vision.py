"""Vision workloads on Fashion-MNIST: a residual CNN, a VGG, a ViT, AlexNet, LeNet-5 and logistic regression.

The data is Debian's package `dataset-fashion-mnist`: four gzipped idx files, 31 MB.
"""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evaluation.models import ViT
from evaluation.workloads import Plan, Workload, cache_directory, register, seeded

PACKAGE = "dataset-fashion-mnist"
ENVIRONMENT = "DSQ_FASHION_MNIST"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
FILES = tuple(f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CLASSES, SIDE = 10, 28
MEAN, DEVIATION = 0.2860, 0.3530
"""Of all pixels of the training images, divided by 255."""
SHIFT = 2
"""Pixels that an augmented image moves at most, in each direction."""
HELD_OUT_ROWS = 100


class DataMissingError(RuntimeError):
    """Fashion-MNIST is not here and could not be fetched; the message says what to do."""


class Images(NamedTuple):
    """Images as uint8 of `(count, 28, 28)` and their classes."""

    images: np.ndarray
    labels: np.ndarray


def find_data() -> Path | None:
    """Return a directory that holds the four files, without fetching anything; None if there is none.

    Raises:
        DataMissingError: The environment variable names a directory without them.
    """
    named = os.environ.get(ENVIRONMENT)
    if named and not _holds_data(Path(named)):
        raise DataMissingError(f"{ENVIRONMENT} is {named}, which does not hold {', '.join(FILES)}")
    places = [Path(named)] if named else [INSTALLED, _cached()]
    return next(filter(_holds_data, places), None)


def fetch_data() -> Path:
    """Fetch Debian's package by apt, without installing it, into the cache, and return the directory there.

    Raises:
        DataMissingError: That is not possible here.
    """
    target = _cached()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside the cache, since only a rename within a file system is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        directory = Path(name)
        _command(["apt-get", "download", PACKAGE], directory)
        packages = list(directory.glob("*.deb"))
        if len(packages) != 1:
            raise DataMissingError(_advice(f"apt-get download left {len(packages)} packages"))
        _command(["dpkg-deb", "-x", packages[0].name, "."], directory)
        extracted = directory / INSTALLED.relative_to("/")
        if not _holds_data(extracted):
            raise DataMissingError(_advice(f"{packages[0].name} does not hold the expected files"))
        target.mkdir(exist_ok=True)
        for file in FILES:
            (extracted / file).replace(target / file)
    return target


@cache
def load_data() -> tuple[Images, Images]:
    """Return training and test images; fetches them if they are nowhere to be found."""
    directory = find_data() or fetch_data()
    train, test = (
        Images(read_idx(directory / images), read_idx(directory / labels)) for images, labels in (FILES[:2], FILES[2:])
    )
    for split, count in ((train, 60_000), (test, 10_000)):
        if split.images.shape != (count, SIDE, SIDE) or split.labels.shape != (count,):
            shapes = f"{split.images.shape} and {split.labels.shape}"
            raise DataMissingError(_advice(f"{directory} holds arrays of {shapes}"))
    return train, test


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped idx file of unsigned bytes: 0, 0, type 8, dimensions; their sizes; the data."""
    try:
        content = gzip.decompress(path.read_bytes())
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except (gzip.BadGzipFile, EOFError, zlib.error, struct.error) as error:
        raise DataMissingError(_advice(f"{path} is damaged: {error}")) from error
    data = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    if zeros != 0 or kind != 8 or data.size != np.prod(shape):
        raise DataMissingError(_advice(f"{path} is not an idx file of bytes"))
    return data.reshape(shape)


def _cached() -> Path:
    return cache_directory() / "fashion-mnist"


def _holds_data(directory: Path) -> bool:
    return all((directory / file).is_file() for file in FILES)


def _command(arguments: list[str], directory: Path) -> None:
    if shutil.which(arguments[0]) is None:
        raise DataMissingError(_advice(f"{arguments[0]} is not here"))
    done = subprocess.run(arguments, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise DataMissingError(_advice(f"{' '.join(arguments)} failed: {done.stderr.strip()}"))


def _advice(problem: str) -> str:
    return (
        f"Fashion-MNIST cannot be had: {problem}. Install Debian's package {PACKAGE} (apt-get update first), or put "
        f"{', '.join(FILES)} into a directory and name it in {ENVIRONMENT}"
    )


class VisionWorkload(Workload):
    """A classifier of Fashion-MNIST; loss in nats per image."""

    def __init__(
        self, name: str, plan: Plan, seed: int, build: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer], augment: bool = False, held_out: int = 10_000,
    ) -> None:
        with seeded(seed):
            model = build()
        own_optimizer = optimizer(model.parameters(), lr=plan.rate)
        self.images, test = load_data()
        self.test = Images(test.images[:held_out], test.labels[:held_out])
        self.augment = augment
        super().__init__(name, plan, seed, model, own_optimizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return images drawn from the training split, flipped and shifted if the workload augments."""
        generator = np.random.default_rng((self.seed, step))
        chosen = generator.integers(0, len(self.images.labels), size=self.plan.batch_size)
        images = self.images.images[chosen]
        if self.augment:
            images = _flip_and_shift(images, generator)
        return _normalised(images), torch.from_numpy(self.images.labels[chosen].astype(np.int64))

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the first images of the test split, unchanged."""
        for first in range(0, len(self.test.labels), HELD_OUT_ROWS):
            rows = slice(first, first + HELD_OUT_ROWS)
            yield _normalised(self.test.images[rows]), torch.from_numpy(self.test.labels[rows].astype(np.int64))

    def data_checksum(self) -> int:
        """Return the checksum of all images and labels used."""
        checksum = 0
        for array in (*self.images, *self.test):
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
        return checksum


def _normalised(images: np.ndarray) -> Tensor:
    """Return uint8 `(count, 28, 28)` as floats `(count, 1, 28, 28)` of about mean 0 and deviation 1."""
    return torch.from_numpy(images[:, None].astype(np.float32)).div_(255).sub_(MEAN).div_(DEVIATION)


def _flip_and_shift(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Mirror half of the images and shift each by up to `SHIFT` pixels; pixels beyond a border are background."""
    count = len(images)
    flipped = np.where(generator.random(count)[:, None, None] < 0.5, images[:, :, ::-1], images)
    padded = np.pad(flipped, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(1, 2))
    down, right = generator.integers(0, 2 * SHIFT + 1, size=(2, count))
    shifted: np.ndarray = windows[np.arange(count), down, right]
    return shifted


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, before, side, side)` to `(batch, after, side / stride, side / stride)`."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 of a quarter width, 0.7 million parameters; its stem halves the image, so one core trains it fast."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        layers: list[nn.Module] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(ResidualBlock(before, width, stride=2 if stage and not block else 1))
                before = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(batch, 10)` of images `(batch, 1, 28, 28)`."""
        y = self.blocks(torch.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class VGG(nn.Sequential):
    """VGG of a quarter width with BatchNorm: six convolutions, and pooling as far as 28 pixels have room for it."""

    WIDTHS = (16, 32, 64, 64, 128, 128)
    POOLED = (0, 1, 3, 5)
    """Convolutions, by number, that pooling follows."""

    def __init__(self, hidden: int = 512) -> None:
        layers: list[nn.Module] = []
        before = 1
        for number, width in enumerate(self.WIDTHS):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number in self.POOLED else []
            before = width
        layers += [nn.Flatten(), nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        super().__init__(*layers, nn.Linear(hidden, CLASSES))


class AlexNet(nn.Sequential):
    """AlexNet of an eighth of the width for small images: five convolutions, overlapping pooling, three linear layers.

    Without dropout, so that a step is a function of its number; He's initial weights take a run past its plateau fast.
    """

    def __init__(self, hidden: int = 256) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
            nn.Conv2d(48, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
            nn.Flatten(), nn.Linear(128, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")


class LeNet5(nn.Sequential):
    """LeNet-5 of 61,706 parameters, with ReLU and max pooling."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
        )


class LogisticRegression(nn.Sequential):
    """Multinomial logistic regression on pixels: 784 x 10 weights and a bias."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))


@register("resnet")
def resnet(name: str, seed: int) -> Workload:
    """Make the residual CNN. It augments, and evaluates on a part of the test images, which keeps that fast."""
    plan = Plan(steps=1600, checkpoint_every=100, batch_size=64, rate=0.1, warm_up=50)
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4)
    return VisionWorkload(name, plan, seed, ResNet, sgd, augment=True, held_out=2000)


@register("vit")
def vit(name: str, seed: int) -> Workload:
    """Make a ViT of 0.8 million parameters with AdamW, evaluated on a part of the test images."""
    plan = Plan(steps=400, checkpoint_every=20, batch_size=64, rate=1e-3, warm_up=40, floor=0.1, clip=1.0)
    adam = partial(torch.optim.AdamW, betas=(0.9, 0.999), weight_decay=0.05)
    return VisionWorkload(name, plan, seed, ViT, adam, augment=True, held_out=2000)


class RotationWorkload(VisionWorkload):
    """Which of four ways an image of Fashion-MNIST is turned; loss in nats per image."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return images of the training split, turned by multiples of 90 degrees."""
        return _turned(super().batch(step)[0], step + self.seed)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the first images of the test split, turned the same each time."""
        for number, (images, _) in enumerate(super().held_out()):
            yield _turned(images, number)


def _turned(images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return images `(count, 1, 28, 28)`, each turned, and by how many quarters."""
    quarters = torch.from_numpy(np.random.default_rng((4, seed)).integers(0, 4, size=len(images)))
    turned = torch.stack([image.rot90(int(quarter), (1, 2)) for image, quarter in zip(images, quarters, strict=True)])
    return turned, quarters


@register("rotation")
def rotation(name: str, seed: int) -> Workload:
    """Make the ViT of `vit`, untrained, to tell how an image is turned, in half its steps at a third of its rate."""
    plan = Plan(steps=200, checkpoint_every=20, batch_size=64, rate=3e-4, warm_up=20, floor=0.1, clip=1.0)
    adam = partial(torch.optim.AdamW, betas=(0.9, 0.999), weight_decay=0.05)
    return RotationWorkload(name, plan, seed, partial(ViT, classes=4), adam, augment=True, held_out=2000)


@register("vgg")
def vgg(name: str, seed: int) -> Workload:
    """Make a VGG of 0.6 million parameters with Adam, evaluated on a part of the test images."""
    plan = Plan(steps=400, checkpoint_every=20, batch_size=64, rate=1e-3, warm_up=40, floor=0.1)
    return VisionWorkload(name, plan, seed, VGG, torch.optim.Adam, augment=True, held_out=2000)


@register("lenet")
def lenet(name: str, seed: int) -> Workload:
    """Make LeNet-5."""
    sgd = partial(torch.optim.SGD, momentum=0.9)
    return VisionWorkload(name, Plan(800, 50, batch_size=64, rate=0.05), seed, LeNet5, sgd, held_out=5000)


@register("alexnet")
def alexnet(name: str, seed: int) -> Workload:
    """Make a small AlexNet of 0.16 million parameters."""
    sgd = partial(torch.optim.SGD, momentum=0.9)
    return VisionWorkload(name, Plan(800, 50, batch_size=64, rate=0.02), seed, AlexNet, sgd, held_out=5000)


@register("mlr")
def mlr(name: str, seed: int) -> Workload:
    """Make the logistic regression: convex, so that degradation of training shows without the noise of a landscape."""
    plan = Plan(800, 50, batch_size=64, rate=0.05, floor=1.0)
    return VisionWorkload(name, plan, seed, LogisticRegression, torch.optim.SGD)
