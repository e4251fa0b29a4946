"""The same training configured by LightningCLI.

horovodrun -np 4 python examples/cli.py fit --config examples/config.yaml
torchrun --nproc-per-node 4 examples/cli.py fit --config examples/config.yaml
"""

from __future__ import annotations

import os
import sys

from pytorch_lightning.cli import LightningCLI

import lightning_dsgd  # noqa: F401  # registers the strategies' names

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from digits import Classifier, Digits

if __name__ == "__main__":
    LightningCLI(Classifier, Digits, save_config_callback=None)
