"""Peak memory of a rank under DC-S3GD, beyond plain training, in units of the model's size.

python -m benchmarks.memory --report
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import execute, launcher_line, options, report, table

WIDTH, LAYERS = 2048, 8
KINDS: dict[str, dict[str, Any] | None] = {
    "plain training": None,
    "dc_s3gd": {},
    "dc_s3gd, lambda0=0": {"lambda0": 0.0},
    "dc_s3gd, wire='fp16'": {"wire": "fp16"},
}
SMOKE_KINDS, SMOKE_WIDTH = ["plain training", "dc_s3gd"], 64


def measure(kind: str, width: int) -> int:
    """Peak memory of a fresh process of that kind; with two ranks, of rank 1."""
    start = [sys.executable] if KINDS[kind] is None else launcher_line("torchrun", 2)
    with tempfile.NamedTemporaryFile() as file:
        sizes = [str(width), str(LAYERS)]
        program = ["-m", "benchmarks.memory_worker", json.dumps(KINDS[kind]), *sizes, file.name]
        execute([*start, *program])
        return int(json.loads(Path(file.name).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true")
    given: Any = options(parser)
    kinds, width = (SMOKE_KINDS, SMOKE_WIDTH) if given.smoke else (list(KINDS), WIDTH)
    text, data = summary({kind: measure(kind, width) for kind in kinds}, width)
    title, command = "DC-S3GD: memory per rank", "python -m benchmarks.memory --report"
    report("dc_s3gd_memory", title, command, text, data, write=given.report)


def summary(peaks: dict[str, int], width: int) -> tuple[str, dict[str, int]]:
    """Each kind's peak, and by how many models it is above that of plain training."""
    model = LAYERS * (width * width + width) * 4
    plain = peaks["plain training"]
    rows = [
        [kind, f"{peak / 2**20:.0f}", f"{(peak - plain) / model:+.2f}"]
        for kind, peak in peaks.items()
    ]
    text = table(["2 ranks, torch", "peak MiB per rank", "beyond plain, in model sizes"], rows)
    text += (
        f"\n\nA model of {model / 2**20:.0f} MiB, SGD with momentum; resident memory of the whole "
        "process, so the collectives' own buffers are in it."
    )
    return text, {"model": model, **peaks}


if __name__ == "__main__":
    main()
