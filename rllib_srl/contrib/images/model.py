"""A small image classifier for class-incremental learning, with a test of its recall of single images.

    pixels --shift, noise--> view --layers--> features_PD --one head for all classes--> log-probs

The classifier does not get the stage of an image: it always chooses among all classes (class-incremental).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

NOISE = 0.05  # standard deviation of the noise, for pixels in [0, 1]
SHIFT = 8  # a view is shifted by up to side / SHIFT pixels
SMALL = 16  # pixels; up to this side length the layers are dense
BLOCK = 512  # images evaluated at once


class Recalled(NamedTuple):
    """A classifier's predictions for G views each of P images, before it trains on them."""

    predicted_PG: np.ndarray  # predicted class
    logp_PG: np.ndarray  # log-prob of that class, nats
    features_PGD: np.ndarray


class Classifier:
    """Network, optimiser and random generators of training.

    Invariant: `recall` and `predict` change neither the network nor the generator of training.
    """

    def __init__(self, shape: tuple[int, ...], num_classes: int, num_hidden: int, lr: float, seed: int) -> None:
        """Initialise the network; its weights depend on the seed only.

        Args:
            shape: shape of an image: channels, height, width.
            num_classes: number of classes.
            num_hidden: D, units of the last hidden layer.
            lr: learning rate of plain gradient descent.
            seed: seed of weights and views.
        """
        streams = np.random.SeedSequence(seed).generate_state(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(streams[0]))
            self._features = _layers(shape, num_hidden)
            self._head = nn.Linear(num_hidden, num_classes)
        self._train_views, self._test_views = (torch.Generator().manual_seed(int(s)) for s in streams[1:])
        weights = [*self._features.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.SGD(weights, lr=lr)

    def train(self, pixels_PCHW: np.ndarray, label_P: np.ndarray) -> float:
        """Take one step on one view of each image; return the mean loss in nats."""
        logits_PK = self._head(self._features(_view(pixels_PCHW, self._train_views)))
        loss = functional.cross_entropy(logits_PK, torch.from_numpy(label_P))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def recall(self, pixels_PCHW: np.ndarray, num_views: int) -> Recalled:
        """Classify `num_views` random views of each image, drawn from a separate generator."""
        num = len(pixels_PCHW)
        views = _view(np.repeat(pixels_PCHW, num_views, axis=0), self._test_views)
        features_BD = self._features(views)
        logp_B, predicted_B = self._head(features_BD).log_softmax(dim=-1).max(dim=-1)
        return Recalled(
            predicted_B.numpy().reshape(num, num_views),
            logp_B.numpy().reshape(num, num_views),
            features_BD.numpy().reshape(num, num_views, -1),
        )

    @torch.no_grad()
    def predict(self, pixels_NCHW: np.ndarray) -> np.ndarray:
        """Return the predicted class of each image, without shift and noise."""
        blocks = [pixels_NCHW[at : at + BLOCK] for at in range(0, len(pixels_NCHW), BLOCK)]
        return np.concatenate([self._head(self._features(_floats(block))).argmax(dim=-1).numpy() for block in blocks])


def _layers(shape: tuple[int, ...], num_hidden: int) -> nn.Module:
    channels, height, width = shape
    if max(height, width) <= SMALL:
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_hidden), nn.ReLU())
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, num_hidden), nn.ReLU()),
    )


def _floats(pixels_PCHW: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels_PCHW).float() / 255


def _view(pixels_PCHW: np.ndarray, generator: torch.Generator) -> Tensor:
    """Return a random view of each image: shifted, the border filled with 0, with noise."""
    images = _floats(pixels_PCHW)
    num, channels, *sides = images.shape
    most = [max(1, side // SHIFT) for side in sides]
    padded = functional.pad(images, (most[1], most[1], most[0], most[0]))
    starts = [torch.randint(2 * m + 1, (num, 1), generator=generator) for m in most]
    rows_PH, columns_PW = (start + torch.arange(side) for start, side in zip(starts, sides, strict=True))
    at = torch.arange(num)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    moved = padded[(*at, rows_PH[:, None, :, None], columns_PW[:, None, None, :])]
    return moved + NOISE * torch.randn(moved.shape, generator=generator)
