"""`offload.DataLoader` in the place of torch's: two shuffled epochs of tensors, each sample once, in two orders."""

from pathlib import Path
from typing import Any

import offload
from benchmarks.matrix.programs.common import BATCH, SAMPLES, expect, run
from tests.emulation.numbers import Numbers


def program(folder: Path) -> dict[str, Any]:
    loader = offload.DataLoader(Numbers(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=1, address="local")
    epochs = [[float(x) for batch in loader for x in batch["x"][:, 0]] for _ in range(2)]
    for epoch in epochs:
        expect(sorted(round(x * SAMPLES) for x in epoch) == list(range(SAMPLES)), "a sample came twice, or never")
    expect(epochs[0] != epochs[1], "both epochs have one order")
    return {"samples": sum(map(len, epochs))}


if __name__ == "__main__":
    run(program)
