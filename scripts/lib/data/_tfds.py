"""A program: write what TensorFlow Datasets holds of a dataset, in its order, to an npz file.

    python _tfds.py NAME OUTPUT.npz [DOWNLOAD_FOLDER]

With a folder, the dataset is first downloaded there. A process of its own can be stopped, and its
TensorFlow takes no GPU memory from another backend.
"""

import sys

import numpy as np


def arrays(name: str, download: str | None = None) -> dict[str, np.ndarray]:
    """Return images and labels by split, in the order of the records on disk."""
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=download)
    if download is not None:
        tfds.disable_progress_bar()
        builder.download_and_prepare()
    # One shard after another: by default, records of several are interleaved.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    found = {}
    for split in ("train", "test"):
        records = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1, read_config=order))
        found[f"x_{split}"] = records["image"]
        found[f"y_{split}"] = records["label"].astype(np.int32)
    return found


if __name__ == "__main__":
    try:
        found = arrays(sys.argv[1], *sys.argv[3:])
    except Exception as error:  # the caller wants the reason in one line, not a traceback
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    np.savez(sys.argv[2], **found)
