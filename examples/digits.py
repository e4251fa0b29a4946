"""Handwritten digits from scikit-learn, and a small network: what the examples and tests train."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningDataModule):
    """1,797 images of 8 x 8 pixels; a fixed fifth of them is for validation."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        bunch = load_digits()
        images = torch.tensor(bunch.data, dtype=torch.float32) / 16
        labels = torch.tensor(bunch.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        cut = len(labels) // 5
        self.validation = TensorDataset(images[order[:cut]], labels[order[:cut]])
        self.training = TensorDataset(images[order[cut:]], labels[order[cut:]])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=512)


class Classifier(pl.LightningModule):
    """Two hidden layers, SGD with momentum."""

    def __init__(self, width: int = 128, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True, prog_bar=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum
        )
