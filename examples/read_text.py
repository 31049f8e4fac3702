"""Read the text in an image with RapidOCR's three models on a Dask cluster.

    python read_text.py IMAGE  # needs: pip install rapidocr-onnxruntime

RapidOCR prepares the image and decodes the results. The workers compute the batches of the three models.
"""

import sys
from pathlib import Path
from typing import Any

import dask.array as da
from distributed import Client

import ferroflow_dask


class OnCluster:
    """Replacement for RapidOCR's onnxruntime session: computes on the cluster."""

    def __init__(self, session: Any, path: Path, client: Client) -> None:
        self._session = session  # knows the characters
        self._model = ferroflow_dask.load_onnx(path).scatter(client)
        self._client = client

    def __call__(self, x: Any) -> list[Any]:
        """Return the outputs of the session, computed in batches of two rows."""
        parts = [x[i : i + 2] for i in range(0, len(x), 2)]
        there = self._client.scatter(parts)
        arrays = [
            da.from_delayed(future, part.shape, part.dtype) for future, part in zip(there, parts, strict=True)
        ]
        return [self._client.compute(self._model.map_batches(da.concatenate(arrays))).result()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def main(image: str) -> None:
    try:
        import rapidocr_onnxruntime
    except ImportError:
        sys.exit("the models come with RapidOCR: pip install rapidocr-onnxruntime")
    folder = Path(rapidocr_onnxruntime.__file__).parent / "models"
    engine = rapidocr_onnxruntime.RapidOCR()
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        ferroflow_dask.install(client)
        find, turn, read = engine.text_det, engine.text_cls, engine.text_rec
        find.infer = OnCluster(find.infer, folder / "ch_PP-OCRv4_det_infer.onnx", client)
        turn.infer = OnCluster(turn.infer, folder / "ch_ppocr_mobile_v2.0_cls_infer.onnx", client)
        read.session = OnCluster(read.session, folder / "ch_PP-OCRv4_rec_infer.onnx", client)
        found, _ = engine(image)
    for _, text, score in found or []:
        print(f"{text} ({float(score):.0%})")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python read_text.py IMAGE")
    main(sys.argv[1])
