"""Rows `images-1-host` and `images-2-hosts`: offload on a folder of images, of which it decodes the crop's region alone."""

import os
import tempfile
from pathlib import Path

from torchvision.transforms import v2

import offload
from benchmarks.raw_images import IMAGE_SIZE, labelled_files
from benchmarks.rows import offload_row, protocol


def folder_of(task: protocol.Task, root: Path) -> Path:
    """A folder of exactly the task's samples: links to its files, over and over."""
    files, _ = labelled_files(protocol.folder(task))
    for number in range(task.samples):
        repeat, which = divmod(number, len(files))
        file = Path(files[which])
        to = root / file.parent.name / f"{repeat:04}-{file.name}"
        to.parent.mkdir(exist_ok=True)
        os.symlink(file, to)
    return root


def main() -> None:
    task = protocol.parse()
    transform = v2.Compose([v2.RandomResizedCrop(IMAGE_SIZE, antialias=True), v2.RandomHorizontalFlip()])
    with tempfile.TemporaryDirectory() as root:
        offload_row.run(task, offload.image_folder(folder_of(task, Path(root)), transform))


if __name__ == "__main__":
    main()
