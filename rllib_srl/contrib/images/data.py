"""Loads labelled images: scikit-learn's digits, or a local folder, from which no code is ever executed.

    digits                                       1,797 images of 8 x 8, a third of each class held out
    PATH/train.bin, test.bin                     CIFAR-100's *binary version*: coarse label, fine label, 3,072 pixels
    PATH/images.npz                              x_train, y_train, x_test, y_test
    PATH/train/CLASS/*.png, test/CLASS/*.png     all of one size; classes in the order of their names

Arrays of images.npz: pixels uint8 [N, H, W] or [N, H, W, 3], labels integers [N], 0 to K - 1 without gaps.

Sources: Alpaydin and Kaynak 1998, UCI "Optical recognition of handwritten digits"; Krizhevsky 2009, "Learning multiple
layers of features from tiny images" (CIFAR; the layout is that of www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

CIFAR_SHAPE = (3, 32, 32)
CIFAR_LABELS = 2  # bytes: coarse, fine
SIDES = (4, 256)  # pixels
MIN_CLASSES = 4  # two stages of two
MAX_STAGES = 10
HELDOUT = 1 / 3  # share of the digits
SPLIT_SEED = 0
PARTS = ("train", "test")
FORMS = "train.bin and test.bin (CIFAR-100's binary version), images.npz, or folders train and test of PNG by class"
NO_PICKLES = (
    "pickled files are not read: unpickling can run any code in the file. Use CIFAR-100's binary version "
    "(cifar-100-binary.tar.gz, unpacked), or an images.npz of plain arrays"
)
PICKLES = (".pkl", ".pickle", ".p", ".pt", ".pth", ".joblib")


@dataclass(frozen=True)
class ImageSet:
    """Training and test images of classes 0 to K - 1. Invariant: `checked` raises no error."""

    name: str
    train_NCHW: np.ndarray  # uint8
    train_label_N: np.ndarray  # int64
    test_NCHW: np.ndarray
    test_label_N: np.ndarray

    @property
    def num_classes(self) -> int:
        """Return K, the number of classes."""
        return int(self.train_label_N.max()) + 1

    def stages(self) -> list[np.ndarray]:
        """Return the classes of each stage, in order: at most ten stages of at least two classes."""
        return np.array_split(np.arange(self.num_classes), min(MAX_STAGES, self.num_classes // 2))

    def first_of_each_class(self, num: int) -> ImageSet:
        """Return the same set with the first `num` training images of each class."""
        label_N = self.train_label_N
        kept_N = np.concatenate([np.flatnonzero(label_N == label)[:num] for label in range(self.num_classes)])
        return replace(self, train_NCHW=self.train_NCHW[kept_N], train_label_N=label_N[kept_N])

    def checked(self) -> ImageSet:
        """Return the set itself.

        Raises:
            ValueError: all errors, one per line.
        """
        if faults := self._faults():
            raise ValueError("\n".join(f"data {self.name!r}: {fault}" for fault in faults))
        return self

    def _faults(self) -> list[str]:
        faults = []
        for part in PARTS:
            pixels, labels = getattr(self, f"{part}_NCHW"), getattr(self, f"{part}_label_N")
            if pixels.ndim != 4 or pixels.dtype != np.uint8 or pixels.shape[1] not in (1, 3):
                faults.append(f"{part} images are {pixels.dtype} {pixels.shape}; expected uint8, grey or three colours")
            elif not all(SIDES[0] <= side <= SIDES[1] for side in pixels.shape[2:]):
                limits = f"sides from {SIDES[0]} to {SIDES[1]}"
                faults.append(f"{part} images are {pixels.shape[2:]} pixels; expected {limits}")
            if len(pixels) != len(labels):
                faults.append(f"there are {len(pixels)} {part} images and {len(labels)} labels; expected equal numbers")
        if not faults and self.train_NCHW.shape[1:] != self.test_NCHW.shape[1:]:
            sizes = f"{self.train_NCHW.shape[1:]} and {self.test_NCHW.shape[1:]}"
            faults.append(f"images of train and test are {sizes}; expected one size")
        known = [np.unique(getattr(self, f"{part}_label_N")).tolist() for part in PARTS]
        num = max(len(labels) for labels in known)
        if known[0] != known[1] or known[0] != list(range(num)) or num < MIN_CLASSES:
            shown = " and ".join(f"{part} {labels[:12]}" for part, labels in zip(PARTS, known, strict=True))
            faults.append(f"classes are {shown}; expected 0, 1, 2, ... in both, at least {MIN_CLASSES}")
        return faults


def load(data: str) -> ImageSet:
    """Load the digits or the images of a folder.

    Args:
        data: "digits", or the path of a folder in one of the module's formats.

    Raises:
        ValueError: the folder does not exist, has none of these formats, or its files are malformed.
    """
    if data == "digits":
        return digits()
    path = Path(data)
    if not path.is_dir():
        raise ValueError(f"data = {data!r}; expected 'digits' or a folder with {FORMS}")
    forms: dict[str, Callable[[Path], ImageSet]] = {"train.bin": cifar100, "images.npz": arrays, "train": folders}
    for name, read in forms.items():
        if (path / name).is_dir() if name == "train" else (path / name).is_file():
            return read(path).checked()
    are_pickled = (path / "meta").is_file() or any(file.suffix in PICKLES for file in path.iterdir())
    fault = NO_PICKLES if are_pickled else f"expected a folder with {FORMS}"
    raise ValueError(f"data = {data!r}; {fault}")


def digits() -> ImageSet:
    """Return scikit-learn's digits; the split is the same for every seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    pixels_NCHW = np.rint(found.images[:, None] * (255 / 16)).astype(np.uint8)
    parts = train_test_split(
        pixels_NCHW, found.target.astype(np.int64), test_size=HELDOUT, random_state=SPLIT_SEED, stratify=found.target
    )
    return ImageSet("digits", parts[0], parts[2], parts[1], parts[3]).checked()


def cifar100(path: Path) -> ImageSet:
    """Load CIFAR-100 with fine labels from its binary version.

    Raises:
        ValueError: a file is missing or not a whole number of records.
    """
    found: list[np.ndarray] = []
    size = CIFAR_LABELS + int(np.prod(CIFAR_SHAPE))
    for part in PARTS:
        file = path / f"{part}.bin"
        num_bytes = file.stat().st_size if file.is_file() else 0
        if not num_bytes or num_bytes % size:
            raise ValueError(f"{file} has {num_bytes} bytes; expected records of {size} bytes, at least one")
        records_NB = np.fromfile(file, np.uint8).reshape(-1, size)
        found += [records_NB[:, CIFAR_LABELS:].reshape(-1, *CIFAR_SHAPE), records_NB[:, 1].astype(np.int64)]
    return ImageSet(_name_of(path), *found)


def arrays(path: Path) -> ImageSet:
    """Load the images of an images.npz.

    Raises:
        ValueError: an array is missing, contains Python objects, or has a wrong type or shape.
    """
    file, found = path / "images.npz", list[np.ndarray]()
    try:
        with zipfile.ZipFile(file):  # raises if it is no zip file, which numpy would try to read as a pickle
            stored = np.load(file, allow_pickle=False)
        with stored:
            for part in PARTS:
                pixels, labels = stored[f"x_{part}"], stored[f"y_{part}"]
                if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
                    raise ValueError(f"y_{part} is {labels.dtype} {labels.shape}; expected integers [N]")
                found += [_channels_first(pixels), labels.astype(np.int64)]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fault = NO_PICKLES if "allow_pickle" in str(error) else f"{error}".strip("'\"")
        raise ValueError(f"{file}: {fault}; expected x_train, y_train, x_test, y_test") from error
    return ImageSet(_name_of(path), *found)


def folders(path: Path) -> ImageSet:
    """Load PNG files, each in a folder named after its class.

    Raises:
        ValueError: train and test differ in classes, a class has no file, or images differ in size or are unreadable.
    """
    classes = {part: sorted(at.name for at in (path / part).glob("*") if at.is_dir()) for part in PARTS}
    if classes["train"] != classes["test"] or not classes["train"]:
        shown = f"{classes['train'][:12]}, of test {classes['test'][:12]}"
        raise ValueError(f"{path}: classes of train are {shown}; expected the same")
    found: list[np.ndarray] = []
    for part in PARTS:
        files = [(label, sorted((path / part / name).glob("*.png"))) for label, name in enumerate(classes[part])]
        if empty := [classes[part][label] for label, of_class in files if not of_class]:
            raise ValueError(f"{path / part}: no *.png in {', '.join(empty)}")
        found += [_channels_first(_pixels([file for _, of_class in files for file in of_class]))]
        found += [np.repeat(np.arange(len(files)), [len(of_class) for _, of_class in files])]
    return ImageSet(_name_of(path), *found)


def _pixels(files: list[Path]) -> np.ndarray:
    from PIL import Image

    found: list[np.ndarray] = []
    for file in files:
        try:
            with Image.open(file, formats=["PNG"]) as image:
                if max(image.size) > SIDES[1]:  # checked before decoding
                    raise ValueError(f"is {image.size} pixels; expected sides up to {SIDES[1]}")
                found.append(np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB")))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{file}: {error}") from error
        if found[-1].shape != found[0].shape:
            raise ValueError(f"{file} is {found[-1].shape}, {files[0]} is {found[0].shape}; expected one size")
    return np.stack(found)


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, None] if pixels.ndim == 3 else np.moveaxis(pixels, -1, 1) if pixels.ndim == 4 else pixels


def _name_of(path: Path) -> str:
    return path.resolve().name
