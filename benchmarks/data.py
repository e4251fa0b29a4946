"""The data of the benchmarks: scikit-learn's digits, Fashion-MNIST from Debian's package, noise."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

FASHION = Path("/usr/share/datasets/fashion-mnist")
Pair = tuple[TensorDataset, TensorDataset]


def digits() -> Pair:
    """1,797 images of 8 x 8; a fixed fifth is for validation."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) // 5
    held, kept = order[:cut], order[cut:]
    return TensorDataset(images[kept], labels[kept]), TensorDataset(images[held], labels[held])


def fashion() -> Pair:
    """60,000 and 10,000 images of 28 x 28 (Debian's package dataset-fashion-mnist)."""
    return _fashion("train"), _fashion("t10k")


def _fashion(part: str) -> TensorDataset:
    folder = next((f for f in [FASHION, *Path("/usr/share").glob("*fashion*")] if f.is_dir()), None)
    if folder is None:
        raise SystemExit("Fashion-MNIST is missing: apt-get install dataset-fashion-mnist")
    images = _idx(next(folder.rglob(f"{part}-images*")), 16).reshape(-1, 784)
    labels = _idx(next(folder.rglob(f"{part}-labels*")), 8)
    return TensorDataset(
        (torch.tensor(images, dtype=torch.float32) / 255 - 0.2860) / 0.3530,
        torch.tensor(labels, dtype=torch.long),
    )


def _idx(path: Path, header: int) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return np.frombuffer(raw, dtype=np.uint8, offset=header)


def noise(rows: int = 8192, width: int = 64) -> Pair:
    """Nothing to learn; for measuring time."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, width, generator=generator)
    labels = torch.randint(10, (rows,), generator=generator)
    data = TensorDataset(images, labels)
    return data, data


SOURCES = {"digits": digits, "fashion": fashion, "noise": noise}
