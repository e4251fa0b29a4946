"""Train on digits while one of the workers is ten times slower.

horovodrun -np 4 python examples/train.py
torchrun --nproc-per-node 4 examples/train.py
python examples/train.py --devices 4
"""

from __future__ import annotations

import argparse
import os
import sys

import pytorch_lightning as pl

import lightning_dsgd  # registers the strategies' names

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from digits import Classifier, Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--strategy", default="backup_workers", help="any installed strategy's name"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.0, help="amplifies stale gradients")
    parser.add_argument("--devices", default="auto", help="workers to start on this machine")
    parser.add_argument("--slow", type=float, default=10.0, help="how much slower the last rank is")
    arguments = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_epochs=arguments.epochs,
        callbacks=[lightning_dsgd.Stragglers().slow(rank=-1, factor=arguments.slow)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(lr=arguments.lr, momentum=arguments.momentum), Digits())
    accuracy = float(trainer.callback_metrics["val_accuracy"])
    if trainer.is_global_zero:
        print(f"accuracy {accuracy:.3f} after {trainer.global_step} updates")
        tally = getattr(trainer.strategy, "tally", None)
        if tally is not None:
            print(tally.table())


if __name__ == "__main__":
    main()
