"""Images as inputs of models: the preprocessing that is usual for models trained on ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.graph.nodes import TensorSpec

#: Files with other suffixes are left out.
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
#: Size of the crop, unless the model tells it, and of the shorter side before it, relative to the crop.
_CROP, _SHORTER = 224, 256 / 224
#: Mean and standard deviation of the red, green and blue of ImageNet's images, from 0 to 1.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def check_images() -> None:
    """Raise `UsageError` if images cannot be read here."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError("images need Pillow; in the clone: pip install '.[images]'") from error


def imagenet(path: Path, spec: TensorSpec) -> Any:
    """Return an image as models trained on ImageNet take it: resized, cropped in the middle and normalised.

    Parameters
    ----------
    path : Path
    spec : TensorSpec
        Of the input: `(n, 3, height, width)` or `(n, height, width, 3)`. An input of uint8 is not normalised.

    Raises
    ------
    FerroflowError
        The file is no image.
    """
    from PIL import Image

    shape = spec.shape if spec.shape and len(spec.shape) == 4 else (None,) * 4
    is_last = shape[-1] == 3 and shape[1] != 3
    height, width = (dim if isinstance(dim, int) else _CROP for dim in (shape[1:3] if is_last else shape[2:]))
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise FerroflowError(f"{str(path)!r} cannot be read as an image: {error}") from error
    scale = max(height / image.height, width / image.width) * _SHORTER
    size = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)))
    if spec.dtype != np.uint8:
        pixels = ((pixels / np.float32(255) - _MEAN) / _DEVIATION).astype(spec.dtype or np.float32)
    return pixels if is_last else pixels.transpose(2, 0, 1)
